// The CPU kernels for what the compiler targets by itself: SSE2 on x86-64, NEON on AArch64.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define GEGLU_CPU_ISA baseline
#define GEGLU_CPU_FMA_F16C 0
#include "cpu/geglu_body.h"

namespace geglu::cpu {

const Kernels kBaselineKernels = {baseline::select_storage<GegluForward>, baseline::select_storage<GegluBackward>,
                                  baseline::select_storage<GeluForward>, baseline::select_storage<GeluBackward>,
                                  "baseline"};

}  // namespace geglu::cpu
