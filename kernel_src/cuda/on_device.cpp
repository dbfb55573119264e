#include "cuda/on_device.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>
#include <string>

// The shim declares this only under USE_CUDA with torch's own CUDA headers.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace geglu::cuda {

using torch::stable::accelerator::DeviceGuard;
using torch::stable::accelerator::getCurrentDeviceIndex;

OnDevice::OnDevice(const torch::stable::Tensor& where) : device_(where.get_device_index()) {
  if (getCurrentDeviceIndex() != device_) guard_.emplace(device_);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
  stream_ = static_cast<cudaStream_t>(stream);
}

void OnDevice::check(cudaError_t status) const {
  if (status == cudaSuccess) return;
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    int major = 0;
    int minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_);
    throw std::runtime_error("geglu: this build has no code for cuda:" + std::to_string(device_) +
                             ", whose compute capability is " + std::to_string(major) + "." + std::to_string(minor));
  }
  throw std::runtime_error(std::string("geglu: the kernel was not launched: ") + cudaGetErrorString(status));
}

}  // namespace geglu::cuda
