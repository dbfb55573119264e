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
  ops.def("linear(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32) -> Tensor");
  ops.def(
      "linear_with_preactivation(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32) -> "
      "(Tensor, Tensor)");
  ops.def(
      "linear_backward(Tensor grad_out, Tensor? x, Tensor? weight, Tensor? pre, int activation, bool allow_tf32, "
      "bool needs_x, bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor)");
  ops.def("linear_route(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32, bool training) -> str");
  ops.def("linear_tune(Tensor x, Tensor weight, Tensor? bias, int activation, bool allow_tf32, bool training) -> str");
  ops.def("linear_export_tuning() -> str");
  ops.def("linear_import_tuning(str entry) -> str");
  ops.def(
      "linear_geglu(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, bool tanh, "
      "bool allow_tf32) -> Tensor");
  ops.def(
      "geglu_mlp(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, Tensor? gate_bias, "
      "Tensor? up_bias, Tensor? down_bias, bool tanh, bool allow_tf32) -> Tensor");
  ops.def(
      "geglu_mlp_route(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, Tensor? gate_bias, "
      "Tensor? up_bias, Tensor? down_bias, bool tanh, bool allow_tf32) -> str");
  ops.def("cpu_capability() -> str");
}

template <class PointwiseBackend, class LinearBackend, class Library>
void implement(Library& ops) {
  using Pointwise = geglu::PointwiseOps<PointwiseBackend>;
  ops.impl("geglu", TORCH_BOX(&Pointwise::geglu));
  ops.impl("geglu_packed", TORCH_BOX(&Pointwise::geglu_packed));
  ops.impl("geglu_backward", TORCH_BOX(&Pointwise::geglu_backward));
  ops.impl("geglu_packed_backward", TORCH_BOX(&Pointwise::geglu_packed_backward));
  ops.impl("gelu_and_mul", TORCH_BOX(&Pointwise::gelu_and_mul));
  ops.impl("gelu_tanh_and_mul", TORCH_BOX(&Pointwise::gelu_tanh_and_mul));
  using Linear = geglu::LinearOps<LinearBackend>;
  ops.impl("linear", TORCH_BOX(&Linear::linear));
  ops.impl("linear_with_preactivation", TORCH_BOX(&Linear::linear_with_preactivation));
  ops.impl("linear_backward", TORCH_BOX(&Linear::linear_backward));
  ops.impl("linear_route", TORCH_BOX(&Linear::linear_route));
  ops.impl("linear_tune", TORCH_BOX(&Linear::linear_tune));
  using Mlp = geglu::MlpOps<LinearBackend>;
  ops.impl("linear_geglu", TORCH_BOX(&Mlp::linear_geglu));
  ops.impl("geglu_mlp", TORCH_BOX(&Mlp::geglu_mlp));
  ops.impl("geglu_mlp_route", TORCH_BOX(&Mlp::geglu_mlp_route));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("cpu_capability", TORCH_BOX(&geglu::cpu::capability));
#if defined(CUDA_KERNEL)
  ops.impl("linear_export_tuning", TORCH_BOX(&geglu::cuda::export_tuning));
  ops.impl("linear_import_tuning", TORCH_BOX(&geglu::cuda::import_tuning));
#else
  ops.impl("linear_export_tuning", TORCH_BOX(&geglu::cpu::export_tuning));
  ops.impl("linear_import_tuning", TORCH_BOX(&geglu::cpu::import_tuning));
#endif
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  implement<geglu::cpu::Backend, geglu::cpu::LinearBackend>(ops);
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  implement<geglu::cuda::Backend, geglu::cuda::LinearBackend>(ops);
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
