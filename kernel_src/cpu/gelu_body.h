// GELU and its gradient without a gate, for linear layers. Part of geglu_body.h, compiled with it for each instruction
// set.

#include "common/linear.h"

namespace geglu::cpu {
namespace {
namespace GEGLU_CPU_ISA {

template <typename Storage, bool kTanh>
struct GeluBlock {
  using Problem = GeluForward;
  using Element = typename Storage::Element;
  using Compute = typename Storage::Compute;
  static constexpr int kInputs = Problem::kOut;

  static inline void run(Element* const* tensors) {
    if constexpr (sizeof(Element) == 2) {
      GeluTable<Storage, kTanh>::instance().look_up(tensors[Problem::kPre], tensors[Problem::kOut]);
    } else {
      alignas(64) Compute values[kBlock];
      Storage::load(tensors[Problem::kPre], values);
      for (int i = 0; i < kBlock; ++i) {
        values[i] = Gelu<Compute, kTanh, Math<Compute, Storage::kPrecise>>::value(values[i]);
      }
      Storage::store(values, tensors[Problem::kOut]);
    }
  }
};

template <typename Storage, bool kTanh>
struct GeluBackwardBlock {
  using Problem = GeluBackward;
  using Element = typename Storage::Element;
  using Compute = typename Storage::Compute;
  static constexpr int kInputs = Problem::kGradPre;

  static inline void run(Element* const* tensors) {
    using Function = Gelu<Compute, kTanh, Math<Compute, Storage::kPrecise>>;
    alignas(64) Compute grad[kBlock], pre[kBlock];
    Storage::load(tensors[Problem::kGradOut], grad);
    Storage::load(tensors[Problem::kPre], pre);
    for (int i = 0; i < kBlock; ++i) grad[i] *= Function::value_and_derivative(pre[i]).derivative;
    Storage::store(grad, tensors[Problem::kGradPre]);
  }
};

template <typename Storage, bool kTanh>
void run(const GeluForward& problem, int64_t begin, int64_t end) {
  using Element = typename Storage::Element;
  Element* const base[] = {pointer<Element>(problem.pre), pointer<Element>(problem.out)};
  walk<GeluBlock<Storage, kTanh>>(base, problem.rows, begin, end);
}

template <typename Storage, bool kTanh>
void run(const GeluBackward& problem, int64_t begin, int64_t end) {
  using Element = typename Storage::Element;
  Element* const base[] = {pointer<Element>(problem.grad_out), pointer<Element>(problem.pre),
                           pointer<Element>(problem.grad_pre)};
  walk<GeluBackwardBlock<Storage, kTanh>>(base, problem.rows, begin, end);
}

}  // namespace GEGLU_CPU_ISA
}  // namespace
}  // namespace geglu::cpu
