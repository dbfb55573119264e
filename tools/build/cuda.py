"""The CUDA toolkit: where it is, what it can compile for, and everything of it that ends up in a binary.

An installed toolkit comes first. Without one, the `nvidia-cuda-*` wheels of requirements-cuda.txt serve as one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import BuildError
from .toolchain import environment, hash_files

# 12.6 is the oldest toolkit whose host compilers and C++20 mode are good enough; a new major needs a look first.
_OLDEST = (12, 6)
_NEWEST_MAJOR = 13
SUPPORTED = f"{_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST_MAJOR}.x"

_FIX = (
    "install CUDA 13.0, point CUDA_HOME at a supported toolkit, "
    "or take nvcc from wheels: pip install -r requirements-cuda.txt"
)


class NoCuda(BuildError):
    """No usable CUDA toolkit: an error where CUDA was asked for, a reason to skip it where it was not."""


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit. `root` is its true place, which the nvcc in PATH may only point to."""

    nvcc: Path
    version: str
    root: Path

    @property
    def release(self) -> tuple[int, int]:
        major, minor, _ = self.version.split(".")
        return int(major), int(minor)

    @property
    def compute(self) -> str:
        """The toolkit in a variant's name: "cu130"."""
        return "cu{}{}".format(*self.release)

    @cached_property
    def include(self) -> Path:
        return self._directory("cuda_runtime.h", ("include", "targets/*/include"))

    @cached_property
    def cudart(self) -> Path:
        """The shared runtime, by its full name: wheels have no libcudart.so link."""
        name = f"libcudart.so.{self.release[0]}"
        return self._directory(name, ("lib64", "lib", "targets/*/lib")) / name

    @cached_property
    def supported(self) -> set[str]:
        """The architectures that this nvcc makes code for: {"75", "80", ...}."""
        listing = _run([str(self.nvcc), "--list-gpu-code"])
        return set(re.findall(r"sm_(\d+)", listing))

    @cached_property
    def identity(self) -> str:
        """A hash of the toolkit's programs, device library and runtime; headers are hashed where they are used."""
        programs = [self.root / "bin" / name for name in ("nvcc", "cudafe++", "ptxas", "fatbinary")]
        compilers = [self.root / "nvvm/bin/cicc", *sorted((self.root / "nvvm/libdevice").glob("*.bc"))]
        return self.version + " " + hash_files(path for path in (*programs, *compilers, self.cudart) if path.is_file())

    def _directory(self, name: str, places: tuple[str, ...]) -> Path:
        for place in places:
            for directory in sorted(self.root.glob(place)):
                if (directory / name).exists():
                    return directory
        raise NoCuda(f"{self.nvcc}: no {name} in the toolkit at {self.root}: {_FIX}")

    def __str__(self) -> str:
        return f"nvcc {self.version} ({self.nvcc})"


def find_cuda() -> Cuda:
    """The first supported toolkit of: $CUDA_HOME (and then no other), PATH, /usr/local/cuda, the wheels.

    Raises NoCuda with what was found and how to get one.
    """
    refused = []
    for nvcc in _candidates():
        version = _version(nvcc)
        if version is None:
            refused.append(f"{nvcc} does not run")
        elif version[:2] < _OLDEST or version[0] > _NEWEST_MAJOR:
            refused.append(f"{nvcc} is version {'.'.join(map(str, version))}, supported are {SUPPORTED}")
        else:
            return Cuda(nvcc, ".".join(map(str, version)), _root(nvcc))
    raise NoCuda(f"{'; '.join(refused) or 'no nvcc found'}: {_FIX}")


def _candidates() -> list[Path]:
    if home := os.environ.get("CUDA_HOME"):
        return [Path(home, "bin", "nvcc")]
    in_path = shutil.which("nvcc")
    wheels = [nvcc for entry in sys.path for nvcc in sorted(Path(entry).glob("nvidia/cu*/bin/nvcc"), reverse=True)]
    candidates = [*([Path(in_path)] if in_path else []), Path("/usr/local/cuda/bin/nvcc"), *wheels]
    return [nvcc for nvcc in candidates if nvcc.is_file()]


def _version(nvcc: Path) -> tuple[int, int, int] | None:
    try:
        match = re.search(r"release [\d.]+, V(\d+)\.(\d+)\.(\d+)", _run([str(nvcc), "--version"]))
    except OSError:
        return None
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _root(nvcc: Path) -> Path:
    """The toolkit that an nvcc belongs to, by its own account: the nvcc in PATH may be a script that calls another."""
    match = re.search(r"^#\$ TOP=(.+)$", _run([str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull]), re.MULTILINE)
    return Path(match[1].strip()).resolve() if match else nvcc.resolve().parent.parent


def _run(command: list[str]) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    return result.stdout
