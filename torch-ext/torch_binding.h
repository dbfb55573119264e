// The operators, declared: one set for each backend.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>
#include <tuple>

namespace geglu {

namespace cpu {
struct Backend;
std::string capability();
}  // namespace cpu
namespace cuda {
struct Backend;
}

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

}  // namespace geglu
