// The PTX instructions of Hopper's asynchronous machinery, one to a function. No torch.
// https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include <cuda.h>

#include <cstdint>

namespace geglu::sm90::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: a phase ends when the expected arrivals and the expected bytes are both in

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine and to the other block of the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the barrier at the same place in shared memory of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Waits for the end of the phase of this parity. kClusterScope: what other blocks of the cluster did before they
// arrived is ordered too.
template <bool kClusterScope>
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    if constexpr (kClusterScope) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    }
  } while (!done);
}

// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- the copy engine (TMA)

// What the L2 cache does with the lines of a copy: the encodings that createpolicy gives for a fraction of 1.
enum class L2Policy : uint64_t { kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000 };

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (column, row) of a matrix to shared memory; zeros for what lies outside the matrix.
__device__ __forceinline__ void load_box(const CUtensorMap* map, uint64_t* barrier, void* shared, int column, int row,
                                         L2Policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

// The same to the same place in every block of the cluster whose bit is set; each block's own barrier counts the bytes.
__device__ __forceinline__ void load_box_multicast(const CUtensorMap* map, uint64_t* barrier, void* shared, int column,
                                                   int row, uint16_t blocks, L2Policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(blocks), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

// ---- programmatic dependent launch

// Returns when the kernels before this one are done and what they wrote is visible.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel's blocks begin once every block of this one has called this or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- memory shared with other blocks

__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// ---- fragments to shared memory

// Stores two 8x8 matrices of 16-bit values, spread over the warp as the accumulators of a matrix product are, each
// transposed: lane l < 16 gives the address of the 16 bytes that column l % 8 of matrix l / 8 becomes.
__device__ __forceinline__ void store_matrices_transposed(void* column, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(column)),
               "r"(first), "r"(second)
               : "memory");
}

}  // namespace geglu::sm90::ptx
