// One kernel for every pointwise operator: it walks kInputs + kOutputs tensors in step, a packet of kN neighbouring
// elements at a time, and hands each packet to the operator. A thread takes one packet: with 16 bytes of every tensor a
// thread, the loads of a full multiprocessor keep the memory busy, and a second packet was measured no faster
// (docs/measured.md). Anything that makes the compiler use the first input before it has asked for the last (a branch,
// a conversion) costs up to 15 %.
//
// An operator is a struct with
//   using T                                  the storage type
//   static constexpr int kInputs, kOutputs
//   static constexpr bool kInPlace           whether an output may be an input; its input comes from the kernel before
//   template <int kN> static __device__ void apply(const Packet<T, kN> (&in)[kInputs], Packet<T, kN> (&out)[kOutputs])
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/pointwise.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/dtype.cuh"
#include "cuda/vec.cuh"

namespace geglu::cuda {

constexpr int kThreads = 128;
constexpr int kWarp = 32;

// Division by a number that is known at launch: q = (umulhi(n, multiplier) + n) >> shift, for n < 2^31 (Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t value) : value(value) {
    while ((uint64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - value)) / value + 1);
  }

  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// How a walk is laid over the warps.
enum class Order {
  kFlat,     // one row whose elements are neighbours in every tensor: no row to find
  kByRow,    // a warp stays in one row: one division, and idle lanes where the warp reaches past the row
  kByPacket  // rows too short for that: every packet finds its own row
};

// Whether at most one eighth of the lanes idle if every row starts with a new warp: less than what divisions cost.
inline bool rows_fill_warps(int64_t packets_per_row) {
  const int64_t lanes = (packets_per_row + kWarp - 1) / kWarp * kWarp;
  return (lanes - packets_per_row) * 8 <= lanes;
}

// A walk of more packets than this is launched in parts, so that kByPacket can divide in 32 bits.
constexpr int64_t kMaxPackets = (int64_t{1} << 31) - kThreads;

// What the kernel is told of a flat walk: little, because a launch takes longer the more it has to pass.
struct FlatWalk {
  int64_t packets;  // whole ones
  int32_t tail;     // elements after the last whole packet

  template <int kTensors>
  FlatWalk(const Rows<kTensors>& from, int packet_size)
      : packets(from.cols / packet_size), tail(static_cast<int32_t>(from.cols % packet_size)) {}
};

// The other walks: columns in packets, and divisors.
template <int kTensors, Order kOrder>
struct RowWalk {
  int64_t inner_stride[kTensors];
  int64_t outer_stride[kTensors][kMaxOuterDims] = {};
  uint32_t rows;
  uint32_t packets_per_row;
  Divisor row_units;  // warps of a row (kByRow), or packets (kByPacket)
  Divisor outer_size[kMaxOuterDims];
  int32_t outer_dims;

  RowWalk(const Rows<kTensors>& from, int packet_size)
      : rows(static_cast<uint32_t>(from.rows)),
        packets_per_row(static_cast<uint32_t>(from.cols / packet_size)),
        row_units(kOrder == Order::kByRow ? (packets_per_row + kWarp - 1) / kWarp : packets_per_row),
        outer_dims(from.outer_dims) {
    for (int t = 0; t < kTensors; ++t) inner_stride[t] = from.inner_stride[t];
    for (int k = 0; k < outer_dims; ++k) {
      outer_size[k] = Divisor(static_cast<uint32_t>(from.outer_size[k]));
      for (int t = 0; t < kTensors; ++t) outer_stride[t][k] = from.outer_stride[t][k];
    }
  }

  // Where packet `place` of row `row` lies in every tensor, in elements.
  template <int kN>
  __device__ __forceinline__ void locate(uint32_t row, uint32_t place, int64_t (&offsets)[kTensors]) const {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) offsets[t] = place * (kN == 1 ? inner_stride[t] : kN);
#pragma unroll 1  // rare; unrolled, it would only crowd the instruction cache
    for (int k = outer_dims - 1; k > 0; --k) {
      const uint32_t next = outer_size[k].divide(row);
      const int64_t digit = row - next * outer_size[k].value;
      row = next;
#pragma unroll
      for (int t = 0; t < kTensors; ++t) offsets[t] += digit * outer_stride[t][k];
    }
#pragma unroll
    for (int t = 0; t < kTensors; ++t) offsets[t] += row * outer_stride[t][0];
  }
};

