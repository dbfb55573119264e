// Products of many rows on Hopper, of one weight or of gate and up with GeGLU, persistent and specialised by warpgroup.
//
// A block is one producer warp, which has the copy engine fill a ring of stages, and two consumer warpgroups that take
// turns at the tiles: while one turns sums into results, the other has the tensor cores. Gate's rows and up's rows lie
// one after the other in a stage, so one product covers both, and a thread's sum i (gate) and i + kSums / 2 (up) belong
// to the same element of the result.
//
//   producer                                   consumer warpgroup
//   wait empty[s] <------ every warp, of all --- release: its products from the stage are done
//   expect bytes at full[s], start copies        blocks of the cluster
//   copies complete ----> full[s] -------------> wait full[s], start products
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

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
constexpr int kLastBarrier = 3;  // all products of the block are done

// The place of a tile of a cluster's blocks.
struct Tile {
  int32_t down;  // as many tiles lie above it
  int32_t col;   // its first
};

// The order of the tiles: the narrow ones, which are the first columns of tiles, before the others, so that all
// clusters get about as many of each. Either in bands of `band` rows of tiles, within a band column by column; or that
// from the end on.
struct TileOrder {
  int32_t tiles_down;
  int32_t tiles_across;
  int32_t narrow;  // of those across
  int32_t band;
  bool backwards;

  __device__ __forceinline__ int32_t count() const { return tiles_down * tiles_across; }
  __device__ __forceinline__ int32_t narrow_count() const { return tiles_down * narrow; }
  template <int kTileCols>
  __device__ __forceinline__ Tile at(int32_t nth) const {
    const bool is_narrow = nth < narrow_count();
    const int32_t width = is_narrow ? narrow : tiles_across - narrow;
    int32_t tile = is_narrow ? nth : nth - narrow_count();
    if (backwards) tile = tiles_down * width - 1 - tile;
    const int32_t first = tile / (band * width) * band;
    const int32_t within = tile - first * width;
    const int32_t height = min(band, tiles_down - first);
    const int32_t across = within / height + (is_narrow ? 0 : narrow);
    return {first + within % height, across * kTileCols - min(across, narrow) * kNarrower};
  }
};

struct TallGemmArguments {
  CUtensorMap x;          // (rows, depth)
  CUtensorMap weight[2];  // gate and up, (cols, depth); or one weight twice
  CUtensorMap narrow[2];  // the same, in boxes of narrow tiles
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
  using Stage = Staging<T, kWeights, kTileCols>;
  static constexpr int kStagingPitch = (Stage::kPartBytes + 511) / 512 * 512;  // the swizzle of 64 bytes repeats then
  static constexpr int kStagingWarps = kConsumers * 4;
  static constexpr int kBarrierBytes = 256;  // at most
  static constexpr int kStages = (kSharedLimit - kBarrierBytes - kStagingWarps * kStagingPitch) / kStageBytes;

