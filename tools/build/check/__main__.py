"""The command line: python -m tools.build.check [build/<variant> ...]; exit code 1 and one line for each problem."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import check_variant


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.build.check", description="Check built variants.")
    parser.add_argument("variants", nargs="*", type=Path, help="variant directories; default: all in ./build")
    variants = parser.parse_args(arguments).variants or sorted(Path("build").glob("torch*"))
    if not variants:
        print("no variant in ./build: build one with python -m tools.build", file=sys.stderr)
        return 1
    failed = False
    for variant in variants:
        problems = check_variant(variant)
        failed |= bool(problems)
        for line in problems or ["ok"]:
            print(f"{variant}: {line}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
