// Tensor maps: how the copy engine is told of a matrix in global memory. No torch; nothing links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace geglu::sm90 {

// A row-major matrix of 16-bit floating-point values; rows are `stride` elements apart.
struct Matrix {
  const void* data;
  int64_t rows;
  int64_t cols;
  int64_t stride;
};

// What the copy engine can read: 16-byte aligned rows whose sizes and strides fit its fields.
bool fits_tensor_map(const Matrix& matrix);

// The map for boxes of `box_rows` rows and 64 columns, 128-byte swizzled. cudaErrorNotSupported if the driver has no
// tensor maps, cudaErrorInvalidValue if it refuses this one.
cudaError_t make_tensor_map(CUtensorMap* map, const Matrix& matrix, int box_rows, bool bfloat16);

}  // namespace geglu::sm90
