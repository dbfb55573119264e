// How a matrix product with few columns is dealt out to the blocks: "stream-K". The K-blocks of all row tiles form one
// line of units; every group of blocks (a group is a cluster) gets an equal piece of it, so that all multiprocessors
// end together whatever the sizes. No torch; host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define GEGLU_SM90_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GEGLU_SM90_HOST_DEVICE inline
#endif

namespace geglu::sm90 {

// K-blocks [k_begin, k_end) of one row tile
struct Fragment {
  int tile;
  int k_begin;
  int k_end;
};

struct StreamK {
  int tiles;     // row tiles
  int k_blocks;  // units in each
  int groups;    // <= tiles * k_blocks, so that none is idle

  GEGLU_SM90_HOST_DEVICE int64_t units() const { return int64_t{tiles} * k_blocks; }

  // First unit of a group; `groups` is allowed.
  GEGLU_SM90_HOST_DEVICE int begin(int group) const { return static_cast<int>(units() * group / groups); }

  // The group that has this unit: the last one that begins at or before it.
  GEGLU_SM90_HOST_DEVICE int group_of(int64_t unit) const {
    return static_cast<int>(((unit + 1) * groups - 1) / units());
  }
};

// Walks the fragments of a group from its last to its first. A tile that several groups share is completed by the one
// that has its last K-blocks, and that is the piece this group walks last, while the piece it leaves to a later group
// comes first: so whoever completes a tile hardly waits, and only for groups with smaller indices, which the hardware
// has started before.
class FragmentWalk {
 public:
  GEGLU_SM90_HOST_DEVICE FragmentWalk(const StreamK& work, int group)
      : k_blocks_(work.k_blocks), begin_(work.begin(group)), end_(work.begin(group + 1)) {}

  GEGLU_SM90_HOST_DEVICE bool next(Fragment* fragment) {
    if (end_ <= begin_) return false;
    const int tile = (end_ - 1) / k_blocks_;
    const int first = tile * k_blocks_;
    const int begin = begin_ > first ? begin_ : first;
    *fragment = {tile, begin - first, end_ - first};
    end_ = begin;
    return true;
  }

 private:
  int k_blocks_;
  int begin_;
  int end_;
};

}  // namespace geglu::sm90
