"""Which operators a function calls, whatever it looks like from outside."""

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Keeps the operators that are called while it is entered, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
