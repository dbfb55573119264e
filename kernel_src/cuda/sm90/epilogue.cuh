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

// What a warp's part of a tile, 16 rows, is written through: boxes of kBoxCols columns, one behind the other in shared
// memory and swizzled as the tensor map says. Tiles of gate and up may be narrower by 8 columns, which are no box.
template <typename T, int kWeights, int kTileCols>
struct Staging {
  static constexpr int kBoxCols = kWeights == 1 ? 32 : 16;
  static constexpr int kBoxBytes = kWarpRows * kBoxCols * sizeof(T);
  static constexpr int kBoxes = kTileCols / kBoxCols;
  static_assert(kTileCols % kBoxCols == 0 || kTileCols % kBoxCols == 8);
  static constexpr int kParts = kWeights == 1 ? 2 : 1;  // written one after the other, where there is room for one
  static_assert(kBoxes % kParts == 0);
  static constexpr int kTileBytes = kBoxes * kBoxBytes;
  static constexpr int kPartBytes = kTileBytes / kParts;

  // Byte offset of the 16-byte piece `piece` of a box's row.
  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    return swizzled_offset<kBoxCols / 8>(row, piece);
  }
};

// Where a tile goes, and what is added to its sums.
struct Destination {
  CUtensorMap map;      // of out, in boxes of kWarpRows x Staging::kBoxCols
  void* out;            // (rows, cols)
  bool aligned;         // whether its rows are aligned to 16 bytes, which the copy engine asks for
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

// A staged box to rows of any alignment: element by element, neighbouring lanes to neighbouring columns.
template <typename T, class Stage>
__device__ __forceinline__ void copy_box(const Destination& to, const char* box, int row, int column) {
  for (int i = threadIdx.x % 32; i < kWarpRows * Stage::kBoxCols; i += 32) {
    const int r = i / Stage::kBoxCols;
    const int c = i % Stage::kBoxCols;
    if (row + r < to.rows && column + c < to.cols) {
      const char* source = box + Stage::offset(r, c / 8) + c % 8 * sizeof(T);
      static_cast<T*>(to.out)[int64_t{row + r} * to.cols + column + c] = *reinterpret_cast<const T*>(source);
    }
  }
}

// The calling warp's 16 rows from `row` on, 8 columns from `column` on, from registers, as wgmma leaves their sums.
template <typename T>
__device__ __forceinline__ void store_group(const Destination& to, const float (&results)[4], int row, int column) {
  const int lane = threadIdx.x % 32;
  const int col = column + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + lane / 4 + half * 8;
    uint32_t pair;
    pack_pair(results[half * 2], results[half * 2 + 1], reinterpret_cast<T*>(&pair));
    T* const place = static_cast<T*>(to.out) + int64_t{at} * to.cols + col;
    if (at >= to.rows) continue;
    if (to.aligned) {
      if (col < to.cols) *reinterpret_cast<uint32_t*>(place) = pair;
    } else {
      if (col < to.cols) place[0] = reinterpret_cast<const T*>(&pair)[0];
      if (col + 1 < to.cols) place[1] = reinterpret_cast<const T*>(&pair)[1];
    }
  }
}

// kCount results of sums from sums[0] on: those of gate, and sums[up] those of up if there are two weights.
template <bool kTanh, int kWeights, int kCount>
__device__ __forceinline__ void finish_sums(const float* sums, int up, float (&results)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) results[i] = sums[i];
  if constexpr (kWeights == 2) {
    FastGelu<kTanh>::apply(results);
#pragma unroll
    for (int i = 0; i < kCount; ++i) results[i] *= sums[up + i];
  }
}

// The calling warp's 16 rows from `row` on, kCols columns from `column` on, as wgmma leaves their sums: those of gate,
// then those of up if there are two weights, and then GeGLU of them is what is stored. Every lane of the warp calls it.
// `staging` is the warp's own, and the copy engine may read it after the call: room for the tile if `whole`, else for a
// part of it.
template <typename T, bool kTanh, class Stage, int kWeights, int kCols>
__device__ __forceinline__ void store_tile(float (&sums)[kWeights * kCols / 2], char* staging, bool whole,
                                           const Destination& to, int row, int column) {
  constexpr int kUp = kCols / 2;  // from a sum of gate to that of up
  constexpr int kBoxes = kCols / Stage::kBoxCols / Stage::kParts;
  constexpr int kPartCols = kBoxes * Stage::kBoxCols;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
    add_bias<T, kCols / 8>(sums + w * kUp, to.bias[w], column, to.cols);
  }
#pragma unroll
  for (int part = 0; part < Stage::kParts; ++part) {
    char* const boxes = staging + (whole ? part * Stage::kPartBytes : 0);
    if (!whole) {
      wait_stores_read<0>();
      __syncwarp();
    }
#pragma unroll
    for (int col = 0; col < kPartCols; col += 16) {
      float results[8];  // rows 0 to 7 and 8 to 15 of 8 columns, then of the next 8; two columns each
      finish_sums<kTanh, kWeights>(&sums[(part * kPartCols + col) / 2], kUp, results);
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pack_pair(results[2 * i], results[2 * i + 1], reinterpret_cast<T*>(&matrices[i]));
      char* const box = boxes + col / Stage::kBoxCols * Stage::kBoxBytes;
      store_matrices(shared_address(box) + Stage::offset(lane % 16, col % Stage::kBoxCols / 8 + lane / 16), matrices);
    }
    // One fence for all: it takes longer than the results of a box.
    fence_for_copy_engine();
    __syncwarp();
    const int first = column + part * kPartCols;
    if (to.aligned) {
      if (lane < kBoxes) {
        store_box(&to.map, boxes + lane * Stage::kBoxBytes, first + lane * Stage::kBoxCols, row);
        commit_stores();
      }
    } else {
      for (int box = 0; box < kBoxes; ++box) {
        copy_box<T, Stage>(to, boxes + box * Stage::kBoxBytes, row, first + box * Stage::kBoxCols);
      }
      __syncwarp();
    }
  }
  if constexpr (kCols % Stage::kBoxCols != 0) {
    float results[4];
    finish_sums<kTanh, kWeights>(&sums[kUp - 4], kUp, results);
    store_group<T>(to, results, row, column + kCols - 8);
  }
}

}  // namespace geglu::cuda::sm90
