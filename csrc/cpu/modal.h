// The parts of the modal kernels: the recurrence z_t = lambda z_{t-1} + x_t of one sequence over a chunk of at most
// kSteps steps, its adjoint, and the sums over a chunk's steps.
//
// A vector of M modes is stored as [re Mp][im Mp], where Mp is M rounded up to whole SIMD vectors of the call's type.
// Coefficients and inputs are zero from M on, and so are the states. The lanes of a SIMD vector are modes: rows of a
// table and features are read with unit stride, all lanes are in use whatever the batch size, and each sequence has its
// own length. Coefficients, states and adjoints are float64, in registers during a chunk. The rows that a chunk stores
// for products and sums have type T.
#pragma once

#include "cpu/ops.h"
#include "cpu/tasks.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int kSteps = 64;  // of a chunk; a multiple of every kLanes<T>

// kLanes<double> elements of type T: a whole vector of double, half a vector of float.
template <class T>
struct Narrow {
  typedef T H __attribute__((vector_size(kVectorBytes / 8 * sizeof(T))));
};
template <class T>
ORTHOKERN_INLINE V<double> load_wide(const T* p) {
  typename Narrow<T>::H h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, V<double>);
}
#if defined(__AVX512F__)
template <>
ORTHOKERN_INLINE V<double> load_wide<float>(const float* p) {  // GCC splits the above in two
  return (V<double>)_mm512_maskz_cvtps_pd((__mmask8)-1, _mm256_loadu_ps(p));
}
#endif
template <class T>
ORTHOKERN_INLINE void store_narrow(T* p, V<double> v) {
  const typename Narrow<T>::H h = __builtin_convertvector(v, typename Narrow<T>::H);
  memcpy(p, &h, sizeof h);
}
// to[0 .. kLanes<T>) += v
template <class T>
ORTHOKERN_INLINE void add_wide(double* to, V<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  ORTHOKERN_UNROLL for (int i = 0; i < kLanes<T>; i += kLanes<double>)
      store(to + i, load(to + i) + load_wide(lanes + i));
}

// Keeps a loaded vector in a register. GCC would load it again for each multiply-add, and the load ports would limit
// the rate.
template <class X>
ORTHOKERN_INLINE void pin(X& v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__SSE2__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
}

// Vectors of double processed in one pass of the recurrence: real and imaginary parts of states and coefficients fit
// into the registers.
constexpr int kModeVectors = k32Registers ? 4 : 2;

struct Modes {
  int M, Mp, Np;     // Np = 2 Mp
  const double* re;  // [Mp]
  const double* im;  // [Mp]
};

// x [M re][M im] of type S -> [Mp re][Mp im] of type R; elements from M on are not written.
template <class S, class R>
inline void spread(const Modes& modes, const S* from, R* to) {
  for (int m = 0; m < modes.M; m++) to[m] = static_cast<R>(from[m]);
  for (int m = 0; m < modes.M; m++) to[modes.Mp + m] = static_cast<R>(from[modes.M + m]);
}
// The reverse.
template <class S, class R>
inline void gather(const Modes& modes, const S* from, R* to) {
  for (int m = 0; m < modes.M; m++) to[m] = static_cast<R>(from[m]);
  for (int m = 0; m < modes.M; m++) to[modes.M + m] = static_cast<R>(from[modes.Mp + m]);
}

// The rows of one sequence in a tensor [T, B, 2M]. They are usually on different pages, which the hardware prefetchers
// do not cross.
template <class T>
struct SequenceRows {
  T* first;
  ptrdiff_t stride;  // elements from row to row
  int size;          // 2M

