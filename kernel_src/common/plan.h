// Turns sizes and strides into a walk (pointwise.h): drops dimensions of size 1, orders the rest by the strides of one
// leading tensor, and merges neighbours that are regular in every tensor. No torch header, no CUDA header.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "common/pointwise.h"

namespace geglu {

// At most this many dimensions have more than one element: the number of elements is below 2^63.
constexpr int kMaxDims = 63;

// Plans a walk over `dim` dimensions of `sizes` (none of them 0). strides[t] are those of tensor t, in elements. The
// walk is the fastest for `lead`, which should be an output: its smallest stride becomes the inner one. Returns nothing
// if more than kMaxOuterDims row dimensions remain.
template <int kTensors>
std::optional<Rows<kTensors>> plan_rows(int64_t dim, const int64_t* sizes,
                                        const std::array<const int64_t*, kTensors>& strides, int lead) {
  int order[kMaxDims];  // dimensions with more than one element, outermost first
  int count = 0;
  for (int d = 0; d < dim; ++d) {
    if (sizes[d] == 1) continue;
    int at = count++;
    for (; at > 0 && strides[lead][order[at - 1]] < strides[lead][d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }

  int64_t size[kMaxDims + 1];
  int64_t stride[kTensors][kMaxDims + 1];
  int merged = 0;
  for (int i = 0; i < count; ++i) {
    const int d = order[i];
    bool regular = merged > 0;
    for (int t = 0; t < kTensors; ++t) {
      regular = regular && stride[t][merged - 1] == strides[t][d] * sizes[d];
    }
    if (!regular) {
      size[merged] = 1;
      ++merged;
    }
    size[merged - 1] *= sizes[d];
    for (int t = 0; t < kTensors; ++t) stride[t][merged - 1] = strides[t][d];
  }
  if (merged == 0) {  // a single element
    size[0] = 1;
    for (int t = 0; t < kTensors; ++t) stride[t][0] = 1;
    merged = 1;
  }
  if (merged - 1 > kMaxOuterDims) return std::nullopt;

  Rows<kTensors> rows;
  rows.outer_dims = merged - 1;
  rows.rows = 1;
  rows.cols = size[merged - 1];
  for (int k = 0; k < rows.outer_dims; ++k) {
    rows.rows *= size[k];
    rows.outer_size[k] = size[k];
    for (int t = 0; t < kTensors; ++t) rows.outer_stride[t][k] = stride[t][k];
  }
  for (int t = 0; t < kTensors; ++t) rows.inner_stride[t] = stride[t][merged - 1];
  return rows;
}

}  // namespace geglu
