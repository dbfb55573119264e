"""Times of eager, torch.compile and the kernel, taken in turn in one run."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Work = Callable[[], object]


def others_busy(seconds: float = 0.5) -> float:
    """The share of all cores that other processes use, 0 to 1, watched for `seconds` while this one sleeps."""
    before = _core_times()
    time.sleep(seconds)
    total, idle = (after - earlier for after, earlier in zip(_core_times(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _core_times() -> tuple[int, int]:
    """(all, idle) time of all cores since the machine started, in the kernel's ticks."""
    # The first line of /proc/stat: "cpu", then user, nice, system, idle, iowait, and others.
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _once(work: Work, device: str) -> float:
    """Milliseconds of one call: between two CUDA events, launches included, or on the wall clock."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


@torch.no_grad()
def medians(works: dict[str, Work], device: str, seconds: float, least_rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of each of `works`, after two unmeasured calls each.

    The works take turns, so that a slow moment of the machine meets all of them; rounds go on for `seconds`, and for
    `least_rounds` in any case.
    """
    for work in works.values():
        work()
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in works}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(next(iter(samples.values()))) < least_rounds:
        for name, work in works.items():
            samples[name].append(_once(work, device))
    return {name: statistics.median(values) for name, values in samples.items()}
