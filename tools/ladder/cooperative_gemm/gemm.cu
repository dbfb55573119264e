#include "cuda/sm90/tensor_map.h"
#include "gemm.h"
#include "gemm_kernel.cuh"

namespace geglu::cuda::sm90::cooperative {
namespace {

bool aligned(const void* pointer, int64_t pitch) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && pitch % 8 == 0;
}

template <typename T, class Combine, int kWeightRows>
cudaError_t launch(const GemmProblem& problem, const GemmConfig& config, int multiprocessors, cudaStream_t stream) {
  constexpr int kTileCols = kWeightRows / (Combine::kGated ? 2 : 1);
  using Storage = GemmStorage<T, kWeightRows, kTileCols>;
  const void* up = Combine::kGated ? problem.up : problem.gate;
  const int64_t up_pitch = Combine::kGated ? problem.up_pitch : problem.gate_pitch;
  const bool aligned_out = aligned(problem.out, problem.cols);

  GemmArguments arguments = {};
  cudaError_t status = make_tensor_map(&arguments.x, problem.dtype, problem.x, problem.rows, problem.depth,
                                       problem.x_pitch, kTileRows, kTileDepth);
  if (status == cudaSuccess) {
    status = make_tensor_map(&arguments.weight[0], problem.dtype, problem.gate, problem.cols, problem.depth,
                             problem.gate_pitch, kWeightRows / 2, kTileDepth);
  }
  if (status == cudaSuccess) {
    status = make_tensor_map(&arguments.weight[1], problem.dtype, up, problem.cols, problem.depth, up_pitch,
                             kWeightRows / 2, kTileDepth);
  }
  if (status == cudaSuccess && aligned_out) {
    status = make_tensor_map(&arguments.destination.map, problem.dtype, problem.out, problem.rows, problem.cols,
                             problem.cols, kWarpRows, Staging<T, kTileCols>::kCols);
  }
  if (status != cudaSuccess) return status;
  arguments.destination.unaligned = aligned_out ? nullptr : problem.out;
  arguments.destination.bias[0] = problem.gate_bias;
  arguments.destination.bias[1] = problem.up_bias;
  arguments.destination.rows = static_cast<int32_t>(problem.rows);
  arguments.destination.cols = static_cast<int32_t>(problem.cols);
  arguments.depth_steps = static_cast<int32_t>(divide_up(problem.depth, kTileDepth));
  arguments.order = {static_cast<int32_t>(divide_up(problem.rows, kTileRows * config.cluster)),
                     static_cast<int32_t>(divide_up(problem.cols, kTileCols)), config.band};
  arguments.stagger = config.stagger;

  const auto kernel = gemm_kernel<T, Combine, kWeightRows>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage));
  if (status != cudaSuccess) return status;
  const int64_t tiles = int64_t{arguments.order.tiles_down} * arguments.order.tiles_across * config.cluster;
  const int64_t blocks = multiprocessors / config.cluster * config.cluster;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(tiles < blocks ? tiles : blocks));
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = sizeof(Storage);
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = 2;
  return cudaLaunchKernelEx(&launch, kernel, arguments);
}

template <typename T, class Combine>
cudaError_t launch(const GemmProblem& problem, const GemmConfig& config, int multiprocessors, cudaStream_t stream) {
  switch (config.weight_rows) {
    case 256:
      return launch<T, Combine, 256>(problem, config, multiprocessors, stream);
    case 192:
      return launch<T, Combine, 192>(problem, config, multiprocessors, stream);
    case 128:
      return launch<T, Combine, 128>(problem, config, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch(const GemmProblem& problem, const GemmConfig& config, int multiprocessors, cudaStream_t stream) {
  const bool gated = problem.up != nullptr;
  switch (problem.activation) {
    case Activation::kNone:
      if (gated) return cudaErrorInvalidValue;
      return launch<T, Combine<false, Activation::kNone>>(problem, config, multiprocessors, stream);
    case Activation::kExact:
      return gated ? launch<T, Combine<true, Activation::kExact>>(problem, config, multiprocessors, stream)
                   : launch<T, Combine<false, Activation::kExact>>(problem, config, multiprocessors, stream);
    case Activation::kTanh:
      return gated ? launch<T, Combine<true, Activation::kTanh>>(problem, config, multiprocessors, stream)
                   : launch<T, Combine<false, Activation::kTanh>>(problem, config, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

const char* gemm_rejects(const GemmProblem& problem) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;  // tile coordinates are 32-bit, and pass the end by a tile
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return "elements are not 16-bit floats";
  if (problem.rows < 1 || problem.cols < 1 || problem.depth < 1) return "a size is zero";
  if (problem.rows > kMaxSize || problem.cols > kMaxSize || problem.depth > kMaxSize) return "a size exceeds 2^30";
  if (!aligned(problem.x, problem.x_pitch)) return "rows of x are not aligned to 16 bytes";
  if (!aligned(problem.gate, problem.gate_pitch)) return "rows of the gate weight are not aligned to 16 bytes";
  if (problem.up != nullptr && !aligned(problem.up, problem.up_pitch)) {
    return "rows of the up weight are not aligned to 16 bytes";
  }
  return nullptr;
}

cudaError_t launch_gemm(const GemmProblem& problem, const GemmConfig& config, cudaStream_t stream) {
  if (gemm_rejects(problem) != nullptr) return cudaErrorNotSupported;
  if (gemm_config_rejects(config) != nullptr) return cudaErrorInvalidValue;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = problem.dtype == DType::kFloat16 ? launch<__half>(problem, config, multiprocessors, stream)
                                              : launch<__nv_bfloat16>(problem, config, multiprocessors, stream);
  }
  if (status != cudaSuccess) cudaGetLastError();  // reported here, and not once more by whoever asks next
  return status;
}

}  // namespace geglu::cuda::sm90::cooperative
