"""The operators of a build without a compiled library: Triton on GPUs, torch's own operations everywhere else."""

from .registration import DEVICES, register

__all__ = ["DEVICES", "register"]
