// Which configuration a problem gets, from its sizes alone: see docs/measured.md for what the choices rest on.
#include <algorithm>
#include <iterator>

#include "sm90/skinny.h"

namespace geglu::sm90 {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is fixed for each number of rows of x.
struct Row {
  int max_m;
  int batch_tile;
  int warpgroups;
  int batch_tiles;
  int k_split;
  int stages;
  int min_units;  // of a group: fewer cost more in exchanged sums than they save
};

// Up to 64 rows a ring is about half of shared memory, so that the blocks of a dependent kernel fit beside those of the
// kernel before it and fill theirs meanwhile; it is also about twice what has to be in flight to keep memory busy.
constexpr Row kTable[] = {
    {8, 8, 1, 1, 1, 6, 4},      // 17 KiB a stage
    {16, 16, 1, 1, 1, 5, 4},    // 18 KiB
    {32, 32, 1, 1, 1, 5, 4},    // 20 KiB
    {64, 64, 1, 1, 1, 4, 4},    // 24 KiB
    {128, 128, 2, 1, 1, 4, 4},  // 48 KiB
    {256, 128, 2, 2, 1, 4, 4},  // 48 KiB, half of the weights' from the other block
};

}  // namespace

SkinnyConfig choose_config(const SkinnyProblem& problem, int multiprocessors) {
  const auto* row =
      std::find_if(std::begin(kTable), std::end(kTable) - 1, [&](const Row& r) { return problem.x.rows <= r.max_m; });
  const int64_t tile_rows = 64 * row->warpgroups * (problem.gated ? 1 : 2);
  const int64_t units = divide_up(problem.weight[0].rows, tile_rows) * divide_up(problem.x.cols, 64 * row->k_split);
  const int64_t groups = std::min<int64_t>(multiprocessors / (row->batch_tiles * row->k_split), units / row->min_units);
  return {row->batch_tile, row->warpgroups, row->batch_tiles,
          row->k_split,    row->stages,     static_cast<int>(std::max<int64_t>(groups, 1))};
}

}  // namespace geglu::sm90
