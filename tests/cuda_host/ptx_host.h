// The functions of csrc/cuda/ptx.h, whose comments say what they do, on the CPU.
//
// Asynchronous copies and stores are carried out as late as the rules allow: when somebody waits for them. Until then
// their destination is poisoned: a kernel that does not wait, or sends while the receiver still reads, computes
// something else.
#pragma once

namespace orthokern {
namespace cuda {

// ------------------------------------------------------------------------------------------------- asynchronous copies

inline void require_aligned(const void* address, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % static_cast<unsigned>(bytes))
    cuda_host::fail(std::string(what) + ": a misaligned address");
}

template <int bytes>
void cp_async(void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  require_aligned(shared, bytes, "cp_async");
  require_aligned(global, bytes, "cp_async");
  cuda_host::Thread& thread = *cuda_host::current;
  cuda_host::poison(shared, bytes);
  thread.copies.push_back({shared, global, bytes, thread.copy_group});
}
template <int bytes>
void cp_async_if(bool condition, void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8, "cp.async.ca moves 4 or 8 bytes");
  if (condition) cp_async<bytes>(shared, global);
}
inline float minimum(float a, float b) { return isnan(a) || isnan(b) ? NAN : a < b ? a : b; }
inline float maximum(float a, float b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }
inline void prefetch(const void*) {}
inline void cp_async_commit() { cuda_host::current->copy_group++; }
template <int groups>
void cp_async_wait() {
  cuda_host::Thread& thread = *cuda_host::current;
  size_t kept = 0;
  for (const cuda_host::AsyncCopy& copy : thread.copies) {
    if (copy.group >= thread.copy_group - groups) {
      thread.copies[kept++] = copy;
      continue;
    }
    memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  }
  thread.copies.resize(kept);
}

// ----------------------------------------------------------------------------------------------------------- mbarriers

struct MbarrierState {  // in the 64 bits of an Mbarrier
  int32_t bytes;        // still to come in this phase
  uint32_t expected : 15, pending : 15, phase : 1, alive : 1;

  void advance() {
    if (pending || bytes) return;
    phase ^= 1;
    pending = expected;
  }
};
static_assert(sizeof(MbarrierState) == sizeof(Mbarrier), "an mbarrier has 64 bits");

