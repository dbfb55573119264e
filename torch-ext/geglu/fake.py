"""What torch.compile, FakeTensor and opcheck know of the operators: the results' sizes, strides, dtype and device.

Sizes follow the checks in ``op_checks.h``; a result has the layout of ``torch.empty_like`` of the tensor it belongs
to, or is contiguous where an operator reads a packed tensor.
"""

import torch

from ._ops import add_op_namespace_prefix


def _reject_meta(op: str, **tensors: torch.Tensor) -> None:
    """A fake implementation also serves real tensors on the meta device, which have no values to compute with."""
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise RuntimeError(f"{op}: {name} must be on a cpu or cuda device, but is on the meta device")


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
