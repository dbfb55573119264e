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
constexpr int32_t kProductRows = 64;
constexpr int32_t kTileDepth = 64;  // 128 bytes, the widest swizzle

// Those the kernel is compiled for: for gate and up, and for one weight.
constexpr int32_t kGatedTileCols[] = {96, 88, 80, 72, 64};
constexpr int32_t kPlainTileCols = 192;
// Some of the tiles of gate and up are narrower by this: see tiles_across().
constexpr int32_t kNarrower = 8;
constexpr int32_t kMaxCluster = 2;
// Rows of tiles that are taken together, column by column, so that their x stays in L2.
constexpr int32_t kBandTiles = 16;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t tiles_down(const TallGemmConfig& config, int64_t rows) {
  return divide_up(rows, kTileRows * config.cluster);
}

// Clusters that run at a time.
constexpr int64_t cluster_slots(const TallGemmConfig& config, int32_t multiprocessors) {
  return multiprocessors / config.cluster;
}

// The tiles that lie beside each other, of which `narrow` are narrower.
struct TilesAcross {
  int64_t tiles;
  int64_t narrow;
};

// As many as there is time for in the turns that tiles of full width take, so that the last turn is no emptier than it
// must be: then some, or all, may be narrower.
constexpr TilesAcross tiles_across(const TallGemmConfig& config, int32_t weights, int64_t rows, int64_t cols,
                                   int32_t multiprocessors) {
  const int64_t wide = divide_up(cols, config.tile_cols);
  if (weights == 1) return {wide, 0};
  const int64_t down = tiles_down(config, rows);
  const int64_t slots = cluster_slots(config, multiprocessors);
  const int64_t in_time = divide_up(down * wide, slots) * slots / down;
  const int64_t tiles = std::min(in_time, divide_up(cols, config.tile_cols - kNarrower));
  return {tiles, std::min((tiles * config.tile_cols - cols) / kNarrower, tiles)};
}

// What takes the time, in clock cycles of a multiprocessor.
struct TallGemmCost {
  int64_t cycles;  // until the last block is done
  int64_t least;   // of that, what the tensor cores or the weights' way from memory take at the least, at full use
};

constexpr TallGemmCost tall_gemm_cost(const TallGemmConfig& config, int32_t weights, int64_t rows, int64_t cols,
                                      int64_t depth, int32_t multiprocessors) {
  // A product of 64 rows by 8 columns, 16 deep, takes 4 cycles. The rest is fitted to measurements on an H200
  // (docs/measured.md): what a stage of the ring takes beside, and the bytes that L2 delivers to a
  // multiprocessor and memory to all of them a cycle.
  constexpr int64_t kStageCycles = 4;
  constexpr int64_t kL2BytesPerCycle = 46;
  constexpr int64_t kBytesPerCycle = 2400;
  const int64_t steps = divide_up(depth, kTileDepth);
  const int64_t down = tiles_down(config, rows);
  const TilesAcross across = tiles_across(config, weights, rows, cols, multiprocessors);
  const int64_t tiles = down * across.tiles;
  const int64_t slots = cluster_slots(config, multiprocessors);
  const int64_t weight_rows = weights * config.tile_cols;
  const int64_t l2 = (kTileRows + weight_rows / config.cluster) * 2 * kTileDepth / kL2BytesPerCycle;
  const auto turn = [&](int64_t count) {
    const int64_t columns = divide_up(count, std::min(down, int64_t{kBandTiles / config.cluster}));
    const int64_t memory = columns * 2 * weight_rows * kTileDepth / kBytesPerCycle;
    return steps * std::max({4 * weight_rows + kStageCycles, l2, memory});
  };
  const int64_t last = tiles % slots;
  // Each cluster has at least so many narrow tiles.
  const int64_t saved = down * across.narrow / slots * steps * 4 * weights * kNarrower;
  const int64_t cycles = tiles / slots * turn(slots) + (last > 0 ? turn(last) : 0) - saved;
  const int64_t products = divide_up(rows, kProductRows);
  const int64_t least = std::max(divide_up(products * cols, int64_t{multiprocessors} * 2) * 4 * weights * steps,
                                 2 * weights * cols * depth / kBytesPerCycle);
  return {cycles, least};
}

// Whether the kernel is at least as fast as the other ways with a configuration of that cost, by measurements on an
// H200 (docs/measured.md).
constexpr bool tall_gemm_pays(const TallGemmCost& cost, int32_t weights, int64_t rows, int64_t cols, int64_t depth) {
  const int64_t weight = cols * depth;
  const bool fills = cost.cycles * 100 <= cost.least * 108;
  // Of one weight the other way is cuBLAS alone, which is as fast or faster but for many rows of small ones.
  if (weights == 1) return rows >= 8192 && weight <= kSmallWeight && fills;
  // Of two it is cuBLAS and a pass over its two results. With up to one tile of rows memory decides, and both take
  // about as long. Between that and the 448 rows from which on arithmetic decides, large weights leave some
  // multiprocessors idle in the last turn, or tiles have rows that are not there, and cuBLAS has more ways to cut such
  // products.
  if (rows <= kTileRows || rows >= 448 || weight <= kSmallWeight) return true;
  return rows >= 224 && fills;
}

// The configuration of the fewest cycles for one weight (`weights` 1) or for gate and up (2), if it pays; among those
// within a hundredth of each other the larger tile and the larger cluster, which read less.
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
      if (cost.cycles < fewest.cycles / 100 * 99) {
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
