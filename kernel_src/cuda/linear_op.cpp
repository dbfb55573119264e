// The CUDA backend of the linear operators: which product cuBLASLt is asked for, and what our own kernels add.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/gated_op.h"
#include "cuda/geglu.h"
#include "cuda/gelu.h"
#include "cuda/on_device.h"
#include "linear_ops.h"
#include "mlp_ops.h"
#include "torch_binding.h"

namespace geglu {

namespace cuda {
namespace {

using torch::stable::Tensor;

// cuBLASLt takes matrices of any alignment, but with less than 16 bytes its algorithms are slow, and some round a
// half-precision product before they add the bias. It asks for as much of a bias and of an auxiliary matrix.
constexpr int64_t kAlignment = 16;

bool aligned(const void* address) { return reinterpret_cast<uint64_t>(address) % kAlignment == 0; }

// This thread's handle for the current device. torch owns it, and keeps it for as long as the thread lives. A cuBLAS
// handle serves as one of cuBLASLt, by cuBLASLt's documentation.
lt::Handle handle_for(int32_t device) {
  thread_local std::vector<lt::Handle> handles;
  if (handles.size() <= static_cast<size_t>(device)) handles.resize(device + 1);
  lt::Handle& handle = handles[device];
  if (handle == nullptr) TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
  return handle;
}

Tensor empty_bytes(size_t count, int32_t device) {
  const int64_t size = static_cast<int64_t>(count);
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

// A matrix as cuBLASLt can read it: rows or columns without gaps.
struct Operand {
  const void* data;
  int64_t ld;
  bool by_column;  // neighbours in memory are neighbours in a column
};

std::optional<Operand> as_operand(const Matrix& m) {
  if ((m.cols == 1 || m.col_stride == 1) && (m.rows == 1 || m.row_stride >= m.cols)) {
    return Operand{m.data, m.rows == 1 ? m.cols : m.row_stride, false};
  }
  if ((m.rows == 1 || m.row_stride == 1) && (m.cols == 1 || m.col_stride >= m.rows)) {
    return Operand{m.data, m.cols == 1 ? m.rows : m.col_stride, true};
  }
  return std::nullopt;
}

bool aligned(const Operand& operand, DType dtype) {
  return aligned(operand.data) && operand.ld * element_size(dtype) % kAlignment == 0;
}

// A tensor of any strides as an operand, copied if it has to be; the copy lives as long as this does.
class Readable {
 public:
  explicit Readable(const Tensor& tensor) {
    std::optional<Matrix> matrix = detail::as_matrix(tensor);
    if (!matrix || !as_operand(*matrix)) {
      copy_ = torch::stable::contiguous(tensor);
      matrix = detail::as_matrix(*copy_);
    }
    matrix_ = *matrix;
  }

  const Matrix& matrix() const { return matrix_; }

 private:
  std::optional<Tensor> copy_;
  Matrix matrix_;
};

// A product in both of cuBLASLt's terms: what is computed, and where.
struct Product {
  lt::Gemm gemm;
  lt::Buffers buffers;
};

// out = left @ right, all of one dtype. Row-major matrices are the transposes of column-major ones: cuBLASLt computes
// out.T = right.T @ left.T.
Product make_product(const Matrix& left, const Matrix& right, void* out, DType dtype, bool allow_tf32, int32_t device) {
  const Operand a = *as_operand(right);
  const Operand b = *as_operand(left);
  const lt::Gemm gemm{right.cols, left.rows,   left.cols,   a.ld,
                      b.ld,       right.cols,  device,      dtype,
                      lt::kPlain, a.by_column, b.by_column, dtype == DType::kFloat32 && allow_tf32};
  return {gemm, {a.data, b.data, out, nullptr, nullptr}};
}

// Whether left @ right, with a contiguous result, is a product for cuBLASLt.
bool fits(const Matrix& left, const Matrix& right, DType dtype) {
  const std::optional<Operand> a = as_operand(right);
  const std::optional<Operand> b = as_operand(left);
  return a && b && aligned(*a, dtype) && aligned(*b, dtype) && right.cols * element_size(dtype) % kAlignment == 0;
}

std::shared_ptr<lt::Plan> plan_for(const Product& product, const OnDevice& on) {
  return lt::find_plan(product.gemm, product.buffers, handle_for(on.device()));
}

bool run(lt::Plan& plan, const Product& product, const OnDevice& on) {
  std::optional<Tensor> workspace;
  if (plan.workspace_size() > 0) workspace = empty_bytes(plan.workspace_size(), on.device());
  const lt::Status status =
      plan.run(handle_for(on.device()), product.buffers, workspace ? workspace->data_ptr() : nullptr, on.stream());
  if (status == lt::kSuccess) return true;
  if (status == lt::kNotSupported || status == lt::kInvalidValue) return false;
  checks::fail("geglu: cuBLASLt: a product of " + std::to_string(product.gemm.cols) + " x " +
               std::to_string(product.gemm.depth) + " by " + std::to_string(product.gemm.depth) + " x " +
               std::to_string(product.gemm.rows) + " was not launched: " + lt::name_of(status));
}

// float32 without TF32 is torch's: cuBLASLt's GELU is worth some 20 bits only, and its choice of an algorithm, with
// another order of additions, is not always as accurate as torch's.
bool has_products(DType dtype, bool allow_tf32) {
  const bool type = dtype == DType::kFloat16 || dtype == DType::kBFloat16 || (dtype == DType::kFloat32 && allow_tf32);
  return type && lt::available();
}

// out = gelu(pre), both contiguous; out may be pre.
void apply_gelu(const Tensor& pre, const Tensor& out, DType dtype, bool tanh, const OnDevice& on) {
  on.check(launch_gelu({pre.data_ptr(), out.data_ptr(), dtype, tanh, flat_rows<GeluForward::kTensors>(out.numel())},
                       on.stream()));
}

// A forward pass through cuBLASLt, ready to run.
class Forward {
 public:
  // cuBLASLt's GELU is the tanh form. The exact one, and what its epilogue does not take, is a launch of our own.
  Forward(const LinearCall& call, const Tensor& out, const Tensor* pre, const OnDevice& on)
      : on_(on), call_(call), out_(out), pre_(pre), x_(call.x), weight_(call.weight) {
    const Matrix weight = weight_.matrix().transposed();
    if (!fits(x_.matrix(), weight, call.dtype)) return;
    product_ = make_product(x_.matrix(), weight, out.data_ptr(), call.dtype, call.allow_tf32, on.device());
    if (call.bias != nullptr) {
      bias_ = call.bias->stride(0) == 1 || call.cols == 1 ? *call.bias : torch::stable::contiguous(*call.bias);
      if (!aligned(bias_->data_ptr())) bias_ = torch::stable::clone(*bias_);
      product_.buffers.bias = bias_->data_ptr();
      product_.gemm.epilogue = lt::kBias;
    }
    if (call.activation == Activation::kTanh && plan_gelu()) return;
    pointwise_ = call.activation != Activation::kNone;
    if (pre != nullptr) product_.buffers.d = pre->data_ptr();
    plan_ = plan_for(product_, on_);
  }

  bool supported() const { return plan_ != nullptr && plan_->supported(); }
  // Whether GELU is a launch of its own.
  bool pointwise() const { return pointwise_; }
  const Product& product() const { return product_; }
  // "cublaslt", and the origin of its algorithm if that is not the heuristic.
  std::string product_name() const {
    const char* const origins[] = {"", ":shipped", ":tuned"};
    return std::string("cublaslt") + origins[static_cast<int>(plan_->choice())];
  }

  // False if cuBLASLt refuses.
  bool run() const {
    if (!cuda::run(*plan_, product_, on_)) return false;
    if (pointwise_) {
      apply_gelu(pre_ != nullptr ? *pre_ : out_, out_, call_.dtype, call_.activation == Activation::kTanh, on_);
    }
    return true;
  }

 private:
  bool plan_gelu() {
    const Product plain = product_;
    product_.gemm.epilogue = (plain.gemm.epilogue & lt::kBias) | (pre_ != nullptr ? lt::kGeluAux : lt::kGelu);
    product_.buffers.aux = pre_ != nullptr ? pre_->data_ptr() : nullptr;
    plan_ = plan_for(product_, on_);
    if (plan_->supported()) return true;
    product_ = plain;
    return false;
  }

  const OnDevice& on_;
  const LinearCall& call_;
  const Tensor& out_;
  const Tensor* pre_;
  Readable x_;
  Readable weight_;
  std::optional<Tensor> bias_;
  Product product_;
  std::shared_ptr<lt::Plan> plan_;
  bool pointwise_ = false;
};

}  // namespace

struct LinearBackend {
  static bool linear(const LinearCall& call, const Tensor& out, const Tensor* pre) {
    if (!has_products(call.dtype, call.allow_tf32) || call.depth == 0) return false;
    const OnDevice on(call.x);
    const Forward forward(call, out, pre, on);
    return forward.supported() && forward.run();
  }

