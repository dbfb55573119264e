"""GELU with 40 decimal digits: what the float64 reference itself, and the float64 kernel, are measured against.

mpmath comes with torch (through sympy).
"""

import mpmath

CONTEXT = mpmath.mp.clone()
CONTEXT.dps = 40


def gelu(x: float, approximate: str):
    return CONTEXT.mpf(x) * factor(x, approximate)


def factor(x: float, approximate: str):
    """s(x) in gelu(x) = x * s(x)."""
    x = CONTEXT.mpf(x)
    if approximate == "tanh":
        u = CONTEXT.sqrt(2 / CONTEXT.pi) * (x + CONTEXT.mpf("0.044715") * x**3)
        return 1 / (1 + CONTEXT.exp(-2 * u))
    return CONTEXT.erfc(-x / CONTEXT.sqrt(2)) / 2


def derivative(x: float, approximate: str):
    return CONTEXT.diff(lambda t: t * factor(t, approximate), CONTEXT.mpf(x))


def condition(x: float, approximate: str) -> float:
    """1 + |x s'(x) / s(x)|: how much a relative error of the argument of exp grows."""
    slope = CONTEXT.diff(lambda t: factor(t, approximate), CONTEXT.mpf(x))
    return float(1 + abs(CONTEXT.mpf(x) * slope / factor(x, approximate)))
