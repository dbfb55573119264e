// Products of few rows on Hopper, of one weight or of gate and up with GeGLU, where the time is that of reading the
// weights. The operands are swapped: rows of the weights are the 64-row side of the tensor cores' product, rows of x
// its side of 16, 64 or 128, so that few of them are not padded to 64.
//
// A block has a multiprocessor to itself, and there is a tile for each, as many columns as that takes. It is one
// producer warp, which has the copy engine fill a ring of stages, and two consumer warpgroups. What is in flight is the
// ring: it costs no registers, and is more than memory's latency asks for. Of one weight, the depth is split over the
// blocks of a cluster, which add their sums up through each other's shared memory, in the order of the ranks.
#pragma once

#include <cuda_runtime.h>

#include "cuda/dependent_launch.cuh"
#include "cuda/dtype.cuh"
#include "cuda/math.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/swizzle.cuh"
#include "cuda/sm90/thin_gemm_config.h"
#include "cuda/sm90/wgmma.cuh"

namespace geglu::cuda::sm90 {

struct ThinGemmArguments {
  CUtensorMap x;          // (rows, depth)
  CUtensorMap weight[2];  // (cols, depth) each; the second only of two
  const void* bias[2];    // (cols) each, or null
  void* out;              // (rows, cols)
  int32_t rows;
  int32_t cols;
  int32_t box_rows;   // of x, a multiple of 8
  int32_t tile_cols;  // of the result, a multiple of 8
  int32_t stages;
  int32_t depth_steps;
  bool weights_are_old;
};

constexpr int kThinSharers = kThinConsumers * kWarpgroup;  // the threads that have sums
constexpr int kThinThreads = kThinSharers + 32;
constexpr int kMaxThinStages = 32;

// What the kernel is compiled for.
template <typename T, int kWeightCount, int kProductCount, int kBatchRows>
struct Thin {
  using Type = T;
  static constexpr int kWeights = kWeightCount;    // 2 for gate and up, 1 for a plain product
  static constexpr int kProducts = kProductCount;  // of 64 rows of the weights, that a consumer makes of a stage
  static constexpr int kBatch = kBatchRows;        // room for rows of x
  static constexpr int kMaxTileCols = 64 * kThinConsumers * kProducts / kWeights;
  static constexpr int kRowBytes = kTileDepth * sizeof(T);  // of a row in a stage
  static constexpr int kXBytes = kBatch * kRowBytes;

  // A stage of the ring is x's rows and then the weights': a tile's of gate, and then those of up.
  static __host__ __device__ constexpr int weight_bytes(int tile_cols) { return kWeights * (tile_cols * kRowBytes); }
  static __host__ __device__ constexpr int stage_bytes(int tile_cols) { return kXBytes + weight_bytes(tile_cols); }

