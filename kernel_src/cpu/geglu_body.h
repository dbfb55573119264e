// The CPU kernels, once for each instruction set: geglu_baseline.cpp, geglu_avx2.cpp and geglu_avx512.cpp name the
// instruction set in GEGLU_CPU_ISA, say in GEGLU_CPU_FMA_F16C whether it has those two extensions, switch it on and
// include this file. All that is compiled for it is internal to that translation unit, and nothing from the standard
// library is instantiated here: the linker must not hand code for one instruction set to another.
//
// Elements are handled in blocks of kBlock, through loops of constant length that the compiler vectorizes without a
// remainder. What does not fill a block (ends of rows, strided rows) is gathered into one first. So the bits of a
// result never depend on where in a tensor its element lies.

// GCC takes a selection between floats for a branch, and gives the loop around it up, as long as it has to respect
// floating-point exception flags, which nothing here reads. Values do not change.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include "common/gelu.h"
#include "common/pointwise.h"
#include "cpu/geglu.h"

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

// ---------------------------------------------------------------------------------------------------------------------
// One block: tensors in the order of the problem's enum, each kBlock consecutive elements
// ---------------------------------------------------------------------------------------------------------------------

// gelu of every number of a 16-bit type, rounded to it: computed once, by the formulas, in some 50 microseconds.
// Looking an element up takes about half the time of computing it. The table has 128 KiB, but numbers of the same
// magnitude are neighbours: activations keep to some 10 KiB of a bfloat16 table, 40 KiB of a float16 one.
template <typename Storage, bool kTanh>
class GeluTable {
 public:
  GeluTable() {
    using Function = Gelu<float, kTanh, Math<float, Storage::kPrecise>>;
    for (int first = 0; first < kSize; first += kBlock) {
      float values[kBlock];
      for (int i = 0; i < kBlock; ++i) gelu_[first + i] = static_cast<uint16_t>(first + i);
      Storage::load(gelu_ + first, values);
      for (int i = 0; i < kBlock; ++i) values[i] = Function::value(values[i]);
      Storage::store(values, gelu_ + first);
    }
  }

  static const GeluTable& instance() {
    static const GeluTable table;
    return table;
  }

  // A block of gates to their gelu. Two 16-bit results are written as one little-endian word: the processor writes
  // less often than it reads.
  void look_up(const uint16_t* gate, uint16_t* to) const {
    for (int i = 0; i < kBlock; i += 2) {
      const uint32_t pair = gelu_[gate[i]] | static_cast<uint32_t>(gelu_[gate[i + 1]]) << 16;
      std::memcpy(to + i, &pair, sizeof(pair));
    }
  }

 private:
  static constexpr int kSize = 1 << 16;
  uint16_t gelu_[kSize];
};

template <typename Storage, bool kTanh>
struct ForwardBlock {
  using Problem = GegluForward;
  using Element = typename Storage::Element;
  using Compute = typename Storage::Compute;
  static constexpr int kInputs = Problem::kOut;

  static inline void run(Element* const* tensors) {
    alignas(64) Compute gelu[kBlock], up[kBlock];
    Storage::load(tensors[Problem::kUp], up);
    if constexpr (sizeof(Element) == 2) {
      alignas(64) Element looked_up[kBlock];
      GeluTable<Storage, kTanh>::instance().look_up(tensors[Problem::kGate], looked_up);
      Storage::load(looked_up, gelu);
    } else {
      Storage::load(tensors[Problem::kGate], gelu);
      for (int i = 0; i < kBlock; ++i) gelu[i] = Gelu<Compute, kTanh, Math<Compute, Storage::kPrecise>>::value(gelu[i]);
    }
    for (int i = 0; i < kBlock; ++i) gelu[i] *= up[i];
    Storage::store(gelu, tensors[Problem::kOut]);
  }
};

template <typename Storage, bool kTanh>
struct BackwardBlock {
  using Problem = GegluBackward;
  using Element = typename Storage::Element;
  using Compute = typename Storage::Compute;
  static constexpr int kInputs = Problem::kGradGate;

