"""linear_geglu and geglu_mlp: numbers, layouts, gradients, transforms, compilation, bad input."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import Calls
from reference import DTYPES, FORMS
from torch._dynamo.testing import CompileCounterWithBackend

DTYPE_CASES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FORM_CASES = pytest.mark.parametrize("approximate", FORMS)
BIAS_CASES = pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))


def problem(lead, k, h, n, dtype, device, with_bias=True):
    """x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias; pre-activations of size 1."""

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, device=device) * scale).to(dtype)

    into, back = max(k, 1) ** -0.5, max(h, 1) ** -0.5
    weights = normal(h, k, scale=1.5 * into), normal(h, k, scale=into), normal(n, h, scale=back)
    biases = (normal(h), normal(h), normal(n)) if with_bias else (None, None, None)
    return normal(*lead, k), *weights, *biases


def gated(tensors):
    """The arguments of linear_geglu among those of geglu_mlp."""
    return (*tensors[:3], *tensors[4:6])


def eager(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, approximate="tanh"):
    hidden = F.gelu(F.linear(x, gate_weight, gate_bias), approximate=approximate) * F.linear(x, up_weight, up_bias)
    return hidden, F.linear(hidden, down_weight, down_bias)


def truth(*tensors, approximate="tanh"):
    return eager(*(None if t is None else t.double() for t in tensors), approximate)


def assert_no_worse(ours, theirs, exact, what):
    """The rms error is at most eager's x 1.05; the truth for float64 is eager itself."""
    if ours.dtype == torch.float64:
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
        return
    mine, eagers = ((t.double() - exact).square().mean().sqrt() for t in (ours, theirs))
    floor = torch.finfo(ours.dtype).eps * exact.abs().mean() * 0.01
    assert mine <= 1.05 * eagers + floor, f"{what}: {mine:.3e}, eager {eagers:.3e}"


@pytest.mark.parametrize("sizes", [((257,), 96, 200, 64), ((3, 17), 64, 33, 40), ((1,), 512, 256, 512)], ids=str)
@DTYPE_CASES
@FORM_CASES
@BIAS_CASES
def test_no_less_accurate_than_eager(kernel, device, sizes, dtype, approximate, with_bias):
    """Over several draws: the errors of a single row are too few for a ratio of 1.05."""
    seen = {"hidden": [], "out": []}
    for _ in range(8 if sizes[0] == (1,) else 1):
        tensors = problem(*sizes, dtype, device, with_bias)
        exact, theirs = truth(*tensors, approximate=approximate), eager(*tensors, approximate)
        hidden = kernel.linear_geglu(*gated(tensors), approximate=approximate)
        out = kernel.geglu_mlp(*tensors, approximate=approximate)
        for name, place, ours in (("hidden", 0, hidden), ("out", 1, out)):
            assert ours.shape == exact[place].shape and ours.dtype == dtype and ours.is_contiguous()
            seen[name].append((ours, theirs[place], exact[place]))
    for name, triples in seen.items():
        assert_no_worse(*(torch.stack(results) for results in zip(*triples, strict=True)), name)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (1, 1, 5)], ids=str)
def test_ranks(kernel, device, lead):
    tensors = problem(lead, 24, 40, 16, torch.float32, device)
    torch.testing.assert_close(kernel.geglu_mlp(*tensors), eager(*tensors)[1])
    torch.testing.assert_close(kernel.linear_geglu(*gated(tensors)), eager(*tensors)[0])


@pytest.mark.parametrize("biases", [(True, False), (False, True)], ids=("gate", "up"))
def test_one_bias_alone(kernel, device, biases):
    x, gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = problem((5,), 24, 40, 16, torch.float32, device)
    given = (gate_bias if biases[0] else None, up_bias if biases[1] else None)
    ours = kernel.linear_geglu(x, gate_weight, up_weight, *given)
    torch.testing.assert_close(ours, eager(x, gate_weight, up_weight, down_weight, *given, None)[0])


