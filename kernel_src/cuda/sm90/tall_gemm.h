// The launcher for products of many rows on Hopper, of one weight or of gate and up with GeGLU, where the arithmetic is
// all the time there is. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "cuda/gated.h"
#include "cuda/sm90/tall_gemm_config.h"

namespace geglu::cuda::sm90 {

// The kernel's configuration for a problem on the current device, which is `device`. Nothing if the kernel cannot take
// it (boxes_fit), or if another way is faster.
std::optional<TallGemmConfig> choose_tall_gemm(const GatedProblem& problem, int device);

// Enqueues one kernel on `stream` of the current device. It may begin while the kernel before it in the stream ends,
// and may read its result. cudaErrorInvalidValue for a configuration that the kernel is not compiled for,
// cudaErrorNotSupported if the driver makes no tensor maps; nothing is enqueued then.
cudaError_t launch_tall_gemm(const GatedProblem& problem, const TallGemmConfig& config, cudaStream_t stream);

}  // namespace geglu::cuda::sm90
