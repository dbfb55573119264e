"""Time against size on log-log axes, with the floor, as a PNG."""

from pathlib import Path

from .model import Case, Row, floor_micros
from .providers import ADDMM, COMPILE, EAGER, LIGER, LINEAR, MUL, NOARCH, OURS, UNPACKED
from .report import Report, write_whole

_COLUMNS = 3
_PROVIDERS = (OURS, EAGER, COMPILE, LIGER, MUL, UNPACKED, LINEAR, ADDMM, NOARCH)
_COLOURS = {name: f"C{index}" for index, name in enumerate(_PROVIDERS)}


def title(case: Case) -> str:
    """The panel that a case belongs to."""
    return f"{case.op} {case.form} {case.dtype} ({case.mode})" + (" tuned" if case.tuned else "")


def panels(rows: list[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Timed rows as panel title -> provider -> (elements of one half, microseconds), sorted by size."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if row.micros is not None:
            points = found.setdefault(title(row.case), {}).setdefault(row.provider, [])
            points.append((row.case.rows * row.case.cols, row.micros))
    for lines in found.values():
        for points in lines.values():
            points.sort()
    return found


def save(report: Report, folder: Path) -> str:
    """Write sweep.png into `folder`; returns a line that says so, or why there is no plot."""
    found = panels(report.rows)
    if not found:
        return "no plot: no row was timed"
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    element_bytes = {title(row.case): row.case.minimal_bytes / (row.case.rows * row.case.cols) for row in report.rows}
    height = -(-len(found) // _COLUMNS)
    figure, axes = pyplot.subplots(
        height, _COLUMNS, figsize=(5 * _COLUMNS, 4 * height), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (name, lines) in zip(axes.flat, found.items(), strict=False):
        for provider, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", color=_COLOURS[provider], label=provider)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        if "(host)" not in name:
            ends = [sizes[0] / 1.5, sizes[-1] * 1.5]
            floors = [floor_micros(element_bytes[name] * size, report.bandwidth) for size in ends]
            axis.plot(ends, floors, "k--", label="floor")
        axis.set(title=name, xlabel="rows x cols", ylabel="microseconds", xscale="log", yscale="log")
        axis.set_xticks(sizes, [f"{size:.3g}" for size in sizes], rotation=30)
        axis.set_xticks([], minor=True)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize="small")
    write_whole(folder / "sweep.png", lambda path: figure.savefig(path, dpi=120))
    pyplot.close(figure)
    return f"written: {folder}/sweep.png"
