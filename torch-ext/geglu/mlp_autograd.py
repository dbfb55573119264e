"""Gradients of ``geglu_mlp``. Entered only when one is asked for.

With gate = x @ gate_weight.T + gate_bias, up alike and hidden = gelu(gate) * up, the arguments, gate and up are kept
between forward and backward: not hidden, which is a cheap pass over the other two. With ``recompute`` it is the
arguments alone.
"""

import torch

from .dispatch import ops
from .functional import geglu
from .linear import linear


def gated(x, gate_weight, up_weight, gate_bias, up_bias, approximate):
    """``linear_geglu`` from functions that are differentiable each."""
    return geglu(linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias), approximate=approximate)


def composed(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, approximate):
    """``geglu_mlp`` from functions that are differentiable each."""
    return linear(gated(x, gate_weight, up_weight, gate_bias, up_bias, approximate), down_weight, down_bias)


class GatedMLP(torch.autograd.Function):
    """geglu_mlp, called as ``apply(approximate, allow_tf32, recompute, *its seven tensors)``."""

    @staticmethod
    def forward(ctx, approximate, allow_tf32, recompute, *tensors):
        x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = tensors
        ctx.approximate, ctx.allow_tf32 = approximate, allow_tf32
        gate = ops.linear.default(x, gate_weight, gate_bias, 0, allow_tf32)
        up = ops.linear.default(x, up_weight, up_bias, 0, allow_tf32)
        hidden = ops.geglu.default(gate, up, approximate == "tanh")
        ctx.save_for_backward(*tensors, *((None, None) if recompute else (gate, up)))
        return ops.linear.default(hidden, down_weight, down_bias, 0, allow_tf32)

    @staticmethod
    def backward(ctx, grad_out):
        *tensors, gate, up = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        tanh = ctx.approximate == "tanh"
        if torch.is_grad_enabled():  # by create_graph: the gradients will be differentiated again
            return *(None,) * 3, *_differentiable(ctx.approximate, tensors, needs, grad_out)
        x, gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = tensors
        needs_x, needs_gate, needs_up, needs_down, needs_gate_bias, needs_up_bias, needs_down_bias = needs
        if gate is None:
            gate = ops.linear.default(x, gate_weight, gate_bias, 0, ctx.allow_tf32)
            up = ops.linear.default(x, up_weight, up_bias, 0, ctx.allow_tf32)
        needs_hidden = needs_x or needs_gate or needs_up or needs_gate_bias or needs_up_bias
        hidden = ops.geglu.default(gate, up, tanh) if needs_down else None

        def backward(grad, into, weight, *needs):
            grads = ops.linear_backward.default(grad, into, weight, None, 0, ctx.allow_tf32, *needs)
            return (grad if need else None for grad, need in zip(grads, needs, strict=True))

        grad_hidden, grad_down, grad_down_bias = backward(
            grad_out, hidden, down_weight, needs_hidden, needs_down, needs_down_bias
        )
        del hidden
        grad_x = grad_gate = grad_up = grad_gate_bias = grad_up_bias = None
        if needs_hidden:
            d_gate, d_up = ops.geglu_backward.default(grad_hidden, gate, up, tanh)
            del grad_hidden
            grad_x, grad_gate, grad_gate_bias = backward(d_gate, x, gate_weight, needs_x, needs_gate, needs_gate_bias)
            through_up, grad_up, grad_up_bias = backward(d_up, x, up_weight, needs_x, needs_up, needs_up_bias)
            if needs_x:
                grad_x += through_up
        return *(None,) * 3, grad_x, grad_gate, grad_up, grad_down, grad_gate_bias, grad_up_bias, grad_down_bias


def _differentiable(approximate, tensors, needs, grad_out):
    """The gradients as functions of the arguments and grad_out, through the block's parts."""
    # Views, because one tensor may be two arguments, each with a gradient of its own.
    tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
    wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    with torch.autocast(grad_out.device.type, enabled=False):
        grads = iter(torch.autograd.grad(composed(*tensors, approximate), wanted, grad_out, create_graph=True))
    return (next(grads) if need else None for need in needs)
