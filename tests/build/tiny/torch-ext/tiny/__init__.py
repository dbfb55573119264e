from ._ops import ops

__all__ = ["twice"]

twice = ops.twice
