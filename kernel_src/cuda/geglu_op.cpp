// The CUDA backend of the pointwise operators: device, stream and errors around the launchers.
#include "cuda/geglu.h"
#include "cuda/on_device.h"
#include "pointwise_ops.h"
#include "torch_binding.h"

namespace geglu {

namespace cuda {

struct Backend {
  static void launch(const GegluForward& problem, const torch::stable::Tensor& where) {
    const OnDevice on(where);
    on.check(launch_forward(problem, on.stream()));
  }
  static void launch(const GegluBackward& problem, const torch::stable::Tensor& where) {
    const OnDevice on(where);
    on.check(launch_backward(problem, on.stream()));
  }
};

}  // namespace cuda

template struct PointwiseOps<cuda::Backend>;

}  // namespace geglu
