"""Measure this kernel beside eager torch, torch.compile, liger-kernel and quack: `python -m tools.sweep --help`."""
