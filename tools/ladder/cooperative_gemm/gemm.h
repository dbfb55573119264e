// The launcher for products of many rows on Hopper, where the arithmetic is all the time there is. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/linear.h"
#include "gemm_config.h"

namespace geglu::cuda::sm90::cooperative {

// out (rows, cols) = gelu(x @ gate.T + gate_bias) * (x @ up.T + up_bias), or activation(x @ gate.T + gate_bias) if up
// is null. x is (rows, depth), gate and up are (cols, depth); biases may be null. Pitches are distances of rows, in
// elements; out is contiguous. gate and up may be two halves of one tensor. Sums are in float32, and the result is
// rounded once.
struct GemmProblem {
  const void* x;
  const void* gate;
  const void* up;
  const void* gate_bias;
  const void* up_bias;
  void* out;
  DType dtype;  // kFloat16 or kBFloat16
  Activation activation;
  int64_t rows;
  int64_t cols;
  int64_t depth;
  int64_t x_pitch;
  int64_t gate_pitch;
  int64_t up_pitch;
};

// Why the kernel cannot take the problem, for people to read; null if it can.
const char* gemm_rejects(const GemmProblem& problem);

// Enqueues one kernel on `stream` of the current device, which has compute capability 9.0. It begins while the kernel
// before it in the stream ends, and may read its result. cudaErrorNotSupported if gemm_rejects(problem),
// cudaErrorInvalidValue if gemm_config_rejects(config).
cudaError_t launch_gemm(const GemmProblem& problem, const GemmConfig& config, cudaStream_t stream);

}  // namespace geglu::cuda::sm90::cooperative
