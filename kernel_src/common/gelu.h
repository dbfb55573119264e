// GELU and its derivative, for the host's vectorized loops and for device code alike; no torch header, no CUDA header.
//
// Everything is branch-free and built from one exponential and one reciprocal. A Math policy supplies those, so that
// each instruction set and each storage type gets its own:
//
//   struct Math {
//     static constexpr bool kPrecise;      // false: results are rounded to 11 significant bits or fewer afterwards
//     static T minimum(T a, T limit);      // the smaller; limit > 0; if a is NaN, either one
//     static T exp2_up(T t);               // 2^t for t >= 0, infinity at kFar of the tanh form
//     static T exp2_down(T t);             // 2^t for t <= 0, 0 at kFar of the exact form
//     static T reciprocal(T b);            // 1 / b, b >= 1; 0 for b = inf
//     static T divide(T a, T b);           // a / b, b >= 1; for b = inf 0 with the sign of a, NaN if a is infinite
//     static T fma(T a, T b, T c);         // a * b + c without rounding a * b; for float, if kPrecise
//   };
//
// NaN gives NaN. gelu(+inf) = inf, and gelu(-inf) = -inf * 0 = NaN as in torch; a finite x never gives NaN. The
// derivative is 1 at +inf, 0 at -inf and finite everywhere.
#pragma once

#include <cmath>
#include <type_traits>

#if defined(__CUDACC__)
#define GEGLU_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GEGLU_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace geglu {

template <typename T>
struct ValueAndDerivative {
  T value;
  T derivative;
};

// c0 + c1 * x + c2 * x^2 + ...
template <typename T>
GEGLU_HOST_DEVICE T polynomial(T, T c0) {
  return c0;
}

template <typename T, typename... Rest>
GEGLU_HOST_DEVICE T polynomial(T x, T c0, Rest... rest) {
  return c0 + x * polynomial(x, T(rest)...);
}

GEGLU_HOST_DEVICE float magnitude(float x) { return ::fabsf(x); }
GEGLU_HOST_DEVICE double magnitude(double x) { return ::fabs(x); }

// Both forms are gelu(x) = x * F(x) with the distribution function F of a symmetric distribution: F(x) = 1 - F(-x).
// With a = |x| and q = F(-a) <= 1/2, which both forms can compute without cancellation,
//   gelu(x)  = x * q for x <= 0, else x - x * q = x * (1 - q)
//   gelu'(x) = h for x < 0, else 1 - h, where h = gelu'(-a) = q - a * F'(a)
// so that the negative tail keeps its relative accuracy, and on the positive side one rounding error counts.
// The magnitude of x is limited to kFar, where q is 0 already, so that nothing overflows or multiplies 0 by infinity.

// gelu(x), q = numerator / denominator
template <typename Math, typename T>
GEGLU_HOST_DEVICE T value_of(T x, T far, T q, T numerator, T denominator) {
  if constexpr (Math::kPrecise) {
    const T x_q = Math::divide(Math::minimum(x, far) * numerator, denominator);
    const T positive = x - x_q;
    return x <= T(0) ? x_q : positive;
  } else {
    const T positive = T(1) - q;
    return x * (x < T(0) ? q : positive);
  }
}

// gelu'(x)
template <typename T>
GEGLU_HOST_DEVICE T derivative_of(T x, T h) {
  const T positive = T(1) - h;
  const T derivative = x < T(0) ? h : positive;
  return x == x ? derivative : x;
}

// F(x) = sigmoid(t), t = c1 * x + c2 * x^3, c1 = 2 * sqrt(2 / pi), c2 = 0.044715 * c1: the tanh form, because
// 0.5 * (1 + tanh(u)) = sigmoid(2 * u). q = 1 / (1 + exp(t(a))) and F' = q * (1 - q) * t'.
template <typename T, typename Math>
struct TanhGelu {
  static GEGLU_HOST_DEVICE T value(T x) {
    const T d = T(1) + exp_t(Math::minimum(magnitude(x), kFar));
    return value_of<Math>(x, kFar, Math::reciprocal(d), T(1), d);
  }

  static GEGLU_HOST_DEVICE ValueAndDerivative<T> value_and_derivative(T x) {
    const T a = Math::minimum(magnitude(x), kFar);
    const T d = T(1) + exp_t(a);
    const T q = Math::reciprocal(d);
    const T a_slope = a * (T(1.59576912160573071176) + T(0.21406444881780074633) * (a * a));  // a * t'(a)
    const T h = q - q * (T(1) - q) * a_slope;
    return {value_of<Math>(x, kFar, q, T(1), d), derivative_of(x, h)};
  }

 private:
  // exp(t) overflows here: log2(exp(t)) is 128.8, or 1024.8 for double.
  static constexpr T kFar = std::is_same_v<T, float> ? T(10.085) : T(21.165);

  // The constants are those of t times log2(e).
  static GEGLU_HOST_DEVICE T exp_t(T a) {
    return Math::exp2_up(a * (T(2.30220819814432488913) + T(0.10294323958002348742) * (a * a)));
  }
};