  static bool multiply(const Matrix& left, const Matrix& right, const Tensor& out, DType dtype, bool allow_tf32) {
    if (!has_products(dtype, allow_tf32) || !fits(left, right, dtype)) return false;
    const OnDevice on(out);
    const Product product = make_product(left, right, out.data_ptr(), dtype, allow_tf32, on.device());
    const auto plan = plan_for(product, on);
    return plan->supported() && run(*plan, product, on);
  }

  static void gelu(const Tensor& pre, const Tensor& out, DType dtype, bool tanh) {
    apply_gelu(pre, out, dtype, tanh, OnDevice(out));
  }

  static void geglu(const GegluForward& problem, const Tensor& where) {
    const OnDevice on(where);
    on.check(launch_forward(problem, on.stream()));
  }

  static std::string own_kernel(const LinearCall& gate, const LinearCall* up) { return cuda::own_kernel(gate, up); }

  static bool run_own_kernel(const LinearCall& gate, const LinearCall* up, bool tanh, bool after_own,
                             const Tensor& out) {
    return cuda::run_own_kernel(gate, up, tanh, after_own, out);
  }

  static void gelu_backward(const GeluGradient& gradient) {
    const OnDevice on(gradient.grad_out);
    std::optional<Matrix> grad_out = detail::as_matrix(gradient.grad_out);
    std::optional<Tensor> copy;
    if (!grad_out || (grad_out->cols > 1 && grad_out->col_stride != 1)) {
      copy = torch::stable::contiguous(gradient.grad_out);
      grad_out = detail::as_matrix(*copy);
    }
    const auto address = [](const Tensor* tensor) { return tensor != nullptr ? tensor->data_ptr() : nullptr; };
    BiasGeluBackward problem{
        grad_out->data, address(gradient.pre), address(gradient.grad_pre), address(gradient.grad_bias),
        nullptr,        gradient.dtype,        gradient.activation,        grad_out->rows,
        grad_out->cols, grad_out->row_stride};
    std::optional<Tensor> sums;
    if (gradient.grad_bias != nullptr) {
      const int64_t element = std::max<int64_t>(element_size(gradient.dtype), sizeof(float));
      sums = empty_bytes(partial_sums(problem.rows) * problem.cols * element, on.device());
      problem.partial_sums = sums->data_ptr();
    }
    on.check(launch_gelu_backward(problem, on.stream()));
  }

