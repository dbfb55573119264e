// Products of few rows on Hopper, of one weight or of gate and up with GeGLU, where the time is that of reading the
// weights. The operands are swapped: rows of the weights are the 64-row side of the tensor cores' product, rows of x
// its side of 16, 64 or 128, so that few of them are not padded to 64.
//
// A block has a multiprocessor to itself, and there is a tile for each, as many columns as that takes. It is one
// producer warp, which has the copy engine fill a ring of stages, and two or three consumer warpgroups, which make 64
// columns each. What is in flight is the ring: it costs no registers, and is more than memory's latency asks for. Sums
// of gate and up for a result are in one thread, which needs no other one to make it. Of one weight, the depth is split
// over the blocks of a cluster: each owns some columns of the result, is sent the others' sums for them into its shared
// memory, and adds them up in the order of the ranks.
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
  int32_t ring_offset;  // of the first stage, in a block's shared memory
  int32_t steps;        // of the depth, in each block of a cluster
  int32_t more_steps;   // so many of which, the first ones, take one more
  bool weights_are_old;
};

constexpr int kMaxThinStages = 32;
// Steps of the depth whose weights a block has prefetched into L2 while earlier kernels still run, and steps before its
// last at which the next kernel may begin: found by scans (docs/measured.md).
constexpr int kPrefetchedSteps = 2;
constexpr int kStepsToGo = 4;

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

  // Of gate and up: a warp's results on their way to global memory, in the ring's place when all of it has been read.
  static constexpr int kWarpCols = 16;
  static constexpr int kResultPitch = kWarpCols * sizeof(T) + 16;  // bytes; 8 rows of 16 fall into different banks
  static constexpr int kWarpResultBytes = kBatch * kResultPitch;
  static constexpr int kResultBytes = kWeights == 2 ? kConsumers * 4 * kWarpResultBytes : 0;
};

// Of one weight: the sums that a block is sent. Those of 8 columns, a group, go to one block: group g is owned by rank
// g % split, as its g / split-th. What a thread has of 16 rows of x and a column, a quad, are the sums of two
// neighbouring rows and of the two 8 further on. They lie together, so that a warp's quads of a group are 512
// neighbouring bytes.
struct ThinShare {
  static constexpr int kGroupCols = 8;
  int32_t groups;  // of each rank, at most
  int32_t quads;   // room for, a multiple of a warp's 4
  int32_t split;

  __host__ __device__ constexpr ThinShare(int rows, int tile_cols, int ranks)
      : groups((tile_cols / kGroupCols + ranks - 1) / ranks), quads((rows + 15) / 16 * 4), split(ranks) {}
  // A quad's place among those from all ranks; the column is one of the group's.
  __host__ __device__ constexpr int place(int from, int group, int quad, int col) const {
    return ((from * groups + group) * quads + quad) * kGroupCols + col;
  }
  // A quad's first row; the others are that + 1, + 8 and + 9.
  __host__ __device__ static constexpr int row(int quad) { return quad / 4 * 16 + quad % 4 * 2; }
  __host__ __device__ constexpr int bytes() const { return place(split, 0, 0, 0) * static_cast<int>(sizeof(float4)); }
  // What send_sums() sends to a block: of its groups, the quads whose first row there is.
  __device__ __forceinline__ int bytes_sent(int rank, int rows, int tile_cols) const {
    const int owned = (tile_cols / kGroupCols - rank + split - 1) / split;
    const int sent = rows / 16 * 4 + min((rows % 16 + 1) / 2, 4);
    return split * owned * sent * kGroupCols * static_cast<int>(sizeof(float4));
  }
};

// In front of the ring, and of the sums received.
struct alignas(sizeof(float4)) ThinBarriers {
  uint64_t full[kMaxThinStages];
  uint64_t empty[kMaxThinStages];
  uint64_t received;  // all sums of the block's share
};
constexpr int kThinAlignment = 1024;  // of the ring: the swizzle needs that
static_assert(sizeof(ThinBarriers) <= kThinAlignment);

// A block's place: its tile's first column, and its steps of the depth.
struct ThinPlace {
  int32_t first_col;
  int32_t first_step;
  int32_t steps;

  __device__ __forceinline__ ThinPlace(const ThinGemmArguments& arguments, int tile, int rank)
      : first_col(tile * arguments.tile_cols),
        first_step(rank * arguments.steps + min(rank, arguments.more_steps)),
        steps(arguments.steps + (rank < arguments.more_steps)) {}
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

  // Weights that an earlier kernel may yet write come as far as L2, which is where it would write them.
  __device__ __forceinline__ void prefetch_new_weights() const {
    const int steps = arguments_.weights_are_old ? 0 : min(kPrefetchedSteps, place_.steps);
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int w = 0; w < Config::kWeights; ++w) {
        prefetch_box(&arguments_.weight[w], column(step), place_.first_col);
      }
    }
  }

  // Old weights fill the ring while the kernel that makes x still runs.
  __device__ __forceinline__ void load_old_weights() {
    ahead_ = arguments_.weights_are_old ? min(arguments_.stages, place_.steps) : 0;
    for (int step = 0; step < ahead_; ++step) load_weights(step, step);
  }

  __device__ __forceinline__ void load_the_rest() {
    const int late = max(place_.steps - kStepsToGo, 0);
    ThinStage stage(arguments_.stages);
    for (int step = 0; step < place_.steps; ++step, stage.advance()) {
      // Blocks of the next kernel that come early crowd on the multiprocessors that have none of this one's.
      if (step == late) let_next_kernel_begin();
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
      load_box_by_policy(at(stage) + Config::kXBytes + w * tile_bytes, &arguments_.weight[w], &barriers_.full[stage],
                         column(step), place_.first_col, weights_policy_);
    }
  }

  const ThinGemmArguments& arguments_;
  const ThinPlace& place_;
  char* ring_;
  ThinBarriers& barriers_;
  const uint64_t weights_policy_ = evict_first_policy();  // read once, unlike x, which every block reads
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

