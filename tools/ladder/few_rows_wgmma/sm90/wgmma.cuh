// wgmma, Hopper's asynchronous matrix product of a warpgroup: a 64 x 16 A and a 16 x kN B, both in shared memory with
// K running along 128-byte swizzled rows, fp32 accumulators in registers. No torch.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "sm90/ptx.cuh"

namespace geglu::sm90::wgmma {

constexpr int kRows = 64;     // rows of A
constexpr int kDepth = 16;    // K of one instruction
constexpr int kSwizzle = 64;  // 16-bit values in one 128-byte swizzled row

// Describes a K-major tile of 128-byte rows, written by a copy with 128-byte swizzle: groups of 8 rows are 1024 bytes
// apart, and the tile begins at a multiple of 1024 bytes. Steps of kDepth along K add kDepthStep.
__device__ __forceinline__ uint64_t descriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kLeadingUnused = 1ull << 16;
  return kSwizzle128 | kGroupStride | kLeadingUnused | ((ptx::shared_address(tile) & 0x3FFFF) >> 4);
}
constexpr uint64_t kDepthStep = (kDepth * 2) >> 4;

// Orders accesses to the registers and to shared memory before the products issued next.
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the products issued since the last call.
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// One instruction: d = a * b + (accumulate ? d : 0). Thread t of the warpgroup holds in d[4 * j + i] the element of row
// 16 * (t / 32) + (t % 32) / 4 + 8 * (i / 2) and column 8 * j + 2 * (t % 4) + i % 2.
#define GEGLU_WGMMA(N, TYPE, REGISTERS, A, B, P, ...)                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                                           \
               ", 0;\n"                                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, %" #A ", %" #B \
               ", p, 1, 1, 0, 0;\n}"                                                                             \
               : __VA_ARGS__                                                                                     \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

#define GEGLU_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GEGLU_D16(i) GEGLU_D4(i), GEGLU_D4(i + 4), GEGLU_D4(i + 8), GEGLU_D4(i + 12)
#define GEGLU_R4 "%0, %1, %2, %3"
#define GEGLU_R8 GEGLU_R4 ", %4, %5, %6, %7"
#define GEGLU_R16 GEGLU_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GEGLU_R32 GEGLU_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GEGLU_R64                                                                    \
  GEGLU_R32                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <typename T, int kN>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kHalf || std::is_same_v<T, __nv_bfloat16>, "16-bit floating point only");
  static_assert(kN == 8 || kN == 16 || kN == 32 || kN == 64 || kN == 128, "the sizes written out below");
  if constexpr (kN == 8) {
    if constexpr (kHalf)
      GEGLU_WGMMA(8, "f16", GEGLU_R4, 4, 5, 6, GEGLU_D4(0));
    else
      GEGLU_WGMMA(8, "bf16", GEGLU_R4, 4, 5, 6, GEGLU_D4(0));
  } else if constexpr (kN == 16) {
    if constexpr (kHalf)
      GEGLU_WGMMA(16, "f16", GEGLU_R8, 8, 9, 10, GEGLU_D4(0), GEGLU_D4(4));
    else
      GEGLU_WGMMA(16, "bf16", GEGLU_R8, 8, 9, 10, GEGLU_D4(0), GEGLU_D4(4));
  } else if constexpr (kN == 32) {
    if constexpr (kHalf)
      GEGLU_WGMMA(32, "f16", GEGLU_R16, 16, 17, 18, GEGLU_D16(0));
    else
      GEGLU_WGMMA(32, "bf16", GEGLU_R16, 16, 17, 18, GEGLU_D16(0));
  } else if constexpr (kN == 64) {
    if constexpr (kHalf)
      GEGLU_WGMMA(64, "f16", GEGLU_R32, 32, 33, 34, GEGLU_D16(0), GEGLU_D16(16));
    else
      GEGLU_WGMMA(64, "bf16", GEGLU_R32, 32, 33, 34, GEGLU_D16(0), GEGLU_D16(16));
  } else if constexpr (kN == 128) {
    if constexpr (kHalf)
      GEGLU_WGMMA(128, "f16", GEGLU_R64, 64, 65, 66, GEGLU_D16(0), GEGLU_D16(16), GEGLU_D16(32), GEGLU_D16(48));
    else
      GEGLU_WGMMA(128, "bf16", GEGLU_R64, 64, 65, 66, GEGLU_D16(0), GEGLU_D16(16), GEGLU_D16(32), GEGLU_D16(48));
  }
}

#undef GEGLU_R64
#undef GEGLU_R32
#undef GEGLU_R16
#undef GEGLU_R8
#undef GEGLU_R4
#undef GEGLU_D16
#undef GEGLU_D4
#undef GEGLU_WGMMA

}  // namespace geglu::sm90::wgmma
