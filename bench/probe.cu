// What the plans of the scans assume about a GPU, measured: bench/first_hour.py compiles and runs this file.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -Icsrc bench/probe.cu -o probe && ./probe
//
// Prints one JSON object a line: {"name", "size", "value", "unit"}. The kernels keep the rules of csrc/cuda/launch.h,
// so that `first_hour.py --dry-run` runs them on the CPU (there is no clock then: all times are 0).
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "cuda/ptx.h"

using namespace orthokern::cuda;

namespace {

#ifdef ORTHOKERN_CUDA_HOST
constexpr int kRepeats = 4, kGridBlocks = 1;  // blocks run one after the other there: none may wait for another one
inline int64_t clocks_now() { return 0; }
void* device_memory(size_t bytes) { return calloc(bytes, 1); }
int64_t read_back(const int64_t* from) { return *from; }
#else
constexpr int kRepeats = 2000, kGridBlocks = 0;
__device__ __forceinline__ int64_t clocks_now() { return clock64(); }
void* device_memory(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "allocating memory");
  check(cudaMemset(memory, 0, bytes), "clearing memory");
  return memory;
}
int64_t read_back(const int64_t* from) {
  check(cudaDeviceSynchronize(), "running a kernel");
  int64_t value = 0;
  check(cudaMemcpy(&value, from, sizeof(value), cudaMemcpyDeviceToHost), "reading a result");
  return value;
}
#endif

constexpr int kThreads = 256;

void report(const char* name, const char* size, double value, const char* unit) {
  printf("{\"name\": \"%s\", \"size\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"}\n", name, size, value, unit);
  fflush(stdout);
}

// One exchange of the cluster scan, over and over: every block sends its part of a vector of `bytes` to every block,
// and waits for all parts. Two vectors in turn, as with a dense map. Threads that send nothing take no part: they could
// be overtaken by two phases.
__global__ void __launch_bounds__(kThreads) exchange_kernel(int bytes, int size, int repeats, int64_t* clocks) {
  unsigned char* const vectors = dynamic_shared<unsigned char>();  // [2][bytes]
  ORTHOKERN_SHARED(Mbarrier, ready, [2]);
  const int thread = threadIdx.x, rank = cluster_rank(), part = bytes / size, pieces = part / 16;
  if (thread == 0) {
    for (int slot = 0; slot < 2; slot++) mbarrier_init(&ready[slot], 1);
    mbarrier_init_fence();
    for (int slot = 0; slot < 2; slot++) mbarrier_arrive_expect(&ready[slot], bytes);
  }
  for (int i = thread; i < 2 * bytes; i += kThreads) vectors[i] = 0;
  __syncthreads();
  cluster_sync();
  const int64_t start = clocks_now();
  if (thread < pieces * size) {
    for (int i = 0; i < repeats; i++) {
      const int slot = i & 1;
      unsigned char* const own = vectors + slot * bytes + rank * part;
      for (int p = thread; p < pieces * size; p += kThreads) {
        const int peer = p / pieces, piece = p % pieces;
        const ClusterAddress to = cluster_address(own + 16 * piece, peer);
        st_async(to, make_float4(0, 0, 0, 0), cluster_address(&ready[slot], peer));
      }
      mbarrier_wait(&ready[slot], i >> 1 & 1);
      if (thread == 0) mbarrier_arrive_expect(&ready[slot], bytes);
    }
  }
  if (thread == 0 && blockIdx.x == 0) *clocks = clocks_now() - start;
  __syncthreads();
  cluster_sync();
}

// Reading L2: each thread of a block keeps kStages copies of 16 bytes under way, over a region of the block's own.
template <int kStages>
__global__ void __launch_bounds__(kThreads)
    stream_kernel(const unsigned char* from, int64_t region, int copies, int64_t* clocks) {
  unsigned char* const ring = dynamic_shared<unsigned char>();
  const unsigned char* const own = from + blockIdx.x * region;
  auto fetch = [&](int i) {
    if (i < copies)
      cp_async<16>(ring + (i % kStages * kThreads + threadIdx.x) * 16,
                   own + (static_cast<int64_t>(i) * kThreads + threadIdx.x) * 16 % region);
    cp_async_commit();
  };
  const int64_t start = clocks_now();
  for (int i = 0; i < kStages; i++) fetch(i);
  for (int i = 0; i < copies; i++) {
    cp_async_wait<kStages - 1>();
    fetch(i + kStages);
  }
  cp_async_wait<0>();
  if (threadIdx.x == 0 && blockIdx.x == 0) *clocks = clocks_now() - start;
}

