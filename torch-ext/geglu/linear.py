"""``linear``: x @ weight.T + bias and GELU."""

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from .arguments import explained
from .dispatch import device_type, ops
from .linear_autograd import CompiledLinearGELU, Linear, LinearGELU


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
) -> torch.Tensor:
    """activation(x @ weight.T + bias), bias and activation in the matrix product's epilogue where that is possible.

    Args:
        x: Tensor of shape (..., K) with at least 1 dimension, any strides; float32, float16, bfloat16 or float64; on
            the CPU or a CUDA device.
        weight: Tensor of shape (N, K), any strides: a transposed view is read as it lies.
        bias: Tensor of shape (N,) or None. weight and bias have x's dtype and device; under autocast all three are
            cast as ``torch.nn.functional.linear`` casts them.
        activation: None, "gelu" (exact, by the error function) or "gelu_tanh".

    Returns:
        A contiguous tensor of shape (..., N) and x's dtype. Sums are in float32 (float64 for float64). float32
        products use TF32 where ``torch.backends.cuda.matmul`` allows it. K = 0 gives activation(bias). Differentiable
        any number of times, in x, weight and bias.

    Raises:
        ValueError: ``activation`` is none of the three.
        TypeError: x or weight is no tensor, or bias neither a tensor nor None.
        RuntimeError: shapes, dtypes or devices do not fit each other, or are not supported.
    """
    code = activation_code(activation)
    try:
        kind = device_type(x)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = (cast_for_autocast(tensor, kind, dtype) for tensor in (x, weight, bias))
        if forward_ad._current_level >= 0:
            return _composed(x, weight, bias, activation)
        allow_tf32 = kind == "cuda" and x.dtype is torch.float32 and tf32_allowed()
        if torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            if not code:
                return Linear.apply(x, weight, bias, allow_tf32)
            function = CompiledLinearGELU if torch.compiler.is_compiling() else LinearGELU
            return function.apply(x, weight, bias, code, allow_tf32)[0]
        return ops.linear.default(x, weight, bias, code, allow_tf32)
    except (AttributeError, RuntimeError) as error:
        blame = explained_linear(error, "linear", x, weight, bias)
        if blame is error:
            raise
        raise blame from error


def activation_code(activation: str | None) -> int:
    """The operators' number for an activation; raises ValueError for an unknown one."""
    if activation is None:
        return 0
    if activation == "gelu_tanh":
        return 2
    if activation == "gelu":
        return 1
    raise ValueError(f"activation must be None, 'gelu' or 'gelu_tanh', but is {activation!r}")


def tf32_allowed() -> bool:
    """Whether torch lets float32 matrix products use TF32, by whichever of its two interfaces that was said."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if _HAS_FP32_PRECISION else matmul.allow_tf32


_HAS_FP32_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # from torch 2.9 on

# A compiled caller takes the answer as a constant: torch.compile itself guards on the setting.
tf32_allowed._dynamo_marked_constant = True


def explained_linear(error: Exception, name: str, x: object, weight: object, bias: object) -> Exception:
    return explained(error, name, x=x, weight=weight, **({} if bias is None else {"bias": bias}))


def cast_for_autocast(tensor: torch.Tensor | None, kind: str, dtype: torch.dtype) -> torch.Tensor | None:
    """What autocast makes of an argument of F.linear: float64, integers and other devices' tensors stay."""
    if tensor is None or tensor.dtype is dtype or tensor.device.type != kind:
        return tensor
    return tensor.to(dtype) if tensor.dtype in _CAST else tensor


_CAST = frozenset((torch.float32, torch.float16, torch.bfloat16))


def _composed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """The same in torch's own operations, for forward-mode differentiation."""
    pre = F.linear(x, weight, bias)
    if activation is None:
        return pre
    return F.gelu(pre, approximate="tanh" if activation == "gelu_tanh" else "none")
