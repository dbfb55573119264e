#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("geglu(Tensor gate, Tensor up, bool tanh) -> Tensor");
  ops.def("geglu_packed(Tensor x, bool tanh, bool gate_first) -> Tensor");
  ops.def("geglu_backward(Tensor grad_out, Tensor gate, Tensor up, bool tanh) -> (Tensor, Tensor)");
  ops.def("geglu_packed_backward(Tensor grad_out, Tensor x, bool tanh, bool gate_first) -> Tensor");
  ops.def("gelu_and_mul(Tensor! out, Tensor x) -> ()");
  ops.def("gelu_tanh_and_mul(Tensor! out, Tensor x) -> ()");
  ops.def("cpu_capability() -> str");
}

template <class Ops, class Library>
void implement(Library& ops) {
  ops.impl("geglu", TORCH_BOX(&Ops::geglu));
  ops.impl("geglu_packed", TORCH_BOX(&Ops::geglu_packed));
  ops.impl("geglu_backward", TORCH_BOX(&Ops::geglu_backward));
  ops.impl("geglu_packed_backward", TORCH_BOX(&Ops::geglu_packed_backward));
  ops.impl("gelu_and_mul", TORCH_BOX(&Ops::gelu_and_mul));
  ops.impl("gelu_tanh_and_mul", TORCH_BOX(&Ops::gelu_tanh_and_mul));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("cpu_capability", TORCH_BOX(&geglu::cpu::capability));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  implement<geglu::PointwiseOps<geglu::cpu::Backend>>(ops);
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  implement<geglu::PointwiseOps<geglu::cuda::Backend>>(ops);
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
