// The common part of the kernels of the Cayley step: the matrices of a launch, the product of a tile, and the inverse
// of a matrix of up to 64 x 64 in registers. cayley.cu has the mathematics.
#pragma once

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace orthokern::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16,
              kThreads = 256;      // a block's result, the slice of the sum in shared memory; 4 x 4 results per thread
constexpr int kPitch = kTile + 4;  // keeps the rows of a slice 16-byte aligned, without bank conflicts
constexpr int kIterations = 3;     // of the series, for N >= kSeriesFrom
constexpr int kSeriesFrom = 129;
constexpr double kLargeTurn = 0.75;   // root mean square of the singular values of X or F
constexpr int kLargestBatch = 65535;  // matrices in one launch
constexpr int kMostShapes = 16;       // shapes in one launch
constexpr int kMostShared =
    94 << 10;  // bytes of dynamic shared memory of one block; 99 KB with the static part, which every GPU has
static_assert(kTile * kDepth % kThreads == 0 && kTile * kTile == 16 * kThreads,
              "every thread loads and computes the same number of elements");

enum Status { kSeries, kConverged, kEliminate, kLarge };

template <class T>
struct Slices {
  T a[kDepth][kPitch], b[kDepth][kPitch];
};
template <class T>
struct alignas(16) Quad {
  T v[4];
};
template <class T>
__device__ __forceinline__ Quad<T> quad(const T* p) {
  return *reinterpret_cast<const Quad<T>*>(p);
}
template <class T>
constexpr float kUnit = sizeof(T) == 4 ? 5.96e-8f : 1.11e-16f;  // relative error of a rounding

// acc[r][c] += sum over k < depth of a(i, k) b(k, j), for the thread's rows i = 4 (thread / 16) + r and columns j = 4
// (thread % 16) + c of the tile. a and b return 0 outside their matrix. *_along_k: whether elements with consecutive k
// are contiguous in memory, so that threads with consecutive k load them.
template <bool a_along_k, bool b_along_k, class T, class A, class B>
__device__ __forceinline__ void multiply(T (&acc)[4][4], int depth, Slices<T>& shared, A a, B b) {
  constexpr int loads = kTile * kDepth / kThreads;
  const int thread = threadIdx.x, row = thread / 16 * 4, column = thread % 16 * 4;
  T next_a[loads], next_b[loads];
  auto load = [&](int k0) {
#pragma unroll
    for (int e = 0; e < loads; e++) {
      const int n = thread + e * kThreads;
      const int i = a_along_k ? n / kDepth : n % kTile, ka = k0 + (a_along_k ? n % kDepth : n / kTile);
      const int j = b_along_k ? n / kDepth : n % kTile, kb = k0 + (b_along_k ? n % kDepth : n / kTile);
      next_a[e] = ka < depth ? a(i, ka) : T(0);
      next_b[e] = kb < depth ? b(kb, j) : T(0);
    }
  };
  load(0);
  for (int k0 = 0; k0 < depth; k0 += kDepth) {
    __syncthreads();  // all threads have read the previous slices
#pragma unroll
    for (int e = 0; e < loads; e++) {
      const int n = thread + e * kThreads;
      shared.a[a_along_k ? n % kDepth : n / kTile][a_along_k ? n / kDepth : n % kTile] = next_a[e];
      shared.b[b_along_k ? n % kDepth : n / kTile][b_along_k ? n / kDepth : n % kTile] = next_b[e];
    }
    __syncthreads();
    if (k0 + kDepth < depth) load(k0 + kDepth);
#pragma unroll
    for (int k = 0; k < kDepth; k++) {
      const Quad<T> x = quad(&shared.a[k][row]), y = quad(&shared.b[k][column]);
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) acc[r][c] += x.v[r] * y.v[c];
    }
  }
}
// f(i, j, value) for the thread's results of a tile at (row, column) of a matrix [rows, columns].
template <class T, class F>
__device__ __forceinline__ void each(T (&acc)[4][4], int row, int column, int rows, int columns, F f) {
  row += static_cast<int>(threadIdx.x) / 16 * 4, column += static_cast<int>(threadIdx.x) % 16 * 4;
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (row + r < rows && column + c < columns) f(row + r, column + c, acc[r][c]);
}

