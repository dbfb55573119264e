// The launchers for products of a few rows with large weights, where reading the weights is all the time there is. No
// torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/gated.h"

namespace geglu::cuda {

// Rows of x at most.
constexpr int64_t kSkinnyRows = 16;

// Whether the kernel takes it and is worth it on this device: half types, rows of x and the weights aligned to 16
// bytes, a GPU that it was measured on, and so few rows that it was never slower than cuBLAS there (docs/measured.md).
bool skinny_fits(const GatedProblem& problem, int device);

// Enqueues one kernel on `stream` of the current device. It overlaps with the kernel before it, and may read its
// result as x.
cudaError_t launch_skinny(const GatedProblem& problem, cudaStream_t stream);

}  // namespace geglu::cuda
