"""CUDA capabilities as build.toml writes them ("8.0", "9.0a", "12.0+PTX") and as nvcc and fat binaries know them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import BuildError

_CAPABILITY = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


@dataclass(frozen=True, order=True)
class Capability:
    """`suffix` is "a" or "f" for code that runs on this architecture (family) alone; `ptx` adds PTX to the binary."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    @classmethod
    def parse(cls, text: str) -> Capability:
        match = _CAPABILITY.fullmatch(text)
        if match is None:
            raise BuildError(f'build.toml: cuda-capabilities: "{text}" is not of the form "9.0", "9.0a" or "9.0+PTX"')
        return cls(int(match[1]), int(match[2]), match[3], match[4] is not None)

    @property
    def sm(self) -> str:
        """The architecture as nvcc spells it after sm_ and compute_: "90a"."""
        return f"{self.major}{self.minor}{self.suffix}"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"


def select(wanted: Iterable[Capability], supported: set[str]) -> list[Capability]:
    """The wanted capabilities that a toolkit supports.

    `supported` holds the numbers that `nvcc --list-gpu-code` prints ("90"). Where a capability with PTX is beyond the
    toolkit, the newest portable one that remains takes over the PTX, so that newer GPUs still find something to run.
    Architecture-specific PTX would not do: it runs nowhere else.
    """
    wanted = sorted(wanted)
    kept = [capability for capability in wanted if f"{capability.major}{capability.minor}" in supported]
    portable = [capability for capability in kept if not capability.suffix]
    lost_ptx = any(capability.ptx for capability in wanted if capability not in kept)
    if lost_ptx and portable:
        newest = portable[-1]
        kept[kept.index(newest)] = Capability(newest.major, newest.minor, newest.suffix, ptx=True)
    return kept


def gencode_flags(capabilities: Iterable[Capability]) -> list[str]:
    flags = []
    for capability in capabilities:
        arch = f"-gencode=arch=compute_{capability.sm}"
        flags.append(f"{arch},code=sm_{capability.sm}")
        if capability.ptx:
            flags.append(f"{arch},code=compute_{capability.sm}")
    return flags
