// The CPU backend of the operators: torch's thread pool around the kernels of the chosen instruction set.
#include <torch/csrc/stable/ops.h>

#include <string>

#include "cpu/geglu.h"
#include "pointwise_ops.h"
#include "torch_binding.h"

namespace geglu {

namespace cpu {

struct Backend {
  static void launch(const GegluForward& problem, const torch::stable::Tensor&) { run(kernels().forward, problem); }
  static void launch(const GegluBackward& problem, const torch::stable::Tensor&) { run(kernels().backward, problem); }

 private:
  template <class Problem>
  static void run(void (*kernel)(const Problem&, int64_t, int64_t), const Problem& problem) {
    torch::stable::parallel_for(0, problem.rows.rows * problem.rows.cols, kGrain,
                                [&](int64_t begin, int64_t end) { kernel(problem, begin, end); });
  }
};

std::string capability() { return kernels().capability; }

}  // namespace cpu

template struct PointwiseOps<cpu::Backend>;

}  // namespace geglu
