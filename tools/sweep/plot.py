"""Time against size on log-log axes, with the floor, as a PNG."""

from pathlib import Path

from .model import Case, Ceilings, Row
from .providers import NAMES
from .report import Report, write_whole

_COLUMNS = 3
_FLOOR = "floor"


def title(case: Case) -> str:
    """The panel that a case belongs to."""
    return f"{case.op} {case.form} {case.dtype} ({case.mode})" + (" tuned" if case.tuned else "")


def panels(rows: list[Row], ceilings: Ceilings) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Timed rows as panel title -> provider or "floor" -> (elements of one half, microseconds), sorted by size."""
    found: dict[str, dict[str, set[tuple[int, float]]]] = {}
    for row in rows:
        if row.micros is not None:
            lines = found.setdefault(title(row.case), {})
            size = row.case.rows * row.case.cols
            lines.setdefault(row.provider, set()).add((size, row.micros))
            floor = None if row.case.mode == "host" else row.case.floor_micros(ceilings)
            if floor is not None:
                lines.setdefault(_FLOOR, set()).add((size, floor))
    return {name: {who: sorted(points) for who, points in lines.items()} for name, lines in found.items()}


def save(report: Report, folder: Path) -> str:
    """Write sweep.png into `folder`; returns a line that says so, or why there is no plot."""
    found = panels(report.rows, report.ceilings)
    if not found:
        return "no plot: no row was timed"
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {name: {"color": pyplot.colormaps["tab20"](index)} for index, name in enumerate(NAMES)}
    styles[_FLOOR] = {"color": "black", "linestyle": "--"}
    height = -(-len(found) // _COLUMNS)
    figure, axes = pyplot.subplots(
        height, _COLUMNS, figsize=(5 * _COLUMNS, 4 * height), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (name, lines) in zip(axes.flat, found.items(), strict=False):
        for provider, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=provider, **styles[provider])
        sizes = sorted({size for points in lines.values() for size, _ in points})
        axis.set(title=name, xlabel="rows x cols", ylabel="microseconds", xscale="log", yscale="log")
        axis.set_xticks(sizes, [f"{size:.3g}" for size in sizes], rotation=30)
        axis.set_xticks([], minor=True)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize="small")
    write_whole(folder / "sweep.png", lambda path: figure.savefig(path, dpi=120))
    pyplot.close(figure)
    return f"written: {folder}/sweep.png"
