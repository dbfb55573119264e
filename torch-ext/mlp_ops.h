// The gated block in one call from the host: both projections, GeGLU, and the projection back. Its products and its
// pointwise kernel are those of `linear` and `geglu`. Beside what linear_ops.h asks for, a backend supplies
//   static void geglu(const GegluForward&, const Tensor& where)
//       a launch of the pointwise kernel on the device of `where`; the walk is not empty
//   static std::string own_kernel(const LinearCall& gate, const LinearCall* up)
//       the name of the one kernel that computes gelu(gate) * up, or gate's product if up is null; empty if none does
//   static bool run_own_kernel(const LinearCall& gate, const LinearCall* up, bool tanh, bool after_own,
//                              const Tensor& out)
//       runs it, or returns false if there is none; the result is not empty. after_own: so was the kernel before
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/plan.h"
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
inline bool overlap(const Arg& first, const Arg& second, DType dtype) {
  const auto* const a = static_cast<const char*>(first.tensor.data_ptr());
  const auto* const b = static_cast<const char*>(second.tensor.data_ptr());
  const int64_t rows = first.sizes[0];
  const int64_t width = first.sizes[1];
  if (rows == 0 || width == 0 || a == b) return false;
  const int64_t size = element_size(dtype);
  const int64_t pitch = first.strides[0];
  if (first.strides[1] != 1 || second.strides[1] != 1 || second.strides[0] != pitch || pitch < width) return false;
  const int64_t reach = ((rows - 1) * pitch + width) * size;
  if (b + reach <= a || a + reach <= b) return false;
  const int64_t column = ((((b - a) / size) % pitch) + pitch) % pitch;
  return column < width || column + width > pitch;
}

inline GatedCall check_gated(const char* op, const Tensor& x_tensor, const Tensor& gate_weight, const Tensor& up_weight,
                             const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& up_bias, bool tanh,
                             bool allow_tf32) {
  const Arg x(op, "x", x_tensor);
  const Arg gate(op, "gate_weight", gate_weight);
  const Arg up(op, "up_weight", up_weight);
  const GatedCall call{check_linear(x, gate, gate_bias, "gate_bias", 0, allow_tf32),
                       check_linear(x, up, up_bias, "up_bias", 0, allow_tf32), tanh};
  checks::check_shape(up, gate);
  if (overlap(gate, up, call.gate.dtype)) {
    checks::fail(up.label() + " must not overlap gate_weight, whose rows it shares only in part");
  }
  return call;
}

// Where the memory begins that a tensor is a view of.
inline const char* storage_begin(const Tensor& tensor, DType dtype) {
  int64_t offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
  return static_cast<const char*>(tensor.data_ptr()) - offset * element_size(dtype);
}

// The tensor that has `first` and `second`, of one shape, as the halves of its first dimension, if there is one.
inline std::optional<Tensor> joined(const Tensor& first, const Tensor& second, DType dtype) {
  const auto sizes = first.sizes();
  const auto strides = first.strides();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] != second.strides()[d]) return std::nullopt;
  }
  const int64_t distance = sizes[0] * strides[0] * element_size(dtype);
  // Neighbours in memory may be two allocations, which no one tensor can cover.
  if (distance == 0 || static_cast<const char*>(first.data_ptr()) + distance != second.data_ptr() ||
      storage_begin(first, dtype) != storage_begin(second, dtype)) {
    return std::nullopt;
  }
  std::vector<int64_t> doubled(sizes.begin(), sizes.end());
  doubled[0] *= 2;
  return view_as(first, {doubled.data(), doubled.size()}, strides);
}

