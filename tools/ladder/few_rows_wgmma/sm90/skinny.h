// Linear layers with few rows of input (1 to 256) on Hopper, where the time is that of reading the weights. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/linear.h"
#include "common/pointwise.h"
#include "sm90/tensor_map.h"

namespace geglu::sm90 {

// gated:  out[m, n] = gelu(x[m, k] @ weight[0][n, k]^T + bias[0][n]) * (x @ weight[1][n, k]^T + bias[1][n])
// else:   out[m, n] = activation(x[m, k] @ weight[0][n, k]^T + bias[0][n])
// fp16 or bf16, all alike; sums, biases and GELU in fp32, rounded once. A bias may be null. Rows are `stride` elements
// apart. The two weights may be halves of one tensor.
struct SkinnyProblem {
  DType dtype;
  bool gated;
  Activation activation;  // of a gated problem kExact or kTanh
  Matrix x;
  Matrix weight[2];
  const void* bias[2];
  void* out;
  int64_t out_stride;
};

// How it is computed; the result's bits depend on it, and on nothing else.
struct SkinnyConfig {
  int batch_tile;   // rows of x that a block takes: 8, 16, 32, 64 or 128
  int warpgroups;   // 1 or 2: a block takes 128 rows of weights for each
  int batch_tiles;  // 1 or 2 blocks of a cluster share weights: batch_tile * batch_tiles >= m
  int k_split;      // 1 or 2 blocks of a cluster share K
  int stages;       // depth of the ring in shared memory
  int groups;       // clusters in the grid, see StreamK
};

// 16-byte aligned rows of x and the weights, 1 <= m <= 256, n, k >= 1.
bool supports(const SkinnyProblem& problem);

SkinnyConfig choose_config(const SkinnyProblem& problem, int multiprocessors);

// What launch_skinny() needs: `partials` bytes of any contents, aligned to 16 bytes, and `counters` bytes that are zero
// before the first launch. Every launch leaves the counters zero. Launches that may overlap need workspaces of their
// own.
struct SkinnyWorkspace {
  size_t partials;
  size_t counters;
};
SkinnyWorkspace workspace_bytes(const SkinnyProblem& problem, const SkinnyConfig& config);

// Enqueues one kernel on `stream` of the current device. `dependent`: the kernel before it in the stream is another of
// these (not dependent itself), which it may overlap; it reads weights before that kernel ends, and nothing else.
// cudaErrorInvalidValue for a configuration that does not fit the problem or the device, before anything is enqueued.
cudaError_t launch_skinny(const SkinnyProblem& problem, const SkinnyConfig& config, void* partials, void* counters,
                          bool dependent, cudaStream_t stream);

}  // namespace geglu::sm90
