// Where an operator runs: the device of its tensors made current, torch's current stream on it, and launch errors.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace geglu::cuda {

// Makes the device of `where` the current one while it lives.
class OnDevice {
 public:
  explicit OnDevice(const torch::stable::Tensor& where);

  int32_t device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

  // Raises std::runtime_error if a kernel was not launched.
  void check(cudaError_t status) const;

 private:
  int32_t device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace geglu::cuda
