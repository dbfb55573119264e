// Products of few rows on Hopper, of one weight or of gate and up with GeGLU, where the time is that of reading the
// weights. The operands are swapped: rows of the weights are the 64-row side of the tensor cores' product, rows of x
// its side of 16, 64 or 128, so that few of them are not padded to 64.
//
// A block has a multiprocessor to itself, and there is a tile for each, as many columns as that takes. It is one
// producer warp, which has the copy engine fill a ring of stages, and two or three consumer warpgroups, which make 64
// columns each. What is in flight is the ring: it costs no registers, and is more than memory's latency asks for. Sums
// of gate and up for a result are in one thread, which needs no other one to make it. Of one weight, the depth is split
// over the blocks of a cluster, which add their sums up through each other's shared memory, in the order of the ranks.
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

constexpr int kMaxThinStages = 32;  // a lane of the producer's for each

// What the kernel is compiled for.
template <typename T, int kWeightCount, int kConsumerCount, int kBatchRows>
struct Thin {
  using Type = T;
  static constexpr int kWeights = kWeightCount;             // 2 for gate and up, 1 for a plain product
  static constexpr int kConsumers = kConsumerCount;         // warpgroups
  static constexpr int kBatch = kBatchRows;                 // room for rows of x
  static constexpr int kSharers = kConsumers * kWarpgroup;  // the threads that have sums
  static constexpr int kThreads = kSharers + 32;
  static constexpr int kMaxTileCols = kThinConsumerCols * kConsumers;
  static constexpr int kRowBytes = kTileDepth * sizeof(T);  // of a row in a stage
  static constexpr int kXBytes = kBatch * kRowBytes;

  // A stage of the ring is x's rows and then the weights': a tile's of gate, and then those of up.
  static __host__ __device__ constexpr int stage_bytes(int tile_cols) {
    return kXBytes + kWeights * tile_cols * kRowBytes;
  }

  // Of one weight: the distance of two rows of sums, one of x each, in shared memory. A warp's sums lie in columns that
  // are 2 rows and 1 apart; with this they fall into different banks.
  static __host__ __device__ constexpr int pitch(int tile_cols) { return tile_cols + 4; }

  // What takes the ring's place when all of it has been read: a warp's results, or the block's sums.
  static constexpr int kWarpCols = 16;
  static constexpr int kResultPitch = kWarpCols * sizeof(T) + 16;  // bytes; 8 rows of 16 fall into different banks
  static constexpr int kWarpResultBytes = kBatch * kResultPitch;
  static __host__ __device__ constexpr int result_bytes(int tile_cols) {
    return kWeights == 2 ? kConsumers * 4 * kWarpResultBytes
                         : kBatch * pitch(tile_cols) * static_cast<int>(sizeof(float));
  }
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
class ThinProducer {
 public:
  __device__ __forceinline__ ThinProducer(const ThinGemmArguments& arguments, const ThinPlace& place, char* ring,
                                          ThinBarriers& barriers)
      : arguments_(arguments), place_(place), ring_(ring), barriers_(barriers) {}

  // Old weights fill the ring while the kernel that makes x still runs.
  __device__ __forceinline__ void load_old_weights() {
    ahead_ = arguments_.weights_are_old ? min(arguments_.stages, place_.steps) : 0;
    for (int step = 0; step < ahead_; ++step) load_weights(step, step);
  }

  __device__ __forceinline__ void load_the_rest() {
    ThinStage stage(arguments_.stages);
    for (int step = 0; step < place_.steps; ++step, stage.advance()) {
      if (step >= ahead_) {
        mbarrier_wait(&barriers_.empty[stage.index()], stage.parity() ^ 1);
        load_weights(stage.index(), step);
      }
      load_box(at(stage.index()), &arguments_.x, &barriers_.full[stage.index()], column(step), 0);
    }
  }

 private:
  __device__ __forceinline__ char* at(int stage) const {
    return ring_ + stage * Config::stage_bytes(arguments_.tile_cols);
  }
  __device__ __forceinline__ int column(int step) const { return (place_.first_step + step) * kTileDepth; }

  __device__ __forceinline__ void load_weights(int stage, int step) const {
    const int tile_bytes = arguments_.tile_cols * Config::kRowBytes;
    const int x_bytes = arguments_.box_rows * Config::kRowBytes;
    mbarrier_arrive_expect_bytes(&barriers_.full[stage], x_bytes + Config::kWeights * tile_bytes);
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) {
      load_box(at(stage) + Config::kXBytes + w * tile_bytes, &arguments_.weight[w], &barriers_.full[stage],
               column(step), place_.first_col);
    }
  }

