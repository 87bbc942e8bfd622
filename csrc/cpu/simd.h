// Vectors for the CPU kernels, from the compiler's vector extensions (GCC and clang): one source for AVX-512, AVX2,
// NEON and the baseline.
//
// Every file that includes this header is compiled once per instruction set, with ORTHOKERN_ISA naming it, and
// everything is in namespace orthokern::ORTHOKERN_ISA. These files must not instantiate templates of the standard
// library. Their instantiations have the same name in every instruction set and the linker keeps one of them, so a
// machine without AVX-512 could run AVX-512 code.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/parallel.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <xmmintrin.h>
#endif

#ifndef ORTHOKERN_ISA
#error "compile the CPU kernels with -DORTHOKERN_ISA=<name>"
#endif

#define ORTHOKERN_INLINE inline __attribute__((always_inline))
// Precedes a loop of at most 16 iterations, a number that is known at compile time.
#define ORTHOKERN_UNROLL _Pragma("GCC unroll 16")

namespace orthokern::ORTHOKERN_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kMaxRows = 13;  // rows of a register tile: 13 x 2 accumulators + 2 weights + 1 broadcast of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kMaxRows = 6;  // 6 x 2 + 2 + 1 of 16
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kMaxRows = 10;  // 10 x 2 + 2 of 32, and 10 vectors of the left factor
#else
constexpr int kVectorBytes = 16;
constexpr int kMaxRows = 6;
#endif
#if defined(__aarch64__)
constexpr bool kLaneProducts = true;  // a multiply-add can take a factor from a lane: products need no broadcasts
#else
constexpr bool kLaneProducts = false;
#endif
constexpr bool k32Registers = kMaxRows >= 10;  // 16 otherwise

template <class T>
struct Vec {
  typedef T V __attribute__((vector_size(kVectorBytes)));
  typedef decltype(V{} < V{}) I;  // integers
  typedef __typeof__(I{}[0]) Id;
  static constexpr int L = kVectorBytes / sizeof(T);
};

template <class T>
using V = typename Vec<T>::V;
template <class T>
constexpr int kLanes = Vec<T>::L;

template <class Int>
constexpr Int round_up(Int n, int m) {
  return (n + m - 1) / m * m;
}
// The elements of block b of n elements, at most L.
template <class T>
constexpr int lanes_of(int64_t n, int64_t b) {
  return n - b * kLanes<T> < kLanes<T> ? static_cast<int>(n - b * kLanes<T>) : kLanes<T>;
}

template <class T>
ORTHOKERN_INLINE V<T> load(const T* p) {
  V<T> v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
ORTHOKERN_INLINE void store(T* p, V<T> v) {
  memcpy(p, &v, sizeof v);
}
// The first n lanes; the others are zero. Reads no byte beyond them.
template <class T>
ORTHOKERN_INLINE V<T> load_part(const T* p, int n) {
  V<T> v = V<T>{};
#if defined(__AVX512F__)
  const unsigned lanes = (1u << n) - 1;
  if (sizeof(T) == 4) return (V<T>)_mm512_maskz_loadu_ps((__mmask16)lanes, p);
  return (V<T>)_mm512_maskz_loadu_pd((__mmask8)lanes, p);
#endif
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}
template <class T>
ORTHOKERN_INLINE void store_part(T* p, V<T> v, int n) {
#if defined(__AVX512F__)
  const unsigned lanes = (1u << n) - 1;
  if (sizeof(T) == 4) _mm512_mask_storeu_ps(p, (__mmask16)lanes, (__m512)v);
  else _mm512_mask_storeu_pd(p, (__mmask8)lanes, (__m512d)v);
  return;
#endif
  for (int i = 0; i < n; i++) p[i] = v[i];
}
// A streaming (non-temporal) store, for results that are not read soon. p is aligned to the vector.
template <class T>
ORTHOKERN_INLINE void store_stream(T* p, V<T> v) {
#if defined(__AVX512F__)
  __m512i raw;
  memcpy(&raw, &v, sizeof raw);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), raw);
