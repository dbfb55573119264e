// The launcher for both projections of the gated block in one kernel on Hopper, for many rows, where the arithmetic is
// all the time there is. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gated.h"
#include "cuda/sm90/gated_gemm_config.h"

namespace geglu::cuda::sm90 {

// Whether the kernel can take it: a GPU of compute capability 9.0, half types, both weights, rows of x and the weights
// aligned to 16 bytes, sizes of 1 to 2^30.
bool gated_gemm_fits(const GatedProblem& problem, int device);

// Enqueues one kernel on `stream` of the current device, for a problem that fits. It may begin while the kernel before
// it in the stream ends, and may read its result. cudaErrorInvalidValue for a configuration that the kernel is not
// compiled for, cudaErrorNotSupported if the driver makes no tensor maps; nothing is enqueued then.
cudaError_t launch_gated_gemm(const GatedProblem& problem, const GatedGemmConfig& config, cudaStream_t stream);

}  // namespace geglu::cuda::sm90
