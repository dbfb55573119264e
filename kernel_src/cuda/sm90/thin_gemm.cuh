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
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/swizzle.cuh"
#include "cuda/sm90/thin_arguments.cuh"
#include "cuda/sm90/thin_epilogue.cuh"
#include "cuda/sm90/thin_gemm_config.h"
#include "cuda/sm90/wgmma.cuh"

namespace geglu::cuda::sm90 {

constexpr int kMaxThinStages = 24;
constexpr int kMaxThinConsumers = 3;
// Steps of the depth whose weights a block has prefetched into L2 while earlier kernels still run, and steps before its
// last at which the next kernel may begin: found by scans (docs/measured.md).
constexpr int kPrefetchedSteps = 2;
constexpr int kStepsToGo = 4;
// Steps of the depth at its end whose weights come a consumer at a time, not a tile at a time; by a scan too.
constexpr int kStepsApart = 4;

// In front of the ring, and of sums received, which lie between.
struct alignas(sizeof(float4)) ThinBarriers {
  uint64_t full[kMaxThinStages];  // x and the weights; of steps apart the first consumer's alone
  uint64_t empty[kMaxThinStages];
  uint64_t full_apart[kMaxThinConsumers - 1][kStepsApart];  // the others', each for one step
  uint64_t received[kMaxThinConsumers];                     // all sums of the block's share of each consumer's columns
};
constexpr int kThinAlignment = 1024;  // of the ring: the swizzle needs that
static_assert(sizeof(ThinBarriers) <= kThinAlignment);

// A block's place: its tile's first column, and its steps of the depth.
struct ThinPlace {
  int32_t first_col;
  int32_t first_step;
  int32_t steps;
  int32_t steps_ahead;  // whose weights fill the ring before the wait for earlier kernels
  int32_t first_apart;  // of the last steps, whose weights come a consumer at a time

  __device__ __forceinline__ ThinPlace(const ThinGemmArguments& arguments, int tile, int rank)
      : first_col(tile * arguments.tile_cols),
        first_step(rank * arguments.steps + min(rank, arguments.more_steps)),
        steps(arguments.steps + (rank < arguments.more_steps)),
        steps_ahead(arguments.weights_are_old ? min(arguments.stages, steps) : 0),
        // Not all stages at once: a consumer releases a step's when the next step's weights are there.
        first_apart(max(steps - min(kStepsApart, arguments.stages - 1), steps_ahead)) {}
};

// The barrier of another consumer's weights of a step apart; not of the first one's.
__device__ __forceinline__ uint64_t* full_apart(ThinBarriers& barriers, const ThinPlace& place, int consumer,
                                                int step) {
  return &barriers.full_apart[consumer - 1][step - place.first_apart];
}

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
      for (int w = 0; w < Config::kWeights; ++w) prefetch_box(&arguments_.weight[w], column(step), place_.first_col);
    }
  }

  // Old weights fill the ring while the kernel that makes x still runs.
  __device__ __forceinline__ void load_old_weights() const {
    for (int step = 0; step < place_.steps_ahead; ++step) load_weights(step, step);
  }

  __device__ __forceinline__ void load_the_rest() const {
    const int begin = max(place_.steps - kStepsToGo, 0);
    ThinStage stage(arguments_.stages);
    ThinStage first_apart = stage;
    for (int step = 0; step < place_.steps; ++step, stage.advance()) {
      // Blocks of the next kernel that come early crowd on the multiprocessors that have none of this one's.
      if (step == begin) let_next_kernel_begin();
      if (step == place_.first_apart) first_apart = stage;
      uint64_t* const full = &barriers_.full[stage.index()];
      if (step >= place_.steps_ahead) {
        mbarrier_wait(&barriers_.empty[stage.index()], stage.parity() ^ 1);
        if (step < place_.first_apart) {
          load_weights(stage.index(), step);
        } else {
          load_weights_of(0, stage.index(), step, full);
        }
      }
      load_box(at(stage.index()), &arguments_.x, full, column(step), 0);
    }
    // Then the first consumer makes its results while the others' weights come.
    for (int consumer = 1; consumer < Config::kConsumers; ++consumer) {
      stage = first_apart;
      for (int step = place_.first_apart; step < place_.steps; ++step, stage.advance()) {
        load_weights_of(consumer, stage.index(), step, full_apart(barriers_, place_, consumer, step));
      }
    }
  }

 private:
  __device__ __forceinline__ char* at(int stage) const {
    return ring_ + stage * Config::stage_bytes(arguments_.tile_cols);
  }
  __device__ __forceinline__ int column(int step) const { return (place_.first_step + step) * kTileDepth; }

  // The tile's, and room for x with them.
  __device__ __forceinline__ void load_weights(int stage, int step) const {
    const int bytes = arguments_.tile_cols * Config::kRowBytes;
    uint64_t* const full = &barriers_.full[stage];
    mbarrier_arrive_expect_bytes(full, x_bytes() + Config::kWeights * bytes);
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) {
      load_box_by_policy(at(stage) + Config::kXBytes + w * bytes, &arguments_.weight[w], full, column(step),
                         place_.first_col, weights_policy_);
    }
  }

  // A consumer's, and room for x with the first one's.
  __device__ __forceinline__ void load_weights_of(int consumer, int stage, int step, uint64_t* full) const {
    const int bytes = Config::consumer_cols(arguments_.tile_cols, consumer) * Config::kRowBytes;
    mbarrier_arrive_expect_bytes(full, (consumer == 0 ? x_bytes() : 0) + Config::kWeights * bytes);
    if (bytes == 0) return;
    const int first = consumer * kThinConsumerCols;
    const bool is_last = consumer == Config::kConsumers - 1;
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) {
      load_box_by_policy(at(stage) + Config::kXBytes + (w * arguments_.tile_cols + first) * Config::kRowBytes,
                         is_last ? &arguments_.last_part[w] : &arguments_.part[w], full, column(step),
                         place_.first_col + first, weights_policy_);
    }
  }

  __device__ __forceinline__ int x_bytes() const { return arguments_.box_rows * Config::kRowBytes; }

  const ThinGemmArguments& arguments_;
  const ThinPlace& place_;
  char* ring_;
  ThinBarriers& barriers_;
  const uint64_t weights_policy_ = evict_first_policy();  // read once, unlike x, which every block reads
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
    if (consumer > 0 && step >= place.first_apart) mbarrier_wait(full_apart(barriers, place, consumer, step), 0);
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

