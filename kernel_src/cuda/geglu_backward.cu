// grad_gate = grad_out * up * gelu'(gate), grad_up = grad_out * gelu(gate)
#include "cuda/geglu.h"
#include "cuda/math.cuh"
#include "cuda/pointwise.cuh"

namespace geglu::cuda {
namespace {

template <typename Storage, bool kTanh>
struct BackwardOp {
  using T = Storage;
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 2;
  static constexpr bool kInPlace = false;

  template <int kN>
  static __device__ __forceinline__ void apply(const Packet<T, kN> (&in)[kInputs], Packet<T, kN> (&out)[kOutputs]) {
    compute_t<T> grad_out[kN];
    compute_t<T> gate[kN];
    compute_t<T> grad_activated[kN];  // the gradient of gelu(gate): grad_out * up
    unpack<T, kN>(in[GegluBackward::kGradOut], grad_out);
    unpack<T, kN>(in[GegluBackward::kGate], gate);
    unpack<T, kN>(in[GegluBackward::kUp], grad_activated);
#pragma unroll
    for (int i = 0; i < kN; ++i) grad_activated[i] *= grad_out[i];
    round_to_storage<T, kN>(grad_activated);

    compute_t<T> activated[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const auto gelu = DeviceGelu<T, kTanh>::value_and_derivative(gate[i]);
      activated[i] = gelu.value;
      grad_activated[i] *= gelu.derivative;
    }
    round_to_storage<T, kN>(activated);
#pragma unroll
    for (int i = 0; i < kN; ++i) activated[i] *= grad_out[i];
    out[GegluBackward::kGradGate - kInputs] = pack<T, kN>(grad_activated);
    out[GegluBackward::kGradUp - kInputs] = pack<T, kN>(activated);
  }
};

}  // namespace

cudaError_t launch_backward(const GegluBackward& problem, cudaStream_t stream) {
  const void* const addresses[] = {problem.grad_out, problem.gate, problem.up, problem.grad_gate, problem.grad_up};
  return dispatch(problem.dtype, problem.tanh, [&](auto storage, auto tanh) {
    return launch<BackwardOp<typename decltype(storage)::type, tanh.value>>(problem.rows, addresses, stream);
  });
}

}  // namespace geglu::cuda
