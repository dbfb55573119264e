#include "cuda/gated_op.h"

#include <optional>

#include "cuda/on_device.h"
#include "cuda/skinny.h"
#include "cuda/sm90/gated_gemm.h"

namespace geglu::cuda {
namespace {

using torch::stable::Tensor;

enum class Kernel { kNone, kFewRows, kGatedGemm };

struct Choice {
  Kernel kernel = Kernel::kNone;
  GatedProblem problem = {};
  sm90::GatedGemmConfig config = {};
};

// The product as a kernel wants it; nothing if its elements are not neighbours.
std::optional<GatedProblem> as_problem(const LinearCall& gate, const LinearCall* up) {
  const std::optional<Matrix> x = detail::as_matrix(gate.x);
  const auto dense = [](const Tensor& weight) { return weight.stride(1) == 1 && weight.stride(0) >= weight.size(1); };
  const auto neighbours = [](const Tensor* bias) { return bias == nullptr || bias->stride(0) == 1; };
  if (gate.depth == 0 || !x || x->col_stride != 1 || !dense(gate.weight)) return std::nullopt;
  if (!neighbours(gate.bias) || (up != nullptr && (!dense(up->weight) || !neighbours(up->bias)))) return std::nullopt;
  const auto address = [](const Tensor* tensor) { return tensor != nullptr ? tensor->data_ptr() : nullptr; };
  GatedProblem problem = {};
  problem.x = x->data;
  problem.gate = gate.weight.data_ptr();
  problem.up = up != nullptr ? up->weight.data_ptr() : nullptr;
  problem.gate_bias = address(gate.bias);
  problem.up_bias = up != nullptr ? address(up->bias) : nullptr;
  problem.dtype = gate.dtype;
  problem.rows = gate.rows;
  problem.cols = gate.cols;
  problem.depth = gate.depth;
  problem.x_pitch = gate.rows == 1 ? gate.depth : x->row_stride;
  problem.gate_pitch = gate.weight.stride(0);
  problem.up_pitch = up != nullptr ? up->weight.stride(0) : 0;
  return problem;
}

Choice choose(const LinearCall& gate, const LinearCall* up) {
  const std::optional<GatedProblem> problem = as_problem(gate, up);
  if (!problem) return {};
  const int device = gate.x.get_device_index();
  if (skinny_fits(*problem, device)) return {Kernel::kFewRows, *problem};
  if (!sm90::gated_gemm_fits(*problem, device)) return {};
  int multiprocessors = 0;
  if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return {};
  const auto config = sm90::choose_gated_gemm(gate.rows, gate.cols, gate.depth, multiprocessors);
  if (!sm90::gated_gemm_pays(config, gate.rows, gate.cols, gate.depth, multiprocessors)) return {};
  return {Kernel::kGatedGemm, *problem, config};
}

}  // namespace

std::string own_kernel(const LinearCall& gate, const LinearCall* up) {
  const Choice choice = choose(gate, up);
  switch (choice.kernel) {
    case Kernel::kNone:
      return "";
    case Kernel::kFewRows:
      return "few_rows";
    case Kernel::kGatedGemm:
      break;
  }
  return "gated_gemm:" + std::to_string(choice.config.tile_cols) + "x" + std::to_string(choice.config.cluster);
}

bool run_own_kernel(const LinearCall& gate, const LinearCall* up, bool tanh, bool after_own, const Tensor& out) {
  Choice choice = choose(gate, up);
  if (choice.kernel == Kernel::kNone) return false;
  choice.problem.tanh = tanh;
  choice.problem.weights_are_old = after_own;
  choice.problem.out = out.data_ptr();
  const OnDevice on(out);
  on.check(choice.kernel == Kernel::kFewRows ? launch_skinny(choice.problem, on.stream())
                                             : sm90::launch_gated_gemm(choice.problem, choice.config, on.stream()));
  return true;
}

}  // namespace geglu::cuda
