"""The package under test, found in the build folder and loaded the way a user loads it: through `kernels`."""

import os
from pathlib import Path
from types import ModuleType

import torch
from kernels import get_local_kernel
from kernels.variants import get_variants_local, resolve_variant

ROOT = Path(__file__).resolve().parents[1]

# A folder with a build/ folder in it. The mutation check points this at a mutated copy of the project.
REPO = Path(os.environ.get("GEGLU_REPO", ROOT)).resolve()

# The variant to test instead of the one that the loader would choose: "torch-cpu".
VARIANT = os.environ.get("GEGLU_VARIANT")

TESTS = Path(__file__).resolve().parent


def find_variant() -> tuple[Path, str | None] | None:
    """The folder of the variant that fits this torch and the `backend` to ask for, or None.

    A CUDA build of torch takes a CPU variant only when asked to, so that is tried second.
    """
    if VARIANT is not None:
        place = REPO / "build" / VARIANT
        return (place, None) if place.is_dir() else None
    variants = get_variants_local(REPO / "build")
    for backend in (None, "cpu"):
        variant, _ = resolve_variant(variants, backend)
        if variant is not None:
            return REPO / "build" / variant.variant_str, backend
    return None


def missing_build() -> str | None:
    """One line that says what to do when there is nothing to test, else None."""
    if find_variant() is not None:
        return None
    wanted = f"variant {VARIANT}" if VARIANT else f"variant for torch {torch.__version__}"
    return f"no {wanted} in {REPO / 'build'}: run `make build` first"


def repository() -> Path:
    """What `kernels` takes for this package's repository: the folder above build/, or the one variant to test."""
    return REPO / "build" / VARIANT if VARIANT else REPO


def load() -> ModuleType:
    """The loaded package. RuntimeError when there is no variant for this torch."""
    found = find_variant()
    if found is None:
        raise RuntimeError(missing_build())
    return get_local_kernel(repository(), backend=found[1])


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child that must find the same package and must stay off the network."""
    return {
        **os.environ,
        "GEGLU_REPO": str(REPO),
        "PYTHONPATH": str(TESTS),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **changes,
    }