def other_row_distance(gate_weight, up_weight):
    """One buffer with gate's dense rows, and right behind them up's with a gap after each."""
    padded = F.pad(up_weight, (0, 8))
    buffer = torch.cat((gate_weight.flatten(), padded.flatten()))
    return buffer[: gate_weight.numel()].view_as(gate_weight), buffer[gate_weight.numel() :].view_as(padded)[:, :-8]


# Where gate's and up's weight and bias lie -> how many products take them.
PACKINGS = {
    "rows": (lambda w, u: torch.cat((w, u)).chunk(2), lambda b, c: torch.cat((b, c)).chunk(2), 1),
    "rows_without_bias": (lambda w, u: torch.cat((w, u)).chunk(2), lambda b, c: (None, None), 1),
    # As transformers' Conv1D keeps them: (K, 2 * H), read through a transposed view.
    "transposed": (lambda w, u: torch.cat((w, u)).t().contiguous().t().chunk(2), lambda b, c: (None, None), 1),
    "padded_rows": (lambda w, u: F.pad(torch.cat((w, u)), (0, 8))[:, :-8].chunk(2), lambda b, c: (None, None), 1),
    "own_biases": (lambda w, u: torch.cat((w, u)).chunk(2), lambda b, c: (b, c), 2),
    "one_bias": (lambda w, u: torch.cat((w, u)).chunk(2), lambda b, c: (b, None), 2),
    "up_first": (lambda w, u: torch.cat((u, w)).chunk(2)[::-1], lambda b, c: torch.cat((c, b)).chunk(2)[::-1], 2),
    "row_between": (
        lambda w, u: (lambda p: (p[: len(w)], p[-len(u) :]))(torch.cat((w, u[:1], u))),
        lambda b, c: (b, c),
        2,
    ),
    "other_row_distance": (other_row_distance, lambda b, c: (None, None), 2),
    "columns": (lambda w, u: torch.cat((w, u), 1).chunk(2, 1), lambda b, c: (b, c), 2),
    "one_weight_twice": (lambda w, u: (w, w), lambda b, c: (None, None), 2),
    "expanded": (lambda w, u: (w[:1].expand(w.shape), w[:1].expand(w.shape)), lambda b, c: (None, None), 2),
}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("lead", [(), (9,), (1,), (2, 3, 17)], ids=str)
def test_halves_of_a_packed_weight(kernel, ops, device, name, lead):
    """One product where the halves follow each other, two elsewhere: the same numbers, whichever form and dtype."""
    pack_weights, pack_biases, products = PACKINGS[name]
    for dtype, approximate in itertools.product(DTYPES, FORMS):
        x, gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = problem(lead, 64, 48, 16, dtype, device)
        given = x, *pack_weights(gate_weight, up_weight), down_weight, *pack_biases(gate_bias, up_bias), None
        exact, theirs = truth(*given, approximate=approximate)[0], eager(*given, approximate)[0]
        ours = kernel.linear_geglu(*gated(given), approximate=approximate)
        assert ours.shape == theirs.shape and ours.is_contiguous()
        worst = 2 * (theirs - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max().clamp(min=1)
        assert (ours - exact).abs().max() <= worst
        route = ops.geglu_mlp_route(*given, approximate == "tanh", False)
        if kernel.dispatch.NATIVE and "geglu" in route.split("+"):  # else one kernel takes both, wherever they lie
            assert route.partition("+geglu")[0].count("+") == products - 1, route


@pytest.mark.native
def test_neighbours_in_memory_that_are_no_halves_of_one_tensor(kernel, ops):
    """Two allocations may touch. No tensor covers both."""
    memory = np.random.default_rng(0).standard_normal((12, 8), dtype=np.float32)
    gate_weight, up_weight = torch.from_numpy(memory[:6]), torch.from_numpy(memory[6:])
    assert gate_weight.data_ptr() + gate_weight.nbytes == up_weight.data_ptr()
    x, down_weight = torch.randn(3, 8), torch.randn(4, 6)
    tensors = (x, gate_weight, up_weight, down_weight, None, None, None)
    assert ops.geglu_mlp_route(*tensors, True, False) == "torch+torch+geglu+torch"
    torch.testing.assert_close(kernel.geglu_mlp(*tensors), eager(*tensors)[1])


def test_strided_operands(kernel, device):
    tensors = problem((6,), 24, 40, 16, torch.float32, device)
    expected = eager(*tensors)[1]
    views = []
    for tensor in tensors:
        buffer = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), device=device)
        buffer[..., 1:-2] = tensor
        views.append(buffer[..., 1:-2])
    torch.testing.assert_close(kernel.geglu_mlp(*views), expected)
    transposed = [t.t().contiguous().t() if t.dim() == 2 else t for t in tensors]
    torch.testing.assert_close(kernel.geglu_mlp(*transposed), expected)


