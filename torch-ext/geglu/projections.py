"""Projections: whether a live module is nothing but a product with a weight, and whether a fused operator takes it."""

import torch
from torch import nn

from .activations import FUSED_DEVICES, FUSED_DTYPES, is_customized


def plain_weight(projection: nn.Module) -> torch.Tensor | None:
    """The (N, K) weight of a module that multiplies by it and adds its bias, else None.

    Only the exact classes, without hooks: an adapter, a parametrization, a quantized or sharded weight would be passed
    by. transformers' Conv1D keeps its weight as (K, N), of which this is a view.
    """
    kind = type(projection)
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if (kind is not nn.Linear and not is_conv1d) or is_customized(projection):
        return None
    for parameter in (projection.weight, projection.bias):
        if parameter is not None and type(parameter) not in (nn.Parameter, torch.Tensor):
            return None
    return projection.weight.t() if is_conv1d else projection.weight


def fusable(x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether the fused operators take them; what they refuse is left to the host, and so are the host's errors."""
    if type(x) is not torch.Tensor or x.device.type not in FUSED_DEVICES or x.layout != torch.strided:
        return False
    casts = torch.is_autocast_enabled(x.device.type)
    return x.dim() > 0 and all(
        tensor is None
        or (
            (casts or tensor.dtype == x.dtype)
            and tensor.dtype in FUSED_DTYPES
            and tensor.device == x.device
            and tensor.layout == torch.strided
        )
        for tensor in (x, *parameters)
    )
