"""What the package should compute, in float64 and without it, and how far from that a result may lie.

The GELU forms are written so that they keep their relative accuracy in the negative tail: the exact one through erfc,
the tanh one as x * sigmoid(2u), which is the same function as 0.5 * x * (1 + tanh(u)).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = ("none", "tanh")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HALVES = (torch.float16, torch.bfloat16)

TANH_SCALE = math.sqrt(2.0 / math.pi)
TANH_CUBE = 0.044715

# Past this the factor of x has reached 0 or 1 and its slope 0, in both forms and in float64. Clamping there keeps
# infinity times zero out of the derivatives.
SATURATED = 50.0


def _slope_ratio(x: Tensor, approximate: str) -> Tensor:
    """s'(x) / s(x) of the factor s in gelu(x) = x * s(x); finite where s itself has underflowed."""
    x = x.clamp(-SATURATED, SATURATED)
    if approximate == "tanh":
        u = TANH_SCALE * (x + TANH_CUBE * x**3)
        return 2 * TANH_SCALE * (1 + 3 * TANH_CUBE * x**2) * torch.sigmoid(-2 * u)
    return TANH_SCALE / torch.special.erfcx(-x / math.sqrt(2.0))


def _factor(x: Tensor, approximate: str) -> Tensor:
    """s(x) in gelu(x) = x * s(x)."""
    if approximate == "tanh":
        return torch.sigmoid(2 * TANH_SCALE * (x + TANH_CUBE * x**3))
    return 0.5 * torch.special.erfc(-x / math.sqrt(2.0))


def gelu(x: Tensor, approximate: str) -> Tensor:
    """gelu(x) in float64. NaN at minus infinity, as in eager torch (infinity times zero)."""
    x = x.double()
    return x * _factor(x, approximate)


def gelu_derivative(x: Tensor, approximate: str) -> Tensor:
    """gelu'(x) in float64: 1 and 0 at plus and minus infinity, NaN at NaN."""
    x = x.double()
    factor = _factor(x, approximate)
    return factor + x.clamp(-SATURATED, SATURATED) * factor * _slope_ratio(x, approximate)


def geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return gelu(gate, approximate) * up.double()