// Both projections as one product, where the two weights are halves of one tensor and so are the biases, if any.
class Joined {
 public:
  explicit Joined(const GatedCall& call) {
    const LinearCall& gate = call.gate;
    if ((gate.bias == nullptr) != (call.up.bias == nullptr)) return;
    if (gate.bias != nullptr && !(bias_ = joined(*gate.bias, *call.up.bias, gate.dtype))) return;
    weight_ = joined(gate.weight, call.up.weight, gate.dtype);
    if (!weight_) return;
    call_.emplace(LinearCall{gate.x, *weight_, pointer_to(bias_), gate.dtype, gate.activation, gate.allow_tf32,
                             gate.rows, 2 * gate.cols, gate.depth});
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

  // out (rows, 2 * cols): gate and up side by side. Null if it takes two products.
  const LinearCall* call() const { return call_ ? &*call_ : nullptr; }

 private:
  std::optional<Tensor> bias_;
  std::optional<Tensor> weight_;
  std::optional<LinearCall> call_;
};

// out (rows, cols) = gelu(gate) * up, where rows of gate and up are `pitch` elements apart.
template <class Backend>
void gated_product(const GatedCall& call, const void* gate, const void* up, int64_t pitch, const Tensor& out) {
  GegluForward problem{gate, up, out.data_ptr(), call.gate.dtype, call.tanh, {}};
  const std::array<int64_t, 2> sizes{call.gate.rows, call.gate.cols};
  const std::array<int64_t, 2> apart{pitch, 1};
  const std::array<int64_t, 2> dense{call.gate.cols, 1};
  problem.rows = *plan_rows<GegluForward::kTensors>(2, sizes.data(), {apart.data(), apart.data(), dense.data()},
                                                    GegluForward::kOut);
  Backend::geglu(problem, out);
}

// Returns whether it was one kernel of the backend's own.
template <class Backend>
bool gated_forward(const GatedCall& call, const Tensor& out) {
  const int64_t rows = call.gate.rows;
  const int64_t cols = call.gate.cols;
  if (rows == 0 || cols == 0) return false;
  if (Backend::run_own_kernel(call.gate, &call.up, call.tanh, false, out)) return true;
  const Joined both(call);
  if (both.call() != nullptr) {
    const Tensor projections = empty_contiguous(call.gate.x, {rows, 2 * cols});
    forward<Backend>(*both.call(), projections, nullptr);
    const char* const gate = static_cast<const char*>(projections.data_ptr());
    gated_product<Backend>(call, gate, gate + cols * element_size(call.gate.dtype), 2 * cols, out);
    return false;
  }
  const Tensor gate = empty_contiguous(call.gate.x, {rows, cols});
  const Tensor up = empty_contiguous(call.gate.x, {rows, cols});
  forward<Backend>(call.gate, gate, nullptr);
  forward<Backend>(call.up, up, nullptr);
  gated_product<Backend>(call, gate.data_ptr(), up.data_ptr(), cols, out);
  return false;
}

// The names of gated_forward()'s launches.
template <class Backend>
std::string gated_route(const GatedCall& call, const Tensor& out) {
  if (call.gate.rows == 0 || call.gate.cols == 0) return "empty";
  std::string own = Backend::own_kernel(call.gate, &call.up);
  if (!own.empty()) return own;
  const Joined both(call);
  if (both.call() != nullptr) {
    const Tensor projections = empty_contiguous(call.gate.x, {call.gate.rows, 2 * call.gate.cols});
    return Backend::route(*both.call(), projections, nullptr) + "+geglu";
  }
  return Backend::route(call.gate, out, nullptr) + "+" + Backend::route(call.up, out, nullptr) + "+geglu";
}

// geglu_mlp()'s checked arguments, and the tensors that it writes.
struct Block {
  Block(const char* op, const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
        const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& up_bias,
        const std::optional<Tensor>& down_bias, bool tanh, bool allow_tf32)
      : gated(check_gated(op, x, gate_weight, up_weight, gate_bias, up_bias, tanh, allow_tf32)),
        hidden(empty_contiguous(x, with_last_size(x.sizes(), gated.gate.cols))),
        down(check_linear(Arg(op, "gelu(gate) * up", hidden), Arg(op, "down_weight", down_weight), down_bias,
                          "down_bias", 0, allow_tf32)),
        out(empty_contiguous(x, with_last_size(x.sizes(), down.cols))) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const GatedCall gated;
  const Tensor hidden;
  const LinearCall down;
  const Tensor out;
};

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
  const detail::Block block("geglu_mlp", x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, tanh,
                            allow_tf32);
  const bool after_own = detail::gated_forward<Backend>(block.gated, block.hidden);
  const LinearCall& down = block.down;
  if (down.rows == 0 || down.cols == 0 || !Backend::run_own_kernel(down, nullptr, tanh, after_own, block.out)) {
    detail::forward<Backend>(down, block.out, nullptr);
  }
  return block.out;
}

template <class Backend>
std::string MlpOps<Backend>::geglu_mlp_route(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                                             const Tensor& down_weight, const std::optional<Tensor>& gate_bias,
                                             const std::optional<Tensor>& up_bias,
                                             const std::optional<Tensor>& down_bias, bool tanh, bool allow_tf32) {
  const detail::Block block("geglu_mlp_route", x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias,
                            tanh, allow_tf32);
  const std::string into = detail::gated_route<Backend>(block.gated, block.hidden);
  if (block.down.rows == 0 || block.down.cols == 0) return into + "+empty";
  const std::string own = Backend::own_kernel(block.down, nullptr);
  return into + "+" + (own.empty() ? Backend::route(block.down, block.out, nullptr) : own);
}

}  // namespace geglu
