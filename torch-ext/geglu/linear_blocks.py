"""Plain GELU feed-forward blocks: act(fc1(x)) as one operation where fc1 is nothing but a product with a weight."""

import torch
from torch import nn

from .activations import gelu_form
from .blocks import host_forward, report
from .formula import INPUT, recognizer
from .linear import linear
from .projections import fusable, plain_parameters

_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}

_is_plain_mlp = recognizer(frozenset(("fc1", "activation_fn", "fc2")), (("fc2", ("activation_fn", ("fc1", INPUT))),))
_is_plain_intermediate = recognizer(
    frozenset(("dense", "intermediate_act_fn")), (("intermediate_act_fn", ("dense", INPUT)),)
)
_is_plain_conv1d_mlp = recognizer(
    frozenset(("c_fc", "act", "c_proj", "dropout")), (("dropout", ("c_proj", ("act", ("c_fc", INPUT)))),)
)


def gelu_mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """fc2(activation_fn(fc1(x)))."""
    if not _is_plain_mlp(type(module)):
        return host_forward(module, x, _unfused_mlp, "its forward is not fc2(activation_fn(fc1(x)))")
    return module.fc2(_activated(module, module.fc1, module.activation_fn, x))


def gelu_intermediate(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """intermediate_act_fn(dense(x))."""
    if not _is_plain_intermediate(type(module)):
        return host_forward(module, x, _unfused_intermediate, "its forward is not intermediate_act_fn(dense(x))")
    return _activated(module, module.dense, module.intermediate_act_fn, x)


def gelu_conv1d_mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """dropout(c_proj(act(c_fc(x))))."""
    if not _is_plain_conv1d_mlp(type(module)):
        return host_forward(module, x, _unfused_conv1d_mlp, "its forward is not dropout(c_proj(act(c_fc(x))))")
    return module.dropout(module.c_proj(_activated(module, module.c_fc, module.act, x)))


def _unfused_mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.fc2(module.activation_fn(module.fc1(x)))


def _unfused_intermediate(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.intermediate_act_fn(module.dense(x))


def _unfused_conv1d_mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.dropout(module.c_proj(module.act(module.c_fc(x))))


def _activated(module: nn.Module, projection: nn.Module, activation: object, x: torch.Tensor) -> torch.Tensor:
    """activation(projection(x)): one operation, or the two calls where one of them is something else."""
    form = gelu_form(activation)
    parameters = None if form is None else plain_parameters(projection)
    if parameters is not None and fusable(x, *parameters):
        return linear(x, *parameters, activation=_ACTIVATIONS[form])
    if form is None:
        report(module, "its activation %r is not plain GELU", activation)
    elif parameters is None:
        report(module, "its projection %r is more than a product with a weight", projection)
    return activation(projection(x))
