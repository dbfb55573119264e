// What every backend does around a linear layer's matrix products: check the arguments, allocate the results, fall back
// to torch's own product where the backend has no fused one. A backend supplies
//   static bool linear(const LinearCall&, const Tensor& out, const Tensor* pre)
//       the whole forward: out, and pre if not null; both contiguous. False if it cannot; then nothing was written.
//   static bool multiply(const Matrix& left, const Matrix& right, const Tensor& out, DType, bool allow_tf32)
//       out = left @ right, out contiguous; false if it cannot
//   static void gelu(const Tensor& pre, const Tensor& out, DType, bool tanh)
//       both contiguous; out may be pre
//   static void gelu_backward(const GeluGradient&)
//   static std::string route(const LinearCall&, const Tensor& out, const Tensor* pre)
//   static std::string tune(const LinearCall&, bool training)
// and is called with at least one element in every result.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/linear.h"
#include "op_checks.h"
#include "pointwise_ops.h"
#include "torch_binding.h"

namespace geglu {

// A tensor (..., C) as a matrix with one row for each leading index. Strides count elements.
struct Matrix {
  const void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;

  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride}; }
};

// Checked arguments: out (rows, cols) = activation(x (rows, depth) @ weight (cols, depth).T + bias (cols)).
struct LinearCall {
  const torch::stable::Tensor& x;
  const torch::stable::Tensor& weight;
  const torch::stable::Tensor* bias;  // may be null
  DType dtype;
  Activation activation;
  bool allow_tf32;
  int64_t rows;
  int64_t cols;
  int64_t depth;
};

// grad_pre = grad_out * gelu'(pre), and its column sums. All are (..., C) of one shape; pre and grad_pre are contiguous
// and null without an activation; grad_bias may be null.
struct GeluGradient {
  const torch::stable::Tensor& grad_out;
  const torch::stable::Tensor* pre;
  const torch::stable::Tensor* grad_pre;
  const torch::stable::Tensor* grad_bias;
  DType dtype;
  Activation activation;
};

namespace detail {

inline const Tensor* pointer_to(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

inline int64_t leading_size(IntHeaderOnlyArrayRef sizes) {
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < sizes.size(); ++d) rows *= sizes[d];
  return rows;
}

inline std::vector<int64_t> with_last_size(IntHeaderOnlyArrayRef sizes, int64_t last) {
  std::vector<int64_t> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// The tensor as a matrix, if its leading dimensions have a common row distance; that of no rows is any.
inline std::optional<Matrix> as_matrix(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const size_t last = sizes.size() - 1;
  if (leading_size(sizes) == 0) return Matrix{tensor.data_ptr(), 0, sizes[last], sizes[last], strides[last]};
  int64_t rows = 1;
  int64_t row_stride = 0;
  for (size_t d = last; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (rows == 1) {
      row_stride = strides[d];
    } else if (strides[d] != row_stride * rows) {
      return std::nullopt;
    }
    rows *= sizes[d];
  }
  return Matrix{tensor.data_ptr(), rows, sizes[last], row_stride, strides[last]};
}

// A view of the tensor's memory from its first element on.
inline Tensor view_as(const Tensor& tensor, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                        strides.data(), 0, &handle));
  return Tensor(handle);
}

// (..., C) as a tensor (rows, C): where it is a matrix, without a call of torch's dispatcher.
inline Tensor as_rows(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  if (sizes.size() == 2) return tensor;
  const std::optional<Matrix> matrix = as_matrix(tensor);
  if (!matrix) {
    return torch::stable::reshape(tensor, std::vector<int64_t>{leading_size(sizes), sizes[sizes.size() - 1]});
  }
  const std::array<int64_t, 2> shape{matrix->rows, matrix->cols};
  const std::array<int64_t, 2> strides{matrix->rows == 1 ? matrix->cols : matrix->row_stride, matrix->col_stride};
  return view_as(tensor, {shape.data(), shape.size()}, {strides.data(), strides.size()});
}

// Gradients are not torch's business while it lives: operators with `out` refuse arguments that require one.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool enabled_;
};

