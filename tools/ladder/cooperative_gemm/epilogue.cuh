// From the sums of a tile, in registers, to the result in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/linear.h"
#include "cuda/dtype.cuh"
#include "cuda/math.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/swizzle.cuh"

namespace geglu::cuda::sm90 {

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

constexpr int kWarpRows = 16;  // rows of a tile that a warp's sums belong to

// What a warp's part of a tile is written through: chunks of kCols columns that leave while the next is computed, in
// shared memory swizzled as the tensor map says.
template <typename T, int kTileCols>
struct Staging {
  static constexpr int kCols = kTileCols % 64 == 0 ? 64 : 32;
  static constexpr int kBuffers = 2;
  static constexpr int kBytes = kBuffers * kWarpRows * kCols * sizeof(T);

  // Byte offset of the 16-byte piece `piece` of a row.
  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    return swizzled_offset<kCols / 8>(row, piece);
  }
};

// Where a tile goes, and what is added to its sums.
struct Destination {
  const CUtensorMap* map;  // of out (rows, cols), in boxes of kWarpRows x Staging::kCols
  void* unaligned;      // out itself if its rows are not aligned to 16 bytes, which the copy engine asks for; or null
  const void* bias[2];  // of gate and up, (cols) each; or null
  int32_t rows;
  int32_t cols;
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

// A staged chunk to rows of any alignment: element by element, neighbouring lanes to neighbouring columns.
template <typename T, int kTileCols>
__device__ __forceinline__ void copy_chunk(const Destination& to, const char* buffer, int row, int column) {
  using Stage = Staging<T, kTileCols>;
  for (int i = threadIdx.x % 32; i < kWarpRows * Stage::kCols; i += 32) {
    const int r = i / Stage::kCols;
    const int c = i % Stage::kCols;
    if (row + r < to.rows && column + c < to.cols) {
      const char* source = buffer + Stage::offset(r, c / 8) + c % 8 * sizeof(T);
      static_cast<T*>(to.unaligned)[int64_t{row + r} * to.cols + column + c] = *reinterpret_cast<const T*>(source);
    }
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
        store_box(to.map, buffer, first, row);
        commit_stores();
      }
    } else {
      __syncwarp();
      copy_chunk<T, kTileCols>(to, buffer, row, first);
      __syncwarp();
    }
  }
}

}  // namespace geglu::cuda::sm90
