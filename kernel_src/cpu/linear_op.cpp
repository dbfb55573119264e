// The CPU backend of the linear operators: torch's own matrix product, which is oneDNN's or a BLAS's, and our GELU.
#include <optional>
#include <string>

#include "cpu/geglu.h"
#include "linear_ops.h"
#include "mlp_ops.h"
#include "torch_binding.h"

namespace geglu {

namespace cpu {

struct LinearBackend {
  using Tensor = torch::stable::Tensor;

  static bool linear(const LinearCall&, const Tensor&, const Tensor*) { return false; }
  static bool multiply(const Matrix&, const Matrix&, const Tensor&, DType, bool) { return false; }

  static void gelu(const Tensor& pre, const Tensor& out, DType dtype, bool tanh) {
    run(kernels().gelu,
        GeluForward{pre.data_ptr(), out.data_ptr(), dtype, tanh, flat_rows<GeluForward::kTensors>(out.numel())});
  }

  static void geglu(const GegluForward& problem, const Tensor&) { run(kernels().forward, problem); }

  static std::string own_kernel(const LinearCall&, const LinearCall*) { return ""; }
  static bool run_own_kernel(const LinearCall&, const LinearCall*, bool, bool, const Tensor&) { return false; }

  static void gelu_backward(const GeluGradient& gradient) {
    Tensor grads = gradient.grad_out;
    if (gradient.activation != Activation::kNone) {
      grads = *gradient.grad_pre;
      pointwise_backward(gradient);
    }
    if (gradient.grad_bias != nullptr) {
      const detail::NoGrad no_grad;
      Tensor sums = *gradient.grad_bias;
      torch::stable::sum_out(sums, detail::as_rows(grads), std::vector<int64_t>{0});
    }
  }

  static std::string route(const LinearCall& call, const Tensor&, const Tensor*) {
    return call.activation == Activation::kNone ? "torch" : "torch+pointwise";
  }
  static std::string tune(const LinearCall&, bool) { return ""; }

 private:
  template <class Problem>
  static void run(void (*kernel)(const Problem&, int64_t, int64_t), const Problem& problem) {
    torch::stable::parallel_for(0, problem.rows.rows * problem.rows.cols, kGrain,
                                [&](int64_t begin, int64_t end) { kernel(problem, begin, end); });
  }

  static void pointwise_backward(const GeluGradient& gradient) {
    const Tensor& grad_pre = *gradient.grad_pre;
    GeluBackward problem{gradient.grad_out.data_ptr(),
                         gradient.pre->data_ptr(),
                         grad_pre.data_ptr(),
                         gradient.dtype,
                         gradient.activation == Activation::kTanh,
                         {}};
    const auto plan = [&](const Tensor& grad_out) {
      const int64_t* const dense = grad_pre.strides().data();
      return plan_rows<GeluBackward::kTensors>(grad_out.dim(), grad_out.sizes().data(),
                                               {grad_out.strides().data(), dense, dense}, GeluBackward::kGradPre);
    };
    std::optional<Tensor> copy;
    auto rows = plan(gradient.grad_out);
    if (!rows) {
      copy = torch::stable::contiguous(gradient.grad_out);
      problem.grad_out = copy->data_ptr();
      rows = plan(*copy);
    }
    problem.rows = *rows;
    run(kernels().gelu_backward, problem);
  }
};

std::string export_tuning() { return ""; }
std::string import_tuning(const std::string&) { return "this build has no CUDA"; }

}  // namespace cpu

template struct LinearOps<cpu::LinearBackend>;
template struct MlpOps<cpu::LinearBackend>;

}  // namespace geglu
