"""One compiler command for each source file of a variant: its component's flags on top of the builder's."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from .capabilities import Capability, gencode_flags, select
from .config import Component, Package
from .cuda import Cuda
from .errors import BuildError
from .stage import ABI_COMPAT
from .toolchain import Cxx

# The binding alone knows the variant's id, and the id follows from the sources: all other objects outlive it.
ID_MACRO = "TORCH_EXTENSION_NAME"

_OPTIMIZE = ("-O3", "-DNDEBUG")
# GNU-unique symbols are merged across libraries, which mixes up two builds of a kernel in one process.
_HOST_CODE = ("-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")


@dataclass(frozen=True)
class Roots:
    """Directories that differ between machines.

    Arguments name them by alias ("@torch@"), so that neither a binary nor an id depends on where things are installed.
    """

    directories: tuple[tuple[str, Path], ...]

    def expand(self, argument: str) -> str:
        for alias, directory in self.directories:
            argument = argument.replace(f"@{alias}@", str(directory))
        return argument

    def alias(self, path: str) -> str:
        """A dependency's path as every machine would name it."""
        path = os.path.normpath(path)
        for alias, directory in self.directories:
            if Path(path).is_relative_to(directory):
                return f"@{alias}@/{Path(path).relative_to(directory)}"
        return path


@dataclass(frozen=True)
class Unit:
    """A source file to compile.

    `compiler` is "c++" or "nvcc"; `arguments` are everything that shapes the object except the id; `companions` are
    files that count as dependencies whether or not the compiler's own list has them.
    """

    component: str
    source: str
    compiler: str
    arguments: tuple[str, ...]
    needs_id: bool = False
    companions: tuple[str, ...] = ()


def torch_directory() -> Path:
    """Where torch is installed. A build needs its files only; importing it would take seconds."""
    spec = find_spec("torch")
    if spec is None:
        raise BuildError(f"torch is not installed for {sys.executable}: pip install -r requirements.txt")
    return Path(spec.origin).resolve().parent


def torch_release() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def make_roots(cuda: Cuda | None) -> Roots:
    directories = [("torch", torch_directory() / "include")]
    if cuda is not None:
        directories.append(("cuda", cuda.include.resolve()))
    return Roots(tuple(directories))


def capabilities(component: Component, cuda: Cuda) -> list[Capability]:
    """What a component is compiled for. Raises BuildError if the toolkit supports none of it."""
    wanted = [Capability.parse(text) for text in component.cuda_capabilities]
    selected = select(wanted, cuda.supported)
    if not selected:
        raise BuildError(
            f"build.toml: [{component.section}] cuda-capabilities {', '.join(map(str, wanted))}: {cuda} supports none "
            f"of them (it has {', '.join(sorted(cuda.supported, key=int))}): use another toolkit"
        )
    return selected


def make_units(package: Package, backend: str, stage: Path, cuda: Cuda | None) -> list[Unit]:
    """The units of a backend's variant, CUDA sources first: they take longest."""
    defines = _defines(package, backend)
    system = ["-isystem", "@torch@"] + (["-isystem", "@cuda@"] if cuda else [])
    units = [
        Unit("builder", ABI_COMPAT, "c++", (*_cxx_arguments(), "-ffile-prefix-map=@torch@=torch")),
    ]
    for component in package.components(backend):
        headers = tuple(file for file in component.files if file not in component.units)
        for source in component.units:
            shared = [*defines, *(f"-I{directory}" for directory in component.include)]
            # A kernel's source that does without the id must not be compiled again for each new one.
            needs_id = component is package.binding or ID_MACRO in (stage / source).read_text()
            if source.endswith(".cu"):
                arguments = [*_nvcc_arguments(source), *shared, *system]
                arguments += [*gencode_flags(capabilities(component, cuda)), *component.cuda_flags]
                # nvcc lists what the host's pass includes; a header for the device's pass alone would be missed.
                units.append(Unit(component.section, source, "nvcc", tuple(arguments), needs_id, headers))
            else:
                maps = [f"-ffile-prefix-map=@{alias}@={alias}" for alias in ("torch", *(["cuda"] if cuda else []))]
                arguments = [*_cxx_arguments(), "-Wall", "-Wextra", *maps, *shared, *system, *component.cxx_flags]
                units.append(Unit(component.section, source, "c++", tuple(arguments), needs_id))
    return sorted(units, key=lambda unit: unit.compiler != "nvcc")


def command(unit: Unit, cxx: Cxx, cuda: Cuda | None, roots: Roots, variant_id: str) -> list[str]:
    """The command that runs in the staged copy, without its mode (-c, -M), source and output."""
    arguments = [roots.expand(argument) for argument in unit.arguments]
    if unit.needs_id:
        arguments.append(f"-D{ID_MACRO}={variant_id}")
    if unit.compiler == "nvcc":
        return [str(cuda.nvcc), "-ccbin", cxx.command[-1], *arguments]
    return [*cxx.command, *arguments]


def _cxx_standard() -> str:
    """kernel-builder's rule: torch 2.12 moved to C++20."""
    return "-std=c++20" if torch_release() >= (2, 12) else "-std=c++17"


def _defines(package: Package, backend: str) -> list[str]:
    major, minor = package.stable_abi[backend]
    if torch_release() < (major, minor):
        raise BuildError(
            f"build.toml: [torch.stable-abi] {backend} is {major}.{minor}, but torch {version('torch')} is installed: "
            "install that version or a newer one"
        )
    kernel = {"cpu": ["-DCPU_KERNEL"], "cuda": ["-DCUDA_KERNEL", "-DUSE_CUDA=1"]}[backend]
    return [*kernel, f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}", "-DPy_LIMITED_API=0x03090000"]


def _cxx_arguments() -> list[str]:
    return [_cxx_standard(), *_OPTIMIZE, *_HOST_CODE]


def _nvcc_arguments(source: str) -> list[str]:
    maps = [f"-ffile-prefix-map=@{alias}@={alias}" for alias in ("torch", "cuda")]
    return [
        *(_cxx_standard(), *_OPTIMIZE, "--expt-relaxed-constexpr"),
        *("-Xcompiler", ",".join([*_HOST_CODE, *maps])),
        # nvcc names internal symbols after the absolute path of the source, unless told another.
        *("-Xcudafe", f"--orig_src_path_name={source}"),
        # Machine code of one architecture after another compresses to an eighth.
        "-Xfatbin=-compress-all",
    ]
