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
template <bool kBulk>
__global__ void __launch_bounds__(kThreads) exchange_kernel(int bytes, int repeats, int64_t* clocks) {
  unsigned char* const vectors = dynamic_shared<unsigned char>();  // [2][bytes]
  ORTHOKERN_SHARED(Mbarrier, ready, [2]);
  const int thread = threadIdx.x, size = cluster_size(), rank = cluster_rank();
  const int part = bytes / size, pieces = kBulk ? 1 : part / 16;
  if (thread == 0) {
    for (int slot = 0; slot < 2; slot++) mbarrier_init(&ready[slot], 1);
    mbarrier_init_fence();
    for (int slot = 0; slot < 2; slot++) mbarrier_arrive_expect(&ready[slot], bytes);
  }
  for (int i = thread; i < 2 * bytes; i += kThreads) vectors[i] = 0;
  async_proxy_fence();
  __syncthreads();
  cluster_sync();
  const int64_t start = clocks_now();
  if (thread < pieces * size) {
    for (int i = 0; i < repeats; i++) {
      const int slot = i & 1;
      unsigned char* const own = vectors + slot * bytes + rank * part;
      for (int p = thread; p < pieces * size; p += kThreads) {
        const int peer = p / pieces, piece = p % pieces;
        const ClusterAddress to = cluster_address(own + 16 * piece, peer), done = cluster_address(&ready[slot], peer);
        if constexpr (kBulk) bulk_send(to, vectors + (1 - slot) * bytes + rank * part, part, done);
        else st_async(to, make_float4(0, 0, 0, 0), done);
      }
      mbarrier_wait(&ready[slot], i >> 1 & 1);
      if (thread == 0) mbarrier_arrive_expect(&ready[slot], bytes);
    }
  }
  if (thread == 0 && blockIdx.x == 0) *clocks = clocks_now() - start;
  __syncthreads();
  cluster_sync();
}

// Reading L2: one thread of a block keeps `stages` copies of `stage_bytes` under way, over a region of its own.
constexpr int kMostStages = 16;
__global__ void __launch_bounds__(32)
    stream_kernel(const unsigned char* from, int64_t region, int stages, int stage_bytes, int copies, int64_t* clocks) {
  unsigned char* const ring = dynamic_shared<unsigned char>();
  ORTHOKERN_SHARED(Mbarrier, ready, [kMostStages]);
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) mbarrier_init(&ready[s], 1);
    mbarrier_init_fence();
    async_proxy_fence();
    const unsigned char* const own = from + blockIdx.x * region;
    auto fetch = [&](int i) {
      const int s = i % stages;
      mbarrier_arrive_expect(&ready[s], stage_bytes);
      bulk_load(ring + s * stage_bytes, own + static_cast<int64_t>(i) * stage_bytes % region, stage_bytes, &ready[s]);
    };
    const int64_t start = clocks_now();
    for (int i = 0; i < stages && i < copies; i++) fetch(i);
    for (int i = 0; i < copies; i++) {
      mbarrier_wait(&ready[i % stages], i / stages & 1);
      if (i + stages < copies) fetch(i + stages);
    }
    if (blockIdx.x == 0) *clocks = clocks_now() - start;
  }
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
    const int resident = max_active_clusters(exchange_kernel<false>, whole);
    snprintf(size, sizeof(size), "%d blocks, %zu bytes of shared memory", blocks, whole.shared_bytes);
    report("resident clusters", size, resident, "clusters");
    if (!resident) continue;
    for (int kib : {2, 8, 16, 32})
      for (bool bulk : {false, true}) {
        const int bytes = kib << 10;
        const Launch at{dim3(blocks), dim3(kThreads), nullptr, static_cast<size_t>(2 * bytes), blocks};
        if (bulk) launch(exchange_kernel<true>, at, bytes, kRepeats, clocks);
        else launch(exchange_kernel<false>, at, bytes, kRepeats, clocks);
        snprintf(size, sizeof(size), "%d blocks, %d KiB, %s", blocks, kib, bulk ? "bulk copy" : "st.async");
        report("exchange", size, static_cast<double>(read_back(clocks)) / kRepeats, "clocks");
      }
  }
}

void probe_stream(const DeviceLimits& limits, int64_t* clocks) {
  const int blocks = kGridBlocks ? kGridBlocks : limits.multiprocessors, stage_bytes = 16 << 10;
  const int64_t region = 352 << 10;  // of a block at N = 1000: 45 MB in all
  void* const from = device_memory(static_cast<size_t>(region * blocks));
  for (int stages : {2, 6}) {
    const int copies = 22 * (kRepeats > 100 ? 50 : 1);
    const Launch at{dim3(static_cast<unsigned>(blocks)), dim3(32), nullptr, static_cast<size_t>(stages * stage_bytes)};
    for (int turn = 0; turn < 2; turn++)  // the first one brings the data into L2
      launch(stream_kernel, at, static_cast<const unsigned char*>(from), region, stages, stage_bytes, copies, clocks);
    char size[96];
    snprintf(size, sizeof(size), "%d blocks, %d KiB in flight", blocks, stages * stage_bytes >> 10);
    const double took = static_cast<double>(read_back(clocks));
    report("L2 stream", size, took > 0 ? copies * static_cast<double>(stage_bytes) / took : 0,
           "bytes per clock and block");
  }
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
      probe_stream(limits, clocks);
    }
  } catch (const std::exception& error) {
    fprintf(stderr, "probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