  // The distance of two rows of sums, one of x each, in shared memory. A warp's sums lie in columns that are 2 rows and
  // 1 apart; with this they fall into different banks.
  static __host__ __device__ constexpr int pitch(int tile_cols) { return kWeights * tile_cols + 4; }
};

// In front of the ring.
struct ThinBarriers {
  uint64_t full[kMaxThinStages];
  uint64_t empty[kMaxThinStages];
};
constexpr int kThinRingOffset = 1024;  // the swizzle needs stages aligned to that
static_assert(sizeof(ThinBarriers) <= kThinRingOffset);

// A block's place: its tile's first column, and its steps of the depth.
struct ThinPlace {
  int32_t first_col;
  int32_t first_step;
  int32_t steps;
};

// The stage of a step, and the parity of its round.
class ThinStage {
 public:
  __device__ __forceinline__ explicit ThinStage(int stages) : stages_(stages) {}
  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }
  __device__ __forceinline__ void advance() {
    if (++index_ == stages_) {
      index_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int stages_;
  int index_ = 0;
  uint32_t parity_ = 0;
};

// One thread's work: keeps the ring full.
template <class Config>
__device__ __forceinline__ void fill_ring(const ThinGemmArguments& arguments, const ThinPlace& place, char* ring,
                                          ThinBarriers& barriers) {
  const int tile_bytes = arguments.tile_cols * Config::kRowBytes;
  const int stage_bytes = Config::stage_bytes(arguments.tile_cols);
  const int copied_bytes = arguments.box_rows * Config::kRowBytes + stage_bytes - Config::kXBytes;
  const auto load_weights = [&](int stage, int step) {
    mbarrier_arrive_expect_bytes(&barriers.full[stage], copied_bytes);
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) {
      load_box(ring + stage * stage_bytes + Config::kXBytes + w * tile_bytes, &arguments.weight[w],
               &barriers.full[stage], (place.first_step + step) * kTileDepth, place.first_col);
    }
  };
  const auto load_x = [&](int stage, int step) {
    load_box(ring + stage * stage_bytes, &arguments.x, &barriers.full[stage], (place.first_step + step) * kTileDepth,
             0);
  };
  // Old weights fill the ring while the kernel that makes x still runs.
  const int ahead = arguments.weights_are_old ? min(arguments.stages, place.steps) : 0;
  for (int step = 0; step < ahead; ++step) load_weights(step, step);
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  ThinStage stage(arguments.stages);
  for (int step = 0; step < place.steps; ++step, stage.advance()) {
    if (step >= ahead) {
      mbarrier_wait(&barriers.empty[stage.index()], stage.parity() ^ 1);
      load_weights(stage.index(), step);
    }
    load_x(stage.index(), step);
  }
}

// A consumer's sums over the block's steps: of rows 64 * first_product on of the tile's weights.
template <class Config>
__device__ __forceinline__ void sum_up(const ThinGemmArguments& arguments, const ThinPlace& place, const char* ring,
                                       ThinBarriers& barriers, int first_product,
                                       float (&sums)[Config::kProducts][Config::kBatch / 2]) {
  using T = typename Config::Type;
  constexpr uint64_t kNextRows = 64 * Config::kRowBytes >> 4;
  const int stage_bytes = Config::stage_bytes(arguments.tile_cols);
  const auto pin_all = [&] {
#pragma unroll
    for (int p = 0; p < Config::kProducts; ++p) pin_registers(sums[p]);
  };
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers.empty[stage]);
  };
  ThinStage stage(arguments.stages);
  int before = 0;
  for (int step = 0; step < place.steps; ++step, stage.advance()) {
    mbarrier_wait(&barriers.full[stage.index()], stage.parity());
    const uint64_t x = matrix_descriptor(shared_address(ring + stage.index() * stage_bytes));
    const uint64_t weights = x + (Config::kXBytes >> 4) + first_product * kNextRows;
    pin_all();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileDepth / 16; ++k) {
#pragma unroll
      for (int p = 0; p < Config::kProducts; ++p) {
        wgmma<T>(sums[p], weights + p * kNextRows + k * kNextDepth, x + k * kNextDepth, step + k > 0);
      }
    }
    wgmma_commit();
    pin_all();
    // The products of the stage before are done, while those of this one run.
    if (step > 0) {
      wgmma_wait<1>();
      release(before);
    }
    before = stage.index();
  }
  wgmma_wait<0>();
  pin_all();
}

// Four neighbouring sums, of all blocks of the cluster.
__device__ __forceinline__ float4 sum_of_cluster(const float* sums, int split, int rank) {
  float4 total = {};
#pragma unroll 4
  for (int from = 0; from < split; ++from) {
    const float4 part = from == rank ? *reinterpret_cast<const float4*>(sums) : load_of_block(sums, from);
    total.x += part.x;
    total.y += part.y;
    total.z += part.z;
    total.w += part.w;
  }
  return total;
}