@pytest.mark.parametrize(
    "sizes", [((0,), 8, 6, 4), ((2, 0), 8, 6, 4), ((3,), 0, 6, 4), ((3,), 8, 0, 4), ((3,), 8, 6, 0)]
)
def test_empty(kernel, device, sizes):
    leaves = [t.requires_grad_() for t in problem(*sizes, torch.float32, device)]
    with torch.no_grad():
        bare = kernel.geglu_mlp(*leaves)
    out = kernel.geglu_mlp(*leaves)
    expected = eager(*leaves)[1]
    assert bare.shape == out.shape == expected.shape
    torch.testing.assert_close(bare, expected.detach())
    for mine, theirs in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (out, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


# ---- modes and transforms ----


@FORM_CASES
def test_autocast(kernel, device, approximate):
    tensors = problem((5,), 24, 40, 16, torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours, theirs = kernel.geglu_mlp(*tensors, approximate=approximate), eager(*tensors, approximate)[1]
        hidden = kernel.linear_geglu(*gated(tensors), approximate=approximate)
    assert ours.dtype == theirs.dtype == hidden.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("batched", [(0,), (1, 2, 3), (0, 1), (4,), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_vmap(kernel, device, batched):
    tensors = problem((5,), 8, 6, 4, torch.float32, device)
    stacked = [torch.stack((t, t.flip(0), 2 * t)) if place in batched else t for place, t in enumerate(tensors)]
    in_dims = tuple(0 if place in batched else None for place in range(7))
    with torch.no_grad():
        ours = torch.vmap(kernel.geglu_mlp, in_dims)(*stacked)
        rows = [
            kernel.geglu_mlp(*(t[i] if d == 0 else t for t, d in zip(stacked, in_dims, strict=True))) for i in range(3)
        ]
        torch.testing.assert_close(ours, torch.stack(rows))


def test_forward_mode(kernel, device):
    tensors = problem((5,), 8, 6, 4, torch.float64, device)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    ours = torch.func.jvp(kernel.geglu_mlp, tensors, tangents)
    theirs = torch.func.jvp(lambda *t: eager(*t)[1], tensors, tangents)
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("grad", (False, True), ids=("inference", "training"))
def test_compiled_with_dynamic_rows(kernel, device, backend, grad):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(kernel.geglu_mlp, fullgraph=True, backend=counter)
    _, *parameters = problem((1,), 16, 24, 8, torch.float32, device)
    for rows in (4, 7, 9, 64):
        x = torch.randn(rows, 16, device=device)
        leaves = [t.detach().requires_grad_(grad) for t in (x, *parameters)]
        ours, theirs = compiled(*leaves), eager(*leaves)[1]
        torch.testing.assert_close(ours, theirs)
        if grad:
            for mine, their in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (ours, theirs)), strict=True):
                torch.testing.assert_close(mine, their)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (0,)], ids=str)
@BIAS_CASES
def test_opcheck(ops, device, lead, with_bias):
    tensors = problem(lead, 8, 6, 4, torch.float32, device, with_bias)
    torch.library.opcheck(ops.linear_geglu.default, (*gated(tensors), True, False))
    torch.library.opcheck(ops.geglu_mlp.default, (*tensors, False, False))


