// How a product of many rows is cut into tiles: the configurations there are, and which one a problem gets. No CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cuda/gated.h"

namespace geglu::cuda::sm90 {

// A tile is kTileRows rows of x by tile_cols columns of the result, for which it takes as many rows of each weight.
struct TallGemmConfig {
  int32_t tile_cols;
  int32_t cluster;  // blocks whose tiles lie below each other, and that share the weights each of them loads
};

constexpr int32_t kTileRows = 128;
constexpr int32_t kTileDepth = 64;  // 128 bytes, the widest swizzle

// Those the kernel is compiled for: for gate and up, and for one weight.
constexpr int32_t kGatedTileCols[] = {112, 96, 80, 64};
constexpr int32_t kPlainTileCols = 192;
// Two consumers take turns at tiles with up to this many rows of weights. A wider one has more sums than the registers
// of one consumer hold: they make it together, half of the rows each, and nobody multiplies while they write results.
constexpr int32_t kTurnRows = 192;
constexpr int32_t kMaxCluster = 2;
// Rows of tiles that are taken together, column by column, so that their x stays in L2.
constexpr int32_t kBandTiles = 16;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What takes the time, in clock cycles of a multiprocessor.
struct TallGemmCost {
  int64_t cycles;  // until the last block is done
  int64_t least;   // of that, what the tensor cores or the weights' way from memory take at the least, at full use
};

constexpr TallGemmCost tall_gemm_cost(const TallGemmConfig& config, int32_t weights, int64_t rows, int64_t cols,
                                      int64_t depth, int32_t multiprocessors) {
  // A product of 64 rows by 8 columns, 16 deep, takes 4 cycles. The rest is fitted to measurements on an H200
  // (docs/measured.md): what a stage of the ring and a tile's results take beside, and the bytes that memory delivers a
  // cycle.
  constexpr int64_t kStageCycles = 80;
  constexpr int64_t kResultCycles = 4500;
  constexpr int64_t kBytesPerCycle = 1800;
  const int64_t steps = divide_up(depth, kTileDepth);
  const int64_t tiles_down = divide_up(rows, kTileRows * config.cluster);
  const int64_t tiles = tiles_down * divide_up(cols, config.tile_cols);
  const int64_t slots = multiprocessors / config.cluster;
  const int64_t weight_rows = weights * config.tile_cols;
  const auto turn = [&](int64_t count) {
    const int64_t columns = divide_up(count, std::min(tiles_down, int64_t{kBandTiles / config.cluster}));
    const int64_t memory = columns * 2 * weight_rows * kTileDepth / kBytesPerCycle;
    const int64_t results = weight_rows > kTurnRows ? kResultCycles : 0;
    return steps * std::max<int64_t>(4 * weight_rows + kStageCycles, memory) + results;
  };
  const int64_t last = tiles % slots;
  const int64_t cycles = tiles / slots * turn(slots) + (last > 0 ? turn(last) : 0);
  const int64_t least = std::max(divide_up(rows * cols, int64_t{multiprocessors} * kTileRows) * 4 * weights * steps,
                                 2 * weights * cols * depth / kBytesPerCycle);
  return {cycles, least};
}

// Whether the kernel is at least as fast as the other ways with a configuration of that cost, by measurements on an
// H200 (docs/measured.md).
constexpr bool tall_gemm_pays(const TallGemmCost& cost, int32_t weights, int64_t rows, int64_t cols, int64_t depth) {
  const int64_t weight = cols * depth;
  const bool fills = cost.cycles * 100 <= cost.least * 115;
  // Of one weight the other way is cuBLAS alone, which is as fast or faster but for many rows of small ones.
  if (weights == 1) return rows >= 8192 && weight <= kSmallWeight && fills;
  // Of two it is cuBLAS and a pass over its two results. With up to one tile of rows memory decides, and both take
  // about as long. Between that and the 448 rows from which on arithmetic decides, large weights leave some
  // multiprocessors idle in the last turn, or tiles have rows that are not there, and cuBLAS has more ways to cut such
  // products.
  if (rows <= kTileRows || rows >= 448 || weight <= kSmallWeight) return true;
  return rows >= 224 && fills;
}

// The configuration of the fewest cycles for one weight (`weights` 1) or for gate and up (2), if it pays; among equals
// the larger tile and the larger cluster, which read less.
constexpr std::optional<TallGemmConfig> choose_tall_gemm(int32_t weights, int64_t rows, int64_t cols, int64_t depth,
                                                         int32_t multiprocessors) {
  TallGemmConfig best = {};
  TallGemmCost fewest = {INT64_MAX, 0};
  // Of one weight a block alone would read more than it multiplies in the time.
  const int32_t least_cluster = weights == 1 ? kMaxCluster : 1;
  const auto consider = [&](int32_t tile_cols) {
    for (int32_t cluster = kMaxCluster; cluster >= least_cluster; --cluster) {
      const TallGemmConfig config = {tile_cols, cluster};
      if (cluster > multiprocessors) continue;
      const TallGemmCost cost = tall_gemm_cost(config, weights, rows, cols, depth, multiprocessors);
      if (cost.cycles < fewest.cycles) {
        best = config;
        fewest = cost;
      }
    }
  };
  if (weights == 1) {
    consider(kPlainTileCols);
  } else {
    for (const int32_t tile_cols : kGatedTileCols) consider(tile_cols);
  }
  if (!tall_gemm_pays(fewest, weights, rows, cols, depth)) return std::nullopt;
  return best;
}

}  // namespace geglu::cuda::sm90
