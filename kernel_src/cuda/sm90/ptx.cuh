// The instructions of Hopper that have no name in CUDA C++, one a function. Sections are those of the PTX ISA 9.0,
// https://docs.nvidia.com/cuda/parallel-thread-execution. Addresses in shared memory are 32-bit shared-window
// addresses. The warpgroup's matrix product has its own file, wgmma.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace geglu::cuda::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The block's dynamic shared memory, aligned as the widest swizzle asks for.
__device__ __forceinline__ char* dynamic_shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

// "Parallel Synchronization and Communication Instructions: mbarrier.init"
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// "membar / fence": makes barriers just initialised visible to the cluster and to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// "mbarrier.arrive": one arrival, and `bytes` of copies to come before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// "mbarrier.arrive": one arrival.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// "mapa": the address of the same place in block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in_block(const void* place, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
  return address;
}

// "mbarrier.arrive": one arrival at the barrier of the same place in block `rank` of the cluster. It publishes no
// writes to other blocks: `.release.cluster`, which would, costs a fence of all memory.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(barrier, rank)) : "memory");
}

// "mbarrier.try_wait": waits until the phase of this parity is complete. try_wait sleeps in hardware for a while.
#define GEGLU_MBARRIER_WAIT(semantics, barrier, parity) \
  asm volatile(                                         \
      "{\n"                                             \
      ".reg .pred done;\n"                              \
      "retry:\n"                                        \
      "mbarrier.try_wait.parity" semantics              \
      ".shared::cta.b64 done, [%0], %1;\n"              \
      "@done bra finished;\n"                           \
      "bra retry;\n"                                    \
      "finished:\n"                                     \
      "}\n" ::"r"(shared_address(barrier)),             \
      "r"(parity)                                       \
      : "memory")
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  GEGLU_MBARRIER_WAIT("", barrier, parity);
}
// The same where other blocks of the cluster complete it, whose writes are then visible.
__device__ __forceinline__ void mbarrier_wait_for_cluster(uint64_t* barrier, uint32_t parity) {
  GEGLU_MBARRIER_WAIT(".acquire.cluster", barrier, parity);
}

// "Data Movement and Conversion Instructions: prefetch"
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// "cp.async.bulk.tensor": the box at (column, row) of a matrix into shared memory; its bytes count at `barrier`.
__device__ __forceinline__ void load_box(void* destination, const CUtensorMap* map, uint64_t* barrier, int32_t column,
                                         int32_t row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared_address(destination)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// "createpolicy": of what is read or written with it, L2 keeps nothing that something else could have the place of.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// "cp.async.bulk.tensor": load_box() with a policy for L2.
__device__ __forceinline__ void load_box_by_policy(void* destination, const CUtensorMap* map, uint64_t* barrier,
                                                   int32_t column, int32_t row, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(destination)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// "cp.async.bulk.prefetch.tensor": the box at (column, row) of a matrix into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int32_t column, int32_t row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
               : "memory");
}

// "cp.async.bulk.tensor": load_box() into the same place of every block of the cluster named in `blocks`, a bit each.
__device__ __forceinline__ void load_box_multicast(void* destination, const CUtensorMap* map, uint64_t* barrier,
                                                   int32_t column, int32_t row, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(destination)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

// "cp.async.bulk.tensor": a box from shared memory to (column, row) of a matrix; what lies outside is not written.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* source, int32_t column, int32_t row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
               "r"(column), "r"(row), "r"(shared_address(source))
               : "memory");
}

// "cp.async.bulk.commit_group": closes a group of this thread's stores.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// "cp.async.bulk.wait_group": until all but the newest kGroups groups have read their shared memory.
template <int kGroups>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// "membar / fence", proxy fence: this thread's ordinary writes to shared memory, for the copy engine to read.
__device__ __forceinline__ void fence_for_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// "stmatrix": four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8, and holds
// elements 2 * (i % 4) and that + 1 of row i / 4 of each.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// The same of two, with addresses of lanes 0 to 15.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&matrices)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(matrices[0]),
               "r"(matrices[1])
               : "memory");
}

// "stmatrix", .trans: the same where the lane's elements are rows 2 * (i % 4) and that + 1, of column i / 4.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// "Miscellaneous Instructions: setmaxnreg"
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// "elect.sync": true in one lane of a warp, all of whose lanes call it. Of a branch on it the compiler knows that one
// lane takes it, and issues a copy once; of one on the lane's number it makes a loop over lanes around each copy.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(elected));
  return elected;
}

// "Special Registers: %cluster_ctarank, %cluster_nctarank"
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// "Special Registers: %clusterid"
__device__ __forceinline__ uint32_t cluster_id() {
  uint32_t id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}

// "barrier.cluster": all threads of the cluster, in two parts; what was written before the first is visible after the
// second.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Both parts, where all that was written before are barriers, ahead of fence_mbarrier_init(): without a fence of all
// memory, which takes a thousand cycles.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  cluster_wait();
}

// "st.async": to an address in any block of the cluster; the 16 bytes count at that block's barrier, and are visible to
// those who wait for it.
__device__ __forceinline__ void store_in_cluster(uint32_t address, float4 value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

// "bar / barrier": `threads` threads, those that arrive and those that wait.
__device__ __forceinline__ void named_barrier_arrive(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace geglu::cuda::sm90
