// What every CUDA kernel of the project is launched through: shared memory, launches with clusters, limits of the
// device, errors.
//
// Kernel sources are compiled twice: by nvcc, and as plain C++ against tests/cuda_host, which runs them on the CPU
// (docs/cuda-host-harness.md). Both worlds share the functions below. A kernel therefore has these rules:
//   * launched by launch() or as a node of a graph (step_graph.h), never by <<<>>>;
//   * dynamic shared memory through dynamic_shared<T>(), static shared memory through ORTHOKERN_SHARED;
//   * no inline assembly and no cooperative groups: ptx.h wraps what is needed.
#pragma once

#ifdef ORTHOKERN_CUDA_HOST
#include "runtime.h"  // tests/cuda_host
#else
#include <cuda_runtime.h>
#endif

#include <stddef.h>
#include <stdint.h>

#include <stdexcept>
#include <string>
#include <tuple>

namespace orthokern {
namespace cuda {

// An error that a user can meet, in one line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Launch {
  dim3 grid, block;
  cudaStream_t stream;
  size_t shared_bytes = 0;  // dynamic shared memory
  int cluster = 1;          // blocks of a cluster, along x; above 8 only where max_active_clusters() says that one fits
};

// Without asking, the static and the dynamic shared memory of a block may together be no more than 48 KB. Only the
// compiler knows the static part, so every launch with dynamic memory asks for it.
inline bool asks_for_shared_memory(const Launch& at) { return at.shared_bytes > 0; }

struct DeviceLimits {
  int major, minor;  // compute capability
  int multiprocessors;
  size_t shared_per_block;  // bytes that a block may ask for; a kernel's static shared memory counts too
  size_t shared_per_multiprocessor;
};

#ifndef ORTHOKERN_CUDA_HOST

// Static shared memory, 16-byte aligned: ORTHOKERN_SHARED(float, tile, [32][33]);
#define ORTHOKERN_SHARED(type, name, extents) __shared__ __align__(16) type name extents

// The block's dynamic shared memory, 128-byte aligned.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char orthokern_dynamic_shared[];
  return reinterpret_cast<T*>(orthokern_dynamic_shared);
}

inline void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that the runtime can recover from must not come up again in the next call
  std::string text =
      "CUDA: " + std::string(doing) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")";
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion)
    text +=
        "; this build has no kernels for this GPU: set ORTHOKERN_CUDA_ARCHS to its compute capability and build again";
  else if (status == cudaErrorInsufficientDriver) text += "; update the driver, or build with an older CUDA toolkit";
  else if (status == cudaErrorMemoryAllocation) text += "; use a smaller batch, or checkpoint_every";
  throw Error(text);
}

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  return device;
}
inline void set_device(int device) { check(cudaSetDevice(device), "choosing the device"); }

inline DeviceLimits device_limits() {
  const int device = current_device();
  auto get = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "asking for the limits of the device");
    return value;
  };
  return {get(cudaDevAttrComputeCapabilityMajor), get(cudaDevAttrComputeCapabilityMinor),
          get(cudaDevAttrMultiProcessorCount), static_cast<size_t>(get(cudaDevAttrMaxSharedMemoryPerBlockOptin)),
          static_cast<size_t>(get(cudaDevAttrMaxSharedMemoryPerMultiprocessor))};
}

template <class... Parameters>
void prepare(void (*kernel)(Parameters...), const Launch& at, cudaLaunchConfig_t& config,
             cudaLaunchAttribute* attribute) {
  config = {};
  config.gridDim = at.grid, config.blockDim = at.block, config.dynamicSmemBytes = at.shared_bytes,
  config.stream = at.stream;
  if (asks_for_shared_memory(at))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(at.shared_bytes)),
          "asking for shared memory");
  if (at.cluster > 1) {
    if (at.cluster > 8)
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
            "asking for a large cluster");
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = at.cluster, attribute->val.clusterDim.y = 1, attribute->val.clusterDim.z = 1;
    config.attrs = attribute, config.numAttrs = 1;
  }
}

// Run a kernel on a stream. A grid without blocks is nothing to do. Throws Error.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& at, Arguments&&... arguments) {
  if (!at.grid.x || !at.grid.y || !at.grid.z) return;
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attribute;
  prepare(kernel, at, config, &attribute);
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a kernel");
}

// How many clusters of this shape the device holds at one time; 0 if it cannot hold one.
template <class... Parameters>
int max_active_clusters(void (*kernel)(Parameters...), const Launch& at) {
  if (device_limits().major < 9 || at.shared_bytes > device_limits().shared_per_block) return 0;
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attribute;
  prepare(kernel, at, config, &attribute);
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

// Tells the host harness of a kernel that a graph will call by its address.
template <class... Parameters>
void announce_kernel(void (*)(Parameters...)) {}

inline void fill_zero(void* memory, size_t bytes, cudaStream_t stream) {
  check(cudaMemsetAsync(memory, 0, bytes, stream), "clearing memory");
}

#else

#define ORTHOKERN_SHARED(type, name, extents) \
  static char name##_site;                    \
  using name##_type = type extents;           \
  name##_type& name = *static_cast<name##_type*>(cuda_host::static_shared(&name##_site, sizeof(name##_type)))

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(cuda_host::dynamic_shared_memory());
}

inline int current_device() { return cuda_host::device; }
inline void set_device(int device) { cuda_host::device = device; }

inline DeviceLimits device_limits() {
  cuda_host::note_device();
  const cuda_host::Chip& chip = cuda_host::chip;
  return {chip.major, chip.minor, chip.multiprocessors, chip.shared_per_block, chip.shared_per_multiprocessor};
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& at, Arguments&&... arguments) {
  if (!at.grid.x || !at.grid.y || !at.grid.z) return;
  std::tuple<Parameters...> values(
      static_cast<Parameters>(arguments)...);  // copied, as a launch does: it may run later
  cuda_host::put(at.stream, {{at.grid, at.block, at.shared_bytes, at.cluster, asks_for_shared_memory(at)},
                             [=] { std::apply(kernel, values); },
                             cuda_host::device});
}

template <class... Parameters>
int max_active_clusters(void (*)(Parameters...), const Launch& at) {
  return cuda_host::max_active_clusters({at.grid, at.block, at.shared_bytes, at.cluster});
}

template <class... Parameters>
void announce_kernel(void (*kernel)(Parameters...)) {
  cuda_host::announce(kernel);
}

inline void fill_zero(void* memory, size_t bytes, cudaStream_t stream) {
  cuda_host::put(stream,
                 {{dim3(1), dim3(1), 0, 1}, [=] { __builtin_memset(memory, 0, bytes); }, cuda_host::device, false});
}

#endif

// Makes a device the current one until the end of the scope, and then the one before it again: torch's choice is the
// caller's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : before_(current_device()), changed_(device != before_) {
    if (changed_) set_device(device);
  }
  ~DeviceGuard() {
    try {
      if (changed_) set_device(before_);
    } catch (const Error&) {  // a device that served a moment ago; what failed on the other one has been said
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_;
  bool changed_;
};

}  // namespace cuda
}  // namespace orthokern
