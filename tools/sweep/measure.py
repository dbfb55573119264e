"""One case from inputs to rows: check every provider against fp64, then let those that are right take turns."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from . import reference, timing
from .linear import LinearInputs
from .model import FAILED, NOT_AVAILABLE, Case, Ceilings, Row
from .providers import (
    EAGER,
    LAYER,
    OURS,
    PACKED,
    UNPACKED,
    Call,
    Inputs,
    Peers,
    Unavailable,
    make_inputs,
    make_provider,
    nothing,
)

# Providers whose failure is the project's own; a peer that cannot run only leaves its row empty.
_MUST_RUN = (OURS, PACKED, LAYER, UNPACKED, EAGER)

_MAX_SETS = {"event": 6, "graph": 4096, "host": 1, "wall": 8}

# The start of a replay costs some 3 us (H200), which are not those of the calls in it: a replay holds many calls, or
# few that last.
_REPLAY_MICROS = 400.0
_REPLAY_CALLS = 16
_PRESENT_GPU = Ceilings(copy=4e12, read=4e12, gemm=7e14)  # roughly; it decides lengths alone


@dataclass
class Lab:
    """Where measurements are made: the device, the participants, the seconds of timing for a case."""

    device: torch.device
    peers: Peers
    budget: float = 1.0
    flush: Callable[[], None] = field(default=nothing)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(case: Case, lab: Lab) -> list[Row]:
    """The rows of `case`, one for each of its providers, in their order. Raises only where no input can be made."""
    with torch.no_grad():
        inputs = [make_inputs(case, lab.device, seed=1000 + index) for index in range(_set_count(case, lab))]
        rotations = replay_rotations(case, len(inputs))
        bounds = reference.bound(_eager_errors(case, lab, inputs[0]))
        rows, turns = [], {}
        for name in case.providers:
            row = Row(case, name)
            rows.append(row)
            try:
                turns[name] = _admit(row, lab, inputs, bounds, rotations)
            except Unavailable as reason:
                row.status, row.note = NOT_AVAILABLE, str(reason)
            except Exception as error:  # a peer may fail in any way; the run goes on and the row says so
                row.status = FAILED if name in _MUST_RUN else NOT_AVAILABLE
                row.note = f"{type(error).__name__}: {_first_line(error)}"
        admitted = {name: calls for name, calls in turns.items() if calls}
        if admitted:
            samples = _time(case, lab, admitted, len(inputs) * rotations)
            for row in rows:
                if row.provider in samples:
                    row.micros, row.fastest, row.spread = timing.summary(samples[row.provider])
    return rows


def _set_count(case: Case, lab: Lab) -> int:
    """Input sets to rotate over: enough to pass the cache, and two at least where the mode rotates at all."""
    wanted = max(2, -(-timing.cache_bytes(lab.device) // case.minimal_bytes))
    return min(wanted, _MAX_SETS[case.mode])


def replay_rotations(case: Case, sets: int) -> int:
    """How often a replay goes over the input sets."""
    lasting = _REPLAY_MICROS / (sets * case.floor_micros(_PRESENT_GPU))
    return max(1, math.ceil(min(lasting, _REPLAY_CALLS / sets)))


def _eager_errors(case: Case, lab: Lab, inputs: Inputs) -> list[float]:
    # Also where eager does not take part, or cannot in this mode: it sets the bound for the others.
    plain = replace(case, providers=(EAGER,), mode="wall", tuned=False)
    results = make_provider(EAGER, plain, lab.peers).bind(inputs).run()
    return reference.relative_errors(plain, inputs, _as_tuple(results))


def _admit(row: Row, lab: Lab, inputs: list[Inputs], bounds: list[float], rotations: int) -> list[Call]:
    """The calls of the row's provider, or [] after marking the row FAILED because its numbers are wrong."""
    provider = make_provider(row.provider, row.case, lab.peers)
    calls = [provider.bind(one) for one in inputs]
    if provider.checked:
        _poison(inputs[0])
        calls[0].prepare()
        errors = reference.relative_errors(row.case, inputs[0], _as_tuple(calls[0].run()))
        # The result with the least room is the one to report.
        row.error, row.error_bound = max(zip(errors, bounds, strict=True), key=lambda pair: _strain(*pair))
        if not reference.within(errors, bounds):
            row.status = FAILED
            row.note = f"error {row.error:.3g} against fp64, allowed {row.error_bound:.3g}: not timed"
            return []
    return timing.captured(calls * rotations) if row.case.mode == "graph" else calls


def _strain(error: float, limit: float) -> float:
    return error / limit if error == error else float("inf")


def _poison(inputs: Inputs | LinearInputs) -> None:
    """Leave NaN in the memory that the allocator hands out next, so that an unwritten element cannot look right."""
    like = inputs.grad if isinstance(inputs, LinearInputs) else inputs.gate  # of the result's size or more
    blocks = [torch.full_like(like, float("nan"), memory_format=torch.contiguous_format) for _ in range(3)]
    del blocks


def _time(case: Case, lab: Lab, turns: timing.Turns, per_run: int) -> timing.Samples:
    if case.mode == "event":
        # A forward and a backward pass keep the host busy for longer than one flush keeps the device.
        flushes = 16 if case.op == "linear_train" else 1

        def flush() -> None:
            for _ in range(flushes):
                lab.flush()

        return timing.device_times(turns, lab.budget, between=flush)
    if case.mode == "graph":
        return timing.device_times(turns, lab.budget, per_run=per_run)
    if case.mode == "host":
        return timing.host_times(turns, lab.synchronize)
    return timing.wall_times(turns, lab.budget)


def _as_tuple(results) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
