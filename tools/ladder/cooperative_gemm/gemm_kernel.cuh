// The matrix product of many rows on Hopper, persistent and specialised by warpgroup.
//
// A block is one producer warp, which has the copy engine fill a ring of stages, and two consumer warpgroups of 64 rows
// of x each, which multiply from them. Gate's rows and up's rows lie one after the other in a stage, so one product
// covers both, and a thread's sum i (gate) and i + kSums / 2 (up) belong to the same element of the result.
//
//   producer                                   consumer warpgroup
//   wait empty[s] <------ every warp, of all --- release: its products from the stage are done
//   expect bytes at full[s], start copies        blocks of the cluster
//   copies complete ----> full[s] -------------> wait full[s], start products
//
// The second consumer begins kStagger stages behind the first, and so stays behind: while one turns sums into results
// the other has the tensor cores to itself.
#pragma once

#include "cuda/sm90/tall_gemm.cuh"
#include "epilogue.cuh"
#include "gemm_config.h"
#include "wgmma.cuh"

namespace geglu::cuda::sm90::cooperative {

constexpr int kStaggerBarrier = 1;  // 0 is __syncthreads()

struct GemmArguments {
  CUtensorMap x;          // (rows, depth)
  CUtensorMap weight[2];  // gate and up; the same one twice without up
  Destination destination;
  TileOrder order;
  int32_t depth_steps;
  int32_t stagger;
};

// The shared memory of a block. The swizzle needs tiles aligned to 1024 bytes.
template <typename T, int kWeightRows, int kTileCols>
struct GemmStorage {
  static constexpr int kXBytes = kTileRows * kTileDepth * sizeof(T);
  static constexpr int kWeightBytes = kWeightRows * kTileDepth * sizeof(T);
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kStagingBytes = Staging<T, kTileCols>::kBytes;
  static constexpr int kStagingWarps = kConsumers * 4;
  static constexpr int kBarrierBytes = 256;  // at most
  static constexpr int kStages = (kSharedLimit - kBarrierBytes - kStagingWarps * kStagingBytes) / kStageBytes;
  static_assert(kStages > kMaxStagger, "a stage must be free for a load while the second consumer is behind");

  char x[kStages][kXBytes];
  char weights[kStages][kWeightBytes];
  char staging[kStagingWarps][kStagingBytes];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// The stage of the ring, and how often the ring was gone round, modulo 2.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename T, class Combine, int kWeightRows>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ GemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTileCols = kWeightRows / (Combine::kGated ? 2 : 1);
  constexpr int kHalfRows = kWeightRows / 2;
  using Storage = GemmStorage<T, kWeightRows, kTileCols>;
  static_assert(sizeof(Storage) <= kSharedLimit, "a block's shared memory");
  static_assert(kHalfRows % 8 == 0, "the halves of a stage's weights are whole groups of the swizzle");
  using Ring = RingPosition<Storage::kStages>;
  Storage& storage = *reinterpret_cast<Storage*>(dynamic_shared_memory());

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);  // the compiler sees: the same in all lanes
  const int lane = threadIdx.x % 32;
  const int cluster = cluster_size();
  const int rank = cluster_rank();
  const TileOrder order = arguments.order;
  const int first_tile = blockIdx.x / cluster;
  const int tile_step = gridDim.x / cluster;
  const int depth_steps = arguments.depth_steps;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&arguments.x);
    prefetch_tensor_map(&arguments.weight[0]);
    prefetch_tensor_map(&arguments.weight[1]);
    prefetch_tensor_map(&arguments.destination.map);
    for (int stage = 0; stage < Storage::kStages; ++stage) {
      mbarrier_init(&storage.full[stage], 1);
      mbarrier_init(&storage.empty[stage], kConsumers * 4 * cluster);
    }
    fence_mbarrier_init();
  }
  // No block may signal another one's barriers before they are initialised.
  cluster_sync();
  let_next_kernel_begin();
  wait_for_earlier_kernels();

  if (warpgroup == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      Ring ring;
      for (int tile = first_tile; tile < order.count(); tile += tile_step) {
        const int2 place = order.at(tile);
        const int row = (place.y * cluster + rank) * kTileRows;
        const int weight_row = place.x * kTileCols;
        for (int step = 0; step < depth_steps; ++step, ring.advance()) {
          uint64_t* full = &storage.full[ring.stage];
          char* weights = storage.weights[ring.stage];
          const int column = step * kTileDepth;
          mbarrier_wait(&storage.empty[ring.stage], ring.parity ^ 1);
          mbarrier_arrive_expect_bytes(full, Storage::kStageBytes);
          load_box(storage.x[ring.stage], &arguments.x, full, column, row);
          // Each block of a cluster loads its share of the weights' two halves, for all of them.
          for (int half = rank; half < 2; half += cluster) {
            const int at = weight_row + (Combine::kGated ? 0 : half * kHalfRows);
            char* to = weights + half * (Storage::kWeightBytes / 2);
            if (cluster == 1) {
              load_box(to, &arguments.weight[half], full, column, at);
            } else {
              load_box_multicast(to, &arguments.weight[half], full, column, at, 0b11);
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
    char* staging = storage.staging[consumer * 4 + warp];
    const auto release = [&](int stage) {
      if (lane < cluster) mbarrier_arrive_at(&storage.empty[stage], lane);
    };

    float sums[kWeightRows / 2];
    Ring ring;
    const int stagger = min(arguments.stagger, depth_steps);
    if (consumer == 1 && stagger > 0) named_barrier_sync(kStaggerBarrier, kConsumers * kWarpgroup);
    for (int tile = first_tile; tile < order.count(); tile += tile_step) {
      for (int step = 0; step < depth_steps; ++step) {
        mbarrier_wait(&storage.full[ring.stage], ring.parity);
        const uint64_t x =
            matrix_descriptor(shared_address(storage.x[ring.stage]) + consumer * (Storage::kXBytes / kConsumers));
        const uint64_t weights = matrix_descriptor(shared_address(storage.weights[ring.stage]));
        pin_registers(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileDepth / 16; ++k) {
          wgmma<T>(sums, x + k * kNextDepth, weights + k * kNextDepth, step + k > 0);
        }
        wgmma_commit();
        pin_registers(sums);
        // The products of the stage before are done, while those of this one run.
        if (step > 0) {
          wgmma_wait<1>();
          release(ring.stage == 0 ? Storage::kStages - 1 : ring.stage - 1);
        }
        ring.advance();
        if (consumer == 0 && tile == first_tile && step == stagger - 1) {
          named_barrier_arrive(kStaggerBarrier, kConsumers * kWarpgroup);
        }
      }
      const int2 place = order.at(tile);
      wgmma_wait<0>();
      pin_registers(sums);
      release(ring.stage == 0 ? Storage::kStages - 1 : ring.stage - 1);

      const int row = (place.y * cluster + rank) * kTileRows + consumer * 64 + warp * kWarpRows;
      store_tile<T, Combine, kTileCols>(sums, staging, arguments.destination, row, place.x * kTileCols);
    }
    if (lane == 0) wait_stores_read<0>();
    __syncwarp();
  }
  // No block may end while another one of its cluster signals its barriers.
  cluster_sync();
#endif
}

}  // namespace geglu::cuda::sm90::cooperative
