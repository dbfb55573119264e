"""Variants without a compiled library: the Python package alone, in Triton and torch's own operations.

They are the net under the compiled ones, for torch older than their stable ABI, other CUDA releases, ROCm and XPU.
kernel-builder makes compiled or noarch variants of one build.toml, never both, so these are this builder's alone. Their
names, ids, layout and metadata are those that kernel-builder gives to a [torch-noarch] package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from . import variant
from .check import check_variant
from .config import Package
from .errors import BuildError
from .objects import digest
from .runner import Progress
from .stage import OPS_TEMPLATE, ops_module, python_files
from .toolchain import hash_files

BACKENDS = ("cpu", "cuda", "rocm", "xpu")


def variant_name(backend: str) -> str:
    return f"torch-{backend}"


def build_noarch(package: Package, backend: str, build: Path, progress: Progress) -> Path:
    """Writes the noarch variant of a backend, or finds it up to date. After a BuildError the old one is still there."""
    name = variant_name(backend)
    files = python_files(package)
    variant_id = f"_{package.python_name}_{backend}_{_unique_id(package, name, files)}"
    place = build / name

    def write_metadata(directory: Path) -> bool:
        text = variant.metadata(package, backend, variant_id, None, directory, files)
        return variant.replace_text(directory / "metadata.json", text)

    if place.exists() and f"torch.ops.{variant_id}\n" in _text(place / "_ops.py") and not check_variant(place):
        refreshed = write_metadata(place)
        progress.say(f"{place}: up to date{', metadata refreshed' if refreshed else ''} ({variant_id})")
        return place

    def fill_in(directory: Path) -> None:
        for file in files:
            target = directory / Path(file).relative_to(package.python_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package.root / file, target)
        (directory / "_ops.py").write_text(ops_module(variant_id, has_library=False))
        write_metadata(directory)

    variant.make(build, name, fill_in)
    progress.say(f"{place}: built and checked ({variant_id})")
    return place


def _unique_id(package: Package, name: str, files: list[str]) -> str:
    """A hash of all that shapes the variant's digested bytes."""
    inputs = {
        "variant": name,
        "build.toml": package.toml_hash,
        "python": [(file, hash_files([package.root / file])) for file in files],
        "builder": hash_files([OPS_TEMPLATE]),
    }
    return digest(inputs)[: variant.ID_DIGITS]


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