#elif defined(__clang__)
  __builtin_nontemporal_store(v, reinterpret_cast<V<T>*>(p));
#else
  store(p, v);
#endif
}
template <class T>
ORTHOKERN_INLINE V<T> read(const T* from, int count) {
  return count == kLanes<T> ? load(from) : load_part(from, count);
}
template <class T>
ORTHOKERN_INLINE void write(T* to, V<T> v, int count, bool stream = false) {
  if (stream) store_stream(to, v);
  else if (count == kLanes<T>) store(to, v);
  else store_part(to, v, count);
}
ORTHOKERN_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class T>
ORTHOKERN_INLINE V<T> splat(T x) {
  return V<T>{} + x;
}
// sum += w * x[lane], for a lane that is known when the loop around it is unrolled.
template <class T>
ORTHOKERN_INLINE void add_product(V<T>& sum, V<T> w, V<T> x, int lane) {
#if defined(__aarch64__) && !defined(__clang__)
  // GCC 12 would copy the lane to a separate register first, and run out of registers.
  if (sizeof(T) == 4) __asm__("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(lane));
  else __asm__("fmla %0.2d, %1.2d, %2.d[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(lane));
#else
  sum += w * x[lane];
#endif
}
// L steps of the depth of a register tile, acc[r][n] += b[j][n] * a[r][j]. Rows of `a` are a_row elements apart. Vector
// n of step j is at b + j * b_row + n / 2 * b_panel + n % 2 * L.
template <class T, int MR, int NV>
ORTHOKERN_INLINE void add_lane_products(V<T> (&acc)[MR][NV], const T* a, ptrdiff_t a_row, const T* b, ptrdiff_t b_row,
                                        ptrdiff_t b_panel) {
  constexpr int L = kLanes<T>;
  const T* panels[(NV + 1) / 2];
  ORTHOKERN_UNROLL for (int n = 0; n < NV; n += 2) panels[n / 2] = b + n / 2 * b_panel;
  // Without this, GCC keeps an address for each vector that is loaded, and stores some of them on the stack.
  if (NV > 2) ORTHOKERN_UNROLL for (int n = 0; n < NV; n += 2) __asm__("" : "+r"(panels[n / 2]));
  V<T> x[MR];
  ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) x[r] = load(a + r * a_row);
  ORTHOKERN_UNROLL for (int j = 0; j < L; j++) {
    V<T> w[NV];
    ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) w[n] = load(panels[n / 2] + j * b_row + n % 2 * L);
    ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int n = 0; n < NV; n++)
        add_product<T>(acc[r][n], w[n], x[r], j);
  }
}
// The lanes of a and b, concatenated in this order, that `index` selects.
template <class T>
ORTHOKERN_INLINE V<T> pick(V<T> a, V<T> b, typename Vec<T>::I index) {
#if defined(__clang__)
  V<T> r;
#pragma clang loop unroll(full)
  for (int i = 0; i < kLanes<T>; i++) r[i] = index[i] < kLanes<T> ? a[index[i]] : b[index[i] - kLanes<T>];
  return r;
#else
  return __builtin_shuffle(a, b, index);
#endif
}
// Lanes (a0, a1, a2, a3, ...) -> (a1, a0, a3, a2, ...).
template <class T>
ORTHOKERN_INLINE V<T> swap_pairs(V<T> v) {
  typename Vec<T>::I index;
  for (int i = 0; i < kLanes<T>; i++) index[i] = i ^ 1;
  return pick<T>(v, v, index);
}
// All bits set in the even lanes: picks the first of each pair.
template <class T>
ORTHOKERN_INLINE typename Vec<T>::I even_lanes() {
  typename Vec<T>::I m;
  for (int i = 0; i < kLanes<T>; i++) m[i] = i % 2 ? 0 : -1;
  return m;
}
template <class T>
ORTHOKERN_INLINE T sum_lanes(V<T> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)v);
#endif
  T s = 0;
  for (int i = 0; i < kLanes<T>; i++) s += v[i];
  return s;
}

