#include "sm90/tensor_map.h"

namespace geglu::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's entry point, or null. Looked up once: libcuda belongs to the driver and is not linked.
Encode find_encode() {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // reported by the caller, and not once more by whoever asks next
    return nullptr;
  }
  return reinterpret_cast<Encode>(symbol);
}

}  // namespace

bool fits_tensor_map(const Matrix& matrix) {
  constexpr int64_t kMaxSize = int64_t{1} << 31;  // coordinates are signed
  constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.rows > 0 && matrix.cols > 0 &&
         matrix.rows < kMaxSize && matrix.cols < kMaxSize && matrix.stride > 0 && matrix.stride % 8 == 0 &&
         matrix.stride < kMaxStrideBytes / 2;
}

cudaError_t make_tensor_map(CUtensorMap* map, const Matrix& matrix, int box_rows, bool bfloat16) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.cols), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             const_cast<void*>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace geglu::sm90