// The calling block's share of its cluster's tile: sums of all ranks, bias, GeGLU if there are two weights, result.
template <class Config, bool kTanh>
__device__ __forceinline__ void store_share(const ThinGemmArguments& arguments, int first_col, int split, int rank,
                                            const float* sums) {
  using T = typename Config::Type;
  constexpr int kPiece = 4;  // columns of a thread
  const int pitch = Config::pitch(arguments.tile_cols);
  const int pieces = arguments.tile_cols / kPiece;
  const int first = rank * kThinSharers + threadIdx.x;
  const int step = split * kThinSharers;
  const int step_rows = step / pieces;
  const int step_pieces = step % pieces;
  int row = first / pieces;
  int piece = first % pieces;
#pragma unroll 2
  while (row < arguments.rows) {
    const int column = piece * kPiece;  // of the tile
    const int col = first_col + column;
    float total[Config::kWeights][kPiece];
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) {
      const float* const source = sums + row * pitch + w * arguments.tile_cols + column;
      // The depth of two weights is not split.
      const float4 sum =
          Config::kWeights == 2 ? *reinterpret_cast<const float4*>(source) : sum_of_cluster(source, split, rank);
      total[w][0] = sum.x;
      total[w][1] = sum.y;
      total[w][2] = sum.z;
      total[w][3] = sum.w;
      const T* const bias = static_cast<const T*>(arguments.bias[w]);
      if (bias != nullptr) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          if (col + i < arguments.cols) total[w][i] += static_cast<float>(bias[col + i]);
        }
      }
    }
    if constexpr (Config::kWeights == 2) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) total[0][i] = FastGelu<kTanh>::value(total[0][i]) * total[1][i];
    }
    const Packet<T, kPiece> packet = pack<T, kPiece>(total[0]);
    T* const target = static_cast<T*>(arguments.out) + int64_t{row} * arguments.cols + col;
    if (arguments.cols % kPiece == 0) {  // then rows of the result are aligned to a packet
      if (col < arguments.cols) *reinterpret_cast<Packet<T, kPiece>*>(target) = packet;
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        if (col + i < arguments.cols) target[i] = packet.values[i];
      }
    }
    row += step_rows;
    piece += step_pieces;
    if (piece >= pieces) {
      piece -= pieces;
      ++row;
    }
  }
}

template <class Config, bool kTanh>
__global__ void __launch_bounds__(kThinThreads, 1)
    thin_gemm_kernel(const __grid_constant__ ThinGemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  char* const memory = dynamic_shared_memory();
  ThinBarriers& barriers = *reinterpret_cast<ThinBarriers*>(memory);
  char* const ring = memory + kThinRingOffset;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees: the same in all lanes
  const int split = cluster_size();
  const int rank = cluster_rank();
  const int first_step = arguments.depth_steps * rank / split;
  const ThinPlace place = {static_cast<int>(blockIdx.x) / split * arguments.tile_cols, first_step,
                           arguments.depth_steps * (rank + 1) / split - first_step};

  if (threadIdx.x < arguments.stages) {
    mbarrier_init(&barriers.full[threadIdx.x], 1);
    mbarrier_init(&barriers.empty[threadIdx.x], kThinConsumers * 4);
    fence_mbarrier_init();
  } else if (threadIdx.x == kThinSharers) {
    prefetch_tensor_map(&arguments.x);
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) prefetch_tensor_map(&arguments.weight[w]);
  }
  __syncthreads();

  const bool is_consumer = warp < kThinConsumers * 4;
  const int first_product = warp / 4 * Config::kProducts;
  float sums[Config::kProducts][Config::kBatch / 2];
  if (is_consumer) {
    wait_for_earlier_kernels();  // which may have read what this one writes
    sum_up<Config>(arguments, place, ring, barriers, first_product, sums);
  } else {
    if (threadIdx.x % 32 == 0) fill_ring<Config>(arguments, place, ring, barriers);
    __syncwarp();
  }
  __syncthreads();  // all of the ring has been read

  float* const all_sums = reinterpret_cast<float*>(ring);
  if (is_consumer) {
    // Sums of rows past the tile's are of whatever lay there.
    const int tile_weights = Config::kWeights * arguments.tile_cols;
    const int pitch = Config::pitch(arguments.tile_cols);
#pragma unroll
    for (int p = 0; p < Config::kProducts; ++p) {
      const int first = (first_product + p) * 64 + warp % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int i = 0; i < Config::kBatch / 2; ++i) {
        const int column = first + i / 2 % 2 * 8;
        const int row = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (column < tile_weights) all_sums[row * pitch + column] = sums[p][i];
      }
    }
  }
  cluster_sync();
  if (is_consumer) store_share<Config, kTanh>(arguments, place.first_col, split, rank, all_sums);
  cluster_sync();  // no block may end while another one reads its sums
#endif
}

}  // namespace geglu::cuda::sm90
