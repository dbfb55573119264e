"""The variant directory: its name, its content, its metadata, and how it appears: whole or not at all."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm

from . import BUILDER
from .check import check_variant
from .config import Package
from .cuda import Cuda
from .errors import BuildError
from .provenance import kernel_commit
from .stage import ops_module

_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
LIBRARY_SUFFIX = ".abi3.so"

# Seven digits, git's habit, would do for one repository's history; ids also have to differ between people's builds.
ID_DIGITS = 12

# Directories of unfinished and replaced variants. The loader takes no notice of them.
_UNFINISHED = ".unfinished-"


def variant_name(package: Package, backend: str, cuda: Cuda | None) -> str:
    machine = _MACHINES.get(platform.machine().lower())
    if machine is None or sys.platform != "linux":
        raise BuildError(f"variants are for Linux on x86_64 and aarch64, not {sys.platform} on {platform.machine()}")
    major, minor = package.stable_abi[backend]
    return f"torch-stable-abi{major}{minor}-{cuda.compute if backend == 'cuda' else backend}-{machine}-linux"


def metadata(
    package: Package, backend: str, variant_id: str, archs: list[str] | None, directory: Path, inputs: list[str]
) -> str:
    """The text of metadata.json for a directory that is otherwise complete: kernel-builder's keys in its order.

    `archs` is None for a backend or a kind of variant without any; `inputs` are the files it was made from.
    """
    hashed = Digest.hash_variant(DigestAlgorithm.SHA256, directory)
    kernel = kernel_commit(package.root, inputs)
    fields = {
        "name": package.name,
        "id": variant_id,
        "version": package.version,
        "license": package.license,
        "upstream": package.upstream,
        "source": package.source,
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend} | ({} if archs is None else {"archs": archs}),
        "digest": {"algorithm": str(hashed.algorithm), "files": dict(sorted(hashed.files.items()))},
        # The field is kernel-builder's, and the parser insists on it; the version says who really built this.
        "provenance": {"kernel-builder": {"version": BUILDER}} | ({"kernel": kernel} if kernel else {}),
    }
    return json.dumps({key: value for key, value in fields.items() if value is not None}, indent=2) + "\n"


def fill(python: Path, library: Path, directory: Path) -> None:
    """Puts all but the metadata into a directory: the Python package, _ops.py and the library, named by its id."""
    shutil.copytree(python, directory, dirs_exist_ok=True)
    (directory / "_ops.py").write_text(ops_module(library.name.removesuffix(LIBRARY_SUFFIX), has_library=True))
    shutil.copyfile(library, directory / library.name)


def replace_text(path: Path, text: str) -> bool:
    """Gives a file a new content in one step; False if it has that content already."""
    if path.exists() and path.read_text() == text:
        return False
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
    return True


@contextmanager
def unfinished(build: Path, name: str) -> Iterator[Path]:
    """An empty directory `name` below a hidden one on the file system of `build`; whatever is left of it goes away."""
    build.mkdir(parents=True, exist_ok=True)
    for leftover in build.glob(f"{_UNFINISHED}*"):  # of a build that was killed
        shutil.rmtree(leftover)
    hidden = Path(tempfile.mkdtemp(dir=build, prefix=_UNFINISHED))
    try:
        (hidden / name).mkdir()
        yield hidden / name
    finally:
        shutil.rmtree(hidden)


def make(build: Path, name: str, fill_in: Callable[[Path], None]) -> None:
    """Lets `fill_in` complete an empty directory, checks it, and puts it in its place.

    Raises BuildError for what fails its checks; then nothing was put anywhere.
    """
    with unfinished(build, name) as directory:
        fill_in(directory)
        if problems := check_variant(directory):
            raise BuildError("\n".join([f"{name} fails its checks and was not written:", *problems]))
        hand_over(directory, build)


def hand_over(finished: Path, build: Path) -> Path:
    """Moves a finished variant to its place; what was there is gone afterwards, or still there on failure."""
    place = build / finished.name
    replaced = finished.parent / "replaced"
    if place.exists():
        place.rename(replaced)
    try:
        finished.rename(place)
    except BaseException:
        if replaced.exists():
            replaced.rename(place)
        raise
    return place
