#include <algorithm>
#include <map>
#include <mutex>

#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/thin_gemm.cuh"
#include "cuda/sm90/thin_gemm.h"

namespace geglu::cuda::sm90 {
namespace {

template <class Config, bool kTanh>
cudaError_t launch(const GatedProblem& problem, const ThinGemmConfig& config, cudaStream_t stream) {
  const int last_cols = Config::consumer_cols(config.tile_cols, Config::kConsumers - 1);
  if (config.tile_cols > Config::kMaxTileCols || last_cols < 0 || (Config::kWeights == 2 && config.split != 1)) {
    return cudaErrorInvalidValue;
  }
  ThinGemmArguments arguments = {};
  // A box of which little lies in x takes as long as a full one.
  arguments.box_rows = static_cast<int32_t>(divide_up(problem.rows, 8) * 8);
  cudaError_t status = make_tensor_map(&arguments.x, problem.dtype, problem.x, problem.rows, problem.depth,
                                       problem.x_pitch, arguments.box_rows, kTileDepth);
  const void* const weights[] = {problem.gate, problem.up};
  const int64_t pitches[] = {problem.gate_pitch, problem.up_pitch};
  for (int w = 0; w < Config::kWeights && status == cudaSuccess; ++w) {
    const auto make = [&](CUtensorMap* map, int box_cols) {
      return make_tensor_map(map, problem.dtype, weights[w], problem.cols, problem.depth, pitches[w], box_cols,
                             kTileDepth);
    };
    status = make(&arguments.weight[w], config.tile_cols);
    if (status == cudaSuccess) status = make(&arguments.part[w], kThinConsumerCols);
    arguments.last_part[w] = arguments.part[w];
    if (status == cudaSuccess && last_cols % kThinConsumerCols != 0) {
      status = make(&arguments.last_part[w], last_cols);
    }
  }
  if (status != cudaSuccess) return status;
  arguments.bias[0] = problem.gate_bias;
  arguments.bias[1] = problem.up_bias;
  arguments.out = problem.out;
  arguments.rows = static_cast<int32_t>(problem.rows);
  arguments.cols = static_cast<int32_t>(problem.cols);
  arguments.tile_cols = config.tile_cols;
  const int64_t steps = divide_up(problem.depth, kTileDepth);
  arguments.steps = static_cast<int32_t>(steps / config.split);
  arguments.more_steps = static_cast<int32_t>(steps % config.split);
  arguments.weights_are_old = problem.weights_are_old;

  // No more stages than there are steps: then the blocks of the next kernel may find room beside this one's. Products
  // of rows past the tile's read what lies behind the last stage.
  const int stage_bytes = Config::stage_bytes(config.tile_cols);
  const int behind = (Config::kMaxTileCols - config.tile_cols) * Config::kRowBytes;
  const int received = Config::kWeights == 1
                           ? Config::kConsumers * ThinShare(arguments.rows, kThinConsumerCols, config.split).bytes()
                           : 0;
  arguments.ring_offset =
      static_cast<int32_t>(divide_up(sizeof(ThinBarriers) + received, kThinAlignment) * kThinAlignment);
  const int room = kSharedLimit - arguments.ring_offset - behind;
  arguments.stages = std::min({room / stage_bytes, arguments.steps + (arguments.more_steps > 0), kMaxThinStages});
  const int shared_bytes = arguments.ring_offset + arguments.stages * stage_bytes + behind;
  return launch_dependent_clusters(thin_gemm_kernel<Config, kTanh>,
                                   divide_up(problem.cols, config.tile_cols) * config.split, Config::kThreads,
                                   shared_bytes, config.split, stream, arguments);
}

template <typename T, bool kTanh>
cudaError_t launch_gated(const GatedProblem& problem, const ThinGemmConfig& config, cudaStream_t stream) {
  const bool two = thin_gemm_consumers(config.tile_cols) == 2;
  if (config.batch_rows == 16) {
    return two ? launch<Thin<T, 2, 2, 16>, kTanh>(problem, config, stream)
               : launch<Thin<T, 2, 3, 16>, kTanh>(problem, config, stream);
  }
  return two ? launch<Thin<T, 2, 2, 64>, kTanh>(problem, config, stream)
             : launch<Thin<T, 2, 3, 64>, kTanh>(problem, config, stream);
}

template <typename T>
cudaError_t launch_typed(const GatedProblem& problem, const ThinGemmConfig& config, cudaStream_t stream) {
  if (problem.up != nullptr) {
    return problem.tanh ? launch_gated<T, true>(problem, config, stream)
                        : launch_gated<T, false>(problem, config, stream);
  }
  switch (config.batch_rows) {
    case 16:
      return launch<Thin<T, 1, 2, 16>, false>(problem, config, stream);
    case 64:
      return launch<Thin<T, 1, 2, 64>, false>(problem, config, stream);
    default:
      return launch<Thin<T, 1, 2, kMaxThinRows>, false>(problem, config, stream);
  }
}

// A property of the device, which is the current one. A size that cannot run counts 0.
ThinGemmSlots count_slots() {
  const auto kernel = thin_gemm_kernel<Thin<__nv_bfloat16, 1, 2, 64>, false>;
  constexpr int kWholeMultiprocessor = 200 * 1024;
  ThinGemmSlots slots = {};
  if (allow_all_shared_memory(kernel) != cudaSuccess) {
    cudaGetLastError();
    return slots;
  }
  for (const int32_t split : kThinSplits) {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(split), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(split));
    config.blockDim = dim3(Thin<__nv_bfloat16, 1, 2, 64>::kThreads);
    config.dynamicSmemBytes = kWholeMultiprocessor;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&slots[split], kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      slots[split] = 0;
    }
  }
  return slots;
}

ThinGemmSlots slots_of(int device) {
  static std::mutex mutex;
  static std::map<int, ThinGemmSlots> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, count_slots()).first->second;
}

}  // namespace

std::optional<ThinGemmConfig> choose_thin_gemm(const GatedProblem& problem, int device) {
  const int weights = problem.up != nullptr ? 2 : 1;
  if (!thin_gemm_pays(weights, problem.rows, problem.cols, problem.depth) || !boxes_fit(problem, device)) {
    return std::nullopt;
  }
  const ThinGemmSlots slots = slots_of(device);
  if (slots[1] < 1) return std::nullopt;
  return choose_thin_gemm(weights, problem.rows, problem.cols, problem.depth, slots);
}

cudaError_t launch_thin_gemm(const GatedProblem& problem, const ThinGemmConfig& config, cudaStream_t stream) {
  const cudaError_t status = problem.dtype == DType::kFloat16 ? launch_typed<__half>(problem, config, stream)
                                                              : launch_typed<__nv_bfloat16>(problem, config, stream);
  if (status != cudaSuccess) cudaGetLastError();  // reported here, and not once more by whoever asks next
  return status;
}

}  // namespace geglu::cuda::sm90
