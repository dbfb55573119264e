// Products of many rows on Hopper, of one weight or of gate and up with GeGLU, persistent and specialised by warpgroup.
//
// A block is one producer warp, which has the copy engine fill a ring of stages, and two consumer warpgroups that take
// turns at the tiles: while one turns sums into results, the other has the tensor cores. (Of the widest tiles each
// makes half of the rows: see kTurnRows.) Gate's rows and up's rows lie one after the other in a stage, so one product
// covers both, and a thread's sum i (gate) and i + kSums / 2 (up) belong to the same element of the result.
//
//   producer                                   consumer warpgroup
//   wait empty[s] <------ every warp, of all --- release: its products from the stage are done
//   expect bytes at full[s], start copies        blocks of the cluster
//   copies complete ----> full[s] -------------> wait full[s], start products
#pragma once

#include <cuda_runtime.h>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/swizzle.cuh"
#include "cuda/sm90/tall_gemm_config.h"
#include "cuda/sm90/wgmma.cuh"

namespace geglu::cuda::sm90 {

constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kTurnBarrier = 1;  // and the next one: a consumer's turn has come. 0 is __syncthreads().

// Tile t of a cluster: bands of `band` clusters' rows, within a band column by column; or all that from the end on.
struct TileOrder {
  int32_t tiles_down;
  int32_t tiles_across;
  int32_t band;
  bool backwards;

  __device__ __forceinline__ int32_t count() const { return tiles_down * tiles_across; }
  __device__ __forceinline__ int2 at(int32_t nth) const {
    const int32_t tile = backwards ? count() - 1 - nth : nth;
    const int32_t first = tile / (band * tiles_across) * band;
    const int32_t within = tile - first * tiles_across;
    const int32_t height = min(band, tiles_down - first);
    return {within / height, first + within % height};
  }
};

struct TallGemmArguments {
  CUtensorMap x;          // (rows, depth)
  CUtensorMap weight[2];  // gate and up, (cols, depth); or one weight twice
  Destination destination;
  TileOrder order;
  int32_t tile_rows;  // at most kTileRows, a multiple of a warp's: what of a tile's rows there is
  int32_t depth_steps;
};

// The shared memory of a block. The swizzle needs tiles aligned to 1024 bytes.
template <typename T, int kWeights, int kTileCols>
struct Storage {
  static constexpr int kPartRows = kWeights * kTileCols / 2;  // of weights, that each of a cluster of two loads
  static constexpr int kXBytes = kTileRows * kTileDepth * sizeof(T);
  static constexpr int kPartBytes = kPartRows * kTileDepth * sizeof(T);
  static constexpr int kStageBytes = kXBytes + 2 * kPartBytes;
  static constexpr int kStagingWarps = kConsumers * 4;
  static constexpr int kStagingBytes = Staging<T, kTileCols>::kBytes;
  static constexpr int kBarrierBytes = 256;  // at most
  static constexpr int kStages = (kSharedLimit - kBarrierBytes - kStagingWarps * kStagingBytes) / kStageBytes;

  char x[kStages][kXBytes];
  char weights[kStages][2][kPartBytes];
  char staging[kStagingWarps][kStagingBytes];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// A place in the ring, counted over two rounds: the stage, and whether it is an odd round of it.
template <int kStages>
class RingPosition {
 public:
  __device__ __forceinline__ int stage() const { return place_ < kStages ? place_ : place_ - kStages; }
  __device__ __forceinline__ uint32_t parity() const { return place_ >= kStages; }
  __device__ __forceinline__ void advance() { place_ = place_ + 1 == 2 * kStages ? 0 : place_ + 1; }
  __device__ __forceinline__ void skip(int steps) { place_ = (place_ + steps) % (2 * kStages); }

