"""Whether a host's forward is one known formula over its parts and nothing else, found by a dry run on symbols."""

from collections.abc import Callable
from types import FunctionType


class _Symbol:
    """A value in a dry run: what was computed, as a tuple. Any operation but `*` fails."""

    def __init__(self, *expression: object):
        self.expression = expression

    def __mul__(self, other: "_Symbol") -> "_Symbol":
        return _Symbol("product", self.expression, other.expression)


class _SymbolicHost:
    """Stands for a host module in a dry run: its parts note what they are applied to."""

    def __init__(self, parts: frozenset[str]):
        for part in parts:
            setattr(self, part, lambda value, part=part: _Symbol(part, value.expression))


INPUT = ("x",)


def recognizer(parts: frozenset[str], results: tuple[tuple, ...], also: frozenset[str] = frozenset()):
    """A function of a module class: whether its forward gives one of ``results`` and does nothing else.

    Args:
        parts: The attributes that the formula uses. The forward may name nothing but these, which leaves it no way to
            look at anything else: blocks with the same parts and more to do are common (dropout, multipliers, norms,
            clamps, products in float32).
        results: Expressions of the result: ``("part", argument)``, ``("product", left, right)``, ``INPUT``.
        also: Names of classes that compute the formula by definition, in other words.
    """
    known: dict[type, bool] = {}

    def is_computed_by(kind: type) -> bool:
        answer = known.get(kind)
        if answer is None:
            gives = kind.__name__ in also or is_own(kind.forward) or _gives(kind.forward, parts, results)
            # An attribute of the class hides a submodule of that name from its forward, and not from us.
            answer = known[kind] = gives and not any(hasattr(kind, part) for part in parts)
        return answer

    # What torch.compiler.assume_constant_result does, without its import of the whole compiler (1 s) when this package
    # is imported: a compiled caller takes the answer as a constant and does not trace the dry run.
    is_computed_by._dynamo_marked_constant = True
    return is_computed_by


def is_own(forward: Callable) -> bool:
    """Whether this is the forward of one of our layers, used as a module."""
    return getattr(forward, "__module__", None) == f"{__package__}.layers"


def _gives(forward: Callable, parts: frozenset[str], results: tuple[tuple, ...]) -> bool:
    if not isinstance(forward, FunctionType) or forward.__closure__ or set(forward.__code__.co_names) != parts:
        return False
    try:
        return forward(_SymbolicHost(parts), _Symbol(*INPUT)).expression in results
    except Exception:  # whatever a forward does that symbols cannot: it is not the formula
        return False
