"""The operators' bodies: arguments checked, results allocated, the arithmetic handed to ``launch``.

Names, arguments and results are those of torch-ext/torch_binding.cpp. The last argument of each, ``wrap``, is not the
operator's: see ``launch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .. import checks
from . import launch

if TYPE_CHECKING:
    from collections.abc import Callable


def geglu(gate: torch.Tensor, up: torch.Tensor, tanh: bool, wrap: Callable | None) -> torch.Tensor:
    checks.check_first("geglu", "gate", gate)
    checks.check_same("geglu", "gate", gate, up=up)
    checks.check_shape("geglu", "up", up, gate.shape, "the shape of gate")
    out = torch.empty_like(gate)
    if gate.numel():
        launch.forward(gate, up, out, tanh, wrap)
    return out


def geglu_packed(x: torch.Tensor, tanh: bool, gate_first: bool, wrap: Callable | None) -> torch.Tensor:
    checks.check_packed("geglu_packed", x)
    out = x.new_empty(checks.half(x))
    if out.numel():
        launch.forward(*_halves(x, gate_first), out, tanh, wrap)
    return out


def geglu_backward(
    grad_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool, wrap: Callable | None
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "geglu_backward"
    checks.check_first(op, "gate", gate)
    checks.check_same(op, "gate", gate, up=up, grad_out=grad_out)
    checks.check_shape(op, "up", up, gate.shape, "the shape of gate")
    checks.check_shape(op, "grad_out", grad_out, gate.shape, "the shape of gate")
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        launch.backward(grad_out, gate, up, grad_gate, grad_up, tanh, wrap)
    return grad_gate, grad_up


def geglu_packed_backward(
    grad_out: torch.Tensor, x: torch.Tensor, tanh: bool, gate_first: bool, wrap: Callable | None
) -> torch.Tensor:
    op = "geglu_packed_backward"
    checks.check_packed(op, x)
    checks.check_same(op, "x", x, grad_out=grad_out)
    checks.check_shape(op, "grad_out", grad_out, checks.half(x), "half of x's last dimension")
    grad_x = torch.empty_like(x)
    if x.numel():
        launch.backward(grad_out, *_halves(x, gate_first), *_halves(grad_x, gate_first), tanh, wrap)
    return grad_x


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor, wrap: Callable | None) -> None:
    _write_packed("gelu_and_mul", out, x, False, wrap)


def gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor, wrap: Callable | None) -> None:
    _write_packed("gelu_tanh_and_mul", out, x, True, wrap)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: int,
    allow_tf32: bool,
    wrap: Callable | None,
) -> torch.Tensor:
    checks.check_linear("linear", x, weight, bias)
    checks.check_activation("linear", activation)
    out = _product(x, weight, bias)
    if activation and out.numel():
        launch.activate(out, out, activation == 2, wrap)
    return out


def linear_with_preactivation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: int,
    allow_tf32: bool,
    wrap: Callable | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "linear_with_preactivation"
    checks.check_linear(op, x, weight, bias)
    checks.check_activation(op, activation)
    if not activation:
        raise RuntimeError(f"{op}: activation must be 1 or 2, but is 0")
    pre = _product(x, weight, bias)
    out = torch.empty_like(pre)
    if out.numel():
        launch.activate(pre, out, activation == 2, wrap)
    return out, pre


def linear_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    pre: torch.Tensor | None,
    activation: int,
    allow_tf32: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    wrap: Callable | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op = "linear_backward"
    checks.check_activation(op, activation)
    checks.check_first(op, "grad_out", grad_out)
    cols = grad_out.shape[-1]
    d = grad_out
    if activation:
        pre = _given(op, "pre", pre, "an activation", grad_out)
        checks.check_shape(op, "pre", pre, grad_out.shape, "the shape of grad_out")
        d = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
        if d.numel():
            launch.activate_backward(grad_out.contiguous(), pre.contiguous(), d, activation == 2, wrap)
    grad_x, grad_weight, grad_bias = (grad_out.new_empty(0) for _ in range(3))
    if needs_x:
        weight = _given(op, "weight", weight, "the gradient of x", grad_out)
        if weight.dim() != 2 or weight.shape[0] != cols:
            raise RuntimeError(
                f"{op}: weight must have shape [{cols}, K] for grad_out of shape {list(grad_out.shape)}, but has "
                f"{list(weight.shape)}"
            )
        grad_x = (_matrix(d) @ weight).reshape(*d.shape[:-1], weight.shape[1])
    if needs_weight:
        x = _given(op, "x", x, "the gradient of weight", grad_out)
        if x.shape[:-1] != grad_out.shape[:-1]:
            raise RuntimeError(
                f"{op}: x must have the leading sizes of grad_out, of shape {list(grad_out.shape)}, but has shape "
                f"{list(x.shape)}"
            )
        grad_weight = _matrix(d).mT @ _matrix(x)
    if needs_bias:
        wide = torch.float64 if d.dtype == torch.float64 else torch.float32
        grad_bias = _matrix(d).sum(0, dtype=wide).to(d.dtype)
    return grad_x, grad_weight, grad_bias


def linear_geglu(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    tanh: bool,
    allow_tf32: bool,
    wrap: Callable | None,
) -> torch.Tensor:
    checks.check_gated("linear_geglu", x, gate_weight, up_weight, gate_bias, up_bias, has_addresses=wrap is None)
    return _gated(x, gate_weight, up_weight, gate_bias, up_bias, tanh, wrap)


def geglu_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    tanh: bool,
    allow_tf32: bool,
    wrap: Callable | None,
) -> torch.Tensor:
    op = "geglu_mlp"
    checks.check_gated(op, x, gate_weight, up_weight, gate_bias, up_bias, has_addresses=wrap is None)
    hidden = _gated(x, gate_weight, up_weight, gate_bias, up_bias, tanh, wrap)
    checks.check_linear(op, hidden, down_weight, down_bias, "down_", "gelu(gate) * up")
    return _product(hidden, down_weight, down_bias)


def geglu_mlp_route(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    tanh: bool,
    allow_tf32: bool,
) -> str:
    checks.check_gated("geglu_mlp_route", x, gate_weight, up_weight, gate_bias, up_bias, has_addresses=True)
    rows = x.shape[:-1].numel()
    into = "torch+torch+geglu" if rows * gate_weight.shape[0] else "empty"
    return f"{into}+torch" if rows * down_weight.shape[0] else f"{into}+empty"


def linear_route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: int, allow_tf32: bool, training: bool
) -> str:
    checks.check_linear("linear_route", x, weight, bias)
    checks.check_activation("linear_route", activation)
    if x.shape[:-1].numel() == 0 or weight.shape[0] == 0:
        return "empty"
    return "torch+pointwise" if activation else "torch"


def linear_tune(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: int, allow_tf32: bool, training: bool
) -> str:
    checks.check_linear("tune", x, weight, bias)
    checks.check_activation("tune", activation)
    return ""


def linear_export_tuning() -> str:
    return ""


def linear_import_tuning(entry: str) -> str:
    return "this build has no compiled library, so torch chooses the algorithms"


def cpu_capability() -> str:
    return "torch"


def _halves(x: torch.Tensor, gate_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up), views of x."""
    first, second = x.chunk(2, -1)
    return (first, second) if gate_first else (second, first)


def _write_packed(op: str, out: torch.Tensor, x: torch.Tensor, tanh: bool, wrap: Callable | None) -> None:
    checks.check_packed(op, x)
    checks.check_out(op, out, x, has_addresses=wrap is None)
    if out.numel():
        launch.forward(*_halves(x, True), out, tanh, wrap)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias, contiguous."""
    return F.linear(x, weight, bias).contiguous()


def _gated(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    tanh: bool,
    wrap: Callable | None,
) -> torch.Tensor:
    gate, up = _product(x, gate_weight, gate_bias), _product(x, up_weight, up_bias)
    out = torch.empty_like(gate)
    if out.numel():
        launch.forward(gate, up, out, tanh, wrap)
    return out


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """(..., C) as (R, C); unlike reshape(-1, C) it also takes C = 0."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _given(op: str, name: str, tensor: torch.Tensor | None, why: str, grad_out: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError(f"{op}: {name} must be given for {why}")
    checks.check_same(op, "grad_out", grad_out, **{name: tensor})
    return tensor
