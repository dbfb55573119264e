// What the kernel for few rows (thin_gemm.cuh) is told, and what it is compiled for.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/thin_gemm_config.h"
#include "cuda/sm90/wgmma.cuh"

namespace geglu::cuda::sm90 {

struct ThinGemmArguments {
  CUtensorMap x;             // (rows, depth)
  CUtensorMap weight[2];     // (cols, depth) each; the second only of two. In boxes of a tile's columns,
  CUtensorMap part[2];       // of a consumer's,
  CUtensorMap last_part[2];  // and of the last consumer's, of which there may be fewer
  const void* bias[2];       // (cols) each, or null
  void* out;                 // (rows, cols)
  int32_t rows;
  int32_t cols;
  int32_t box_rows;   // of x, a multiple of 8
  int32_t tile_cols;  // of the result, a multiple of 8
  int32_t stages;
  int32_t ring_offset;  // of the first stage, in a block's shared memory
  int32_t steps;        // of the depth, in each block of a cluster
  int32_t more_steps;   // so many of which, the first ones, take one more
  bool weights_are_old;
};

template <typename T, int kWeightCount, int kConsumerCount, int kBatchRows>
struct Thin {
  using Type = T;
  static constexpr int kWeights = kWeightCount;      // 2 for gate and up, 1 for a plain product
  static constexpr int kConsumers = kConsumerCount;  // warpgroups
  static constexpr int kBatch = kBatchRows;          // room for rows of x
  static constexpr int kThreads = kConsumers * kWarpgroup + 32;
  static constexpr int kMaxTileCols = kThinConsumerCols * kConsumers;
  static constexpr int kRowBytes = kTileDepth * sizeof(T);  // of a row in a stage
  static constexpr int kXBytes = kBatch * kRowBytes;

  // A consumer's columns of a tile. The last consumer's are what is left, which may be none.
  static __host__ __device__ constexpr int consumer_cols(int tile_cols, int consumer) {
    return consumer < kConsumers - 1 ? kThinConsumerCols : tile_cols - consumer * kThinConsumerCols;
  }

  // A stage of the ring is x's rows and then the weights': a tile's of gate, and then those of up.
  static __host__ __device__ constexpr int stage_bytes(int tile_cols) {
    return kXBytes + kWeights * tile_cols * kRowBytes;
  }

  // Of gate and up: 16 rows of a warp's results on their way to global memory, in the place of weights of its own. Of
  // those it has 8 columns at least.
  static constexpr int kWarpCols = 16;
  static constexpr int kResultPitch = kWarpCols * sizeof(T) + 16;  // bytes; 8 rows of 16 fall into different banks
  static_assert(16 * kResultPitch <= 8 * kRowBytes);
};

}  // namespace geglu::cuda::sm90
