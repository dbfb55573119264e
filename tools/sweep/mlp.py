"""The gated block's cases: inputs, who takes part, and the fp64 results they are checked against."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .model import Case


@dataclass(frozen=True)
class MlpInputs:
    """x (rows, inner), gate and up (cols, inner), down (inner, cols); no biases, as in Gemma."""

    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.gate, self.up, self.down


def make_inputs(case: Case, device: torch.device, seed: int) -> MlpInputs:
    """N(0, 1) values, the weights scaled so that every product is of size 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(rows: int, cols: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator, device=device, dtype=dtype).mul_(scale)

    into, back = case.inner**-0.5, case.cols**-0.5
    weights = (case.cols, case.inner, into), (case.cols, case.inner, into), (case.inner, case.cols, back)
    return MlpInputs(normal(case.rows, case.inner, 1.0), *(normal(*weight) for weight in weights))


def ours(case: Case, kernel, inputs: MlpInputs) -> Callable:
    return partial(kernel.geglu_mlp, *inputs.all, approximate=case.form)


def packed(case: Case, kernel, inputs: MlpInputs) -> Callable:
    """The same with gate and up as the halves of one weight."""
    gate, up = torch.cat((inputs.gate, inputs.up)).chunk(2)
    return partial(kernel.geglu_mlp, inputs.x, gate, up, inputs.down, approximate=case.form)


def gated(case: Case, kernel, inputs: MlpInputs) -> Callable:
    return partial(kernel.linear_geglu, inputs.x, inputs.gate, inputs.up, approximate=case.form)


def two_products(inputs: MlpInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return F.linear(inputs.x, inputs.gate), F.linear(inputs.x, inputs.up)


class Block(nn.Module):
    """The block of the Gemma family, around weights that exist."""

    def __init__(self, inputs: MlpInputs, form: str):
        super().__init__()
        names = ("gate_proj", inputs.gate), ("up_proj", inputs.up), ("down_proj", inputs.down)
        for name, weight in names:
            projection = nn.Linear(*weight.t().shape, bias=False, device="meta")
            projection.weight = nn.Parameter(weight, requires_grad=False)
            self.add_module(name, projection)
        self.act_fn = nn.GELU(approximate=form)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def layer(case: Case, kernel, inputs: MlpInputs) -> Callable:
    """A module with our layer's forward, as ``kernelize`` leaves it."""
    block = Block(inputs, case.form)
    block.forward = kernel.layers.GeGLUMLP.forward.__get__(block)
    return partial(block, inputs.x)


def compiled(case: Case, inputs: MlpInputs) -> Callable:
    function = torch.compile(partial(_eager, form=case.form), fullgraph=True, dynamic=False)
    return partial(function, *inputs.all)


def composed(case: Case, inputs: MlpInputs) -> Callable:
    """The block in torch's operations."""
    return partial(_eager, *inputs.all, form=case.form)


def liger(function, inputs: MlpInputs) -> Callable:
    """The block as LigerGEGLUMLP computes it."""
    return partial(_liger, function, *inputs.all)


def quack(function, inputs: MlpInputs) -> Callable:
    """The block as quack's MLP computes it, tuned: both products are its own, GeGLU in the first one's epilogue.

    It takes gate's and up's rows in turn from one weight (2 * cols, inner), which is laid out here, before the clock.
    """
    into = torch.stack((inputs.gate, inputs.up), dim=1).flatten(0, 1)
    return partial(function, inputs.x, into, inputs.down, activation="geglu", tuned=True)


def one_projection(inputs: MlpInputs) -> Callable:
    return partial(F.linear, inputs.x, inputs.gate)


def _eager(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, form: str) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, gate), approximate=form) * F.linear(x, up), down)


def _liger(function, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(function(F.linear(x, gate), F.linear(x, up)), down)


def expected(case: Case, inputs: MlpInputs, gelu: Callable) -> tuple[torch.Tensor]:
    """The fp64 result."""
    x, gate, up, down = (tensor.double() for tensor in inputs.all)
    return (((gelu(x @ gate.t(), case.form)) * (x @ up.t())) @ down.t(),)
