"""Measurements that are not a time of one call: start-up, accuracy against eager, size of the builds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from . import reference
from .environment import REPO_ID, ROOT
from .model import FORMS
from .suites import MEGABYTE

_TAIL = -3.0


def startup(repo: Path, device: torch.device) -> dict[str, float]:
    """Seconds to the first result, and the time of a shape's first call over that of its second, in a fresh process.

    Raises RuntimeError with the process's last line when it fails.
    """
    environment = os.environ | {"LOCAL_KERNELS": f"{REPO_ID}={repo}", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "tools.sweep.startup", device.type],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    if run.returncode != 0:
        raise RuntimeError((run.stderr.strip().splitlines() or ["no output"])[-1])
    return {f"startup: {name}": value for name, value in json.loads(run.stdout.splitlines()[-1]).items()}


def accuracy(kernel, device: torch.device, rows: int = 2048, cols: int = 4096) -> dict[str, float]:
    """Ours beside eager on N(0, 1) inputs: equal share, ulp for gate >= -3, L2 errors overall and below -3."""
    values = {}
    generator = torch.Generator(device=device).manual_seed(7)
    for dtype in (torch.bfloat16, torch.float16):
        gate, up = (torch.randn(rows, cols, generator=generator, device=device).to(dtype) for _ in range(2))
        ones = torch.ones_like(gate)
        tail = gate < _TAIL
        for form in FORMS:
            name = f"accuracy {str(dtype).removeprefix('torch.')} {form}"
            ours = kernel.geglu(gate, up, approximate=form)
            eager = F.gelu(gate, approximate=form) * up
            truth = reference.gelu(gate.double(), form) * up.double()
            distance = ulp_distance(ours, eager)
            gelu_distance = ulp_distance(kernel.geglu(gate, ones, approximate=form), F.gelu(gate, approximate=form))
            values |= {
                f"{name}: equal": (ours.view(torch.int16) == eager.view(torch.int16)).double().mean().item(),
                f"{name}: ulp": float(distance[~tail].max()),
                f"{name}: gelu ulp": float(gelu_distance[~tail].max()),
                f"{name}: error": _relative_error(ours, truth),
                f"{name}: eager error": _relative_error(eager, truth),
                f"{name}: tail": _relative_error(ours[tail], truth[tail]),
                f"{name}: eager tail": _relative_error(eager[tail], truth[tail]),
            }
    return values


def ulp_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Steps between two 16-bit float tensors, counted in representable values; -0 and +0 are the same place."""

    def place(value: torch.Tensor) -> torch.Tensor:
        bits = value.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (place(one) - place(other)).abs()


def _relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


def sizes(repo: Path) -> dict[str, float]:
    """MB of every variant under `repo`/build, by variant name."""
    return {
        folder.name: sum(path.stat().st_size for path in _shipped_files(folder)) / MEGABYTE
        for folder in sorted((repo / "build").glob("torch-*"))
        if (folder / "metadata.json").is_file()
    }


def _shipped_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
