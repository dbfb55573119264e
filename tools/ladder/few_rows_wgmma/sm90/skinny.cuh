// The kernel for linear layers with few rows of input: weights stream through shared memory once, at the speed of
// memory. No torch.
//
// The operands are swapped: weight rows are the 64-row side of wgmma and the batch is the side that may be as narrow as
// 8, so nothing is padded to 64 for nothing. A block multiplies two halves of a row tile by its rows of x, with an
// accumulator for each: gate and up rows of the same features, so that GeGLU happens in registers, or two runs of rows
// of one weight. Work is dealt out by StreamK; partial sums go through global memory and are added in a fixed order.
//
// One producer warp and kWarpgroups consumer warpgroups meet at a ring of stages:
//
//   producer                                    consumers
//     wait empty[s]  <--------------------------  arrive empty[s] (of both batch tiles) once its products are done
//     expect bytes, copy weights and x  ------->  wait full[s], multiply
//
// With two batch tiles in a cluster each block copies one half of the weights to both, and its own rows of x.
#pragma once

#include <cstdint>

#include "sm90/partial_sums.cuh"
#include "sm90/ptx.cuh"
#include "sm90/skinny_epilogue.cuh"
#include "sm90/skinny_layout.cuh"
#include "sm90/skinny_producer.cuh"
#include "sm90/wgmma.cuh"

namespace geglu::sm90 {

template <typename T, bool kGated, class Tile>
struct SkinnyConsumer {
  static constexpr int kN = Tile::kN;
  static constexpr int kOwnN = Tile::kOwnN;

  uint8_t* ring;
  uint8_t* staging;  // of this warpgroup
  typename Tile::Barriers* barriers;
  const SkinnyParameters& parameters;
  int group;
  int rank;
  int warpgroup;

  __device__ __forceinline__ bool leads() const { return threadIdx.x % 128 == 0; }
  __device__ __forceinline__ uint32_t named_barrier() const { return 1 + warpgroup; }
  __device__ __forceinline__ int batch_tile() const { return rank % Tile::kBatchTiles; }
  __device__ __forceinline__ int part() const { return rank / Tile::kBatchTiles; }

  // Warpgroups of the grid, numbered.
  __device__ __forceinline__ int64_t slot(int of_group, int of_rank) const {
    return (int64_t{of_group} * Tile::kCluster + of_rank) * Tile::kWarpgroups + warpgroup;
  }

  __device__ __forceinline__ void release(int stage) const {
    uint64_t* empty = &barriers->empty[stage];
    const uint32_t thread = threadIdx.x % 128;
    if constexpr (Tile::kBatchTiles == 1) {
      if (thread == 0) ptx::barrier_arrive(empty);
    } else {
      if (thread < Tile::kBatchTiles) ptx::barrier_arrive_at(empty, part() * Tile::kBatchTiles + thread);
    }
  }

  // sums = the fragment's products
  __device__ __forceinline__ void multiply(const Fragment& fragment, RingPosition& position,
                                           float (&sums)[2][kN / 2]) const {
    int unreleased = -1;
    for (int k = fragment.k_begin; k < fragment.k_end; ++k) {
      ptx::barrier_wait<(Tile::kBatchTiles > 1)>(&barriers->full[position.stage], position.parity);
      const uint8_t* stage = ring + position.stage * Tile::kStageBytes;
      const uint8_t* rows = stage + warpgroup * (wgmma::kRows * kBlockK * 2);
      const uint64_t halves[2] = {wgmma::descriptor(rows), wgmma::descriptor(rows + Tile::kHalfBytes)};
      const uint64_t batch = wgmma::descriptor(stage + 2 * Tile::kHalfBytes);
      wgmma::begin();
#pragma unroll
      for (int step = 0; step < kBlockK / wgmma::kDepth; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          wgmma::multiply<T, kN>(sums[half], halves[half] + step * wgmma::kDepthStep, batch + step * wgmma::kDepthStep,
                                 k > fragment.k_begin || step > 0);
        }
      }
      wgmma::commit();
      wgmma::wait<1>();  // the stage before this one has been read
      if (unreleased >= 0) release(unreleased);
      unreleased = position.stage;
      position.advance(parameters.stages);
    }
    wgmma::wait<0>();
    release(unreleased);
  }

