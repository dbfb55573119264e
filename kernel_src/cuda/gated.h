// What a kernel that computes both projections of the gated block at once is told. No torch.
#pragma once

#include <cstdint>

#include "common/pointwise.h"

namespace geglu::cuda {

// Elements of a weight beyond which another kernel is the faster one, on an H200 (docs/measured.md).
constexpr int64_t kSmallWeight = int64_t{1} << 23;
constexpr int64_t kLargeWeight = int64_t{1} << 25;
constexpr int64_t kHugeWeight = int64_t{1} << 26;

// out (rows, cols) = gelu(x @ gate.T + gate_bias) * (x @ up.T + up_bias), or x @ gate.T + gate_bias if up is null.
// x is (rows, depth), gate and up are (cols, depth); biases may be null. Pitches are distances of rows, in elements;
// out is contiguous. gate and up may be two halves of one tensor. Sums are in float32, and the result is rounded once.
struct GatedProblem {
  const void* x;
  const void* gate;
  const void* up;
  const void* gate_bias;
  const void* up_bias;
  void* out;
  DType dtype;
  bool tanh;
  // Whether the weights were there before the kernel began that is before this one in the stream: then they may be read
  // while it runs.
  bool weights_are_old;
  int64_t rows;
  int64_t cols;
  int64_t depth;
  int64_t x_pitch;
  int64_t gate_pitch;
  int64_t up_pitch;
};

}  // namespace geglu::cuda
