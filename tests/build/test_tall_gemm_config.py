"""How a product of many rows is cut into tiles on Hopper: what the kernel and its launcher rely on, without a GPU."""

import subprocess
from dataclasses import dataclass

import package
import pytest

from tools.build.toolchain import environment, find_cxx

PROGRAM = """
#include <cstdio>

#include "cuda/sm90/tall_gemm_config.h"

using namespace geglu::cuda::sm90;

int main() {
  int tile_cols, cluster, weights, multiprocessors;
  long long rows, cols;
  while (std::scanf("%d %d %d %lld %lld %d", &tile_cols, &cluster, &weights, &rows, &cols, &multiprocessors) == 6) {
    const TallGemmConfig config = {tile_cols, cluster};
    const TilesAcross across = tiles_across(config, weights, rows, cols, multiprocessors);
    std::printf("%lld %lld %lld %lld\\n", static_cast<long long>(tiles_down(config, rows)),
                static_cast<long long>(cluster_slots(config, multiprocessors)),
                static_cast<long long>(across.tiles), static_cast<long long>(across.narrow));
  }
}
"""
NARROWER = 8
CASES = [
    (tile_cols, cluster, weights, rows, cols, multiprocessors)
    for weights, widths in ((2, (96, 88, 80, 72, 64)), (1, (192,)))
    for tile_cols in widths
    for cluster in (1, 2)
    for rows in (1, 128, 129, 256, 449, 2048, 8192, 131_073)
    for cols in (1, 8, 63, 64, 65, 768, 1152, 3072, 6336, 10_561, 12_673, 14_336, 16_384, 21_504)
    for multiprocessors in (2, 78, 114, 132)
]


@dataclass(frozen=True)
class Cut:
    down: int
    slots: int
    tiles: int
    narrow: int


@pytest.fixture(scope="module")
def cuts(tmp_path_factory) -> list[Cut]:
    """The cuts of CASES."""
    folder = tmp_path_factory.mktemp("tall_gemm_config")
    source, program = folder / "cut.cpp", folder / "cut"
    source.write_text(PROGRAM)
    command = [*find_cxx().command, "-std=c++17", f"-I{package.REPO / 'kernel_src'}", source, "-o", program]
    subprocess.run(command, check=True, env=environment())
    asked = "\n".join(" ".join(map(str, case)) for case in CASES)
    printed = subprocess.run([program], input=asked, capture_output=True, text=True, check=True).stdout
    return [Cut(*map(int, line.split())) for line in printed.splitlines()]


def test_the_tiles_cover_the_columns_and_none_lies_outside(cuts):
    for case, cut in zip(CASES, cuts, strict=True):
        tile_cols, _, _, _, cols, _ = case
        covered = cut.tiles * tile_cols - cut.narrow * NARROWER
        last = tile_cols if cut.narrow < cut.tiles else tile_cols - NARROWER
        assert 0 <= cut.narrow <= cut.tiles and covered - last < cols <= covered, (case, cut)


def test_narrow_tiles_cost_no_turn(cuts):
    for case, cut in zip(CASES, cuts, strict=True):
        wide = cut.down * -(-case[4] // case[0])
        assert -(-cut.down * cut.tiles // cut.slots) == -(-wide // cut.slots), (case, cut)


def test_one_weight_has_no_narrow_tiles_and_gate_and_up_have_where_there_is_time(cuts):
    of = dict(zip(CASES, cuts, strict=True))
    assert all(cut.narrow == 0 for case, cut in of.items() if case[2] == 1)
    # 1024 tiles over 66 clusters are 15.5 turns; 16 have room for 33 tiles across.
    assert of[96, 2, 2, 8192, 3072, 132] == Cut(32, 66, 33, 12)
    assert of[88, 2, 2, 256, 21_504, 132] == Cut(1, 66, 264, 216)
