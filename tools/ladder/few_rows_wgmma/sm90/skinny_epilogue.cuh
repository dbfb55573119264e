// The epilogue of the skinny kernel: bias, GELU, gate times up, the one rounding, and the way to global memory. No
// torch.
#pragma once

#include <cstdint>

#include "common/linear.h"
#include "cuda/dtype.cuh"
#include "cuda/math.cuh"
#include "sm90/ptx.cuh"
#include "sm90/skinny_layout.cuh"

namespace geglu::sm90 {

__device__ __forceinline__ float apply(Activation activation, float x) {
  if (activation == Activation::kTanh) return cuda::FastGelu<true>::value(x);
  return activation == Activation::kExact ? cuda::FastGelu<false>::value(x) : x;
}

template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, int row, int rows) {
  return bias != nullptr && row < rows ? static_cast<float>(static_cast<const T*>(bias)[row]) : 0.0f;
}

template <typename T>
__device__ __forceinline__ uint32_t pack_bits(float first, float second) {
  uint32_t bits;
  cuda::pack_pair(first, second, reinterpret_cast<T*>(&bits));
  return bits;
}

// Writes a warpgroup's 64 x kN values to out[batch, row]: transposed through `staging`, where row b holds the 64 values
// of batch row b, its 16-byte chunks exchanged so that neither side meets bank conflicts.
template <typename T, int kN>
__device__ __forceinline__ void write_rows(const float (&values)[kN / 2], uint8_t* staging, int row0, int batch0,
                                           uint32_t barrier, const SkinnyParameters& p) {
  constexpr int kChunk = 8;  // values in 16 bytes
  constexpr int kChunks = wgmma::kRows / kChunk;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int chunk = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const int b = j * 8 + lane % 8;
    ptx::store_matrices_transposed(staging + (b * kChunks + (chunk ^ (b % 8))) * 16,
                                   pack_bits<T>(values[4 * j], values[4 * j + 1]),
                                   pack_bits<T>(values[4 * j + 2], values[4 * j + 3]));
  }
  ptx::named_barrier(barrier, 128);
  for (int i = thread; i < kN * kChunks; i += 128) {
    const int b = i / kChunks;
    const int row = row0 + i % kChunks * kChunk;
    if (batch0 + b >= p.m) break;
    const uint4 bits = *reinterpret_cast<const uint4*>(staging + (b * kChunks + (i % kChunks ^ (b % 8))) * 16);
    T* to = static_cast<T*>(p.out) + (batch0 + b) * p.out_stride + row;
    if (p.out_vectors && row + kChunk <= p.n) {
      *reinterpret_cast<uint4*>(to) = bits;
    } else {
      const T* from = reinterpret_cast<const T*>(&bits);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (row + e < p.n) to[e] = from[e];
      }
    }
  }
  ptx::named_barrier(barrier, 128);  // before the next call overwrites the staging
}

// Completes a warpgroup's part of a row tile: columns batch0 and on of the sums are rows of out.
template <typename T, bool kGated, class Tile>
__device__ __forceinline__ void finish_tile(float (&sums)[2][Tile::kOwnN / 2], uint8_t* staging, int tile, int batch0,
                                            const SkinnyParameters& p) {
  constexpr int kN = Tile::kOwnN;
  const int warpgroup = threadIdx.x / 128;
  const int offset = warpgroup * wgmma::kRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const uint32_t barrier = 1 + warpgroup;
  float bias[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (kGated ? tile : 2 * tile + half) * Tile::kHalfRows + offset;
#pragma unroll
    for (int r = 0; r < 2; ++r) bias[half][r] = bias_at<T>(p.bias[kGated ? half : 0], row + 8 * r, p.n);
  }
  if constexpr (kGated) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float gate = sums[0][i] + bias[0][i / 2 % 2];
      sums[0][i] = apply(p.activation, gate) * (sums[1][i] + bias[1][i / 2 % 2]);
    }
    write_rows<T, kN>(sums[0], staging, tile * Tile::kHalfRows + warpgroup * wgmma::kRows, batch0, barrier, p);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) sums[half][i] = apply(p.activation, sums[half][i] + bias[half][i / 2 % 2]);
      write_rows<T, kN>(sums[half], staging, (2 * tile + half) * Tile::kHalfRows + warpgroup * wgmma::kRows, batch0,
                        barrier, p);
    }
  }
}

}  // namespace geglu::sm90
