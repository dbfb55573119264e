"""The command line: python -m tools.build.check [PATH ...]; one line for each problem, or one that says what is fine.

A path is a variant's directory, a directory of variants, or a repository that has one as build/: a checkout, or what
`hf download` and `kernels download` leave in the cache. Exit code 0 if every variant is fine and nothing else lies
beside them, else 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kernels._rust import Metadata

from . import check_variant

# What kernel-builder puts beside the variants.
_BESIDE = {"CARD.md"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.build.check", description="Check built variants.")
    parser.add_argument("paths", nargs="*", type=Path, help="variants, or what holds them; default: this directory")
    failed = False
    for path in parser.parse_args(arguments).paths or [Path()]:
        variants, others = _look(path)
        if not variants:
            print(
                f"no variant in {path}: build one with python -m tools.build, or name another place", file=sys.stderr
            )
        for other in others:
            print(f"{other}: is no variant, and does not belong here")
        failed |= bool(others) or not variants
        for variant in variants:
            problems = check_variant(variant)
            failed |= bool(problems)
            for line in problems or [f"ok, {_origin(variant)}"]:
                print(f"{variant}: {line}")
    return int(failed)


def _look(path: Path) -> tuple[list[Path], list[Path]]:
    """The variants at a path, and what else there is among them."""
    if (path / "metadata.json").exists() or path.name.startswith("torch-"):
        return [path], []
    is_repository = (path / "build").is_dir()
    place = path / "build" if is_repository else path
    entries = sorted(entry for entry in place.iterdir() if not entry.name.startswith(".")) if place.is_dir() else []
    variants = [entry for entry in entries if entry.name.startswith("torch-") and entry.is_dir()]
    others = [entry for entry in entries if entry not in variants and entry.name not in _BESIDE]
    return variants, others if is_repository or path.name == "build" else []


def _origin(variant: Path) -> str:
    """What a variant says of where it comes from; that is its word, which no check can prove."""
    metadata = Metadata.read_from_file(variant / "metadata.json")
    provenance = metadata.provenance
    if provenance is None:
        return f"{metadata.id}, without a word on who built it"
    kernel = provenance.kernel
    source = "no commit" if kernel is None else f"commit {kernel.commit[:12]}{' and changes' if kernel.dirty else ''}"
    return f"{metadata.id}, built by {provenance.kernel_builder.version} from {source}"


if __name__ == "__main__":
    sys.exit(main())