template <class Op, Order kOrder>
using Walk = std::conditional_t<kOrder == Order::kFlat, FlatWalk, RowWalk<Op::kInputs + Op::kOutputs, kOrder>>;

template <class Op>
struct Pointers {
  const typename Op::T* in[Op::kInputs];
  typename Op::T* out[Op::kOutputs];
};

template <class Op, int kN, Order kOrder>
__global__ void __launch_bounds__(kThreads)
    pointwise_kernel(const __grid_constant__ Pointers<Op> pointers, const __grid_constant__ Walk<Op, kOrder> walk) {
  using T = typename Op::T;
  constexpr int kTensors = Op::kInputs + Op::kOutputs;
  bool valid;
  int64_t offsets[kTensors];
  if constexpr (Op::kInPlace) wait_for_earlier_kernels();
  if constexpr (kOrder == Order::kFlat) {
    // What the kernel before has written last is still in L2: start there.
    const int64_t block = Op::kInPlace ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t index = block * kThreads + threadIdx.x;
    valid = index < walk.packets;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) offsets[t] = index * kN;
  } else if constexpr (kOrder == Order::kByRow) {
    const uint32_t warp = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
    const uint32_t row = walk.row_units.divide(warp);
    const uint32_t place = (warp - row * walk.row_units.value) * kWarp + threadIdx.x % kWarp;
    valid = row < walk.rows && place < walk.packets_per_row;
    walk.template locate<kN>(row, place, offsets);
  } else {
    const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
    const uint32_t row = walk.row_units.divide(index);
    valid = row < walk.rows;
    walk.template locate<kN>(row, index - row * walk.packets_per_row, offsets);
  }

  if (valid) {
    Packet<T, kN> in[Op::kInputs];
    Packet<T, kN> out[Op::kOutputs];
#pragma unroll
    for (int t = 0; t < Op::kInputs; ++t) in[t] = load<T, kN, Op::kInPlace>(pointers.in[t] + offsets[t]);
    Op::template apply<kN>(in, out);
#pragma unroll
    for (int t = 0; t < Op::kOutputs; ++t) store<T, kN>(pointers.out[t] + offsets[Op::kInputs + t], out[t]);
  }

  if constexpr (kOrder == Order::kFlat) {
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < walk.tail) {
      const int64_t offset = walk.packets * kN + threadIdx.x;
      Packet<T, 1> in[Op::kInputs];
      Packet<T, 1> out[Op::kOutputs];
      for (int t = 0; t < Op::kInputs; ++t) in[t] = load<T, 1, Op::kInPlace>(pointers.in[t] + offset);
      Op::template apply<1>(in, out);
      for (int t = 0; t < Op::kOutputs; ++t) store<T, 1>(pointers.out[t] + offset, out[t]);
    }
  }
}

