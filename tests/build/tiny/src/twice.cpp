#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "scale.h"

torch::stable::Tensor twice(const torch::stable::Tensor& input) {
  STD_TORCH_CHECK(input.is_contiguous() && plain() == 3, "input must be contiguous, but has ", input.dim(), " dims");
  torch::stable::Tensor output = torch::stable::empty_like(input);
  const float* from = static_cast<const float*>(input.data_ptr());
  float* to = static_cast<float*>(output.data_ptr());
  for (int64_t i = 0; i < input.numel(); ++i) to[i] = kScale * from[i];
  return output;
}
