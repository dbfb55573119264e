// Algorithms timed, recorded and taken back from records.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>

#include "cuda/cublaslt.h"
#include "cuda/cublaslt_defaults.h"

namespace geglu::cuda::lt {
namespace {

// More than the eight that a plan asks for: they cost time only where someone asked for it.
constexpr int kCandidates = 24;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("geglu: tune: ") + what + ": " + cudaGetErrorString(status));
  }
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "event"); }
  void wait() { check(cudaEventSynchronize(event_), "event"); }
  float microseconds_since(const Event& start) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "event");
    return milliseconds * 1000;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

template <class Words>
std::string to_hex(const Words& words) {
  std::string text;
  for (uint64_t word : words) {
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(word));
    text += digits;
  }
  return text;
}

// False if `text` is not exactly as many words as there are.
template <class Words>
bool from_hex(const std::string& text, Words& words) {
  size_t at = 0;
  for (auto& word : words) {
    const std::string digits = text.substr(std::min(at, text.size()), 16);
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
    word = std::strtoull(digits.c_str(), nullptr, 16);
    at += 16;
  }
  return at == text.size();
}

// A device's model in one word: "NVIDIA_H200-9.0".
std::string model_of(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "device");
  std::string model =
      std::string(properties.name) + "-" + std::to_string(properties.major) + "." + std::to_string(properties.minor);
  for (char& c : model) {
    if (c == ' ' || c == '=') c = '_';
  }
  return model;
}

// "bfloat16:3072x8192x768:tn:bias+gelu", sizes in the order rows, columns, depth of the column-major product.
std::string describe(const Gemm& gemm) {
  const char* const dtypes[] = {gemm.tf32 ? "tf32" : "float32", "float16", "bfloat16"};
  std::string text = std::string(dtypes[static_cast<int>(gemm.dtype)]) + ":" + std::to_string(gemm.rows) + "x" +
                     std::to_string(gemm.cols) + "x" + std::to_string(gemm.depth) + ":" +
                     (gemm.transpose_a ? "t" : "n") + (gemm.transpose_b ? "t" : "n");
  if (gemm.epilogue != kPlain) text += ":";
  if (gemm.epilogue & kBias) text += "bias";
  if (gemm.epilogue & kGelu) text += gemm.epilogue & kBias ? "+gelu" : "gelu";
  if ((gemm.epilogue & kGeluAux) == kGeluAux) text += "+aux";
  return text;
}

std::string fixed(float microseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f", microseconds);
  return text;
}

}  // namespace

std::optional<Algo> shipped_for(const Key& key, int32_t device) {
  const Key anywhere = key.on(0);
  for (const Shipped& shipped : kShippedAlgos) {
    if (shipped.key == anywhere.words && shipped.cublaslt == cublasLtGetVersion() &&
        shipped.device == model_of(device)) {
      return shipped.algo;
    }
  }
  return std::nullopt;
}

std::string tune(const Gemm& gemm, const Buffers& buffers, Handle handle, const TuneRequest& request) {
  Plan plan(gemm, buffers, handle);
  std::vector<Heuristic> candidates;
  for (const Heuristic& candidate : plan.candidates(handle, buffers, kCandidates)) {
    // The first run loads the kernel, and tells whether it runs at all.
    if (plan.run(handle, buffers, candidate, request.workspace, request.stream) == kSuccess) {
      candidates.push_back(candidate);
    }
  }
  if (candidates.empty()) throw std::runtime_error("geglu: tune: cuBLASLt does not support " + describe(gemm));

  // All candidates in turn, round after round: what drifts, drifts for all.
  Event start, stop;
  std::vector<std::vector<float>> times(candidates.size());
  for (int round = 0; round < request.repeats; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      check(cudaMemsetAsync(request.scratch, round, request.scratch_size, request.stream), "scratch");
      start.record(request.stream);
      plan.run(handle, buffers, candidates[i], request.workspace, request.stream);
      stop.record(request.stream);
      stop.wait();
      times[i].push_back(stop.microseconds_since(start));
    }
  }
  std::vector<float> medians;
  for (auto& samples : times) {
    std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
    medians.push_back(samples[samples.size() / 2]);
  }
  const size_t best = std::min_element(medians.begin(), medians.end()) - medians.begin();

  const Key key(gemm, buffers);
  std::ostringstream record;
  record << "problem=" << describe(gemm) << " candidates=" << candidates.size() << " first_us=" << fixed(medians[0])
         << " best_us=" << fixed(medians[best]) << " device=" << model_of(gemm.device)
         << " cublaslt=" << cublasLtGetVersion() << " key=" << to_hex(key.on(0).words)
         << " algo=" << to_hex(candidates[best].algo.data);
  set_tuned(key, {candidates[best].algo, record.str()});
  return record.str();
}

std::string import_record(const std::string& record) {
  std::map<std::string, std::string> fields;
  std::istringstream words(record);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return "'" + word + "' is not of the form name=value";
    fields[word.substr(0, equals)] = word.substr(equals + 1);
  }
  for (const char* name : {"problem", "candidates", "first_us", "best_us", "device", "cublaslt", "key", "algo"}) {
    if (fields.count(name) == 0) return std::string(name) + " is missing";
  }
  Key key;
  Tuned tuned{{}, record};
  if (!from_hex(fields["key"], key.words))
    return "key is not " + std::to_string(key.words.size()) + " words of 16 digits";
  if (!from_hex(fields["algo"], tuned.algo.data)) return "algo is not 8 words of 16 digits";
  if (!available()) return "this process has no cuBLASLt";
  if (const std::string version = std::to_string(cublasLtGetVersion()); fields["cublaslt"] != version) {
    return "cublaslt is " + fields["cublaslt"] + ", but this process has " + version;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) {
    cudaGetLastError();
    devices = 0;
  }
  bool fits = false;
  for (int device = 0; device < devices; ++device) {
    if (model_of(device) != fields["device"]) continue;
    set_tuned(key.on(device), tuned);
    fits = true;
  }
  return fits ? "" : "device is " + fields["device"] + ", and this machine has none";
}

}  // namespace geglu::cuda::lt
