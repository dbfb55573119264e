#include <algorithm>

#include "cuda/sm90/tall_gemm.cuh"
#include "cuda/sm90/tall_gemm.h"
#include "cuda/sm90/tensor_map.h"

namespace geglu::cuda::sm90 {
namespace {

template <typename T, int kWeights, bool kTanh, int kTileCols>
cudaError_t launch(const GatedProblem& problem, const TallGemmConfig& config, int multiprocessors,
                   cudaStream_t stream) {
  const bool aligned_out = boxes_fit(problem.out, problem.cols);
  // As many tiles as it takes, of even heights: a box of which little lies in x takes as long as a full one.
  const int64_t down = tiles_down(config, problem.rows);
  const TilesAcross across = tiles_across(config, kWeights, problem.rows, problem.cols, multiprocessors);
  const int64_t warps_down = divide_up(problem.rows, down * config.cluster * kWarpRows);
  TallGemmArguments arguments = {};
  arguments.tile_rows = static_cast<int32_t>(warps_down * kWarpRows);
  const auto describe = [&](CUtensorMap* map, const void* matrix, int64_t rows, int64_t pitch, int box_rows) {
    return make_tensor_map(map, problem.dtype, matrix, rows, problem.depth, pitch, box_rows, kTileDepth);
  };
  cudaError_t status = describe(&arguments.x, problem.x, problem.rows, problem.x_pitch, arguments.tile_rows);
  constexpr int kPartRows = Storage<T, kWeights, kTileCols>::kPartRows;
  const auto describe_weights = [&](CUtensorMap(&maps)[2], int box_rows) {
    if (status == cudaSuccess) status = describe(&maps[0], problem.gate, problem.cols, problem.gate_pitch, box_rows);
    maps[1] = maps[0];
    if (kWeights == 2 && status == cudaSuccess) {
      status = describe(&maps[1], problem.up, problem.cols, problem.up_pitch, box_rows);
    }
  };
  describe_weights(arguments.weight, kPartRows);
  if (across.narrow > 0) describe_weights(arguments.narrow, kPartRows - kNarrower);
  const auto describe_out = [&](CUtensorMap* map, int box_cols) {
    if (status != cudaSuccess || !aligned_out) return;
    status =
        make_tensor_map(map, problem.dtype, problem.out, problem.rows, problem.cols, problem.cols, kWarpRows, box_cols);
  };
  describe_out(&arguments.destination.map, Staging<T, kWeights, kTileCols>::kBoxCols);
  if constexpr (kWeights == 2) {
    if (across.narrow > 0) {
      describe_out(&arguments.destination.narrow, Staging<T, kWeights, kTileCols - kNarrower>::kBoxCols);
    }
  }
  if (status != cudaSuccess) return status;
  arguments.destination.out = problem.out;
  arguments.destination.aligned = aligned_out;
  arguments.destination.bias[0] = problem.gate_bias;
  arguments.destination.bias[1] = problem.up_bias;
  arguments.destination.rows = static_cast<int32_t>(problem.rows);
  arguments.destination.cols = static_cast<int32_t>(problem.cols);
  arguments.depth_steps = static_cast<int32_t>(divide_up(problem.depth, kTileDepth));
  // Behind another kernel of ours x is its result, whose last rows are still in L2.
  arguments.order = {static_cast<int32_t>(down), static_cast<int32_t>(across.tiles),
                     static_cast<int32_t>(across.narrow), kBandTiles / config.cluster, problem.weights_are_old};

  const int64_t tiles = int64_t{arguments.order.tiles_down} * arguments.order.tiles_across * config.cluster;
  const int64_t blocks = cluster_slots(config, multiprocessors) * config.cluster;
  return launch_dependent_clusters(tall_gemm_kernel<T, kWeights, kTanh, kTileCols>, std::min(tiles, blocks), kThreads,
                                   sizeof(Storage<T, kWeights, kTileCols>), config.cluster, stream, arguments);
}

template <typename T, bool kTanh>
cudaError_t launch_gated(const GatedProblem& problem, const TallGemmConfig& config, int multiprocessors,
                         cudaStream_t stream) {
  switch (config.tile_cols) {
    case 96:
      return launch<T, 2, kTanh, 96>(problem, config, multiprocessors, stream);
    case 88:
      return launch<T, 2, kTanh, 88>(problem, config, multiprocessors, stream);
    case 80:
      return launch<T, 2, kTanh, 80>(problem, config, multiprocessors, stream);
    case 72:
      return launch<T, 2, kTanh, 72>(problem, config, multiprocessors, stream);
    case 64:
      return launch<T, 2, kTanh, 64>(problem, config, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch(const GatedProblem& problem, const TallGemmConfig& config, int multiprocessors,
                   cudaStream_t stream) {
  if (problem.up == nullptr) {
    return config.tile_cols == kPlainTileCols
               ? launch<T, 1, false, kPlainTileCols>(problem, config, multiprocessors, stream)
               : cudaErrorInvalidValue;
  }
  return problem.tanh ? launch_gated<T, true>(problem, config, multiprocessors, stream)
                      : launch_gated<T, false>(problem, config, multiprocessors, stream);
}

}  // namespace

std::optional<TallGemmConfig> choose_tall_gemm(const GatedProblem& problem, int device) {
  int multiprocessors = 0;
  if (!boxes_fit(problem, device) ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return std::nullopt;
  }
  const int weights = problem.up != nullptr ? 2 : 1;
  return choose_tall_gemm(weights, problem.rows, problem.cols, problem.depth, multiprocessors);
}

cudaError_t launch_tall_gemm(const GatedProblem& problem, const TallGemmConfig& config, cudaStream_t stream) {
  if (config.cluster < 1 || config.cluster > kMaxCluster) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  cudaError_t status = current_device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors);
  if (status == cudaSuccess) {
    status = problem.dtype == DType::kFloat16 ? launch<__half>(problem, config, multiprocessors, stream)
                                              : launch<__nv_bfloat16>(problem, config, multiprocessors, stream);
  }
  if (status != cudaSuccess) cudaGetLastError();  // reported here, and not once more by whoever asks next
  return status;
}

}  // namespace geglu::cuda::sm90