  SequenceRows(T* base, const ModalArgs& args, int64_t b)
      : first(base + b * 2 * args.M), stride(args.B * 2 * args.M), size(static_cast<int>(2 * args.M)) {}
  T* operator[](int64_t t) const { return first + t * stride; }
  void prefetch(int64_t t) const {
    const char* at = reinterpret_cast<const char*>((*this)[t]);
    for (size_t i = 0; i < size * sizeof(T); i += 64) __builtin_prefetch(at + i, 0, 2);
  }
};
constexpr int kAhead = 8;  // rows
// Rows t .. t + steps -> to [steps][Np]
template <class S, class R>
inline void read_rows(const Modes& modes, const SequenceRows<const S>& from, int64_t t, int steps, R* to) {
  for (int r = 0; r < kAhead && r < steps; r++) from.prefetch(t + r);
  for (int r = 0; r < steps; r++) {
    if (r + kAhead < steps) from.prefetch(t + r + kAhead);
    spread(modes, from[t + r], to + static_cast<ptrdiff_t>(r) * modes.Np);
  }
}
// The reverse, with streaming stores if all vectors are whole and aligned.
template <class T>
inline void write_rows(const Modes& modes, const T* from, const SequenceRows<T>& to, int64_t t, int steps) {
  constexpr int L = kLanes<T>;
  const bool stream = modes.M == modes.Mp && reinterpret_cast<uintptr_t>(to.first) % kVectorBytes == 0;
  for (int r = 0; r < steps; r++) {
    const T* row = from + static_cast<ptrdiff_t>(r) * modes.Np;
    T* out = to[t + r];
    if (!stream) gather(modes, row, out);
    else
      for (int n = 0; n < modes.Np; n += L) store_stream(out + n, load(row + n));
  }
  if (stream) stream_fence();
}

// Advances K vectors of modes, from mode `at` on, by `steps` steps: step r of the state [Np] adds in[r] [Np]. With
// kStore, the state after step r is written to z + r Np.
template <class T, int K, bool kStore>
void advance_block(const Modes& modes, int at, const double* const* in, int steps, double* state, T* z) {
  constexpr int L = kLanes<double>;
  const int Mp = modes.Mp, Np = modes.Np;
  V<double> a[K], b[K], zr[K], zi[K];
  ORTHOKERN_UNROLL for (int k = 0; k < K; k++) {
    a[k] = load(modes.re + at + k * L), b[k] = load(modes.im + at + k * L);
    zr[k] = load(state + at + k * L), zi[k] = load(state + Mp + at + k * L);
  }
  for (int r = 0; r < steps; r++) {
    const double* x = in[r] + at;
    T* to = kStore ? z + static_cast<ptrdiff_t>(r) * Np + at : nullptr;
    ORTHOKERN_UNROLL for (int k = 0; k < K; k++) {
      const V<double> real = load(x + k * L) + a[k] * zr[k], imag = load(x + Mp + k * L) + a[k] * zi[k];
      const V<double> old = zr[k];
      zr[k] = real - b[k] * zi[k];
      zi[k] = imag + b[k] * old;
      if (kStore) store_narrow<T>(to + k * L, zr[k]), store_narrow<T>(to + Mp + k * L, zi[k]);
    }
  }
  ORTHOKERN_UNROLL for (int k = 0; k < K; k++) store(state + at + k * L, zr[k]), store(state + Mp + at + k * L, zi[k]);
}
template <class T, bool kStore>
void advance(const Modes& modes, const double* const* in, int steps, double* state, T* z) {
  constexpr int L = kLanes<double>;
  int at = 0;
  for (; at + kModeVectors * L <= modes.Mp; at += kModeVectors * L)
    advance_block<T, kModeVectors, kStore>(modes, at, in, steps, state, z);
  for (; at < modes.Mp; at += L) advance_block<T, 1, kStore>(modes, at, in, steps, state, z);
}