  const ThinGemmArguments& arguments_;
  const ThinPlace& place_;
  char* ring_;
  ThinBarriers& barriers_;
  int ahead_ = 0;
};

// A consumer's sums over the block's steps: of each weight, the 64 columns of the tile that are its own.
template <class Config>
__device__ __forceinline__ void sum_up(const ThinGemmArguments& arguments, const ThinPlace& place, const char* ring,
                                       ThinBarriers& barriers, int consumer,
                                       float (&sums)[Config::kWeights][Config::kBatch / 2]) {
  using T = typename Config::Type;
  const uint64_t next_weight = arguments.tile_cols * Config::kRowBytes >> 4;
  const uint64_t first_row = Config::kXBytes + consumer * kThinConsumerCols * Config::kRowBytes >> 4;
  const int stage_bytes = Config::stage_bytes(arguments.tile_cols);
  const auto pin_all = [&] {
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) pin_registers(sums[w]);
  };
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers.empty[stage]);
  };
  ThinStage stage(arguments.stages);
  int before = 0;
  for (int step = 0; step < place.steps; ++step, stage.advance()) {
    mbarrier_wait(&barriers.full[stage.index()], stage.parity());
    const uint64_t x = matrix_descriptor(shared_address(ring + stage.index() * stage_bytes));
    const uint64_t weights = x + first_row;
    pin_all();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileDepth / 16; ++k) {
#pragma unroll
      for (int w = 0; w < Config::kWeights; ++w) {
        wgmma<T>(sums[w], weights + w * next_weight + k * kNextDepth, x + k * kNextDepth, step + k > 0);
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

// GeGLU of a warp's sums, 16 columns from `column` of the tile on: bias, result in shared memory, which turns rows of
// columns into rows of x, and result in global memory. `staging` is the warp's own.
template <class Config, bool kTanh>
__device__ __forceinline__ void store_gated(const ThinGemmArguments& arguments, int first_col, int column,
                                            float (&sums)[2][Config::kBatch / 2], char* staging) {
  using T = typename Config::Type;
  constexpr int kPiece = 8;  // columns that are stored together
  const int lane = threadIdx.x % 32;
  const int col = first_col + column;
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
    const int row = i * 2 + lane / 16 * 8 + lane % 8;
    store_matrices_transposed(shared_address(staging) + row * Config::kResultPitch + lane / 8 % 2 * 16, matrices);
  }
  __syncwarp();
  const auto result = [&](int row, int piece) { return staging + row * Config::kResultPitch + piece * 16; };
  T* const out = static_cast<T*>(arguments.out);
  // The tile's columns and the results' both end with a whole piece, or rows of the results are not aligned to one.
  const int cols = min(arguments.tile_cols - column, arguments.cols - col);
  if (arguments.cols % kPiece == 0) {
    const int piece = lane % 2;
    if (piece * kPiece >= cols) return;
    for (int row = lane / 2; row < arguments.rows; row += 16) {
      *reinterpret_cast<uint4*>(out + int64_t{row} * arguments.cols + col + piece * kPiece) =
          *reinterpret_cast<const uint4*>(result(row, piece));
    }
  } else {
    const int i = lane % 16;
    if (i >= cols) return;
    for (int row = lane / 16; row < arguments.rows; row += 2) {
      out[int64_t{row} * arguments.cols + col + i] = reinterpret_cast<const T*>(result(row, 0))[i];
    }
  }
}

// Four neighbouring sums of each of kCount places, of all blocks of the cluster.
template <int kCount>
__device__ __forceinline__ void sums_of_cluster(const float* const (&places)[kCount], int split, int rank,
                                                float4 (&totals)[kCount]) {
#pragma unroll 4
  for (int from = 0; from < split; ++from) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float4 part = from == rank ? *reinterpret_cast<const float4*>(places[i]) : load_of_block(places[i], from);
      totals[i].x += part.x;
      totals[i].y += part.y;
      totals[i].z += part.z;
      totals[i].w += part.w;
    }
  }
}

