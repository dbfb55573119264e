// The gated block in one call from the host: both projections, GeGLU, and the projection back. Its products and its
// pointwise kernel are those of `linear` and `geglu`. Beside what linear_ops.h asks for, a backend supplies
//   static void geglu(const Tensor& gate, const Tensor& up, const Tensor& out, DType, bool tanh)
//       all contiguous and of one shape, not empty
//   static bool few_rows_fit(const LinearCall& gate, const LinearCall* up)
//       whether few_rows() takes this product, or these two
//   static void few_rows(const LinearCall& gate, const LinearCall* up, bool tanh, const Tensor& out)
//       out = gelu(gate) * up, or gate's product if up is null, in one kernel that reads the weights at memory speed
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "linear_ops.h"
#include "torch_binding.h"

namespace geglu {

// Checked arguments: out (rows, cols) = gelu(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias).
struct GatedCall {
  LinearCall gate;
  LinearCall up;
  bool tanh;
};

namespace detail {

// Whether rows of two weights lie on each other. Halves of one packed weight do not, whichever way they are packed, and
// one tensor may be both weights.
inline bool overlap(const Tensor& first, const Tensor& second, DType dtype) {
  if (first.numel() == 0 || first.data_ptr() == second.data_ptr()) return false;
  const int64_t size = element_size(dtype);
  const int64_t pitch = first.stride(0);
  const int64_t width = first.size(1);
  if (first.stride(1) != 1 || second.stride(1) != 1 || second.stride(0) != pitch || pitch < width) return false;
  const auto* const a = static_cast<const char*>(first.data_ptr());
  const auto* const b = static_cast<const char*>(second.data_ptr());
  const int64_t reach = ((first.size(0) - 1) * pitch + width) * size;
  if (b + reach <= a || a + reach <= b) return false;
  const int64_t column = ((((b - a) / size) % pitch) + pitch) % pitch;
  return column < width || column + width > pitch;
}

inline GatedCall check_gated(const char* op, const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                             const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& up_bias, bool tanh,
                             bool allow_tf32) {
  const GatedCall call{check_linear(op, x, gate_weight, gate_bias, 0, allow_tf32, {"x", "gate_weight", "gate_bias"}),
                       check_linear(op, x, up_weight, up_bias, 0, allow_tf32, {"x", "up_weight", "up_bias"}), tanh};
  checks::check_shape(Arg(op, "up_weight", up_weight), Arg(op, "gate_weight", gate_weight));
  if (overlap(gate_weight, up_weight, call.gate.dtype)) {
    checks::fail(std::string(op) + ": up_weight must not overlap gate_weight, whose rows it shares only in part");
  }
  return call;
}

template <class Backend>
void gated_forward(const GatedCall& call, const Tensor& out) {
  if (call.gate.rows == 0 || call.gate.cols == 0) return;
  if (Backend::few_rows_fit(call.gate, &call.up)) {
    Backend::few_rows(call.gate, &call.up, call.tanh, out);
    return;
  }
  const std::vector<int64_t> sizes(out.sizes().begin(), out.sizes().end());
  const Tensor gate = empty_contiguous(call.gate.x, sizes);
  const Tensor up = empty_contiguous(call.gate.x, sizes);
  forward<Backend>(call.gate, gate, nullptr);
  forward<Backend>(call.up, up, nullptr);
  Backend::geglu(gate, up, out, call.gate.dtype, call.tanh);
}

}  // namespace detail

template <class Backend>
torch::stable::Tensor MlpOps<Backend>::linear_geglu(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                                                    const std::optional<Tensor>& gate_bias,
                                                    const std::optional<Tensor>& up_bias, bool tanh, bool allow_tf32) {
  const GatedCall call =
      detail::check_gated("linear_geglu", x, gate_weight, up_weight, gate_bias, up_bias, tanh, allow_tf32);
  const Tensor out = detail::empty_contiguous(x, detail::with_last_size(x.sizes(), call.gate.cols));
  detail::gated_forward<Backend>(call, out);
  return out;
}

template <class Backend>
torch::stable::Tensor MlpOps<Backend>::geglu_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                                                 const Tensor& down_weight, const std::optional<Tensor>& gate_bias,
                                                 const std::optional<Tensor>& up_bias,
                                                 const std::optional<Tensor>& down_bias, bool tanh, bool allow_tf32) {
  const char* const op = "geglu_mlp";
  const GatedCall call = detail::check_gated(op, x, gate_weight, up_weight, gate_bias, up_bias, tanh, allow_tf32);
  const Tensor hidden = detail::empty_contiguous(x, detail::with_last_size(x.sizes(), call.gate.cols));
  const LinearCall down = detail::check_linear(op, hidden, down_weight, down_bias, 0, allow_tf32,
                                               {"gelu(gate) * up", "down_weight", "down_bias"});
  const Tensor out = detail::empty_contiguous(x, detail::with_last_size(x.sizes(), down.cols));
  detail::gated_forward<Backend>(call, hidden);
  if (down.rows > 0 && down.cols > 0 && Backend::few_rows_fit(down, nullptr)) {
    Backend::few_rows(down, nullptr, tanh, out);
  } else {
    detail::forward<Backend>(down, out, nullptr);
  }
  return out;
}

template <class Backend>
std::string MlpOps<Backend>::geglu_mlp_route(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                                             const Tensor& down_weight, const std::optional<Tensor>& gate_bias,
                                             const std::optional<Tensor>& up_bias,
                                             const std::optional<Tensor>& down_bias, bool tanh, bool allow_tf32) {
  const char* const op = "geglu_mlp_route";
  const GatedCall call = detail::check_gated(op, x, gate_weight, up_weight, gate_bias, up_bias, tanh, allow_tf32);
  const Tensor hidden = detail::empty_contiguous(x, detail::with_last_size(x.sizes(), call.gate.cols));
  const LinearCall down = detail::check_linear(op, hidden, down_weight, down_bias, 0, allow_tf32,
                                               {"gelu(gate) * up", "down_weight", "down_bias"});
  const Tensor out = detail::empty_contiguous(x, detail::with_last_size(x.sizes(), down.cols));
  const auto route = [](const LinearCall& product, const Tensor& result) {
    return product.rows == 0 || product.cols == 0 ? "empty" : Backend::route(product, result, nullptr);
  };
  const bool empty = call.gate.rows == 0 || call.gate.cols == 0;
  const std::string into = !empty && Backend::few_rows_fit(call.gate, &call.up)
                               ? "few_rows"
                               : route(call.gate, hidden) + "+" + route(call.up, hidden) + "+geglu";
  const bool nothing = down.rows == 0 || down.cols == 0;
  return into + "+" + (!nothing && Backend::few_rows_fit(down, nullptr) ? "few_rows" : route(down, out));
}

}  // namespace geglu
