// The launchers for products of a few rows with large weights, where reading the weights is all the time there is. No
// torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/linear.h"

namespace geglu::cuda {

// Rows of x at most.
constexpr int64_t kSkinnyRows = 16;

// out (rows, cols) = gelu(x @ gate.T + gate_bias) * (x @ up.T + up_bias), or x @ gate.T + gate_bias if up is null.
// x is (rows, depth), gate and up are (cols, depth); biases may be null. Pitches are distances of rows, in elements;
// out is contiguous. Sums are in float32, and the result is rounded once.
struct SkinnyProblem {
  const void* x;
  const void* gate;
  const void* up;
  const void* gate_bias;
  const void* up_bias;
  void* out;
  DType dtype;  // kFloat16 or kBFloat16
  bool tanh;
  int64_t rows;
  int64_t cols;
  int64_t depth;
  int64_t x_pitch;
  int64_t gate_pitch;
  int64_t up_pitch;
};

// Whether the kernel takes it and is worth it on this device: half types, rows of x and the weights aligned to 16
// bytes, a GPU that it was measured on, and so few rows that it was never slower than cuBLAS there (docs/measured.md).
bool skinny_fits(const SkinnyProblem& problem, int device);

// Enqueues one kernel on `stream` of the current device. It overlaps with the kernel before it, and may read its
// result as x.
cudaError_t launch_skinny(const SkinnyProblem& problem, cudaStream_t stream);

}  // namespace geglu::cuda
