// Launches of a kernel that reads what the kernel before it in the stream wrote. From Hopper on its blocks are
// scheduled while that kernel drains, and wait there: programmatic dependent launch, which saves 1.5 us of a launch.
// CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace geglu::cuda {

// The first thing such a kernel does: wait until the kernels before it are done and their results visible.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next kernel be scheduled as soon as all blocks of this one have come here, or ended. After
// wait_for_earlier_kernels(): then whatever was written before this kernel is there for the next one to read, even
// before it waits for this one.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// An attribute of the current device.
inline cudaError_t current_device_attribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(value, attribute, device) : status;
}

// Enqueues kernel<<<grid, block, 0, stream>>>(arguments...) on the current device. The kernel must begin with
// wait_for_earlier_kernels(), and must not read what they wrote through the read-only path.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                             Arguments&&... arguments) {
  int major = 0;
  cudaError_t status = current_device_attribute(cudaDevAttrComputeCapabilityMajor, &major);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  status = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (status != cudaSuccess) cudaGetLastError();  // reported here, and not once more by whoever asks next
  return status;
}

constexpr int kSharedLimit = 227 * 1024;  // bytes of a block on compute capability 9.0

// Lets the kernel be launched with up to that much. Always the same amount: another thread may be about to launch it.
template <class Arguments>
cudaError_t allow_all_shared_memory(void (*kernel)(Arguments)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit);
}

// As launch_dependent, kernel<<<blocks, threads, shared_bytes, stream>>>(arguments) in clusters of `cluster` blocks,
// from compute capability 9.0 on. An error is not cleared here.
template <class Arguments>
cudaError_t launch_dependent_clusters(void (*kernel)(Arguments), int64_t blocks, int threads, int shared_bytes,
                                      int cluster, cudaStream_t stream, const Arguments& arguments) {
  const cudaError_t status = allow_all_shared_memory(kernel);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace geglu::cuda
