"""Argument checks in Python: what ``op_checks.h`` asks of the compiled operators, with the same messages."""

import torch

DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))


def check_first(op: str, name: str, tensor: torch.Tensor) -> None:
    """The argument that the others are compared with: at least one dimension, and one of the four dtypes."""
    if tensor.dim() > 0 and tensor.dtype in DTYPES:
        return
    if tensor.dim() == 0:
        raise RuntimeError(f"{op}: {name} must have at least 1 dimension, but has 0")
    raise RuntimeError(f"{op}: {name} must be float32, float16, bfloat16 or float64, but is {tensor.dtype}")


def check_packed(op: str, x: torch.Tensor) -> None:
    check_first(op, "x", x)
    if x.shape[-1] % 2:
        raise RuntimeError(
            f"{op}: x must have an even last dimension (two packed halves), but has shape {list(x.shape)}"
        )


def check_same(op: str, like: str, tensor: torch.Tensor, **others: torch.Tensor) -> None:
    """Device and dtype of every one of ``others`` must be those of ``tensor``, which the caller knows as ``like``."""
    for name, other in others.items():
        if other.device != tensor.device:
            raise RuntimeError(
                f"{op}: {name} must be on the device of {like}, {tensor.device}, but is on {other.device}"
            )
        if other.dtype != tensor.dtype:
            raise RuntimeError(f"{op}: {name} must have the dtype of {like}, {tensor.dtype}, but has {other.dtype}")


def check_shape(op: str, name: str, tensor: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tensor.shape != expected:
        raise RuntimeError(f"{op}: {name} must have shape {list(expected)} ({why}), but has {list(tensor.shape)}")


def check_out(op: str, out: torch.Tensor, x: torch.Tensor, has_addresses: bool) -> None:
    """``out`` must be half of x, without elements in common with it or, if they have addresses, with each other."""
    check_same(op, "x", x, out=out)
    check_shape(op, "out", out, half(x), "half of x's last dimension")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise RuntimeError(
            f"{op}: out must not be an expanded tensor: several of its elements share one memory location"
        )
    if has_addresses and overlap(out, x):
        raise RuntimeError(f"{op}: out must not share memory with x")


def half(x: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


def overlap(written: torch.Tensor, read: torch.Tensor) -> bool:
    """Whether the two certainly share memory.

    As in torch's own check, interleaved slices of one buffer without a common row pitch pass.
    """
    first, second = _extent(written), _extent(read)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    size = written.element_size()
    for (begin, end, dense), (other_begin, other_end, _) in ((first, second), (second, first)):
        if dense and any(begin <= address < end for address in (other_begin, other_end - size)):
            return True
    if written.dim() != read.dim() or written.dim() < 2 or written.stride()[:-1] != read.stride()[:-1]:
        return False
    # Column slices of one matrix: they overlap where their columns do.
    pitch, widths = written.stride(-2), (written.shape[-1], read.shape[-1])
    if written.stride(-1) != 1 or read.stride(-1) != 1 or pitch < max(*widths, 1):
        return False
    column = (first[0] - second[0]) // size % pitch
    return column < widths[1] or column + widths[0] > pitch


def _extent(tensor: torch.Tensor) -> tuple[int, int, bool]:
    """The bytes [begin, end) that a tensor's elements span, and whether they fill that span."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin, False
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + reach * size, reach == tensor.numel()


def check_linear(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: "torch.Tensor | None", prefix: str = "", x_name: str = "x"
) -> None:
    """A linear layer's arguments, which the caller knows as ``prefix`` + "weight" and + "bias"."""
    check_first(op, x_name, x)
    check_same(op, x_name, x, **{f"{prefix}weight": weight})
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise RuntimeError(
            f"{op}: {prefix}weight must have shape [N, {x.shape[-1]}] for {x_name} of shape {list(x.shape)}, but has "
            f"{list(weight.shape)}"
        )
    if bias is not None:
        check_same(op, x_name, x, **{f"{prefix}bias": bias})
        why = f"for {prefix}weight of shape {list(weight.shape)}"
        check_shape(op, f"{prefix}bias", bias, (weight.shape[0],), why)


def check_gated(
    op: str,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: "torch.Tensor | None",
    up_bias: "torch.Tensor | None",
    has_addresses: bool,
) -> None:
    check_linear(op, x, gate_weight, gate_bias, "gate_")
    check_linear(op, x, up_weight, up_bias, "up_")
    check_shape(op, "up_weight", up_weight, gate_weight.shape, "the shape of gate_weight")
    if has_addresses and gate_weight.data_ptr() != up_weight.data_ptr() and overlap(gate_weight, up_weight):
        raise RuntimeError(f"{op}: up_weight must not overlap gate_weight, whose rows it shares only in part")


def check_activation(op: str, activation: int) -> None:
    if activation not in (0, 1, 2):
        raise RuntimeError(f"{op}: activation must be 0, 1 or 2, but is {activation}")
