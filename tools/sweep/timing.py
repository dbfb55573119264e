"""Clocks. In every mode the providers take turns, round by round, so that drift hits all of them alike.

Every function takes `turns`, the calls of each provider over the rotated input sets, and returns its samples in
microseconds per call.
"""

import gc
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles

import torch

from .providers import Call, nothing

Turns = dict[str, list[Call]]
Samples = dict[str, list[float]]

# Twice the L2 of every present GPU, and long enough to write (over 100 us) that the host runs ahead of the device.
_FLUSH_MIN_BYTES = 256 << 20

_HOST_BATCH = 50
_HOST_ROUNDS = 80


def cache_bytes(device: torch.device) -> int:
    """Bytes that one rotation of the inputs must exceed so that no call finds its inputs in cache."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return 128 << 20


def make_flush(device: torch.device) -> Callable[[], None]:
    """A function that evicts the L2: it increments a buffer of random integers larger than twice the cache."""
    size = max(2 * cache_bytes(device), _FLUSH_MIN_BYTES)
    buffer = torch.empty(size // 4, dtype=torch.int32, device=device).random_()

    def flush() -> None:
        buffer.add_(1)

    return flush


def summary(samples: list[float]) -> tuple[float, float, float]:
    """(median, least, interquartile range / median) of the samples."""
    middle = median(samples)
    low, _, high = quantiles(samples, n=4)
    return middle, min(samples), (high - low) / middle if middle else 0.0


def plan_rounds(round_seconds: float, budget_seconds: float, least: int = 10, most: int = 300) -> int:
    """How many rounds fit the budget, within [least, most]."""
    return max(least, min(most, int(budget_seconds / max(round_seconds, 1e-9))))


def interleaved(turns: Turns, rounds: int) -> Iterator[tuple[str, Call]]:
    """Each provider once a round; the order shifts and the input set moves on with every round."""
    names = list(turns)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            yield name, turns[name][index % len(turns[name])]


def warm_up(turns: Turns, synchronize: Callable[[], None], rounds: int = 3) -> float:
    """Run some rounds untimed and return the seconds that the last one took, preparation included."""
    seconds = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        for _, call in interleaved(turns, 1):
            call.prepare()
            call.run()
        synchronize()
        seconds = time.perf_counter() - begin
    return seconds


def device_times(turns: Turns, budget: float, between: Callable[[], None] = nothing, per_run: int = 1) -> Samples:
    """CUDA events around one run, divided by `per_run`. `between` (the L2 flush) runs after each prepare.

    What `between` or `prepare` enqueues keeps the device busy while the host enqueues the run, so the host's cost is
    hidden as long as it is shorter; the launch itself is inside the events.
    """
    rounds = plan_rounds(warm_up(turns, torch.cuda.synchronize), budget)
    events = {name: [] for name in turns}
    for name, call in interleaved(turns, rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call.prepare()
        between()
        start.record()
        call.run()
        stop.record()
        events[name].append((start, stop))
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(stop) * 1e3 / per_run for start, stop in pairs] for name, pairs in events.items()
    }


def captured(calls: list[Call]) -> list[Call]:
    """One Call that replays a CUDA graph of all `calls`; divide its time by their number.

    Results stay alive together, so every captured call writes memory of its own; so do the calls, since the graph
    reads what they own. `prepare` replays once untimed: the timed launch is then enqueued while the device still
    works, and the graph finds only its own tail in cache.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call.run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = calls, [call.run() for call in calls]

    def replay() -> list:
        graph.replay()
        return kept[1]

    return [Call(replay, prepare=replay)]


def host_times(turns: Turns, synchronize: Callable[[], None]) -> Samples:
    """Time to enqueue one call, the mean of a batch; the device is idle at the start of each batch."""
    samples = {name: [] for name in turns}
    warm_up(turns, synchronize)
    gc.disable()
    try:
        for name, call in interleaved(turns, _HOST_ROUNDS):
            run = call.run
            synchronize()
            begin = time.perf_counter_ns()
            for _ in range(_HOST_BATCH):
                run()
            samples[name].append((time.perf_counter_ns() - begin) / _HOST_BATCH / 1e3)
    finally:
        gc.enable()
    synchronize()
    return samples


def wall_times(turns: Turns, budget: float) -> Samples:
    """The host's clock around one call, for work that is done when the call returns."""
    rounds = plan_rounds(warm_up(turns, nothing), budget)
    samples = {name: [] for name in turns}
    for name, call in interleaved(turns, rounds):
        call.prepare()
        begin = time.perf_counter()
        call.run()
        samples[name].append((time.perf_counter() - begin) * 1e6)
    return samples
