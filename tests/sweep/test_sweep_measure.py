"""A provider with wrong numbers must be marked FAILED and never timed, and a missing peer must not stop the run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tools.sweep import ceilings, environment, reference, run, suites, timing
from tools.sweep.__main__ import parse
from tools.sweep.measure import Lab, measure, replay_rotations
from tools.sweep.model import Bar, Case, Ceilings, row_values
from tools.sweep.providers import (
    COMPILE,
    EAGER,
    LAYER,
    LIGER,
    MUL,
    OURS,
    PACKED,
    QUACK,
    UNPACKED,
    Call,
    Peers,
    make_inputs,
)

ROWS, COLS = 24, 136


def geglu(gate, up, *, approximate="tanh"):
    return F.gelu(gate, approximate=approximate) * up


def geglu_packed(x, *, approximate="tanh"):
    return geglu(*x.chunk(2, dim=-1), approximate=approximate)


def geglu_backward(grad, gate, up, tanh):
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    with torch.enable_grad():
        out = geglu(gate, up, approximate="tanh" if tanh else "none")
    return torch.autograd.grad(out, (gate, up), grad)


def stand_in(**changes):
    """A kernel module in plain torch, with some of its functions changed."""
    backward = changes.pop("geglu_backward", geglu_backward)
    ops = SimpleNamespace(geglu_backward=backward, cpu_capability=lambda: "none")
    functions = {"geglu": geglu, "geglu_packed": geglu_packed} | changes
    return SimpleNamespace(
        __name__="stand_in", __file__="/variant/__init__.py", _ops=SimpleNamespace(ops=ops), **functions
    )


def last_column_skipped(gate, up, *, approximate):
    out = torch.empty_like(gate)
    out[:, :-1] = geglu(gate, up, approximate=approximate)[:, :-1]
    return out


WRONG_FORWARDS = {
    "gate and up swapped": lambda gate, up, *, approximate: geglu(up, gate, approximate=approximate),
    "exact for tanh": lambda gate, up, *, approximate: geglu(gate, up, approximate="none"),
    "squared": lambda gate, up, *, approximate: geglu(gate, up, approximate=approximate) ** 2,
    "last column skipped": last_column_skipped,
    "one NaN": lambda gate, up, *, approximate: geglu(gate, up, approximate=approximate).index_fill(
        1, torch.tensor([3]), float("nan")
    ),
    "another dtype": lambda gate, up, *, approximate: geglu(gate, up, approximate=approximate).double(),
}


def lab(**changes):
    return Lab(
        torch.device("cpu"),
        Peers(stand_in(**changes), compile=False, absent={LIGER: "not here", QUACK: "nor here"}),
        budget=0.0,
    )


def test_a_right_provider_is_timed():
    # fp32, where the two forms of gelu are further apart than rounding.
    for op in ("geglu", "geglu_packed", "geglu_backward"):
        for form in ("tanh", "none"):
            for row in measure(Case(op, ROWS, COLS, (OURS, EAGER), "wall", form, "float32"), lab()):
                assert row.status == "ok"
                assert row.micros > 0
                assert row.error <= row.error_bound


@pytest.mark.parametrize("fault", WRONG_FORWARDS)
def test_a_wrong_forward_fails_and_is_not_timed(fault):
    case = Case("geglu", ROWS, COLS, (OURS, EAGER), "wall", dtype="float32")
    ours, eager = measure(case, lab(geglu=WRONG_FORWARDS[fault]))
    assert (ours.status, ours.micros) == ("FAILED", None)
    assert ours.note
    assert eager.status == "ok"


@pytest.mark.parametrize("wrong", [0, 1])
def test_each_gradient_is_checked(wrong):
    def dropped(grad, gate, up, tanh):
        return tuple(
            g * (1.01 if index == wrong else 1) for index, g in enumerate(geglu_backward(grad, gate, up, tanh))
        )

    ours, eager = measure(Case("geglu_backward", ROWS, COLS, (OURS, EAGER), "wall"), lab(geglu_backward=dropped))
    assert (ours.status, eager.status) == ("FAILED", "ok")


def geglu_mlp(x, gate, up, down, *, approximate="tanh"):
    return F.linear(geglu(F.linear(x, gate), F.linear(x, up), approximate=approximate), down)


class GeGLUMLP(nn.Module):
    def forward(self, x):
        weights = (projection.weight for projection in (self.gate_proj, self.up_proj, self.down_proj))
        return geglu_mlp(x, *weights, approximate=self.act_fn.approximate)


class Swapped(nn.Module):
    def forward(self, x):
        weights = (projection.weight for projection in (self.up_proj, self.gate_proj, self.down_proj))
        return geglu_mlp(x, *weights, approximate=self.act_fn.approximate)


@pytest.mark.parametrize("form", ("tanh", "none"))
def test_every_way_to_the_gated_block_is_timed_or_fails(form):
    names = (OURS, PACKED, LAYER, EAGER, COMPILE)
    case = Case("geglu_mlp", ROWS, COLS, names, "wall", form, "float32", inner=40)
    right = Lab(
        torch.device("cpu"),
        Peers(stand_in(geglu_mlp=geglu_mlp, layers=SimpleNamespace(GeGLUMLP=GeGLUMLP))),
        budget=0.0,
    )
    for row in measure(case, right):
        assert row.status == "ok" and row.micros > 0 and row.error < row.error_bound, row

    def wrong(x, gate, up, down, *, approximate):
        return geglu_mlp(x, up, gate, down, approximate=approximate)

    peers = Peers(stand_in(geglu_mlp=wrong, layers=SimpleNamespace(GeGLUMLP=Swapped)), compile=False)
    status = {row.provider: row.status for row in measure(case, Lab(torch.device("cpu"), peers, budget=0.0))}
    assert [status[name] for name in names] == ["FAILED"] * 3 + ["ok", "n/a"]


def quack_mlp_func(x, weight1, weight2, activation, *, tuned):
    """As quack 0.6.0: gate's and up's rows take turns in weight1 (2 * hidden, in)."""
    assert activation == "geglu" and tuned
    pre = F.linear(x, weight1)
    return F.linear(geglu(pre[:, ::2], pre[:, 1::2]), weight2)


def quack_lab(function):
    peers = Peers(stand_in(geglu_mlp=geglu_mlp), quack=SimpleNamespace(mlp_func=function), compile=False)
    return Lab(torch.device("cpu"), peers, budget=0.0)


def test_quack_gets_its_layout_of_the_weights_and_is_checked():
    case = Case("geglu_mlp", ROWS, COLS, (OURS, QUACK), "wall", dtype="float32", inner=40)
    for row in measure(case, quack_lab(quack_mlp_func)):
        assert row.status == "ok" and row.micros > 0 and row.error < row.error_bound, row

    def halves(x, weight1, weight2, activation, *, tuned):
        return geglu_mlp(x, *weight1.chunk(2), weight2)

    ours, quack = measure(case, quack_lab(halves))
    assert (ours.status, quack.status, quack.micros) == ("ok", "FAILED", None)


def test_without_quack_its_row_is_empty_and_its_bar_not_measured():
    case = Case("geglu_mlp", ROWS, COLS, (OURS, QUACK), "wall", dtype="float32", inner=40)
    rows = measure(case, lab(geglu_mlp=geglu_mlp))
    assert [(row.status, row.note) for row in rows] == [("ok", ""), ("n/a", "nor here")]
    bar = Bar("", case.value_name(OURS), 1.0, case.value_name(QUACK))
    assert bar.verdict(row_values(rows, Ceilings(1e10))) == "not measured"
    exact = replace(case, form="none")
    assert [row.status for row in measure(exact, quack_lab(quack_mlp_func))] == ["ok", "n/a"]


def test_a_missing_peer_that_a_suite_names_is_one_printed_line(monkeypatch, tmp_path, capsys):
    absent = {LIGER: "not here", QUACK: "nor here"}
    kernel = stand_in(geglu_mlp=geglu_mlp)
    monkeypatch.setattr(environment, "load_peers", lambda *_: Peers(kernel, absent=absent, compile=False))
    monkeypatch.setattr("tools.sweep.ceilings.measure", lambda device: Ceilings(1e10))
    cases = tuple(
        Case("geglu_mlp", rows, COLS, (OURS, QUACK), "wall", dtype="float32", inner=40) for rows in (ROWS, ROWS + 1)
    )
    monkeypatch.setitem(suites.SUITES, "issue5", lambda device: suites.Suite(cases))
    assert run.run(parse(["--suite", "issue5", "--device", "cpu", "--budget", "0.001", "--out", str(tmp_path)])) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("without")]
    assert lines == ["without quack: nor here"]


def test_peers_that_cannot_be_imported_are_absent_with_the_reason(monkeypatch, tmp_path):
    def refuse(module):
        raise ImportError(module)

    monkeypatch.setattr("kernels.get_local_kernel", lambda repo: stand_in())
    monkeypatch.setattr(environment.importlib, "import_module", refuse)
    peers = environment.load_peers(tmp_path, torch.device("cuda"), use_compile=False)
    assert (peers.liger, peers.quack) == (None, None)
    assert peers.absent[QUACK] == "quack.mlp cannot be imported (ImportError)"
    monkeypatch.setattr(environment.importlib, "import_module", lambda module: SimpleNamespace(name=module))
    peers = environment.load_peers(tmp_path, torch.device("cuda"), use_compile=False)
    assert (peers.liger.name, peers.quack.name, peers.absent) == ("liger_kernel.ops.geglu", "quack.mlp", {})
    assert set(environment.load_peers(tmp_path, torch.device("cpu"), use_compile=False).absent) == {LIGER, QUACK}


@pytest.fixture
def fake_clock(monkeypatch):
    """Every call takes a second; small buffers and a small product."""
    monkeypatch.setitem(ceilings._BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(ceilings, "_GEMM_SIZE", 16)

    def clock(run):
        run()
        return 1.0

    def device_times(turns, budget):
        for (call,) in turns.values():
            call.run()
        return {name: [5e5, 1e6, 3e6] for name in turns}

    monkeypatch.setattr(ceilings, "_cpu_seconds", clock)
    monkeypatch.setattr(ceilings.timing, "device_times", device_times)


def test_ceilings_count_bytes_and_flop(fake_clock):
    device = torch.device("cpu")
    assert ceilings.copy_bandwidth(device) == 2 << 20
    assert ceilings.read_bandwidth(device) == 1 << 20
    assert ceilings.gemm_rate(device) == 2 * 16**3
    assert ceilings.measure(device) == Ceilings(copy=2 << 20)


def test_the_fastest_reader_sets_the_read_bandwidth(monkeypatch, fake_clock):
    def seconds(run):
        return run()

    monkeypatch.setattr(ceilings, "_READERS", (lambda source: 4.0, lambda source: 0.5, lambda source: 2.0))
    monkeypatch.setattr(ceilings, "_cpu_seconds", seconds)
    assert ceilings.read_bandwidth(torch.device("cpu")) == 2 << 20


def test_an_exception_of_ours_fails_the_row():
    def broken(gate, up, *, approximate):
        raise RuntimeError("no such kernel\nsecond line")

    ours, _ = measure(Case("geglu", ROWS, COLS, (OURS, EAGER), "wall"), lab(geglu=broken))
    assert ours.status == "FAILED"
    assert ours.note == "RuntimeError: no such kernel"


def test_missing_and_broken_peers_leave_their_rows_empty():
    def broken(*_):
        raise ValueError("incompatible")

    liger = SimpleNamespace(LigerGELUMulFunction=SimpleNamespace(apply=broken))
    case = Case("geglu", ROWS, COLS, (OURS, COMPILE, LIGER, MUL), "wall")
    absent = {row.provider: row for row in measure(case, lab())}
    assert absent[LIGER].status == absent[COMPILE].status == "n/a"
    assert absent[LIGER].note == "not here"
    assert absent[OURS].status == absent[MUL].status == "ok"
    with_liger = Lab(torch.device("cpu"), Peers(stand_in(), liger=liger, compile=False), budget=0.0)
    assert measure(case, with_liger)[2].note == "ValueError: incompatible"


def test_a_peer_that_writes_over_its_inputs_gets_fresh_ones_each_time():
    seen = []

    def destructive(gate, up, grad):
        seen.append(gate.clone())
        results = geglu_backward(grad, gate, up, True)
        gate.copy_(results[0])
        up.copy_(results[1])
        return gate, up

    liger = SimpleNamespace(geglu_backward=destructive)
    case = Case("geglu_backward", ROWS, COLS, (LIGER, OURS), "wall")
    rows = measure(case, Lab(torch.device("cpu"), Peers(stand_in(), liger=liger, compile=False), budget=0.0))
    assert [row.status for row in rows] == ["ok", "ok"]
    clean = [make_inputs(case, torch.device("cpu"), seed).gate for seed in range(1000, 1008)]
    assert len(seen) > len(clean)
    assert all(any(torch.equal(gate, one) for one in clean) for gate in seen)


def test_packed_halves_and_their_copies_are_the_same_numbers():
    rows = measure(Case("geglu_packed", ROWS, COLS, (OURS, UNPACKED), "wall"), lab())
    assert rows[0].error == rows[1].error


@pytest.mark.parametrize("form", ["tanh", "none"])
def test_the_reference_derivative_is_that_of_the_reference(form):
    gate = torch.linspace(-9, 9, 181, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(reference.gelu(gate, form).sum(), gate)
    torch.testing.assert_close(reference.gelu_derivative(gate.detach(), form), slope, rtol=1e-12, atol=1e-15)


def test_providers_take_turns_in_a_shifting_order_over_all_input_sets():
    turns = {name: [Call(lambda: None) for _ in range(2)] for name in ("one", "two", "three")}
    order = list(timing.interleaved(turns, 4))
    assert [name for name, _ in order[:6]] == ["one", "two", "three", "two", "three", "one"]
    assert [turns[name].index(call) for name, call in order] == [0, 0, 0, 1, 1, 1] * 2


@pytest.mark.parametrize(
    ("rows", "inner", "cols", "sets", "rotations"),
    [
        (1, 2048, 16384, 2, 4),  # 50 us a call: 400 us
        (1, 5376, 21504, 2, 2),
        (8192, 3584, 14336, 2, 1),  # lasts as it is
        (1, 768, 1152, 23, 1),  # enough calls as it is
    ],
)
def test_a_replay_lasts_or_holds_many_calls(rows, inner, cols, sets, rotations):
    assert replay_rotations(Case("geglu_mlp", rows, cols, (OURS,), "graph", inner=inner), sets) == rotations


def test_summary_of_samples():
    middle, least, spread = timing.summary([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (middle, least) == (3.0, 1.0)
    assert spread == pytest.approx(1.0)


def test_rounds_fit_the_budget_within_limits():
    assert timing.plan_rounds(0.01, 1.0) == 100
    assert timing.plan_rounds(10.0, 1.0) == 10
    assert timing.plan_rounds(0.0, 1.0) == 300


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"geglu": WRONG_FORWARDS["exact for tanh"]}, 1)])
def test_the_exit_code_says_whether_a_row_failed(monkeypatch, tmp_path, changes, code):
    monkeypatch.setattr(environment, "load_peers", lambda *_: Peers(stand_in(**changes), compile=False))
    ceilings_in_turn = iter((Ceilings(1e10), Ceilings(2e10)))
    monkeypatch.setattr("tools.sweep.ceilings.measure", lambda device: next(ceilings_in_turn))
    options = ["--rows", "24", "--cols", "136", "--dtype", "float32", "--budget", "0.001", "--device", "cpu"]
    assert run.run(parse([*options, "--out", str(tmp_path)])) == code
    written = json.loads((tmp_path / "sweep.json").read_text())
    rows = written["rows"]
    floor = 3 * 24 * 136 * 4 / 2e10 * 1e6  # by the ceiling at the end, the larger one
    assert [row["floor_micros"] for row in rows] == pytest.approx([floor] * 3)
    (in_values,) = (value for name, value in written["values"].items() if name.endswith(": floor"))
    assert in_values == pytest.approx(floor)
    assert [row["status"] for row in rows] == ["FAILED" if code else "ok", "ok", "n/a"]


def test_without_a_build_nothing_is_measured(tmp_path, capsys):
    assert run.run(parse(["--repo", str(tmp_path), "--device", "cpu"])) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_free_sweep_is_every_combination():
    cases = suites.free([1, 2], [8], ["float32"], ["tanh", "none"], ["geglu", "geglu_backward"], ["event"]).cases
    assert len(cases) == 8
    assert all(LIGER not in case.providers for case in cases if case.form == "none")
