// The warpgroup's matrix product, with A and B in shared memory and float sums in registers. PTX ISA 9.0,
// "Asynchronous Warpgroup Level Matrix Instructions", https://docs.nvidia.com/cuda/parallel-thread-execution.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace geglu::cuda::sm90 {

// "wgmma.fence": before the first product, and after registers of the sums were touched by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// "wgmma.commit_group"
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// "wgmma.wait_group": until all but the newest kGroups groups are complete.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving accesses of the sums across this point: it does not know that a product is
// asynchronous.
template <int kSums>
__device__ __forceinline__ void pin_registers(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// "wgmma.mma_async": sums (64 rows, columns of B) = A (64, 16) @ B (columns, 16)^T, plus the sums if `accumulate`.
// Thread t of the warpgroup holds, of row 16 * (t / 32) + t % 32 / 4, columns 8 * i + 2 * (t % 4) and that + 1 in
// sums[4 * i] and [4 * i + 1], and of the row 8 further on in [4 * i + 2] and [4 * i + 3].
#define GEGLU_SUMS_8(i)                                                                                         \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define GEGLU_SUMS_32(i) GEGLU_SUMS_8(i), GEGLU_SUMS_8(i + 8), GEGLU_SUMS_8(i + 16), GEGLU_SUMS_8(i + 24)

#define GEGLU_WGMMA_N224(type)                                                                  \
  "{\n"                                                                                         \
  ".reg .pred p;\n"                                                                             \
  "setp.ne.b32 p, %114, 0;\n"                                                                   \
  "wgmma.mma_async.sync.aligned.m64n224k16.f32." type "." type                                  \
  " "                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "  \
  "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "  \
  "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "    \
  "%108, %109, %110, %111}, "                                                                   \
  "%112, %113, p, 1, 1, 0, 0;\n"                                                                \
  "}\n"

template <typename T>
__device__ __forceinline__ void wgmma(float (&sums)[112], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(GEGLU_WGMMA_N224("bf16")
                 : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_32(64), GEGLU_SUMS_8(96), GEGLU_SUMS_8(104)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(GEGLU_WGMMA_N224("f16")
                 : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_32(64), GEGLU_SUMS_8(96), GEGLU_SUMS_8(104)
                 : "l"(a), "l"(b), "r"(accumulate));
  }
}

#undef GEGLU_WGMMA_N224

#define GEGLU_WGMMA_N192(type)                                                                  \
  "{\n"                                                                                         \
  ".reg .pred p;\n"                                                                             \
  "setp.ne.b32 p, %98, 0;\n"                                                                    \
  "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                                  \
  " "                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "  \
  "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "  \
  "%92, %93, %94, %95}, "                                                                       \
  "%96, %97, p, 1, 1, 0, 0;\n"                                                                  \
  "}\n"

template <typename T>
__device__ __forceinline__ void wgmma(float (&sums)[96], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(GEGLU_WGMMA_N192("bf16")
                 : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_32(64)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(GEGLU_WGMMA_N192("f16")
                 : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_32(64)
                 : "l"(a), "l"(b), "r"(accumulate));
  }
}

#undef GEGLU_WGMMA_N192

#define GEGLU_WGMMA_N160(type)                                                                  \
  "{\n"                                                                                         \
  ".reg .pred p;\n"                                                                             \
  "setp.ne.b32 p, %82, 0;\n"                                                                    \
  "wgmma.mma_async.sync.aligned.m64n160k16.f32." type "." type                                  \
  " "                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "  \
  "%74, %75, %76, %77, %78, %79}, "                                                             \
  "%80, %81, p, 1, 1, 0, 0;\n"                                                                  \
  "}\n"

template <typename T>
__device__ __forceinline__ void wgmma(float (&sums)[80], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(GEGLU_WGMMA_N160("bf16")
                 : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_8(64), GEGLU_SUMS_8(72)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(GEGLU_WGMMA_N160("f16")
                 : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_8(64), GEGLU_SUMS_8(72)
                 : "l"(a), "l"(b), "r"(accumulate));
  }
}

#undef GEGLU_WGMMA_N160

#define GEGLU_WGMMA_N128(type)                                                                  \
  "{\n"                                                                                         \
  ".reg .pred p;\n"                                                                             \
  "setp.ne.b32 p, %66, 0;\n"                                                                    \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                  \
  " "                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63}, "                                                   \
  "%64, %65, p, 1, 1, 0, 0;\n"                                                                  \
  "}\n"

template <typename T>
__device__ __forceinline__ void wgmma(float (&sums)[64], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(GEGLU_WGMMA_N128("bf16") : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32) : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(GEGLU_WGMMA_N128("f16") : GEGLU_SUMS_32(0), GEGLU_SUMS_32(32) : "l"(a), "l"(b), "r"(accumulate));
  }
}

#undef GEGLU_WGMMA_N128

#undef GEGLU_SUMS_32
#undef GEGLU_SUMS_8

}  // namespace geglu::cuda::sm90
