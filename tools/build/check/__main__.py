"""The command line: python -m tools.build.check [PATH ...]; exit code 1 and one line for each problem.

A path is a variant's directory, a directory of variants, or a repository that has one as build/: a checkout, or what
`hf download` and `kernels download` leave in the cache.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import check_variant


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.build.check", description="Check built variants.")
    parser.add_argument("paths", nargs="*", type=Path, help="variants, or what holds them; default: this directory")
    failed, variants = False, []
    for path in parser.parse_args(arguments).paths or [Path()]:
        found = _variants(path)
        if not found:
            print(f"no variant in {path}: build one with python -m tools.build, or name another place", file=sys.stderr)
            failed = True
        variants += found
    for variant in variants:
        problems = check_variant(variant)
        failed |= bool(problems)
        for line in problems or ["ok"]:
            print(f"{variant}: {line}")
    return int(failed)


def _variants(path: Path) -> list[Path]:
    if (path / "metadata.json").exists() or path.name.startswith("torch-"):
        return [path]
    place = path / "build" if (path / "build").is_dir() else path
    return sorted(folder for folder in place.glob("torch-*") if folder.is_dir())


if __name__ == "__main__":
    sys.exit(main())
