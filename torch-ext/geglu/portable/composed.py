"""The gated functions in torch's own operations: for the CPU, and for GPUs without Triton.

The arithmetic and the roundings are those of docs/semantics.md. Half types are widened to float32 and float32 to
float64: torch's sigmoid and erfc are less accurate than a result may be, and not of the same bits at every place.
"""

import math

import torch

_C1 = 2 * math.sqrt(2 / math.pi)
_C2 = 0.044715 * _C1
# Beyond it the distribution function is 0 or 1 to every precision, and a slope multiplied by 0 must not be infinite.
_FAR = 40.0


def gelu(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """gelu(x) in x's dtype."""
    return x * _distribution(x, tanh)


def gelu_derivative(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """gelu'(x) = F(x) + x * F'(x) in x's dtype."""
    near = x.clamp(-_FAR, _FAR)
    if tanh:
        t = near * (_C1 + _C2 * near * near)
        return _distribution(x, tanh) + torch.sigmoid(t) * torch.sigmoid(-t) * near * (_C1 + 3 * _C2 * near * near)
    return _distribution(x, tanh) + near * torch.exp(-0.5 * near * near) * (1 / math.sqrt(2 * math.pi))


def _distribution(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    if tanh:
        return torch.sigmoid(x * (_C1 + _C2 * x * x))
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in the type that its arithmetic is done in. Apple's GPUs have no float64."""
    return x.double() if x.dtype in (torch.float32, torch.float64) and x.device.type != "mps" else x.float()


def forward(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, tanh: bool) -> None:
    """out <- round(gelu(gate)) * up; all of one shape, any strides."""
    out.copy_(gelu(widened(gate), tanh).to(gate.dtype) * up)


def backward(
    grad_out: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
    tanh: bool,
) -> None:
    """grad_gate <- round(grad_out * up) * gelu'(gate), grad_up <- grad_out * round(gelu(gate)); all of one shape."""
    wide = widened(gate)
    grad_up.copy_(grad_out * gelu(wide, tanh).to(gate.dtype))
    grad_gate.copy_((grad_out * up).to(wide.dtype) * gelu_derivative(wide, tanh))


def activate(pre: torch.Tensor, out: torch.Tensor, tanh: bool) -> None:
    """out <- gelu(pre); out may be pre."""
    out.copy_(gelu(widened(pre), tanh))


def activate_backward(grad_out: torch.Tensor, pre: torch.Tensor, grad_pre: torch.Tensor, tanh: bool) -> None:
    """grad_pre <- grad_out * gelu'(pre), rounded once."""
    grad_pre.copy_(widened(grad_out) * gelu_derivative(widened(pre), tanh))
