// What the parts of the skinny kernel agree on: its parameters, its shared memory, its ring. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/linear.h"
#include "sm90/stream_k.h"
#include "sm90/wgmma.cuh"

namespace geglu::sm90 {

constexpr int kBlockK = wgmma::kSwizzle;  // K of a stage: one 128-byte row of the swizzle
constexpr int kMaxStages = 12;

struct SkinnyParameters {
  StreamK work;
  int stages;
  int m;
  int n;
  Activation activation;
  const void* bias[2];
  void* out;
  int64_t out_stride;
  bool out_vectors;         // rows of out are 16-byte aligned
  float4* partials;         // a slot for each warpgroup of the grid: what it leaves to a later group
  float4* exchange;         // two more for each, where K is split within clusters
  int64_t exchange_stride;  // from the first to the second
  uint32_t* counters;       // one for each warpgroup's part of each tile: the groups that have left their sums
};

// One instantiation: a block takes kN rows of x and 128 rows of weights for each of its warpgroups. A cluster has
// kBatchTiles blocks with the same weights and other rows of x, times kSplit blocks with other K-blocks of a unit.
template <int kN_, int kWarpgroups_, int kBatchTiles_, int kSplit_>
struct SkinnyTile {
  static constexpr int kN = kN_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kBatchTiles = kBatchTiles_;
  static constexpr int kSplit = kSplit_;
  static_assert(kBatchTiles == 1 || kBatchTiles == 2, "each copies one half of the weights to both");
  static_assert(kSplit == 1 || kSplit == 2, "the two exchange halves of their sums");

  static constexpr int kCluster = kBatchTiles * kSplit;
  static constexpr int kOwnN = kN / kSplit;  // columns that a block completes
  static constexpr int kHalfRows = wgmma::kRows * kWarpgroups;
  static constexpr int kHalfBytes = kHalfRows * kBlockK * 2;
  static constexpr int kBatchBytes = kN * kBlockK * 2;
  static constexpr int kStageBytes = 2 * kHalfBytes + kBatchBytes;
  static constexpr int kOutputBytes = kOwnN * wgmma::kRows * 2;  // of a warpgroup
  static constexpr int kThreads = kWarpgroups * 128 + 32;
  static constexpr int kAlignment = 1024;  // of a swizzled tile

  struct Barriers {
    uint64_t full[kMaxStages];
    uint64_t empty[kMaxStages];
    uint64_t exchange[kWarpgroups];
  };

  // The runtime aligns dynamic shared memory to 16 bytes only.
  static constexpr size_t bytes(int stages) {
    return kAlignment + size_t(stages) * kStageBytes + kWarpgroups * kOutputBytes + sizeof(Barriers);
  }
  static_assert(kStageBytes % kAlignment == 0 && kBatchBytes % kAlignment == 0, "tiles stay aligned");
};

// A position in the ring; `parity` is that of the stage's current phase.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace geglu::sm90
