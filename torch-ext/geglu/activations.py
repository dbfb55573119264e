"""What a live module is: its GELU form, and whether calling it does no more than its class's forward."""

from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from .dispatch import DEVICES

# Names of the classes in transformers.activations -> `approximate`. Those behind gelu_new and gelu_fast are the tanh
# form written out in single operations.
_TRANSFORMERS_GELU = {
    "GELUActivation": "none",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
}
FUSED_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
FUSED_DEVICES = frozenset(DEVICES)

gelu_tanh = partial(nn.functional.gelu, approximate="tanh")


def gelu_form(activation: object) -> str | None:
    """``approximate`` of a live activation module or function if it is exact or tanh GELU, else None.

    A module with hooks is not recognised either: the fused kernel would pass them by.
    """
    if activation is nn.functional.gelu:
        return "none"
    if activation is gelu_tanh:
        return "tanh"
    if not isinstance(activation, nn.Module) or not is_plain(activation):
        return None
    kind = type(activation)
    if kind is nn.GELU:
        return activation.approximate
    if kind.__module__ == "transformers.activations":
        return _TRANSFORMERS_GELU.get(kind.__name__)
    return None


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module does no more than its class's forward.

    kernelize binds a class's own forward to each module that it leaves alone, Gemma's activation among them. That
    changes nothing.
    """
    state = module.__dict__
    return not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
        or ("forward" in state and not _is_own_method(state["forward"], module))
    )


def _is_own_method(forward: object, module: nn.Module) -> bool:
    """Bound to another module, the same function would compute with that one's weights."""
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module
