"""What the machine can do at most, measured in the same run as everything else."""

import time
from statistics import median

import torch

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
_COPIES = 20


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy between two large buffers of random data (median)."""
    size = _COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    copy_seconds = _cuda_copy_seconds if device.type == "cuda" else _cpu_copy_seconds
    for _ in range(3):
        copy_seconds(target, source)
    return 2 * source.nbytes / median(copy_seconds(target, source) for _ in range(_COPIES))


def _cuda_copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def _cpu_copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin
