"""The command line: python -m tools.build [--variants cpu,cuda] [--jobs 2]"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from . import noarch
from .config import Package, load
from .cuda import Cuda, NoCuda, find_cuda
from .errors import BuildError
from .pipeline import Request, build_variant, locked
from .runner import Progress
from .toolchain import find_cxx
from .variant import variant_name


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    progress = Progress(sys.stdout)
    try:
        with progress.ticking():
            _build(options, progress)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no variant was half-written, finished objects are kept", file=sys.stderr)
        return 130
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.build", description="Build the variants of this kernel.")
    parser.add_argument(
        "--variants",
        metavar="NAMES",
        help='comma-separated: "cpu", "cuda", "noarch" or variant names; default: what this machine can build',
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="compilers at a time")
    parser.add_argument("--root", type=Path, default=Path(), help="the directory of build.toml; default: this one")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    return options


def _build(options: argparse.Namespace, progress: Progress) -> None:
    root = options.root.resolve()
    package = load(root)
    cuda = _cuda(package, options.variants, progress)
    compiled, portable = _chosen(package, options.variants, cuda)
    cache = root / ".build-cache"
    with locked(cache, progress):
        for backend in portable:
            noarch.build_noarch(package, backend, root / "build", progress)
        if not compiled:
            return
        cxx = find_cxx()
        progress.say(f"C++ compiler: {cxx}")
        for backend in compiled:
            toolkit = cuda if backend == "cuda" else None
            build_variant(Request(package, backend, cxx, toolkit, root / "build", cache, options.jobs, progress))


def _cuda(package: Package, variants: str | None, progress: Progress) -> Cuda | None:
    """The CUDA toolkit if a variant may need one. Where none was asked for, the lack of one is only reported."""
    asked_for = variants is not None and any(name == "cuda" or "-cu" in name for name in variants.split(","))
    if "cuda" not in package.backends or (variants is not None and not asked_for):
        return None
    try:
        cuda = find_cuda()
    except NoCuda as error:
        if asked_for:
            raise
        progress.say(f"CUDA variant skipped: {error}")
        return None
    progress.say(f"CUDA toolkit: {cuda}")
    return cuda


def _chosen(package: Package, variants: str | None, cuda: Cuda | None) -> tuple[list[str], list[str]]:
    """The backends to compile for, the CPU first (it is there soonest), and those to build noarch variants of."""
    buildable = sorted(backend for backend in package.backends if backend != "cuda" or cuda is not None)
    portable = {noarch.variant_name(backend): backend for backend in noarch.BACKENDS}
    if variants is None:
        return buildable, list(noarch.BACKENDS)
    names = {backend: backend for backend in buildable}
    names |= {variant_name(package, backend, cuda): backend for backend in buildable}
    compiled, chosen = set(), set()
    for name in variants.split(","):
        if name == "noarch":
            chosen.update(noarch.BACKENDS)
        elif name in portable:
            chosen.add(portable[name])
        elif name in names:
            compiled.add(names[name])
        else:
            raise BuildError(f"--variants {name}: this machine can build {', '.join([*names, 'noarch', *portable])}")
    return sorted(compiled), sorted(chosen)


if __name__ == "__main__":
    # A terminated build cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
