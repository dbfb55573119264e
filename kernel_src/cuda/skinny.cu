// Products of up to 16 rows with large weights: the time is that of reading the weights once, so everything serves to
// keep their loads in flight.
//
// A weight's rows are the 16-row side of the tensor cores' m16n8k16, the rows of x its 8-column side, so that one row
// of x wastes 7 columns of cheap arithmetic instead of 15 rows of memory traffic. A block takes 16 rows of each weight;
// its warps split the depth. Sums do not depend on the order of k, so a lane may load 16 neighbouring bytes of a row
// and use them as the k of two instructions, if it does the same with x: no shared memory on the way, and no shuffles.
// The warps' sums meet in shared memory, in a fixed order. Layout of the fragments: PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type".
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/dependent_launch.cuh"
#include "cuda/math.cuh"
#include "cuda/skinny.h"

namespace geglu::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;  // of a block, where two share a multiprocessor
// Of a block that has a multiprocessor to itself, for there are no more blocks than that: of one narrow weight.
constexpr int kManyWarps = 16;
constexpr int kTileRows = 16;  // of a weight
constexpr int kTileCols = 8;   // rows of x
constexpr int kChunk = 32;     // k of one round: 8 of each of a row's four lanes

// Rounds whose loads are in flight together: as many bytes of one weight as of two.
template <int kWeights>
constexpr int kRoundsOf = 6 / kWeights;

template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
}

// 16 bytes of a weight, which no kernel writes while this one runs: by the read-only path, and not kept in L1. Memory
// is asked for 128 bytes at a time, of which the lanes of a row take 64 in one round and the rest in the next.
__device__ __forceinline__ uint4 load_weight(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

template <typename T>
struct Skinny {
  const T* x;
  const T* weight[2];
  const T* bias[2];
  T* out;
  int64_t cols;
  int64_t x_pitch;
  int64_t pitch[2];
  int32_t rows;
  int32_t depth;
  bool weights_are_old;
};

// kWeights: 2 for gate and up, 1 for a plain product. kTiles: tiles of 8 rows of x. kSkinnyWarps: warps of a block.
template <typename T, int kWeights, int kTiles, bool kTanh, int kSkinnyWarps>
__global__ void __launch_bounds__(kSkinnyWarps* kLanes, 2 * kWarps / kSkinnyWarps)
    skinny_kernel(const __grid_constant__ Skinny<T> problem) {
  constexpr int kRounds = kRoundsOf<kWeights>;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int group = lane / 4;      // row of the tile, and that + 8; row of x
  const int piece = lane % 4 * 8;  // first k of this lane in a chunk
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  if (!problem.weights_are_old) wait_for_earlier_kernels();

  // Rows past the end are read as the last one, and not stored.
  const T* source[kWeights][2];
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = min(first_row + group + half * 8, problem.cols - 1);
      source[w][half] = problem.weight[w] + row * problem.pitch[w];
    }
  }
  const uint4 zero = make_uint4(0, 0, 0, 0);
  constexpr int kStep = kSkinnyWarps * kRounds * kChunk;

  // Weights of kRounds rounds are in flight: what a round has used, it asks for again, kStep further on.
  uint4 weights[kRounds][kWeights][2];
  const auto fetch = [&](int round, int at) {
#pragma unroll
    for (int w = 0; w < kWeights; ++w) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights[round][w][half] = at < problem.depth ? load_weight(source[w][half] + at) : zero;
      }
    }
  };
  const auto read_x = [&](uint4(&into)[kTiles], int at) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = tile * kTileCols + group;
      const bool valid = row < problem.rows && at < problem.depth;
      into[tile] = valid ? *reinterpret_cast<const uint4*>(problem.x + row * problem.x_pitch + at) : zero;
    }
  };

  int at = warp * kRounds * kChunk + piece;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) fetch(round, at + round * kChunk);
  if (problem.weights_are_old) wait_for_earlier_kernels();  // x may be their result
  let_next_kernel_begin();

  float sums[kWeights][kTiles][4] = {};
  uint4 next[kTiles];
  read_x(next, at);
  for (; at - piece < problem.depth; at += kStep) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      uint4 in[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) in[tile] = next[tile];
      read_x(next, round + 1 < kRounds ? at + (round + 1) * kChunk : at + kStep);