inline MbarrierState& mbarrier_state(Mbarrier* barrier, const char* what) {
  cuda_host::owner(barrier, what);
  MbarrierState& state = *reinterpret_cast<MbarrierState*>(barrier);
  if (*barrier == (uint64_t{cuda_host::kPoison} << 32 | cuda_host::kPoison) || !state.alive)
    cuda_host::fail(std::string(what) + ": the mbarrier is not initialised");
  return state;
}
inline void mbarrier_init(Mbarrier* barrier, int arrivals) {
  require_aligned(barrier, 8, "mbarrier_init");
  const uint32_t count = static_cast<uint32_t>(arrivals) & 0x7fff;
  *reinterpret_cast<MbarrierState*>(barrier) = {0, count, count, 0, 1};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(Mbarrier* barrier, int bytes, const char* what = "mbarrier_arrive_expect") {
  MbarrierState& state = mbarrier_state(barrier, what);
  if (!state.pending) cuda_host::fail(std::string(what) + ": more arrivals than the mbarrier expects");
  state.bytes += bytes;
  state.pending--;
  state.advance();
}
// Carry out what is on its way to this mbarrier.
inline void deliver(Mbarrier* barrier) {
  std::vector<cuda_host::Delivery>& all = cuda_host::current->block->deliveries;
  MbarrierState& state = mbarrier_state(barrier, "an asynchronous store or copy");
  size_t kept = 0;
  for (cuda_host::Delivery& one : all) {
    if (one.barrier != barrier || one.due > cuda_host::rounds) {
      cuda_host::in_flight = cuda_host::in_flight || one.barrier == barrier;
      all[kept++] = one;
      continue;
    }
    memcpy(one.to, &one.value, sizeof(one.value));
    state.bytes -= static_cast<int>(sizeof(one.value));
  }
  all.resize(kept);
  state.advance();
}
inline void mbarrier_wait(Mbarrier* barrier, int parity, CUDA_HOST_SITE) {
  mbarrier_state(barrier, "mbarrier_wait");
  // the receiving block waits, so it is also the one whose deliveries come in
  cuda_host::Thread* waiting = cuda_host::current;
  cuda_host::wait_until(
      [=] {
        cuda_host::current = waiting;
        MbarrierState& state = *reinterpret_cast<MbarrierState*>(barrier);
        if (state.phase == static_cast<uint32_t>(parity & 1)) deliver(barrier);
        return state.phase != static_cast<uint32_t>(parity & 1);
      },
      {"mbarrier_wait", file, line});
}

// ------------------------------------------------------------------------------------------------------------ clusters

inline int cluster_rank() { return cuda_host::current->block->rank; }
inline void cluster_sync(CUDA_HOST_SITE) {
  const int threads = static_cast<int>(cuda_host::cluster->threads.size());
  const cuda_host::Site site = {"cluster_sync", file, line};
  cuda_host::cluster->barrier.wait(cuda_host::cluster->barrier.arrive(threads, site, false), site);
}
inline ClusterAddress cluster_address(const void* own, int rank) {
  return reinterpret_cast<uintptr_t>(cuda_host::in_block(own, rank));
}
inline void st_async(ClusterAddress to, float4 value, ClusterAddress barrier) {
  cuda_host::Delivery one{reinterpret_cast<void*>(to), reinterpret_cast<Mbarrier*>(barrier), value,
                          cuda_host::rounds + cuda_host::travel_rounds()};
  cuda_host::Block& block = cuda_host::owner(one.to, "st_async");
  if (&block != &cuda_host::owner(one.barrier, "st_async"))
    cuda_host::fail("st_async: destination and mbarrier are in different blocks");
  require_aligned(one.to, sizeof(value), "st_async");
  cuda_host::poison(one.to, sizeof(value));
  block.deliveries.push_back(one);
}

// -------------------------------------------------------------------------------------------------------- tensor cores

inline uint32_t to_tf32(float x) {  // to nearest, ties away from zero
  const uint32_t bits = __float_as_uint(x);
  return isfinite(x) ? (bits + 0x1000) & 0xffffe000u : bits;
}
inline uint32_t to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

struct MmaOperands {
  uint32_t a[4], b[2];
};
inline cuda_host::Lanes<MmaOperands> mma_operands(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                  cuda_host::Site site) {
  return cuda_host::exchange(~0u, MmaOperands{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, site);
}
// c + the sum of the products, as tensor cores add: every term is cut to the bits that it has beside the largest one,
// one bit more than a float has, and the sum is cut to a float. Nothing is rounded to nearest, so a long sum in one
// accumulator drifts towards zero (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores").
template <int kTerms>
float tensor_core_sum(float c, const double (&products)[kTerms]) {
  double largest = fabs(static_cast<double>(c)), sum = c;
  bool finite = isfinite(c);
  for (double p : products) {
    finite = finite && isfinite(p);
    largest = fmax(largest, fabs(p));
    sum += p;
  }
  if (!finite || largest == 0) return static_cast<float>(sum);
  const double unit = ldexp(1.0, ilogb(largest) - 24);
  auto cut = [unit](double term) { return trunc(term / unit) * unit; };
  sum = cut(c);
  for (double p : products) sum += cut(p);  // exact: few terms of 26 bits
  const float nearest = static_cast<float>(sum);
  return fabs(static_cast<double>(nearest)) > fabs(sum) ? nextafterf(nearest, 0) : nearest;
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], CUDA_HOST_SITE) {
  const auto lanes = mma_operands(a, b, {"mma_tf32", file, line});
  const int g = cuda_host::current->lane() / 4, t = cuda_host::current->lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int column = 2 * t + i % 2;
    double products[8];
    for (int k = 0; k < 8;
         k++) {  // element (row, k) of a lies with lane 4 row + k % 4, (k, column) of b with lane 4 column + k % 4
      const uint32_t x = lanes[4 * g + k % 4].a[i / 2 + 2 * (k / 4)], y = lanes[4 * column + k % 4].b[k / 4];
      products[k] = static_cast<double>(__uint_as_float(x & 0xffffe000u)) * __uint_as_float(y & 0xffffe000u);
    }
    c[i] = tensor_core_sum(c[i], products);
  }
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], CUDA_HOST_SITE) {
  const auto lanes = mma_operands(a, b, {"mma_bf16", file, line});
  const int g = cuda_host::current->lane() / 4, t = cuda_host::current->lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int column = 2 * t + i % 2;
    double products[16];
    for (int k = 0; k < 16; k++) {
      const uint32_t x = lanes[4 * g + k / 2 % 4].a[i / 2 + 2 * (k / 8)], y = lanes[4 * column + k / 2 % 4].b[k / 8];
      products[k] = static_cast<double>(__uint_as_float(k % 2 ? x & 0xffff0000u : x << 16)) *
                    __uint_as_float(k % 2 ? y & 0xffff0000u : y << 16);
    }
    c[i] = tensor_core_sum(c[i], products);
  }
}

}  // namespace cuda
}  // namespace orthokern
