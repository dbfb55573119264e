// From the sums of a tile, in registers, to the result in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/dtype.cuh"
#include "cuda/math.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/swizzle.cuh"

namespace geglu::cuda::sm90 {

constexpr int kWarpRows = 16;  // rows of a tile that a warp's sums belong to

// What a warp's part of a tile is written through: chunks of kCols columns that leave while the next is computed, in
// shared memory swizzled as the tensor map says.
template <typename T, int kTileCols>
struct Staging {
  static constexpr int kCols = kTileCols % 64 == 0 ? 64 : kTileCols % 32 == 0 ? 32 : 16;
  static_assert(kTileCols % kCols == 0);
  static constexpr int kBuffers = 2;
  static constexpr int kBytes = kBuffers * kWarpRows * kCols * sizeof(T);

  // Byte offset of the 16-byte piece `piece` of a row.
  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    return swizzled_offset<kCols / 8>(row, piece);
  }
};

// Where a tile goes, and what is added to its sums.
struct Destination {
  CUtensorMap map;      // of out (rows, cols), in boxes of kWarpRows x Staging::kCols
  void* unaligned;      // out itself if its rows are not aligned to 16 bytes, which the copy engine asks for; or null
  const void* bias[2];  // of gate and up, (cols) each; or null
  int32_t rows;
  int32_t cols;
};

// Adds the biases of columns `column` on to sums of 8 * kGroups columns; 0 without a bias.
template <typename T, int kGroups>
__device__ __forceinline__ void add_bias(float* sums, const void* bias, int column, int cols) {
  if (bias == nullptr) return;
#pragma unroll
  for (int i = 0; i < 2 * kGroups; ++i) {
    const int at = column + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const float value = at < cols ? static_cast<float>(static_cast<const T*>(bias)[at]) : 0.0f;
    sums[i / 2 * 4 + i % 2] += value;
    sums[i / 2 * 4 + i % 2 + 2] += value;
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

// The calling warp's 16 rows from `row` on, kTileCols columns from `column` on, as wgmma leaves their sums: those of
// gate, then those of up if there are two weights, and then GeGLU of them is what is stored. Every lane of the warp
// calls it. `staging` is the warp's own and may be read by the copy engine after the call.
template <typename T, int kWeights, bool kTanh, int kTileCols>
__device__ __forceinline__ void store_tile(float (&sums)[kWeights * kTileCols / 2], char* staging,
                                           const Destination& to, int row, int column) {
  using Stage = Staging<T, kTileCols>;
  constexpr int kUp = kTileCols / 2;  // from a sum of gate to that of up
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
    add_bias<T, kTileCols / 8>(sums + w * kUp, to.bias[w], column, to.cols);
  }
#pragma unroll
  for (int chunk = 0; chunk < kTileCols / Stage::kCols; ++chunk) {
    const int first = column + chunk * Stage::kCols;
    char* buffer = staging + chunk % Stage::kBuffers * (Stage::kBytes / Stage::kBuffers);

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
    for (int group = 0; group < Stage::kCols / 8; group += 2) {
      const int at = chunk * (Stage::kCols / 2) + group * 4;
      float results[8];  // rows 0 to 7 and 8 to 15 of 8 columns, then of the next 8; two columns each
#pragma unroll
      for (int i = 0; i < 8; ++i) results[i] = sums[at + i];
      if constexpr (kWeights == 2) {
        FastGelu<kTanh>::apply(results);
#pragma unroll
        for (int i = 0; i < 8; ++i) results[i] *= sums[at + i + kUp];
      }
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pack_pair(results[2 * i], results[2 * i + 1], reinterpret_cast<T*>(&matrices[i]));
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

}  // namespace geglu::cuda::sm90