// Cuts a walk in two along its outermost dimension that has more than one element, columns at a multiple of
// `packet_size`. launch(half, offsets of the half in every tensor) is called for both, until one fails.
template <int kTensors, class Launch>
cudaError_t for_each_half(const Rows<kTensors>& rows, int packet_size, Launch launch) {
  int dim = 0;
  while (dim < rows.outer_dims && rows.outer_size[dim] == 1) ++dim;
  const bool columns = dim == rows.outer_dims;
  const int64_t size = columns ? rows.cols : rows.outer_size[dim];
  const int64_t middle = columns ? size / 2 / packet_size * packet_size : size / 2;
  for (const auto& [begin, end] : {std::pair(int64_t{0}, middle), std::pair(middle, size)}) {
    Rows<kTensors> half = rows;
    int64_t offsets[kTensors];
    if (columns) {
      half.cols = end - begin;
    } else {
      half.outer_size[dim] = end - begin;
      half.rows = rows.rows / size * (end - begin);
    }
    for (int t = 0; t < kTensors; ++t) {
      offsets[t] = begin * (columns ? rows.inner_stride[t] : rows.outer_stride[t][dim]);
    }
    const cudaError_t status = launch(half, offsets);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// The largest power of two, at most 16, that divides every address, row distance and row length, in bytes: the widest
// access that is aligned everywhere. One element if some tensor's neighbours in a row are not neighbours in memory.
template <int kTensors>
int access_bytes(const Rows<kTensors>& rows, const void* const (&pointers)[kTensors], int element_size, bool flat) {
  uint64_t bits = 16;
  if (!flat) bits |= static_cast<uint64_t>(rows.cols * element_size);
  for (int t = 0; t < kTensors; ++t) {
    if (rows.inner_stride[t] != 1) return element_size;
    bits |= reinterpret_cast<uint64_t>(pointers[t]);
    for (int k = 0; k < rows.outer_dims; ++k) bits |= static_cast<uint64_t>(rows.outer_stride[t][k] * element_size);
  }
  return static_cast<int>(bits & (~bits + 1));
}

template <class Op, int kN, Order kOrder>
cudaError_t launch_packets(const Rows<Op::kInputs + Op::kOutputs>& rows, const Pointers<Op>& pointers,
                           cudaStream_t stream) {
  const int64_t packets_per_row = rows.cols / kN;
  if (kOrder != Order::kFlat && rows.rows * packets_per_row > kMaxPackets) {
    return for_each_half(rows, kN, [&](const auto& half, const auto& offsets) {
      Pointers<Op> shifted = pointers;
      for (int t = 0; t < Op::kInputs; ++t) shifted.in[t] += offsets[t];
      for (int t = 0; t < Op::kOutputs; ++t) shifted.out[t] += offsets[Op::kInputs + t];
      return launch_packets<Op, kN, kOrder>(half, shifted, stream);
    });
  }
  const int64_t threads =
      rows.rows * (kOrder == Order::kByRow ? (packets_per_row + kWarp - 1) / kWarp * kWarp : packets_per_row);
  // At least one block: a flat walk may be nothing but a tail.
  const int64_t blocks = threads > kThreads ? (threads + kThreads - 1) / kThreads : 1;
  const Walk<Op, kOrder> walk(rows, kN);
  const auto kernel = pointwise_kernel<Op, kN, kOrder>;
  const auto grid = static_cast<unsigned>(blocks);
  if constexpr (Op::kInPlace) return launch_dependent(kernel, grid, kThreads, stream, pointers, walk);
  kernel<<<grid, kThreads, 0, stream>>>(pointers, walk);
  return cudaGetLastError();
}

// `addresses` are those of the tensors in the walk's order, inputs first.
template <class Op>
cudaError_t launch(const Rows<Op::kInputs + Op::kOutputs>& rows,
                   const void* const (&addresses)[Op::kInputs + Op::kOutputs], cudaStream_t stream) {
  using T = typename Op::T;
  Pointers<Op> pointers;
  for (int t = 0; t < Op::kInputs; ++t) pointers.in[t] = static_cast<const T*>(addresses[t]);
  for (int t = 0; t < Op::kOutputs; ++t) {
    pointers.out[t] = static_cast<T*>(const_cast<void*>(addresses[Op::kInputs + t]));
  }
  if constexpr (sizeof(T) < 8) {
    constexpr int kWide = 16 / sizeof(T);
    if (rows.rows == 1 && access_bytes(rows, addresses, sizeof(T), /*flat=*/true) == 16) {
      return launch_packets<Op, kWide, Order::kFlat>(rows, pointers, stream);
    }
    const int bytes = access_bytes(rows, addresses, sizeof(T), /*flat=*/false);
    if (bytes == 16 && rows_fill_warps(rows.cols / kWide)) {
      return launch_packets<Op, kWide, Order::kByRow>(rows, pointers, stream);
    }
    if (bytes == 16) return launch_packets<Op, kWide, Order::kByPacket>(rows, pointers, stream);
    if (bytes == 8) return launch_packets<Op, kWide / 2, Order::kByPacket>(rows, pointers, stream);
    if constexpr (sizeof(T) == 2) {
      if (bytes == 4) return launch_packets<Op, 2, Order::kByPacket>(rows, pointers, stream);
    }
  }
  return launch_packets<Op, 1, Order::kByPacket>(rows, pointers, stream);
}

}  // namespace geglu::cuda
