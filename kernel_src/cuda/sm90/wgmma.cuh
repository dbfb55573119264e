// The warpgroup's matrix product, with A and B in shared memory and float sums in registers. PTX ISA 9.0,
// "Asynchronous Warpgroup Level Matrix Instructions", https://docs.nvidia.com/cuda/parallel-thread-execution.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace geglu::cuda::sm90 {

constexpr int kWarpgroup = 128;  // threads

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
// The places of operands: GEGLU_TEN() is "%0, %1" to "%9", GEGLU_TEN(4) is "%40" to "%49", GEGLU_TO_59 all up to there.
#define GEGLU_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define GEGLU_MORE(t) ", " GEGLU_TEN(t)
#define GEGLU_TO_29 GEGLU_TEN() GEGLU_MORE(1) GEGLU_MORE(2)
#define GEGLU_TO_59 GEGLU_TO_29 GEGLU_MORE(3) GEGLU_MORE(4) GEGLU_MORE(5)
#define GEGLU_TO_79 GEGLU_TO_59 GEGLU_MORE(6) GEGLU_MORE(7)
#define GEGLU_TO_89 GEGLU_TO_79 GEGLU_MORE(8)

#define GEGLU_WGMMA(columns, results, place_of_a, place_of_b, place_of_accumulate, type)                              \
  "{\n"                                                                                                               \
  ".reg .pred p;\n"                                                                                                   \
  "setp.ne.b32 p, " place_of_accumulate                                                                               \
  ", 0;\n"                                                                                                            \
  "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" results "}, " place_of_a ", " place_of_b \
  ", p, 1, 1, 0, 0;\n"                                                                                                \
  "}\n"

// The product with `columns` columns of B, whose `count` sums the remaining arguments name. The operands' places in the
// instruction: the sums', in `results`, then those of the other three.
#define GEGLU_DEFINE_WGMMA(columns, count, results, place_of_a, place_of_b, place_of_accumulate, ...)   \
  template <typename T>                                                                                 \
  __device__ __forceinline__ void wgmma(float (&sums)[count], uint64_t a, uint64_t b, int accumulate) { \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                   \
      asm volatile(GEGLU_WGMMA(columns, results, place_of_a, place_of_b, place_of_accumulate, "bf16")   \
                   : __VA_ARGS__                                                                        \
                   : "l"(a), "l"(b), "r"(accumulate));                                                  \
    } else {                                                                                            \
      asm volatile(GEGLU_WGMMA(columns, results, place_of_a, place_of_b, place_of_accumulate, "f16")    \
                   : __VA_ARGS__                                                                        \
                   : "l"(a), "l"(b), "r"(accumulate));                                                  \
    }                                                                                                   \
  }

GEGLU_DEFINE_WGMMA(192, 96, GEGLU_TO_89 ", %90, %91, %92, %93, %94, %95", "%96", "%97", "%98", GEGLU_SUMS_32(0),
                   GEGLU_SUMS_32(32), GEGLU_SUMS_32(64))
GEGLU_DEFINE_WGMMA(176, 88, GEGLU_TO_79 ", %80, %81, %82, %83, %84, %85, %86, %87", "%88", "%89", "%90",
                   GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_8(64), GEGLU_SUMS_8(72), GEGLU_SUMS_8(80))
GEGLU_DEFINE_WGMMA(160, 80, GEGLU_TO_79, "%80", "%81", "%82", GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_8(64),
                   GEGLU_SUMS_8(72))
GEGLU_DEFINE_WGMMA(144, 72, GEGLU_TO_59 GEGLU_MORE(6) ", %70, %71", "%72", "%73", "%74", GEGLU_SUMS_32(0),
                   GEGLU_SUMS_32(32), GEGLU_SUMS_8(64))
GEGLU_DEFINE_WGMMA(128, 64, GEGLU_TO_59 ", %60, %61, %62, %63", "%64", "%65", "%66", GEGLU_SUMS_32(0),
                   GEGLU_SUMS_32(32))
GEGLU_DEFINE_WGMMA(112, 56, GEGLU_TO_29 GEGLU_MORE(3) GEGLU_MORE(4) ", %50, %51, %52, %53, %54, %55", "%56", "%57",
                   "%58", GEGLU_SUMS_32(0), GEGLU_SUMS_8(32), GEGLU_SUMS_8(40), GEGLU_SUMS_8(48))
GEGLU_DEFINE_WGMMA(64, 32, GEGLU_TO_29 ", %30, %31", "%32", "%33", "%34", GEGLU_SUMS_32(0))
GEGLU_DEFINE_WGMMA(16, 8, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", GEGLU_SUMS_8(0))

}  // namespace geglu::cuda::sm90
