"""The results as a Markdown table and a JSON file, each written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .model import Bar, Case, Ceilings, Row
from .providers import COMPILE, EAGER, LIGER, QUACK

NOTES = (
    """Providers of one case run in the same process and take turns, round by round, on rotated inputs; times are
    medians, the spread is the interquartile range over the median.""",
    """Before it is timed, every provider is checked against fp64: relative L2 error at most 1.05 x eager's. A row
    that is further off is FAILED and has no time.""",
    """floor = the bytes that must move (forward 3 tensors, backward 5) / the copy bandwidth of this run (read +
    written bytes). Small cases cannot reach it: a launch alone takes microseconds.""",
    """geglu_mlp: floor = the larger of the three weights' bytes / the read bandwidth of this run and the three
    products' FLOP / its rate of an 8192 x 8192 x 8192 bf16 product.""",
    """quack takes gate and up in one weight; that is laid out, and its own autotuner has run, before the clock
    starts.""",
    """A peer that cannot be imported has no time (n/a, with the reason), and the bars on it are not measured.""",
    """event: CUDA events around one call, after a kernel that overwrites a buffer larger than twice the L2. That
    kernel still runs while the host enqueues the call, so the host's cost is hidden; the launch is included, and so
    is writing back what the flush left dirty in the L2.""",
    """graph: replay of a CUDA graph of as many calls as it takes to pass twice the L2, over their number: GPU time
    without the host.""",
    """host: time to enqueue one call under no_grad, the mean of a batch of 50 that starts on an idle device.""",
    """wall: the host's clock around one call, for the CPU.""",
    """backward is the kernel alone: ours by its private op, liger by geglu_backward on copies refilled before each
    call outside the timed region (it writes over its inputs), eager by autograd.grad on a retained graph.""",
    """linear: shapes are rows x inner x cols; the floor counts bytes alone, so large products are far above it by the
    arithmetic they need. linear_train is forward and backward. Tuned rows come after all untuned ones of the run, and
    are measured after `tune`.""",
    """geglu_packed: liger copies the two halves to contiguous tensors first, inside the timed call.""",
)

# Each ceiling's field, its name, and the unit of 10^12 of it.
_CEILINGS = (
    ("copy", "copy bandwidth (read + written bytes)", "TB/s"),
    ("read", "read bandwidth", "TB/s"),
    ("gemm", "8192 x 8192 x 8192 bf16 product", "TFLOP/s"),
)

_HEADER = (
    "op",
    "direction",
    "shape",
    "dtype",
    "form",
    "mode",
    "provider",
    "us",
    "min us",
    "spread",
    "MB",
    "floor us",
    "x floor",
    "x eager",
    "x compile",
    "x liger",
    "x quack",
    "error",
    "note",
)


@dataclass
class Report:
    """Everything a run found. `values` holds what bars refer to."""

    facts: dict[str, str]
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # probes and cases that could not run


def drift_values(start: Ceilings, end: Ceilings) -> dict[str, float]:
    """Ceilings measured at the start and at the end of a run, as values of its report."""
    return {
        _at(when, name): getattr(ceilings, rate)
        for when, ceilings in (("start", start), ("end", end))
        for rate, name, _ in _CEILINGS
        if getattr(ceilings, rate) is not None
    }


def ceiling_lines(report: Report) -> list[str]:
    """The ceilings that the floors use, the larger of those at the start and at the end, and these two, which show the
    run's drift."""
    lines = []
    for rate, name, unit in _CEILINGS:
        value = getattr(report.ceilings, rate)
        if value is not None:
            seen = {when: report.values.get(_at(when, name)) for when in ("start", "end")}
            drift = ", ".join(f"{rate_then / 1e12:.3f} at the {when}" for when, rate_then in seen.items() if rate_then)
            lines.append(f"{name}: {value / 1e12:.3f} {unit}" + (f" ({drift})" if drift else ""))
    return lines


def _at(when: str, name: str) -> str:
    return f"{name}, at the {when}"


