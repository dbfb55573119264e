"""A package's public API, read from its Python files without importing them: what a version promises.

Of two descriptions `broken_promises` says what callers of the old one would miss. Names and keyword arguments may be
added to a version; what is taken away, renamed or moved needs a new one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

# A file of the package by its name, "functional.py" -> its text; None if there is none.
Read = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Api:
    """Names of `__all__` with the signatures of the functions among them, layers with theirs, and dtypes."""

    functions: dict[str, tuple[str, ...]]
    layers: dict[str, tuple[str, ...]]
    dtypes: frozenset[str]


def read_api(read: Read) -> Api:
    """The API of a package. Raises ValueError if its `__init__.py` has no literal `__all__`."""

    @cache
    def module(name: str) -> ast.Module | None:
        text = read(name)
        return None if text is None else ast.parse(text)

    init = _required(module, "__init__.py")
    names = next((ast.literal_eval(value) for name, value in _assignments(init) if name == "__all__"), None)
    if names is None:
        raise ValueError("__init__.py has no __all__")
    homes = {
        alias.asname or alias.name: f"{node.module}.py"
        for node in init.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    functions = {name: _signature(module(homes[name]) if name in homes else None, name) for name in names}
    layers = {}
    if "layers" in functions:
        for node in _required(module, "layers.py").body:
            if isinstance(node, ast.ClassDef):
                forward = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
                layers[node.name] = _arguments(forward)
    return Api(functions, layers, _dtypes(module))


def broken_promises(published: Api, local: Api) -> list[str]:
    """What of the published API the local one does not keep, one sentence each."""
    broken = [f"{name} is gone from __all__" for name in published.functions if name not in local.functions]
    broken += [f"the layer {name} is gone" for name in published.layers if name not in local.layers]
    broken += [f"{dtype} is no longer supported" for dtype in sorted(published.dtypes - local.dtypes)]
    for kind, before, after in (
        ("", published.functions, local.functions),
        ("layer ", published.layers, local.layers),
    ):
        for name, arguments in before.items():
            if name in after and not _still_callable(arguments, after[name], is_layer=bool(kind)):
                broken.append(f"{kind}{name}({', '.join(arguments)}) has become ({', '.join(after[name])})")
    return broken


def _still_callable(before: tuple[str, ...], after: tuple[str, ...], is_layer: bool) -> bool:
    """Whether every call of the old signature is one of the new: what is new is at the end and has a default.

    A layer takes the place of a host's forward, whose arguments must be its own exactly.
    """
    if is_layer or "*" not in before:
        keeps = after[: len(before)] == before
        return keeps and (after == before or not is_layer) and all("=" in a or a == "*" for a in after[len(before) :])
    positional, keywords = before[: before.index("*")], set(before[before.index("*") + 1 :])
    if "*" not in after or after[: after.index("*")] != positional:
        return False
    new = set(after[after.index("*") + 1 :])
    return keywords <= new and all("=" in argument for argument in new - keywords)


# A file of the package by its name, parsed; None if there is none.
_Modules = Callable[[str], "ast.Module | None"]


def _required(module: _Modules, name: str) -> ast.Module:
    found = module(name)
    if found is None:
        raise ValueError(f"{name} is missing")
    return found


def _assignments(module: ast.Module):
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _signature(home: ast.Module | None, name: str) -> tuple[str, ...]:
    """The arguments of a function; () for what is no function: a module."""
    for node in home.body if home is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _arguments(node)
    return ()


def _arguments(function: ast.FunctionDef) -> tuple[str, ...]:
    """("gate", "up", "*", "approximate='tanh'")"""
    found = function.args
    positional = [*found.posonlyargs, *found.args]
    defaults = [None] * (len(positional) - len(found.defaults)) + list(found.defaults)
    texts = [_argument(a, d) for a, d in zip(positional, defaults, strict=True)]
    if found.vararg:
        texts.append(f"*{found.vararg.arg}")
    elif found.kwonlyargs:
        texts.append("*")
    texts += [_argument(a, d) for a, d in zip(found.kwonlyargs, found.kw_defaults, strict=True)]
    return (*texts, f"**{found.kwarg.arg}") if found.kwarg else tuple(texts)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def _dtypes(module: _Modules) -> frozenset[str]:
    """What activations.FUSED_DTYPES lists."""
    for name, value in _assignments(_required(module, "activations.py")):
        if name == "FUSED_DTYPES":
            return frozenset(node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute))
    raise ValueError("activations.py has no FUSED_DTYPES")
