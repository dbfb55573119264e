// The part of cuBLASLt's C interface that is used here, declared. Its functions, numbers and struct layouts are the
// same in every cuBLASLt 12 and 13. Declaring them makes the library independent of the toolkit's 400 MB cuBLAS
// package.
//
// Nothing links against cuBLASLt. A CUDA build of torch needs it and brings it along, and its symbols resolve by the
// same way as torch's own: through libtorch.so. They are weak, so that a torch without it still loads the library.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace geglu::cuda::lt {

#define GEGLU_CUBLASLT extern "C" __attribute__((weak, visibility("default")))

enum Status : int { kSuccess = 0, kInvalidValue = 7, kArchMismatch = 8, kNotSupported = 15 };
enum Operation : int32_t { kKeep = 0, kTranspose = 1 };
enum ComputeType : int { kFloat = 68, kFloatFastTf32 = 77 };
enum DescAttribute : int {
  kDescTransA = 3,
  kDescTransB = 4,
  kDescEpilogue = 7,
  kDescBiasPointer = 8,
  kDescAuxPointer = 11,
  kDescAuxLd = 12,
};
enum PreferenceAttribute : int {
  kPreferWorkspaceBytes = 1,
  kPreferReductionMask = 3,
  kPreferAlignmentA = 5,
  kPreferAlignmentB = 6,
  kPreferAlignmentC = 7,
  kPreferAlignmentD = 8,
};
// Bits of the reduction mask; partial sums of split K that are never added are always allowed.
enum Reduction : uint32_t { kReduceInComputeType = 2 };

using Handle = void*;
using Desc = void*;
using Layout = void*;
using Preference = void*;

struct Algo {
  uint64_t data[8];
};

struct Heuristic {
  Algo algo;
  size_t workspace_size;
  Status state;
  float waves;
  int reserved[4];
};

GEGLU_CUBLASLT size_t cublasLtGetVersion();
GEGLU_CUBLASLT const char* cublasLtGetStatusString(Status status);
GEGLU_CUBLASLT Status cublasLtMatmul(Handle handle, Desc desc, const void* alpha, const void* a, Layout a_layout,
                                     const void* b, Layout b_layout, const void* beta, const void* c, Layout c_layout,
                                     void* d, Layout d_layout, const Algo* algo, void* workspace, size_t workspace_size,
                                     cudaStream_t stream);
GEGLU_CUBLASLT Status cublasLtMatmulDescCreate(Desc* desc, ComputeType compute, cudaDataType_t scale);
GEGLU_CUBLASLT Status cublasLtMatmulDescDestroy(Desc desc);
GEGLU_CUBLASLT Status cublasLtMatmulDescSetAttribute(Desc desc, DescAttribute attribute, const void* value,
                                                     size_t size);
GEGLU_CUBLASLT Status cublasLtMatrixLayoutCreate(Layout* layout, cudaDataType_t type, uint64_t rows, uint64_t cols,
                                                 int64_t ld);
GEGLU_CUBLASLT Status cublasLtMatrixLayoutDestroy(Layout layout);
GEGLU_CUBLASLT Status cublasLtMatmulPreferenceCreate(Preference* preference);
GEGLU_CUBLASLT Status cublasLtMatmulPreferenceDestroy(Preference preference);
GEGLU_CUBLASLT Status cublasLtMatmulPreferenceSetAttribute(Preference preference, PreferenceAttribute attribute,
                                                           const void* value, size_t size);
GEGLU_CUBLASLT Status cublasLtMatmulAlgoGetHeuristic(Handle handle, Desc desc, Layout a, Layout b, Layout c, Layout d,
                                                     Preference preference, int requested, Heuristic results[],
                                                     int* returned);
GEGLU_CUBLASLT Status cublasLtMatmulAlgoCheck(Handle handle, Desc desc, Layout a, Layout b, Layout c, Layout d,
                                              const Algo* algo, Heuristic* result);

#undef GEGLU_CUBLASLT

}  // namespace geglu::cuda::lt
