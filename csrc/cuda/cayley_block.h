// The Cayley step of a matrix that fits into the shared memory of one block: one kernel.
#pragma once

#include "cuda/cayley_batch.h"

namespace orthokern::cuda {
namespace {

// Rows in shared memory are `pitch` elements apart: an odd multiple of 4, so that adjacent rows are in different banks.
__host__ __device__ constexpr int64_t pitch_of(int64_t columns) { return ((columns + 3) / 4 | 1) * 4; }

// Bytes of dynamic shared memory of a block, for Held below.
template <class T>
constexpr int64_t shared_bytes(int64_t N, int64_t K) {
  return (K + N + (K < N ? N + K : 0)) * pitch_of(K) * static_cast<int64_t>(sizeof(T));
}
static_assert(shared_bytes<double>(kTile, kTile) <= kMostShared, "square matrices up to kTile go one block each");

// f(i, j, value) for the elements of a^T b, [order, order], order up to kTile: a and b [depth, order]. A thread has 4 x
// 4 of them; if there are more threads than needed, adjacent lanes share a sum. f may write to a and b.
template <class T, class F>
__device__ __forceinline__ void inner_products(const T* a, const T* b, int order, int depth, int pitch, F f) {
  const int across = (order + 3) / 4;
  int parts = 1;
  while (parts < 32 && 2 * parts * across * across <= kThreads) parts *= 2;
  const int thread = threadIdx.x, tile = thread / parts, row = tile / across * 4, column = tile % across * 4;
  const int end = row < order ? depth : 0;
  T acc[4][4] = {};
#pragma unroll 4
  for (int k = thread % parts; k < end; k += parts) {
    const Quad<T> x = quad(a + k * pitch + row), y = quad(b + k * pitch + column);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[r][c] += x.v[r] * y.v[c];
  }
  for (int bits = parts / 2; bits; bits /= 2)
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[r][c] += __shfl_xor_sync(~0u, acc[r][c], bits);
  __syncthreads();  // all threads have read a and b
  if (thread % parts) return;
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (row + r < order && column + c < order) f(row + r, column + c, acc[r][c]);
}

// f(i, j, value) for the elements of a b, [rows, order]: a [rows, order], b [order, order].
template <class T, class F>
__device__ __forceinline__ void products(const T* a, const T* b, int rows, int order, int pitch, F f) {
  const int across = (order + 3) / 4, down = (rows + 3) / 4;
  for (int tile = threadIdx.x; tile < down * across; tile += kThreads) {
    const int row = tile / across,
              column = tile % across * 4;  // and the rows row + down, ...: those of a warp are adjacent
    const T* left[4];
    T acc[4][4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++) left[r] = a + min(row + r * down, rows - 1) * pitch;
    int k = 0;
#pragma unroll 2
    for (; k + 4 <= order; k += 4) {
      Quad<T> x[4];
#pragma unroll
      for (int r = 0; r < 4; r++) x[r] = quad(left[r] + k);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const Quad<T> y = quad(b + (k + e) * pitch + column);
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
          for (int c = 0; c < 4; c++) acc[r][c] += x[r].v[e] * y.v[c];
      }
    }
    for (; k < order; k++) {
      const Quad<T> y = quad(b + k * pitch + column);
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) acc[r][c] += left[r][k] * y.v[c];
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (row + r * down < rows && column + c < order) f(row + r * down, column + c, acc[r][c]);
  }
}

static_assert(kMostShared + 2 * sizeof(Pivots<double>) + kThreads / 32 * sizeof(double) <= 99 << 10,
              "the shared memory of every GPU");

// The data that a block holds in shared memory.
template <class T>
struct Held {
  int pitch;
  // [K, K]  square: G^T, then G M^T      thin: 2 I - M^T M, then G'^T G'      finally (I + X)^-1, or without the I
  T* x;
  T* m;  // [N, K]  square: M^T, then M          thin: M, then M - c G'
  T* g;  // [N, K]                               thin: G, then G'
  T* h;  // [K, K]                               thin: M^T G, then H
};

// x = G M^T, m = M. The product reads both along k, so they are stored transposed first; meanwhile the elements of M
// are kept in registers.
template <class T>
__device__ __forceinline__ void hold_square(const Matrices<T>& w, const Held<T>& s) {
  constexpr int own = kTile * kTile / kThreads;
  // A warp's load and store are 4 rows of 8: whole sectors of global memory, and all banks.
  const int lane = threadIdx.x % 32, i0 = lane / 8, k = threadIdx.x / 32 * 8 + lane % 8;
  T m[own], g[own];
#pragma unroll
  for (int e = 0; e < own; e++) {
    const int i = i0 + 4 * e;
    const bool inside = i < w.N && k < w.N;
    m[e] = inside ? w.m[w.index(i, k)] : T(0), g[e] = inside ? w.g[w.index(i, k)] : T(0);
  }
#pragma unroll
  for (int e = 0; e < own; e++) {
    const int i = i0 + 4 * e;
    if (i < w.N && k < w.N) s.m[k * s.pitch + i] = m[e], s.x[k * s.pitch + i] = g[e];
  }
  __syncthreads();
  inner_products(s.x, s.m, w.N, w.N, s.pitch, [&](int i, int j, T value) { s.x[i * s.pitch + j] = value; });
#pragma unroll
  for (int e = 0; e < own; e++) {
    const int i = i0 + 4 * e;
    if (i < w.N && k < w.N) s.m[i * s.pitch + k] = m[e];
  }
}

// x = G'^T G', m = M - c G', g = G', h = H.
template <class T>
__device__ __forceinline__ void hold_thin(const Matrices<T>& w, const Held<T>& s, T c) {
  const int N = w.N, K = w.K, pitch = s.pitch;
  // f(index in shared memory, index in global memory) for the elements of a matrix [N, K].
  auto elements = [&](auto f) {
#pragma unroll 8
    for (int n = threadIdx.x; n < N * K; n += kThreads) f(n / K * pitch + n % K, n);
  };
  elements([&](int at, int n) { s.m[at] = w.m[n], s.g[at] = w.g[n]; });
  __syncthreads();
  inner_products(s.m, s.m, K, N, pitch, [&](int i, int j, T value) { s.x[i * pitch + j] = T(2 * (i == j)) - value; });
  inner_products(s.m, s.g, K, N, pitch, [&](int i, int j, T value) { s.h[i * pitch + j] = value; });
  __syncthreads();
  inner_products(s.x, s.h, K, K, pitch, [&](int i, int j, T value) { s.h[i * pitch + j] = value; });  // x is symmetric
  __syncthreads();
  products(s.m, s.h, N, K, pitch, [&](int i, int j, T value) { s.g[i * pitch + j] -= value; });
  __syncthreads();
  elements([&](int at, int) { s.m[at] -= c * s.g[at]; });
  inner_products(s.g, s.g, K, N, pitch, [&](int i, int j, T value) { s.x[i * pitch + j] = value; });
}

// The whole step of matrix blockIdx.x.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_block_kernel(const __grid_constant__ Batch<Matrices<T>> all) {
  const Matrices<T> w = all.at(blockIdx.x);
  const int N = w.N, K = w.K, pitch = static_cast<int>(pitch_of(K));
  const bool thin = K < N;
  const T c = w.c();
  Held<T> s{pitch, dynamic_shared<T>()};
  s.m = s.x + K * pitch, s.g = s.m + N * pitch, s.h = s.g + N * pitch;
  if (thin) hold_thin(w, s, c);
  else hold_square(w, s);
  __syncthreads();

  // X = c (G M^T - M G^T) or F = c (H - H^T) + c^2 G'^T G'
  T d[4][4] = {};
  double squares = 0;
  const T* skew = thin ? s.h : s.x;
  each(d, 0, 0, K, K, [&](int i, int j, T& element) {
    element = c * (skew[i * pitch + j] - skew[j * pitch + i]);
    if (thin) element += c * c * s.x[i * pitch + j];
    squares += static_cast<double>(element) * static_cast<double>(element);
  });
  const bool large = block_sum(squares) > kLargeTurn * kLargeTurn * K;
  if (large) each(d, 0, 0, kTile, kTile, [&](int i, int j, T& element) { element += T(i == j); });
  invert(d, K, large);
  each(d, 0, 0, K, K, [&](int i, int j, T& element) { s.x[i * pitch + j] = element; });
  __syncthreads();
  products(thin ? s.m : s.x, thin ? s.x : s.m, N, K, pitch, [&](int i, int j, T value) {
    const T m = w.m[w.index(i, j)];
    w.out[w.index(i, j)] = large ? 2 * value - m : m + 2 * (value - (thin ? c * s.g[i * pitch + j] : T(0)));
  });
}

}  // namespace
}  // namespace orthokern::cuda
