// The CPU kernels' table of entry points: one table per instruction set, one choice per process.
#pragma once

#include <cstdint>

#include "common/linear.h"
#include "common/pointwise.h"

namespace geglu::cpu {

struct Kernels {
  // All compute the elements [begin, end) of the walk, counted row by row: 0 <= begin <= end <= rows * cols.
  // Disjoint ranges may run on different threads.
  void (*forward)(const GegluForward& problem, int64_t begin, int64_t end);
  void (*backward)(const GegluBackward& problem, int64_t begin, int64_t end);
  void (*gelu)(const GeluForward& problem, int64_t begin, int64_t end);
  void (*gelu_backward)(const GeluBackward& problem, int64_t begin, int64_t end);
  const char* capability;  // "baseline", "avx2" or "avx512"
};

// Elements for one task at least: below this, waking a thread costs more than it saves.
constexpr int64_t kGrain = 16384;

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The widest table that this CPU and operating system can run. GEGLU_CPU_CAPABILITY (baseline, avx2, avx512), read
// once, lowers the choice; it never raises it past what the CPU has.
const Kernels& kernels();

}  // namespace geglu::cpu
