"""What a reader gets: the table, the JSON file, and files that are whole or not there."""

import json

import pytest
import torch

from tools.sweep import plot, probes, providers, report
from tools.sweep.model import Bar, Case, Ceilings, Row
from tools.sweep.plot import panels
from tools.sweep.report import Report


@pytest.fixture
def results():
    case = Case("geglu", 8192, 3072, ("ours", "eager", "liger"), "event")
    rows = [
        Row(case, "ours", micros=40.0, fastest=39.5, spread=0.01, error=2.4e-3, error_bound=2.5e-3),
        Row(case, "eager", micros=80.0, spread=0.02),
        Row(case, "liger", status="n/a", note="not | here"),
    ]
    bars = [Bar("ours / eager", "o", 0.6, bottom="e"), Bar("broken", "nan", 1.0), Bar("absent", "none", 1.0)]
    values = {"o": 40.0, "e": 80.0, "nan": float("nan")}
    return Report({"torch": "2"}, Ceilings(4e12), rows, bars, values, ["start-up: no such file"])


def test_cells_hold_time_floor_and_ratios(results):
    header, ours, eager, liger = report.table(results)
    cell = dict(zip(header, ours, strict=True))
    assert cell["us"] == "40.00"
    assert cell["min us"] == "39.50"
    assert cell["MB"] == "150.99"
    assert cell["floor us"] == "37.75"
    assert cell["x floor"] == "1.06"
    assert cell["x eager"] == "0.50"
    assert cell["x liger"] == ""
    assert dict(zip(header, eager, strict=True))["x eager"] == ""
    assert dict(zip(header, liger, strict=True))["us"] == "n/a"


def test_host_rows_have_no_floor():
    case = Case("geglu", 1, 14336, ("ours",), "host")
    header, ours = report.table(Report({}, Ceilings(4e12), [Row(case, "ours", micros=5.0, spread=0.0)]))
    cell = dict(zip(header, ours, strict=True))
    assert cell["x floor"] == cell["floor us"] == ""


def test_a_block_of_256_rows_shows_its_floor_and_the_ratio_to_quack():
    case = Case("geglu_mlp", 256, 16384, ("ours", "quack"), "graph", inner=2048)
    rows = [Row(case, "ours", micros=77.31), Row(case, "quack", micros=96.64)]
    header, ours, _ = report.table(Report({}, Ceilings(4e12, read=4e12, gemm=800e12), rows))
    cell = dict(zip(header, ours, strict=True))
    assert (cell["floor us"], cell["x floor"], cell["x quack"]) == ("64.42", "1.20", "0.80")


def test_every_measured_ceiling_is_shown_with_its_drift():
    start, end = Ceilings(4e12, read=4.25e12, gemm=790e12), Ceilings(4.1e12, read=4.2e12, gemm=760e12)
    shown = report.ceiling_lines(Report({}, start.best(end), values=report.drift_values(start, end)))
    assert shown == [
        "copy bandwidth (read + written bytes): 4.100 TB/s (4.000 at the start, 4.100 at the end)",
        "read bandwidth: 4.250 TB/s (4.250 at the start, 4.200 at the end)",
        "8192 x 8192 x 8192 bf16 product: 790.000 TFLOP/s (790.000 at the start, 760.000 at the end)",
    ]
    content = json.loads(report.as_json(Report({}, start)))
    names = ("copy_bandwidth_bytes_per_second", "read_bandwidth_bytes_per_second", "gemm_flop_per_second")
    assert [content[name] for name in names] == [4e12, 4.25e12, 790e12]


def test_markdown_rows_have_as_many_cells_as_the_header(results):
    text = report.markdown(results)
    tables = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables[:5]} == {20}
    assert {line.count("|") for line in tables[5:]} == {5}
    assert "| ours / eager | <= 0.6 | 0.5 | MET |" in text
    assert "| broken | <= 1 | nan | MISSED |" in text
    assert "| absent | <= 1 |  | not measured |" in text
    assert "start-up: no such file" in text
    assert "4.000 TB/s" in text


def test_terminal_columns_line_up_and_empty_ones_are_left_out():
    assert report.aligned([("a", "empty", "b"), ("long", "", "x"), ("c", "", "y")]) == "a     b\nlong  x\nc     y"


def test_json_is_standard_and_complete(results):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    content = json.loads(report.as_json(results), parse_constant=refuse)
    assert [row["micros"] for row in content["rows"]] == [40.0, 80.0, None]
    assert content["rows"][0]["bytes"] == 3 * 2 * 8192 * 3072
    assert [bar["verdict"] for bar in content["bars"]] == ["MET", "MISSED", "not measured"]
    assert content["bars"][1]["measured"] is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "sweep.md"
    path.write_text("old")

    def half(partial):
        partial.write_text("new, but only ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        report.write_whole(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_saving_twice_replaces(results, tmp_path):
    report.save(results, tmp_path / "new" / "folder")
    results.facts["torch"] = "3"
    report.save(results, tmp_path / "new" / "folder")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["sweep.json", "sweep.md"]
    assert "- torch: 3" in (tmp_path / "new" / "folder" / "sweep.md").read_text()


def test_panels_hold_timed_rows_by_size():
    cases = [Case("geglu", rows, 10, ("ours",), "event") for rows in (8, 2)]
    rows = [Row(case, "ours", micros=float(case.rows)) for case in cases] + [Row(cases[0], "liger", status="n/a")]
    assert panels(rows, Ceilings(copy=60e6)) == {
        "geglu tanh bfloat16 (event)": {"ours": [(20, 2.0), (80, 8.0)], "floor": [(20, 2.0), (80, 8.0)]}
    }


def test_the_plot_knows_every_provider(tmp_path):
    pytest.importorskip("matplotlib")
    case = Case("geglu", 2, 10, providers.NAMES, "event")
    rows = [Row(case, name, micros=2.0) for name in providers.NAMES]
    assert plot.save(Report({}, Ceilings(60e6), rows), tmp_path).startswith("written")
    assert (tmp_path / "sweep.png").stat().st_size > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ulp_distance_counts_representable_values(dtype):
    one = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.0], dtype=dtype)
    next_one = (torch.tensor([1.0], dtype=dtype).view(torch.int16) + 1).view(dtype)
    tiny = torch.tensor([1], dtype=torch.int16).view(dtype)
    other = torch.cat([next_one, -tiny, -next_one, one[3:4], -one[1:2]])
    assert probes.ulp_distance(one, other).tolist() == [1, 1, 1, 0, 0]
    assert probes.ulp_distance(tiny, -tiny).tolist() == [2]
