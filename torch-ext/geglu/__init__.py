"""Fused GeGLU, linear layers with bias and GELU, and gated blocks, forward and backward, on CUDA and on the CPU."""

from . import batching, fake, layers, linear_batching, mlp_registration  # noqa: F401  (all but layers register)
from .functional import geglu, geglu_packed, gelu_and_mul, gelu_tanh_and_mul
from .linear import linear
from .mlp import geglu_mlp, linear_geglu
from .tuning import load_tuning, save_tuning, tune

__all__ = [
    "geglu",
    "geglu_mlp",
    "geglu_packed",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layers",
    "linear",
    "linear_geglu",
    "load_tuning",
    "save_tuning",
    "tune",
]