// The adjoint, from the last step to the first: delta = conj(lambda) delta + g_r, which overwrites g_r. With kTable
// also table[id of step r] += delta_r, in float64: delta rotates with its mode, so its sum over many steps may be
// smaller than the rounding errors of float32 terms. Consecutive steps with the same id, such as blanks, are summed in
// registers.
template <class T, int K, bool kTable>
void retreat_block(const Modes& modes, int at, int steps, double* delta, T* g, const int64_t* ids, double* table) {
  constexpr int L = kLanes<double>;
  const int Mp = modes.Mp, Np = modes.Np;
  V<double> a[K], b[K], dr[K], di[K], sum_r[K], sum_i[K];
  ORTHOKERN_UNROLL for (int k = 0; k < K; k++) {
    a[k] = load(modes.re + at + k * L), b[k] = load(modes.im + at + k * L);
    dr[k] = load(delta + at + k * L), di[k] = load(delta + Mp + at + k * L);
    sum_r[k] = sum_i[k] = V<double>{};
  }
  for (int r = steps - 1; r >= 0; r--) {
    T* here = g + static_cast<ptrdiff_t>(r) * Np + at;
    ORTHOKERN_UNROLL for (int k = 0; k < K; k++) {
      const V<double> real = load_wide(here + k * L) + a[k] * dr[k], imag = load_wide(here + Mp + k * L) + a[k] * di[k];
      const V<double> old = dr[k];
      dr[k] = real + b[k] * di[k];
      di[k] = imag - b[k] * old;
      store_narrow<T>(here + k * L, dr[k]), store_narrow<T>(here + Mp + k * L, di[k]);
      if (kTable) sum_r[k] += dr[k], sum_i[k] += di[k];
    }
    if (!kTable || (r && ids[r - 1] == ids[r])) continue;
    double* row = table + ids[r] * Np + at;
    ORTHOKERN_UNROLL for (int k = 0; k < K; k++) {
      store(row + k * L, load(row + k * L) + sum_r[k]), store(row + Mp + k * L, load(row + Mp + k * L) + sum_i[k]);
      sum_r[k] = sum_i[k] = V<double>{};
    }
  }
  ORTHOKERN_UNROLL for (int k = 0; k < K; k++) store(delta + at + k * L, dr[k]), store(delta + Mp + at + k * L, di[k]);
}
template <class T, bool kTable>
void retreat_over(const Modes& modes, int steps, double* delta, T* g, const int64_t* ids, double* table) {
  constexpr int L = kLanes<double>;
  int at = 0;
  for (; at + kModeVectors * L <= modes.Mp; at += kModeVectors * L)
    retreat_block<T, kModeVectors, kTable>(modes, at, steps, delta, g, ids, table);
  for (; at < modes.Mp; at += L) retreat_block<T, 1, kTable>(modes, at, steps, delta, g, ids, table);
}
// table [D][Np], or null.
template <class T>
void retreat(const Modes& modes, int steps, double* delta, T* g, const int64_t* ids, double* table) {
  if (table) retreat_over<T, true>(modes, steps, delta, g, ids, table);
  else retreat_over<T, false>(modes, steps, delta, g, nullptr, nullptr);
}
// delta <- conj(lambda) delta: from the adjoint of the first step to that of the state before it.
inline void step_back(const Modes& modes, double* delta) {
  for (int m = 0; m < modes.Mp; m++) {
    const double r = delta[m], i = delta[modes.Mp + m];
    delta[m] = modes.re[m] * r + modes.im[m] * i;
    delta[modes.Mp + m] = modes.re[m] * i - modes.im[m] * r;
  }
}

