"""Links a variant's library. Only what this command names is linked, and in this order:

- g++, not nvcc, which would link a static CUDA runtime that needs a newer glibc;
- libtorch.so by name even though nothing in it is used: the libraries it loads have the symbols, and they are not
  visible to an extension that does not ask for them; libc10.so must stay out, it answers for C++ symbols by accident;
- no rpath: the process that imports the library has torch loaded.
"""

from __future__ import annotations

from pathlib import Path

from .cuda import Cuda
from .errors import BuildError
from .runner import Runner
from .stage import EXPORTS
from .toolchain import Cxx
from .units import torch_directory

_FLAGS = (
    "-shared",
    "-Wl,-z,relro,-z,now",
    # A build id would be one more thing that could differ.
    "-Wl,--build-id=none",
)


def link_arguments(cuda: Cuda | None) -> list[str]:
    """The arguments that shape the library, without any path of this machine."""
    runtime = [f"-l:{cuda.cudart.name}"] if cuda else []
    return [*_FLAGS, "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", *runtime]


def link(objects: list[Path], output: Path, stage: Path, cxx: Cxx, cuda: Cuda | None, runner: Runner) -> None:
    """Links `objects` in the given order. Raises BuildError with the linker's output."""
    directories = [f"-L{torch_directory() / 'lib'}"] + ([f"-L{cuda.cudart.parent}"] if cuda else [])
    inputs = [str(path) for path in objects]
    command = [*cxx.command, *inputs, f"-Wl,--version-script={stage / EXPORTS}", *directories, *link_arguments(cuda)]
    result = runner.run([*command, "-o", str(output)], stage)
    if result.returncode != 0:
        raise BuildError(f"{result.stderr.rstrip()}\nthe linker fails on {output.name}")
