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

#include "common/pointwise.h"
#include "cpu/geglu.h"
#include "cpu/geglu_arithmetic.h"

namespace geglu::cpu {
namespace {
namespace GEGLU_CPU_ISA {

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

}  // namespace GEGLU_CPU_ISA
}  // namespace
}  // namespace geglu::cpu

#include "cpu/gelu_body.h"

namespace geglu::cpu {
namespace {
namespace GEGLU_CPU_ISA {

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
