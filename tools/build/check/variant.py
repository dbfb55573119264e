"""Checks of a variant directory as a whole: its name, metadata, digest and id; library.py checks the library in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from kernels._rust import Digest, DigestValidationError, Metadata

from .elf import Library
from .library import check_library

_SIZE_LIMIT = 4 * 2**20

_NAME = re.compile(r"torch-stable-abi(\d)(\d+)-(cpu|cu(\d+)\d)-(x86_64|aarch64)-linux")
_NOARCH_NAME = re.compile(r"torch-(cpu|cuda|rocm|xpu)")


@dataclass(frozen=True)
class VariantName:
    """The parts of a variant directory's name that the content must agree with.

    `machine` and `stable_abi` are None for a noarch variant, which has no compiled library.
    """

    backend: str
    cuda_major: int | None = None
    machine: str | None = None
    stable_abi: tuple[int, int] | None = None

    @property
    def is_noarch(self) -> bool:
        return self.machine is None

    @classmethod
    def parse(cls, name: str) -> VariantName | None:
        if match := _NOARCH_NAME.fullmatch(name):
            return cls(match[1])
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        cuda_major = int(match[4]) if match[4] else None
        return cls("cuda" if cuda_major else "cpu", cuda_major, match[5], (int(match[1]), int(match[2])))


def check_variant(directory: Path) -> list[str]:
    """The problems of a variant, one line each; empty if there are none."""
    directory = directory.resolve()
    name = VariantName.parse(directory.name)
    if name is None:
        return [
            f"{directory.name} is no name of a stable-ABI variant (torch-stable-abi210-cpu-x86_64-linux) or a noarch "
            "one (torch-cuda)"
        ]
    try:
        metadata = Metadata.read_from_file(directory / "metadata.json")
    except (OSError, ValueError) as error:
        return [f"metadata.json: {error}"]

    problems = _check_digest(directory, metadata) + _check_bytecode(directory) + _check_size(directory)
    backend = str(metadata.backend.backend_type)
    if backend != name.backend:
        problems.append(f"metadata.json says backend {backend}, the directory's name {name.backend}")
    problems += _check_id(directory, metadata, backend, name.is_noarch)
    libraries = sorted(path.name for path in directory.rglob("*.so"))
    if name.is_noarch:
        archs = metadata.backend.archs
        problems += [f"the libraries are {libraries}, expected none in a noarch variant"] if libraries else []
        return problems + ([f"metadata.json declares {archs}, which a noarch variant has no code for"] if archs else [])
    if libraries != [f"{metadata.id}.abi3.so"]:
        return [*problems, f"the libraries are {libraries}, expected exactly {metadata.id}.abi3.so, named by the id"]
    path = directory / libraries[0]
    try:
        library = Library(path)
    except (ELFError, OSError) as error:
        return [*problems, f"{path.name}: {error}"]
    exported = library.exported()
    if exported != {f"PyInit_{metadata.id}"}:
        problems.append(f"{library.path.name} exports {sorted(exported)}, expected PyInit_{metadata.id} alone")
    declared = metadata.backend.archs or []
    return problems + [f"{path.name}: {problem}" for problem in check_library(library, name, declared)]


def _check_digest(directory: Path, metadata: Metadata) -> list[str]:
    if metadata.digest is None:
        return ["metadata.json has no digest"]
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, directory))
    except DigestValidationError as error:
        return [f"digest: {violation}" for violation in error.violations]
    return []


def _check_bytecode(directory: Path) -> list[str]:
    """Python imports a .pyc beside the sources as a module of its own, and the digest takes no notice of it."""
    stray = (path for path in sorted(directory.rglob("*.pyc")) if path.parent.name != "__pycache__")
    return [f"{path.relative_to(directory)} is bytecode without a source, which Python would import" for path in stray]


def _check_size(directory: Path) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    size = sum(path.stat().st_size for path in files)
    return [] if size <= _SIZE_LIMIT else [f"{size / 2**20:.2f} MB, more than {_SIZE_LIMIT / 2**20:.0f} MB"]


def _check_id(directory: Path, metadata: Metadata, backend: str, is_noarch: bool) -> list[str]:
    """The id is the module, the operators' namespace and, in a compiled variant, the library's name at once."""
    variant_id, problems = metadata.id, []
    if not re.fullmatch(rf"_{metadata.name.python_name}_{backend}_[0-9a-z_]{{7,}}", variant_id):
        problems.append(
            f"id {variant_id} is not of the form _{metadata.name.python_name}_{backend}_<7 digits or more>"
        )
    try:
        ops = (directory / "_ops.py").read_text()
    except OSError as error:
        return [*problems, f"_ops.py: {error}"]
    imported = set(re.findall(r"^from \. import (\w+)$", ops, re.MULTILINE))
    used = set(re.findall(r"torch\.ops\.(\w+)", ops)) | set(re.findall(r"\b(\w+)::", ops)) | imported
    if used != {variant_id}:
        problems.append(f"_ops.py uses the names {sorted(used)}, expected {variant_id} alone")
    if is_noarch and imported:
        problems.append(f"_ops.py imports the library {variant_id}, which a noarch variant has not")
    return problems