 private:
  int place_ = 0;
};

template <typename T, int kWeights, bool kTanh, int kTileCols>
__global__ void __launch_bounds__(kThreads, 1) tall_gemm_kernel(const __grid_constant__ TallGemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = Storage<T, kWeights, kTileCols>;
  static_assert(sizeof(Shared) <= kSharedLimit, "a block's shared memory");
  constexpr bool kTurns = 2 * Shared::kPartRows <= kTurnRows;
  constexpr int kProducts = kTurns ? 2 : 1;  // of 64 rows each, that a consumer makes of a stage
  constexpr int kProductBytes = Shared::kXBytes / 2;
  static_assert(Shared::kPartRows % 8 == 0, "each weight's part of a stage is whole groups of the swizzle");
  using Ring = RingPosition<Shared::kStages>;
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared_memory());

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);  // the compiler sees: the same in all lanes
  const int lane = threadIdx.x % 32;
  const int cluster = cluster_size();
  const int rank = cluster_rank();
  const TileOrder order = arguments.order;
  const int first_tile = blockIdx.x / cluster;
  const int tile_step = gridDim.x / cluster;
  const int tile_rows = arguments.tile_rows;
  const int depth_steps = arguments.depth_steps;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&arguments.x);
    prefetch_tensor_map(&arguments.weight[0]);
    prefetch_tensor_map(&arguments.weight[1]);
    prefetch_tensor_map(&arguments.destination.map);
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], (kTurns ? 4 : 8) * cluster);
    }
    fence_mbarrier_init();
  }
  // No block may signal another one's barriers before they are initialised.
  cluster_sync();
  wait_for_earlier_kernels();
  let_next_kernel_begin();

  if (warpgroup == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      const int stage_bytes = tile_rows * kTileDepth * sizeof(T) + 2 * Shared::kPartBytes;
      Ring ring;
      for (int tile = first_tile; tile < order.count(); tile += tile_step) {
        const int2 place = order.at(tile);
        const int row = (place.y * cluster + rank) * tile_rows;
        const int weight_row = place.x * kTileCols;
        for (int step = 0; step < depth_steps; ++step, ring.advance()) {
          const int stage = ring.stage();
          const int column = step * kTileDepth;
          uint64_t* full = &shared.full[stage];
          mbarrier_wait(&shared.empty[stage], ring.parity() ^ 1);
          mbarrier_arrive_expect_bytes(full, stage_bytes);
          load_box(shared.x[stage], &arguments.x, full, column, row);
          // In a cluster of two each block loads a part of the weights, for both.
          for (int which = rank; which < 2; which += cluster) {
            const int part_row = weight_row + (kWeights == 1 ? which * Shared::kPartRows : 0);
            if (cluster == 1) {
              load_box(shared.weights[stage][which], &arguments.weight[which], full, column, part_row);
            } else {
              load_box_multicast(shared.weights[stage][which], &arguments.weight[which], full, column, part_row, 0b11);
            }
          }
        }
      }
    }
    __syncwarp();
  } else {
    take_registers<232>();
    const int consumer = warpgroup - 1;
    const int warp = threadIdx.x / 32 % 4;
    char* staging = shared.staging[consumer * 4 + warp];
    const auto release = [&](int stage) {
      if (lane < cluster) mbarrier_arrive_at(&shared.empty[stage], lane);
    };

    float sums[kProducts][Shared::kPartRows];
    const auto pin_all = [&] {
#pragma unroll
      for (int product = 0; product < kProducts; ++product) pin_registers(sums[product]);
    };
    Ring ring;
    const int turn = kTurns ? consumer : 0;
    if (turn == 1) ring.skip(depth_steps);
    for (int tile = first_tile + turn * tile_step; tile < order.count(); tile += (kTurns ? 2 : 1) * tile_step) {
      // A barrier tells only odd from even rounds: nobody may wait for a stage that is two rounds ahead.
      if (kTurns && tile != first_tile) named_barrier_sync(kTurnBarrier + consumer, kConsumers * kWarpgroup);
      int before = 0;
      for (int step = 0; step < depth_steps; ++step, ring.advance()) {
        const int stage = ring.stage();
        mbarrier_wait(&shared.full[stage], ring.parity());
        const uint64_t x = matrix_descriptor(shared_address(shared.x[stage]) + (kTurns ? 0 : consumer * kProductBytes));
        const uint64_t weights = matrix_descriptor(shared_address(shared.weights[stage]));
        pin_all();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileDepth / 16; ++k) {
#pragma unroll
          for (int product = 0; product < kProducts; ++product) {
            constexpr uint64_t kNextRows = kProductBytes >> 4;
            wgmma<T>(sums[product], x + product * kNextRows + k * kNextDepth, weights + k * kNextDepth, step + k > 0);
          }
        }
        wgmma_commit();
        if (kTurns && step == depth_steps - 1 && tile + tile_step < order.count()) {
          named_barrier_arrive(kTurnBarrier + 1 - consumer, kConsumers * kWarpgroup);
        }
        pin_all();
        // The products of the stage before are done, while those of this one run.
        if (step > 0) {
          wgmma_wait<1>();
          release(before);
        }
        before = stage;
      }
      wgmma_wait<0>();
      pin_all();
      release(before);
      if (kTurns) ring.skip(depth_steps);  // the other's tile

      // Of the rows that are not there, shared memory has something or other, and so have their sums.
      const int2 place = order.at(tile);
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        const int row = (kTurns ? product : consumer) * (kTileRows / 2) + warp * kWarpRows;
        if (row < tile_rows) {
          store_tile<T, kWeights, kTanh, kTileCols>(sums[product], staging, arguments.destination,
                                                    (place.y * cluster + rank) * tile_rows + row, place.x * kTileCols);
        }
      }
    }
    if (lane == 0) wait_stores_read<0>();
    __syncwarp();
  }
  // No block may end while another one of its cluster signals its barriers.
  cluster_sync();
#endif
}

}  // namespace geglu::cuda::sm90
