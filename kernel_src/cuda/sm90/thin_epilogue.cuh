// The kernel for few rows (thin_gemm.cuh), from sums in registers to the result in global memory: of gate and up each
// warp for itself, of one weight by way of the other blocks of the cluster.
#pragma once

#include <cstdint>

#include "cuda/dtype.cuh"
#include "cuda/math.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/thin_arguments.cuh"

namespace geglu::cuda::sm90 {

// Of one weight: the sums that a block is sent for a consumer's columns. Those of 8 columns, a group, go to one block:
// group g is owned by rank g % split, as its g / split-th. What a thread has of 16 rows of x and a column, a quad, are
// the sums of two neighbouring rows and of the two 8 further on. They lie together, so that a warp's quads of a group
// are 512 neighbouring bytes.
struct ThinShare {
  static constexpr int kGroupCols = 8;
  int32_t all_groups;
  int32_t groups;  // of each rank, at most
  int32_t quads;   // a multiple of a warp's 4
  int32_t split;

  __host__ __device__ constexpr ThinShare(int rows, int cols, int ranks)
      : all_groups(cols / kGroupCols),
        groups((all_groups + ranks - 1) / ranks),
        quads((rows + 15) / 16 * 4),
        split(ranks) {}
  // A quad's place among those from all ranks; the column is one of the group's.
  __host__ __device__ constexpr int place(int from, int group, int quad, int col) const {
    return ((from * groups + group) * quads + quad) * kGroupCols + col;
  }
  // A quad's first row; the others are that + 1, + 8 and + 9.
  __host__ __device__ static constexpr int row(int quad) { return quad / 4 * 16 + quad % 4 * 2; }
  __host__ __device__ constexpr int bytes() const { return place(split, 0, 0, 0) * static_cast<int>(sizeof(float4)); }
  // What a block is sent: its groups, by all ranks.
  __device__ __forceinline__ int bytes_sent(int rank) const {
    const int owned = (all_groups - rank + split - 1) / split;
    return split * owned * quads * kGroupCols * static_cast<int>(sizeof(float4));
  }
};

// GeGLU of a warp's sums, of which the first `cols` columns count, the first of them `col` of the result: bias, result
// in shared memory, which turns rows of columns into rows of x, and result in global memory. `staging` is the warp's
// own.
template <class Config, bool kTanh>
__device__ __forceinline__ void store_gated(const ThinGemmArguments& arguments, int col, int cols,
                                            float (&sums)[2][Config::kBatch / 2], char* staging) {
  using T = typename Config::Type;
  constexpr int kPiece = 8;  // columns that are stored together
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const T* const bias = static_cast<const T*>(arguments.bias[w]);
    if (bias == nullptr) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = col + half * 8 + lane / 4;
      const float value = at < arguments.cols ? static_cast<float>(bias[at]) : 0.0f;
#pragma unroll
      for (int i = half * 2; i < Config::kBatch / 2; i += 4) {
        sums[w][i] += value;
        sums[w][i + 1] += value;
      }
    }
  }
  T* const out = static_cast<T*>(arguments.out) + col;
  const auto result = [&](int row, int piece) { return staging + row * Config::kResultPitch + piece * 16; };
  const int left = min(cols, arguments.cols - col);
#pragma unroll
  for (int i = 0; i < Config::kBatch / 2; i += 8) {  // 16 rows of x
    float results[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) results[k] = sums[0][i + k];
    FastGelu<kTanh>::apply(results);
    uint32_t matrices[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      pack_pair(results[2 * k] * sums[1][i + 2 * k], results[2 * k + 1] * sums[1][i + 2 * k + 1],
                reinterpret_cast<T*>(&matrices[k]));
    }
    __syncwarp();
    store_matrices_transposed(
        shared_address(staging) + (lane / 16 * 8 + lane % 8) * Config::kResultPitch + lane / 8 % 2 * 16, matrices);
    __syncwarp();
    // The tile's columns and the results' both end with a whole piece, or rows of the results are not aligned to one.
    const int first_row = i * 2;
    if (arguments.cols % kPiece == 0) {
      const int piece = lane % 2;
      const int row = first_row + lane / 2;
      if (piece * kPiece < left && row < arguments.rows) {
        *reinterpret_cast<uint4*>(out + int64_t{row} * arguments.cols + piece * kPiece) =
            *reinterpret_cast<const uint4*>(result(lane / 2, piece));
      }
    } else if (lane % 16 < left) {
      for (int row = lane / 16; row < min(16, arguments.rows - first_row); row += 2) {
        out[int64_t{first_row + row} * arguments.cols + lane % 16] =
            reinterpret_cast<const T*>(result(row, 0))[lane % 16];
      }
    }
  }
}

