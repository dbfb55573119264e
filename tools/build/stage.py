"""The private copy of a variant's sources: exactly what build.toml lists for it and the Python package.

An unlisted header is missing here, as it would be missing in a published build; and what is edited while a build runs
is not in that build.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from .config import Package

TEMPLATES = Path(__file__).parent / "templates"
OPS_TEMPLATE = TEMPLATES / "_ops.py.in"
# Where the generated files of a build live in the copy. The binding includes registration.h from its own folder.
REGISTRATION = "torch-ext/registration.h"
ABI_COMPAT = "builder/abi_compat.cpp"
EXPORTS = "builder/exports.map"


def listed_files(package: Package, backend: str) -> list[str]:
    """The files of a backend's components, sorted, relative to the package's root."""
    return sorted({file for component in package.components(backend) for file in component.files})


def python_files(package: Package) -> list[str]:
    """The Python package's files, relative to the package's root: .py and what [torch] pyext adds.

    A _ops.py that kernel-builder left in the sources is not one of them: every variant has its own.
    """
    suffixes = {".py", *package.data_suffixes}
    files = [path for path in package.python_root.rglob("*") if path.is_file() and path.suffix in suffixes]
    names = sorted(path.relative_to(package.root).as_posix() for path in files)
    return [name for name in names if name != f"{package.python_folder}/_ops.py"]


def stage(package: Package, backend: str, directory: Path) -> None:
    """Makes `directory` anew, with the listed files, the Python package and what the build generates."""
    if directory.exists():
        shutil.rmtree(directory)
    copies = {file: package.root / file for file in [*listed_files(package, backend), *python_files(package)]}
    copies |= {name: TEMPLATES / Path(name).name for name in (REGISTRATION, ABI_COMPAT, EXPORTS)}
    for name, source in copies.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def ops_module(variant_id: str, has_library: bool) -> str:
    """The text of a variant's _ops.py, which imports the compiled library if there is one."""
    library = f"\nfrom . import {variant_id}\n" if has_library else ""
    return OPS_TEMPLATE.read_text().format(id=variant_id, library=library)
