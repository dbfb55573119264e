"""Gradients. These functions are entered only when a gradient is asked for: without one the operator is called bare.

First derivatives are one kernel. Second and higher ones are rare, and go through plain torch operations that torch
can differentiate again. In a backward pass gradients are enabled only if one is to be taken of it; in all others the
operator is called bare there too. That also spares torch.compile a Function in a Function: torch 2.5 cannot trace it.
"""

import math

import torch

from .dispatch import ops

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_KAPPA = 0.044715


def derivatives(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gelu(x), gelu'(x) and gelu''(x), in x's dtype, differentiable.

    tanh:  gelu = x*s, s = sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715*x^3)
           gelu' = s + x*s', gelu'' = 2*s' + x*s'', s' = s*(1-s)*2u', s'' = s'*(1-2s)*2u' + s*(1-s)*2u''
    exact: gelu = x*Phi(x), gelu' = Phi + x*phi, gelu'' = (2 - x^2)*phi (Hendrycks and Gimpel, arXiv:1606.08415)
    """
    if tanh:
        twice_u = 2 * _SQRT_2_OVER_PI * (x + _KAPPA * x**3)
        first_u = 2 * _SQRT_2_OVER_PI * (1 + 3 * _KAPPA * x**2)
        second_u = 12 * _SQRT_2_OVER_PI * _KAPPA * x
        s = torch.sigmoid(twice_u)
        spread = s * torch.sigmoid(-twice_u)
        first_s = spread * first_u
        second_s = first_s * (1 - 2 * s) * first_u + spread * second_u
        return x * s, s + x * first_s, 2 * first_s + x * second_s
    cdf = 0.5 * torch.erfc(-x * math.sqrt(0.5))
    pdf = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * cdf, cdf + x * pdf, (2 - x * x) * pdf


def _double_backward(grad_out, gate, up, tanh, grad_grad_gate, grad_grad_up):
    """Gradients for (grad_out, gate, up) of grad_gate = grad_out*up*gelu'(gate), grad_up = grad_out*gelu(gate)."""
    value, first, second = derivatives(gate, tanh)
    for_grad_out = grad_grad_gate * up * first + grad_grad_up * value
    for_gate = grad_out * (grad_grad_gate * up * second + grad_grad_up * first)
    for_up = grad_grad_gate * grad_out * first
    return for_grad_out, for_gate, for_up


class GeGLUBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad_out, gate, up, tanh):
        return ops.geglu_backward.default(grad_out, gate, up, tanh)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad_out, gate, up, ctx.tanh = inputs
        ctx.save_for_backward(grad_out, gate, up)

    @staticmethod
    def backward(ctx, grad_grad_gate, grad_grad_up):
        return *_double_backward(*ctx.saved_tensors, ctx.tanh, grad_grad_gate, grad_grad_up), None


class GeGLU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate, up, tanh):
        return ops.geglu.default(gate, up, tanh)

    @staticmethod
    def setup_context(ctx, inputs, output):
        gate, up, ctx.tanh = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    def backward(ctx, grad_out):
        gate, up = ctx.saved_tensors
        gradients = GeGLUBackward.apply if torch.is_grad_enabled() else ops.geglu_backward.default
        return *gradients(grad_out, gate, up, ctx.tanh), None


class GeGLUPackedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad_out, x, tanh, gate_first):
        return ops.geglu_packed_backward.default(grad_out, x, tanh, gate_first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad_out, x, ctx.tanh, ctx.gate_first = inputs
        ctx.save_for_backward(grad_out, x)

    @staticmethod
    def backward(ctx, grad_grad_x):
        grad_out, x = ctx.saved_tensors
        order = 1 if ctx.gate_first else -1
        gate, up = x.chunk(2, -1)[::order]
        for_grad_out, for_gate, for_up = _double_backward(
            grad_out, gate, up, ctx.tanh, *grad_grad_x.chunk(2, -1)[::order]
        )
        return for_grad_out, torch.cat((for_gate, for_up)[::order], -1), None, None


class GeGLUPacked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, tanh, gate_first):
        return ops.geglu_packed.default(x, tanh, gate_first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.tanh, ctx.gate_first = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad_out):
        (x,) = ctx.saved_tensors
        gradient = GeGLUPackedBackward.apply if torch.is_grad_enabled() else ops.geglu_packed_backward.default
        return gradient(grad_out, x, ctx.tanh, ctx.gate_first), None, None
