#include "cuda/sm90/tensor_map.h"

namespace geglu::cuda::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Looked up in the driver that is loaded, so that nothing links to it.
EncodeTiled find_encode_tiled() {
  constexpr unsigned int kSince = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &found);
  if (status != cudaSuccess) cudaGetLastError();  // reported by the caller, and not once more by whoever asks next
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function)
                                                                       : nullptr;
}

}  // namespace

cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* matrix, int64_t rows, int64_t cols,
                            int64_t pitch, int32_t box_rows, int32_t box_cols) {
  static const EncodeTiled encode_tiled = find_encode_tiled();
  if (encode_tiled == nullptr) return cudaErrorNotSupported;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_stride[] = {static_cast<cuuint64_t>(pitch) * 2};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_stride[] = {1, 1};
  const CUtensorMapSwizzle swizzle = box_cols == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : box_cols == 16 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                      : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result =
      encode_tiled(map, dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                   2, const_cast<void*>(matrix), size, row_stride, box, element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

bool boxes_fit(const void* pointer, int64_t pitch) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && pitch % 8 == 0;
}

bool boxes_fit(const GatedProblem& problem, int device) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;  // coordinates are 32-bit, and pass the end by a tile
  const auto in_range = [](int64_t size) { return size >= 1 && size <= kMaxSize; };
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return false;
  if (!in_range(problem.rows) || !in_range(problem.cols) || !in_range(problem.depth)) return false;
  if (!boxes_fit(problem.x, problem.x_pitch) || !boxes_fit(problem.gate, problem.gate_pitch)) return false;
  if (problem.up != nullptr && !boxes_fit(problem.up, problem.up_pitch)) return false;
  int major = 0;
  int minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9 &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && minor == 0;
}

}  // namespace geglu::cuda::sm90
