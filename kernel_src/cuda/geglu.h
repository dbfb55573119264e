// The CUDA launchers: raw pointers, a walk and a stream in, a cudaError_t out. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "common/pointwise.h"

namespace geglu::cuda {

// Both enqueue one kernel on `stream` of the current device and do not synchronize. Any alignment and any strides are
// right; 16-byte accesses are used where every pointer, row and width allows them. The walk must not be empty.
cudaError_t launch_forward(const GegluForward& problem, cudaStream_t stream);
cudaError_t launch_backward(const GegluBackward& problem, cudaStream_t stream);

}  // namespace geglu::cuda
