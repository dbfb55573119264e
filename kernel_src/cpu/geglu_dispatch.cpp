// The choice of an instruction set, once per process.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/geglu.h"

namespace geglu::cpu {
namespace {

// Tables that this CPU and operating system can run, the widest first. __builtin_cpu_supports asks for both.
const Kernels& choose() {
  const char* variable = std::getenv("GEGLU_CPU_CAPABILITY");
  const std::string limit = variable == nullptr || *variable == '\0' ? "avx512" : variable;
  if (limit != "avx512" && limit != "avx2" && limit != "baseline") {
    throw std::runtime_error("GEGLU_CPU_CAPABILITY: expected baseline, avx2 or avx512, got '" + limit + "'");
  }
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && limit == "avx512") return kAvx512Kernels;
  if (avx2 && limit != "baseline") return kAvx2Kernels;
#endif
  return kBaselineKernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace geglu::cpu
