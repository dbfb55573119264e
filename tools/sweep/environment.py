"""The participants of this process, and the facts that a reader of the numbers needs."""

import datetime
import importlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from .providers import LIGER, QUACK, Peers

# The module that is taken of each peer that may be missing; both run on a GPU only.
_PEER_MODULES = {LIGER: "liger_kernel.ops.geglu", QUACK: "quack.mlp"}

ROOT = Path(__file__).resolve().parents[2]
REPO_ID = "org/geglu"


def pick_device(name: str) -> torch.device:
    """The torch device for "auto", "cpu" or "cuda"; raises RuntimeError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device: cuda was asked for, and torch sees no GPU")
    return torch.device(name)


def load_peers(repo: Path, device: torch.device, use_compile: bool) -> Peers:
    """Load the kernel from `repo`/build as a user of a local kernel repository does, and the peers that are there.

    Raises FileNotFoundError when `repo` has no build for this torch.
    """
    from kernels import get_local_kernel

    kernel = get_local_kernel(repo)
    variant = repo / "build" / f"torch-{device.type}"
    noarch = get_local_kernel(variant) if variant.is_dir() else None
    modules, absent = {}, {}
    for name, module in _PEER_MODULES.items():
        if device.type != "cuda":
            absent[name] = "runs on a GPU only"
            continue
        try:
            modules[name] = importlib.import_module(module)
        except Exception as error:  # it may be absent, or break on this torch or triton: a note, not a crash
            absent[name] = f"{module} cannot be imported ({type(error).__name__})"
    return Peers(kernel, noarch, modules.get(LIGER), modules.get(QUACK), absent, use_compile)


def facts(kernel, device: torch.device) -> dict[str, str]:
    """Machine, versions, commit, time and command line, as printable strings."""
    known = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "python -m tools.sweep " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "kernel": f"{kernel.__name__} ({Path(kernel.__file__).parent.name})",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("kernels", "triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl"):
        known[package] = _version(package)
    known["cpu"] = _cpu_model()
    known["threads"] = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    known["cpu capability"] = f"torch {torch.backends.cpu.get_cpu_capability()}, this kernel {_cpu_capability(kernel)}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known["gpu"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs, "
            f"L2 {properties.L2_cache_size / 2**20:.0f} MiB"
        )
    return known


def _cpu_capability(kernel) -> str:
    try:
        return kernel._ops.ops.cpu_capability()
    except (AttributeError, RuntimeError):  # another version of the kernel may not tell
        return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return "unknown (no git)"
    return run.stdout.strip() if run.returncode == 0 else "unknown (no commit here)"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