// F(x) = Phi(x), the normal distribution: q = erfc(a / sqrt(2)) / 2 = exp(-a^2 / 2) * R(a) and F' = phi.
// R is smooth and decays like 1 / a. As the ratio N(a) / D(a) of polynomials with positive coefficients it costs one
// division, and no rounding error in it is ever magnified.
template <typename T, typename Math>
struct ExactGelu {
  static_assert(std::is_same_v<T, float>, "double has its own specialization");

  static GEGLU_HOST_DEVICE float value(float x) { return value(x, tail_of(x)); }

  static GEGLU_HOST_DEVICE ValueAndDerivative<float> value_and_derivative(float x) {
    const Tail tail = tail_of(x);
    float q = tail.q;
    if constexpr (Math::kPrecise) {
      const float near = 0.5f - tail.a * near_slope(tail.a);
      q = tail.a < kNear ? near : q;
    }
    const float a_phi = tail.a * (tail.exp * 0.398942280401432677940f);
    return {value(x, tail), derivative_of(x, q - a_phi)};
  }

 private:
  static constexpr float kNear = 1.0f;
  // exp(-a^2 / 2) underflows here: its log2 is -127.2.
  static constexpr float kFar = 13.28f;
  static constexpr float kMinusHalfLog2E = -0.721347520444481703680f;

  // a = min(|x|, kFar), exp = exp(-a^2 / 2), q = numerator / denominator
  struct Tail {
    float a;
    float exp;
    float q;
    float numerator;
    float denominator;
  };

  static GEGLU_HOST_DEVICE Tail tail_of(float x) {
    const float a = Math::minimum(magnitude(x), kFar);
    if constexpr (Math::kPrecise) {
      // N / D = R within 2^-25
      const float n = polynomial(a, 0.5f, 0.437593937f, 0.182689205f, 0.0404413939f, 0.00408559712f);
      const float d = polynomial(a, 1.0f, 1.6730727f, 1.20029318f, 0.468022615f, 0.10137812f, 0.0102409506f);
      const float e = precise_exp(a);
      return {a, e, Math::divide(e * n, d), e * n, d};
    } else {
      // N / D = R within 2^-22 for a < 3.5, 2^-18 beyond
      const float n = polynomial(a, 0.5f, 0.348143667f, 0.111597568f, 0.0151724881f);
      const float d = polynomial(a, 1.0f, 1.49416649f, 0.915425539f, 0.279410392f, 0.0380408429f);
      const float e = Math::exp2_down(kMinusHalfLog2E * (a * a));
      return {a, e, e * Math::divide(n, d), e * n, d};
    }
  }

  // exp(-a^2 / 2) with a^2 and its product with log2(e) to twice the precision: an error in the exponent would
  // become a relative error a^2 / 2 times as large.
  static GEGLU_HOST_DEVICE float precise_exp(float a) {
    constexpr float kMinusHalfLog2ELow = -9.62981496e-9f;
    const float square = a * a;
    const float square_low = Math::fma(a, a, -square);
    const float t = kMinusHalfLog2E * square;
    const float t_low =
        Math::fma(kMinusHalfLog2E, square, -t) + (kMinusHalfLog2ELow * square + kMinusHalfLog2E * square_low);
    const float e = Math::exp2_down(t);
    return e + e * (0.693147180559945309417f * t_low);
  }

  // (Phi(x) - 1/2) / x within 2^-26 for |x| < kNear
  static GEGLU_HOST_DEVICE float near_slope(float x) {
    return polynomial(x * x, 0.398942292f, -0.0664909333f, 0.00997786876f, -0.00119897362f, 0.000127863066f,
                      -1.33814328e-05f);
  }

  static GEGLU_HOST_DEVICE float value(float x, const Tail& tail) {
    const float far = value_of<Math>(x, kFar, tail.q, tail.numerator, tail.denominator);
    if constexpr (Math::kPrecise) {
      // Near 0, 1/2 + (Phi(x) - 1/2) has the smaller rounding error.
      const float near = x * Math::fma(x, near_slope(x), 0.5f);
      return tail.a < kNear ? near : far;
    } else {
      return far;
    }
  }
};

// The C library's erfc keeps its relative accuracy in the tail.
template <typename Math>
struct ExactGelu<double, Math> {
  // value = x * Phi(x), Phi(x) = erfc(-x / sqrt(2)) / 2
  static GEGLU_HOST_DEVICE double value(double x) { return x * phi_integral(x); }

  // derivative = Phi(x) + x * phi(x), phi(x) = exp(-x^2 / 2) / sqrt(2 * pi)
  static GEGLU_HOST_DEVICE ValueAndDerivative<double> value_and_derivative(double x) {
    const double integral = phi_integral(x);
    const double a = Math::minimum(magnitude(x), kFar);
    const double a_phi = a * (Math::exp2_down(-0.72134752044448170368 * (a * a)) * 0.39894228040143267794);
    const double x_phi = x < 0.0 ? -a_phi : a_phi;
    return {x * integral, integral + x_phi};
  }

 private:
  // exp(-a^2 / 2) underflows here: its log2 is -1023.2.
  static constexpr double kFar = 37.663;

  static GEGLU_HOST_DEVICE double phi_integral(double x) { return 0.5 * ::erfc(-0.70710678118654752440 * x); }
};

template <typename T, bool kTanh, typename Math>
using Gelu = std::conditional_t<kTanh, TanhGelu<T, Math>, ExactGelu<T, Math>>;

}  // namespace geglu
