// From the sums of a tile to the result, with or without a second weight; the rest of it is the package's epilogue.
#pragma once

#include "common/linear.h"
#include "cuda/sm90/epilogue.cuh"

namespace geglu::cuda::sm90::cooperative {

// What is computed of the sums, in float. kGated: the first half of a tile's columns is gate, the second is up.
template <bool kGatedForm, Activation kActivation>
struct Combine {
  static constexpr bool kGated = kGatedForm;

  static __device__ __forceinline__ float value(float gate, float up) {
    float result = gate;
    if constexpr (kActivation != Activation::kNone) result = FastGelu<kActivation == Activation::kTanh>::value(gate);
    if constexpr (kGated) result *= up;
    return result;
  }
};

// The biases of the columns in `kCount` groups of 8 that this lane has sums of; 0 without a bias and past the last.
template <typename T, int kCount>
__device__ __forceinline__ void load_bias(float (&values)[2 * kCount], const void* bias, int column, int cols) {
#pragma unroll
  for (float& value : values) value = 0.0f;
  if (bias == nullptr) return;
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) {
    const int at = column + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    if (at < cols) values[i] = static_cast<float>(static_cast<const T*>(bias)[at]);
  }
}

// The calling warp's 16 rows from `row` on, kTileCols columns from `column` on; `sums` as wgmma leaves them. Every lane
// of the warp calls it. `staging` is the warp's own and may be read by the copy engine after the call.
template <typename T, class Combine, int kTileCols, int kSums>
__device__ __forceinline__ void store_tile(const float (&sums)[kSums], char* staging, const Destination& to, int row,
                                           int column) {
  using Stage = Staging<T, kTileCols>;
  constexpr int kUp = Combine::kGated ? kSums / 2 : 0;  // from a sum of gate to that of up
  constexpr int kGroups = Stage::kCols / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < kTileCols / Stage::kCols; ++chunk) {
    const int first = column + chunk * Stage::kCols;
    char* buffer = staging + chunk % Stage::kBuffers * (Stage::kBytes / Stage::kBuffers);
    float gate_bias[2 * kGroups];
    float up_bias[2 * kGroups] = {};
    load_bias<T, kGroups>(gate_bias, to.bias[0], first, to.cols);
    if constexpr (Combine::kGated) load_bias<T, kGroups>(up_bias, to.bias[1], first, to.cols);

    // The buffer is free once the store before last has read it; a tile begins with both free.
    if (lane == 0) {
      if (chunk == 0) {
        wait_stores_read<0>();
      } else {
        wait_stores_read<1>();
      }
    }
    __syncwarp();
#pragma unroll
    for (int group = 0; group < kGroups; group += 2) {
      uint32_t matrices[4];  // rows 0 to 7 and 8 to 15 of 8 columns, then of the next 8
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (chunk * kGroups + group + i / 2) + i % 2 * 2;
        const int bias = 2 * (group + i / 2);
        const float low = Combine::value(sums[at] + gate_bias[bias], sums[at + kUp] + up_bias[bias]);
        const float high = Combine::value(sums[at + 1] + gate_bias[bias + 1], sums[at + 1 + kUp] + up_bias[bias + 1]);
        pack_pair(low, high, reinterpret_cast<T*>(&matrices[i]));
      }
      store_matrices(shared_address(buffer) + Stage::offset(lane % 16, group + lane / 16), matrices);
    }
    if (to.unaligned == nullptr) {
      fence_for_copy_engine();
      __syncwarp();
      if (lane == 0) {
        store_box(&to.map, buffer, first, row);
        commit_stores();
      }
    } else {
      __syncwarp();
      copy_chunk<T, kTileCols>(to, buffer, row, first);
      __syncwarp();
    }
  }
}

}  // namespace geglu::cuda::sm90::cooperative
