// What geglu_body.h computes with: the Math policies of common/gelu.h and the storage types. Part of that file,
// compiled with it for each instruction set.

#include "common/gelu.h"

namespace geglu::cpu {
namespace {
namespace GEGLU_CPU_ISA {

constexpr int kBlock = 128;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline double double_of(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Math policies of common/gelu.h
// ---------------------------------------------------------------------------------------------------------------------

// Limits are put on the bits, as integers: those of positive floats are ordered as the floats are, and negative floats
// are negative integers. GCC knows the minimum of integers from the start, while one of floats is a branch to it until
// late.
//
// exp2 splits t into an integer n and a rest r in [-1/2, 1/2]: the polynomial is 2^r, and n is added to its exponent.
// Adding 1.5 * 2^(mantissa bits) rounds t to n and leaves n in the low bits of the sum. t comes no further than kFar
// takes it, to -127.2 or 128.8, where r < 0: an exponent past the largest makes a NaN's bit pattern, which the limit
// turns into infinity, and one below the smallest a negative number, which it turns into 0.
template <typename Int>
inline Int smaller(Int a, Int b) {
  return a < b ? a : b;
}

template <typename Int>
inline Int larger(Int a, Int b) {
  return a > b ? a : b;
}

template <typename T, bool precise>
struct Math;

template <bool precise>
struct Math<float, precise> {
  static constexpr bool kPrecise = precise;

  static inline float exp2_up(float t) { return float_of(smaller(exp2_bits(t), int32_t{0x7f800000})); }
  static inline float exp2_down(float t) { return float_of(larger(exp2_bits(t), int32_t{0})); }
  static inline float reciprocal(float b) { return 1.0f / b; }
  static inline float divide(float a, float b) { return a / b; }

  static inline float minimum(float a, float limit) {
    return float_of(smaller(static_cast<int32_t>(bits_of(a)), static_cast<int32_t>(bits_of(limit))));
  }

  static inline float fma(float a, float b, float c) {
#if GEGLU_CPU_FMA_F16C
    return __builtin_fmaf(a, b, c);
#else
    return static_cast<float>(static_cast<double>(a) * b + c);
#endif
  }

 private:
  static inline int32_t exp2_bits(float t) {
    const float shifted = t + 12582912.0f;
    const float r = t - (shifted - 12582912.0f);
    const float r2 = r * r;
    float slope;  // (2^r - 1) / r, as a tree: the chain of operations through an exponential is the longest of all
    if constexpr (precise) {  // 2^r within 2^-28
      slope = (0.693147182f + r * 0.240226477f) +
              r2 * ((0.0555035956f + r * 0.00961850118f) + r2 * (0.00133909844f + r * 0.000153285466f));
    } else {  // 2^r within 2^-23
      slope = (0.693147004f + r * 0.240222469f) + r2 * ((0.0555071197f + r * 0.00967130996f) + r2 * 0.00132691511f);
    }
    const float power = 1.0f + r * slope;
    return static_cast<int32_t>(bits_of(power) + (bits_of(shifted) << 23));
  }
};

template <>
struct Math<double, true> {
  static constexpr bool kPrecise = true;

  static inline double exp2_up(double t) { return double_of(smaller(exp2_bits(t), int64_t{0x7ff0000000000000})); }
  static inline double exp2_down(double t) { return double_of(larger(exp2_bits(t), int64_t{0})); }
  static inline double reciprocal(double b) { return 1.0 / b; }
  static inline double divide(double a, double b) { return a / b; }

  static inline double minimum(double a, double limit) {
    return double_of(smaller(static_cast<int64_t>(bits_of(a)), static_cast<int64_t>(bits_of(limit))));
  }

 private:
  static inline int64_t exp2_bits(double t) {
    const double shifted = t + 6755399441055744.0;
    const double r = t - (shifted - 6755399441055744.0);
    const double power =  // within 2^-52
        polynomial(r, 1.0, 0.69314718055994762, 0.24022650695910097, 0.055504108664641776, 0.0096181291075814641,
                   0.0013333558185242454, 0.0001540353050019541, 1.5252699724076999e-05, 1.3215402933731347e-06,
                   1.0191157791312649e-07, 7.0808428286142596e-09, 2.6263760164314724e-10);
    return static_cast<int64_t>(bits_of(power) + (bits_of(shifted) << 52));
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Storage types: blocks of elements to and from the type that the arithmetic is done in
// ---------------------------------------------------------------------------------------------------------------------

// float and double are stored as they are computed.
template <typename T>
struct Native {
  using Element = T;
  using Compute = T;
  static constexpr bool kPrecise = true;

  static inline void load(const T* from, T* to) {
    for (int i = 0; i < kBlock; ++i) to[i] = from[i];
  }
  static inline void round(T*) {}
  static inline void store(const T* from, T* to) {
    for (int i = 0; i < kBlock; ++i) to[i] = from[i];
  }
};

// The upper half of a float. Elements are taken in pairs, as 32-bit words; as computed, those in the words' lower
// halves fill the first half of the block and the others the second, which saves all shuffling.
struct BFloat16 {
  using Element = uint16_t;
  using Compute = float;
  static constexpr bool kPrecise = false;

  static inline void load(const uint16_t* from, float* to) {
    for (int i = 0; i < kPairs; ++i) {
      uint32_t pair;
      std::memcpy(&pair, from + 2 * i, sizeof(pair));
      to[i] = float_of(pair << 16);
      to[i + kPairs] = float_of(pair & kUpper);
    }
  }
  static inline void round(float* values) {
    for (int i = 0; i < kBlock; ++i) values[i] = float_of(rounded_bits(values[i]) & kUpper);
  }
  static inline void store(const float* from, uint16_t* to) {
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t pair = rounded_bits(from[i]) >> 16 | (rounded_bits(from[i + kPairs]) & kUpper);
      std::memcpy(to + 2 * i, &pair, sizeof(pair));
    }
  }

 private:
  static constexpr int kPairs = kBlock / 2;
  static constexpr uint32_t kUpper = 0xffff0000u;

  // To nearest even, in the upper half. A NaN stays one without a special case: all NaN here come from bfloat16 inputs
  // or from the processor, their lower half is 0, and there is no carry.
  static inline uint32_t rounded_bits(float value) {
    const uint32_t bits = bits_of(value);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

struct Float16 {
  using Element = uint16_t;
  using Compute = float;
  static constexpr bool kPrecise = false;

#if GEGLU_CPU_FMA_F16C
  static inline void load(const uint16_t* from, float* to) {
    for (int i = 0; i < kBlock; i += 8) {
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
  }
  static inline void round(float* values) {
    for (int i = 0; i < kBlock; i += 8) {
      _mm256_storeu_ps(values + i, _mm256_cvtph_ps(halves(values + i)));
    }
  }
  static inline void store(const float* from, uint16_t* to) {
    for (int i = 0; i < kBlock; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves(from + i));
  }

 private:
  static inline __m128i halves(const float* values) {
    return _mm256_cvtps_ph(_mm256_loadu_ps(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#else
  static inline void load(const uint16_t* from, float* to) {
    for (int i = 0; i < kBlock; ++i) to[i] = widened(from[i]);
  }
  static inline void round(float* values) {
    for (int i = 0; i < kBlock; ++i) values[i] = widened(narrowed(values[i]));
  }
  static inline void store(const float* from, uint16_t* to) {
    for (int i = 0; i < kBlock; ++i) to[i] = static_cast<uint16_t>(narrowed(from[i]));
  }

 private:
  // With its exponent and mantissa moved into place a half is the float of 2^-112 times its value, a subnormal half
  // included; only infinity and NaN need their exponent set.
  static inline float widened(uint32_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
    return float_of(bits | (half & 0x8000u) << 16);
  }

  // To nearest even. Below the smallest normal half, 2^-14, adding 0.5 leaves multiples of 2^-24 in the mantissa.
  static inline uint32_t narrowed(float value) {
    const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
    const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
    const uint32_t normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x1ffu) : half;
    return half | sign;
  }
#endif
};

}  // namespace GEGLU_CPU_ISA
}  // namespace
}  // namespace geglu::cpu
