// grad_pre = grad_out * gelu'(pre), and the sum of its rows: the bias gradient, while the values are at hand.
//
// A block takes a tile of columns and a chunk of rows. Each of its warps takes every kWarps-th row of the chunk and a
// lane the same packet of columns in each, so that a lane sums its columns in registers; the warps' sums meet in shared
// memory, and the chunks' sums in a second kernel. The order of additions follows from the sizes alone.
#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "cuda/gelu.h"
#include "cuda/math.cuh"
#include "cuda/pointwise.cuh"

namespace geglu::cuda {
namespace {

constexpr int kWarps = 8;
// Rows of a warp that are loaded before the first is used: as many bytes in flight for one tensor as for two.
template <Activation kActivation>
constexpr int kUnroll = kActivation == Activation::kNone ? 4 : 2;
// Rows of a chunk at least: fewer would write more partial sums than they save time.
constexpr int64_t kMinRows = 64;
// Rows of partial sums at most, which bounds what the second kernel reads.
constexpr int64_t kMaxChunks = 512;

int64_t chunk_rows(int64_t rows) {
  const int64_t even = (rows + kMaxChunks - 1) / kMaxChunks;
  return (even > kMinRows ? (even + kWarps - 1) / kWarps * kWarps : kMinRows);
}

template <typename T>
struct Columns {
  const T* grad_out;
  const T* pre;
  T* grad_pre;
  compute_t<T>* partial_sums;
  int64_t rows;
  int64_t cols;
  int64_t pitch;
  int64_t chunk_rows;
};

template <typename T, int kN, Activation kActivation>
__global__ void __launch_bounds__(kWarps* kWarp) gelu_backward_kernel(const __grid_constant__ Columns<T> problem) {
  using C = compute_t<T>;
  constexpr bool kGelu = kActivation != Activation::kNone;
  constexpr int kRows = kUnroll<kActivation>;
  constexpr bool kWritten = true;  // maybe by a kernel that was not done when this one began
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kWarp + lane) * kN;
  // From the last chunk to the first: the product that follows finds the first rows of grad_pre in L2.
  const int64_t chunk = gridDim.y - 1 - blockIdx.y;
  const int64_t first = chunk * problem.chunk_rows;
  const int64_t end = min(first + problem.chunk_rows, problem.rows);
  const bool valid = col < problem.cols;

  C sums[kN] = {};
  for (int64_t row = first + warp; valid && row < end; row += kWarps * kRows) {
    Packet<T, kN> grad_out[kRows];
    Packet<T, kN> pre[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (const int64_t r = row + u * kWarps; r < end) {
        grad_out[u] = load<T, kN, kWritten>(problem.grad_out + r * problem.pitch + col);
        if constexpr (kGelu) pre[u] = load<T, kN, kWritten>(problem.pre + r * problem.cols + col);
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (const int64_t r = row + u * kWarps; r < end) {
        C grad[kN];
        unpack<T, kN>(grad_out[u], grad);
        if constexpr (kGelu) {
          C x[kN];
          unpack<T, kN>(pre[u], x);
#pragma unroll
          for (int i = 0; i < kN; ++i) {
            grad[i] *= DeviceGelu<T, kActivation == Activation::kTanh>::value_and_derivative(x[i]).derivative;
          }
          store<T, kN>(problem.grad_pre + r * problem.cols + col, pack<T, kN>(grad));
        }
#pragma unroll
        for (int i = 0; i < kN; ++i) sums[i] += grad[i];
      }
    }
  }

  if (problem.partial_sums == nullptr) return;
  // Padded so that neighbouring columns lie in different banks.
  constexpr int kPadding = kN > 1 ? kWarp / kN : 0;
  __shared__ C shared[kWarps][kN][kWarp + kPadding];
#pragma unroll
  for (int i = 0; i < kN; ++i) shared[warp][i][lane] = sums[i];
  __syncthreads();
  // Thread t sums column t of the tile.
  const int place = threadIdx.x;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kWarp * kN + place;
  if (place >= kWarp * kN || tile_col >= problem.cols) return;
  C sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += shared[w][place % kN][place / kN];
  problem.partial_sums[chunk * problem.cols + tile_col] = sum;
}

// A block takes kWarp columns; its warps take the chunks in turn.
template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp)
    sum_kernel(const compute_t<T>* partial_sums, int64_t chunks, int64_t cols, T* out) {
  using C = compute_t<T>;
  wait_for_earlier_kernels();
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  C sum = 0;
  if (col < cols) {
#pragma unroll 16  // one wait for memory, not four
    for (int64_t chunk = warp; chunk < chunks; chunk += kWarps) sum += partial_sums[chunk * cols + col];
  }
  __shared__ C shared[kWarps][kWarp];
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || col >= cols) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[w][lane];
  out[col] = static_cast<T>(sum);
}

template <typename T, int kN, Activation kActivation>
cudaError_t launch_columns(const BiasGeluBackward& problem, cudaStream_t stream) {
  const Columns<T> columns{static_cast<const T*>(problem.grad_out),
                           static_cast<const T*>(problem.pre),
                           static_cast<T*>(problem.grad_pre),
                           static_cast<compute_t<T>*>(problem.partial_sums),
                           problem.rows,
                           problem.cols,
                           problem.pitch,
                           chunk_rows(problem.rows)};
  const int64_t chunks = partial_sums(problem.rows);
  constexpr int kTile = kWarp * kN;
  const dim3 grid(static_cast<unsigned>((problem.cols + kTile - 1) / kTile), static_cast<unsigned>(chunks));
  cudaError_t status =
      launch_dependent(gelu_backward_kernel<T, kN, kActivation>, grid, kWarps * kWarp, stream, columns);
  if (status == cudaSuccess && problem.grad_bias != nullptr) {
    const auto blocks = static_cast<unsigned>((problem.cols + kWarp - 1) / kWarp);
    status = launch_dependent(sum_kernel<T>, blocks, kWarps * kWarp, stream, columns.partial_sums, chunks, problem.cols,
                              static_cast<T*>(problem.grad_bias));
  }
  return status;
}

template <typename T, Activation kActivation>
cudaError_t launch_aligned(const BiasGeluBackward& problem, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const uint64_t bits = reinterpret_cast<uint64_t>(problem.grad_out) | reinterpret_cast<uint64_t>(problem.pre) |
                        reinterpret_cast<uint64_t>(problem.grad_pre) | (problem.pitch * sizeof(T)) |
                        (problem.cols * sizeof(T));
  if (bits % 16 == 0) return launch_columns<T, kWide, kActivation>(problem, stream);
  return launch_columns<T, 1, kActivation>(problem, stream);
}

}  // namespace

int64_t partial_sums(int64_t rows) { return (rows + chunk_rows(rows) - 1) / chunk_rows(rows); }

cudaError_t launch_gelu_backward(const BiasGeluBackward& problem, cudaStream_t stream) {
  return dispatch(problem.dtype, problem.activation == Activation::kTanh, [&](auto storage, auto tanh) {
    using T = typename decltype(storage)::type;
    constexpr Activation kGelu = tanh.value ? Activation::kTanh : Activation::kExact;
    if (problem.activation == Activation::kNone) return launch_aligned<T, Activation::kNone>(problem, stream);
    return launch_aligned<T, kGelu>(problem, stream);
  });
}

}  // namespace geglu::cuda
