"""Layers for ``kernelize``: each class's forward replaces that of a host module and reads the host's own parts.

The classes carry no state and no constructor. Their GELU form comes from the live module; see ``blocks``.
"""

import torch
from torch import nn

from .blocks import gated_mlp
from .functional import geglu_packed
from .linear_blocks import gelu_conv1d_mlp, gelu_intermediate, gelu_mlp


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


class GELUMLP(nn.Module):
    """fc2(gelu(fc1(hidden_states))) for SiglipMLP, CLIPMLP, ViTMLP and every block of that form.

    The host has fc1, activation_fn and fc2. fc1 and the activation are one operation if fc1 is a plain nn.Linear and
    activation_fn exact or tanh GELU; else they run as the host has them.

    Shapes:
        hidden_states: (..., hidden_size), any dtype the projections take
        returns: (..., hidden_size)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return gelu_mlp(self, hidden_states)


class GELUIntermediate(nn.Module):
    """gelu(dense(hidden_states)) for BertIntermediate and every block of that form.

    The host has dense and intermediate_act_fn; what is fused, and when, is as for GELUMLP.

    Shapes:
        hidden_states: (..., hidden_size), any dtype the projection takes
        returns: (..., intermediate_size)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return gelu_intermediate(self, hidden_states)


class GELUConv1DMLP(nn.Module):
    """dropout(c_proj(gelu(c_fc(hidden_states)))) for GPT2MLP and every block of that form.

    The host has c_fc, act, c_proj and dropout. c_fc is transformers' Conv1D, whose (in, out) weight is read as it
    lies, or a plain nn.Linear; what is fused, and when, is as for GELUMLP.

    Shapes:
        hidden_states: (..., hidden_size), any dtype the projections take
        returns: (..., hidden_size)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return gelu_conv1d_mlp(self, hidden_states)