  char x[kStages][kXBytes];
  char weights[kStages][2 * kPartBytes];
  char staging[kStagingWarps][kStagingPitch];
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
  using Stage = typename Shared::Stage;
  constexpr int kProducts = kTileRows / kProductRows;  // that a consumer makes of a stage
  constexpr int kProductBytes = Shared::kXBytes / kProducts;
  static_assert(Shared::kPartRows % 8 == 0, "each weight's part of a stage is whole groups of the swizzle");
  using Ring = RingPosition<Shared::kStages>;
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared_memory());

  const int warp_of_block = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees: the same in all lanes
  const int warpgroup = warp_of_block / 4;
  const int lane = threadIdx.x % 32;
  const int cluster = cluster_size();
  const int rank = cluster_rank();
  const TileOrder order = arguments.order;
  const int first_tile = blockIdx.x / cluster;
  const int tile_step = gridDim.x / cluster;
  const int tile_rows = arguments.tile_rows;
  const int depth_steps = arguments.depth_steps;

  // By all warps: those that one warp's lanes initialise, they do one after the other.
  for (int stage = warp_of_block; stage < Shared::kStages; stage += kThreads / 32) {
    if (lane == 0) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], 4 * cluster);
      fence_mbarrier_init();
    }
  }
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&arguments.x);
    prefetch_tensor_map(&arguments.weight[0]);
    prefetch_tensor_map(&arguments.weight[1]);
    if (order.narrow > 0) {
      prefetch_tensor_map(&arguments.narrow[0]);
      prefetch_tensor_map(&arguments.narrow[1]);
    }
    prefetch_tensor_map(&arguments.destination.map);
    if (order.narrow > 0) prefetch_tensor_map(&arguments.destination.narrow);
  }
  // No block may signal another one's barriers before they are initialised.
  cluster_meet();
  wait_for_earlier_kernels();
  let_next_kernel_begin();

  if (warpgroup == 0) {
    give_registers<40>();
    const auto fill_ring = [&](auto blocks) {
      constexpr int kBlocks = decltype(blocks)::value;  // of the cluster
      Ring ring;
      for (int nth = first_tile; nth < order.count(); nth += tile_step) {
        const Tile tile = order.at<kTileCols>(nth);
        const int row = (tile.down * kBlocks + rank) * tile_rows;
        const bool narrow = nth < order.narrow_count();
        const CUtensorMap* const weight = narrow ? arguments.narrow : arguments.weight;
        const int part_rows = Shared::kPartRows - (narrow ? kNarrower : 0);
        const int part_bytes = part_rows * kTileDepth * sizeof(T);
        const int stage_bytes = tile_rows * kTileDepth * sizeof(T) + 2 * part_bytes;
        for (int step = 0; step < depth_steps; ++step, ring.advance()) {
          const int stage = ring.stage();
          const int column = step * kTileDepth;
          uint64_t* full = &shared.full[stage];
          const auto place = [&](int which) { return shared.weights[stage] + which * part_bytes; };
          const auto part_row = [&](int which) { return tile.col + (kWeights == 1 ? which * part_rows : 0); };
          mbarrier_wait(&shared.empty[stage], ring.parity() ^ 1);
          if (elect_lane()) {
            mbarrier_arrive_expect_bytes(full, stage_bytes);
            if constexpr (kBlocks == 1) {
              load_box(place(0), &weight[0], full, column, part_row(0));
              load_box(place(1), &weight[1], full, column, part_row(1));
            } else {
              // Each block loads a part of the weights, for both.
              load_box_multicast(place(rank), &weight[rank], full, column, part_row(rank), 0b11);
            }
            load_box(shared.x[stage], &arguments.x, full, column, row);
          }
        }
      }
      // No block may end while another one of its cluster reads what it loads, or signals its barriers.
      for (int i = 0; i < Shared::kStages; ++i, ring.advance()) {
        mbarrier_wait(&shared.empty[ring.stage()], ring.parity() ^ 1);
      }
    };
    // A whole warp, which the compiler sees: with one thread alone a copy took so long to issue that stages came late.
    if (warp_of_block == 0) {
      if (cluster == 1) {
        fill_ring(std::integral_constant<int, 1>());
      } else {
        fill_ring(std::integral_constant<int, 2>());
      }
    }
  } else {
    take_registers<232>();
    const int consumer = warpgroup - 1;
    const int warp = warp_of_block % 4;
    const auto release = [&](int stage) {
      if (lane < cluster) mbarrier_arrive_at(&shared.empty[stage], lane);
    };
    Ring ring;
    if (consumer == 1) ring.skip(depth_steps);

    const auto make_tile = [&](auto tile_cols, const Tile& tile, bool last) {
      constexpr int kCols = decltype(tile_cols)::value;
      float sums[kProducts][kWeights * kCols / 2];
      const auto pin_all = [&] {
#pragma unroll
        for (int product = 0; product < kProducts; ++product) pin_registers(sums[product]);
      };
      int before = 0;
#pragma unroll 1
      for (int step = 0; step < depth_steps; ++step, ring.advance()) {
        const int stage = ring.stage();
        mbarrier_wait(&shared.full[stage], ring.parity());
        const uint64_t x = matrix_descriptor(shared_address(shared.x[stage]));
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
        if (step == depth_steps - 1 && !last) {
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
      ring.skip(depth_steps);  // the other's tile

      // Nobody multiplies while the block's last tile is written, and the ring, which nobody fills any more, has room
      // for all of it at once: for stages that this tile's copies have filled, the other consumer's products are done.
      constexpr int kWarpBytes = Stage::kParts * Shared::kStagingPitch;
      static_assert(kProducts * 4 * kWarpBytes <= sizeof(shared.x));
      const bool whole = last && depth_steps >= Shared::kStages;
      if (whole) named_barrier_sync(kLastBarrier, kWarpgroup);
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        const int part = product * 4 + warp;
        char* const staging = whole ? shared.x[0] + part * kWarpBytes : shared.staging[consumer * 4 + warp];
        const int row = part * kWarpRows;
        // Of the rows that are not there, shared memory has something or other, and so have their sums.
        if (row < tile_rows) {
          const Destination& to = arguments.destination;
          store_tile<T, kTanh, kWeights, kCols, Shared::kStagingPitch>(
              sums[product], staging, whole, to, kCols == kTileCols ? &to.map : &to.narrow,
              (tile.down * cluster + rank) * tile_rows + row, tile.col);
        }
      }
    };

    // A loop for each width: the compiler finds no registers for a loop that has both.
    int nth = first_tile + consumer * tile_step;
    const auto make_tiles = [&](auto tile_cols, int end) {
      for (; nth < end; nth += kConsumers * tile_step) {
        // A barrier tells only odd from even rounds: nobody may wait for a stage that is two rounds ahead.
        if (nth != first_tile) named_barrier_sync(kTurnBarrier + consumer, kConsumers * kWarpgroup);
        make_tile(tile_cols, order.at<kTileCols>(nth), nth + tile_step >= order.count());
      }
    };
    if constexpr (kWeights == 2) {
      make_tiles(std::integral_constant<int, kTileCols - kNarrower>(), order.narrow_count());
    }
    make_tiles(std::integral_constant<int, kTileCols>(), order.count());
    wait_stores_read<0>();
  }
#endif
}

}  // namespace geglu::cuda::sm90
