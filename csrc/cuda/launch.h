// Launches of all CUDA kernels of the project: shared memory, clusters, limits of the device, errors.
//
// Kernel sources are compiled twice: by nvcc, and as plain C++ against tests/cuda_host, which runs them on the CPU
// (docs/cuda-host-harness.md). The functions below work in both. The rules for a kernel are:
//   * launched by launch(), never by <<<>>>;
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

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace orthokern::cuda {

// An error for the user, in one line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Launch {
  dim3 grid, block;
  cudaStream_t stream;
  size_t shared_bytes = 0;  // dynamic shared memory
  int cluster = 1;          // blocks of a cluster, along x; above 8 only if max_active_clusters() is not 0
};

// By default the static and the dynamic shared memory of a block are limited to 48 KB in total. The size of the static
// part is not known here, so every launch with dynamic memory raises the attribute for a larger limit, if it is lower.
inline bool asks_for_shared_memory(const Launch& at) { return at.shared_bytes > 0; }

// The largest limit on dynamic shared memory that a kernel has been given, by device. Limits are only raised: otherwise
// a host thread could lower one between the call that raised it in another thread and the launch that needs it.
class SharedMemoryLimits {
 public:
  static SharedMemoryLimits& of_process() {
    static SharedMemoryLimits* const limits = new SharedMemoryLimits;  // never destroyed: threads may launch at the end
    return *limits;
  }
  // Call set(bytes), which throws if it fails, unless the limit is already as large.
  template <class Set>
  void raise(int device, const void* kernel, size_t bytes, Set set) {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t& limit = limits_[{device, kernel}];
    if (bytes <= limit) return;
    set(bytes);
    limit = bytes;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, size_t> limits_;
};

struct DeviceLimits {
  int major, minor;  // compute capability
  int multiprocessors;
  size_t shared_per_block;  // limit per block in bytes, including the static shared memory
  size_t shared_per_multiprocessor;
};

#ifndef ORTHOKERN_CUDA_HOST

// Static shared memory, 16-byte aligned: ORTHOKERN_SHARED(float, tile, [32][33]);
#define ORTHOKERN_SHARED(type, name, extents) __shared__ __align__(16) type name extents

// The dynamic shared memory of the block, 128-byte aligned.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char orthokern_dynamic_shared[];
  return reinterpret_cast<T*>(orthokern_dynamic_shared);
}

inline void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears a recoverable error, so that the next call does not report it again
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

// The compute capability for which the code of a kernel was compiled, such as 90. It is below that of the device if the
// build has no binary for it and the driver has compiled older PTX: __CUDA_ARCH__ was that of the PTX.
template <class... Parameters>
int compiled_for(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "asking for the code of a kernel");
  return attributes.ptxVersion;
}

template <class... Parameters>
void prepare(void (*kernel)(Parameters...), const Launch& at, cudaLaunchConfig_t& config,
             cudaLaunchAttribute* attribute) {
  config = {};
  config.gridDim = at.grid, config.blockDim = at.block, config.dynamicSmemBytes = at.shared_bytes,
  config.stream = at.stream;
  if (asks_for_shared_memory(at))
    SharedMemoryLimits::of_process().raise(
        current_device(), reinterpret_cast<const void*>(kernel), at.shared_bytes, [&](size_t bytes) {
          check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
                "asking for shared memory");
        });
  if (at.cluster > 1) {
    if (at.cluster > 8)
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
            "asking for a large cluster");
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = at.cluster, attribute->val.clusterDim.y = 1, attribute->val.clusterDim.z = 1;
    config.attrs = attribute, config.numAttrs = 1;
  }
}

// Launch a kernel on a stream. An empty grid is not launched. Throws Error.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& at, Arguments&&... arguments) {
  if (!at.grid.x || !at.grid.y || !at.grid.z) return;
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attribute;
  prepare(kernel, at, config, &attribute);
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a kernel");
}

// The number of clusters of this shape that can be resident on the device at one time; 0 if none fits.
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

template <class... Parameters>
int compiled_for(void (*)(Parameters...)) {
  return cuda_host::compiled_for();
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& at, Arguments&&... arguments) {
  if (!at.grid.x || !at.grid.y || !at.grid.z) return;
  std::tuple<Parameters...> values(
      static_cast<Parameters>(arguments)...);  // copied, as in a launch, because it may run later
  cuda_host::put(at.stream, {{at.grid, at.block, at.shared_bytes, at.cluster, asks_for_shared_memory(at)},
                             [=] { std::apply(kernel, values); },
                             cuda_host::device});
}

template <class... Parameters>
int max_active_clusters(void (*)(Parameters...), const Launch& at) {
  return cuda_host::max_active_clusters({at.grid, at.block, at.shared_bytes, at.cluster});
}

#endif

// Sets the current device until the end of the scope, and then restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : before_(current_device()), changed_(device != before_) {
    if (changed_) set_device(device);
  }
  ~DeviceGuard() {
    try {
      if (changed_) set_device(before_);
    } catch (const Error&) {  // the device worked before; an error on the other one has been reported
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_;
  bool changed_;
};

}  // namespace orthokern::cuda
