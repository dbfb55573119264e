"""Writes kernel_src/cuda/cublaslt_defaults.h: the cuBLASLt algorithms that ship with the package.

    python -m tools.shipped_algos TUNING.json...

Each file is one that ``save_tuning`` wrote, of one run; several runs of the same products make the choice steadier. An
algorithm is shipped if every run that measured its product agrees on it and found it faster than the heuristic's first
choice by the share that ``--gain`` names.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

HEADER = Path(__file__).resolve().parents[1] / "kernel_src/cuda/cublaslt_defaults.h"

_TEMPLATE = """\
// Algorithms that were measured to be faster than the heuristic's first choice. Written by tools/shipped_algos.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cuda/cublaslt.h"

namespace geglu::cuda::lt {{

struct Shipped {{
  std::string_view device;     // a model, as in the records of tune()
  size_t cublaslt;             // the version whose algorithm it is
  std::array<int64_t, 7> key;  // the words of Key, for device 0
  Algo algo;
}};

// clang-format off
inline constexpr Shipped kShippedAlgos[] = {{
{rows}
}};
// clang-format on

}}  // namespace geglu::cuda::lt
"""


def chosen(runs: list[list[dict[str, str]]], gain: float) -> list[dict[str, str]]:
    """The entries to ship, one for each key, in the order of their descriptions and sizes.

    Args:
        runs: The entries of each file.
        gain: How much faster than the heuristic's first choice an algorithm must be in every run, as a share of one.
    """
    found = defaultdict(list)
    for entries in runs:
        for entry in entries:
            found[entry["device"], entry["cublaslt"], entry["key"]].append(entry)
    kept = []
    for entries in found.values():
        one = len({entry["algo"] for entry in entries}) == 1
        if one and all(float(entry["best_us"]) <= (1 - gain) * float(entry["first_us"]) for entry in entries):
            kept.append(entries[0])
    return sorted(kept, key=lambda entry: (entry["device"], entry["problem"], entry["key"]))


def header(entries: list[dict[str, str]]) -> str:
    """The text of the header."""
    return _TEMPLATE.format(rows="\n".join(map(_row, entries)))


def _row(entry: dict[str, str]) -> str:
    key, algo = (", ".join(_words(entry[name])) for name in ("key", "algo"))
    return (
        f"    // {entry['problem']}: {entry['first_us']} -> {entry['best_us']} us\n"
        f'    {{"{entry["device"]}", {entry["cublaslt"]}, {{{key}}}, {{{{{algo}}}}}}},'
    )


def _words(digits: str) -> list[str]:
    return [f"0x{int(digits[at : at + 16], 16):x}" for at in range(0, len(digits), 16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tuning", nargs="+", type=Path, help="files of save_tuning, one for each run")
    parser.add_argument("--gain", type=float, default=0.03, help="share of the time that must be saved (%(default)s)")
    arguments = parser.parse_args()
    entries = chosen([json.loads(path.read_text())["entries"] for path in arguments.tuning], arguments.gain)
    if not entries:
        parser.error("no product is faster by that much in every run: an empty table would not compile")
    partial = HEADER.with_suffix(".tmp")
    partial.write_text(header(entries))
    partial.replace(HEADER)
    print(f"{HEADER.name}: {len(entries)} algorithms")


if __name__ == "__main__":
    main()
