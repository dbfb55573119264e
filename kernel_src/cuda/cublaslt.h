// Matrix products through cuBLASLt, with bias and GELU in the epilogue: plans made once, run many times. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/pointwise.h"
#include "cuda/cublaslt_api.h"

namespace geglu::cuda::lt {

// What becomes of the product before it is rounded. The numbers are cuBLASLt's; they add up bit by bit.
enum Epilogue : uint32_t {
  kPlain = 1,
  kBias = 4,
  kGelu = 32,      // the tanh form
  kGeluAux = 160,  // kGelu, and what it is applied to is stored as well
};

// Addresses on the device. What an epilogue does not use is null.
struct Buffers {
  const void* a;
  const void* b;
  void* d;
  const void* bias;
  void* aux;
};

// d = epilogue(op(a) * op(b)) in column-major terms: op(a) is rows x depth, op(b) is depth x cols, d is rows x cols.
// The bias has one element for each of d's rows. aux has d's shape and leading dimension.
struct Gemm {
  int64_t rows;
  int64_t cols;
  int64_t depth;
  int64_t lda;
  int64_t ldb;
  int64_t ldd;
  int32_t device;
  DType dtype;  // of all matrices and the bias; not kFloat64
  uint32_t epilogue;
  bool transpose_a;
  bool transpose_b;
  bool tf32;  // whether float32 may be multiplied as TF32
};

// Everything that decides which algorithms are allowed and which is the fastest: a Gemm and the alignments of its
// buffers, packed for a fast comparison.
struct Key {
  std::array<int64_t, 7> words;

  Key() = default;
  Key(const Gemm& gemm, const Buffers& buffers);
  bool operator==(const Key& other) const { return words == other.words; }

  // The same key for another device.
  Key on(int32_t device) const;
};

// At most this much workspace for one product: what torch grants cuBLASLt on Hopper.
constexpr size_t kMaxWorkspace = size_t{32} << 20;

// Owns one of cuBLASLt's opaque objects.
template <Status (*kDestroy)(void*)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (object_ != nullptr) kDestroy(object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  // What a create function writes to.
  void** put() { return &object_; }
  void* get() const { return object_; }

 private:
  void* object_ = nullptr;
};

using OwnedLayout = Owned<cublasLtMatrixLayoutDestroy>;

// Where the algorithm for a product comes from.
enum class Choice {
  kHeuristic,  // the first that cuBLASLt's heuristic names
  kShipped,    // measured on a device of this model, and part of the source
  kTuned       // by tune(), or from a record of it
};

struct Chosen {
  Choice choice = Choice::kHeuristic;
  Algo algo = {};  // unless it is the heuristic's
};

// The descriptors of a product and the algorithm chosen for it.
class Plan {
 public:
  // Takes `chosen` if this cuBLASLt accepts it, else the heuristic's first. Raises std::runtime_error if cuBLASLt fails
  // otherwise than by not supporting the product.
  Plan(const Gemm& gemm, const Buffers& buffers, Handle handle, const Chosen& chosen = {});

  // False if cuBLASLt has no algorithm for this product.
  bool supported() const { return supported_; }
  Choice choice() const { return choice_; }
  size_t workspace_size() const { return workspace_size_; }

  // Enqueues the product. `workspace` has workspace_size() bytes. Any thread may call it.
  Status run(Handle handle, const Buffers& buffers, void* workspace, cudaStream_t stream);
  Status run(Handle handle, const Buffers& buffers, const Heuristic& with, void* workspace, cudaStream_t stream);

  // Up to `count` algorithms that need at most kMaxWorkspace bytes each, the one thought fastest first.
  std::vector<Heuristic> candidates(Handle handle, const Buffers& buffers, int count) const;

 private:
  Status set_pointers(const Buffers& buffers);

  Owned<cublasLtMatmulDescDestroy> desc_;
  OwnedLayout a_;
  OwnedLayout b_;
  OwnedLayout d_;
  Algo algo_ = {};
  Choice choice_ = Choice::kHeuristic;
  size_t workspace_size_ = 0;
  bool supported_ = false;
  std::mutex mutex_;  // guards the pointers in desc_
};

// Whether this process has cuBLASLt.
bool available();

// The plan for a product, from a cache of the most recent ones, or made now. Thread-safe.
std::shared_ptr<Plan> find_plan(const Gemm& gemm, const Buffers& buffers, Handle handle);

// The algorithm that is shipped for `key` on the device's model and for this version of cuBLASLt, if there is one.
std::optional<Algo> shipped_for(const Key& key, int32_t device);

// An algorithm that was tuned, and what it is for: name=value words, joined by spaces.
struct Tuned {
  Algo algo;
  std::string record;
};

// Makes an algorithm the choice for `key` from now on. Thread-safe.
void set_tuned(const Key& key, const Tuned& tuned);

// All that set_tuned() was given, the last for each key. Thread-safe.
std::vector<Tuned> all_tuned();

// "CUBLAS_STATUS_NOT_SUPPORTED"
std::string name_of(Status status);

struct TuneRequest {
  int repeats;
  void* workspace;  // kMaxWorkspace bytes
  void* scratch;    // written between two runs, to empty the caches
  size_t scratch_size;
  cudaStream_t stream;
};

// Times the algorithms for a product on `buffers`, which it overwrites, makes the fastest one the choice for its key
// and returns a record of it. Waits for the device. Raises std::runtime_error if cuBLASLt does not support the product
// or CUDA fails.
std::string tune(const Gemm& gemm, const Buffers& buffers, Handle handle, const TuneRequest& request);

// Makes a record's algorithm the choice for its key on every device of the record's kind. Returns "", or why it cannot:
// it is no record of tune(), was made by another version of cuBLASLt, or fits no device.
std::string import_record(const std::string& record);

}  // namespace geglu::cuda::lt
