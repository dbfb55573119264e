"""The kernel, loaded as a user loads it, and how the `kernels` library chose the variant."""

import os
from pathlib import Path
from types import ModuleType

import kernels
from kernels.variants import VariantAccepted, get_variants_local, parse_variant, resolve_variants

REPO_ID = "org/geglu"
VERSION = 1

# What build.toml yields for other machines too: the library's verdict needs a variant's name, not its files.
PUBLISHED = (
    "torch-stable-abi210-cpu-x86_64-linux",
    "torch-stable-abi210-cu130-x86_64-linux",
    "torch-stable-abi210-cu126-x86_64-linux",
    "torch-stable-abi210-cpu-aarch64-linux",
    "torch-stable-abi210-cu130-aarch64-linux",
)


def load(root: Path) -> ModuleType:
    """Loads the kernel with `get_kernel`, from the builds under `root`/build instead of the Hub.

    Raises:
        FileNotFoundError: no build under `root` fits this Python, torch and machine; the message has the reasons.
    """
    overrides = [entry for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry]
    overrides = [entry for entry in overrides if not entry.startswith(f"{REPO_ID}=")]
    os.environ["LOCAL_KERNELS"] = ":".join([*overrides, f"{REPO_ID}={root}"])
    return kernels.get_kernel(REPO_ID, version=VERSION)


def loaded_variant(module: ModuleType) -> str:
    """The name of the variant that `module` was loaded from."""
    return Path(module.__file__).parent.name


def size_on_disk(module: ModuleType) -> int:
    """Bytes of all files of the loaded variant, Python's bytecode caches aside."""
    files = Path(module.__file__).parent.rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file() and "__pycache__" not in path.parts)


def verdicts(root: Path) -> list[tuple[str, bool, str | None]]:
    """What the library's resolver says of every variant that is built under `root` or published, accepted ones first.

    Returns:
        (name of the variant, whether it is built here, why it is refused or None if it fits) for each.
    """
    built = {variant.variant_str: variant for variant in get_variants_local(root / "build")}
    others = {name: parse_variant(name) for name in PUBLISHED if name not in built}
    _, trace = resolve_variants([*built.values(), *others.values()])
    return [
        (
            decision.variant.variant_str,
            decision.variant.variant_str in built,
            None if isinstance(decision, VariantAccepted) else decision.reason,
        )
        for decision in trace
    ]