  // Leaves the sums of an incomplete tile to a later group, or completes the tile.
  __device__ __forceinline__ void combine(const Fragment& fragment, float (&sums)[2][kOwnN / 2]) const {
    const StreamK& work = parameters.work;
    uint32_t* counter = parameters.counters + slot(fragment.tile, rank);
    if (fragment.k_end < work.k_blocks) {
      PartialSums<kOwnN>::leave(parameters.partials, slot(group, rank), sums);
      ptx::named_barrier(named_barrier(), 128);
      if (leads()) ptx::add_release(counter, 1);
      return;
    }
    if (fragment.k_begin > 0) {
      const int first = work.group_of(int64_t{fragment.tile} * work.k_blocks);
      if (leads()) {
        while (ptx::load_acquire(counter) != group - first) {
        }
        *counter = 0;
      }
      ptx::named_barrier(named_barrier(), 128);
      for (int other = group - 1; other >= first; --other) {
        PartialSums<kOwnN>::add(parameters.partials, slot(other, rank), sums);
      }
    }
    finish_tile<T, kGated, Tile>(sums, staging, fragment.tile, batch_tile() * kN + part() * kOwnN, parameters);
  }

  __device__ __forceinline__ void run() const {
    FragmentWalk walk(parameters.work, group);
    Fragment fragment;
    RingPosition position;
    int buffer = 0;
    while (walk.next(&fragment)) {
      float sums[2][kN / 2];
      multiply(fragment, position, sums);
      if constexpr (Tile::kSplit == 1) {
        combine(fragment, sums);
      } else {
        float kept[2][kOwnN / 2];
        const int other = rank ^ Tile::kBatchTiles;
        float4* buffers = parameters.exchange + buffer * parameters.exchange_stride;
        exchange_columns<kN>(buffers, slot(group, rank), slot(group, other), part() == 1,
                             &barriers->exchange[warpgroup], other, buffer, named_barrier(), sums, kept);
        combine(fragment, kept);
        buffer ^= 1;
      }
    }
  }
};

template <typename T, bool kGated, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kN* Tile::kWarpgroups >= 128 ? 1 : 2)
    skinny_kernel(const __grid_constant__ CUtensorMap first_weights, const __grid_constant__ CUtensorMap second_weights,
                  const __grid_constant__ CUtensorMap x, const __grid_constant__ SkinnyParameters parameters) {
  extern __shared__ uint8_t unaligned[];
  // The same place in every block of a cluster: dynamic shared memory begins at the same address in all of them.
  uint8_t* ring = unaligned + -ptx::shared_address(unaligned) % Tile::kAlignment;
  uint8_t* staging = ring + parameters.stages * Tile::kStageBytes;
  auto* barriers = reinterpret_cast<typename Tile::Barriers*>(staging + Tile::kWarpgroups * Tile::kOutputBytes);

  // The next kernel's blocks may come as soon as all of this kernel's are on the chip: they fit beside them, or wait.
  ptx::let_next_kernel_begin();

  constexpr int kProducerWarp = Tile::kWarpgroups * 4;
  const int warp = threadIdx.x / 32;
  const bool producer = warp == kProducerWarp && threadIdx.x % 32 == 0;
  const int rank = Tile::kCluster > 1 ? ptx::cluster_rank() : 0;
  const int group = blockIdx.x / Tile::kCluster;
  if (producer) {
    ptx::prefetch_tensor_map(&first_weights);
    ptx::prefetch_tensor_map(&second_weights);
    ptx::prefetch_tensor_map(&x);
    for (int stage = 0; stage < parameters.stages; ++stage) {
      ptx::barrier_init(&barriers->full[stage], 1);
      ptx::barrier_init(&barriers->empty[stage], Tile::kWarpgroups * Tile::kBatchTiles);
    }
    for (int i = 0; i < Tile::kWarpgroups; ++i) ptx::barrier_init(&barriers->exchange[i], 1);
    ptx::fence_barrier_init();
  }
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warp == kProducerWarp) {
    if (producer) {
      const SkinnyProducer<Tile> copies{
          {&first_weights, &second_weights}, &x, ring, barriers, parameters, kGated, rank % Tile::kBatchTiles,
          rank / Tile::kBatchTiles};
      copies.run(group);
    }
    __syncwarp();
  } else {
    const int warpgroup = warp / 4;
    const SkinnyConsumer<T, kGated, Tile> products{
        ring, staging + warpgroup * Tile::kOutputBytes, barriers, parameters, group, rank, warpgroup};
    products.run();
  }
  // A block must not end while another may still copy to it or arrive at its barriers.
  if constexpr (Tile::kCluster > 1) ptx::cluster_sync();
}

}  // namespace geglu::sm90
