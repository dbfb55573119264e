"""The operators registered with torch under the build's own namespace, as the compiled library registers its own."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

import torch

from .._ops import add_op_namespace_prefix
from . import operators

if TYPE_CHECKING:
    from collections.abc import Callable

# As in torch-ext/torch_binding.cpp.
_GATED = "Tensor x, Tensor gate_weight, Tensor up_weight"
_MLP = (
    f"{_GATED}, Tensor down_weight, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, bool tanh, bool allow_tf32"
)
SCHEMAS = (
    "geglu(Tensor gate, Tensor up, bool tanh) -> Tensor",
    "geglu_packed(Tensor x, bool tanh, bool gate_first) -> Tensor",
    "geglu_backward(Tensor grad_out, Tensor gate, Tensor up, bool tanh) -> (Tensor, Tensor)",
    "geglu_packed_backward(Tensor grad_out, Tensor x, bool tanh, bool gate_first) -> Tensor",
    "gelu_and_mul(Tensor(a!) out, Tensor x) -> ()",
    "gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()",
    "linear(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32) -> Tensor",
    (
        "linear_with_preactivation(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32) -> "
        "(Tensor, Tensor)"
    ),
    (
        "linear_backward(Tensor grad_out, Tensor? x, Tensor? weight, Tensor? pre, int activation, bool allow_tf32, "
        "bool needs_x, bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor)"
    ),
    "linear_route(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32, bool training) -> str",
    "linear_tune(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32, bool training) -> str",
    f"linear_geglu({_GATED}, Tensor? gate_bias, Tensor? up_bias, bool tanh, bool allow_tf32) -> Tensor",
    f"geglu_mlp({_MLP}) -> Tensor",
    f"geglu_mlp_route({_MLP}) -> str",
    "linear_export_tuning() -> str",
    "linear_import_tuning(str entry) -> str",
    "cpu_capability() -> str",
)

DEVICES = ("cpu", "cuda", "xpu", "mps")
_KEYS = ("CPU", "CUDA", "XPU", "MPS")

# Results that are no tensors: nothing to trace, and no `wrap` to hand on.
_HOST_ONLY = frozenset(
    (
        "linear_route",
        "linear_tune",
        "geglu_mlp_route",
        "linear_export_tuning",
        "linear_import_tuning",
        "cpu_capability",
    )
)

_library: torch.library.Library | None = None  # the registrations last as long as this object


def register() -> None:
    """Defines and implements every operator. Once for a process."""
    global _library
    namespace = add_op_namespace_prefix("").removesuffix("::")
    _library = torch.library.Library(namespace, "FRAGMENT")
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        body = getattr(operators, name)
        if name in _HOST_ONLY:
            _library.impl(name, body, "CompositeExplicitAutograd")
            continue
        for key in _KEYS:
            _library.impl(name, _below_autograd(body), key)
        if hasattr(torch.library, "wrap_triton"):
            from torch._subclasses.functional_tensor import FunctionalTensorMode

            rule = _visible_to_the_compiler(body)
            torch.library.register_torch_dispatch(add_op_namespace_prefix(name), FunctionalTensorMode, rule)


def _below_autograd(body: Callable) -> Callable:
    """The body without autograd and autocast, which are done with by the time that torch calls an implementation."""

    @wraps(body)
    def implementation(*arguments):
        kind = arguments[0].device.type
        if torch.is_grad_enabled() or torch.is_autocast_enabled(kind):
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                return body(*arguments, None)
        return body(*arguments, None)

    return implementation


def _visible_to_the_compiler(body: Callable) -> Callable:
    """A rule for torch.compile: it traces the body, so that Inductor sees the Triton kernels and may fuse around them.

    Exported programs keep the operator: Triton kernels cannot be saved in them.
    """

    def rule(mode, operator, types, arguments, keywords):
        from torch.export import _trace

        if getattr(_trace, "custom_triton_ops_decomposition_disabled", bool)():
            return mode.__torch_dispatch__(operator, types, arguments, keywords)
        with mode:
            return body(*arguments, **keywords, wrap=torch.library.wrap_triton)

    return rule
