// From the sums of a tile, in registers, to the result in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/dtype.cuh"
#include "cuda/math.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/swizzle.cuh"

namespace geglu::cuda::sm90 {

constexpr int kWarpRows = 16;  // rows of a tile that a warp's sums belong to

// What a warp's part of a tile of kCols columns, 16 rows, is written through. A box is as wide as can be, because
// memory takes 32 bytes at a time, and tiles begin anywhere: of narrow boxes each row is two pieces of that. Rows of 32
// columns would lie in the same banks, so they are swizzled; those of other widths follow each other as they are.
template <typename T, int kWeights, int kCols>
struct Staging {
  static constexpr int kBoxCols = kCols % 32 == 0 ? 32 : kCols;
  static constexpr int kRowBytes = kBoxCols * sizeof(T);
  static constexpr int kBoxBytes = kWarpRows * kRowBytes;
  static constexpr int kParts = kWeights == 1 ? 2 : 1;      // written one after the other, where there is room for one
  static constexpr int kBoxes = kCols / kBoxCols / kParts;  // of a part
  static_assert(kBoxes * kParts * kBoxCols == kCols);
  static constexpr int kPartBytes = kBoxes * kBoxBytes;

  // Byte offset of the 16-byte piece `piece` of a box's row.
  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    if constexpr (kBoxCols == 32) {
      return swizzled_offset<kBoxCols / 8>(row, piece);
    } else {
      return row * kRowBytes + piece * 16;
    }
  }
};

// Where a tile goes, and what is added to its sums.
struct Destination {
  CUtensorMap map;      // of out, in boxes of kWarpRows x Staging::kBoxCols
  CUtensorMap narrow;   // the same of narrow tiles
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

// 16 rows of 8 * kGroups columns, from the column on that sums[0] belongs to, into a warp's box.
template <typename T, bool kTanh, int kWeights, class Stage, int kGroups>
__device__ __forceinline__ void stage_results(const float* sums, int up, uint32_t box, int col) {
  float results[4 * kGroups];  // rows 0 to 7 and 8 to 15 of 8 columns, then of the next 8; two columns each
  finish_sums<kTanh, kWeights>(sums, up, results);
  uint32_t matrices[2 * kGroups];
#pragma unroll
  for (int i = 0; i < 2 * kGroups; ++i) {
    pack_pair(results[2 * i], results[2 * i + 1], reinterpret_cast<T*>(&matrices[i]));
  }
  const int lane = threadIdx.x % 32;
  store_matrices(box + Stage::offset(lane % 16, col / 8 + (kGroups == 2 ? lane / 16 : 0)), matrices);
}

// The calling warp's 16 rows from `row` on, kCols columns from `column` on, as wgmma leaves their sums: those of gate,
// then those of up if there are two weights, and then GeGLU of them is what is stored, by `map`. Every lane of the warp
// calls it. `staging` is the warp's own, and the copy engine may read it after the call: room for all parts if `whole`,
// kPitch bytes apart, else for one.
template <typename T, bool kTanh, int kWeights, int kCols, int kPitch>
__device__ __forceinline__ void store_tile(float (&sums)[kWeights * kCols / 2], char* staging, bool whole,
                                           const Destination& to, const CUtensorMap* map, int row, int column) {
  using Stage = Staging<T, kWeights, kCols>;
  constexpr int kUp = kCols / 2;  // from a sum of gate to that of up
  constexpr int kPartCols = Stage::kBoxes * Stage::kBoxCols;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
    add_bias<T, kCols / 8>(sums + w * kUp, to.bias[w], column, to.cols);
  }
#pragma unroll
  for (int part = 0; part < Stage::kParts; ++part) {
    char* const boxes = staging + (whole ? part * kPitch : 0);
    if (!whole) {
      wait_stores_read<0>();
      __syncwarp();
    }
    const uint32_t address = shared_address(boxes);
    const auto stage = [&](auto groups, int col) {
      stage_results<T, kTanh, kWeights, Stage, decltype(groups)::value>(
          &sums[(part * kPartCols + col) / 2], kUp, address + col / Stage::kBoxCols * Stage::kBoxBytes,
          col % Stage::kBoxCols);
    };
#pragma unroll
    for (int col = 0; col + 16 <= kPartCols; col += 16) stage(std::integral_constant<int, 2>(), col);
    if constexpr (kPartCols % 16 != 0) stage(std::integral_constant<int, 1>(), kPartCols - 8);
    // One fence for all: it takes longer than the results of a box.
    fence_for_copy_engine();
    __syncwarp();
    const int first = column + part * kPartCols;
    if (to.aligned) {
      if (lane < Stage::kBoxes) {
        store_box(map, boxes + lane * Stage::kBoxBytes, first + lane * Stage::kBoxCols, row);
        commit_stores();
      }
    } else {
      for (int box = 0; box < Stage::kBoxes; ++box) {
        copy_box<T, Stage>(to, boxes + box * Stage::kBoxBytes, row, first + box * Stage::kBoxCols);
      }
      __syncwarp();
    }
  }
}

}  // namespace geglu::cuda::sm90
