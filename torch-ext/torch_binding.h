// The operators, declared: one set for each backend.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace geglu {

namespace cpu {
struct Backend;
struct LinearBackend;
std::string capability();
std::string export_tuning();
std::string import_tuning(const std::string& entry);
}  // namespace cpu
namespace cuda {
struct Backend;
struct LinearBackend;
// The algorithms that linear_tune() chose in this process, one line of name=value words for each.
std::string export_tuning();
// Takes one such line. Returns "", or why it was refused.
std::string import_tuning(const std::string& entry);
}  // namespace cuda

// Defined in pointwise_ops.h, instantiated once for each backend.
template <class Backend>
struct PointwiseOps {
  using Tensor = torch::stable::Tensor;

  static Tensor geglu(const Tensor& gate, const Tensor& up, bool tanh);
  static Tensor geglu_packed(const Tensor& x, bool tanh, bool gate_first);
  static std::tuple<Tensor, Tensor> geglu_backward(const Tensor& grad_out, const Tensor& gate, const Tensor& up,
                                                   bool tanh);
  static Tensor geglu_packed_backward(const Tensor& grad_out, const Tensor& x, bool tanh, bool gate_first);
  static void gelu_and_mul(const Tensor& out, const Tensor& x);
  static void gelu_tanh_and_mul(const Tensor& out, const Tensor& x);
};

// Defined in linear_ops.h, instantiated once for each backend. `activation` is 0 (none), 1 (exact GELU) or 2 (tanh
// GELU).
template <class Backend>
struct LinearOps {
  using Tensor = torch::stable::Tensor;

  static Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t activation,
                       bool allow_tf32);
  // The result, and what GELU was applied to.
  static std::tuple<Tensor, Tensor> linear_with_preactivation(const Tensor& x, const Tensor& weight,
                                                              const std::optional<Tensor>& bias, int64_t activation,
                                                              bool allow_tf32);
  // The gradients of x, weight and bias; of shape (0,) where not needed. x serves the weight's, the weight x's.
  static std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_out, const std::optional<Tensor>& x,
                                                            const std::optional<Tensor>& weight,
                                                            const std::optional<Tensor>& pre, int64_t activation,
                                                            bool allow_tf32, bool needs_x, bool needs_weight,
                                                            bool needs_bias);
  // How linear (linear_with_preactivation, if training) would compute: the names of its launches, joined by "+".
  static std::string linear_route(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                  int64_t activation, bool allow_tf32, bool training);
  // Measures the algorithms for linear, or for a training step's products, and keeps the best. Returns one line of
  // name=value words for each product.
  static std::string linear_tune(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                 int64_t activation, bool allow_tf32, bool training);
};

// Defined in mlp_ops.h, instantiated once for each backend.
template <class Backend>
struct MlpOps {
  using Tensor = torch::stable::Tensor;

  // gelu(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias)
  static Tensor linear_geglu(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                             const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& up_bias, bool tanh,
                             bool allow_tf32);
  // That @ down_weight.T + down_bias
  static Tensor geglu_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                          const Tensor& down_weight, const std::optional<Tensor>& gate_bias,
                          const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias, bool tanh,
                          bool allow_tf32);
  // How geglu_mlp would compute: the names of its launches, joined by "+".
  static std::string geglu_mlp_route(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                                     const Tensor& down_weight, const std::optional<Tensor>& gate_bias,
                                     const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                                     bool tanh, bool allow_tf32);
};

}  // namespace geglu
