// Tensor maps: what the copy engine is told about a matrix in global memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/gated.h"

namespace geglu::cuda::sm90 {

// The map of a row-major matrix of 16-bit elements, to be copied in boxes of box_rows x box_cols whose rows are
// swizzled over all of their bytes if those are 32, 64 or 128, else follow each other as they are. `pitch` is the
// distance of rows, in elements. Elements outside read as zero. cudaErrorNotSupported without a driver that makes
// tensor maps, cudaErrorInvalidValue if it refuses these arguments.
cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* matrix, int64_t rows, int64_t cols,
                            int64_t pitch, int32_t box_rows, int32_t box_cols);

// Whether rows of 16-bit elements can be copied in boxes: pointer and distance of rows, in elements, aligned to 16
// bytes.
bool boxes_fit(const void* pointer, int64_t pitch);

// Whether the kernels of this folder can read the problem: a GPU of compute capability 9.0, half types, rows of x and
// the weights aligned to 16 bytes, sizes of 1 to 2^30.
bool boxes_fit(const GatedProblem& problem, int device);

}  // namespace geglu::cuda::sm90
