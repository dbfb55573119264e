"""Gradients of ``linear``. Entered only when one is asked for; as in ``autograd``, second ones are plain torch.

With pre = x @ weight.T + bias, out = gelu(pre) and d = grad_out * gelu'(pre):
    grad_x = d @ weight, grad_weight = d.T @ x, grad_bias = sum of d over the rows
"""

import torch
import torch.nn.functional as F

from .autograd import derivatives
from .dispatch import ops


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """(..., C) as (R, C); unlike reshape(-1, C) it also takes C = 0."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _saved(needs_x: bool, needs_weight: bool, x: torch.Tensor, weight: torch.Tensor):
    """Each is only needed for the other's gradient: a frozen weight does not keep x alive."""
    return x if needs_weight else None, weight if needs_x else None


def _asked_for(needs: tuple[bool, ...], grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(grad if need else None for need, grad in zip(needs, grads, strict=True))


class LinearBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad_out, x, weight, pre, activation, allow_tf32, needs_x, needs_weight, needs_bias):
        return ops.linear_backward.default(
            grad_out, x, weight, pre, activation, allow_tf32, needs_x, needs_weight, needs_bias
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.activation, ctx.needs = inputs[4], inputs[6:]
        ctx.save_for_backward(*inputs[:4])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        grad_out, x, weight, pre = ctx.saved_tensors
        for_x, for_weight, for_bias = _asked_for(ctx.needs, grads)
        # The three results are linear in d; `slope` is what they hand back to it.
        parts = []
        if for_x is not None:
            parts.append(F.linear(for_x, weight))
        if for_weight is not None:
            parts.append(F.linear(x, for_weight))
        if for_bias is not None:
            parts.append(for_bias.expand_as(grad_out))
        if not parts:
            return (None,) * 9
        slope = sum(parts[1:], parts[0])
        d, for_grad_out, for_pre = grad_out, slope, None
        if ctx.activation:
            _, first, second = derivatives(pre, ctx.activation == 2)
            d, for_grad_out, for_pre = grad_out * first, slope * first, slope * grad_out * second
        into_x = None if for_weight is None else d @ for_weight
        into_weight = None if for_x is None else rows(d).mT @ rows(for_x)
        return for_grad_out, into_x, into_weight, for_pre, *(None,) * 5


def _gradients(*arguments):
    """linear_backward, as a Function only if a derivative is to be taken of it: see ``autograd``."""
    return (LinearBackward.apply if torch.is_grad_enabled() else ops.linear_backward.default)(*arguments)


class Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, allow_tf32):
        return ops.linear.default(x, weight, bias, 0, allow_tf32)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.allow_tf32 = inputs
        ctx.save_for_backward(*_saved(*ctx.needs_input_grad[:2], x, weight))

    @staticmethod
    def backward(ctx, grad_out):
        needs = ctx.needs_input_grad[:3]
        grads = _gradients(grad_out, *ctx.saved_tensors, None, 0, ctx.allow_tf32, *needs)
        return *_asked_for(needs, grads), None


def _keep(ctx, inputs, pre):
    x, weight, _, ctx.activation, ctx.allow_tf32 = inputs
    ctx.save_for_backward(*_saved(*ctx.needs_input_grad[:2], x, weight), pre)


class LinearGELU(torch.autograd.Function):
    """(out, pre). pre is an output so that a second derivative, which depends on it, finds its way back to x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, activation, allow_tf32):
        return ops.linear_with_preactivation.default(x, weight, bias, activation, allow_tf32)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep(ctx, inputs, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_out, grad_pre):
        x, weight, pre = ctx.saved_tensors
        activation, needs = ctx.activation, ctx.needs_input_grad[:3]
        if grad_pre is not None:  # in a second derivative only
            if grad_out is not None:
                grad_pre = grad_pre + grad_out * derivatives(pre, activation == 2)[1]
            grad_out, pre, activation = grad_pre, None, 0
        if grad_out is None:
            return (None,) * 5
        grads = _gradients(grad_out, x, weight, pre, activation, ctx.allow_tf32, *needs)
        return *_asked_for(needs, grads), None, None


class CompiledLinearGELU(torch.autograd.Function):
    """LinearGELU for torch.compile, which has no second derivatives and would always make a gradient for pre."""

    @staticmethod
    def forward(x, weight, bias, activation, allow_tf32):
        return ops.linear_with_preactivation.default(x, weight, bias, activation, allow_tf32)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep(ctx, inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad_out, grad_pre):
        needs = ctx.needs_input_grad[:3]
        grads = _gradients(grad_out, *ctx.saved_tensors, ctx.activation, ctx.allow_tf32, *needs)
        return *_asked_for(needs, grads), None, None
