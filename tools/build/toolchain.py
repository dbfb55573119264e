"""The C++ compiler: which one, its version, and everything of it that ends up in a binary."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import BuildError

# The oldest whose C++20 is good enough for torch's headers.
_OLDEST = 11

# Flags from outside of build.toml would change a binary without changing its id.
_FOREIGN_VARIABLES = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
)

# What g++ runs, and what it links into every shared library without being asked.
_PROGRAMS = ("cc1plus", "as", "collect2", "ld")
_LINKED_FILES = (
    "crti.o",
    "crtbeginS.o",
    "crtendS.o",
    "crtn.o",
    "libgcc.a",
    "libc_nonshared.a",
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libstdc++.so.6",
)


def environment() -> dict[str, str]:
    """The environment for compilers: the user's, without what would add flags, with messages in one language."""
    inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}
    # A fixed date keeps __DATE__ and __TIME__ from making every build different.
    return inherited | {"LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}


def hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        digest.update(b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Cxx:
    """A GNU C++ compiler. `command` is an argument list, so that CXX="ccache g++" works."""

    command: tuple[str, ...]
    version: str

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    @cached_property
    def identity(self) -> str:
        """A hash of the compiler's programs and of the files that it links by itself."""
        programs = [Path(self._ask(f"-print-prog-name={name}")) for name in _PROGRAMS]
        # A bare name means "whatever PATH finds".
        found = [Path(shutil.which(program) or program) for program in programs]
        linked = [Path(self._ask(f"-print-file-name={name}")) for name in _LINKED_FILES]
        return self.version + " " + hash_files(path for path in (*found, *linked) if path.is_file())

    def _ask(self, question: str) -> str:
        answer = subprocess.run([*self.command, question], capture_output=True, text=True, env=environment())
        return answer.stdout.strip()

    def __str__(self) -> str:
        return f"{shlex.join(self.command)} {self.version}"


def find_cxx() -> Cxx:
    """$CXX, else g++. Raises BuildError if that is no GNU compiler, is too old, or brings flags along."""
    chosen = os.environ.get("CXX") or "g++"
    command = tuple(shlex.split(chosen))
    if command[-1].startswith("-"):
        raise BuildError(f"CXX={chosen} has flags: they belong into build.toml, where every build has them")
    cxx = _probe(command)
    if cxx is None or cxx.major < _OLDEST:
        found = f"version {cxx.version}" if cxx else "no GNU compiler that runs"
        raise BuildError(
            f"the C++ compiler {chosen} is {found}: install g++ {_OLDEST} or newer "
            "(Debian, Ubuntu: apt install g++), or set CXX to one"
        )
    return cxx


def _probe(command: tuple[str, ...]) -> Cxx | None:
    """The compiler behind a command; None if it does not run or is not GNU's."""
    try:
        macros = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, env=environment()
        )
    except OSError:
        return None
    if macros.returncode != 0 or "__clang__" in macros.stdout:
        return None
    numbers = [
        match[1]
        for name in ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__")
        if (match := re.search(rf"^#define {name} (\d+)$", macros.stdout, re.MULTILINE))
    ]
    return Cxx(command, ".".join(numbers)) if len(numbers) == 3 else None
