// How a product is cut into tiles on Hopper: the configurations there are, and which one a problem gets. No CUDA.
#pragma once

#include <cstdint>

namespace geglu::cuda::sm90 {

// A block makes tiles of kTileRows rows of x by `weight_rows` rows of weights: those of one weight, or half of them of
// gate and half of up.
struct GemmConfig {
  int32_t weight_rows;
  int32_t cluster;  // blocks whose tiles lie below each other and that share the weights each of them loads
  int32_t band;     // clusters' rows of tiles that are taken together, column by column, so that their x stays in L2
  int32_t stagger;  // stages that the second consumer stays behind the first, so that only one is in its epilogue
};

constexpr int32_t kTileRows = 128;
constexpr int32_t kTileDepth = 64;  // 128 bytes, the widest swizzle

// Those the kernel is compiled for.
constexpr int32_t kWeightRows[] = {256, 192, 128};
constexpr int32_t kMaxCluster = 2;
// A stage is free again when both consumers are done with it, and one stage at least must be on its way.
constexpr int32_t kMaxStagger = 3;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Why the kernel cannot run with this configuration, for people to read; null if it can.
constexpr const char* gemm_config_rejects(const GemmConfig& config) {
  bool compiled = false;
  for (const int32_t weight_rows : kWeightRows) compiled = compiled || config.weight_rows == weight_rows;
  if (!compiled) return "weight_rows is none of 256, 192 and 128";
  if (config.cluster < 1 || config.cluster > kMaxCluster) return "cluster is neither 1 nor 2";
  if (config.band < 1) return "band is less than 1";
  if (config.stagger < 0 || config.stagger > kMaxStagger) return "stagger is not in 0 to 3";
  return nullptr;
}

// Cycles until the last block is done, as far as the tensor cores decide it: a product of 64 rows, 16 deep, takes half
// a cycle for each row of a weight. all_weight_rows: cols, or 2 * cols for gate and up together.
constexpr int64_t gemm_cycles(const GemmConfig& config, int64_t rows, int64_t all_weight_rows, int64_t depth,
                              int32_t multiprocessors) {
  // Estimates, not measured: of a tile, what of the epilogue is not overlapped; of a stage, what does not shrink with
  // the tile, which makes a small tile pay for reading x more often.
  constexpr int64_t kTileCycles = 800;
  constexpr int64_t kStageCycles = 40;
  const int64_t tiles = divide_up(rows, kTileRows * config.cluster) * divide_up(all_weight_rows, config.weight_rows);
  const int64_t turns = divide_up(tiles, multiprocessors / config.cluster);
  return turns * (divide_up(depth, kTileDepth) * (config.weight_rows * 4 + kStageCycles) + kTileCycles);
}

// The configuration of the fewest cycles. Among equals the larger tile and the larger cluster, which read less.
constexpr GemmConfig choose_gemm_config(int64_t rows, int64_t all_weight_rows, int64_t depth, int32_t multiprocessors) {
  GemmConfig best = {};
  int64_t fewest = INT64_MAX;
  for (const int32_t weight_rows : kWeightRows) {
    for (int32_t cluster = kMaxCluster; cluster >= 1; --cluster) {
      if (cluster > multiprocessors) continue;
      const GemmConfig config = {weight_rows, cluster, 16 / cluster, 2};
      const int64_t cycles = gemm_cycles(config, rows, all_weight_rows, depth, multiprocessors);
      if (cycles < fewest) {
        best = config;
        fewest = cycles;
      }
    }
  }
  return best;
}

}  // namespace geglu::cuda::sm90