// The calling block's share of its cluster's tile: sums of all ranks, bias, result.
template <class Config>
__device__ __forceinline__ void store_share(const ThinGemmArguments& arguments, int first_col, int split, int rank,
                                            const float* sums) {
  using T = typename Config::Type;
  constexpr int kPiece = 4;     // columns of a thread
  constexpr int kTogether = 2;  // whose sums are under way together
  const int pitch = Config::pitch(arguments.tile_cols);
  const int pieces = arguments.tile_cols / kPiece;
  const int count = arguments.rows * pieces;
  const int step = split * Config::kSharers;
  const T* const bias = static_cast<const T*>(arguments.bias[0]);
  for (int first = rank * Config::kSharers + threadIdx.x; first < count; first += kTogether * step) {
    const float* places[kTogether];
    float4 totals[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = min(first + i * step, count - 1);
      places[i] = sums + at / pieces * pitch + at % pieces * kPiece;
    }
    sums_of_cluster(places, split, rank, totals);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = first + i * step;
      if (at >= count) break;
      const int col = first_col + at % pieces * kPiece;
      float total[kPiece] = {totals[i].x, totals[i].y, totals[i].z, totals[i].w};
      if (bias != nullptr) {
#pragma unroll
        for (int k = 0; k < kPiece; ++k) {
          if (col + k < arguments.cols) total[k] += static_cast<float>(bias[col + k]);
        }
      }
      const Packet<T, kPiece> packet = pack<T, kPiece>(total);
      T* const target = static_cast<T*>(arguments.out) + int64_t{at / pieces} * arguments.cols + col;
      if (arguments.cols % kPiece == 0) {  // then rows of the result are aligned to a packet
        if (col < arguments.cols) *reinterpret_cast<Packet<T, kPiece>*>(target) = packet;
      } else {
#pragma unroll
        for (int k = 0; k < kPiece; ++k) {
          if (col + k < arguments.cols) target[k] = packet.values[k];
        }
      }
    }
  }
}

// A consumer's sums to where the cluster's other blocks find them.
template <class Config>
__device__ __forceinline__ void share_sums(const ThinGemmArguments& arguments, int column,
                                           const float (&sums)[Config::kBatch / 2], float* all_sums) {
  const int pitch = Config::pitch(arguments.tile_cols);
#pragma unroll
  for (int i = 0; i < Config::kBatch / 2; ++i) {
    const int at = column + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    const int row = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    if (at < arguments.tile_cols) all_sums[row * pitch + at] = sums[i];  // others are of whatever lay there
  }
}

template <class Config, bool kTanh>
__global__ void __launch_bounds__(Config::kThreads, 1)
    thin_gemm_kernel(const __grid_constant__ ThinGemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRingRead = 1;  // barrier of the consumers; 0 is __syncthreads()
  char* const memory = dynamic_shared_memory();
  ThinBarriers& barriers = *reinterpret_cast<ThinBarriers*>(memory);
  char* const ring = memory + kThinRingOffset;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees: the same in all lanes
  const int lane = threadIdx.x % 32;
  const int split = Config::kWeights == 2 ? 1 : cluster_size();
  const int rank = Config::kWeights == 2 ? 0 : cluster_rank();
  const int first_step = arguments.depth_steps * rank / split;
  const ThinPlace place = {static_cast<int>(blockIdx.x) / split * arguments.tile_cols, first_step,
                           arguments.depth_steps * (rank + 1) / split - first_step};
  const bool is_consumer = warp < Config::kConsumers * 4;
  ThinProducer<Config> producer(arguments, place, ring, barriers);

  if (!is_consumer) {
    if (lane < arguments.stages) {
      mbarrier_init(&barriers.full[lane], 1);
      mbarrier_init(&barriers.empty[lane], Config::kConsumers * 4);
      fence_mbarrier_init();
    }
    __syncwarp();
    if (lane == 0) producer.load_old_weights();
  } else if (threadIdx.x == 0) {
    prefetch_tensor_map(&arguments.x);
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) prefetch_tensor_map(&arguments.weight[w]);
  }
  __syncthreads();

  // Earlier kernels may have read what this one writes.
  wait_for_earlier_kernels();
  const int column = warp * Config::kWarpCols;  // of the tile
  float sums[Config::kWeights][Config::kBatch / 2];
  if (is_consumer) {
    sum_up<Config>(arguments, place, ring, barriers, warp / 4, sums);
    named_barrier_sync(kRingRead, Config::kSharers);
  } else {
    if (lane == 0) {
      let_next_kernel_begin();
      producer.load_the_rest();
    }
    __syncwarp();
  }
  if constexpr (Config::kWeights == 2) {
    if (is_consumer && column < arguments.tile_cols) {
      store_gated<Config, kTanh>(arguments, place.first_col, column, sums, ring + warp * Config::kWarpResultBytes);
    }
  } else {
    float* const all_sums = reinterpret_cast<float*>(ring);
    if (is_consumer) share_sums<Config>(arguments, column, sums[0], all_sums);
    cluster_sync();
    if (is_consumer) store_share<Config>(arguments, place.first_col, split, rank, all_sums);
    cluster_sync();  // no block may end while another one reads its sums
  }
#endif
}

}  // namespace geglu::cuda::sm90
