"""The gated functions."""

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from .arguments import explained
from .autograd import GeGLU, GeGLUPacked
from .dispatch import ops


def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """gelu(gate) * up, in one kernel.

    Args:
        gate: Tensor of any shape with at least 1 dimension, any strides; float32, float16, bfloat16 or float64; on the
            CPU or a CUDA device.
        up: Tensor of gate's shape, dtype and device. Under autocast the dtypes may differ; the result is then that of
            ``F.gelu(gate) * up`` with torch's type promotion.
        approximate: "tanh" or "none" (exact, by the error function), as in ``torch.nn.functional.gelu``.

    Returns:
        A tensor of gate's shape and dtype with the layout of ``torch.empty_like(gate)``. gelu(gate) is computed in
        float32 (float64 for float64) and rounded to the dtype before the product is, as torch rounds it.
        Differentiable any number of times.

    Raises:
        ValueError: ``approximate`` is neither of the two.
        TypeError: gate or up is no tensor.
        RuntimeError: shapes, dtypes or devices differ, or are not supported.
    """
    tanh = is_tanh(approximate)
    try:
        if forward_ad._current_level >= 0 or (gate.dtype != up.dtype and torch.is_autocast_enabled(gate.device.type)):
            # Forward-mode differentiation, or type promotion: rare, and torch's own operations do both.
            return F.gelu(gate, approximate=approximate) * up
        if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
            return GeGLU.apply(gate, up, tanh)
        return ops.geglu.default(gate, up, tanh)
    except (AttributeError, NotImplementedError) as error:
        raise explained(error, "geglu", gate=gate, up=up) from error


def geglu_packed(x: torch.Tensor, *, approximate: str = "tanh", gate_first: bool = True) -> torch.Tensor:
    """gelu(gate) * up, where gate and up are the halves of x's last dimension, read in place.

    Args:
        x: Tensor of shape (..., 2 * d), any strides; float32, float16, bfloat16 or float64; on the CPU or CUDA.
        approximate: "tanh" or "none" (exact), as in ``torch.nn.functional.gelu``.
        gate_first: True if the first half is the gate, which GELU is applied to (ModernBERT, GeluAndMul); False if the
            second half is (diffusers' GEGLU).

    Returns:
        A contiguous tensor of shape (..., d) and x's dtype, rounded as in ``geglu``. Differentiable any number of
        times.

    Raises:
        ValueError: ``approximate`` is neither of the two.
        TypeError: x is no tensor.
        RuntimeError: x's last dimension is odd, or its dtype or device is not supported.
    """
    tanh = is_tanh(approximate)
    try:
        if forward_ad._current_level >= 0:
            gate, up = x.chunk(2, -1) if gate_first else x.chunk(2, -1)[::-1]
            return F.gelu(gate, approximate=approximate) * up
        if torch.is_grad_enabled() and x.requires_grad:
            return GeGLUPacked.apply(x, tanh, gate_first)
        return ops.geglu_packed.default(x, tanh, gate_first)
    except (AttributeError, NotImplementedError) as error:
        raise explained(error, "geglu_packed", x=x) from error


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """out <- gelu(x[..., :d]) * x[..., d:] with the exact GELU. For inference: no gradient flows through it.

    Args:
        out: Tensor of shape (..., d), x's dtype and device, any strides; shares no memory with x.
        x: Tensor of shape (..., 2 * d), any strides; float32, float16, bfloat16 or float64; on the CPU or CUDA.

    Returns:
        out.

    Raises:
        TypeError: out or x is no tensor.
        RuntimeError: out does not fit x or overlaps it, x's last dimension is odd, a dtype or device is not supported,
            or out or x requires a gradient while gradients are enabled.
    """
    return _write_packed("gelu_and_mul", out, x)


def gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """out <- gelu(x[..., :d]) * x[..., d:] with the tanh form of GELU; else as ``gelu_and_mul``."""
    return _write_packed("gelu_tanh_and_mul", out, x)


def is_tanh(approximate: str) -> bool:
    """The operators' flag for ``approximate``; raises ValueError for what is neither of the two forms."""
    if approximate == "tanh":
        return True
    if approximate == "none":
        return False
    raise ValueError(f"approximate must be 'tanh' or 'none', but is {approximate!r}")


def _write_packed(name: str, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    try:
        if torch.is_grad_enabled():
            for argument, tensor in (("out", out), ("x", x)):
                if tensor.requires_grad:
                    raise RuntimeError(
                        f"{name}: {argument} requires a gradient, but this function has none; "
                        "use geglu_packed, or call it under torch.no_grad()"
                    )
        getattr(ops, name).default(out, x)
    except (AttributeError, NotImplementedError) as error:
        raise explained(error, name, out=out, x=x) from error
    # The operator wrote through the raw pointer; whoever saved `out` for a backward pass must learn of it.
    if not torch.compiler.is_compiling() and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