def test_without_a_gradient_it_is_one_operator(kernel, ops, device):
    """The point of the function: the host goes there once."""
    tensors = problem((4,), 8, 6, 4, torch.float32, device)
    with Calls() as calls:
        kernel.geglu_mlp(*tensors)
    assert calls.seen[0] is ops.geglu_mlp.default and ops.linear.default not in calls.seen


def test_the_route_is_told(ops, device):
    tensors = problem((4,), 8, 6, 4, torch.float64, device)
    assert ops.geglu_mlp_route(*tensors, True, False) == "torch+torch+geglu+torch"
    tensors = problem((0,), 8, 6, 4, torch.float64, device)
    assert ops.geglu_mlp_route(*tensors, True, False) == "empty+empty"


# ---- bad input ----


def replaced(place, make):
    def change(tensors):
        return [make(t) if index == place else t for index, t in enumerate(tensors)]

    return change


BAD = {
    "other_k": (replaced(1, lambda t: t[:, :-1]), "gate_weight"),
    "up_other_k": (replaced(2, lambda t: t[:, :-1]), "up_weight"),
    "up_other_h": (replaced(2, lambda t: t[:-1]), "up_weight|up_bias"),
    "down_other_h": (replaced(3, lambda t: t[:, :-1]), "down_weight"),
    "gate_dtype": (replaced(1, lambda t: t.half()), "gate_weight"),
    "up_dtype": (replaced(2, lambda t: t.half()), "up_weight"),
    "down_dtype": (replaced(3, lambda t: t.half()), "down_weight"),
    "short_gate_bias": (replaced(4, lambda t: t[:-1]), "gate_bias"),
    "short_up_bias": (replaced(5, lambda t: t[:-1]), "up_bias"),
    "short_down_bias": (replaced(6, lambda t: t[:-1]), "down_bias"),
    "integers": (replaced(0, lambda t: t.int()), "x"),
    "one_dimension": (replaced(1, lambda t: t[0]), "gate_weight"),
    "meta": (replaced(2, lambda t: t.to("meta")), "up_weight"),
    "sparse": (replaced(1, lambda t: t.to_sparse()), "gate_weight"),
    "none": (replaced(3, lambda t: None), "down_weight"),
    "a_number": (replaced(6, lambda t: 1.0), "down_bias"),
}


@pytest.mark.parametrize("grad", (False, True), ids=("plain", "needs_grad"))
@pytest.mark.parametrize("case", BAD)
def test_bad_input(kernel, device, case, grad):
    change, named = BAD[case]
    tensors = problem((5,), 8, 6, 4, torch.float32, device)
    arguments = change(tensors)
    for tensor in arguments:
        if grad and isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_leaf:
            tensor.requires_grad_()
    with pytest.raises((RuntimeError, NotImplementedError, TypeError), match=rf"\b({named}) must"):
        kernel.geglu_mlp(*arguments)
    torch.testing.assert_close(kernel.geglu_mlp(*tensors).detach(), eager(*tensors)[1].detach())


@pytest.mark.parametrize("grad", (False, True), ids=("plain", "needs_grad"))
def test_weights_that_overlap_in_part(kernel, device, grad):
    x, packed = torch.randn(3, 8, device=device), torch.randn(11, 8, device=device)
    x.requires_grad_(grad)
    with pytest.raises(RuntimeError, match=r"\bup_weight must not overlap gate_weight"):
        kernel.linear_geglu(x, packed[:6], packed[5:])
    # One tensor for both is no mistake.
    ours = kernel.linear_geglu(x, packed[:6], packed[:6])
    torch.testing.assert_close(ours, F.gelu(x @ packed[:6].t(), approximate="tanh") * (x @ packed[:6].t()))


@pytest.mark.parametrize("approximate", ("erf", None, True))
def test_unknown_approximate(kernel, device, approximate):
    tensors = problem((3,), 8, 6, 4, torch.float32, device)
    with pytest.raises(ValueError, match="approximate must"):
        kernel.geglu_mlp(*tensors, approximate=approximate)