// The sum of one number per thread over the block, in a fixed order; all threads get the result.
__device__ __forceinline__ double block_sum(double x) {
  ORTHOKERN_SHARED(double, sums, [kThreads / 32]);
  for (int bits = 16; bits; bits /= 2) x += __shfl_xor_sync(~0u, x, bits);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < kThreads / 32; i++) x += sums[i];
  return x;
}
__device__ __forceinline__ double sum_of(const double* partial, int count) {
  double x = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) x += partial[i];
  return block_sum(x);
}

// The matrices of one shape. Pointers are to the first matrix; `at` advances them to the matrix of the block.
template <class T>
struct Matrices {
  int N, K;
  const T *m, *g;    // [N, K]
  const double* lr;  // [] or null
  double rate;
  T* out;  // [N, K]

  __device__ __forceinline__ Matrices at(int64_t matrix) const {
    Matrices w = *this;
    const int64_t size = static_cast<int64_t>(N) * K;
    w.m += matrix * size, w.g += matrix * size, w.out += matrix * size;
    if (lr) w.lr += matrix;
    return w;
  }
  __device__ __forceinline__ T c() const { return static_cast<T>((lr ? *lr : rate) / 2); }
  __device__ __forceinline__ int64_t index(int i, int j) const { return static_cast<int64_t>(i) * K + j; }
};

// Further arguments of the tiled kernels.
template <class T>
struct Work : Matrices<T> {
  using Matrices<T>::N;
  using Matrices<T>::K;
  int width;  // of a row of `system`
  int order;  // of `system`: N, or K if thin
  int tiles;  // ceil(order / kTile)
  int iterations;
  T* system;        // [order, width]: X or F, then the right-hand side, which is overwritten by the solution
  T* sum;           // [N, N]: D of the series                           thin: [N, K] G'
  T* terms;         // [2, N, N]: the newest terms                       thin: [N, K] M F + c G' or M - c G'
  T* gram;          // thin: [K, 2K] M^T [M, G]
  T* h;             // thin: [K, K]
  double* squares;  // [iterations + 2, tiles^2]: sums of squares by tile, of X or F, then of each term
  int* status;      // [iterations + 2]: after the first term, after each iteration, and the final status

  __device__ __forceinline__ Work at(int64_t matrix) const {
    Work w = *this;
    static_cast<Matrices<T>&>(w) = Matrices<T>::at(matrix);
    const int64_t size = static_cast<int64_t>(N) * K, own = static_cast<int64_t>(order) * order,
                  stages = iterations + 2;
    const bool thin = K < N;
    w.system += matrix * order * width;
    w.sum += matrix * size, w.terms += matrix * (thin ? 1 : 2) * size;
    if (thin) w.gram += matrix * 2 * own, w.h += matrix * own;
    w.squares += matrix * stages * tiles * tiles, w.status += matrix * stages;
    return w;
  }
  __device__ __forceinline__ T* row(int i) const { return system + static_cast<int64_t>(i) * width; }
  __device__ __forceinline__ double* squares_of(int stage) const {
    return squares + static_cast<int64_t>(stage) * tiles * tiles;
  }
  // Whether the step is large, from the squares of X or F, which are stage 0. All threads of a block must call it.
  __device__ __forceinline__ bool large() const {
    return sum_of(squares_of(0), tiles * tiles) > kLargeTurn * kLargeTurn * order;
  }
  // The next action after `done` terms beyond the first. All blocks compute the same result; one stores it for the
  // following kernels.
  __device__ __forceinline__ int settle(int done) const {
    int state = status[done];
    if (state == kSeries) {
      const float norm = sqrtf(
          static_cast<float>(sum_of(squares_of(done + 1), tiles * tiles)));  // |X^(done + 1)|_F, if M is orthogonal
      const float tolerance = kUnit<T> / 2048 * sqrtf(static_cast<float>(N));
      const float bound = exp2f(log2f(norm * sqrtf(0.5f)) / (done + 1));  // of |X|_2
      // For a random X this bound is up to about four times the norm.
      float expected = norm * bound / 4;
      for (int left = iterations - done; left; left--) expected *= bound / 4;
      if (bound < 1 && norm * bound <= tolerance * (1 - bound)) state = kConverged;
      else if (done == iterations || !(expected <= tolerance)) state = kEliminate;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) status[done + 1] = state;
    return state;
  }
  __device__ __forceinline__ int settled() const { return status[iterations + 1]; }
};