#pragma unroll
      for (int w = 0; w < kWeights; ++w) {
        const uint4 upper = weights[round][w][0];
        const uint4 lower = weights[round][w][1];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add<T>(sums[w][tile], upper.x, lower.x, upper.y, lower.y, in[tile].x, in[tile].y);
          multiply_add<T>(sums[w][tile], upper.z, lower.z, upper.w, lower.w, in[tile].z, in[tile].w);
        }
      }
      fetch(round, at + kStep + round * kChunk);
    }
  }

  // [weight][tile][column of the tile][row of the tile], padded so that neighbouring columns lie in different banks
  __shared__ float shared[kSkinnyWarps][kWeights][kTiles][kTileCols][kTileRows + 1];
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared[warp][w][tile][lane % 4 * 2 + i % 2][group + i / 2 * 8] = sums[w][tile][i];
      }
    }
  }
  __syncthreads();
  for (int place = threadIdx.x; place < kTiles * kTileCols * kTileRows; place += kSkinnyWarps * kLanes) {
    const int row = place % kTileRows;
    const int column = place / kTileRows;
    const int64_t col = first_row + row;
    if (column >= problem.rows || col >= problem.cols) continue;
    float total[kWeights] = {};
#pragma unroll
    for (int w = 0; w < kWeights; ++w) {
#pragma unroll
      for (int from = 0; from < kSkinnyWarps; ++from) {
        total[w] += shared[from][w][column / kTileCols][column % kTileCols][row];
      }
      if (problem.bias[w] != nullptr) total[w] += static_cast<float>(problem.bias[w][col]);
    }
    float result = total[0];
    if constexpr (kWeights == 2) result = FastGelu<kTanh>::value(total[0]) * total[1];
    problem.out[column * problem.cols + col] = static_cast<T>(result);
  }
}

template <typename T, int kWeights, int kTiles, bool kTanh, int kSkinnyWarps = kWarps>
cudaError_t launch_tiles(const GatedProblem& problem, cudaStream_t stream) {
  const Skinny<T> skinny{static_cast<const T*>(problem.x),
                         {static_cast<const T*>(problem.gate), static_cast<const T*>(problem.up)},
                         {static_cast<const T*>(problem.gate_bias), static_cast<const T*>(problem.up_bias)},
                         static_cast<T*>(problem.out),
                         problem.cols,
                         problem.x_pitch,
                         {problem.gate_pitch, problem.up_pitch},
                         static_cast<int32_t>(problem.rows),
                         static_cast<int32_t>(problem.depth),
                         problem.weights_are_old};
  const auto blocks = static_cast<unsigned>((problem.cols + kTileRows - 1) / kTileRows);
  return launch_dependent(skinny_kernel<T, kWeights, kTiles, kTanh, kSkinnyWarps>, blocks, kSkinnyWarps * kLanes,
                          stream, skinny);
}

template <typename T>
cudaError_t launch_typed(const GatedProblem& problem, cudaStream_t stream) {
  const bool small = problem.rows <= kTileCols;
  if (problem.up == nullptr) {
    int multiprocessors = 0;
    const cudaError_t status = current_device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors);
    if (status != cudaSuccess) return status;
    if (problem.cols <= int64_t{kTileRows} * multiprocessors) {
      return small ? launch_tiles<T, 1, 1, false, kManyWarps>(problem, stream)
                   : launch_tiles<T, 1, 2, false, kManyWarps>(problem, stream);
    }
    return small ? launch_tiles<T, 1, 1, false>(problem, stream) : launch_tiles<T, 1, 2, false>(problem, stream);
  }
  if (problem.tanh) {
    return small ? launch_tiles<T, 2, 1, true>(problem, stream) : launch_tiles<T, 2, 2, true>(problem, stream);
  }
  return small ? launch_tiles<T, 2, 1, false>(problem, stream) : launch_tiles<T, 2, 2, false>(problem, stream);
}

}  // namespace

bool skinny_fits(const GatedProblem& problem, int device) {
  const int64_t weight = problem.cols * problem.depth;
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return false;
  // The larger the weight, the fewer rows of x are worth their time here: then sm90/thin_gemm is faster.
  const int64_t most_rows = weight <= kSmallWeight ? kSkinnyRows : weight <= kLargeWeight ? kTileCols : kTileCols / 2;
  if (problem.rows > most_rows) return false;
  // One weight as large as that cuBLAS reads as fast, and has more blocks to read with.
  if (problem.up == nullptr && weight > kHugeWeight) return false;
  if (problem.depth > (int64_t{1} << 30)) return false;
  uint64_t bits = reinterpret_cast<uint64_t>(problem.x) | reinterpret_cast<uint64_t>(problem.gate) |
                  reinterpret_cast<uint64_t>(problem.up);
  bits |= static_cast<uint64_t>((problem.x_pitch | problem.gate_pitch | problem.up_pitch | problem.depth) * 2);
  int major = 0;
  return bits % 16 == 0 && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

cudaError_t launch_skinny(const GatedProblem& problem, cudaStream_t stream) {
  return problem.dtype == DType::kBFloat16 ? launch_typed<__nv_bfloat16>(problem, stream)
                                           : launch_typed<__half>(problem, stream);
}

}  // namespace geglu::cuda
