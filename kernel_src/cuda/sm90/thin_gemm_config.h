// How a product with few rows is cut: the configurations there are, and which one a problem gets. No CUDA.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/sm90/tall_gemm_config.h"

namespace geglu::cuda::sm90 {

// A cluster of `split` blocks makes tile_cols columns of the result. Each of its blocks takes a share of the depth.
struct ThinGemmConfig {
  int32_t batch_rows;  // room for rows of x
  int32_t tile_cols;   // a multiple of 8
  int32_t split;
};

constexpr int32_t kThinConsumerCols = 64;  // of a tile, that a consumer makes
constexpr int32_t kMaxThinRows = 128;      // of x
constexpr int32_t kThinSplits[] = {1, 2, 3, 4, 6, 8};
constexpr int32_t kMaxThinSplit = 8;

// Warpgroups of a block.
constexpr int32_t thin_gemm_consumers(int32_t tile_cols) { return tile_cols <= 2 * kThinConsumerCols ? 2 : 3; }

// How many clusters of each size run at once, if each of their blocks has a multiprocessor to itself.
using ThinGemmSlots = std::array<int32_t, kMaxThinSplit + 1>;

// As few columns as fill all slots in as few turns as there can be, of at most most_cols each.
constexpr int32_t thin_gemm_tile(int64_t cols, int32_t slots, int32_t least_cols, int32_t most_cols) {
  const int64_t turns = divide_up(cols, int64_t{slots} * most_cols);
  return static_cast<int32_t>(std::max<int64_t>(divide_up(cols, turns * slots * 8) * 8, least_cols));
}

// The time of a product with one weight, in clock cycles of a multiprocessor. The constants are fitted to measurements
// on an H200 (docs/measured.md).
constexpr int64_t thin_gemm_cost(const ThinGemmConfig& config, int64_t rows, int64_t cols, int64_t depth,
                                 int32_t slots) {
  constexpr int64_t kRowBytes = 2 * kTileDepth;
  const int64_t weights = config.tile_cols * kRowBytes;  // bytes of a step of the depth
  const int64_t x = divide_up(rows, 8) * 8 * kRowBytes;
  const auto step = [&](int64_t clusters) {
    const int64_t blocks = clusters * config.split;
    const int64_t memory = weights * blocks / 2600 + x * blocks / 24000;
    const int64_t multiprocessor = std::max((weights + x) / 38, weights / 26);
    const int64_t products = 4 * thin_gemm_consumers(config.tile_cols) * std::max(config.batch_rows / 2, 16);
    return std::max({memory, multiprocessor, products}) + 40;
  };
  const int64_t tiles = divide_up(cols, config.tile_cols);
  const int64_t steps = divide_up(divide_up(depth, kTileDepth), config.split);
  const int64_t last = tiles % slots;
  const int64_t sums = config.split == 1 ? 0 : 500 + 200 * config.split;  // what it takes to add them up
  const int64_t exchanged = rows * config.tile_cols * 4 * (config.split - 1) / config.split / 20;
  return steps * (tiles / slots * step(slots) + (last > 0 ? step(last) : 0)) + sums + exchanged +
         12 * tiles * config.split;
}

// The configuration of one weight (`weights` 1), or of gate and up (2), whose depth is not split.
constexpr ThinGemmConfig choose_thin_gemm(int32_t weights, int64_t rows, int64_t cols, int64_t depth,
                                          const ThinGemmSlots& slots) {
  const int32_t batch_rows = rows <= 16 ? 16 : rows <= 64 ? 64 : kMaxThinRows;
  if (weights == 2) {
    return {batch_rows, thin_gemm_tile(cols, slots[1], 64, 3 * kThinConsumerCols), 1};
  }
  ThinGemmConfig best = {};
  int64_t fewest = INT64_MAX;
  for (const int32_t split : kThinSplits) {
    if (slots[split] < 1 || split > divide_up(depth, kTileDepth)) continue;
    const ThinGemmConfig config = {batch_rows, thin_gemm_tile(cols, slots[split], 64, 2 * kThinConsumerCols), split};
    const int64_t cost = thin_gemm_cost(config, rows, cols, depth, slots[split]);
    if (cost < fewest) {
      best = config;
      fewest = cost;
    }
  }
  return best;
}

// Whether that is at least as fast as the other ways, by measurements on an H200 (docs/measured.md): of gate and up the
// one for many rows, of one weight cuBLAS. What skinny.cu takes does not come here.
constexpr bool thin_gemm_pays(int32_t weights, int64_t rows, int64_t cols, int64_t depth) {
  const int64_t weight = cols * depth;
  if (rows <= 4 || (rows <= 8 && weight <= kLargeWeight)) return false;
  if (weights == 2) return rows <= 64 && weight > kSmallWeight;
  return rows <= 64 || (rows <= kMaxThinRows && weight <= kHugeWeight);
}

}  // namespace geglu::cuda::sm90
