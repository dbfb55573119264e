"""torch.vmap of ``linear``: a batch of x is one more leading dimension, a batch of weights is torch's bmm."""

import torch
import torch.nn.functional as F

from .batching import lead
from .dispatch import add_op_namespace_prefix, ops

_APPROXIMATE = {1: "none", 2: "tanh"}


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, ..., C) as (batch, R, C)."""
    return tensor.flatten(1, -2) if tensor.dim() > 2 else tensor.unsqueeze(1)


def _preactivation(info, in_dims, x, weight, bias) -> torch.Tensor:
    x, weight, bias = lead(info, in_dims, x, weight, bias)
    pre = torch.bmm(_rows(x), weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), _rows(x), weight.mT)
    return pre.reshape(*x.shape[:-1], weight.shape[1])


def _one_weight(in_dims) -> bool:
    return in_dims[1] is None and in_dims[2] is None


def batched_linear(info, in_dims, x, weight, bias, activation, allow_tf32):
    """The rule of ``linear``: (result, its batch dimension)."""
    if _one_weight(in_dims):
        (x,) = lead(info, in_dims, x)
        return ops.linear.default(x, weight, bias, activation, allow_tf32), 0
    pre = _preactivation(info, in_dims, x, weight, bias)
    return F.gelu(pre, approximate=_APPROXIMATE[activation]) if activation else pre, 0


@torch.library.register_vmap(add_op_namespace_prefix("linear"))
def _linear_vmap(info, in_dims, *arguments):
    return batched_linear(info, in_dims, *arguments)


@torch.library.register_vmap(add_op_namespace_prefix("linear_with_preactivation"))
def _linear_with_preactivation_vmap(info, in_dims, x, weight, bias, activation, allow_tf32):
    if _one_weight(in_dims):
        (x,) = lead(info, in_dims, x)
        return ops.linear_with_preactivation.default(x, weight, bias, activation, allow_tf32), (0, 0)
    pre = _preactivation(info, in_dims, x, weight, bias)
    return (F.gelu(pre, approximate=_APPROXIMATE[activation]), pre), (0, 0)


@torch.library.register_vmap(add_op_namespace_prefix("linear_backward"))
def _linear_backward_vmap(
    info, in_dims, grad_out, x, weight, pre, activation, allow_tf32, needs_x, needs_weight, needs_bias
):
    """One gradient of the parameters for each member of the batch, so it is always torch's batched products."""
    d, x, weight, pre = lead(info, in_dims, grad_out, x, weight, pre)
    if activation:
        d = torch.ops.aten.gelu_backward.default(d, pre, approximate=_APPROXIMATE[activation])
    nothing = d.new_empty(info.batch_size, 0)
    grad_x = torch.bmm(_rows(d), weight).reshape(*d.shape[:-1], weight.shape[2]) if needs_x else nothing
    grad_weight = torch.bmm(_rows(d).mT, _rows(x)) if needs_weight else nothing
    grad_bias = _rows(d).sum(1) if needs_bias else nothing
    return (grad_x, grad_weight, grad_bias), (0, 0, 0)
