// Storage types on the device: kN values of a thread at a time, converted to and from the type that arithmetic runs in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "common/pointwise.h"

namespace geglu::cuda {

template <typename T>
struct Type {
  using type = T;
};

// Calls launch(Type<storage type>, bool constant: the tanh form), with what is known at run time.
template <class Launch>
cudaError_t dispatch(DType dtype, bool tanh, Launch launch) {
  const auto with_form = [&](auto storage) {
    return tanh ? launch(storage, std::true_type()) : launch(storage, std::false_type());
  };
  switch (dtype) {
    case DType::kFloat32:
      return with_form(Type<float>());
    case DType::kFloat16:
      return with_form(Type<__half>());
    case DType::kBFloat16:
      return with_form(Type<__nv_bfloat16>());
    case DType::kFloat64:
      return with_form(Type<double>());
  }
  return cudaErrorInvalidValue;
}

// The type that arithmetic runs in for a storage type.
template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// kN values of T, aligned so that one access moves all of them.
template <typename T, int kN>
struct alignas(sizeof(T) * kN) Packet {
  T values[kN];
};

// Half-precision values go in pairs: a conversion instruction takes two, and a bfloat16 is the upper half of a float.
__device__ __forceinline__ void unpack_pair(const __half* pair, float (&values)[2]) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(pair));
  values[0] = both.x;
  values[1] = both.y;
}
__device__ __forceinline__ void unpack_pair(const __nv_bfloat16* pair, float (&values)[2]) {
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(pair);
  values[0] = __uint_as_float(bits << 16);
  values[1] = __uint_as_float(bits & 0xffff0000u);
}
__device__ __forceinline__ void pack_pair(float first, float second, __half* pair) {
  *reinterpret_cast<__half2*>(pair) = __floats2half2_rn(first, second);
}
__device__ __forceinline__ void pack_pair(float first, float second, __nv_bfloat16* pair) {
  *reinterpret_cast<__nv_bfloat162*>(pair) = __floats2bfloat162_rn(first, second);
}

template <typename T, int kN>
constexpr bool kInPairs = sizeof(T) == 2 && kN % 2 == 0;

template <typename T, int kN>
__device__ __forceinline__ void unpack(const Packet<T, kN>& packet, compute_t<T> (&values)[kN]) {
  if constexpr (kInPairs<T, kN>) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      float pair[2];
      unpack_pair(packet.values + i, pair);
      values[i] = pair[0];
      values[i + 1] = pair[1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] = static_cast<compute_t<T>>(packet.values[i]);
  }
}

// Rounds to nearest even.
template <typename T, int kN>
__device__ __forceinline__ Packet<T, kN> pack(const compute_t<T> (&values)[kN]) {
  Packet<T, kN> packet;
  if constexpr (kInPairs<T, kN>) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) pack_pair(values[i], values[i + 1], packet.values + i);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) packet.values[i] = static_cast<T>(values[i]);
  }
  return packet;
}

// values <- the values after a round trip through T
template <typename T, int kN>
__device__ __forceinline__ void round_to_storage(compute_t<T> (&values)[kN]) {
  unpack<T, kN>(pack<T, kN>(values), values);
}

}  // namespace geglu::cuda
