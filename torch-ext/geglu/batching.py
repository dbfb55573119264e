"""torch.vmap: the operators are pointwise in all dimensions but the last, so a batch is one more leading dimension."""

import torch

from .dispatch import add_op_namespace_prefix, ops


def lead(info, in_dims, *tensors):
    """The tensors with the batch as their first dimension, expanded where a tensor has none; None stays None."""
    for tensor, in_dim in zip(tensors, in_dims[: len(tensors)], strict=True):
        if tensor is None:
            yield None
        elif in_dim is None:
            yield tensor.expand(info.batch_size, *tensor.shape)
        else:
            yield tensor.movedim(in_dim, 0)


@torch.library.register_vmap(add_op_namespace_prefix("geglu"))
def _geglu_vmap(info, in_dims, gate, up, tanh):
    return ops.geglu.default(*lead(info, in_dims, gate, up), tanh), 0


@torch.library.register_vmap(add_op_namespace_prefix("geglu_packed"))
def _geglu_packed_vmap(info, in_dims, x, tanh, gate_first):
    return ops.geglu_packed.default(*lead(info, in_dims, x), tanh, gate_first), 0


@torch.library.register_vmap(add_op_namespace_prefix("geglu_backward"))
def _geglu_backward_vmap(info, in_dims, grad_out, gate, up, tanh):
    return ops.geglu_backward.default(*lead(info, in_dims, grad_out, gate, up), tanh), (0, 0)


@torch.library.register_vmap(add_op_namespace_prefix("geglu_packed_backward"))
def _geglu_packed_backward_vmap(info, in_dims, grad_out, x, tanh, gate_first):
    return ops.geglu_packed_backward.default(*lead(info, in_dims, grad_out, x), tanh, gate_first), 0