__global__ void __launch_bounds__(kThreads) block_barrier_kernel(int repeats, int64_t* clocks) {
  const int64_t start = clocks_now();
  for (int i = 0; i < repeats; i++) __syncthreads();
  if (threadIdx.x == 0) *clocks = clocks_now() - start;
}

// All blocks meet at a word of device memory; all of them have to be resident.
__global__ void __launch_bounds__(kThreads) grid_barrier_kernel(unsigned* arrived, int repeats, int64_t* clocks) {
  const int64_t start = clocks_now();
  for (int i = 0; i < repeats; i++) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrived, 1u);
      const unsigned all = gridDim.x * static_cast<unsigned>(i + 1);
      while (*static_cast<volatile unsigned*>(arrived) < all) {
      }
      __threadfence();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) *clocks = clocks_now() - start;
}

void probe_clusters(const DeviceLimits& limits, int64_t* clocks) {
  char size[96];
  for (int blocks : {8, 16}) {
    const Launch whole{dim3(blocks), dim3(kThreads), nullptr, limits.shared_per_block - 1024, blocks};
    const int resident = max_active_clusters(exchange_kernel, whole);
    snprintf(size, sizeof(size), "%d blocks, %zu bytes of shared memory", blocks, whole.shared_bytes);
    report("resident clusters", size, resident, "clusters");
    if (!resident) continue;
    for (int kib : {2, 8, 16, 32}) {
      const int bytes = kib << 10;
      launch(exchange_kernel, {dim3(blocks), dim3(kThreads), nullptr, static_cast<size_t>(2 * bytes), blocks}, bytes,
             blocks, kRepeats, clocks);
      snprintf(size, sizeof(size), "%d blocks, %d KiB", blocks, kib);
      report("exchange", size, static_cast<double>(read_back(clocks)) / kRepeats, "clocks");
    }
  }
}

template <int kStages>
void probe_stream(const DeviceLimits& limits, int64_t* clocks) {
  const int blocks = kGridBlocks ? kGridBlocks : limits.multiprocessors, stage_bytes = 16 * kThreads;
  const int64_t region = 352 << 10;  // of a block at N = 1000: 45 MB in all
  const void* const from = device_memory(static_cast<size_t>(region * blocks));
  const int copies = 88 * (kRepeats > 100 ? 50 : 1);
  const Launch at{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), nullptr,
                  static_cast<size_t>(kStages * stage_bytes)};
  for (int turn = 0; turn < 2; turn++)  // the first one brings the data into L2
    launch(stream_kernel<kStages>, at, static_cast<const unsigned char*>(from), region, copies, clocks);
  char size[96];
  snprintf(size, sizeof(size), "%d blocks, %d KiB in flight", blocks, kStages * stage_bytes >> 10);
  const double clocks_of_all = static_cast<double>(read_back(clocks));
  report("L2 stream", size, clocks_of_all > 0 ? copies * static_cast<double>(stage_bytes) / clocks_of_all : 0,
         "bytes per clock and block");
}

void probe_barriers(const DeviceLimits& limits, int64_t* clocks) {
  launch(block_barrier_kernel, {dim3(1), dim3(kThreads), nullptr}, kRepeats, clocks);
  report("__syncthreads", "256 threads", static_cast<double>(read_back(clocks)) / kRepeats, "clocks");
  unsigned* const arrived = static_cast<unsigned*>(device_memory(sizeof(unsigned)));
  const unsigned blocks = static_cast<unsigned>(kGridBlocks ? kGridBlocks : limits.multiprocessors);
  launch(grid_barrier_kernel, {dim3(blocks), dim3(kThreads), nullptr}, arrived, kRepeats, clocks);
  char size[96];
  snprintf(size, sizeof(size), "%u blocks", blocks);
  report("grid barrier", size, static_cast<double>(read_back(clocks)) / kRepeats, "clocks");
}

}  // namespace

int main() {
  try {
    const DeviceLimits limits = device_limits();
    int64_t* const clocks = static_cast<int64_t*>(device_memory(sizeof(int64_t)));
    report("multiprocessors", "", limits.multiprocessors, "");
    report("shared memory of a block", "", static_cast<double>(limits.shared_per_block), "bytes");
    probe_barriers(limits, clocks);
    if (limits.major >= 9) {
      probe_clusters(limits, clocks);
      probe_stream<7>(limits, clocks);
      probe_stream<24>(limits, clocks);
    }
  } catch (const std::exception& error) {
    fprintf(stderr, "probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
