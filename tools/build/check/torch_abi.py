"""The functions of torch's stable ABI and the version that each came with, from the installed torch's own headers.

The headers guard what is newer than the first stable ABI: `#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0`. The
generated per-operator shims are left out: nothing in them tells which version has which.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_HEADERS = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")
# The version of functions without a guard.
_FIRST = (2, 9)

_GUARD = re.compile(r"#\s*if\s+TORCH_FEATURE_VERSION\s*>=\s*TORCH_VERSION_(\d+)_(\d+)_\d+")
_FUNCTION = re.compile(r"\b((?:aoti_)?torch_\w+)\s*\(")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def shim_versions() -> dict[str, tuple[int, int]]:
    """Function name -> (major, minor) of the first torch that has it."""
    include = Path(find_spec("torch").origin).parent / "include"
    versions: dict[str, tuple[int, int]] = {}
    for header in _HEADERS:
        versions |= parse((include / header).read_text())
    return versions


def parse(text: str) -> dict[str, tuple[int, int]]:
    """The functions that a header declares, by the newest version that guards each."""
    versions, guards = {}, [_FIRST]
    for line in _COMMENT.sub("", text).splitlines():
        directive = line.strip()
        if match := _GUARD.match(directive):
            guards.append((int(match[1]), int(match[2])))
        elif re.match(r"#\s*if", directive):
            guards.append(guards[-1])
        elif re.match(r"#\s*endif", directive):
            guards.pop()
        elif not directive.startswith("#"):
            for name in _FUNCTION.findall(line):
                versions[name] = max(guards)
    return versions
