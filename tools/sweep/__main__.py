"""`python -m tools.sweep`: measure, print, write. Exit code 0; 1 when a row FAILED; 2 when nothing can be measured."""

import argparse
import os
import sys
from pathlib import Path

SUITES = ("quick", "issue2", "issue3", "issue4", "issue5")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep",
        description="Measure this kernel beside eager torch, torch.compile, liger-kernel and quack in one process.",
    )
    parser.add_argument("--suite", choices=SUITES, help="a named suite (default: quick)")
    parser.add_argument("--rows", type=int, nargs="+", metavar="M", help="rows to measure instead of a suite")
    parser.add_argument("--cols", type=int, nargs="+", metavar="N", help="columns of one half, with --rows")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="with --rows")
    parser.add_argument("--form", nargs="+", choices=("tanh", "none"), default=["tanh"], help="with --rows")
    parser.add_argument(
        "--op", nargs="+", choices=("geglu", "geglu_packed", "geglu_backward"), default=["geglu"], help="with --rows"
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=("event", "graph", "host", "wall"),
        help="with --rows (default: event on a GPU, wall on the CPU, which has no other)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--repo", type=Path, default=Path(), help="kernel repository whose build/ is loaded")
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="folder for sweep.md, .json and .png")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: as torch chooses)")
    parser.add_argument(
        "--cpu-capability",
        choices=("baseline", "avx2", "avx512"),
        help="cap the CPU instruction set of this kernel, of torch and of torch.compile alike",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--budget", type=float, help="seconds of timing for a case (default: 1 on a GPU, 3 on a CPU)")
    options = parser.parse_args(arguments)
    if bool(options.rows) != bool(options.cols):
        parser.error("--rows and --cols go together")
    if options.suite and options.rows:
        parser.error("--suite and --rows exclude each other")
    return options


def cap_cpu(capability: str | None) -> None:
    """Set the variables that this kernel and torch read once, at their first use."""
    if capability:
        os.environ["GEGLU_CPU_CAPABILITY"] = capability
        os.environ["ATEN_CPU_CAPABILITY"] = "default" if capability == "baseline" else capability


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    cap_cpu(options.cpu_capability)
    # torch reads the variables above when it is loaded.
    from .run import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
