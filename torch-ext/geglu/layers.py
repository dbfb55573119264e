"""Layers for ``kernelize``: each class's forward replaces that of a host module and reads the host's own parts.

The classes carry no state and no constructor. Their GELU form comes from the live module; see ``blocks``.
"""

import torch
from torch import nn

from .blocks import gated_mlp
from .functional import geglu_packed


class GeGLUMLP(nn.Module):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)) for GemmaMLP, Gemma2MLP, Gemma3MLP and every block of that form.

    The host has gate_proj, up_proj, down_proj and act_fn. With an act_fn that is not exact or tanh GELU, or a forward
    that does more than the formula, the host's own forward runs.

    Shapes:
        x: (..., hidden_size), any dtype the projections take
        returns: (..., hidden_size)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_mlp(self, x)


class LigerGEGLUMLP(nn.Module):
    """GeGLUMLP under the name that kernels-community/liger-kernels gives its layer for inference.

    A host without act_fn is liger-kernel's own class, which is the tanh form by definition.

    Shapes:
        x: (..., hidden_size), any dtype the projections take
        returns: (..., hidden_size)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_mlp(self, x)


class LigerTiledGEGLUMLP(nn.Module):
    """GeGLUMLP under the name that kernels-community/liger-kernels gives its layer for training.

    Not tiled over the sequence: it keeps gate and up for the backward pass, not the three intermediates of eager.

    Shapes:
        x: (..., hidden_size), any dtype the projections take
        returns: (..., hidden_size)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_mlp(self, x)


class GeluAndMul(nn.Module):
    """gelu(x[..., :d]) * x[..., d:] with the exact GELU.

    Shapes:
        x: (..., 2 * d); float32, float16, bfloat16 or float64
        returns: (..., d)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return geglu_packed(x, approximate="none")


class GeluTanhAndMul(nn.Module):
    """gelu(x[..., :d]) * x[..., d:] with the tanh form of GELU.

    Shapes:
        x: (..., 2 * d); float32, float16, bfloat16 or float64
        returns: (..., d)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return geglu_packed(x, approximate="tanh")
