#include "cuda/gated_op.h"

#include <optional>
#include <variant>

#include "cuda/on_device.h"
#include "cuda/skinny.h"
#include "cuda/sm90/tall_gemm.h"
#include "cuda/sm90/thin_gemm.h"

namespace geglu::cuda {
namespace {

using torch::stable::Tensor;

struct FewRows {};

struct Choice {
  GatedProblem problem = {};
  std::variant<std::monostate, FewRows, sm90::ThinGemmConfig, sm90::TallGemmConfig> kernel;
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

// On the current device, which is that of the tensors.
Choice choose(const LinearCall& gate, const LinearCall* up, int device) {
  const std::optional<GatedProblem> problem = as_problem(gate, up);
  if (!problem) return {};
  if (skinny_fits(*problem, device)) return {*problem, FewRows{}};
  if (const auto config = sm90::choose_thin_gemm(*problem, device)) return {*problem, *config};
  if (const auto config = sm90::choose_tall_gemm(*problem, device)) return {*problem, *config};
  return {};
}

template <class... Cases>
struct Visitor : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Visitor(Cases...) -> Visitor<Cases...>;

}  // namespace

std::string own_kernel(const LinearCall& gate, const LinearCall* up) {
  const auto sizes = [](int32_t first, int32_t second) { return std::to_string(first) + "x" + std::to_string(second); };
  const Visitor name{
      [](std::monostate) { return std::string(); },
      [](FewRows) { return std::string("few_rows"); },
      [&](const sm90::ThinGemmConfig& config) { return "thin_gemm:" + sizes(config.tile_cols, config.split); },
      [&](const sm90::TallGemmConfig& config) { return "tall_gemm:" + sizes(config.tile_cols, config.cluster); },
  };
  const OnDevice on(gate.x);
  return std::visit(name, choose(gate, up, on.device()).kernel);
}

bool run_own_kernel(const LinearCall& gate, const LinearCall* up, bool tanh, bool after_own, const Tensor& out) {
  const OnDevice on(out);
  Choice choice = choose(gate, up, on.device());
  GatedProblem& problem = choice.problem;
  problem.tanh = tanh;
  problem.weights_are_old = after_own;
  problem.out = out.data_ptr();
  const auto launched = [&](cudaError_t status) {
    on.check(status);
    return true;
  };
  const Visitor launch{
      [](std::monostate) { return false; },
      [&](FewRows) { return launched(launch_skinny(problem, on.stream())); },
      [&](const sm90::ThinGemmConfig& config) { return launched(launch_thin_gemm(problem, config, on.stream())); },
      [&](const sm90::TallGemmConfig& config) { return launched(launch_tall_gemm(problem, config, on.stream())); },
  };
  return std::visit(launch, choice.kernel);
}

}  // namespace geglu::cuda
