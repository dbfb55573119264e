"""Launches of the Triton kernels: tensors as rows, tiles of a fixed number of elements, the tensors' own device.

What Triton does not serve (the CPU, float64, a torch that came without it, a machine where it cannot compile) is
computed in torch's own operations. In every function the tensors are of one shape, dtype and device, have any strides
and at least one element. ``wrap`` is applied to a kernel before its launch: torch.library.wrap_triton while
torch.compile traces, else nothing.
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from functools import cache
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import composed

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    from . import triton_kernels as kernels
except ImportError:  # this torch came without Triton
    kernels = None

logger = logging.getLogger("geglu")

# Device types whose torch comes with Triton. ROCm's is called "cuda" as well.
GPUS = ("cuda", "xpu")

# Elements of a tile: eight of a half type for each of the 128 threads of a program, one 16-byte access.
_TILE = 1024

# Triton's own switch, read when its kernels are defined: they run in NumPy then, on the CPU's tensors.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def forward(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, tanh: bool, wrap: Callable | None) -> None:
    """out <- round(gelu(gate)) * up."""
    if not _has_kernel(gate):
        composed.forward(gate, up, out, tanh)
    elif gate.is_contiguous() and up.is_contiguous() and out.is_contiguous():
        _launch_flat("forward_flat", (gate, up, out), True, tanh, wrap)
    else:
        _launch_rows("forward_rows", (gate, up), (out,), tanh, wrap)


def backward(
    grad_out: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
    tanh: bool,
    wrap: Callable | None,
) -> None:
    """grad_gate <- round(grad_out * up) * gelu'(gate), grad_up <- grad_out * round(gelu(gate))."""
    tensors = (grad_out, gate, up, grad_gate, grad_up)
    if not _has_kernel(gate):
        composed.backward(*tensors, tanh)
    elif all(tensor.is_contiguous() for tensor in tensors):
        _launch_flat("backward_flat", tensors, True, tanh, wrap)
    else:
        _launch_rows("backward_rows", tensors[:3], tensors[3:], tanh, wrap)


def activate(pre: torch.Tensor, out: torch.Tensor, tanh: bool, wrap: Callable | None) -> None:
    """out <- gelu(pre); both contiguous; out may be pre."""
    if _has_kernel(pre):
        _launch_flat("forward_flat", (pre, pre, out), False, tanh, wrap)
    else:
        composed.activate(pre, out, tanh)


def activate_backward(
    grad_out: torch.Tensor, pre: torch.Tensor, grad_pre: torch.Tensor, tanh: bool, wrap: Callable | None
) -> None:
    """grad_pre <- grad_out * gelu'(pre); all contiguous."""
    if _has_kernel(pre):
        _launch_flat("backward_flat", (grad_out, pre, pre, grad_pre, grad_pre), False, tanh, wrap)
    else:
        composed.activate_backward(grad_out, pre, grad_pre, tanh)


def _has_kernel(tensor: torch.Tensor) -> bool:
    if kernels is None or tensor.dtype == torch.float64:
        return False
    device = tensor.device
    return _INTERPRETED or (device.type in GPUS and _compiles(device, tensor.dtype))


@cache
def _compiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can compile for this type and GPU, found out once, with the kernel that is needed most.

    It builds its launchers with the machine's C compiler, which slim container images lack, and older releases have no
    bfloat16 for GPUs that have none themselves.
    """
    try:
        with _current(device):
            kernels.forward_flat.warmup(*[dtype] * 3, _TILE, GATED=True, TANH=True, SIZE=_TILE, grid=(1,))
    except Exception as error:  # of a driver, a compiler or an assembler: all mean that there will be no kernel
        reason = shorten(str(error), 200)  # an assembler's has a line for each instruction
        logger.warning("no Triton kernels for %s on %s, torch's operations run instead: %s", dtype, device, reason)
        return False
    return True


def _launch_flat(name: str, tensors: tuple[torch.Tensor, ...], gated: bool, tanh: bool, wrap: Callable | None) -> None:
    count = tensors[0].numel()
    kernel = _kernel(name, wrap)
    with _current(tensors[0].device):
        kernel[((count + _TILE - 1) // _TILE,)](*tensors, count, GATED=gated, TANH=tanh, SIZE=_TILE)


def _launch_rows(
    name: str,
    read: tuple[torch.Tensor, ...],
    written: tuple[torch.Tensor, ...],
    tanh: bool,
    wrap: Callable | None,
) -> None:
    rows = _Rows.of(read, written)
    width = _TILE
    while width // 2 >= rows.cols:
        width //= 2
    height = _TILE // width
    programs = -(-rows.rows // height) * -(-rows.cols // width)
    kernel = _kernel(name, wrap)
    with _current(read[0].device):
        kernel[(programs,)](*rows.tensors, *rows.distances, rows.rows, rows.cols, TANH=tanh, ROWS=height, COLS=width)
    for tensor, target in zip(rows.tensors[len(read) :], written, strict=True):
        if tensor is not target:
            target.copy_(tensor)


def _kernel(name: str, wrap: Callable | None) -> Any:
    kernel = getattr(kernels, name)
    return kernel if wrap is None else wrap(kernel)


def _current(device: torch.device):
    """A context in which ``device`` is the current one: Triton launches there."""
    if device.type == "cpu":
        return nullcontext()
    module = getattr(torch, device.type)
    return nullcontext() if module.current_device() == device.index else module.device(device)


class _Rows(NamedTuple):
    """Tensors as matrices of one size whose rows have no gaps; what could not be read or written so is a copy."""

    tensors: tuple[torch.Tensor, ...]  # those read, then those written
    distances: tuple[int, ...]  # of neighbouring rows, in elements
    rows: int
    cols: int

    @classmethod
    def of(cls, read: tuple[torch.Tensor, ...], written: tuple[torch.Tensor, ...]) -> _Rows:
        tensors = (*read, *written)
        found = [_row_distance(tensor) for tensor in tensors]
        if None in found:
            dense = [tensor.contiguous() for tensor in read]
            dense += [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in written]
            tensors = tuple(
                copy if distance is None else tensor
                for copy, tensor, distance in zip(dense, tensors, found, strict=True)
            )
            found = [_row_distance(tensor) for tensor in tensors]
        cols = tensors[0].shape[-1]
        return cls(tensors, tuple(found), tensors[0].numel() // cols, cols)


def _row_distance(tensor: torch.Tensor) -> int | None:
    """The elements from a row to the next, over all leading dimensions; None if there is no such number."""
    if tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
        return None
    rows, distance = 1, 0
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            distance = stride
        elif stride != distance * rows:
            return None
        rows *= size
    return distance
