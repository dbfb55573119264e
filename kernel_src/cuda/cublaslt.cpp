#include "cuda/cublaslt.h"

#include <list>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace geglu::cuda::lt {
namespace {

// Plans kept: more than the products of any one model, at some kilobytes each.
constexpr size_t kMaxPlans = 1024;

// The heuristic is asked for this many: its first may need more workspace than there is.
constexpr int kAsked = 8;

void check(Status status, const char* what) {
  if (status != kSuccess) throw std::runtime_error(std::string("geglu: cuBLASLt: ") + what + ": " + name_of(status));
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

// log2 of the largest power of two that divides an address, at most 256: no algorithm asks for more.
int64_t alignment_bits(const void* address) {
  uint64_t bits = reinterpret_cast<uint64_t>(address) | 256;
  return __builtin_ctzll(bits);
}

template <typename T>
void set(const Owned<cublasLtMatmulPreferenceDestroy>& preference, PreferenceAttribute attribute, T to) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &to, sizeof(to)), "preference");
}

template <typename T>
void set(const Owned<cublasLtMatmulDescDestroy>& desc, DescAttribute attribute, T to) {
  check(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &to, sizeof(to)), "descriptor");
}

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0;
    for (int64_t word : key.words) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// The most recently used plans, and the algorithms that were tuned.
class Cache {
 public:
  std::shared_ptr<Plan> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(key);
    if (found == plans_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, found->second);
    return found->second->second;
  }

  // Another thread may have been faster; then its plan stays.
  std::shared_ptr<Plan> insert(const Key& key, std::shared_ptr<Plan> plan) {
    const std::lock_guard lock(mutex_);
    if (const auto found = plans_.find(key); found != plans_.end()) return found->second->second;
    recent_.emplace_front(key, std::move(plan));
    plans_.emplace(key, recent_.begin());
    if (recent_.size() > kMaxPlans) {
      plans_.erase(recent_.back().first);
      recent_.pop_back();
    }
    return recent_.front().second;
  }

  std::optional<Algo> tuned(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = tuned_.find(key);
    if (found == tuned_.end()) return std::nullopt;
    return found->second.algo;
  }

  void set_tuned(const Key& key, const Tuned& tuned) {
    const std::lock_guard lock(mutex_);
    tuned_[key] = tuned;
    if (const auto found = plans_.find(key); found != plans_.end()) {
      recent_.erase(found->second);
      plans_.erase(found);
    }
  }

  std::vector<Tuned> all_tuned() {
    const std::lock_guard lock(mutex_);
    std::vector<Tuned> all;
    for (const auto& [key, tuned] : tuned_) all.push_back(tuned);
    return all;
  }

 private:
  using Entries = std::list<std::pair<Key, std::shared_ptr<Plan>>>;
  std::mutex mutex_;
  Entries recent_;
  std::unordered_map<Key, Entries::iterator, KeyHash> plans_;
  std::unordered_map<Key, Tuned, KeyHash> tuned_;
};

// Never destroyed: at exit, other threads may still use it, and cuBLASLt may be gone.
Cache& cache() {
  static Cache* const only = new Cache;
  return *only;
}

}  // namespace

// device, dtype, epilogue, transposes and TF32, alignments: 16 + 4 + 12 + 3 + 5 * 4 bits
Key::Key(const Gemm& gemm, const Buffers& buffers)
    : words{gemm.rows, gemm.cols, gemm.depth, gemm.lda, gemm.ldb, gemm.ldd, 0} {
  uint64_t packed = static_cast<uint64_t>(gemm.dtype) << 4 | static_cast<uint64_t>(gemm.transpose_a) << 2 |
                    static_cast<uint64_t>(gemm.transpose_b) << 1 | static_cast<uint64_t>(gemm.tf32);
  packed = packed << 12 | gemm.epilogue;
  for (const void* address : {buffers.a, buffers.b, static_cast<const void*>(buffers.d), buffers.bias,
                              static_cast<const void*>(buffers.aux)}) {
    packed = packed << 4 | alignment_bits(address);
  }
  words[6] = static_cast<int64_t>(packed << 16 | static_cast<uint16_t>(gemm.device));
}

Key Key::on(int32_t device) const {
  Key key = *this;
  key.words[6] = (words[6] & ~int64_t{0xffff}) | static_cast<uint16_t>(device);
  return key;
}