def row_cells(row: Row, ceilings: Ceilings, times: dict[str, float]) -> tuple[str, ...]:
    """The printed cells of one row; `times` holds the microseconds of the same case by provider."""
    case = row.case
    floor = None if case.mode == "host" else case.floor_micros(ceilings)
    timed = row.micros is not None

    def against(other: float | None) -> str:
        return f"{row.micros / other:.2f}" if timed and other else ""

    return (
        case.op,
        case.direction,
        case.shape,
        case.dtype,
        case.form,
        case.mode,
        row.provider,
        f"{row.micros:.2f}" if timed else row.status,
        f"{row.fastest:.2f}" if row.fastest is not None else "",
        f"{row.spread:.1%}" if row.spread is not None else "",
        f"{case.minimal_bytes / 1e6:.2f}",
        f"{floor:.2f}" if floor is not None else "",
        against(floor),
        *(against(times.get(who)) if who != row.provider else "" for who in (EAGER, COMPILE, LIGER, QUACK)),
        f"{row.error:.2e}" if row.error is not None else "",
        row.note,
    )


def table(report: Report) -> list[tuple[str, ...]]:
    """All rows as cells, header first."""
    times: dict[Case, dict[str, float]] = {}
    for row in report.rows:
        if row.micros is not None:
            times.setdefault(row.case, {})[row.provider] = row.micros
    return [_HEADER] + [row_cells(row, report.ceilings, times.get(row.case, {})) for row in report.rows]


def bar_table(report: Report) -> list[tuple[str, ...]]:
    """Bars beside what was measured, header first."""
    lines = [("bar", "limit", "measured", "verdict")]
    for bar in report.bars:
        measured = bar.measured(report.values)
        shown = "" if measured is None else f"{measured:.4g}"
        lines.append((bar.what, bar.limit_text, shown, bar.verdict(report.values)))
    return lines


def aligned(lines: list[tuple[str, ...]]) -> str:
    """The cells in columns of equal width, for a terminal; an empty column is left out."""
    kept = [column for column in zip(*lines, strict=True) if any(column[1:])]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in kept]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))


def markdown(report: Report) -> str:
    """The whole report as Markdown."""
    parts = ["# GeGLU sweep", ""]
    parts += [f"- {name}: {value}" for name, value in report.facts.items()]
    parts += [*(f"- {line}" for line in ceiling_lines(report)), ""]
    if report.rows:
        parts += [_pipes(table(report)), ""]
    if report.bars:
        parts += ["## Bars", "", _pipes(bar_table(report)), ""]
    if report.problems:
        parts += ["## Could not run", "", *(f"- {problem}" for problem in report.problems), ""]
    parts += ["## How it was measured", "", *(f"- {one_line(note)}" for note in NOTES), ""]
    return "\n".join(parts)


def one_line(text: str) -> str:
    return " ".join(text.split())


def _pipes(lines: list[tuple[str, ...]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in lines]
    rule = ["---"] * len(escaped[0])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [escaped[0], rule, *escaped[1:]])


def as_json(report: Report) -> str:
    """Everything in the report, machine-readable. A NaN is written as null."""
    content = {
        "facts": report.facts,
        "copy_bandwidth_bytes_per_second": report.ceilings.copy,
        "read_bandwidth_bytes_per_second": report.ceilings.read,
        "gemm_flop_per_second": report.ceilings.gemm,
        "rows": [
            asdict(row) | {"bytes": row.case.minimal_bytes, "floor_micros": row.case.floor_micros(report.ceilings)}
            for row in report.rows
        ],
        "bars": [
            {"measured": bar.measured(report.values), "verdict": bar.verdict(report.values)} | asdict(bar)
            for bar in report.bars
        ],
        "values": report.values,
        "problems": report.problems,
        "notes": [one_line(note) for note in NOTES],
    }
    return json.dumps(_without_nan(content), indent=2, allow_nan=False) + "\n"


def _without_nan(content):
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    if isinstance(content, float) and not abs(content) < float("inf"):
        return None
    return content


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place; on any failure `path` stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        write(partial)
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save(report: Report, folder: Path) -> None:
    """Write sweep.md and sweep.json into `folder`."""
    write_whole(folder / "sweep.md", lambda path: path.write_text(markdown(report), encoding="utf-8"))
    write_whole(folder / "sweep.json", lambda path: path.write_text(as_json(report), encoding="utf-8"))
