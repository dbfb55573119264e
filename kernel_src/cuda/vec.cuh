// Global memory in packets of up to 16 bytes. No thread reads what another has read, so loads take the read-only path,
// unless what is read may be written while the kernel runs: by itself, or by the kernel that it overlaps with.
// Hints that keep the data out of L1 (no_allocate, evict-first) were measured 4 % slower (docs/measured.md). Outputs
// are left to L2, where the next operator looks first.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/dtype.cuh"

namespace geglu::cuda {

template <typename T, int kN, bool kWritten = false>
__device__ __forceinline__ Packet<T, kN> load(const T* pointer) {
  constexpr int kBytes = sizeof(T) * kN;
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16, "one access must move a packet");
  using Word =
      std::conditional_t<kBytes == 16, uint4,
                         std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  const Word* const address = reinterpret_cast<const Word*>(pointer);
  const Word word = kWritten ? *address : __ldg(address);
  return *reinterpret_cast<const Packet<T, kN>*>(&word);
}

template <typename T, int kN>
__device__ __forceinline__ void store(T* pointer, const Packet<T, kN>& packet) {
  *reinterpret_cast<Packet<T, kN>*>(pointer) = packet;
}

}  // namespace geglu::cuda
