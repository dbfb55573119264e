"""What torch.compile, FakeTensor and opcheck know of the operators: the results' sizes, strides, dtype and device.

Sizes follow the checks in ``op_checks.h``; a result has the layout of ``torch.empty_like`` of the tensor it belongs
to, or is contiguous where an operator reads a packed tensor.
"""

import torch

from .dispatch import DEVICES, add_op_namespace_prefix


def _reject_meta(op: str, **tensors: torch.Tensor) -> None:
    """A fake implementation also serves real tensors on the meta device, which have no values to compute with."""
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise RuntimeError(f"{op}: {name} must be on a {' or '.join(DEVICES)} device, but is on the meta device")


def _check_packed(op: str, x: torch.Tensor) -> list[int]:
    _reject_meta(op, x=x)
    torch._check(x.dim() > 0, lambda: f"{op}: x must have at least 1 dimension, but has 0")
    torch._check(x.shape[-1] % 2 == 0, lambda: f"{op}: x must have an even last dimension, but has {tuple(x.shape)}")
    return [*x.shape[:-1], x.shape[-1] // 2]


@torch.library.register_fake(add_op_namespace_prefix("geglu"))
def _geglu_fake(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    _reject_meta("geglu", gate=gate, up=up)
    torch._check(gate.shape == up.shape, lambda: f"geglu: up must have shape {gate.shape}, but has {up.shape}")
    return torch.empty_like(gate)


@torch.library.register_fake(add_op_namespace_prefix("geglu_packed"))
def _geglu_packed_fake(x: torch.Tensor, tanh: bool, gate_first: bool) -> torch.Tensor:
    return x.new_empty(_check_packed("geglu_packed", x))


@torch.library.register_fake(add_op_namespace_prefix("geglu_backward"))
def _geglu_backward_fake(
    grad_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _reject_meta("geglu_backward", grad_out=grad_out, gate=gate, up=up)
    return torch.empty_like(gate), torch.empty_like(up)


@torch.library.register_fake(add_op_namespace_prefix("geglu_packed_backward"))
def _geglu_packed_backward_fake(grad_out: torch.Tensor, x: torch.Tensor, tanh: bool, gate_first: bool) -> torch.Tensor:
    _check_packed("geglu_packed_backward", x)
    return torch.empty_like(x)


@torch.library.register_fake(add_op_namespace_prefix("gelu_and_mul"))
def _gelu_and_mul_fake(out: torch.Tensor, x: torch.Tensor) -> None:
    _reject_meta("gelu_and_mul", out=out)
    _check_packed("gelu_and_mul", x)


@torch.library.register_fake(add_op_namespace_prefix("gelu_tanh_and_mul"))
def _gelu_tanh_and_mul_fake(out: torch.Tensor, x: torch.Tensor) -> None:
    _reject_meta("gelu_tanh_and_mul", out=out)
    _check_packed("gelu_tanh_and_mul", x)


def check_linear(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[int]:
    _reject_meta(op, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    torch._check(x.dim() > 0, lambda: f"{op}: x must have at least 1 dimension, but has 0")
    torch._check(weight.dim() == 2, lambda: f"{op}: weight must have 2 dimensions, but has {weight.dim()}")
    torch._check(
        weight.shape[1] == x.shape[-1],
        lambda: f"{op}: weight must have shape (N, {x.shape[-1]}) for x of {x.shape}, but has {weight.shape}",
    )
    if bias is not None:
        torch._check(
            bias.dim() == 1 and bias.shape[0] == weight.shape[0],
            lambda: f"{op}: bias must have shape ({weight.shape[0]},), but has {bias.shape}",
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        torch._check(
            tensor is None or tensor.dtype == x.dtype,
            lambda name=name, tensor=tensor: f"{op}: {name} must have x's dtype, {x.dtype}, but has {tensor.dtype}",
        )
    return [*x.shape[:-1], weight.shape[0]]


@torch.library.register_fake(add_op_namespace_prefix("linear"))
def _linear_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: int, allow_tf32: bool
) -> torch.Tensor:
    return x.new_empty(check_linear("linear", x, weight, bias))


@torch.library.register_fake(add_op_namespace_prefix("linear_with_preactivation"))
def _linear_with_preactivation_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: int, allow_tf32: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = check_linear("linear_with_preactivation", x, weight, bias)
    return x.new_empty(sizes), x.new_empty(sizes)


@torch.library.register_fake(add_op_namespace_prefix("linear_backward"))
def _linear_backward_fake(
    grad_out: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    pre: torch.Tensor | None,
    activation: int,
    allow_tf32: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _reject_meta("linear_backward", grad_out=grad_out)
    grad_x = [*grad_out.shape[:-1], weight.shape[1]] if needs_x else [0]
    grad_weight = [grad_out.shape[-1], x.shape[-1]] if needs_weight else [0]
    grad_bias = [grad_out.shape[-1]] if needs_bias else [0]
    return grad_out.new_empty(grad_x), grad_out.new_empty(grad_weight), grad_out.new_empty(grad_bias)
