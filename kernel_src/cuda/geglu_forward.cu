// out = gelu(gate) * up
#include "cuda/geglu.h"
#include "cuda/math.cuh"
#include "cuda/pointwise.cuh"

namespace geglu::cuda {
namespace {

template <typename Storage, bool kTanh>
struct ForwardOp {
  using T = Storage;
  static constexpr int kInputs = 2;
  static constexpr int kOutputs = 1;
  static constexpr bool kInPlace = false;

  template <int kN>
  static __device__ __forceinline__ void apply(const Packet<T, kN> (&in)[kInputs], Packet<T, kN> (&out)[kOutputs]) {
    compute_t<T> gate[kN];
    compute_t<T> up[kN];
    unpack<T, kN>(in[GegluForward::kGate], gate);
    unpack<T, kN>(in[GegluForward::kUp], up);
#pragma unroll
    for (int i = 0; i < kN; ++i) gate[i] = DeviceGelu<T, kTanh>::value(gate[i]);
    round_to_storage<T, kN>(gate);  // as eager does before it multiplies
#pragma unroll
    for (int i = 0; i < kN; ++i) up[i] *= gate[i];
    out[0] = pack<T, kN>(up);
  }
};

}  // namespace

cudaError_t launch_forward(const GegluForward& problem, cudaStream_t stream) {
  const void* const addresses[] = {problem.gate, problem.up, problem.out};
  return dispatch(problem.dtype, problem.tanh, [&](auto storage, auto tanh) {
    return launch<ForwardOp<typename decltype(storage)::type, tanh.value>>(problem.rows, addresses, stream);
  });
}

}  // namespace geglu::cuda
