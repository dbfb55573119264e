// What the GELU around a linear layer's matrix products is told. Shared by the backends; no torch header, no CUDA
// header.
#pragma once

#include <cstdint>

#include "common/pointwise.h"

namespace geglu {

enum class Activation : int64_t { kNone = 0, kExact = 1, kTanh = 2 };

// out = gelu(pre); out may be pre.
struct GeluForward {
  enum Tensor { kPre, kOut, kTensors };
  const void* pre;
  void* out;
  DType dtype;
  bool tanh;
  Rows<kTensors> rows;
};

// grad_pre = grad_out * gelu'(pre)
struct GeluBackward {
  enum Tensor { kGradOut, kPre, kGradPre, kTensors };
  const void* grad_out;
  const void* pre;
  void* grad_pre;
  DType dtype;
  bool tanh;
  Rows<kTensors> rows;
};

// grad_pre = grad_out * gelu'(pre) and grad_bias = the sum of its rows, over rows x cols elements. Rows of grad_out are
// `pitch` elements apart; pre and grad_pre are contiguous. Without an activation grad_pre is grad_out, and both pre and
// grad_pre are null. grad_bias may be null. Sums are in float (double for double), in an order that sizes alone decide.
struct BiasGeluBackward {
  const void* grad_out;
  const void* pre;
  void* grad_pre;
  void* grad_bias;
  void* partial_sums;  // null if grad_bias is
  DType dtype;
  Activation activation;
  int64_t rows;
  int64_t cols;
  int64_t pitch;
};

// The walk over tensors that are all contiguous.
template <int kTensors>
Rows<kTensors> flat_rows(int64_t count) {
  Rows<kTensors> rows;
  rows.rows = 1;
  rows.cols = count;
  for (int64_t& stride : rows.inner_stride) stride = 1;
  return rows;
}

}  // namespace geglu