  static std::string route(const LinearCall& call, const Tensor& out, const Tensor* pre) {
    const char* const unfused = call.activation == Activation::kNone ? "torch" : "torch+pointwise";
    if (!has_products(call.dtype, call.allow_tf32) || call.depth == 0) return unfused;
    const OnDevice on(call.x);
    const Forward forward(call, out, pre, on);
    if (!forward.supported()) return unfused;
    return forward.product_name() + (forward.pointwise() ? "+pointwise" : "");
  }

  static std::string tune(const LinearCall& call, bool training);
};

// Tunes the forward product and, for training, those of the gradients of x and weight, for an incoming gradient that is
// contiguous.
std::string LinearBackend::tune(const LinearCall& call, bool training) {
  // Enough for a median that a disturbance or two does not move.
  constexpr int kRepeats = 15;

  if (!has_products(call.dtype, call.allow_tf32) || call.depth == 0) return "";
  const OnDevice on(call.x);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  on.check(cudaStreamIsCapturing(on.stream(), &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    checks::fail("tune: must not be called while a CUDA graph is captured: call it before");
  }

  const std::vector<int64_t> sizes = detail::with_last_size(call.x.sizes(), call.cols);
  const Tensor out = detail::empty_contiguous(call.x, sizes);
  const bool keeps_pre = training && call.activation != Activation::kNone;
  const Tensor pre = detail::empty_contiguous(call.x, keeps_pre ? sizes : std::vector<int64_t>{0});
  const Forward forward(call, out, keeps_pre ? &pre : nullptr, on);

  std::vector<Product> products;
  if (forward.supported()) products.push_back(forward.product());
  const Tensor grad_x = detail::empty_contiguous(
      call.x, training ? std::vector<int64_t>{call.rows, call.depth} : std::vector<int64_t>{0});
  const Tensor grad_weight = detail::empty_contiguous(
      call.x, training ? std::vector<int64_t>{call.cols, call.depth} : std::vector<int64_t>{0});
  const Tensor x = detail::regular(call.x);
  if (training) {
    const Matrix grads = *detail::as_matrix(out);
    const auto add = [&](const Matrix& left, const Matrix& right, const Tensor& result) {
      if (!fits(left, right, call.dtype)) return;
      const Product product = make_product(left, right, result.data_ptr(), call.dtype, call.allow_tf32, on.device());
      if (plan_for(product, on)->supported()) products.push_back(product);
    };
    add(grads, *detail::as_matrix(call.weight), grad_x);
    add(grads.transposed(), *detail::as_matrix(x), grad_weight);
  }

  int cache_bytes = 0;
  on.check(cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, on.device()));
  const size_t scratch_size = std::max<size_t>(2 * static_cast<size_t>(cache_bytes), 1);
  const Tensor scratch = empty_bytes(scratch_size, on.device());
  const Tensor workspace = empty_bytes(lt::kMaxWorkspace, on.device());
  const lt::TuneRequest request{kRepeats, workspace.data_ptr(), scratch.data_ptr(), scratch_size, on.stream()};
  std::string records;
  for (const Product& product : products) {
    if (!records.empty()) records += "\n";
    records += lt::tune(product.gemm, product.buffers, handle_for(on.device()), request);
  }
  return records;
}

std::string export_tuning() {
  std::set<std::string> records;  // sorted, and once for devices that share one
  for (const lt::Tuned& tuned : lt::all_tuned()) records.insert(tuned.record);
  std::string text;
  for (const std::string& record : records) text += (text.empty() ? "" : "\n") + record;
  return text;
}

std::string import_tuning(const std::string& entry) { return lt::import_record(entry); }

}  // namespace cuda

template struct LinearOps<cuda::LinearBackend>;
template struct MlpOps<cuda::LinearBackend>;

}  // namespace geglu
