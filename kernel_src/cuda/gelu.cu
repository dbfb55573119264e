// out = gelu(pre), in place if need be
#include "cuda/gelu.h"
#include "cuda/math.cuh"
#include "cuda/pointwise.cuh"

namespace geglu::cuda {
namespace {

template <typename Storage, bool kTanh>
struct GeluOp {
  using T = Storage;
  static constexpr int kInputs = 1;
  static constexpr int kOutputs = 1;
  static constexpr bool kInPlace = true;

  template <int kN>
  static __device__ __forceinline__ void apply(const Packet<T, kN> (&in)[kInputs], Packet<T, kN> (&out)[kOutputs]) {
    compute_t<T> values[kN];
    unpack<T, kN>(in[0], values);
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] = DeviceGelu<T, kTanh>::value(values[i]);
    out[0] = pack<T, kN>(values);
  }
};

}  // namespace

cudaError_t launch_gelu(const GeluForward& problem, cudaStream_t stream) {
  return dispatch(problem.dtype, problem.tanh, [&](auto storage, auto tanh) {
    using T = typename decltype(storage)::type;
    using Op = GeluOp<T, tanh.value>;
    const Pointers<Op> pointers{{static_cast<const T*>(problem.pre)}, {static_cast<T*>(problem.out)}};
    return launch_packets<Op, 16 / sizeof(T), Order::kFlat>(problem.rows, pointers, stream);
  });
}

}  // namespace geglu::cuda
