"""Which build a system gets, by kernels' own resolver. `python -m tools.matrix` prints the table.

The table is part of README.md, where a test compares it with this module's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kernels.backends import parse_backend
from kernels.variants import VariantRejected, _resolve_variant_for_system, parse_variant
from packaging.version import Version

# What `make build` makes on x86-64 Linux, and what nix adds (flake.nix) where it is run.
BUILT = (
    "torch-stable-abi210-cpu-x86_64-linux",
    "torch-stable-abi210-cu130-x86_64-linux",
    "torch-cpu",
    "torch-cuda",
    "torch-rocm",
    "torch-xpu",
)
BY_NIX = (
    "torch-stable-abi210-cpu-aarch64-linux",
    "torch-stable-abi210-cu126-x86_64-linux",
    "torch-stable-abi210-cu126-aarch64-linux",
    "torch-stable-abi210-cu130-aarch64-linux",
)

TORCHES = tuple(f"2.{minor}" for minor in range(5, 16))
CUDAS = ("cu124", "cu125", "cu126", "cu128", "cu129", "cu130", "cu131", "cu132")
ROCMS = ("rocm62", "rocm63", "rocm64", "rocm70", "rocm71", "rocm72")
XPUS = ("xpu20250", "xpu20252", "xpu20260")
BACKENDS = ("cpu", *CUDAS, *ROCMS, *XPUS)
MACHINES = ("x86_64", "aarch64")

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


class Answer(NamedTuple):
    """The build that a system gets, or None and the sentence that says why."""

    variant: str | None
    reason: str = ""


def systems() -> Iterator[System]:
    """Every pair of torch and backend on every machine."""
    for torch in TORCHES:
        for backend in BACKENDS:
            for machine in MACHINES:
                yield System(torch, backend, machine)


def answer(system: System, variants: tuple[str, ...] = BUILT) -> Answer:
    accepted, trace = _resolve_variant_for_system(
        variants=[parse_variant(name) for name in variants],
        selected_backend=parse_backend(system.backend),
        cpu=system.machine,
        os=system.os,
        torch_version=Version(system.torch),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    if accepted:
        return Answer(accepted[0].variant_str)
    kind = system.backend.rstrip("0123456789")
    refusals = {decision.reason for decision in trace if isinstance(decision, VariantRejected)}
    return Answer(None, UNSERVED.get(kind) or "; ".join(sorted(refusals)))


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
    now = {answer(System(torch, backend, machine)).variant for backend in backends}
    later = {answer(System(torch, backend, machine), BUILT + BY_NIX).variant for backend in backends}
    text = " or ".join(f"`{_short(name)}`" for name in sorted(map(str, now)))
    extra = " or ".join(f"`{_short(name)}`" for name in sorted(map(str, later - now)))
    return f"{text} ({extra} by nix)" if extra else text


def _short(name: str) -> str:
    return name.removeprefix("torch-stable-").replace("-x86_64-linux", "").replace("-aarch64-linux", "")


if __name__ == "__main__":
    print(table())