// Calls an operator of torch that has one result.
template <class... Arguments>
Tensor call_aten(const char* name, const char* overload, const Arguments&... arguments) {
  const NoGrad no_grad;
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The variants with `out` stay as they are under autocast, which casts the arguments of the others.
inline void torch_linear(const LinearCall& call, const Tensor& out) {
  const std::optional<Tensor> bias = call.bias ? std::optional(*call.bias) : std::nullopt;
  call_aten("aten::linear", "out", as_rows(call.x), call.weight, bias, as_rows(out));
}

inline void torch_multiply(const Tensor& left, const Tensor& right, const Tensor& out) {
  call_aten("aten::mm", "out", left, right, as_rows(out));
}

inline Activation checked_activation(const char* op, int64_t activation) {
  if (activation < 0 || activation > 2) {
    checks::fail(std::string(op) + ": activation must be 0, 1 or 2, but is " + std::to_string(activation));
  }
  return static_cast<Activation>(activation);
}

// bias_name is what the caller calls the bias.
inline LinearCall check_linear(const Arg& x, const Arg& weight, const std::optional<Tensor>& bias_tensor,
                               const char* bias_name, int64_t activation, bool allow_tf32) {
  checks::check_device(weight, x);
  const DType dtype = check_first(x);
  checks::check_dtype(weight, x);
  if (weight.dim() != 2 || weight.sizes[1] != x.last_size()) {
    checks::fail(weight.label() + " must have shape [N, " + std::to_string(x.last_size()) + "] for " + x.name +
                 " of shape " + checks::to_string(x.sizes) + ", but has " + checks::to_string(weight.sizes));
  }
  if (bias_tensor) {
    const Arg bias(x.op, bias_name, *bias_tensor);
    checks::check_device(bias, x);
    checks::check_dtype(bias, x);
    if (bias.dim() != 1 || bias.sizes[0] != weight.sizes[0]) {
      checks::fail(bias.label() + " must have shape [" + std::to_string(weight.sizes[0]) + "] for " + weight.name +
                   " of shape " + checks::to_string(weight.sizes) + ", but has " + checks::to_string(bias.sizes));
    }
  }
  return {
      x.tensor,   weight.tensor,         pointer_to(bias_tensor), dtype,        checked_activation(x.op, activation),
      allow_tf32, leading_size(x.sizes), weight.sizes[0],         x.last_size()};
}

inline LinearCall check_linear(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                               int64_t activation, bool allow_tf32) {
  return check_linear(Arg(op, "x", x), Arg(op, "weight", weight), bias, "bias", activation, allow_tf32);
}

// Computes out, and pre if not null.
template <class Backend>
void forward(const LinearCall& call, const Tensor& out, const Tensor* pre) {
  if (call.rows == 0 || call.cols == 0 || Backend::linear(call, out, pre)) return;
  const Tensor& before = pre ? *pre : out;
  torch_linear(call, before);
  if (call.activation != Activation::kNone) {
    Backend::gelu(before, out, call.dtype, call.activation == Activation::kTanh);
  }
}

// out = left @ right. torch's own product takes tensors, and makes them only if it has to: hence the functions.
template <class Backend, class Left, class Right>
void multiply(const Matrix& left, const Matrix& right, Tensor& out, DType dtype, bool allow_tf32, Left left_tensor,
              Right right_tensor) {
  if (left.rows == 0 || right.cols == 0) return;
  if (left.cols == 0) {
    torch::stable::zero_(out);
  } else if (!Backend::multiply(left, right, out, dtype, allow_tf32)) {
    torch_multiply(left_tensor(), right_tensor(), out);
  }
}

// A tensor that multiply() can read through its matrix: itself, or a contiguous copy.
inline Tensor regular(const Tensor& tensor) { return as_matrix(tensor) ? tensor : torch::stable::contiguous(tensor); }

}  // namespace detail

template <class Backend>
torch::stable::Tensor LinearOps<Backend>::linear(const Tensor& x, const Tensor& weight,
                                                 const std::optional<Tensor>& bias, int64_t activation,
                                                 bool allow_tf32) {
  const LinearCall call = detail::check_linear("linear", x, weight, bias, activation, allow_tf32);
  const Tensor out = detail::empty_contiguous(x, detail::with_last_size(x.sizes(), call.cols));
  detail::forward<Backend>(call, out, nullptr);
  return out;
}

template <class Backend>
std::tuple<torch::stable::Tensor, torch::stable::Tensor> LinearOps<Backend>::linear_with_preactivation(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t activation, bool allow_tf32) {
  const char* const op = "linear_with_preactivation";
  const LinearCall call = detail::check_linear(op, x, weight, bias, activation, allow_tf32);
  if (call.activation == Activation::kNone) checks::fail(std::string(op) + ": activation must be 1 or 2, but is 0");
  const std::vector<int64_t> sizes = detail::with_last_size(x.sizes(), call.cols);
  const Tensor out = detail::empty_contiguous(x, sizes);
  const Tensor pre = detail::empty_contiguous(x, sizes);
  detail::forward<Backend>(call, out, &pre);
  return {out, pre};
}

