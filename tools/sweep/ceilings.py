"""What the machine can do at most, measured in the same run as everything else."""

import time
from collections.abc import Callable
from statistics import median

import torch

from . import timing
from .model import Ceilings
from .providers import Call

_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
_GEMM_SIZE = 8192
_GEMM_SECONDS = 0.4
_WARM_UPS = 3
_REPETITIONS = 20

# Each reads a float32 buffer once and writes next to nothing.
_READERS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.sum,
    torch.amax,
    torch.linalg.vector_norm,
    lambda source: source.view(-1, 1 << 14).sum(1),
    lambda source: source.view(-1, 1 << 14).amax(1),
    lambda source: source.view(torch.bfloat16).sum(),
)


def measure(device: torch.device) -> Ceilings:
    """All ceilings of `device`; on the CPU the copy bandwidth alone, which is all that its floors use."""
    if device.type == "cpu":
        return Ceilings(copy_bandwidth(device))
    return Ceilings(copy_bandwidth(device), read_bandwidth(device), gemm_rate(device))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy between two large buffers of random data (median)."""
    source = _large_buffer(device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which the fastest of several reductions reads a large buffer of random data (medians).

    Several, because none is known to keep the memory busy: the loads that a reduction has in flight and the arithmetic
    on each differ from op to op and from one release of torch to the next.
    """
    source = _large_buffer(device)
    return source.nbytes / min(_median_seconds(lambda read=read: read(source), device) for read in _READERS)


def gemm_rate(device: torch.device) -> float:
    """FLOP per second of one 8192 x 8192 x 8192 bf16 product of random data, by torch, on a GPU (median).

    Of products one behind the other for as long as a case is timed, with a case's clock: power limits a GPU that
    multiplies, and it keeps up the rate of a rested one for some tens of milliseconds only. Random, because a product
    of zeros draws less power and so runs at a higher clock.
    """
    size = _GEMM_SIZE
    one, other = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(one)
    product = Call(lambda: torch.mm(one, other.t(), out=out))
    micros = timing.device_times({"product": [product]}, _GEMM_SECONDS)["product"]
    return 2 * size**3 / (median(micros) / 1e6)


def _large_buffer(device: torch.device) -> torch.Tensor:
    """float32 values from [0, 1), as many as fill 2 GiB of a GPU (if it has them to spare) or 256 MiB of a CPU."""
    size = _BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    return torch.rand(size >> 16 << 14, device=device)  # whole rows of the readers that reduce by row


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    for _ in range(_WARM_UPS):
        clock(run)
    return median(clock(run) for _ in range(_REPETITIONS))


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def _cpu_seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