// A sum of squares for a norm. Squares of float are formed in double: they leave the range of float for elements below
// 1e-19 and above 1e19, where gradients through many steps vanish or explode.
template <class T>
struct SquareSum;
template <>
struct SquareSum<double> {
  V<double> sum;
  ORTHOKERN_INLINE SquareSum() : sum{} {}
  ORTHOKERN_INLINE void add(V<double> v) { sum += v * v; }
  ORTHOKERN_INLINE double total() const { return sum_lanes<double>(sum); }
};
template <>
struct SquareSum<float> {
  V<double> low, high;  // of the lanes in the first half and in the second
  ORTHOKERN_INLINE SquareSum() : low{}, high{} {}
  ORTHOKERN_INLINE void add(V<float> v) {
    typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
    Half half[2];
    memcpy(half, &v, sizeof v);
    const V<double> a = __builtin_convertvector(half[0], V<double>), b = __builtin_convertvector(half[1], V<double>);
    low += a * a;
    high += b * b;
  }
  ORTHOKERN_INLINE double total() const { return sum_lanes<double>(low + high); }
};

// p / q within about one rounding. AVX-512 has a fast estimate of 1 / q with 14 bits. One correction of the quotient by
// its exact remainder doubles them, and costs far less than a division.
ORTHOKERN_INLINE V<float> quotient(V<float> p, V<float> q) {
#if defined(__AVX512F__)
  const V<float> r = (V<float>)_mm512_maskz_rcp14_ps((__mmask16)-1, (__m512)q);
  const V<float> y = p * r;
  return y + r * (p - q * y);
#else
  return p / q;
#endif
}
ORTHOKERN_INLINE V<double> quotient(V<double> p, V<double> q) { return p / q; }

// Flushes subnormal numbers to zero during the lifetime of this object. They cost a hundred cycles each when a state
// decays over thousands of steps.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }  // FTZ | DAZ
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved_));
    __asm__ __volatile__("msr fpcr, %0" ::"r"(saved_ | (1ull << 24)) : "memory");  // FZ
  }
  ~FlushDenormals() { __asm__ __volatile__("msr fpcr, %0" ::"r"(saved_) : "memory"); }

 private:
  uint64_t saved_;
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
};

// Zeroed scratch memory, aligned to a cache line and freed with the object. Large blocks are reused by later calls and
// use huge pages: at N = 500 all weights are read in every step, which with pages of 4 KiB exceeds the TLB.
template <class T>
class Scratch {
 public:
  Scratch() : p_(nullptr), bytes_(0) {}
  ~Scratch() { release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  bool allocate(size_t n, bool zero = true) {
    release();
    size_t bytes = ((n ? n : 1) * sizeof(T) + 63) / 64 * 64;
    if (bytes >= kLargeScratch / 2) {
      p_ = static_cast<T*>(large_scratch(&bytes));
    } else {
      void* raw = nullptr;
      if (!posix_memalign(&raw, 64, bytes)) p_ = static_cast<T*>(raw);
    }
    if (!p_) return false;
    bytes_ = bytes;
    if (zero) memset(const_cast<void*>(static_cast<const void*>(p_)), 0, (n * sizeof(T) + 63) / 64 * 64);
    return true;
  }
  void swap(Scratch& other) {
    const auto exchange = [](auto& a, auto& b) {
      const auto c = a;
      a = b, b = c;
    };
    exchange(p_, other.p_), exchange(bytes_, other.bytes_);
  }
  operator T*() const { return p_; }
  T* get() const { return p_; }

 private:
  void release() {
    if (bytes_ >= kLargeScratch) free_large_scratch(const_cast<void*>(static_cast<const void*>(p_)), bytes_);
    else free(const_cast<void*>(static_cast<const void*>(p_)));
    p_ = nullptr;
    bytes_ = 0;
  }

  T* p_;
  size_t bytes_;
};

}  // namespace orthokern::ORTHOKERN_ISA
