"""Measure this kernel beside eager torch, torch.compile and liger-kernel: `python -m tools.sweep --help`."""
