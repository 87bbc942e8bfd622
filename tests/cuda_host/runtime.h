// A small CUDA on the CPU, for tests: enough of the language and of the machine to run the sources of csrc/cuda as
// plain C++.
//
//   g++ -std=c++17 -x c++ -DORTHOKERN_CUDA_HOST -Itests/cuda_host -Icsrc csrc/cuda/<op>.cu ...      (build.py does it)
//
// The threads of a cluster (a block alone is a cluster of one) are fibers of one thread of the CPU: each runs until it
// waits, then the next one does. Clusters run one after another. In which order is the schedule's choice, and a kernel
// whose result depends on it has a race. runtime.cpp holds the scheduler, ptx_host.h the instructions of
// csrc/cuda/ptx.h; docs/cuda-host-harness.md says what this can and cannot show.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// ----------------------------------------------------------------------------------------------- words of the language

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static_assert(false, "use dynamic_shared<T>() or ORTHOKERN_SHARED of csrc/cuda/launch.h");

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 {
  unsigned x, y, z;
};
struct __align__(8) float2 {
  float x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using cudaStream_t = void*;

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

// ------------------------------------------------------------------------------------------------------------- machine

namespace cuda_host {

// The GPU that is pretended. A test may change it; the default is an H200.
struct Chip {
  int major = 9, minor = 0, multiprocessors = 132;
  size_t shared_per_block = 227 << 10, shared_per_multiprocessor = 228 << 10;
  int largest_cluster = 16;
  unsigned largest_grid_yz = 65535;  // blocks along y, and along z
  int code = 0;  // the compute capability that the kernels were compiled for, as 90; 0: that of the GPU
  size_t shared_by_default = 48 << 10;  // of a block, static and dynamic, unless the launch asks for more
};
inline Chip chip;
inline int compiled_for() { return chip.code ? chip.code : 10 * chip.major + chip.minor; }

// The current device, and the devices on which something was launched or asked for: the machine has any number of them,
// all alike.
inline int device = 0;
inline std::set<int> devices_used;
inline void note_device() { devices_used.insert(device); }

enum Order { kForward, kReverse, kRandom };  // of threads between two waits, and of clusters
void set_schedule(Order order, unsigned seed);

struct Shape {
  dim3 grid, block;
  size_t shared_bytes;  // dynamic
  int cluster = 1;
  bool asks_for_shared_memory =
      false;  // the launch raised the limit on it; otherwise static and dynamic memory share 48 KB
};
int max_active_clusters(const Shape& shape);
// Run every thread of a grid. Returns what went wrong, in one line, or nothing.
std::string run(const Shape& shape, void (*body)(void*), void* argument);
template <class Body>
std::string run(const Shape& shape, const Body& body) {
  return run(shape, [](void* b) { (*static_cast<const Body*>(b))(); }, const_cast<Body*>(&body));
}

// Where a thread of a kernel waits, for reports. Functions of the kernel's vocabulary take file and line of their call
// by default arguments.
struct Site {
  const char* what;
  const char* file;
  int line;
};
#define CUDA_HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// Memory that nobody has written yet: NaN as float, double and (every second) bfloat16; absurd as an integer.
constexpr uint32_t kPoison = 0xFFF5A5A5u;
void poison(void* memory, size_t bytes);

[[noreturn]] void fail(const std::string& message);  // ends the launch, which reports it
void wait_until(bool (*ready)(void*), void* argument, Site site);
template <class Ready>
void wait_until(Ready ready, Site site) {
  if (!ready()) wait_until([](void* r) { return (*static_cast<Ready*>(r))(); }, &ready, site);
}

// Threads that wait for each other: __syncthreads, named barriers, the barrier of a cluster.
struct Barrier {
  int arrived = 0, expected = 0;
  unsigned generation = 0;
  Site first = {};
  unsigned arrive(int threads, Site site, bool same_place);
  void wait(unsigned since, Site site) {
    wait_until([this, since] { return generation != since; }, site);
  }
};
// Lanes of a warp that exchange values. Two sets of slots: one may still be read while the next is written.
struct WarpOp {
  unsigned arrived = 0, generation = 0;
  Site first = {};
  alignas(16) unsigned char slots[2][32][64];
};

struct AsyncCopy {  // cp.async of one thread
  void* to;
  const void* from;
  int bytes, group;
};
struct Delivery {  // st.async, on the way to a block
  void* to;
  uint64_t* barrier;
  float4 value;
  uint64_t due = 0;  // the round from which on it may arrive
};
// Every thread that can move does so once in a round. Stores and copies to other blocks keep no order: where the order
// is random, each takes a time of its own, mostly none and now and then longer than the products of several steps.
inline uint64_t rounds = 0;
inline bool in_flight = false;  // somebody waits for what is under way: no deadlock
uint64_t travel_rounds();

struct Block;
struct Thread {
  uint3 index;
  int id;  // in the block
  Block* block;
  bool (*ready)(void*) = nullptr;  // what it waits for, or null
  void* ready_argument = nullptr;
  Site site = {};
  bool done = false;
  std::vector<AsyncCopy> copies;
  int copy_group = 0;

