#include <algorithm>
#include <type_traits>

#include "sm90/skinny.cuh"
#include "sm90/skinny.h"

namespace geglu::sm90 {
namespace {

constexpr int64_t kMaxUnits = int64_t{1} << 31;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

StreamK work_of(const SkinnyProblem& problem, const SkinnyConfig& config) {
  const int tile_rows = wgmma::kRows * config.warpgroups * (problem.gated ? 1 : 2);
  return {static_cast<int>(divide_up(problem.weight[0].rows, tile_rows)),
          static_cast<int>(divide_up(problem.x.cols, kBlockK * config.k_split)), config.groups};
}

// float4 that the warpgroups of the grid leave, once
int64_t slots_size(const SkinnyConfig& config) {
  const int64_t warpgroups = int64_t{config.groups} * config.batch_tiles * config.k_split * config.warpgroups;
  return warpgroups * 2 * wgmma::kRows * (config.batch_tile / config.k_split) / 4;
}

// Calls launch(SkinnyTile) with the one that the configuration names.
template <class Launch>
cudaError_t with_tile(const SkinnyConfig& c, Launch launch) {
  switch (c.batch_tile * 1000 + c.warpgroups * 100 + c.batch_tiles * 10 + c.k_split) {
    case 8111:
      return launch(SkinnyTile<8, 1, 1, 1>());
    case 16111:
      return launch(SkinnyTile<16, 1, 1, 1>());
    case 32111:
      return launch(SkinnyTile<32, 1, 1, 1>());
    case 64111:
      return launch(SkinnyTile<64, 1, 1, 1>());
    case 64211:
      return launch(SkinnyTile<64, 2, 1, 1>());
    case 128211:
      return launch(SkinnyTile<128, 2, 1, 1>());
    case 128221:
      return launch(SkinnyTile<128, 2, 2, 1>());
    case 128222:
      return launch(SkinnyTile<128, 2, 2, 2>());
  }
  return cudaErrorInvalidValue;
}

template <typename T, bool kGated, class Tile>
cudaError_t launch_kernel(const SkinnyProblem& problem, const SkinnyConfig& config, SkinnyParameters parameters,
                          bool dependent, cudaStream_t stream) {
  const auto kernel = &skinny_kernel<T, kGated, Tile>;
  const Matrix& second = problem.weight[kGated ? 1 : 0];
  constexpr bool kBFloat16 = std::is_same_v<T, __nv_bfloat16>;

  CUtensorMap maps[3];
  cudaError_t status = make_tensor_map(&maps[0], problem.weight[0], Tile::kHalfRows, kBFloat16);
  if (status == cudaSuccess) status = make_tensor_map(&maps[1], second, Tile::kHalfRows, kBFloat16);
  if (status == cudaSuccess) status = make_tensor_map(&maps[2], problem.x, Tile::kN, kBFloat16);
  const int shared_bytes = static_cast<int>(Tile::bytes(config.stages));
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (status == cudaSuccess) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(config.groups * Tile::kCluster);
    launch.blockDim = dim3(Tile::kThreads);
    launch.dynamicSmemBytes = shared_bytes;
    launch.stream = stream;
    launch.attrs = attributes;
    if (Tile::kCluster > 1) {
      attributes[launch.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[launch.numAttrs].val.clusterDim = {Tile::kCluster, 1, 1};
      ++launch.numAttrs;
    }
    if (dependent) {
      attributes[launch.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[launch.numAttrs].val.programmaticStreamSerializationAllowed = 1;
      ++launch.numAttrs;
    }
    status = cudaLaunchKernelEx(&launch, kernel, maps[0], maps[1], maps[2], parameters);
  }
  if (status != cudaSuccess) cudaGetLastError();  // reported here, and not once more by whoever asks next
  return status;
}

}  // namespace

bool supports(const SkinnyProblem& problem) {
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return false;
  if (problem.x.rows < 1 || problem.x.rows > 256) return false;
  for (int i = 0; i < (problem.gated ? 2 : 1); ++i) {
    if (!fits_tensor_map(problem.weight[i])) return false;
  }
  return fits_tensor_map(problem.x) &&
         divide_up(problem.weight[0].rows, wgmma::kRows) * divide_up(problem.x.cols, kBlockK) < kMaxUnits;
}

SkinnyWorkspace workspace_bytes(const SkinnyProblem& problem, const SkinnyConfig& config) {
  const size_t counters_of_tile = size_t(config.warpgroups) * config.batch_tiles * config.k_split;
  return {slots_size(config) * (config.k_split > 1 ? 3 : 1) * sizeof(float4),
          work_of(problem, config).tiles * counters_of_tile * sizeof(uint32_t)};
}

cudaError_t launch_skinny(const SkinnyProblem& problem, const SkinnyConfig& config, void* partials, void* counters,
                          bool dependent, cudaStream_t stream) {
  const StreamK work = work_of(problem, config);
  if (config.batch_tile * config.batch_tiles < problem.x.rows || config.stages < 1 || config.stages > kMaxStages ||
      config.groups < 1 || config.groups > work.units()) {
    return cudaErrorInvalidValue;
  }
  SkinnyParameters parameters = {};
  parameters.work = work;
  parameters.stages = config.stages;
  parameters.m = static_cast<int>(problem.x.rows);
  parameters.n = static_cast<int>(problem.weight[0].rows);
  parameters.activation = problem.activation;
  parameters.bias[0] = problem.bias[0];
  parameters.bias[1] = problem.bias[1];
  parameters.out = problem.out;
  parameters.out_stride = problem.out_stride;
  parameters.out_vectors = reinterpret_cast<uintptr_t>(problem.out) % 16 == 0 && problem.out_stride % 8 == 0;
  parameters.partials = static_cast<float4*>(partials);
  parameters.exchange_stride = slots_size(config);
  parameters.exchange = parameters.partials + slots_size(config);
  parameters.counters = static_cast<uint32_t*>(counters);
  return with_tile(config, [&](auto tile) {
    using Tile = decltype(tile);
    const auto launch = [&](auto type, auto gated) {
      return launch_kernel<typename decltype(type)::type, decltype(gated)::value, Tile>(problem, config, parameters,
                                                                                        dependent, stream);
    };
    const auto with_type = [&](auto type) {
      return problem.gated ? launch(type, std::true_type()) : launch(type, std::false_type());
    };
    return problem.dtype == DType::kFloat16 ? with_type(cuda::Type<__half>()) : with_type(cuda::Type<__nv_bfloat16>());
  });
}

}  // namespace geglu::sm90
