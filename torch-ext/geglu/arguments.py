"""Errors for arguments that torch itself refuses before an operator's own checks can name them."""

import torch

from .dispatch import DEVICES


def explained(error: Exception, name: str, **arguments: object) -> Exception:
    """The error that names the argument, if one of them is to blame, else ``error`` itself."""
    for argument, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            return TypeError(f"{name}: {argument} must be a tensor, but is {type(value).__name__}")
    for argument, value in arguments.items():
        if value.layout != torch.strided or value.is_nested:
            return NotImplementedError(f"{name}: {argument} must be a dense tensor, but its layout is {value.layout}")
        if value.device.type not in DEVICES:
            expected = " or ".join(DEVICES)
            return NotImplementedError(f"{name}: {argument} must be on a {expected} device, but is on {value.device}")
    return error
