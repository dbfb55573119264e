"""Which build a system gets, by kernels' own resolver. `python -m tools.matrix` prints the table.

The table is part of README.md, where a test compares it with this module's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kernels.backends import parse_backend
from kernels.variants import VariantRejected, _resolve_variant_for_system, parse_variant
from packaging.version import Version

from tools.build import config, noarch

# The toolkit that the local builder compiles with: the Makefile's NVCC, or the wheels of requirements-cuda.txt.
LOCAL_CUDA = "cu130"
# The toolkits of kernel-builder's versions.nix. Its macOS build is left out: torch of macOS asks for a Metal one.
NIX_CUDAS = ("cu126", "cu130", "cu132")
MACHINES = ("x86_64", "aarch64")

TORCHES = tuple(f"2.{minor}" for minor in range(5, 16))
CUDAS = ("cu124", "cu125", "cu126", "cu128", "cu129", "cu130", "cu131", "cu132")
ROCMS = ("rocm60", "rocm61", "rocm62", "rocm63", "rocm64", "rocm70", "rocm71", "rocm72")
XPUS = ("xpu20250", "xpu20252", "xpu20253", "xpu20260")
BACKENDS = ("cpu", *CUDAS, *ROCMS, *XPUS)

# torch 2.7 is the first whose torch.version.xpu the loader can rely on. Before it an XPU build of torch passes for a
# CPU one.
FIRST_KNOWN_XPU = Version("2.7")

# Systems that get no build, and why.
UNSERVED = {
    "metal": "there is no build for Apple's GPUs: torch of macOS takes only kernels with a Metal build",
    "neuron": "there is no build for AWS Neuron",
    "tpu": "there is no build for TPUs",
    "cann": "there is no build for Ascend NPUs",
}


class System(NamedTuple):
    """A torch release, what it was built for, and the machine: ("2.9", "cu128", "x86_64")."""

    torch: str
    backend: str
    machine: str
    os: str = "linux"

    @property
    def kind(self) -> str:
        """The backend without its release: "cu"."""
        return self.backend.rstrip("0123456789")


class Answer(NamedTuple):
    """The build that a system gets, or None and the sentence that says why."""

    variant: str | None
    reason: str = ""


@cache
def built() -> tuple[str, ...]:
    """The variants that `make build` makes on x86-64 Linux."""
    return (*_compiled("x86_64", (LOCAL_CUDA,)), *(noarch.variant_name(backend) for backend in noarch.BACKENDS))


@cache
def with_nix() -> tuple[str, ...]:
    """These, and what nix adds (flake.nix) where it is run: the same build.toml, more toolkits and machines."""
    return tuple(dict.fromkeys((*built(), *(name for machine in MACHINES for name in _compiled(machine, NIX_CUDAS)))))


def _compiled(machine: str, cudas: tuple[str, ...]) -> list[str]:
    package = config.load(Path(__file__).parents[1])
    return [
        f"torch-stable-abi{major}{minor}-{compute}-{machine}-linux"
        for backend, (major, minor) in package.stable_abi.items()
        for compute in (cudas if backend == "cuda" else (backend,))
    ]


def systems() -> Iterator[System]:
    """Every pair of torch and backend on every machine."""
    for torch in TORCHES:
        for backend in BACKENDS:
            for machine in MACHINES:
                yield System(torch, backend, machine)


def answer(system: System, variants: tuple[str, ...]) -> Answer:
    unknown_xpu = system.kind == "xpu" and Version(system.torch) < FIRST_KNOWN_XPU
    accepted, trace = _resolve_variant_for_system(
        variants=[parse_variant(name) for name in variants],
        selected_backend=parse_backend("cpu" if unknown_xpu else system.backend),
        cpu=system.machine,
        os=system.os,
        torch_version=Version(system.torch),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    if accepted:
        return Answer(accepted[0].variant_str)
    refusals = {decision.reason for decision in trace if isinstance(decision, VariantRejected)}
    return Answer(None, UNSERVED.get(system.kind) or "; ".join(sorted(refusals)))


def table() -> str:
    """The matrix in Markdown: neighbouring releases with the same answers share a row."""
    columns = {
        "CPU": ("cpu",),
        "CUDA 12.4 to 12.9": CUDAS[:5],
        "CUDA 13.0 to 13.2": CUDAS[5:],
        "ROCm": ROCMS,
        "XPU": XPUS,
    }
    lines = [f"| PyTorch | machine | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for machine in MACHINES:
        rows: list[tuple[list[str], list[str]]] = []
        for torch in TORCHES:
            cells = [_cell(torch, machine, backends) for backends in columns.values()]
            if rows and rows[-1][1] == cells:
                rows[-1][0].append(torch)
            else:
                rows.append(([torch], cells))
        for torches, cells in rows:
            lines.append(f"| {torches[0]} to {torches[-1]} | {machine} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(torch: str, machine: str, backends: tuple[str, ...]) -> str:
    """What all of these backends get; with what they get where nix built its variants too, if that is another."""
    now = {answer(System(torch, backend, machine), built()).variant for backend in backends}
    later = {answer(System(torch, backend, machine), with_nix()).variant for backend in backends}
    text = " or ".join(f"`{_short(name)}`" for name in sorted(map(str, now)))
    extra = " or ".join(f"`{_short(name)}`" for name in sorted(map(str, later - now)))
    return f"{text} ({extra} by nix)" if extra else text


def _short(name: str) -> str:
    return name.removeprefix("torch-stable-").replace("-x86_64-linux", "").replace("-aarch64-linux", "")


if __name__ == "__main__":
    print(table())
