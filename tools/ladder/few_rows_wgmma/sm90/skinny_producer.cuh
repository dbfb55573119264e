// The producer of the skinny kernel: one thread that keeps the ring full. No torch.
#pragma once

#include <cstdint>

#include "sm90/ptx.cuh"
#include "sm90/skinny_layout.cuh"
#include "sm90/stream_k.h"

namespace geglu::sm90 {

template <class Tile>
struct SkinnyProducer {
  const CUtensorMap* weights[2];
  const CUtensorMap* x;
  uint8_t* ring;
  typename Tile::Barriers* barriers;
  const SkinnyParameters& parameters;
  bool gated;
  int batch_tile;
  int part;  // of a unit's K-blocks

  __device__ __forceinline__ uint8_t* stage(const RingPosition& position) const {
    return ring + position.stage * Tile::kStageBytes;
  }

  __device__ __forceinline__ int column_of(int unit) const { return (unit * Tile::kSplit + part) * kBlockK; }

  __device__ __forceinline__ void copy_weights(const RingPosition& position, int tile, int unit) const {
    uint64_t* full = &barriers->full[position.stage];
    ptx::barrier_expect_bytes(full, Tile::kStageBytes);
    const int column = column_of(unit);
    for (int half = 0; half < 2; ++half) {
      uint8_t* to = stage(position) + half * Tile::kHalfBytes;
      const int row = (gated ? tile : 2 * tile + half) * Tile::kHalfRows;
      if constexpr (Tile::kBatchTiles == 1) {
        ptx::load_box(weights[half], full, to, column, row, ptx::L2Policy::kEvictFirst);
      } else if (half == batch_tile) {
        ptx::load_box_multicast(weights[half], full, to, column, row, 0b11 << (part * Tile::kBatchTiles),
                                ptx::L2Policy::kEvictFirst);
      }
    }
  }

  __device__ __forceinline__ void copy_x(const RingPosition& position, int unit) const {
    ptx::load_box(x, &barriers->full[position.stage], stage(position) + 2 * Tile::kHalfBytes, column_of(unit),
                  batch_tile * Tile::kN, ptx::L2Policy::kEvictLast);
  }

  // Calls visit(position, tile, unit of the tile) for units [first, last) of the group, in the order that consumers
  // take them.
  template <class Visit>
  __device__ __forceinline__ void for_units(int group, int first, int last, Visit visit) const {
    FragmentWalk walk(parameters.work, group);
    Fragment fragment;
    RingPosition position;
    int unit = 0;
    while (unit < last && walk.next(&fragment)) {
      for (int k = fragment.k_begin; k < fragment.k_end && unit < last; ++k, ++unit) {
        if (unit >= first) visit(position, fragment.tile, k);
        position.advance(parameters.stages);
      }
    }
  }

  __device__ __forceinline__ void run(int group) const {
    const int units = parameters.work.begin(group + 1) - parameters.work.begin(group);
    const int ahead = min(units, parameters.stages);
    // Weights depend on no earlier kernel of the chain: fill the ring with them while x is being computed.
    for_units(group, 0, ahead, [&](auto position, int tile, int k) { copy_weights(position, tile, k); });
    ptx::wait_for_earlier_kernels();
    for_units(group, 0, ahead, [&](auto position, int, int k) { copy_x(position, k); });
    for_units(group, ahead, units, [&](auto position, int tile, int k) {
      ptx::barrier_wait<(Tile::kBatchTiles > 1)>(&barriers->empty[position.stage], position.parity ^ 1);
      copy_weights(position, tile, k);
      copy_x(position, k);
    });
  }
};

}  // namespace geglu::sm90
