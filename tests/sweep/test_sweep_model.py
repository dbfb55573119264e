"""Bars, floors and suites: a wrong verdict or a misspelt name here would go unnoticed in a table of numbers."""

import pytest

from tools.sweep import linear, suites
from tools.sweep.model import Bar, Case, Ceilings, Row, row_values


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [
        (1.0, False, "MET"),
        (1.5, False, "MET"),
        (1.5001, False, "MISSED"),
        (1.5, True, "MET"),
        (1.4999, True, "MISSED"),
        (float("nan"), False, "MISSED"),
        (float("nan"), True, "MISSED"),
        (float("inf"), False, "MISSED"),
    ],
)
def test_verdict_of_a_single_value(value, at_least, verdict):
    assert Bar("", "t", 1.5, at_least=at_least).verdict({"t": value}) == verdict


def test_verdict_of_a_ratio():
    bar = Bar("", "ours", 0.86, bottom="liger")
    assert bar.measured({"ours": 40.0, "liger": 50.0}) == pytest.approx(0.8)
    assert bar.verdict({"ours": 40.0, "liger": 50.0}) == "MET"
    assert bar.verdict({"ours": 50.0, "liger": 40.0}) == "MISSED"


@pytest.mark.parametrize("values", [{}, {"ours": 1.0}, {"liger": 1.0}])
def test_a_bar_without_both_values_is_not_judged(values):
    assert Bar("", "ours", 0.86, bottom="liger").verdict(values) == "not measured"


def test_floor_counts_three_tensors_forward_and_five_backward():
    elements = 8192 * 3072
    assert Case("geglu", 8192, 3072, (), "event").minimal_bytes == 3 * 2 * elements
    assert Case("geglu_packed", 8192, 3072, (), "event", dtype="float32").minimal_bytes == 3 * 4 * elements
    assert Case("geglu_backward", 8192, 3072, (), "event", dtype="float64").minimal_bytes == 5 * 8 * elements


def test_pointwise_floors_are_bytes_at_the_speed_of_a_copy():
    ceilings = Ceilings(copy=4.27e12, read=1e9, gemm=1e9)
    assert Case("geglu", 8192, 3072, (), "event").floor_micros(ceilings) == pytest.approx(35.36, abs=0.01)


# 3 * 2048 * 16384 * 2 bytes at 4 TB/s are 50.3 us; 6 * 2048 * 16384 FLOP a row at 800 TFLOP/s reach that at 200 rows.
@pytest.mark.parametrize(
    ("rows", "micros"), [(1, 50.332), (199, 50.332), (201, 50.583), (256, 64.425), (8192, 2061.6)]
)
def test_the_blocks_floor_is_the_longer_of_its_weights_and_its_products(rows, micros):
    case = Case("geglu_mlp", rows, 16384, (), "graph", inner=2048)
    assert case.floor_micros(Ceilings(copy=1.0, read=4e12, gemm=800e12)) == pytest.approx(micros, rel=1e-4)


@pytest.mark.parametrize("ceilings", [Ceilings(4e12), Ceilings(4e12, read=4e12), Ceilings(4e12, gemm=8e14)])
def test_the_block_has_no_floor_without_both_of_its_ceilings(ceilings):
    case = Case("geglu_mlp", 1, 16384, ("ours",), "graph", inner=2048)
    assert case.floor_micros(ceilings) is None
    values = row_values([Row(case, "ours", micros=1.0)], ceilings)
    assert values == {case.value_name("ours"): 1.0}
    assert Bar("", case.value_name("ours"), 1.2, case.value_name("floor")).verdict(values) == "not measured"


def test_the_best_of_two_ceilings_is_the_larger_of_each_rate():
    assert Ceilings(2.0, 3.0, 4.0).best(Ceilings(1.0, 5.0, 4.5)) == Ceilings(2.0, 5.0, 4.5)
    assert Ceilings(2.0).best(Ceilings(3.0)) == Ceilings(3.0)


@pytest.mark.parametrize("name", ["copy", "read", "gemm"])
def test_a_ceiling_is_positive(name):
    for value in (0.0, float("nan")):
        with pytest.raises(ValueError, match=name):
            Ceilings(**({"copy": 1.0} | {name: value}))


@pytest.mark.parametrize(
    ("field", "value"), [("op", "swiglu"), ("form", "exact"), ("mode", "cpu"), ("dtype", "int8"), ("rows", 0)]
)
def test_a_case_names_its_wrong_field(field, value):
    arguments = {"op": "geglu", "rows": 1, "cols": 1, "providers": (), "mode": "event", field: value}
    with pytest.raises(ValueError, match=field):
        Case(**arguments)


def test_row_values_hold_the_floor_and_only_timed_rows():
    case = Case("geglu", 2, 5, ("ours", "liger"), "event")
    rows = [Row(case, "ours", micros=3.0), Row(case, "liger", status="FAILED")]
    assert row_values(rows, Ceilings(copy=60e6)) == {case.value_name("floor"): 1.0, case.value_name("ours"): 3.0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("suite", list(suites.SUITES))
def test_every_bar_refers_to_what_its_suite_measures(suite, device):
    found = suites.SUITES[suite](device)
    assert found.cases
    known = {case.value_name(who) for case in found.cases for who in (*case.providers, "floor")}
    known |= {f"startup: {name}" for name in ("seconds", "new / seen", "new / seen, torch.mul")}
    for dtype in ("bfloat16", "float16"):
        for form in ("tanh", "none"):
            for name in ("equal", "ulp", "gelu ulp", "error", "eager error", "tail", "eager tail"):
                known.add(f"accuracy {dtype} {form}: {name}")
    known |= {linear.memory_name(case, who) for case in found.memory for who in ("ours", "eager")}
    for bar in found.bars:
        assert bar.top in known
        assert not bar.bottom or bar.bottom in known


def test_quack_meets_us_at_the_two_shapes_of_8192_rows_and_nowhere_else():
    found = suites.issue5("cuda")
    cases = [case for case in found.cases if "quack" in case.providers]
    assert [case.shape for case in cases] == ["8192x3584x14336", "8192x768x3072"]
    quack = {bar.bottom: (bar.top, bar.limit_text) for bar in found.bars if bar.bottom.endswith(": quack")}
    assert quack == {
        case.value_name("quack"): (case.value_name("ours"), limit)
        for case, limit in zip(cases, ("<= 1.01", "<= 1"), strict=True)
    }


def test_256_rows_are_held_to_the_floor_and_to_eager():
    bars = [bar for bar in suites.issue5("cuda").bars if " 256x" in bar.top and bar.top.endswith(": ours")]
    limits = [(bar.top.split()[1], bar.limit) for bar in bars if bar.bottom.endswith(": floor")]
    assert limits == [(f"256x{shape}", 1.2) for shape in ("2048x16384", "3584x14336", "5376x21504")]
    assert sum(bar.limit == 0.95 and bar.bottom.endswith(": eager") for bar in bars) == 3


def test_modes_fit_the_device():
    for suite in suites.SUITES.values():
        assert {case.mode for case in suite("cpu").cases} == {"wall"}
        assert "wall" not in {case.mode for case in suite("cuda").cases}
