// What every backend does around a pointwise launch: check the arguments, allocate the results, plan the walk. A
// backend supplies
//   static void launch(const GegluForward&, const Tensor& where)     on the device (and current stream) of `where`
//   static void launch(const GegluBackward&, const Tensor& where)
// and is called by torch's dispatcher with at least one tensor of its own; the checks see that all are on one device.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "common/plan.h"
#include "common/pointwise.h"
#include "op_checks.h"
#include "torch_binding.h"

namespace geglu {

namespace detail {

using checks::Arg;
using checks::IntHeaderOnlyArrayRef;
using torch::stable::Tensor;

inline Tensor empty_strided(const Tensor& like, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides) {
  int32_t dtype = 0;
  int32_t device_type = 0;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

// torch.empty_like(tensor), without the dispatcher where the answer is known: a contiguous tensor keeps its strides.
inline Tensor empty_like(const Arg& arg) {
  return arg.tensor.is_contiguous() ? empty_strided(arg.tensor, arg.sizes, arg.strides)
                                    : torch::stable::empty_like(arg.tensor);
}

inline Tensor empty_contiguous(const Tensor& like, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return empty_strided(like, sizes, strides);
}

// The two halves of a packed tensor (..., 2d): one shape and one set of strides, two addresses.
struct Halves {
  std::vector<int64_t> sizes;  // (..., d)
  void* gate;
  void* up;

  Halves(const Tensor& x, DType dtype, bool gate_first)
      : sizes(x.sizes().begin(), x.sizes().end()), gate(x.data_ptr()), up(gate) {
    sizes.back() /= 2;
    const int64_t half_bytes = sizes.back() * x.strides()[sizes.size() - 1] * element_size(dtype);
    void*& second = gate_first ? up : gate;
    second = static_cast<char*>(second) + half_bytes;
  }
};

// Launches `problem` over elements of this shape; false if the strides are too irregular for one walk.
template <class Backend, class Problem>
bool walk(Problem& problem, const Tensor& where, IntHeaderOnlyArrayRef sizes,
          const std::array<const int64_t*, Problem::kTensors>& strides, int lead) {
  for (int64_t size : sizes) {
    if (size == 0) return true;
  }
  const auto rows = plan_rows<Problem::kTensors>(static_cast<int64_t>(sizes.size()), sizes.data(), strides, lead);
  if (!rows) return false;
  problem.rows = *rows;
  Backend::launch(problem, where);
  return true;
}

// `first` is the argument that the others are compared with.
inline DType check_first(const Arg& first) {
  checks::check_has_dimension(first);
  return checks::checked_dtype(first);
}

inline DType check_packed(const Arg& x) {
  const DType dtype = check_first(x);
  checks::check_even_last_size(x);
  return dtype;
}

inline void check_like(const Arg& arg, const Arg& like, int64_t last_divisor = 1) {
  checks::check_dtype(arg, like);
  checks::check_shape(arg, like, last_divisor);
}

template <class Backend>
void packed_forward(const Tensor& out, const Tensor& x, DType dtype, bool tanh, bool gate_first) {
  const Halves halves(x, dtype, gate_first);
  GegluForward problem{halves.gate, halves.up, out.data_ptr(), dtype, tanh, {}};
  const int64_t* const x_strides = x.strides().data();
  if (walk<Backend>(problem, x, halves.sizes, {x_strides, x_strides, out.strides().data()}, GegluForward::kOut)) {
    return;
  }
  Tensor dense = empty_contiguous(x, halves.sizes);
  packed_forward<Backend>(dense, torch::stable::contiguous(x), dtype, tanh, gate_first);
  Tensor target = out;
  torch::stable::copy_(target, dense);
}

template <class Backend>
void packed_out(const char* op, const Tensor& out_tensor, const Tensor& x_tensor, bool tanh) {
  const Arg x(op, "x", x_tensor);
  const Arg out(op, "out", out_tensor);
  checks::check_device(out, x);
  const DType dtype = check_packed(x);
  check_like(out, x, /*last_divisor=*/2);
  checks::check_no_internal_overlap(out);
  checks::check_no_overlap(out, x);
  packed_forward<Backend>(out_tensor, x_tensor, dtype, tanh, /*gate_first=*/true);
}

}  // namespace detail

template <class Backend>
torch::stable::Tensor PointwiseOps<Backend>::geglu(const Tensor& gate_tensor, const Tensor& up_tensor, bool tanh) {
  const checks::Arg gate("geglu", "gate", gate_tensor);
  const checks::Arg up("geglu", "up", up_tensor);
  checks::check_device(up, gate);
  const DType dtype = detail::check_first(gate);
  detail::check_like(up, gate);

  Tensor out = detail::empty_like(gate);
  GegluForward problem{gate_tensor.data_ptr(), up_tensor.data_ptr(), out.data_ptr(), dtype, tanh, {}};
  if (!detail::walk<Backend>(problem, gate_tensor, gate.sizes,
                             {gate.strides.data(), up.strides.data(), out.strides().data()}, GegluForward::kOut)) {
    torch::stable::copy_(out,
                         geglu(torch::stable::contiguous(gate_tensor), torch::stable::contiguous(up_tensor), tanh));
  }
  return out;
}

template <class Backend>
torch::stable::Tensor PointwiseOps<Backend>::geglu_packed(const Tensor& x_tensor, bool tanh, bool gate_first) {
  const checks::Arg x("geglu_packed", "x", x_tensor);
  const DType dtype = detail::check_packed(x);

  std::vector<int64_t> sizes(x.sizes.begin(), x.sizes.end());
  sizes.back() /= 2;
  const Tensor out = detail::empty_contiguous(x_tensor, sizes);
  detail::packed_forward<Backend>(out, x_tensor, dtype, tanh, gate_first);
  return out;
}

template <class Backend>
std::tuple<torch::stable::Tensor, torch::stable::Tensor> PointwiseOps<Backend>::geglu_backward(
    const Tensor& grad_out_tensor, const Tensor& gate_tensor, const Tensor& up_tensor, bool tanh) {
  const checks::Arg gate("geglu_backward", "gate", gate_tensor);
  const checks::Arg up("geglu_backward", "up", up_tensor);
  const checks::Arg grad_out("geglu_backward", "grad_out", grad_out_tensor);
  checks::check_device(up, gate);
  checks::check_device(grad_out, gate);
  const DType dtype = detail::check_first(gate);
  detail::check_like(up, gate);
  detail::check_like(grad_out, gate);

  Tensor grad_gate = detail::empty_like(gate);
  Tensor grad_up = detail::empty_like(up);
  GegluBackward problem{grad_out_tensor.data_ptr(),
                        gate_tensor.data_ptr(),
                        up_tensor.data_ptr(),
                        grad_gate.data_ptr(),
                        grad_up.data_ptr(),
                        dtype,
                        tanh,
                        {}};
  if (!detail::walk<Backend>(problem, gate_tensor, gate.sizes,
                             {grad_out.strides.data(), gate.strides.data(), up.strides.data(),
                              grad_gate.strides().data(), grad_up.strides().data()},
                             GegluBackward::kGradGate)) {
    const auto [dense_gate, dense_up] =
        geglu_backward(torch::stable::contiguous(grad_out_tensor), torch::stable::contiguous(gate_tensor),
                       torch::stable::contiguous(up_tensor), tanh);
    torch::stable::copy_(grad_gate, dense_gate);
    torch::stable::copy_(grad_up, dense_up);
  }
  return {grad_gate, grad_up};
}

template <class Backend>
torch::stable::Tensor PointwiseOps<Backend>::geglu_packed_backward(const Tensor& grad_out_tensor,
                                                                   const Tensor& x_tensor, bool tanh, bool gate_first) {
  const checks::Arg x("geglu_packed_backward", "x", x_tensor);
  const checks::Arg grad_out("geglu_packed_backward", "grad_out", grad_out_tensor);
  checks::check_device(grad_out, x);
  const DType dtype = detail::check_packed(x);
  detail::check_like(grad_out, x, /*last_divisor=*/2);

  Tensor grad_x = detail::empty_like(x);
  const detail::Halves halves(x_tensor, dtype, gate_first);
  const detail::Halves grads(grad_x, dtype, gate_first);
  GegluBackward problem{grad_out_tensor.data_ptr(), halves.gate, halves.up, grads.gate, grads.up, dtype, tanh, {}};
  const int64_t* const x_strides = x.strides.data();
  const int64_t* const grad_strides = grad_x.strides().data();
  if (!detail::walk<Backend>(problem, x_tensor, grad_out.sizes,
                             {grad_out.strides.data(), x_strides, x_strides, grad_strides, grad_strides},
                             GegluBackward::kGradGate)) {
    torch::stable::copy_(grad_x, geglu_packed_backward(torch::stable::contiguous(grad_out_tensor),
                                                       torch::stable::contiguous(x_tensor), tanh, gate_first));
  }
  return grad_x;
}

template <class Backend>
void PointwiseOps<Backend>::gelu_and_mul(const Tensor& out, const Tensor& x) {
  detail::packed_out<Backend>("gelu_and_mul", out, x, /*tanh=*/false);
}

template <class Backend>
void PointwiseOps<Backend>::gelu_tanh_and_mul(const Tensor& out, const Tensor& x) {
  detail::packed_out<Backend>("gelu_tanh_and_mul", out, x, /*tanh=*/true);
}

}  // namespace geglu
