// How the product is cut into tiles: the configurations there are, and which one a problem gets. No CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gated.h"

namespace geglu::cuda::sm90 {

// A tile is kTileRows rows of x by tile_cols columns of the result, for which it takes as many rows of each weight.
struct GatedGemmConfig {
  int32_t tile_cols;
  int32_t cluster;  // blocks whose tiles lie below each other, and that share the weights each of them loads
  int32_t band;     // clusters' rows of tiles that are taken together, column by column, so that their x stays in L2
};

constexpr int32_t kTileRows = 128;
constexpr int32_t kTileDepth = 64;  // 128 bytes, the widest swizzle

// Those the kernel is compiled for.
constexpr int32_t kTileCols[] = {112, 96, 80, 64};
// Two consumers take turns at tiles of up to this many columns. A wider one has more sums than the registers of one
// consumer hold: they make it together, half of the rows each, and nobody multiplies while they write results.
constexpr int32_t kTurnCols = 96;
constexpr int32_t kMaxCluster = 2;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What takes the time, in clock cycles of a multiprocessor.
struct GatedGemmCost {
  int64_t cycles;  // until the last block is done
  int64_t least;   // of that, what the tensor cores or the weights' way from memory take at the least, at full use
};

constexpr GatedGemmCost gated_gemm_cost(const GatedGemmConfig& config, int64_t rows, int64_t cols, int64_t depth,
                                        int32_t multiprocessors) {
  // A product of 64 rows by 8 columns, 16 deep, takes 4 cycles. The rest is fitted to measurements on an H200
  // (docs/measured.md): what a stage of the ring, a kernel and a tile's results take beside, and the bytes that memory
  // delivers a cycle.
  constexpr int64_t kStageCycles = 80;
  constexpr int64_t kKernelCycles = 6000;
  constexpr int64_t kResultCycles = 4500;
  constexpr int64_t kBytesPerCycle = 1800;
  const int64_t steps = divide_up(depth, kTileDepth);
  const int64_t tiles_down = divide_up(rows, kTileRows * config.cluster);
  const int64_t tiles = tiles_down * divide_up(cols, config.tile_cols);
  const int64_t slots = multiprocessors / config.cluster;
  const int64_t column_bytes = int64_t{4} * config.tile_cols * kTileDepth;  // of both weights, in one stage
  const auto turn = [&](int64_t count) {
    const int64_t columns = divide_up(count, std::min(tiles_down, int64_t{config.band}));
    const int64_t results = config.tile_cols > kTurnCols ? kResultCycles : 0;
    return steps * std::max<int64_t>(8 * config.tile_cols + kStageCycles, columns * column_bytes / kBytesPerCycle) +
           results;
  };
  const int64_t last = tiles % slots;
  const int64_t cycles = tiles / slots * turn(slots) + (last > 0 ? turn(last) : 0) + kKernelCycles;
  const int64_t least = std::max(divide_up(rows * cols, int64_t{multiprocessors} * kTileRows) * 8 * steps,
                                 4 * cols * depth / kBytesPerCycle);
  return {cycles, least};
}

// The configuration of the fewest cycles; among equals the larger tile and the larger cluster, which read less.
constexpr GatedGemmConfig choose_gated_gemm(int64_t rows, int64_t cols, int64_t depth, int32_t multiprocessors) {
  GatedGemmConfig best = {};
  int64_t fewest = INT64_MAX;
  for (const int32_t tile_cols : kTileCols) {
    for (int32_t cluster = kMaxCluster; cluster >= 1; --cluster) {
      const GatedGemmConfig config = {tile_cols, cluster, 16 / cluster};
      if (cluster > multiprocessors) continue;
      const int64_t cycles = gated_gemm_cost(config, rows, cols, depth, multiprocessors).cycles;
      if (cycles < fewest) {
        best = config;
        fewest = cycles;
      }
    }
  }
  return best;
}

// Whether that is at least as fast as cuBLAS and a pass over its two results, by measurements on an H200
// (docs/measured.md). With up to one tile of rows memory decides, and both take about as long. Between that and the
// 448 rows from which on arithmetic decides, large weights leave some multiprocessors idle in the last turn, and cuBLAS
// has more ways to cut such products; with the largest neither was always ahead there.
constexpr bool gated_gemm_pays(const GatedGemmConfig& config, int64_t rows, int64_t cols, int64_t depth,
                               int32_t multiprocessors) {
  if (rows <= kTileRows || rows >= 448 || cols * depth <= kSmallWeight) return true;
  if (rows <= 192 || cols * depth > kHugeWeight) return false;
  const GatedGemmCost cost = gated_gemm_cost(config, rows, cols, depth, multiprocessors);
  return cost.cycles * 100 <= cost.least * 121;
}

}  // namespace geglu::cuda::sm90
