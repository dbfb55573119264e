"""The gated block: ``linear_geglu`` and ``geglu_mlp``."""

from functools import partial

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from . import checks
from .arguments import explained
from .dispatch import DEVICES, device_type, ops
from .functional import is_tanh
from .linear import cast_for_autocast, tf32_allowed
from .mlp_autograd import GatedMLP, composed, gated
from .projections import fusable


def linear_geglu(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    approximate: str = "tanh",
) -> torch.Tensor:
    """gelu(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias), in one call from the host.

    Args:
        x: Tensor of shape (..., K) with at least 1 dimension, any strides; float32, float16, bfloat16 or float64; on
            the CPU or a CUDA device.
        gate_weight, up_weight: Tensors of shape (H, K), any strides: two tensors, or two halves of a packed one.
        gate_bias, up_bias: Tensors of shape (H,) or None, each for itself. All have x's dtype and device; under
            autocast all are cast as ``torch.nn.functional.linear`` casts its arguments.
        approximate: "tanh" or "none" (exact), as in ``torch.nn.functional.gelu``.

    Returns:
        A contiguous tensor of shape (..., H) and x's dtype. Differentiable any number of times; for a gradient x, the
        weights, and both projections are kept.

    Raises:
        ValueError: ``approximate`` is neither of the two.
        TypeError: an argument is no tensor, or a bias neither a tensor nor None.
        RuntimeError: shapes, dtypes or devices do not fit each other, or are not supported, or the weights overlap in
            part.
    """
    tanh = is_tanh(approximate)
    tensors = (x, gate_weight, up_weight, gate_bias, up_bias)
    try:
        kind = device_type(x)
        if torch.is_autocast_enabled(kind):
            tensors = _cast(tensors, kind)
        if _is_differentiated(tensors):
            _check("linear_geglu", *tensors)
            return gated(*tensors, approximate)
        return ops.linear_geglu.default(*tensors, tanh, _allow_tf32(tensors[0], kind))
    except (AttributeError, RuntimeError) as error:
        blame = _explained(error, "linear_geglu", _GATED, tensors)
        if blame is error:
            raise
        raise blame from error


def geglu_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    approximate: str = "tanh",
    recompute: bool = False,
) -> torch.Tensor:
    """linear_geglu(x, ...) @ down_weight.T + down_bias: the whole block, in one call from the host.

    Args:
        x: Tensor of shape (..., K); see ``linear_geglu`` for it and for the gate's and up's weights and biases.
        down_weight: Tensor of shape (N, H), any strides.
        down_bias: Tensor of shape (N,) or None.
        approximate: "tanh" or "none" (exact), as in ``torch.nn.functional.gelu``.
        recompute: For a gradient, keep the arguments alone, and compute both projections again when the gradient is
            asked for. Otherwise they are kept, (..., H) each.

    Returns:
        A contiguous tensor of shape (..., N) and x's dtype. Differentiable any number of times.

    Raises:
        As ``linear_geglu``.
    """
    tanh = is_tanh(approximate)
    tensors = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    try:
        kind = device_type(x)
        if torch.is_autocast_enabled(kind):
            tensors = _cast(tensors, kind)
        if _is_differentiated(tensors):
            _check_mlp(*tensors)
            if torch.compiler.is_compiling():
                # It decides itself what is kept, and would merge a second computation that it is not told of.
                compose = partial(checkpoint, composed, use_reentrant=False) if recompute else composed
                return compose(*tensors, approximate)
            if _is_transformed():
                return composed(*tensors, approximate)
            return GatedMLP.apply(approximate, _allow_tf32(tensors[0], kind), recompute, *tensors)
        return ops.geglu_mlp.default(*tensors, tanh, _allow_tf32(tensors[0], kind))
    except (AttributeError, RuntimeError) as error:
        blame = _explained(error, "geglu_mlp", _MLP, tensors)
        if blame is error:
            raise
        raise blame from error


def block_without_gradients(
    x: torch.Tensor, parameters: tuple[torch.Tensor | None, ...], approximate: str
) -> torch.Tensor | None:
    """geglu_mlp(x, *parameters, approximate=approximate) where gradients are off, or None if they are not fusable.

    For the layers, whose host's calls are short. The operator checks what it is given, so whether that was fusable is
    asked only when it has refused: to ask before took 1 us of 10.
    """
    kind = device_type(x)
    if kind not in DEVICES:  # whose backend might copy everything to the CPU and back
        return None
    try:
        if forward_ad._current_level >= 0 or torch.is_autocast_enabled(kind):
            return geglu_mlp(x, *parameters, approximate=approximate)
        return ops.geglu_mlp.default(x, *parameters, approximate == "tanh", _allow_tf32(x, kind))
    except RuntimeError:
        if fusable(x, *parameters):
            raise
        return None


_GATED = ("x", "gate_weight", "up_weight", "gate_bias", "up_bias")
_MLP = ("x", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")


def _is_transformed() -> bool:
    """Under forward-mode differentiation or a transform of torch.func, which take the parts one by one."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def _is_differentiated(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _check(op, x, gate_weight, up_weight, gate_bias, up_bias) -> None:
    """The operators' own checks: the composition would report the same under its parts' names, or not at all."""
    # Tensors that a compiler or a functional transform wraps have no memory to look at.
    has_addresses = not torch.compiler.is_compiling() and not _is_transformed()
    checks.check_gated(op, x, gate_weight, up_weight, gate_bias, up_bias, has_addresses)


def _check_mlp(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias) -> None:
    _check("geglu_mlp", x, gate_weight, up_weight, gate_bias, up_bias)
    hidden = x.new_empty(()).expand(*x.shape[:-1], gate_weight.shape[0])
    checks.check_linear("geglu_mlp", hidden, down_weight, down_bias, "down_", "gelu(gate) * up")


def _cast(tensors: tuple[torch.Tensor | None, ...], kind: str) -> tuple[torch.Tensor | None, ...]:
    """What autocast makes of the arguments."""
    dtype = torch.get_autocast_dtype(kind)
    return tuple(cast_for_autocast(tensor, kind, dtype) for tensor in tensors)


def _allow_tf32(x: torch.Tensor, kind: str) -> bool:
    return x.dtype is torch.float32 and kind == "cuda" and tf32_allowed()


def _explained(error: Exception, name: str, names: tuple[str, ...], tensors: tuple) -> Exception:
    """The error that names the argument; a bias may be None."""
    given = dict(zip(names, tensors, strict=True))
    given = {key: value for key, value in given.items() if value is not None or not key.endswith("bias")}
    return explained(error, name, **given)