// Sends a warp's sums, 16 columns from `column` of the consumer's on, to those blocks of the cluster that own them.
template <class Config>
__device__ __forceinline__ void send_sums(const ThinGemmArguments& arguments, const ThinShare& share, int rank,
                                          int column, const float (&sums)[Config::kBatch / 2], float4* received,
                                          uint64_t* barrier) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = column / ThinShare::kGroupCols + half;
    if (group >= share.all_groups) return;  // sums of whatever lay behind the consumer's columns
    const float4* const place = received + share.place(rank, group / share.split, lane % 4, lane / 4);
    const uint32_t target = address_in_block(place, group % share.split);
    const uint32_t target_barrier = address_in_block(barrier, group % share.split);
#pragma unroll
    for (int i = 0; i < Config::kBatch / 2; i += 8) {
      if (i * 2 < arguments.rows) {
        const int at = i + half * 2;
        store_in_cluster(target + i / 2 * ThinShare::kGroupCols * sizeof(float4),
                         {sums[at], sums[at + 1], sums[at + 4], sums[at + 5]}, target_barrier);
      }
    }
  }
}

// The columns of a consumer's that the calling block owns: sums of all ranks, bias, result. All threads of the consumer
// call it.
template <class Config>
__device__ __forceinline__ void store_share(const ThinGemmArguments& arguments, const ThinShare& share, int rank,
                                            int first_col, const float4* received) {
  using T = typename Config::Type;
  constexpr int kPieces = ThinShare::kGroupCols / 2;  // of a group and a quad: two columns of four rows
  const T* const bias = static_cast<const T*>(arguments.bias[0]);
  for (int i = threadIdx.x % kWarpgroup; i < share.groups * share.quads * kPieces; i += kWarpgroup) {
    const int group = i / (share.quads * kPieces);
    const int quad = i / kPieces - group * share.quads;
    const int piece_col = i % kPieces * 2;
    const int column = (group * share.split + rank) * ThinShare::kGroupCols + piece_col;
    const int row = ThinShare::row(quad);
    const int col = first_col + column;
    if (column >= share.all_groups * ThinShare::kGroupCols || row >= arguments.rows || col >= arguments.cols) continue;
    float4 sums[kMaxThinSplit][2];  // all loads under way at once
#pragma unroll
    for (int from = 0; from < kMaxThinSplit; ++from) {
      if (from < share.split) {
        const float4* const place = received + share.place(from, group, quad, piece_col);
        sums[from][0] = place[0];
        sums[from][1] = place[1];
      }
    }
    float total[4][2] = {};  // row, column
#pragma unroll
    for (int from = 0; from < kMaxThinSplit; ++from) {
      if (from < share.split) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          total[0][c] += sums[from][c].x;
          total[1][c] += sums[from][c].y;
          total[2][c] += sums[from][c].z;
          total[3][c] += sums[from][c].w;
        }
      }
    }
    const bool has_second = col + 1 < arguments.cols;
    const float first_bias = bias != nullptr ? static_cast<float>(bias[col]) : 0.0f;
    const float second_bias = bias != nullptr && has_second ? static_cast<float>(bias[col + 1]) : 0.0f;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int at = row + r % 2 + r / 2 * 8;
      if (at >= arguments.rows) continue;
      const float values[2] = {total[r][0] + first_bias, total[r][1] + second_bias};
      const Packet<T, 2> packet = pack<T, 2>(values);
      T* const target = static_cast<T*>(arguments.out) + int64_t{at} * arguments.cols + col;
      if (arguments.cols % 2 == 0) {  // then pairs of columns are aligned
        *reinterpret_cast<Packet<T, 2>*>(target) = packet;
      } else {
        target[0] = packet.values[0];
        if (has_second) target[1] = packet.values[1];
      }
    }
  }
}

}  // namespace geglu::cuda::sm90