Plan::Plan(const Gemm& gemm, const Buffers& buffers, Handle handle, const Chosen& chosen) {
  const bool tf32 = gemm.dtype == DType::kFloat32 && gemm.tf32;
  check(cublasLtMatmulDescCreate(desc_.put(), tf32 ? kFloatFastTf32 : kFloat, CUDA_R_32F), "descriptor");
  set(desc_, kDescTransA, gemm.transpose_a ? kTranspose : kKeep);
  set(desc_, kDescTransB, gemm.transpose_b ? kTranspose : kKeep);
  set(desc_, kDescEpilogue, gemm.epilogue);
  if (buffers.aux != nullptr) set(desc_, kDescAuxLd, gemm.ldd);
  check(set_pointers(buffers), "descriptor");
  const auto layout = [&](OwnedLayout& into, int64_t rows, int64_t cols, bool transposed, int64_t ld) {
    if (transposed) std::swap(rows, cols);
    check(cublasLtMatrixLayoutCreate(into.put(), data_type(gemm.dtype), rows, cols, ld), "layout");
  };
  layout(a_, gemm.rows, gemm.depth, gemm.transpose_a, gemm.lda);
  layout(b_, gemm.depth, gemm.cols, gemm.transpose_b, gemm.ldb);
  layout(d_, gemm.rows, gemm.cols, false, gemm.ldd);

  Heuristic result;
  if (chosen.choice != Choice::kHeuristic &&
      cublasLtMatmulAlgoCheck(handle, desc_.get(), a_.get(), b_.get(), d_.get(), d_.get(), &chosen.algo, &result) ==
          kSuccess &&
      result.workspace_size <= kMaxWorkspace) {
    algo_ = chosen.algo;
    choice_ = chosen.choice;
    workspace_size_ = result.workspace_size;
    supported_ = true;
  } else if (const auto found = candidates(handle, buffers, kAsked); !found.empty()) {
    algo_ = found.front().algo;
    workspace_size_ = found.front().workspace_size;
    supported_ = true;
  }
}

std::vector<Heuristic> Plan::candidates(Handle handle, const Buffers& buffers, int count) const {
  Owned<cublasLtMatmulPreferenceDestroy> preference;
  check(cublasLtMatmulPreferenceCreate(preference.put()), "preference");
  set(preference, kPreferWorkspaceBytes, uint64_t{kMaxWorkspace});
  // Partial sums that are rounded to half precision would make the result worse than that of an unsplit product.
  set(preference, kPreferReductionMask, uint32_t{kReduceInComputeType});
  const auto alignment = [](const void* address) { return uint32_t{1} << alignment_bits(address); };
  set(preference, kPreferAlignmentA, alignment(buffers.a));
  set(preference, kPreferAlignmentB, alignment(buffers.b));
  set(preference, kPreferAlignmentC, alignment(buffers.d));
  set(preference, kPreferAlignmentD, alignment(buffers.d));
  std::vector<Heuristic> results(count);
  int returned = 0;
  const Status status = cublasLtMatmulAlgoGetHeuristic(handle, desc_.get(), a_.get(), b_.get(), d_.get(), d_.get(),
                                                       preference.get(), count, results.data(), &returned);
  if (status == kNotSupported || status == kInvalidValue || status == kArchMismatch) return {};
  check(status, "heuristic");
  std::vector<Heuristic> usable;
  for (int i = 0; i < returned; ++i) {
    if (results[i].state == kSuccess && results[i].workspace_size <= kMaxWorkspace) usable.push_back(results[i]);
  }
  return usable;
}

Status Plan::set_pointers(const Buffers& buffers) {
  Status status = kSuccess;
  if (buffers.bias != nullptr) {
    status = cublasLtMatmulDescSetAttribute(desc_.get(), kDescBiasPointer, &buffers.bias, sizeof(buffers.bias));
  }
  if (status == kSuccess && buffers.aux != nullptr) {
    status = cublasLtMatmulDescSetAttribute(desc_.get(), kDescAuxPointer, &buffers.aux, sizeof(buffers.aux));
  }
  return status;
}

Status Plan::run(Handle handle, const Buffers& buffers, void* workspace, cudaStream_t stream) {
  return run(handle, buffers, Heuristic{algo_, workspace_size_, kSuccess, 0, {}}, workspace, stream);
}

Status Plan::run(Handle handle, const Buffers& buffers, const Heuristic& with, void* workspace, cudaStream_t stream) {
  constexpr float kOne = 1;
  constexpr float kZero = 0;
  const std::lock_guard lock(mutex_);
  if (const Status status = set_pointers(buffers); status != kSuccess) return status;
  return cublasLtMatmul(handle, desc_.get(), &kOne, buffers.a, a_.get(), buffers.b, b_.get(), &kZero, buffers.d,
                        d_.get(), buffers.d, d_.get(), &with.algo, workspace, with.workspace_size, stream);
}

bool available() { return &cublasLtMatmul != nullptr && &cublasLtMatmulAlgoGetHeuristic != nullptr; }

std::shared_ptr<Plan> find_plan(const Gemm& gemm, const Buffers& buffers, Handle handle) {
  const Key key(gemm, buffers);
  if (auto plan = cache().find(key)) return plan;
  Chosen chosen;
  if (const auto tuned = cache().tuned(key)) {
    chosen = {Choice::kTuned, *tuned};
  } else if (const auto shipped = shipped_for(key, gemm.device)) {
    chosen = {Choice::kShipped, *shipped};
  }
  return cache().insert(key, std::make_shared<Plan>(gemm, buffers, handle, chosen));
}

void set_tuned(const Key& key, const Tuned& tuned) { cache().set_tuned(key, tuned); }

std::vector<Tuned> all_tuned() { return cache().all_tuned(); }

std::string name_of(Status status) {
  return &cublasLtGetStatusString != nullptr ? cublasLtGetStatusString(status) : std::to_string(status);
}

}  // namespace geglu::cuda::lt
