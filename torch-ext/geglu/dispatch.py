"""Native or not, decided here alone: where this build's operators come from, and which devices they serve.

``ops`` holds the same operators, with the same schemas, in either case. A build with a compiled library has registered
them by the time this module runs; in one without, ``portable`` registers them in Triton and in torch's own operations.
"""

import torch

from ._ops import add_op_namespace_prefix, ops

__all__ = ["DEVICES", "NATIVE", "add_op_namespace_prefix", "device_type", "ops"]

NATIVE = hasattr(ops, "geglu")

if NATIVE:
    DEVICES = ("cpu", "cuda")
else:
    from .portable import DEVICES, register

    register()


def device_type(tensor: torch.Tensor) -> str:
    """tensor.device.type, which builds a new string at every call, without that for the usual devices."""
    return "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type
