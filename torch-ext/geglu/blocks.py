"""Feed-forward blocks: what a host module computes, and when the fused kernel may stand in for it.

``kernelize`` hands a layer any module that somebody mapped to it. A layer must never compute something else than its
host does, so everything is read from the live module, and whatever is not recognised runs the host's own forward.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn

from .activations import FUSED_DEVICES, FUSED_DTYPES, gelu_form, gelu_tanh
from .formula import INPUT, is_own, recognizer
from .functional import geglu
from .mlp import block_without_gradients
from .projections import plain_parameters

# One name for every build: the package itself is called after its unique id.
logger = logging.getLogger("geglu")

# Liger's blocks have no act_fn: they are the tanh form by definition.
_LIGER_BLOCKS = frozenset(("LigerGEGLUMLP", "LigerTiledGEGLUMLP"))
_GATE = ("act_fn", ("gate_proj", INPUT))
_UP = ("up_proj", INPUT)
_is_plain_gated_mlp = recognizer(
    frozenset(("gate_proj", "up_proj", "act_fn", "down_proj")),
    (("down_proj", ("product", _GATE, _UP)), ("down_proj", ("product", _UP, _GATE))),
    also=_LIGER_BLOCKS,
)

_reported: set[tuple[type, str]] = set()


def gated_mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)) as ``module`` computes it, the activation and product fused."""
    kind = type(module)
    if not _is_plain_gated_mlp(kind):
        return host_forward(module, x, _unfused, "its forward is not down_proj(act_fn(gate_proj(x)) * up_proj(x))")
    activation = module._modules.get("act_fn")
    if activation is None:
        activation = getattr(module, "act_fn", gelu_tanh if kind.__name__ in _LIGER_BLOCKS else None)
    form = gelu_form(activation)
    if form is None:
        return host_forward(module, x, _unfused, "its activation %r is not plain GELU", activation)
    if type(x) is torch.Tensor and not torch.is_grad_enabled():
        parameters = _plain_parameters(module)
        out = None if parameters is None else block_without_gradients(x, parameters, form)
        if out is not None:
            return out
    gate = module.gate_proj(x)
    up = module.up_proj(x)
    if _fusable(gate, up):
        return module.down_proj(geglu(gate, up, approximate=form))
    return module.down_proj(activation(gate) * up)


def _plain_parameters(module: nn.Module) -> tuple[torch.Tensor | None, ...] | None:
    """geglu_mlp's weights and biases, if all three projections are plain."""
    projections = module._modules
    gate = plain_parameters(projections.get("gate_proj"))
    up = plain_parameters(projections.get("up_proj"))
    down = plain_parameters(projections.get("down_proj"))
    if gate is None or up is None or down is None:
        return None
    return gate[0], up[0], down[0], gate[1], up[1], down[1]


def host_forward(module: nn.Module, x: torch.Tensor, own: Callable, reason: str, *parts: object) -> torch.Tensor:
    """The host's forward, and the reason for it logged once. ``own`` is the formula for one of our own layers."""
    report(module, reason, *parts)
    kind = type(module)
    return own(module, x) if is_own(kind.forward) else kind.forward(module, x)


def report(module: nn.Module, reason: str, *parts: object) -> None:
    """Logs, once for a class and reason, why a host keeps its own arithmetic.

    ``reason`` is a %-format for ``parts``, filled in here: torch.compile cannot trace the repr of a module before 2.6.
    """
    if torch.compiler.is_compiling():
        return
    kind, reason = type(module), reason % parts
    if (kind, reason) not in _reported:
        _reported.add((kind, reason))
        logger.info("%s keeps its own forward: %s", kind.__qualname__, reason)


def _unfused(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))


def _fusable(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return (
        type(gate) is torch.Tensor
        and type(up) is torch.Tensor
        and gate.dtype == up.dtype
        and gate.shape == up.shape
        and gate.device == up.device
        and gate.dtype in FUSED_DTYPES
        and gate.device.type in FUSED_DEVICES
    )