def geglu_grads(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """(grad_gate, grad_up) in float64."""
    grad = grad.double()
    return grad * up.double() * gelu_derivative(gate, approximate), grad * gelu(gate, approximate)


def eager(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """The composition that the package replaces, in the storage type."""
    return F.gelu(gate, approximate=approximate) * up


def eager_grads(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    return torch.autograd.grad(eager(gate, up, approximate), (gate, up), grad)


def split(x: Tensor, gate_first: bool = True) -> tuple[Tensor, Tensor]:
    """(gate, up) of a packed (..., 2 * d) tensor, by plain indexing."""
    d = x.shape[-1] // 2
    first, second = x[..., :d], x[..., d:]
    return (first, second) if gate_first else (second, first)


# ---- distance in units in the last place ----

_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many representable values of the storage type lie between two equally typed tensors; 0 for NaN and NaN.

    NaN against a number is reported as the largest int64. Zeros of both signs are the same value.
    """
    assert a.dtype == b.dtype and a.shape == b.shape
    integer = _INTEGERS[a.dtype]
    lowest = torch.iinfo(integer).min

    def ordered(t: Tensor) -> Tensor:
        bits = t.contiguous().view(integer).long()
        return torch.where(bits < 0, lowest - bits, bits)

    distance = (ordered(a) - ordered(b)).abs()
    one_nan = a.isnan() ^ b.isnan()
    distance = torch.where(a.isnan() & b.isnan(), torch.zeros_like(distance), distance)
    return torch.where(one_nan, torch.full_like(distance, torch.iinfo(torch.int64).max), distance)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Same type, shape and values; NaN equals NaN, and zeros of both signs are the same value."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    differ = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if differ.any():
        first = differ.nonzero()[0].tolist()
        got, want = actual[tuple(first)].item(), expected[tuple(first)].item()
        count = f"{int(differ.sum())} of {differ.numel()}"
        raise AssertionError(f"{count} elements differ; at {first}: {got!r}, not {want!r}")


# ---- the error bound of one element ----


def _bound(exact: Tensor, magnitude: Tensor, factor: Tensor, gate: Tensor, approximate: str, dtype) -> Tensor:
    """How far one element may lie from `exact`.

    - Two roundings to the storage type, half an eps each, of a product whose size is |exact|.
    - Arithmetic in float32 (float64 for float64): four roundings of the terms, whose size is `magnitude`, and two
      roundings of the argument of exp, which the function amplifies by its condition number 1 + |x s'(x) / s(x)|.
    - What a type loses below its normal range: half of the smallest step when gelu(gate) is stored, again when the
      product is; and s(x) itself, which may flush to zero below the smallest normal number of the arithmetic.
    """
    arithmetic = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    storage = torch.finfo(dtype)
    x = gate.double().clamp(-SATURATED, SATURATED)
    condition = 1 + (x * _slope_ratio(x, approximate)).abs()
    smallest = 0.5 * storage.smallest_normal * storage.eps + arithmetic.smallest_normal * condition
    return (
        storage.eps * exact.abs()
        + (4 + 2 * condition) * arithmetic.eps * magnitude
        + smallest * (1 + factor.double().abs())
    )


def _assert_within(actual: Tensor, exact: Tensor, bound: Tensor, what: str) -> None:
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    excess = (actual.double() - exact).abs() - bound
    # NaN compares false with everything, so a wrong NaN counts as bad.
    bad = ~(excess <= 0)
    if bad.any():
        worst = torch.where(excess.isnan(), torch.full_like(excess, math.inf), excess).argmax()
        got, want, allowed = (t.flatten()[worst].item() for t in (actual, exact, bound))
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements off; worst at flat index {int(worst)}: "
            f"{got!r}, expected {want!r} within {allowed:.3g}"
        )


def assert_accurate(actual: Tensor, gate: Tensor, up: Tensor, approximate: str) -> None:
    """Every element of gelu(gate) * up within its bound; for finite results only."""
    assert actual.dtype == gate.dtype, f"dtype {actual.dtype}, expected {gate.dtype}"
    exact = geglu(gate, up, approximate)
    bound = _bound(exact, exact.abs(), up, gate, approximate, actual.dtype)
    _assert_within(actual, exact, bound, f"gelu(gate) * up, {approximate}, {actual.dtype}")


def assert_accurate_grads(
    grads: tuple[Tensor, Tensor], grad: Tensor, gate: Tensor, up: Tensor, approximate: str
) -> None:
    """Both gradients within their bounds; for finite results only."""
    grad_gate, grad_up = geglu_grads(grad, gate, up, approximate)
    factor = _factor(gate.double(), approximate)
    # The derivative is a sum that cancels near gate = -0.75, so its error scales with the terms, not with the sum.
    terms = factor * (1 + (gate.double() * _slope_ratio(gate.double(), approximate)).abs())
    product = grad.double() * up.double()
    for name, actual, exact, magnitude, other in (
        ("grad_gate", grads[0], grad_gate, product.abs() * terms, terms),
        ("grad_up", grads[1], grad_up, grad_up.abs(), grad),
    ):
        assert actual.dtype == gate.dtype, f"{name}: dtype {actual.dtype}, expected {gate.dtype}"
        bound = _bound(exact, magnitude, other, gate, approximate, gate.dtype)
        _assert_within(actual, exact, bound, f"{name}, {approximate}, {gate.dtype}")


# ---- the error of a whole tensor, beside eager's ----


@dataclass(frozen=True)
class Error:
    """Absolute error against float64 over a tensor."""

    mean: float
    rms: float
    worst: float

    @classmethod
    def of(cls, actual: Tensor, exact: Tensor) -> "Error":
        difference = (actual.double() - exact).abs()
        return cls(difference.mean().item(), difference.square().mean().sqrt().item(), difference.max().item())


# The bar: no measure of the error may be more than this much larger than eager's.
EAGER_MARGIN = 1.05


def rounded_steps(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor, Tensor]:
    """(out, grad_gate, grad_up) of perfect arithmetic that rounds to the storage type where eager does."""
    activated = gelu(gate, approximate).to(gate.dtype)
    grad_gate = ((grad * up).double() * gelu_derivative(gate, approximate)).to(gate.dtype)
    return activated * up, grad_gate, grad * activated


def assert_no_worse_than_eager(
    what: str, actual: Tensor, eager: Tensor, perfect: Tensor, exact: Tensor, worst: bool = True
) -> None:
    """Mean, root mean square and worst error against eager's.

    The worst of half a million errors is a matter of luck: one element's roundings. So that one is also fine when
    perfect arithmetic with the same roundings has it. Where sums in another order make even that a matter of luck,
    `worst` leaves it out.
    """
    ours, theirs, best = (Error.of(result, exact) for result in (actual, eager, perfect))
    limits = {
        "mean": EAGER_MARGIN * theirs.mean,
        "rms": EAGER_MARGIN * theirs.rms,
    }
    if worst:
        limits["worst"] = EAGER_MARGIN * max(theirs.worst, best.worst)
    for measure, limit in limits.items():
        mine = getattr(ours, measure)
        assert mine <= limit, f"{what}: {measure} error {mine:.4g}, more than {limit:.4g} (eager's x {EAGER_MARGIN})"


# ---- linear ----

ACTIVATIONS = (None, "gelu", "gelu_tanh")

# The largest slope of either form, at x = 1.41: how much an error of the pre-activation grows.
STEEPEST = 1.13


def form_of(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


def activate(pre: Tensor, activation: str | None) -> Tensor:
    return pre.double() if activation is None else gelu(pre, form_of(activation))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(x @ weight.T + bias) in float64."""
    return activate(preactivation(x, weight, bias), activation)


def preactivation(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    pre = x.double() @ weight.double().mT
    return pre if bias is None else pre + bias.double()


def eager_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """What the package replaces, in the storage type."""
    pre = F.linear(x, weight, bias)
    return pre if activation is None else F.gelu(pre, approximate=form_of(activation))


def perfect_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Perfect arithmetic that rounds to the storage type where eager does."""
    return activate(preactivation(x, weight, bias).to(x.dtype), activation).to(x.dtype)


def linear_grads(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None):
    """(grad_x, grad_weight, grad_bias) in float64."""
    d = grad.double()
    if activation is not None:
        d = d * gelu_derivative(preactivation(x, weight, bias), form_of(activation))
    return _products(d, x.double(), weight.double())


def perfect_linear_grads(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None):
    """Perfect arithmetic that rounds the pre-activation, its gradient and the results to the storage type."""
    d = grad
    if activation is not None:
        pre = preactivation(x, weight, bias).to(x.dtype)
        d = (grad.double() * gelu_derivative(pre, form_of(activation))).to(x.dtype)
    return tuple(result.to(x.dtype) for result in _products(d.double(), x.double(), weight.double()))


def eager_linear_grads(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    out = eager_linear(*leaves, *([None] if bias is None else []), activation)
    return torch.autograd.grad(out, leaves, grad)


def _products(d: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows_of_d, rows_of_x = (t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0) for t in (d, x))
    return d @ weight, rows_of_d.mT @ rows_of_x, rows_of_d.sum(0)


def assert_linear_is_accurate(
    actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> None:
    """Every element within its bound, or within eager's own worst error; for shapes too small for statistics.

    The bound: the pre-activation and the result are stored, and a sum of K products and a bias in float32 (float64 for
    float64) is off by K + 2 roundings of its terms' sizes; the activation makes an error of the sum steeper.
    """
    assert actual.dtype == x.dtype, f"dtype {actual.dtype}, expected {x.dtype}"
    exact = linear(x, weight, bias, activation)
    pre = preactivation(x, weight, bias)
    arithmetic = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32)
    storage = torch.finfo(x.dtype)
    terms = preactivation(x.abs(), weight.abs(), None if bias is None else bias.abs())
    bound = (
        storage.eps * (exact.abs() + STEEPEST * pre.abs())
        + (x.shape[-1] + 8) * arithmetic.eps * STEEPEST * terms
        + storage.smallest_normal
    )
    if exact.numel():
        theirs = (eager_linear(x, weight, bias, activation).double() - exact).abs().max()
        bound = bound.clamp(min=EAGER_MARGIN * theirs)
    _assert_within(actual, exact, bound, f"linear, {activation}, {x.dtype}")


def assert_linear_is_no_worse_than_eager(what: str, actual: Tensor, eager: Tensor, perfect: Tensor, exact: Tensor):
    """As assert_no_worse_than_eager; float64 is as exact as the reference, so it gets a few of its roundings."""
    assert actual.dtype == eager.dtype and actual.shape == exact.shape
    if actual.dtype == torch.float64:
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12 * exact.abs().max().item())
    else:
        # A float32 result is not rounded again: its error is that of a sum, and eager adds in another order.
        worst = actual.dtype != torch.float32
        assert_no_worse_than_eager(what, actual, eager, perfect, exact, worst)
