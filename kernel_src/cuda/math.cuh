// GELU on the device. float and double storage use the formulas of common/gelu.h with accurate functions. For half
// precision, where the kernel is close to the limit of instructions issued, the same functions are written for the
// fewest instructions: the special function unit saturates by itself, so that values need no clamping.
#pragma once

#include <type_traits>

#include "common/gelu.h"

namespace geglu::cuda {

// Math for common/gelu.h, with correctly rounded division.
template <typename T>
struct PreciseMath {
  static constexpr bool kPrecise = true;
  static constexpr T kLowest = std::is_same_v<T, float> ? T(-126) : T(-1022);  // exponent of the smallest normal number

  static __device__ __forceinline__ T minimum(T a, T limit) { return ::fmin(a, limit); }
  static __device__ __forceinline__ T exp2_up(T t) { return ::exp2(t); }
  static __device__ __forceinline__ T exp2_down(T t) { return t < kLowest ? T(0) : ::exp2(t); }
  static __device__ __forceinline__ T reciprocal(T b) { return T(1) / b; }
  static __device__ __forceinline__ T divide(T a, T b) { return a / b; }
  static __device__ __forceinline__ T fma(T a, T b, T c) { return ::fma(a, b, c); }
};

// 2^t, relative error 2^-22; 0 below the smallest normal number, infinity above the largest.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ __forceinline__ float exp2_approx(float t) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(t));
  return result;
}

// 1 / b, relative error 2^-23; 0 for infinity and where the result is below the smallest normal number.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp
__device__ __forceinline__ float reciprocal_approx(float b) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(b));
  return result;
}

// gelu(x) = x * F(x) and gelu'(x) = F(x) + x * F'(x), F(x) to a relative error of about 2^-20.
template <bool kTanh>
struct FastGelu;

// F = sigmoid(t), t = c1 * x + c2 * x^3; F' = F * (1 - F) * t' (see TanhGelu)
template <>
struct FastGelu<true> {
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(x); }

  // The same for several at once, in steps that each take all of them: a compiler that is short of registers makes one
  // after the other, and waits for every instruction of each.
  template <int kCount>
  static __device__ __forceinline__ void apply(float (&x)[kCount]) {
    float t[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) t[i] = minus_t(x[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) t[i] = exp2_approx(t[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) t[i] = reciprocal_approx(1.0f + t[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= t[i];
  }

  static __device__ __forceinline__ ValueAndDerivative<float> value_and_derivative(float x) {
    const float s = sigmoid(x);
    // sigmoid is 0 or 1 long before |x| = 32; beyond, x * t' may overflow while 1 - s or s is 0.
    const float near = fminf(fmaxf(x, -32.0f), 32.0f);
    const float slope = near * fmaf(0.21406444881780074633f, near * near, 1.59576912160573071176f);
    return {x * s, fmaf(s, (1.0f - s) * slope, s)};
  }

 private:
  // -t * log2(e)
  static __device__ __forceinline__ float minus_t(float x) {
    return x * fmaf(-0.10294323958002348742f, x * x, -2.30220819814432488913f);
  }
  static __device__ __forceinline__ float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(minus_t(x))); }
};

// F = Phi = 1 - Q(x) for positive x, else Q(-x); Q(a) = exp(-a^2 / 2) * R(a); F' = phi (see ExactGelu)
template <>
struct FastGelu<false> {
  static __device__ __forceinline__ float value(float x) {
    const float a = fminf(fabsf(x), kFar);
    return x * phi_integral(x, a, gaussian(a));
  }

  template <int kCount>
  static __device__ __forceinline__ void apply(float (&x)[kCount]) {
    float a[kCount];
    float e[kCount];
    float d[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) a[i] = fminf(fabsf(x[i]), kFar);
#pragma unroll
    for (int i = 0; i < kCount; ++i) e[i] = gaussian(a[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] = denominator(a[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] = reciprocal_approx(d[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= from_tail(x[i], e[i] * numerator(a[i]) * d[i]);
  }

  static __device__ __forceinline__ ValueAndDerivative<float> value_and_derivative(float x) {
    const float a = fminf(fabsf(x), kFar);
    const float e = gaussian(a);
    const float integral = phi_integral(x, a, e);
    const float derivative = fmaf(copysignf(a, x), 0.39894228040143267794f * e, integral);
    return {x * integral, x == x ? derivative : x};
  }

 private:
  static constexpr float kFar = 13.28f;  // exp(-a^2 / 2) is 0 from here on

  static __device__ __forceinline__ float gaussian(float a) { return exp2_approx(-0.72134752044448170368f * (a * a)); }

  // R = numerator / denominator
  static __device__ __forceinline__ float numerator(float a) {
    return polynomial(a, 0.5f, 0.348143667f, 0.111597568f, 0.0151724881f);
  }
  static __device__ __forceinline__ float denominator(float a) {
    return polynomial(a, 1.0f, 1.49416649f, 0.915425539f, 0.279410392f, 0.0380408429f);
  }

  // Phi(x) of Q(|x|)
  static __device__ __forceinline__ float from_tail(float x, float q) { return fabsf((x > 0.0f ? 1.0f : 0.0f) - q); }
  static __device__ __forceinline__ float phi_integral(float x, float a, float e) {
    return from_tail(x, e * numerator(a) * reciprocal_approx(denominator(a)));
  }
};

// GELU for storage type T: in float for all but double.
template <typename T, bool kTanh>
using DeviceGelu = std::conditional_t<sizeof(T) == 2, FastGelu<kTanh>,
                                      Gelu<std::conditional_t<sizeof(T) == 8, double, float>, kTanh,
                                           PreciseMath<std::conditional_t<sizeof(T) == 8, double, float>>>>;

}  // namespace geglu::cuda
