// The launchers for GELU and its gradient around a linear layer's matrix products. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/linear.h"

namespace geglu::cuda {

// Enqueues one kernel on `stream` of the current device. The walk is flat and not empty, `pre` and `out` are aligned to
// 16 bytes.
cudaError_t launch_gelu(const GeluForward& problem, cudaStream_t stream);

// Enqueues one kernel, and a second one for grad_bias. Any alignment and pitch are right. The problem is not empty.
cudaError_t launch_gelu_backward(const BiasGeluBackward& problem, cudaStream_t stream);

// How many rows of partial sums, each of `cols` values of the type that sums are in, launch_gelu_backward() needs for a
// bias gradient.
int64_t partial_sums(int64_t rows);

}  // namespace geglu::cuda