  int lane() const { return id % 32; }
};
struct Block {
  uint3 index;
  int rank;  // in the cluster
  int threads_left;
  std::vector<unsigned char> dynamic_memory;  // with red zones around what the kernel may use
  std::map<const void*, std::vector<unsigned char>> static_memory;
  size_t static_bytes = 0;
  Barrier barrier;
  std::map<std::pair<int, unsigned>, WarpOp> warp_ops;  // by warp and mask
  std::vector<Delivery> deliveries;                     // to this block
};
struct Cluster {
  std::vector<Block> blocks;
  std::vector<Thread> threads;
  Barrier barrier;
};
inline Cluster* cluster;  // the one that runs
inline Thread* current;   // its thread that runs

void* dynamic_shared_memory();
void* static_shared(const void* site, size_t bytes);
// The block of the cluster whose shared memory holds an address, and the same place in the block of another rank.
Block& owner(const void* shared, const char* what);
void* in_block(const void* own, int rank);

// Every lane of `mask` gives a value and sees all of them. The reference is good until the thread's next exchange but
// one.
const unsigned char (&exchange_bytes(unsigned mask, const void* mine, size_t bytes, Site site))[32][64];
template <class T>
struct Lanes {
  const unsigned char (&slots)[32][64];
  T operator[](int lane) const {
    T value;
    memcpy(&value, slots[lane], sizeof(T));
    return value;
  }
};
template <class T>
Lanes<T> exchange(unsigned mask, const T& mine, Site site) {
  static_assert(sizeof(T) <= 64, "wider than a slot");
  return {exchange_bytes(mask, &mine, sizeof(T), site)};
}
template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  const Lanes<T> lanes = exchange(mask, value, site);
  if (!(mask >> source & 1)) poison(&value, sizeof(T));  // a lane that takes no part has nothing to give
  else value = lanes[source];
  return value;
}
// What a stream is given. It is carried out at once. Throws std::runtime_error for what a kernel did wrong.
struct Work {
  Shape shape;
  std::function<void()> body;  // one thread of a kernel
  int device;
};
void put(void* stream, const Work& work);
// Kernels that ran since the last question.
int kernels_run();

}  // namespace cuda_host

// ------------------------------------------------------------------------------------------- functions of the language

inline void __syncthreads(CUDA_HOST_SITE) {
  cuda_host::Barrier& barrier = cuda_host::current->block->barrier;
  const cuda_host::Site site = {"__syncthreads", file, line};
  barrier.wait(barrier.arrive(static_cast<int>(blockDim.x * blockDim.y * blockDim.z), site, true), site);
}
inline void __syncwarp(unsigned mask = ~0u, CUDA_HOST_SITE) {
  cuda_host::exchange(mask, 0, {"__syncwarp", file, line});
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_HOST_SITE) {
  const int lane = cuda_host::current->lane();
  return cuda_host::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), {"__shfl_sync", file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUDA_HOST_SITE) {
  const int lane = cuda_host::current->lane(), source = lane ^ bits;
  return cuda_host::shuffle(mask, value, (source & ~(width - 1)) <= (lane & ~(width - 1)) ? source : lane,
                            {"__shfl_xor_sync", file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_HOST_SITE) {
  const cuda_host::Lanes<int> lanes = cuda_host::exchange(mask, predicate, {"__ballot_sync", file, line});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) bits |= static_cast<unsigned>(lanes[lane] != 0) << lane;
  return bits;
}
inline void __threadfence() {}
[[noreturn]] inline void __trap() { cuda_host::fail("__trap was reached"); }
template <class T>
T atomicAdd(T* p, T value) {
  const T old = *p;
  *p = old + value;
  return old;
}

template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
inline float __fdividef(float a, float b) { return a / b; }
template <class To, class From>
To cuda_host_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
inline unsigned __float_as_uint(float x) { return cuda_host_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cuda_host_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
