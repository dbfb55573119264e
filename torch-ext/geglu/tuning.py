"""The choice of matrix-product algorithms for ``linear``: measured when asked to, kept, saved and loaded as JSON.

Without these functions every shape runs the algorithm that cuBLASLt's heuristic puts first. Nothing is ever measured
unless ``tune`` is called.
"""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from .dispatch import ops
from .linear import activation_code, explained_linear, tf32_allowed

logger = logging.getLogger("geglu")

_FORMAT = 1


class Tuned(NamedTuple):
    """What ``tune`` measured for one matrix product: microseconds of the heuristic's first choice and of the best."""

    problem: str
    candidates: int
    first_us: float
    best_us: float


class Loaded(NamedTuple):
    """How many entries ``load_tuning`` took, and for each of the others its place and why it was refused."""

    taken: int
    refused: tuple[str, ...]


def tune(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
) -> tuple[Tuned, ...]:
    """Times the algorithms for ``linear`` with these arguments and keeps the fastest for this process.

    If a gradient would be asked for, the products of the training step are tuned, forward and backward. The choice
    holds for all later calls with the same device, dtype, sizes, strides, alignments and activation. It takes
    milliseconds to seconds and waits for the device. The arguments' values do not matter and are not written.

    Args:
        x, weight, bias, activation: As for ``linear``.

    Returns:
        One ``Tuned`` for each product that was timed. Empty where there is nothing to choose: on the CPU, in float64,
        and where cuBLASLt cannot take the arguments; the logger "geglu" then says so at INFO.

    Raises:
        RuntimeError: under ``torch.compile``, while a CUDA graph is captured, or as ``linear``.
        TypeError, ValueError: as ``linear``.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("tune: must be called outside torch.compile, which cannot trace measurements")
    code = activation_code(activation)
    try:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("tune: must not be called while a CUDA graph is captured: call it before")
        allow_tf32 = x.is_cuda and x.dtype is torch.float32 and tf32_allowed()
        training = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
        )
        with torch.no_grad():
            found = ops.linear_tune.default(x, weight, bias, code, allow_tf32, training)
    except (AttributeError, RuntimeError) as error:
        blame = explained_linear(error, "tune", x, weight, bias)
        if blame is error:
            raise
        raise blame from error
    if not found:
        logger.info("tune: nothing to choose for %s on %s", x.dtype, x.device)
    return tuple(_tuned(_parse(line)) for line in found.splitlines())


def save_tuning(path: str | os.PathLike) -> int:
    """Writes every choice that ``tune`` or ``load_tuning`` made in this process to ``path``, as JSON.

    The file is written whole or not at all; an existing one is replaced.

    Returns:
        The number of entries written.

    Raises:
        OSError: the file cannot be written.
    """
    entries = [_parse(line) for line in ops.linear_export_tuning.default().splitlines()]
    path = Path(path)
    text = json.dumps({"format": _FORMAT, "entries": entries}, indent=1) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(entries)


def load_tuning(path: str | os.PathLike) -> Loaded:
    """Takes the choices that ``save_tuning`` wrote. Choices that are here already are replaced.

    An entry is refused if it does not fit: another GPU model, another version of cuBLASLt, a field that is missing or
    unknown. Refused entries are reported and change nothing.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of ``save_tuning``; nothing is taken.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"load_tuning: {path} must hold JSON, but: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"load_tuning: {path} must be of format {_FORMAT}, but is of {found!r}")
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise ValueError(f"load_tuning: entries of {path} must be a list, but is {type(entries).__name__}")
    reasons = [_take(entry) for entry in entries]
    refused = tuple(f"entry {place}: {reason}" for place, reason in enumerate(reasons) if reason)
    return Loaded(len(entries) - len(refused), refused)


def _take(entry: object) -> str:
    """Hands one entry to the operators; returns "" or why it was refused."""
    if not isinstance(entry, dict):
        return f"must be an object, but is {type(entry).__name__}"
    for name, value in entry.items():
        if not isinstance(value, str) or not value or any(c.isspace() or c == "=" for c in name + value):
            return f"{name} must be a word, but is {value!r}"
    return ops.linear_import_tuning.default(" ".join(f"{name}={value}" for name, value in entry.items()))


def _parse(line: str) -> dict[str, str]:
    """The fields of one line of space-separated name=value."""
    return dict(field.split("=", 1) for field in line.split())


def _tuned(fields: dict[str, str]) -> Tuned:
    return Tuned(fields["problem"], int(fields["candidates"]), float(fields["first_us"]), float(fields["best_us"]))
