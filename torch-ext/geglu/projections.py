"""Projections: whether a live module is nothing but a product with a weight, and whether a fused operator takes it.

A layer asks this at every call, since modules change between calls; so it reads the dictionaries in which nn.Module
keeps its parts, where getattr would search them one after the other.
"""

import torch
from torch import nn

from .activations import FUSED_DEVICES, FUSED_DTYPES, is_plain
from .dispatch import device_type

_PLAIN_TENSORS = frozenset((torch.Tensor, nn.Parameter))


def plain_parameters(projection: object) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The (N, K) weight and the bias of a module that multiplies by the one and adds the other, else None.

    Only the exact classes, without hooks: an adapter, a parametrization, a quantized or sharded weight would be passed
    by. transformers' Conv1D keeps its weight as (K, N), of which this is a view.
    """
    kind = type(projection)
    is_linear = kind is nn.Linear
    if not is_linear and (kind.__name__ != "Conv1D" or kind.__module__ != "transformers.pytorch_utils"):
        return None
    if not is_plain(projection):
        return None
    parameters = projection._parameters
    try:
        weight, bias = parameters["weight"], parameters["bias"]
    except KeyError:  # plain tensors took their place
        weight, bias = projection.weight, projection.bias
    if type(weight) not in _PLAIN_TENSORS or (bias is not None and type(bias) not in _PLAIN_TENSORS):
        return None
    return (weight if is_linear else weight.t()), bias


def fusable(x: object, *parameters: torch.Tensor | None) -> bool:
    """Whether the fused operators take them; what they refuse is left to the host, and so are the host's errors."""
    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.dim() == 0:
        return False
    kind, dtype, index = device_type(x), x.dtype, x.get_device()
    if kind not in FUSED_DEVICES or dtype not in FUSED_DTYPES:
        return False
    for tensor in parameters:
        if tensor is None:
            continue
        if tensor.dtype is not dtype and not (tensor.dtype in FUSED_DTYPES and torch.is_autocast_enabled(kind)):
            return False
        if tensor.get_device() != index or tensor.layout is not torch.strided:
            return False
        if index < 0 and tensor.is_meta:  # which has no index either
            return False
    return True