// The matrices of one launch, with up to kMostShapes shapes: the matrices of shape s start at number first[s]. In the
// tiled kernels all are square or all are thin, and the grid has the size of the largest matrix in each direction;
// blocks outside their matrix return.
template <class Some>
struct Batch {
  int shapes;
  int first[kMostShapes];
  Some of[kMostShapes];

  __device__ __forceinline__ Some at(int matrix) const {
    int s = shapes - 1;
    while (matrix < first[s]) s--;
    return of[s].at(matrix - first[s]);
  }
};

template <class T>
struct Pivots {
  T row[2][kTile], column[2][kTile];  // Q D_pj and D_ip of a pair
};

// Inverts a matrix of up to kTile in place, see Note [Pivots of two]; the thread has the elements (4 (thread / 16) + r,
// 4 (thread % 16) + c). X becomes (I + X)^-1 - I; with `plain`, a matrix becomes its inverse. The padding is 0, or I
// with `plain`.
template <class T>
__device__ __forceinline__ void invert(T (&d)[4][4], int order, bool plain) {
  ORTHOKERN_SHARED(Pivots<T>, pivots, [2]);  // double-buffered, so that one barrier per pair is enough
  const int thread = threadIdx.x, row = thread / 16 * 4, column = thread % 16 * 4;
  const T one = plain ? T(0) : T(1);
  for (int first = 0; first < order; first += 4) {
#pragma unroll
    for (int half = 0; half < 4;
         half += 2) {  // the pair first + half, first + half + 1; unrolled, so that d stays in registers
      if (first + half >= order) break;
      Pivots<T>& s = pivots[half / 2];
      const auto own = [&](int c) { return column == first && c / 2 == half / 2; };  // a column of the pivot
      if (column == first)
#pragma unroll
        for (int r = 0; r < 4; r++) s.column[0][row + r] = d[r][half], s.column[1][row + r] = d[r][half + 1];
      if (thread / 32 ==
          first / 8) {  // the warp with the rows of the pivot; P is broadcast by the thread that holds it
        const int lane = first / 4 * 17 % 32;
        const T e00 = __shfl_sync(~0u, d[half][half], lane), e01 = __shfl_sync(~0u, d[half][half + 1], lane);
        const T e10 = __shfl_sync(~0u, d[half + 1][half], lane), e11 = __shfl_sync(~0u, d[half + 1][half + 1], lane);
        if (row == first) {
          const T p00 = e00 + one, p11 = e11 + one, over = T(1) / (p00 * p11 - e01 * e10);
          const T q00 = p11 * over, q01 = -e01 * over, q10 = -e10 * over, q11 = p00 * over;
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const T above = own(c) ? T(c == half) : d[half][c], below = own(c) ? T(c != half) : d[half + 1][c];
            const T s0 = q00 * above + q01 * below, s1 = q10 * above + q11 * below;
            s.row[0][column + c] = s0, s.row[1][column + c] = s1;
            const bool second = own(c) && !plain;
            d[half][c] = second ? -e00 * s0 - e01 * s1 : s0, d[half + 1][c] = second ? -e10 * s0 - e11 * s1 : s1;
          }
        }
      }
      __syncthreads();
      if (row >= order || column >= order) continue;
      const Quad<T> s0 = quad(s.row[0] + column), s1 = quad(s.row[1] + column), left = quad(s.column[0] + row),
                    right = quad(s.column[1] + row);
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++)
          if (row != first || r / 2 != half / 2)
            d[r][c] = (own(c) ? T(0) : d[r][c]) - left.v[r] * s0.v[c] - right.v[r] * s1.v[c];
    }
  }
}

}  // namespace
}  // namespace orthokern::cuda
