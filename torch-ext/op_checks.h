// The vocabulary of argument checks: one predicate for each constraint, each with one message that names the argument,
// what was expected and what came. Every failure is a std::runtime_error, which torch turns into RuntimeError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "common/pointwise.h"

namespace geglu::checks {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

inline std::string to_string(IntHeaderOnlyArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

inline std::string to_string(ScalarType dtype) { return torch::headeronly::toString(dtype); }

inline std::string device_name(const Tensor& tensor) {
  return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index()) : "cpu";
}

// What an operator knows of one tensor argument. The pointer, sizes and strides are borrowed from the tensor.
struct Arg {
  const char* op;
  const char* name;
  const Tensor& tensor;
  IntHeaderOnlyArrayRef sizes;
  IntHeaderOnlyArrayRef strides;
  ScalarType dtype;

  Arg(const char* op, const char* name, const Tensor& tensor)
      : op(op),
        name(name),
        tensor(tensor),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        dtype(tensor.scalar_type()) {}

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t last_size() const { return sizes[sizes.size() - 1]; }
  std::string label() const { return std::string(op) + ": " + name; }
};

inline DType checked_dtype(const Arg& arg) {
  switch (arg.dtype) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      fail(arg.label() + " must be float32, float16, bfloat16 or float64, but is " + to_string(arg.dtype));
  }
}

inline void check_has_dimension(const Arg& arg) {
  if (arg.dim() == 0) fail(arg.label() + " must have at least 1 dimension, but has 0");
}

inline void check_even_last_size(const Arg& arg) {
  if (arg.last_size() % 2 != 0) {
    fail(arg.label() + " must have an even last dimension (two packed halves), but has shape " + to_string(arg.sizes));
  }
}

inline void check_dtype(const Arg& arg, const Arg& like) {
  if (arg.dtype != like.dtype) {
    fail(arg.label() + " must have the dtype of " + like.name + ", " + to_string(like.dtype) + ", but has " +
         to_string(arg.dtype));
  }
}

inline void check_device(const Arg& arg, const Arg& like) {
  if (arg.tensor.is_cuda() != like.tensor.is_cuda() ||
      arg.tensor.get_device_index() != like.tensor.get_device_index()) {
    fail(arg.label() + " must be on the device of " + like.name + ", " + device_name(like.tensor) + ", but is on " +
         device_name(arg.tensor));
  }
}

// `arg` must have the shape of `like`, the last dimension divided by `last_divisor`.
inline void check_shape(const Arg& arg, const Arg& like, int64_t last_divisor = 1) {
  bool same = arg.dim() == like.dim();
  for (int64_t d = 0; same && d < like.dim(); ++d) {
    same = arg.sizes[d] == like.sizes[d] / (d == like.dim() - 1 ? last_divisor : 1);
  }
  if (same) return;
  std::string expected = to_string(like.sizes);
  if (last_divisor != 1) {
    expected = expected.substr(0, expected.rfind(std::to_string(like.last_size()))) +
               std::to_string(like.last_size() / last_divisor) + "] (half of " + like.name + "'s last dimension)";
  } else {
    expected += std::string(" (the shape of ") + like.name + ")";
  }
  fail(arg.label() + " must have shape " + expected + ", but has " + to_string(arg.sizes));
}

// The bytes [first, end) that a tensor's elements span, and whether they fill that span.
struct Extent {
  const char* first;
  const char* end;
  int64_t element;
  bool dense;

  explicit Extent(const Arg& arg) : element(element_size(checked_dtype(arg))) {
    int64_t reach = 1;
    int64_t count = 1;
    for (int64_t d = 0; d < arg.dim(); ++d) {
      reach += (arg.sizes[d] - 1) * arg.strides[d];
      count *= arg.sizes[d];
    }
    first = static_cast<const char*>(arg.tensor.data_ptr());
    end = count == 0 ? first : first + reach * element;
    dense = reach == count;
  }

  bool contains(const char* address) const { return first <= address && address < end; }
  // Whether all of this span is this tensor's, and one of the other's outermost elements lies in it.
  bool holds_some_of(const Extent& other) const {
    return dense && (contains(other.first) || contains(other.end - other.element));
  }
};

// A tensor that is written must give every element a place of its own.
inline void check_no_internal_overlap(const Arg& arg) {
  for (int64_t d = 0; d < arg.dim(); ++d) {
    if (arg.sizes[d] > 1 && arg.strides[d] == 0) {
      fail(arg.label() + " must not be an expanded tensor: several of its elements share one memory location");
    }
  }
}

// Refuses overlaps that are certain. Interleaved slices of one buffer without a common row pitch are let through, as
// torch's own check does.
inline void check_no_overlap(const Arg& written, const Arg& read) {
  const Extent out(written);
  const Extent in(read);
  if (out.end <= in.first || in.end <= out.first) return;
  bool overlap = out.holds_some_of(in) || in.holds_some_of(out);
  const int64_t last = written.dim() - 1;
  if (!overlap && last > 0 && written.dim() == read.dim()) {
    // Column slices of one matrix: they overlap where their columns do.
    const int64_t pitch = written.strides[last - 1];
    bool same_grid = written.strides[last] == 1 && read.strides[last] == 1 && pitch > 0;
    for (int64_t d = 0; d < last; ++d) same_grid = same_grid && written.strides[d] == read.strides[d];
    if (same_grid && written.sizes[last] <= pitch && read.sizes[last] <= pitch) {
      const int64_t distance = (out.first - in.first) / out.element;
      const int64_t column = ((distance % pitch) + pitch) % pitch;
      overlap = column < read.sizes[last] || column + written.sizes[last] > pitch;
    }
  }
  if (overlap) fail(written.label() + " must not share memory with " + read.name);
}

}  // namespace geglu::checks
