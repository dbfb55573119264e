"""Fused GeGLU: gelu(gate) * up as one kernel, forward and backward, on CUDA and on the CPU."""

from . import batching, fake, layers  # noqa: F401  (batching and fake register)
from .functional import geglu, geglu_packed, gelu_and_mul, gelu_tanh_and_mul

__all__ = ["geglu", "geglu_packed", "gelu_and_mul", "gelu_tanh_and_mul", "layers"]
