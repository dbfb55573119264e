"""Fused GeGLU and linear layers with bias and GELU, forward and backward, on CUDA and on the CPU."""

from . import batching, fake, layers, linear_batching  # noqa: F401  (all but layers register)
from .functional import geglu, geglu_packed, gelu_and_mul, gelu_tanh_and_mul
from .linear import linear
from .tuning import load_tuning, save_tuning, tune

__all__ = [
    "geglu",
    "geglu_packed",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layers",
    "linear",
    "load_tuning",
    "save_tuning",
    "tune",
]
