"""Gated feed-forward blocks: what a host module computes, and when the fused kernel may stand in for it.

``kernelize`` hands a layer any module that somebody mapped to it. A layer must never compute something else than its
host does, so everything is read from the live module, and whatever is not recognised runs the host's own forward.
"""

import logging
from functools import partial
from types import FunctionType

import torch
from torch import nn

from .functional import geglu

# One name for every build: the package itself is called after its unique id.
logger = logging.getLogger("geglu")

# Names of the classes in transformers.activations -> `approximate`. Those behind gelu_new and gelu_fast are the tanh
# form written out in single operations.
_TRANSFORMERS_GELU = {
    "GELUActivation": "none",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
}
_FUSED_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
_FUSED_DEVICES = frozenset(("cpu", "cuda"))
# Liger's blocks have no act_fn: they are the tanh form by definition.
_LIGER_BLOCKS = frozenset(("LigerGEGLUMLP", "LigerTiledGEGLUMLP"))

_gelu_tanh = partial(nn.functional.gelu, approximate="tanh")

_reported: set[tuple[type, str]] = set()


def gelu_form(activation: object) -> str | None:
    """``approximate`` of a live activation module or function if it is exact or tanh GELU, else None.

    A module with hooks is not recognised either: the fused kernel would pass them by.
    """
    if activation is nn.functional.gelu:
        return "none"
    if activation is _gelu_tanh:
        return "tanh"
    if not isinstance(activation, nn.Module) or _is_customized(activation):
        return None
    kind = type(activation)
    if kind is nn.GELU:
        return activation.approximate
    if kind.__module__ == "transformers.activations":
        return _TRANSFORMERS_GELU.get(kind.__name__)
    return None


def gated_mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)) as ``module`` computes it, the activation and product fused."""
    kind = type(module)
    if not _is_plain_gated_mlp(kind):
        return _host_forward(module, x, "its forward is not down_proj(act_fn(gate_proj(x)) * up_proj(x))")
    activation = getattr(module, "act_fn", _gelu_tanh if kind.__name__ in _LIGER_BLOCKS else None)
    form = gelu_form(activation)
    if form is None:
        return _host_forward(module, x, f"its activation {activation!r} is not plain GELU")
    gate = module.gate_proj(x)
    up = module.up_proj(x)
    if _fusable(gate, up):
        return module.down_proj(geglu(gate, up, approximate=form))
    return module.down_proj(activation(gate) * up)


def _fusable(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return (
        type(gate) is torch.Tensor
        and type(up) is torch.Tensor
        and gate.dtype == up.dtype
        and gate.shape == up.shape
        and gate.device == up.device
        and gate.dtype in _FUSED_DTYPES
        and gate.device.type in _FUSED_DEVICES
    )


def _is_customized(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class _Symbol:
    """A value in a dry run of a host's forward: what was computed, as a tuple. Any operation but `*` fails."""

    def __init__(self, *expression: object):
        self.expression = expression

    def __mul__(self, other: "_Symbol") -> "_Symbol":
        return _Symbol("product", self.expression, other.expression)


class _SymbolicHost:
    """Stands for a host module in a dry run: its parts note what they are applied to."""

    def __init__(self):
        for part in _PARTS:
            setattr(self, part, lambda value, part=part: _Symbol(part, value.expression))


_PARTS = frozenset(("gate_proj", "up_proj", "act_fn", "down_proj"))
_GATE = ("act_fn", ("gate_proj", ("x",)))
_UP = ("up_proj", ("x",))
_PLAIN_RESULTS = (("down_proj", ("product", _GATE, _UP)), ("down_proj", ("product", _UP, _GATE)))


def _computes_the_gated_mlp(kind: type) -> bool:
    """Whether the class's forward is ``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` and nothing else.

    Blocks with the same parts and more to do are common: dropout (T5Gemma), activation sparsity (Gemma3n), multipliers
    (Falcon-H1), a norm (BitNet), clamps, products in float32. So the forward may name nothing but the four parts,
    which leaves it no way to look at anything else, and a run on symbols must give the formula.
    """
    forward = kind.forward
    if kind.__name__ in _LIGER_BLOCKS or _is_own(forward):
        return True
    if not isinstance(forward, FunctionType) or forward.__closure__ or set(forward.__code__.co_names) != _PARTS:
        return False
    try:
        return forward(_SymbolicHost(), _Symbol("x")).expression in _PLAIN_RESULTS
    except Exception:  # whatever a forward does that symbols cannot: it is not the formula
        return False


def _is_plain_gated_mlp(kind: type) -> bool:
    known = _PLAIN.get(kind)
    if known is None:
        known = _PLAIN[kind] = _computes_the_gated_mlp(kind)
    return known


# What torch.compiler.assume_constant_result does, without its import of the whole compiler (1 s) when this package is
# imported: a compiled caller takes the answer as a constant and does not trace the dry run.
_is_plain_gated_mlp._dynamo_marked_constant = True
_PLAIN: dict[type, bool] = {}


def _is_own(forward: object) -> bool:
    return getattr(forward, "__module__", None) == f"{__package__}.layers"


def _host_forward(module: nn.Module, x: torch.Tensor, reason: str) -> torch.Tensor:
    kind = type(module)
    if not torch.compiler.is_compiling() and (kind, reason) not in _reported:
        _reported.add((kind, reason))
        logger.info("%s keeps its own forward: %s", kind.__qualname__, reason)
    if _is_own(kind.forward):  # this layer itself, used as a module
        return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
    return kind.forward(module, x)
