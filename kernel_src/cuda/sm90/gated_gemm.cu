#include "cuda/sm90/gated_gemm.cuh"
#include "cuda/sm90/gated_gemm.h"
#include "cuda/sm90/tensor_map.h"

namespace geglu::cuda::sm90 {
namespace {

bool aligned(const void* pointer, int64_t pitch) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && pitch % 8 == 0;
}

template <typename T, bool kTanh, int kTileCols>
cudaError_t launch(const GatedProblem& problem, const GatedGemmConfig& config, int multiprocessors,
                   cudaStream_t stream) {
  using Shared = Storage<T, kTileCols>;
  const bool aligned_out = aligned(problem.out, problem.cols);
  // As many tiles as it takes, of even heights: a box of which little lies in x takes as long as a full one.
  const int64_t tiles_down = divide_up(problem.rows, kTileRows * config.cluster);
  const int64_t warps_down = divide_up(problem.rows, tiles_down * config.cluster * kWarpRows);
  GatedGemmArguments arguments = {};
  arguments.tile_rows = static_cast<int32_t>(warps_down * kWarpRows);
  const auto describe = [&](CUtensorMap* map, const void* matrix, int64_t rows, int64_t pitch, int box_rows) {
    return make_tensor_map(map, problem.dtype, matrix, rows, problem.depth, pitch, box_rows, kTileDepth);
  };
  cudaError_t status = describe(&arguments.x, problem.x, problem.rows, problem.x_pitch, arguments.tile_rows);
  if (status == cudaSuccess) {
    status = describe(&arguments.weight[0], problem.gate, problem.cols, problem.gate_pitch, kTileCols);
  }
  if (status == cudaSuccess) {
    status = describe(&arguments.weight[1], problem.up, problem.cols, problem.up_pitch, kTileCols);
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
  arguments.order = {static_cast<int32_t>(tiles_down), static_cast<int32_t>(divide_up(problem.cols, kTileCols)),
                     config.band};

  const auto kernel = gated_gemm_kernel<T, kTanh, kTileCols>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
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
  launch.dynamicSmemBytes = sizeof(Shared);
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = 2;
  return cudaLaunchKernelEx(&launch, kernel, arguments);
}

template <typename T, bool kTanh>
cudaError_t launch(const GatedProblem& problem, const GatedGemmConfig& config, int multiprocessors,
                   cudaStream_t stream) {
  switch (config.tile_cols) {
    case 112:
      return launch<T, kTanh, 112>(problem, config, multiprocessors, stream);
    case 96:
      return launch<T, kTanh, 96>(problem, config, multiprocessors, stream);
    case 80:
      return launch<T, kTanh, 80>(problem, config, multiprocessors, stream);
    case 64:
      return launch<T, kTanh, 64>(problem, config, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch(const GatedProblem& problem, const GatedGemmConfig& config, int multiprocessors,
                   cudaStream_t stream) {
  return problem.tanh ? launch<T, true>(problem, config, multiprocessors, stream)
                      : launch<T, false>(problem, config, multiprocessors, stream);
}

}  // namespace

bool gated_gemm_fits(const GatedProblem& problem, int device) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;  // tile coordinates are 32-bit, and pass the end by a tile
  const auto in_range = [](int64_t size) { return size >= 1 && size <= kMaxSize; };
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return false;
  if (problem.up == nullptr) return false;
  if (!in_range(problem.rows) || !in_range(problem.cols) || !in_range(problem.depth)) return false;
  if (!aligned(problem.x, problem.x_pitch) || !aligned(problem.gate, problem.gate_pitch) ||
      !aligned(problem.up, problem.up_pitch)) {
    return false;
  }
  int major = 0;
  int minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9 &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && minor == 0;
}

cudaError_t launch_gated_gemm(const GatedProblem& problem, const GatedGemmConfig& config, cudaStream_t stream) {
  if (config.cluster < 1 || config.cluster > kMaxCluster || config.band < 1) return cudaErrorInvalidValue;
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

}  // namespace geglu::cuda::sm90