// A chunk's part of the gradient of the coefficients: re += sum_r Re(delta_r conj(z_{r-1})), and im its Im. z holds the
// states before each step.
template <class T, int K>
void diagonal_block(const Modes& modes, int at, int steps, const T* delta, const T* z, double* re, double* im) {
  constexpr int L = kLanes<T>;
  const int Mp = modes.Mp, Np = modes.Np;
  V<T> real[K], imag[K];
  ORTHOKERN_UNROLL for (int k = 0; k < K; k++) real[k] = imag[k] = V<T>{};
  for (int r = 0; r < steps; r++) {
    const T *d = delta + static_cast<ptrdiff_t>(r) * Np + at, *s = z + static_cast<ptrdiff_t>(r) * Np + at;
    ORTHOKERN_UNROLL for (int k = 0; k < K; k++) {
      V<T> dr = load(d + k * L), di = load(d + Mp + k * L), zr = load(s + k * L), zi = load(s + Mp + k * L);
      pin(dr), pin(di), pin(zr), pin(zi);
      real[k] += dr * zr;
      imag[k] += di * zr;
      real[k] += di * zi;
      imag[k] -= dr * zi;
    }
  }
  ORTHOKERN_UNROLL for (int k = 0; k < K; k++) {
    add_wide<T>(re + at + k * L, real[k]), add_wide<T>(im + at + k * L, imag[k]);
  }
}
template <class T>
void diagonal_sums(const Modes& modes, int steps, const T* delta, const T* z, double* re, double* im) {
  constexpr int L = kLanes<T>, K = k32Registers ? 4 : 2;
  int at = 0;
  for (; at + K * L <= modes.Mp; at += K * L) diagonal_block<T, K>(modes, at, steps, delta, z, re, im);
  for (; at < modes.Mp; at += L) diagonal_block<T, 1>(modes, at, steps, delta, z, re, im);
}

// sums[p] += sum_r (delta_r[j] as a column) (z_{r-1}[k] as a row) for the pairs (j, k).
template <class T>
void pair_sums(const Modes& modes, int steps, const T* delta, const T* z, const int64_t* pairs, int64_t P,
               double* sums) {
  const int Mp = modes.Mp, Np = modes.Np;
  for (int64_t p = 0; p < P; p++) {
    const T *d = delta + pairs[2 * p], *s = z + pairs[2 * p + 1];
    double rr = 0, ri = 0, ir = 0, ii = 0;
    for (ptrdiff_t r = 0; r < static_cast<ptrdiff_t>(steps) * Np; r += Np) {
      const double dr = d[r], di = d[r + Mp], zr = s[r], zi = s[r + Mp];
      rr += dr * zr, ri += dr * zi, ir += di * zr, ii += di * zi;
    }
    sums[4 * p] += rr, sums[4 * p + 1] += ri, sums[4 * p + 2] += ir, sums[4 * p + 3] += ii;
  }
}

constexpr int kClasses = 3;  // of a register tile
// gradient[c][n .. n + NV vectors) += sum_r d[c][r] z[r][n ..]; d's rows are kSteps apart.
template <class T, int CT, int NV>
void readout_tile(const T* d, const T* z, int steps, int Np, T* gradient) {
  constexpr int L = kLanes<T>;
  V<T> acc[CT][NV];
  ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) {
    ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) acc[c][v] = load(gradient + static_cast<ptrdiff_t>(c) * Np + v * L);
  }
  for (int r = 0; r < steps; r++) {
    ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) {
      V<T> s = load(z + v * L);
      pin(s);
      ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) acc[c][v] += s * d[c * kSteps + r];
    }
    z += Np;
  }
  ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) ORTHOKERN_UNROLL for (int v = 0; v < NV; v++)
      store(gradient + static_cast<ptrdiff_t>(c) * Np + v * L, acc[c][v]);
}
template <class T, int CT>
void readout_rows(const T* d, const T* z, int steps, int Np, T* gradient) {
  constexpr int L = kLanes<T>, NV = k32Registers ? 8 : 4;
  int n = 0;
  for (; n + NV * L <= Np; n += NV * L) readout_tile<T, CT, NV>(d, z + n, steps, Np, gradient + n);
  for (; n < Np; n += L) readout_tile<T, CT, 1>(d, z + n, steps, Np, gradient + n);
}
// gradient [C][Np] += d^T z
template <class T>
void readout_gradient(const T* d, int C, const T* z, int steps, int Np, T* gradient) {
  int c = 0;
  for (; c + kClasses <= C; c += kClasses)
    readout_rows<T, kClasses>(d + c * kSteps, z, steps, Np, gradient + static_cast<ptrdiff_t>(c) * Np);
  for (; c < C; c++) readout_rows<T, 1>(d + c * kSteps, z, steps, Np, gradient + static_cast<ptrdiff_t>(c) * Np);
}

}  // namespace orthokern::ORTHOKERN_ISA
