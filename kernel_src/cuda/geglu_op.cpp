// The CUDA backend of the operators: device, stream and errors around the launchers.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <string>

#include "cuda/geglu.h"
#include "pointwise_ops.h"
#include "torch_binding.h"

// The shim declares this only under USE_CUDA with torch's own CUDA headers.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace geglu {

namespace cuda {

struct Backend {
  static void launch(const GegluForward& problem, const torch::stable::Tensor& where) {
    run(launch_forward, problem, where);
  }
  static void launch(const GegluBackward& problem, const torch::stable::Tensor& where) {
    run(launch_backward, problem, where);
  }

 private:
  template <class Problem>
  static void run(cudaError_t (*launcher)(const Problem&, cudaStream_t), const Problem& problem,
                  const torch::stable::Tensor& where) {
    const int32_t device = where.get_device_index();
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const cudaError_t status = launcher(problem, static_cast<cudaStream_t>(stream));
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
      int major = 0;
      int minor = 0;
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
      checks::fail("geglu: this build has no code for cuda:" + std::to_string(device) +
                   ", whose compute capability is " + std::to_string(major) + "." + std::to_string(minor));
    }
    if (status != cudaSuccess) {
      checks::fail(std::string("geglu: the kernel was not launched: ") + cudaGetErrorString(status));
    }
  }
};

}  // namespace cuda

template struct PointwiseOps<cuda::Backend>;

}  // namespace geglu
