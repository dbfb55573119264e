"""What torch knows of the gated block's operators: the results' sizes, and batches under torch.vmap."""

import torch

from .dispatch import add_op_namespace_prefix, ops
from .fake import check_linear
from .linear_batching import batched_linear


def _hidden(op, x, gate_weight, up_weight, gate_bias, up_bias) -> list[int]:
    sizes = check_linear(op, x, gate_weight, gate_bias)
    check_linear(op, x, up_weight, up_bias)
    torch._check(
        gate_weight.shape == up_weight.shape,
        lambda: f"{op}: up_weight must have shape {gate_weight.shape}, but has {up_weight.shape}",
    )
    return sizes


@torch.library.register_fake(add_op_namespace_prefix("linear_geglu"))
def _linear_geglu_fake(x, gate_weight, up_weight, gate_bias, up_bias, tanh, allow_tf32):
    return x.new_empty(_hidden("linear_geglu", x, gate_weight, up_weight, gate_bias, up_bias))


@torch.library.register_fake(add_op_namespace_prefix("geglu_mlp"))
def _geglu_mlp_fake(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, tanh, allow_tf32):
    hidden = x.new_empty(_hidden("geglu_mlp", x, gate_weight, up_weight, gate_bias, up_bias))
    return x.new_empty(check_linear("geglu_mlp", hidden, down_weight, down_bias))


def _batched_gated(info, in_dims, x, gate_weight, up_weight, gate_bias, up_bias, tanh, allow_tf32):
    """A batch is a composition: its products are those of ``linear``'s own rule."""
    x_dim, gate_weight_dim, up_weight_dim, gate_bias_dim, up_bias_dim = in_dims[:5]
    gate, _ = batched_linear(info, (x_dim, gate_weight_dim, gate_bias_dim), x, gate_weight, gate_bias, 0, allow_tf32)
    up, _ = batched_linear(info, (x_dim, up_weight_dim, up_bias_dim), x, up_weight, up_bias, 0, allow_tf32)
    return ops.geglu.default(gate, up, tanh), 0


@torch.library.register_vmap(add_op_namespace_prefix("linear_geglu"))
def _linear_geglu_vmap(info, in_dims, *arguments):
    return _batched_gated(info, in_dims, *arguments)


@torch.library.register_vmap(add_op_namespace_prefix("geglu_mlp"))
def _geglu_mlp_vmap(
    info, in_dims, x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, tanh, allow_tf32
):
    hidden, _ = _batched_gated(
        info, (*in_dims[:3], *in_dims[4:6]), x, gate_weight, up_weight, gate_bias, up_bias, tanh, allow_tf32
    )
    return batched_linear(info, (0, in_dims[3], in_dims[6]), hidden, down_weight, down_bias, 0, allow_tf32)