template <class Config, bool kTanh>
__global__ void __launch_bounds__(Config::kThreads, 1)
    thin_gemm_kernel(const __grid_constant__ ThinGemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kIsPlain = Config::kWeights == 1;
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
  if (lane == 0 && warp > 0 && warp < Config::kConsumers) {
#pragma unroll
    for (int step = 0; step < kStepsApart; ++step) mbarrier_init(&barriers.full_apart[warp - 1][step], 1);
    fence_mbarrier_init();
  }
  const auto share_of = [&](int consumer) {
    return ThinShare(arguments.rows, Config::consumer_cols(arguments.tile_cols, consumer), cluster_size());
  };
  if (kIsPlain && threadIdx.x == 0) {
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c) mbarrier_init(&barriers.received[c], 1);
    fence_mbarrier_init();
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c) {
      mbarrier_arrive_expect_bytes(&barriers.received[c], share_of(c).bytes_sent(rank));
    }
  }
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&arguments.x);
#pragma unroll
    for (int w = 0; w < Config::kWeights; ++w) {
      prefetch_tensor_map(&arguments.weight[w]);
      prefetch_tensor_map(&arguments.part[w]);
      prefetch_tensor_map(&arguments.last_part[w]);
    }
  }
  __syncthreads();
  if (kIsPlain) cluster_arrive();  // no block may be sent anything before it is here

  if (is_producer) producer.load_old_weights();
  __syncwarp();
  wait_for_earlier_kernels();  // which may have read what this one writes
  if (is_producer) producer.load_the_rest();
  __syncwarp();
  if (kIsPlain && !is_consumer) cluster_wait();
  if (is_consumer) {
    const int consumer = warp / 4;
    const int first_col = place.first_col + consumer * kThinConsumerCols;
    const int column = warp % 4 * Config::kWarpCols;  // of the consumer's
    float sums[Config::kWeights][Config::kBatch / 2];
    sum_up<Config>(arguments, place, ring, barriers, consumer, sums);
    if constexpr (kIsPlain) {
      // Not before the sums: compute-sanitizer has those who wait meet the producer, which waits for them.
      cluster_wait();
      const ThinShare share = share_of(consumer);
      // The first consumer's share is the largest.
      float4* const received =
          reinterpret_cast<float4*>(memory + sizeof(ThinBarriers) + consumer * share_of(0).bytes());
      send_sums<Config>(arguments, share, rank, column, sums[0], received, &barriers.received[consumer]);
      mbarrier_wait_for_cluster(&barriers.received[consumer], 0);
      store_share<Config>(arguments, share, rank, first_col, received);
    } else {
      const int cols = Config::consumer_cols(arguments.tile_cols, consumer) - column;
      // The last step's weights, which nothing comes after, and all of the consumer have read.
      const int last = (place.steps - 1) % arguments.stages;
      char* const read = ring + last * Config::stage_bytes(arguments.tile_cols) + Config::kXBytes;
      named_barrier_sync(1 + consumer, kWarpgroup);
      if (cols > 0) {
        store_gated<Config, kTanh>(arguments, first_col + column, cols, sums,
                                   read + (consumer * kThinConsumerCols + column) * Config::kRowBytes);
      }
    }
  }
#endif
}

}  // namespace geglu::cuda::sm90
