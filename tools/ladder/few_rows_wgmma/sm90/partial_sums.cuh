// Sums that several blocks hold parts of, passed through global memory. No torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/ptx.cuh"

namespace geglu::sm90 {

// A thread's part of a warpgroup's sums, two halves of 64 rows and kN columns: left for others, or added to its own.
template <int kN>
struct PartialSums {
  static constexpr int kVectors = kN / 8;  // float4 of a thread, for each half

  // partials[slot][half][vector][thread]
  static __device__ __forceinline__ float4* place(float4* partials, int64_t slot, int half) {
    return partials + (slot * 2 + half) * kVectors * 128 + threadIdx.x % 128;
  }

  template <int kFirst = 0, int kSize>
  static __device__ __forceinline__ void leave(float4* partials, int64_t slot, const float (&sums)[2][kSize]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4* to = place(partials, slot, half);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float* s = sums[half] + kFirst + 4 * i;
        __stcg(to + i * 128, make_float4(s[0], s[1], s[2], s[3]));
      }
    }
  }

  static __device__ __forceinline__ void add(float4* partials, int64_t slot, float (&sums)[2][kN / 2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4* from = place(partials, slot, half);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 v = __ldcg(from + i * 128);
        float* s = sums[half] + 4 * i;
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      }
    }
  }
};

// Two warpgroups of a cluster at the same place in blocks that multiplied different K: each keeps one half of the
// columns, adds what the other has of them and gives it the rest. `barrier` is the other's on both sides; `buffer` is
// 0 and 1 in turn, because the other may still be reading what the last exchange left.
template <int kN>
__device__ __forceinline__ void exchange_columns(float4* partials, int64_t own_slot, int64_t other_slot, bool upper,
                                                 uint64_t* barrier, uint32_t other_rank, int buffer, uint32_t named,
                                                 const float (&sums)[2][kN / 2], float (&kept)[2][kN / 4]) {
  constexpr int kKept = kN / 4;
  // Two copies of the code, because registers have no run-time index.
  if (upper) {
    PartialSums<kN / 2>::template leave<0>(partials, own_slot, sums);
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[0][i] = sums[0][i + kKept], kept[1][i] = sums[1][i + kKept];
  } else {
    PartialSums<kN / 2>::template leave<kKept>(partials, own_slot, sums);
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[0][i] = sums[0][i], kept[1][i] = sums[1][i];
  }
  ptx::named_barrier(named, 128);
  if (threadIdx.x % 128 == 0) ptx::barrier_arrive_at(barrier, other_rank);
  ptx::barrier_wait<true>(barrier, buffer);
  PartialSums<kN / 2>::add(partials, other_slot, kept);
}

}  // namespace geglu::sm90
