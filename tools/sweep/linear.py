"""The linear layer's cases: inputs, who takes part, and the fp64 results they are checked against."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from .model import Case

OURS, EAGER = "ours", "eager"
LINEAR = "F.linear"  # the product and the bias alone
ADDMM = "torch._addmm_activation"

ACTIVATIONS = {"bias": None, "none": "gelu", "tanh": "gelu_tanh"}


@dataclass(frozen=True)
class LinearInputs:
    """x (rows, inner), weight (cols, inner), bias (cols,), grad (rows, cols)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad: torch.Tensor

    @property
    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.weight, self.bias


def make_inputs(case: Case, device: torch.device, seed: int) -> LinearInputs:
    """N(0, 1) values, the weight scaled so that pre-activations are of size 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    weight = normal(case.cols, case.inner).mul_(case.inner**-0.5)
    return LinearInputs(normal(case.rows, case.inner), weight, normal(case.cols), normal(case.rows, case.cols))


def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, form: str) -> torch.Tensor:
    pre = F.linear(x, weight, bias)
    return pre if form == "bias" else F.gelu(pre, approximate=form)


def ours(case: Case, kernel, inputs: LinearInputs) -> Callable:
    """One call of the kernel, its algorithms measured first if the case says so."""
    linear = partial(kernel.linear, activation=ACTIVATIONS[case.form])
    if case.op == "linear_train":
        leaves = _leaves(inputs)
        if case.tuned:
            with torch.enable_grad():
                kernel.tune(*leaves, activation=ACTIVATIONS[case.form])
        return partial(_step, linear, leaves, inputs.grad)
    if case.tuned:
        kernel.tune(*inputs.forward, activation=ACTIVATIONS[case.form])
    return partial(linear, *inputs.forward)


def composed(case: Case, inputs: LinearInputs) -> Callable:
    """The same in torch's operations."""
    function = partial(eager, form=case.form)
    if case.op == "linear_train":
        return partial(_step, function, _leaves(inputs), inputs.grad)
    return partial(function, *inputs.forward)


def addmm_activation(inputs: LinearInputs) -> Callable:
    return partial(torch._addmm_activation, inputs.bias, inputs.x, inputs.weight.t(), use_gelu=True)


def _leaves(inputs: LinearInputs) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_() for tensor in inputs.forward]


def _step(function: Callable, leaves: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Forward and backward: (out, grad_x, grad_weight, grad_bias)."""
    with torch.enable_grad():
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, grad)
    return out.detach(), *grads


def expected(case: Case, inputs: LinearInputs, gelu: Callable, derivative: Callable) -> tuple[torch.Tensor, ...]:
    """The fp64 results: (out,), or (out, grad_x, grad_weight, grad_bias) for a training step."""
    x, weight, bias = (tensor.double() for tensor in inputs.forward)
    pre = torch.addmm(bias, x, weight.t())
    out = pre if case.form == "bias" else gelu(pre, case.form)
    if case.op == "linear":
        return (out,)
    d = inputs.grad.double()
    if case.form != "bias":
        d = d * derivative(pre, case.form)
    return out, d @ weight, d.t() @ x, d.sum(0)


def peak_memory(kernel, device: torch.device, case: Case) -> dict[str, float]:
    """Bytes that a training step needs beyond its inputs, ours and eager's."""
    inputs = make_inputs(case, device, seed=1)
    values = {}
    for who, call in ((OURS, ours(case, kernel, inputs)), (EAGER, composed(case, inputs))):
        call()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        values[memory_name(case, who)] = float(torch.cuda.max_memory_allocated(device) - before)
    return values


def memory_name(case: Case, who: str) -> str:
    return f"{case.label}: peak bytes, {who}"