template <class Backend>
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> LinearOps<Backend>::linear_backward(
    const Tensor& grad_out_tensor, const std::optional<Tensor>& x, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& pre, int64_t activation_code, bool allow_tf32, bool needs_x, bool needs_weight,
    bool needs_bias) {
  const char* const op = "linear_backward";
  const Activation activation = detail::checked_activation(op, activation_code);
  const checks::Arg grad_out(op, "grad_out", grad_out_tensor);
  const DType dtype = detail::check_first(grad_out);
  const int64_t rows = detail::leading_size(grad_out.sizes);
  const int64_t cols = grad_out.last_size();
  const auto check = [&](const char* name, const std::optional<Tensor>& tensor, const char* what) {
    if (!tensor) checks::fail(std::string(op) + ": " + name + " must be given for " + what);
    const checks::Arg arg(op, name, *tensor);
    checks::check_device(arg, grad_out);
    checks::check_dtype(arg, grad_out);
    return arg;
  };
  if (activation != Activation::kNone) checks::check_shape(check("pre", pre, "an activation"), grad_out);
  if (needs_x) {
    const checks::Arg arg = check("weight", weight, "the gradient of x");
    if (arg.dim() != 2 || arg.sizes[0] != cols) {
      checks::fail(arg.label() + " must have shape [" + std::to_string(cols) + ", K] for grad_out of shape " +
                   checks::to_string(grad_out.sizes) + ", but has " + checks::to_string(arg.sizes));
    }
  }
  if (needs_weight) {
    const checks::Arg arg = check("x", x, "the gradient of weight");
    checks::check_has_dimension(arg);
    if (detail::leading_size(arg.sizes) != rows) {
      checks::fail(arg.label() + " must have the leading sizes of grad_out, of shape " +
                   checks::to_string(grad_out.sizes) + ", but has shape " + checks::to_string(arg.sizes));
    }
  }

  const auto empty = [&](std::vector<int64_t> sizes) { return detail::empty_contiguous(grad_out_tensor, sizes); };
  Tensor grad_x = empty(needs_x ? detail::with_last_size(grad_out.sizes, weight->size(1)) : std::vector<int64_t>{0});
  Tensor grad_weight =
      empty(needs_weight ? std::vector<int64_t>{cols, x->size(x->dim() - 1)} : std::vector<int64_t>{0});
  Tensor grad_bias = empty({needs_bias ? cols : 0});

  Tensor grad_pre = detail::regular(grad_out_tensor);
  const bool gelu = activation != Activation::kNone;
  if (rows == 0) {
    torch::stable::zero_(grad_bias);
  } else if (cols != 0 && (gelu || needs_bias)) {
    const Tensor incoming = grad_pre;
    std::optional<Tensor> dense_pre;
    if (gelu) {
      dense_pre = torch::stable::contiguous(*pre);
      grad_pre = empty({grad_out.sizes.begin(), grad_out.sizes.end()});
    }
    Backend::gelu_backward({incoming, detail::pointer_to(dense_pre), gelu ? &grad_pre : nullptr,
                            needs_bias ? &grad_bias : nullptr, dtype, activation});
  }

  const Matrix grads = *detail::as_matrix(grad_pre);
  if (needs_x) {
    detail::multiply<Backend>(
        grads, *detail::as_matrix(*weight), grad_x, dtype, allow_tf32, [&] { return detail::as_rows(grad_pre); },
        [&] { return *weight; });
  }
  if (needs_weight) {
    const Tensor inputs = detail::regular(*x);
    detail::multiply<Backend>(
        grads.transposed(), *detail::as_matrix(inputs), grad_weight, dtype, allow_tf32,
        [&] { return torch::stable::transpose(detail::as_rows(grad_pre), 0, 1); },
        [&] { return detail::as_rows(inputs); });
  }
  return {grad_x, grad_weight, grad_bias};
}

template <class Backend>
std::string LinearOps<Backend>::linear_route(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                             int64_t activation, bool allow_tf32, bool training) {
  const LinearCall call = detail::check_linear("linear_route", x, weight, bias, activation, allow_tf32);
  if (call.rows == 0 || call.cols == 0) return "empty";
  const std::vector<int64_t> sizes = detail::with_last_size(x.sizes(), call.cols);
  const Tensor out = detail::empty_contiguous(x, sizes);
  const bool keeps_pre = training && call.activation != Activation::kNone;
  const Tensor pre = detail::empty_contiguous(x, keeps_pre ? sizes : std::vector<int64_t>{0});
  return Backend::route(call, out, keeps_pre ? &pre : nullptr);
}

template <class Backend>
std::string LinearOps<Backend>::linear_tune(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                            int64_t activation, bool allow_tf32, bool training) {
  const LinearCall call = detail::check_linear("tune", x, weight, bias, activation, allow_tf32);
  return call.rows == 0 || call.cols == 0 ? "" : Backend::tune(call, training);
}

}  // namespace geglu
