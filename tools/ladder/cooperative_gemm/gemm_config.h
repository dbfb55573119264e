// How a product is cut into tiles on Hopper: the configurations there are. No CUDA.
#pragma once

#include <cstdint>

#include "cuda/sm90/tall_gemm_config.h"

namespace geglu::cuda::sm90::cooperative {

// A block makes tiles of kTileRows rows of x by `weight_rows` rows of weights: those of one weight, or half of them of
// gate and half of up.
struct GemmConfig {
  int32_t weight_rows;
  int32_t cluster;  // blocks whose tiles lie below each other and that share the weights each of them loads
  int32_t band;     // clusters' rows of tiles that are taken together, column by column, so that their x stays in L2
  int32_t stagger;  // stages that the second consumer stays behind the first, so that only one is in its epilogue
};

// Those the kernel is compiled for.
constexpr int32_t kWeightRows[] = {256, 192, 128};
// A stage is free again when both consumers are done with it, and one stage at least must be on its way.
constexpr int32_t kMaxStagger = 3;

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

}  // namespace geglu::cuda::sm90::cooperative
