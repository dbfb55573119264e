"""The fp64 reference that every provider is checked against before it is timed. It never touches the kernel."""

import math

import torch

from . import linear, mlp
from .model import LINEAR_OPS, MLP_OPS, Case

# A provider may be this much further from fp64 than eager torch is.
EAGER_MARGIN = 1.05
# fp64 inputs: eager and the reference round differently in the last bits of fp64 itself.
FP64_ROUNDING = 2.0**-50

_CHUNK_ELEMENTS = 1 << 25


def gelu(gate: torch.Tensor, form: str) -> torch.Tensor:
    """gelu of an fp64 tensor, written so that the negative tail keeps its relative accuracy."""
    if form == "tanh":
        return gate * torch.sigmoid(2.0 * _tanh_argument(gate))
    return 0.5 * gate * torch.special.erfc(-gate / math.sqrt(2.0))


def gelu_derivative(gate: torch.Tensor, form: str) -> torch.Tensor:
    """d gelu / d gate of an fp64 tensor."""
    if form == "tanh":
        share = torch.sigmoid(2.0 * _tanh_argument(gate))
        slope = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * gate * gate)
        return share + gate * share * (1.0 - share) * 2.0 * slope
    density = torch.exp(-0.5 * gate * gate) / math.sqrt(2.0 * math.pi)
    return 0.5 * torch.special.erfc(-gate / math.sqrt(2.0)) + gate * density


def _tanh_argument(gate: torch.Tensor) -> torch.Tensor:
    return math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate * gate * gate)


def expected(case: Case, inputs, rows: slice) -> tuple[torch.Tensor, ...]:
    """The fp64 results of `case` for those rows: (out,), or (grad_gate, grad_up) for the backward."""
    gate, up = inputs.gate[rows].double(), inputs.up[rows].double()
    if case.direction == "forward":
        return (gelu(gate, case.form) * up,)
    grad = inputs.grad[rows].double()
    return grad * up * gelu_derivative(gate, case.form), grad * gelu(gate, case.form)


def relative_errors(case: Case, inputs, results: tuple[torch.Tensor, ...]) -> list[float]:
    """|result - fp64| / |fp64| in the L2 norm, one for each result; NaN if a result holds NaN.

    Raises ValueError when the number, shape or dtype of the results is not the op's.
    """
    if case.op in LINEAR_OPS:
        return _product_errors(linear.expected(case, inputs, gelu, gelu_derivative), inputs, results)
    if case.op in MLP_OPS:
        return _product_errors(mlp.expected(case, inputs, gelu), inputs, results)
    want = 1 if case.direction == "forward" else 2
    if len(results) != want:
        raise ValueError(f"expected {want} result(s), got {len(results)}")
    for result in results:
        if result.shape != inputs.gate.shape or result.dtype != inputs.gate.dtype:
            raise ValueError(
                f"expected a result of {tuple(inputs.gate.shape)} {inputs.gate.dtype}, "
                f"got {tuple(result.shape)} {result.dtype}"
            )
    off = [0.0] * want
    norm = [0.0] * want
    step = max(1, _CHUNK_ELEMENTS // case.cols)
    for start in range(0, case.rows, step):
        rows = slice(start, start + step)
        for index, truth in enumerate(expected(case, inputs, rows)):
            off[index] += (results[index][rows].double() - truth).square().sum().item()
            norm[index] += truth.square().sum().item()
    return [math.sqrt(o / n) for o, n in zip(off, norm, strict=True)]


def _product_errors(truths: tuple[torch.Tensor, ...], inputs, results: tuple[torch.Tensor, ...]) -> list[float]:
    if len(results) != len(truths):
        raise ValueError(f"expected {len(truths)} result(s), got {len(results)}")
    errors = []
    for result, truth in zip(results, truths, strict=True):
        if result.shape != truth.shape or result.dtype != inputs.x.dtype:
            raise ValueError(
                f"expected a result of {tuple(truth.shape)} {inputs.x.dtype}, got {tuple(result.shape)} {result.dtype}"
            )
        errors.append(((result.double() - truth).norm() / truth.norm()).item())
    return errors


def bound(eager_errors: list[float]) -> list[float]:
    """The largest error that each result may have."""
    return [error * EAGER_MARGIN + FP64_ROUNDING for error in eager_errors]


def within(errors: list[float], bounds: list[float]) -> bool:
    """Whether every error is inside its bound; NaN never is."""
    return all(error <= limit for error, limit in zip(errors, bounds, strict=True))
