// The CPU kernels for x86-64 with AVX-512 (F, BW, DQ and VL).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// From here on, so that no header above is compiled for it.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif

#define GEGLU_CPU_ISA avx512
#define GEGLU_CPU_FMA_F16C 1
#include "cpu/geglu_body.h"

namespace geglu::cpu {

const Kernels kAvx512Kernels = {avx512::select_storage<GegluForward>, avx512::select_storage<GegluBackward>,
                                avx512::select_storage<GeluForward>, avx512::select_storage<GeluBackward>, "avx512"};

}  // namespace geglu::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
