// What a pointwise GeGLU launch is told: where the elements are and how to walk them. Shared by the CPU and the CUDA
// launchers; no torch header, no CUDA header.
#pragma once

#include <cstdint>

namespace geglu {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// The row index is split over at most this many dimensions. Packed halves, padded rows and transposed batch dimensions
// of 3-D and 4-D activations need one to three; an input that needs more is copied first.
constexpr int kMaxOuterDims = 4;

// A walk over rows x cols elements of kTensors tensors in step. Element (r, c) of tensor t lies at
//   base[t] + sum_k(index_k(r) * outer_stride[t][k]) + c * inner_stride[t]
// where index_k are the digits of r over outer_size, the last dimension the fastest. All sizes and strides count
// elements. A walk whose tensors are all dense in the same order has rows == 1.
template <int kTensors>
struct Rows {
  int64_t rows = 0;
  int64_t cols = 0;
  int32_t outer_dims = 0;
  int64_t outer_size[kMaxOuterDims] = {};
  int64_t outer_stride[kTensors][kMaxOuterDims] = {};
  int64_t inner_stride[kTensors] = {};
};

// out = gelu(gate) * up
struct GegluForward {
  enum Tensor { kGate, kUp, kOut, kTensors };
  const void* gate;
  const void* up;
  void* out;
  DType dtype;
  bool tanh;  // the tanh form of GELU, else the exact one
  Rows<kTensors> rows;
};

// grad_gate = grad_out * up * gelu'(gate), grad_up = grad_out * gelu(gate)
struct GegluBackward {
  enum Tensor { kGradOut, kGate, kUp, kGradGate, kGradUp, kTensors };
  const void* grad_out;
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  DType dtype;
  bool tanh;
  Rows<kTensors> rows;
};

}  // namespace geglu
