"""Checks of a variant's library: the machines and versions of others that it will run on."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING

import kernel_abi_check

from .elf import Import, Library
from .fatbin import FatBinaryError, architectures
from .torch_abi import shim_versions

if TYPE_CHECKING:
    from .variant import VariantName

_MANYLINUX = "manylinux_2_28"
_PYTHON = "3.9"

# The newest symbol versions of manylinux_2_28 (PEP 600; the same on x86_64 and aarch64).
_NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

# The libraries that every Linux has. Of others a variant may need only torch's and the CUDA runtime.
_SYSTEM = re.compile(r"libc\.so\.6|libm\.so\.6|libgcc_s\.so\.1|libstdc\+\+\.so\.6|ld-linux-[\w-]+\.so\.\d")

# Weak symbols that compilers put into every library and that may stay undefined.
_OPTIONAL = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}

# A string that starts with "/" and has two names or more, in a section that holds strings.
_PATH = re.compile(rb"(?<=\0)/[\w.+-]{2,}(?:/[\w.+-]+)+")
_STRING_SECTIONS = (".rodata", ".data", ".data.rel.ro", ".strtab", ".dynstr", ".comment")


def check_library(library: Library, name: VariantName, declared_archs: list[str]) -> list[str]:
    """The problems of a library that a variant of this name and with these declared architectures contains."""
    problems = []
    if library.machine != name.machine:
        problems.append(f"is for {library.machine}, the variant for {name.machine}")
    problems += _check_needed(library, name.cuda_major)
    problems += _check_versions(library.imports)
    problems += _check_symtab(library)
    problems += _check_torch(library.imports, name)
    problems += _check_archs(library, declared_archs)
    problems += _check_paths(library)
    return problems


def _check_needed(library: Library, cuda_major: int | None) -> list[str]:
    required = {"libtorch.so"} | ({f"libcudart.so.{cuda_major}"} if cuda_major else set())
    others = {needed for needed in library.needed if not _SYSTEM.fullmatch(needed)}
    problems = [f"has the library search path {path}, expected none" for path in library.search_paths]
    problems += [f"does not need {name}, so that its symbols will not be found" for name in sorted(required - others)]
    problems += [f"needs {name}, which a user may not have" for name in sorted(others - required)]
    return problems


def _check_versions(imports: list[Import]) -> list[str]:
    problems = []
    for symbol in imports:
        kind, _, number = (symbol.version or "").partition("_")
        newest = _NEWEST.get(kind)
        if newest is None:
            continue
        if not re.fullmatch(r"\d+(\.\d+)*", number) or tuple(map(int, number.split("."))) > newest:
            limit = f"{_MANYLINUX} has {kind}_{'.'.join(map(str, newest))} at most"
            problems.append(f"{_demangle(symbol.name)} needs {symbol.version}, {limit}")
    return problems


def _check_symtab(library: Library) -> list[str]:
    """kernel-abi-check's own verdict. It reads .symtab, so .symtab has to say at least what .dynsym says."""
    if missing := library.missing_from_symtab():
        return [f"is stripped: .symtab lacks {len(missing)} imports ({missing[0]}), kernel-abi-check would miss them"]
    checker = kernel_abi_check.ObjectFile(library.path)
    return [
        *(f"{v.name} needs {v.dep}_{v.version} (kernel-abi-check)" for v in checker.check_manylinux(_MANYLINUX)),
        *(f"{v.name} is not in the limited API of Python {_PYTHON}" for v in checker.check_python_abi(_PYTHON)),
    ]


def _check_torch(imports: list[Import], name: VariantName) -> list[str]:
    """Every import without a version has to be Python's, or a shim that the target version of torch already has.

    A CUDA variant may ask for cuBLASLt, which a CUDA build of torch loads, if it can do without: by weak symbols.
    """
    target, shims, problems = name.stable_abi, shim_versions(), []
    for symbol in imports:
        if symbol.version is not None or symbol.name in _OPTIONAL or symbol.name.startswith(("Py", "_Py")):
            continue
        if name.cuda_major and symbol.weak and symbol.name.startswith("cublasLt"):
            continue
        needed = shims.get(symbol.name)
        if needed is None:
            problems.append(f"{_demangle(symbol.name)} is undefined and not in torch's stable ABI")
        elif needed > target:
            version, limit = (".".join(map(str, numbers)) for numbers in (needed, target))
            problems.append(f"{symbol.name} needs torch {version}, the variant promises {limit}")
    return problems


def _check_archs(library: Library, declared: list[str]) -> list[str]:
    try:
        present = architectures(library.contents.get(".nv_fatbin", b""))
    except FatBinaryError as error:
        return [str(error)]
    # "9.0+PTX" promises code for 9.0 and PTX of 9.0.
    promised = {arch.removesuffix("+PTX") for arch in declared} | {arch for arch in declared if arch.endswith("+PTX")}
    problems = [f"metadata.json declares {arch}, which the fat binary lacks" for arch in sorted(promised - present)]
    problems += [
        f"the fat binary has {arch}, which metadata.json does not declare" for arch in sorted(present - promised)
    ]
    return problems


def _check_paths(library: Library) -> list[str]:
    found = {
        match.group().decode()
        for section in _STRING_SECTIONS
        for match in _PATH.finditer(b"\0" + library.contents.get(section, b""))
    }
    return [f"contains the path {path}" for path in sorted(found)]


def _demangle(name: str) -> str:
    """A symbol as a C++ programmer would write it."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    demangled = ctypes.string_at(text).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(text)
    return demangled