// Sends a warp's sums, 16 columns from `column` of the tile on, to those blocks of the cluster that own them.
template <class Config>
__device__ __forceinline__ void send_sums(const ThinGemmArguments& arguments, const ThinShare& share, int rank,
                                          int column, const float (&sums)[Config::kBatch / 2], float4* received,
                                          uint64_t* barrier) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = column / ThinShare::kGroupCols + half;
    if (group * ThinShare::kGroupCols >= arguments.tile_cols) return;  // sums of whatever lay behind the tile
    const float4* const place = received + share.place(rank, group / share.split, lane % 4, lane / 4);
    const uint32_t target = address_in_block(place, group % share.split);
    const uint32_t target_barrier = address_in_block(barrier, group % share.split);
#pragma unroll
    for (int i = 0; i < Config::kBatch / 2; i += 8) {
      if (ThinShare::row(i / 2 + lane % 4) < arguments.rows) {
        const int at = i + half * 2;
        store_in_cluster(target + i / 2 * ThinShare::kGroupCols * sizeof(float4),
                         {sums[at], sums[at + 1], sums[at + 4], sums[at + 5]}, target_barrier);
      }
    }
  }
}

// The columns of the result that the calling block owns: sums of all ranks, bias, result. All threads of the block call
// it.
template <class Config>
__device__ __forceinline__ void store_share(const ThinGemmArguments& arguments, const ThinShare& share, int rank,
                                            int first_col, const float4* received) {
  using T = typename Config::Type;
  constexpr int kPieces = ThinShare::kGroupCols / 2;  // of a group and a quad: two columns of four rows
  const T* const bias = static_cast<const T*>(arguments.bias[0]);
  for (int i = threadIdx.x; i < share.groups * share.quads * kPieces; i += Config::kThreads) {
    const int group = i / (share.quads * kPieces);
    const int quad = i / kPieces - group * share.quads;
    const int piece_col = i % kPieces * 2;
    const int column = (group * share.split + rank) * ThinShare::kGroupCols + piece_col;
    const int row = ThinShare::row(quad);
    const int col = first_col + column;
    if (column >= arguments.tile_cols || row >= arguments.rows || col >= arguments.cols) continue;
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

template <class Config, bool kTanh>
__global__ void __launch_bounds__(Config::kThreads, 1)
    thin_gemm_kernel(const __grid_constant__ ThinGemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kIsPlain = Config::kWeights == 1;
  constexpr int kRingRead = 1;  // barrier of the consumers; 0 is __syncthreads()
  char* const memory = dynamic_shared_memory();
  ThinBarriers& barriers = *reinterpret_cast<ThinBarriers*>(memory);
  char* const ring = memory + arguments.ring_offset;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees: the same in all lanes
  const int lane = threadIdx.x % 32;
  const int rank = kIsPlain ? cluster_rank() : 0;
  const ThinPlace place(arguments, kIsPlain ? cluster_id() : blockIdx.x, rank);
  const bool is_consumer = warp < Config::kConsumers * 4;
  const bool is_producer = !is_consumer && lane == 0;
  ThinProducer<Config> producer(arguments, place, ring, barriers);
  if (is_producer) producer.prefetch_new_weights();

  // By all warps: those that one warp's lanes initialise, they do one after the other.
  for (int stage = warp; stage < arguments.stages; stage += Config::kThreads / 32) {
    if (lane == 0) {
      mbarrier_init(&barriers.full[stage], 1);
      mbarrier_init(&barriers.empty[stage], Config::kConsumers * 4);
      fence_mbarrier_init();
    }
  }
  float4* const received = reinterpret_cast<float4*>(memory + sizeof(ThinBarriers));
  const ThinShare share(arguments.rows, arguments.tile_cols, kIsPlain ? cluster_size() : 1);
  if (kIsPlain && threadIdx.x == 0) {
    mbarrier_init(&barriers.received, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_bytes(&barriers.received, share.bytes_sent(rank, arguments.rows, arguments.tile_cols));
  }
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&arguments.x);
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) prefetch_tensor_map(&arguments.weight[w]);
  }
  __syncthreads();
  if (kIsPlain) cluster_arrive();  // no block may be sent anything before it is here

  if (is_producer) producer.load_old_weights();
  __syncwarp();
  wait_for_earlier_kernels();                   // which may have read what this one writes
  const int column = warp * Config::kWarpCols;  // of the tile
  float sums[Config::kWeights][Config::kBatch / 2];
  if (is_consumer) {
    sum_up<Config>(arguments, place, ring, barriers, warp / 4, sums);
  } else {
    if (is_producer) producer.load_the_rest();
    __syncwarp();
  }
  if constexpr (kIsPlain) {
    cluster_wait();
    if (is_consumer) send_sums<Config>(arguments, share, rank, column, sums[0], received, &barriers.received);
    mbarrier_wait_for_cluster(&barriers.received, 0);
    store_share<Config>(arguments, share, rank, place.first_col, received);
  } else if (is_consumer) {
    named_barrier_sync(kRingRead, Config::kSharers);
    if (column < arguments.tile_cols) {
      store_gated<Config, kTanh>(arguments, place.first_col, column, sums, ring + warp * Config::kWarpResultBytes);
    }
  }
#endif
}

}  // namespace geglu::cuda::sm90