  static inline void run(Element* const* tensors) {
    using Function = Gelu<Compute, kTanh, Math<Compute, Storage::kPrecise>>;
    alignas(64) Compute grad[kBlock], gate[kBlock], up[kBlock], slope[kBlock];
    Storage::load(tensors[Problem::kGradOut], grad);
    Storage::load(tensors[Problem::kGate], gate);
    Storage::load(tensors[Problem::kUp], up);
    for (int i = 0; i < kBlock; ++i) {
      const auto gelu = Function::value_and_derivative(gate[i]);
      gate[i] = gelu.value;
      slope[i] = gelu.derivative;
    }
    Storage::round(gate);
    for (int i = 0; i < kBlock; ++i) {
      gate[i] *= grad[i];
      grad[i] *= up[i];
    }
    Storage::store(gate, tensors[Problem::kGradUp]);
    Storage::round(grad);
    for (int i = 0; i < kBlock; ++i) grad[i] *= slope[i];
    Storage::store(grad, tensors[Problem::kGradGate]);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The walk
// ---------------------------------------------------------------------------------------------------------------------

// Where the rows of a walk begin, in elements.
template <int kTensors>
class RowOffsets {
 public:
  RowOffsets(const Rows<kTensors>& rows, int64_t row) : rows_(rows) {
    for (int k = rows.outer_dims - 1; k >= 0; --k) {
      digit_[k] = row % rows.outer_size[k];
      row /= rows.outer_size[k];
      for (int t = 0; t < kTensors; ++t) offset_[t] += digit_[k] * rows.outer_stride[t][k];
    }
  }

  int64_t operator[](int tensor) const { return offset_[tensor]; }

  void next() {
    for (int k = rows_.outer_dims - 1; k >= 0; --k) {
      const bool carry = ++digit_[k] == rows_.outer_size[k];
      const int64_t step = carry ? 1 - digit_[k] : 1;
      if (carry) digit_[k] = 0;
      for (int t = 0; t < kTensors; ++t) offset_[t] += step * rows_.outer_stride[t][k];
      if (!carry) return;
    }
  }

 private:
  const Rows<kTensors>& rows_;
  int64_t digit_[kMaxOuterDims] = {};
  int64_t offset_[kTensors] = {};
};

// Collects pieces of rows that do not fill a block until together they do.
template <typename Block>
class Gathered {
 public:
  using Element = typename Block::Element;
  static constexpr int kTensors = Block::Problem::kTensors;

  Gathered(Element* const* base, const Rows<kTensors>& rows) : base_(base), rows_(rows) {}

  int room() const { return kBlock - count_; }

  // size <= room() elements of a row from column on
  void add(const RowOffsets<kTensors>& row, int64_t column, int size) {
    Piece& piece = pieces_[piece_count_++];
    piece.size = size;
    for (int t = 0; t < kTensors; ++t) piece.offset[t] = row[t] + column * rows_.inner_stride[t];
    count_ += size;
    if (count_ == kBlock) flush();
  }

  void flush() {
    if (count_ == 0) return;
    Element* tensors[kTensors];
    for (int t = 0; t < kTensors; ++t) tensors[t] = elements_[t];
    for (int t = 0; t < Block::kInputs; ++t) {
      Element* staged = elements_[t];
      for (int p = 0; p < piece_count_; ++p) {
        const Element* from = base_[t] + pieces_[p].offset[t];
        for (int i = 0; i < pieces_[p].size; ++i) *staged++ = from[i * rows_.inner_stride[t]];
      }
    }
    Block::run(tensors);
    for (int t = Block::kInputs; t < kTensors; ++t) {
      const Element* staged = elements_[t];
      for (int p = 0; p < piece_count_; ++p) {
        Element* to = base_[t] + pieces_[p].offset[t];
        for (int i = 0; i < pieces_[p].size; ++i) to[i * rows_.inner_stride[t]] = *staged++;
      }
    }
    count_ = piece_count_ = 0;
  }

 private:
  struct Piece {
    int64_t offset[kTensors];
    int size;
  };

  Element* const* base_;
  const Rows<kTensors>& rows_;
  Element elements_[kTensors][kBlock] = {};
  Piece pieces_[kBlock];
  int count_ = 0;
  int piece_count_ = 0;
};

template <typename Block>
void walk(typename Block::Element* const* base, const Rows<Block::Problem::kTensors>& rows, int64_t begin,
          int64_t end) {
  constexpr int kTensors = Block::Problem::kTensors;
  if (begin >= end) return;
  bool dense = true;
  for (int t = 0; t < kTensors; ++t) dense = dense && rows.inner_stride[t] == 1;

  Gathered<Block> gathered(base, rows);
  RowOffsets<kTensors> row(rows, begin / rows.cols);
  int64_t column = begin % rows.cols;
  for (int64_t left = end - begin; left > 0; row.next(), column = 0) {
    const int64_t row_left = rows.cols - column;
    const int64_t stop = column + (row_left < left ? row_left : left);
    left -= stop - column;
    for (; dense && stop - column >= kBlock; column += kBlock) {
      typename Block::Element* tensors[kTensors];
      for (int t = 0; t < kTensors; ++t) tensors[t] = base[t] + row[t] + column;
      Block::run(tensors);
    }
    while (column < stop) {
      const int size = stop - column < gathered.room() ? static_cast<int>(stop - column) : gathered.room();
      gathered.add(row, column, size);
      column += size;
    }
  }
  gathered.flush();
}

// ---------------------------------------------------------------------------------------------------------------------
// Entry points
// ---------------------------------------------------------------------------------------------------------------------

// Inputs and outputs share one array of pointers; nothing writes through those of the inputs.
template <typename Element>
inline Element* pointer(const void* data) {
  return static_cast<Element*>(const_cast<void*>(data));
}

template <typename Storage, bool kTanh>
void run(const GegluForward& problem, int64_t begin, int64_t end) {
  using Element = typename Storage::Element;
  Element* const base[] = {pointer<Element>(problem.gate), pointer<Element>(problem.up), pointer<Element>(problem.out)};
  walk<ForwardBlock<Storage, kTanh>>(base, problem.rows, begin, end);
}

template <typename Storage, bool kTanh>
void run(const GegluBackward& problem, int64_t begin, int64_t end) {
  using Element = typename Storage::Element;
  Element* const base[] = {pointer<Element>(problem.grad_out), pointer<Element>(problem.gate),
                           pointer<Element>(problem.up), pointer<Element>(problem.grad_gate),
                           pointer<Element>(problem.grad_up)};
  walk<BackwardBlock<Storage, kTanh>>(base, problem.rows, begin, end);
}

template <typename Storage, typename Problem>
void select_form(const Problem& problem, int64_t begin, int64_t end) {
  problem.tanh ? run<Storage, true>(problem, begin, end) : run<Storage, false>(problem, begin, end);
}

template <typename Problem>
void select_storage(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.dtype) {
    case DType::kFloat32:
      return select_form<Native<float>>(problem, begin, end);
    case DType::kFloat16:
      return select_form<Float16>(problem, begin, end);
    case DType::kBFloat16:
      return select_form<BFloat16>(problem, begin, end);
    case DType::kFloat64:
      return select_form<Native<double>>(problem, begin, end);
  }
}

}  // namespace GEGLU_CPU_ISA
}  // namespace
}  // namespace geglu::cpu
