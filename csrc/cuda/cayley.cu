// The Cayley step, batched over matrices of any shapes. There are two ways, and the shape alone decides (`way_of`):
//
//     one block     K up to 64, and all of it in shared memory: one launch, a block for each matrix.
//     tiles         everything else: tiled products, 64 x 64 results a block, so that even a single matrix is spread over many
//                   multiprocessors; the decisions between kernels are made on the device. The matrices of a launch lie along blockIdx.z.
//
// By tiles, square, K = N, with c = lr/2:
//     skew       X = c (G M^T - M G^T), the upper half of the tiles, mirrored
//     begin      Y = X M, D = Y, out = M - 2 D       (a step that turns M as a whole: Y = M, Note [Large steps])
//     iterate    Y <- -X Y, D += Y, out = M - 2 D    up to three times, Note [Series]; nothing once it has converged
//     eliminate  D = (I + X)^-1 Y                    Note [Elimination]; nothing if the series has converged
//     finish     out = M - 2 D                       (large: 2 D - M)
//
// By tiles, thin, K < N: nothing of size N x N, and systems of K x K. With H = M^T G, the part G' = G - M H of G that is orthogonal to M, and
// E = G'^T G':
//     A M = M B + G' and A G' = -M E with B = H - H^T, so the ansatz (I + c A)^-1 M = M a - c G' a leads to
//     (I + F) a = I,  F = c B + c^2 E,    hence    M_new = M - 2 (M F + c G') a    (large: 2 (M - c G') a - M).
// This uses M^T M = I, but for H, where the deviation would be amplified: H = (2 I - M^T M) M^T G, exact to second order. Elsewhere a step
// carries a deviation on without enlarging it.
//
// One block, with R = I - (I + X)^-1 = (I + X)^-1 X, or of F, which Note [Pivots of two] gives as accurately as X itself is:
//     square     M_new = M - 2 R M
//     thin       M_new = M - 2 ((M - c G') R + c G'),  since F a = R and a = I - R
//
// Note [Elimination]
//     Gauss-Jordan in blocks of 64 without pivoting on [I + X | Y]: per block, (1) every block of threads inverts the diagonal block in registers
//     and multiplies its 64 columns of the row with it, (2) the other rows subtract. Both X and F have a symmetric part >= 0, so the pivots of
//     I + X and I + F never vanish. It takes 3 N^3 operations where LU and two triangular solves take 8/3 N^3, all of them in products, with
//     2 N/64 launches; an LU panel by panel would leave most of the chip waiting.
//
// Note [Series]
//     D = X M - X^2 M + X^3 M - ... With M orthogonal, the k-th term has the norm |X^k|_F, and X is skew: |X|_2 <= (|X^k|_F / sqrt 2)^(1/k).
//     A term costs 2 N^3 operations, so the series pays for few terms: small steps, which training makes. It goes on until what is left out is
//     below eps / 2048 of M: a symmetric remainder changes |M| in the same direction at every step.
//
// Note [Large steps]
//     Where X turns M as a whole by about 90 degrees or more, the correction is no smaller than M, and 2 (I + X)^-1 M - M rounds least.
//
// Note [Pivots of two]
//     Up to 64 x 64, a block of threads inverts in place, by Gauss-Jordan with pivots of 2 x 2. That has half as many dependent steps, and it suits
//     a skew X: where X is large, a single pivot of I + X is 1, and what it multiplies grows to |X|^2, while [1 x; -x 1]^-1 is below 1 / |x|.
//     With the pivot block P, Q = P^-1, and D_pj = I and D_ij = 0 in the pivot's own columns, D becomes
//         Q D_pj in the pivot's rows,  D_ij - D_ip Q D_pj elsewhere.
//     The one-block step keeps the diagonal without the I where the step is small. Then P = I + D_pp, the second line holds in the pivot block too,
//     and D ends as (I + X)^-1 - I = -R, accurate relative to X: no difference of numbers near 1 is ever taken.
//
// Limit: the rate of the multiply-adds for large N; for smaller N by tiles the latency of 2 N/64 + 3 kernels and of 32 dependent pairs of pivots in
// each second one; in one block that of N/2 pairs, with a barrier each, beside the multiply-adds of one multiprocessor.
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace orthokern {
namespace cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256;  // a block's result, the slice of the sum in shared memory; 4 x 4 results a thread
constexpr int kPitch = kTile + 4;                       // keeps rows of a slice 16-byte aligned and out of each other's banks
constexpr int kIterations = 3;                          // of the series, from this N on:
constexpr int kSeriesFrom = 129;
constexpr double kLargeTurn = 0.75;                     // root mean square of X's singular values, or of F's
constexpr int kLargestBatch = 65535;                    // matrices in one launch
constexpr int kMostShapes = 16;                         // of them
constexpr int kMostShared = 94 << 10;                   // bytes of dynamic shared memory of one block; with the static 99 KB, which every GPU has
static_assert(kTile * kDepth % kThreads == 0 && kTile * kTile == 16 * kThreads, "every thread loads and computes the same number of elements");

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
struct Accuracy;
template <>
struct Accuracy<float> {
  static constexpr float unit = 5.96e-8f;
};
template <>
struct Accuracy<double> {
  static constexpr float unit = 1.11e-16f;
};

// acc[r][c] += sum over k < depth of a(i, k) b(k, j), for the thread's rows i = 4 (thread / 16) + r and columns j = 4 (thread % 16) + c of the
// tile. a and b give 0 outside their matrix. *_along_k: whether neighbours in memory are neighbours in k, so that threads load them together.
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
    __syncthreads();  // everyone has read the slices before
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

// The sum of a number of each thread, for all threads, in a fixed order.
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

// The matrices of one shape. Pointers are to the first one; `at` takes them to the block's.
template <class T>
struct Matrices {
  int N, K;
  const T *m, *g;     // [N, K]
  const double* lr;   // [] or null
  double rate;
  T* out;             // [N, K]

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

// And what the kernels by tiles know beyond that.
template <class T>
struct Work : Matrices<T> {
  using Matrices<T>::N;
  using Matrices<T>::K;
  int width;          // of a row of `system`
  int order;          // of `system`: N, or K if thin
  int tiles;          // ceil(order / kTile)
  int iterations;
  T* system;          // [order, width]: X or F, then the right-hand side, which becomes the solution
  T* sum;             // [N, N]: D of the series                           thin: [N, K] G'
  T* terms;           // [2, N, N]: the newest terms                       thin: [N, K] M F + c G' or M - c G'
  T* gram;            // thin: [K, 2K] M^T [M, G]
  T* h;               // thin: [K, K]
  double* squares;    // [iterations + 2, tiles^2]: sums of squares by tile, of X or F, then of each term
  int* status;        // [iterations + 2]: after the beginning, after each iteration, and what it comes to

  __device__ __forceinline__ Work at(int64_t matrix) const {
    Work w = *this;
    static_cast<Matrices<T>&>(w) = Matrices<T>::at(matrix);
    const int64_t size = static_cast<int64_t>(N) * K, own = static_cast<int64_t>(order) * order, stages = iterations + 2;
    const bool thin = K < N;
    w.system += matrix * order * width;
    w.sum += matrix * size, w.terms += matrix * (thin ? 1 : 2) * size;
    if (thin) w.gram += matrix * 2 * own, w.h += matrix * own;
    w.squares += matrix * stages * tiles * tiles, w.status += matrix * stages;
    return w;
  }
  __device__ __forceinline__ T* row(int i) const { return system + static_cast<int64_t>(i) * width; }
  __device__ __forceinline__ double* squares_of(int stage) const { return squares + static_cast<int64_t>(stage) * tiles * tiles; }
  // Whether X or F, whose squares are stage 0, turns M as a whole. All threads of a block ask.
  __device__ __forceinline__ bool large() const { return sum_of(squares_of(0), tiles * tiles) > kLargeTurn * kLargeTurn * order; }
  // What is to be done after `done` terms beyond the first: evaluated by every block alike, written down by one for the kernels to come.
  __device__ __forceinline__ int settle(int done) const {
    int state = status[done];
    if (state == kSeries) {
      const float norm = sqrtf(static_cast<float>(sum_of(squares_of(done + 1), tiles * tiles)));  // |X^(done + 1)|_F, if M is orthogonal
      const float tolerance = Accuracy<T>::unit / 2048 * sqrtf(static_cast<float>(N));
      const float bound = exp2f(log2f(norm * sqrtf(0.5f)) / (done + 1));  // of |X|_2
      // Measured in this norm, a random X looks up to about four times as large as it is.
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

// The matrices of one launch, of up to kMostShapes shapes: shape s has the matrices from number first[s] on. By tiles they are all square or all
// thin, and the grid is that of the largest in each direction; blocks that lie outside their own matrix return.
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

// ------------------------------------------------------------------------------------------------------------------ square

// X = c (G M^T - M G^T). grid.x: the tiles on and above the diagonal.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_skew_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  int index = blockIdx.x, tile_row = 0;
  if (index >= w.tiles * (w.tiles + 1) / 2) return;
  while (index >= w.tiles - tile_row) index -= w.tiles - tile_row++;
  const int row = tile_row * kTile, column = (tile_row + index) * kTile;
  T acc[4][4] = {};
  auto left = [&](const T* p, T sign) { return [=](int i, int k) { return row + i < w.N ? sign * p[w.index(row + i, k)] : T(0); }; };
  auto right = [&](const T* p) { return [=](int k, int j) { return column + j < w.N ? p[w.index(column + j, k)] : T(0); }; };
  multiply<true, true>(acc, w.N, slices[0], left(w.g, T(1)), right(w.m));
  multiply<true, true>(acc, w.N, slices[0], left(w.m, T(-1)), right(w.g));
  const T c = w.c();
  double squares = 0;
  each(acc, row, column, w.N, w.N, [&](int i, int j, T value) {
    if (i > j) return;
    const T x = i == j ? T(0) : c * value;
    w.row(i)[j] = x;
    w.row(j)[i] = -x;
    squares += 2 * static_cast<double>(x) * static_cast<double>(x);
  });
  squares = block_sum(squares);
  if (threadIdx.x) return;
  w.squares_of(0)[tile_row * w.tiles + tile_row + index] = squares;
  if (index) w.squares_of(0)[(tile_row + index) * w.tiles + tile_row] = 0;
}

// The tile of X times a matrix [N, N].
template <class T>
__device__ __forceinline__ void times_x(T (&acc)[4][4], const Work<T>& w, int row, int column, Slices<T>& slices, const T* matrix, int stride) {
  multiply<true, false>(
      acc, w.N, slices, [&](int i, int k) { return row + i < w.N ? w.row(row + i)[k] : T(0); },
      [&](int k, int j) { return column + j < w.N ? matrix[static_cast<int64_t>(k) * stride + column + j] : T(0); });
}

// The right-hand side X M, which is also the first term; or M, for a large step.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_begin_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.N || column >= w.N) return;
  const bool large = w.large();
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) w.status[0] = large ? kLarge : kSeries;
  T acc[4][4] = {};
  if (!large) times_x(acc, w, row, column, slices[0], w.m, w.N);
  double squares = 0;
  each(acc, row, column, w.N, w.N, [&](int i, int j, T value) {
    const int64_t at = w.index(i, j);
    w.row(i)[w.N + j] = large ? w.m[at] : value;
    w.sum[at] = value;
    w.out[at] = w.m[at] - 2 * value;
    squares += static_cast<double>(value) * static_cast<double>(value);
  });
  squares = block_sum(squares);
  if (threadIdx.x == 0) w.squares_of(1)[blockIdx.y * w.tiles + blockIdx.x] = squares;
}

// The next term of the series, number `done` + 2.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_iterate_kernel(const __grid_constant__ Batch<Work<T>> all, int done) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (done >= w.iterations || row >= w.N || column >= w.N || w.settle(done) != kSeries) return;
  const int64_t size = static_cast<int64_t>(w.N) * w.N;
  T acc[4][4] = {};
  times_x(acc, w, row, column, slices[0], done ? w.terms + (done - 1) % 2 * size : w.system + w.N, done ? w.N : w.width);
  T* term = w.terms + done % 2 * size;
  double squares = 0;
  each(acc, row, column, w.N, w.N, [&](int i, int j, T value) {
    const int64_t at = w.index(i, j);
    const T sum = w.sum[at] - value;
    term[at] = -value;
    w.sum[at] = sum;
    w.out[at] = w.m[at] - 2 * sum;
    squares += static_cast<double>(value) * static_cast<double>(value);
  });
  squares = block_sum(squares);
  if (threadIdx.x == 0) w.squares_of(done + 2)[blockIdx.y * w.tiles + blockIdx.x] = squares;
}

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_finish_kernel(const __grid_constant__ Batch<Work<T>> all) {
  const Work<T> w = all.at(blockIdx.z);
  const int state = w.settled();
  if (state == kConverged) return;
  const int64_t size = static_cast<int64_t>(w.N) * w.N;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < size; at += static_cast<int64_t>(gridDim.x) * kThreads) {
    const T d = w.row(static_cast<int>(at / w.N))[w.N + at % w.N];
    w.out[at] = state == kLarge ? 2 * d - w.m[at] : w.m[at] - 2 * d;
  }
}

// ------------------------------------------------------------------------------------------------------------- elimination

template <class T>
struct Pivots {
  T row[2][kTile], column[2][kTile];  // Q D_pj and D_ip of a pair
};

// Note [Pivots of two] on a matrix of up to kTile, of which the thread has the elements (4 (thread / 16) + r, 4 (thread % 16) + c), in place: X
// becomes (I + X)^-1 - I, or, plain, any matrix its inverse. Beyond its order it is 0, or I if plain.
template <class T>
__device__ __forceinline__ void invert(T (&d)[4][4], int order, bool plain) {
  ORTHOKERN_SHARED(Pivots<T>, pivots, [2]);  // taken in turns, so that one barrier a pair is enough
  const int thread = threadIdx.x, row = thread / 16 * 4, column = thread % 16 * 4;
  const T one = plain ? T(0) : T(1);
  for (int first = 0; first < order; first += 4) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {  // the pair first + half, first + half + 1; both halves are written out, so that d stays in registers
      if (first + half >= order) break;
      Pivots<T>& s = pivots[half / 2];
      const auto own = [&](int c) { return column == first && c / 2 == half / 2; };  // a column of the pivot's
      if (column == first)
#pragma unroll
        for (int r = 0; r < 4; r++) s.column[0][row + r] = d[r][half], s.column[1][row + r] = d[r][half + 1];
      if (thread / 32 == first / 8) {  // the warp with the pivot's rows; P comes from the thread that has it
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
      const Quad<T> s0 = quad(s.row[0] + column), s1 = quad(s.row[1] + column), left = quad(s.column[0] + row), right = quad(s.column[1] + row);
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++)
          if (row != first || r / 2 != half / 2) d[r][c] = (own(c) ? T(0) : d[r][c]) - left.v[r] * s0.v[c] - right.v[r] * s1.v[c];
    }
  }
}

template <class T>
struct RowsShared {
  Slices<T> slices;
  T inverse[kTile][kTile + 1];
};

// The block of rows from `first` on: the columns behind it (blockIdx.x) are multiplied by the inverse of its diagonal block. settle: the first
// launch of a square step, which looks at the last term of the series.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_rows_kernel(const __grid_constant__ Batch<Work<T>> all, int first,
                                                                                         bool settle) {
  RowsShared<T>& s = *dynamic_shared<RowsShared<T>>();
  const Work<T> w = all.at(blockIdx.z);
  const int size = min(kTile, w.order - first), begin = first + size, column = begin + blockIdx.x * kTile;
  if (first >= w.order || column >= w.width) return;
  if (w.K == w.N && (settle ? w.settle(w.iterations) : w.settled()) == kConverged) return;

  T d[4][4] = {};
  each(d, 0, 0, size, size, [&](int i, int j, T& element) { element = w.row(first + i)[first + j]; });
  each(d, 0, 0, kTile, kTile, [&](int i, int j, T& element) { element += T(i == j); });
  invert(d, size, true);
  each(d, 0, 0, kTile, kTile, [&](int i, int j, T element) { s.inverse[i][j] = element; });
  __syncthreads();

  T acc[4][4] = {};
  multiply<true, false>(
      acc, size, s.slices, [&](int i, int k) { return s.inverse[i][k]; },
      [&](int k, int c) { return column + c < w.width ? w.row(first + k)[column + c] : T(0); });
  each(acc, first, column, begin, w.width, [&](int i, int c, T value) { w.row(i)[c] = value; });
}

// The other rows subtract. blockIdx.y: their tiles; the rows of the block itself are left out.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_update_kernel(const __grid_constant__ Batch<Work<T>> all, int first) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int size = min(kTile, w.order - first), column = first + size + blockIdx.x * kTile;
  int row = blockIdx.y * kTile;
  if (row >= first) row += kTile;
  if (first >= w.order || row >= w.order || column >= w.width) return;
  if (w.K == w.N && w.settled() == kConverged) return;
  T acc[4][4] = {};
  multiply<true, false>(
      acc, size, slices[0], [&](int i, int k) { return row + i < w.order ? w.row(row + i)[first + k] : T(0); },
      [&](int k, int c) { return column + c < w.width ? w.row(first + k)[column + c] : T(0); });
  each(acc, row, column, w.order, w.width, [&](int i, int c, T value) { w.row(i)[c] -= value; });
}

// -------------------------------------------------------------------------------------------------------------------- thin

// gram = M^T [M, G]
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_gram_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.K || column >= 2 * w.K) return;
  T acc[4][4] = {};
  multiply<false, false>(
      acc, w.N, slices[0], [&](int i, int k) { return row + i < w.K ? w.m[w.index(k, row + i)] : T(0); },
      [&](int k, int j) {
        j += column;
        return j < w.K ? w.m[w.index(k, j)] : j < 2 * w.K ? w.g[w.index(k, j - w.K)] : T(0);
      });
  each(acc, row, column, w.K, 2 * w.K, [&](int i, int j, T value) { w.gram[2 * w.index(i, 0) + j] = value; });
}

// H = (2 I - M^T M) M^T G
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_coefficients_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.K || column >= w.K) return;
  T acc[4][4] = {};
  multiply<true, false>(
      acc, w.K, slices[0], [&](int i, int k) { return row + i < w.K ? T(2 * (row + i == k)) - w.gram[2 * w.index(row + i, 0) + k] : T(0); },
      [&](int k, int j) { return column + j < w.K ? w.gram[2 * w.index(k, 0) + w.K + column + j] : T(0); });
  each(acc, row, column, w.K, w.K, [&](int i, int j, T value) { w.h[w.index(i, j)] = value; });
}

// M times a matrix [K, K] whose rows lie `stride` apart.
template <class T>
__device__ __forceinline__ void m_times(T (&acc)[4][4], const Work<T>& w, const T* left, int row, int column, Slices<T>& slices, const T* matrix, int stride) {
  multiply<true, false>(
      acc, w.K, slices, [&](int i, int k) { return row + i < w.N ? left[w.index(row + i, k)] : T(0); },
      [&](int k, int j) { return column + j < w.K ? matrix[static_cast<int64_t>(k) * stride + column + j] : T(0); });
}

// G' = G - M H
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_project_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.N || column >= w.K) return;
  T acc[4][4] = {};
  m_times(acc, w, w.m, row, column, slices[0], w.h, w.K);
  each(acc, row, column, w.N, w.K, [&](int i, int j, T value) { w.sum[w.index(i, j)] = w.g[w.index(i, j)] - value; });
}

// F = c (H - H^T) + c^2 G'^T G', beside the identity
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_system_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.K || column >= w.K) return;
  T acc[4][4] = {};
  multiply<false, false>(
      acc, w.N, slices[0], [&](int i, int k) { return row + i < w.K ? w.sum[w.index(k, row + i)] : T(0); },
      [&](int k, int j) { return column + j < w.K ? w.sum[w.index(k, column + j)] : T(0); });
  const T c = w.c();
  double squares = 0;
  each(acc, row, column, w.K, w.K, [&](int i, int j, T value) {
    const T f = c * (w.h[w.index(i, j)] - w.h[w.index(j, i)]) + c * c * value;
    w.row(i)[j] = f;
    w.row(i)[w.K + j] = T(i == j);
    squares += static_cast<double>(f) * static_cast<double>(f);
  });
  squares = block_sum(squares);
  if (threadIdx.x == 0) w.squares_of(0)[blockIdx.y * w.tiles + blockIdx.x] = squares;
}

// terms = M F + c G', or M - c G' for a large step
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_turn_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.N || column >= w.K) return;
  const bool large = w.large();
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) w.status[0] = large ? kLarge : kEliminate;
  T acc[4][4] = {};
  if (!large) m_times(acc, w, w.m, row, column, slices[0], w.system, w.width);
  const T c = w.c();
  each(acc, row, column, w.N, w.K, [&](int i, int j, T value) {
    const int64_t at = w.index(i, j);
    w.terms[at] = large ? w.m[at] - c * w.sum[at] : value + c * w.sum[at];
  });
}

// out = M - 2 terms a, or 2 terms a - M
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_thin_finish_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.N || column >= w.K) return;
  const bool large = w.status[0] == kLarge;
  T acc[4][4] = {};
  m_times(acc, w, w.terms, row, column, slices[0], w.system + w.K, w.width);
  each(acc, row, column, w.N, w.K, [&](int i, int j, T value) {
    const T m = w.m[w.index(i, j)];
    w.out[w.index(i, j)] = large ? 2 * value - m : m - 2 * value;
  });
}

// --------------------------------------------------------------------------------------------------------------- one block

// Rows in shared memory are `pitch` numbers apart: an odd number of quads, so that neighbouring rows lie in banks of their own.
__host__ __device__ constexpr int64_t pitch_of(int64_t columns) { return ((columns + 3) / 4 | 1) * 4; }

// Bytes of a block's dynamic shared memory, Held below.
template <class T>
constexpr int64_t shared_bytes(int64_t N, int64_t K) {
  return (K + N + (K < N ? N + K : 0)) * pitch_of(K) * static_cast<int64_t>(sizeof(T));
}
static_assert(shared_bytes<double>(kTile, kTile) <= kMostShared, "square matrices up to kTile go one block each");

// f(i, j, value) for the elements of a^T b, [order, order], order up to kTile: a and b [depth, order]. A thread has 4 x 4 of them; where there are
// more threads than that takes, neighbouring lanes share the sum. f may write to a and b.
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
  __syncthreads();  // everyone has read a and b
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
    const int row = tile / across, column = tile % across * 4;  // and the rows row + down, ...: those of a warp are neighbours
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

static_assert(kMostShared + 2 * sizeof(Pivots<double>) + kThreads / 32 * sizeof(double) <= 99 << 10, "the shared memory of every GPU");

// What a block holds of its matrix.
template <class T>
struct Held {
  int pitch;
  T* x;  // [K, K]  square: G^T, then G M^T      thin: 2 I - M^T M, then G'^T G'      at last (I + X)^-1, or without the I
  T* m;  // [N, K]  square: M^T, then M          thin: M, then M - c G'
  T* g;  // [N, K]                               thin: G, then G'
  T* h;  // [K, K]                               thin: M^T G, then H
};

// x = G M^T, m = M. Both are read along k, so the product takes their transposes; the elements of M stay in registers in between.
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
  // f(place in shared memory, place in global memory) for the elements of a matrix [N, K].
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

// The whole step of one matrix. blockIdx.x: which one.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1) cayley_block_kernel(const __grid_constant__ Batch<Matrices<T>> all) {
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

// ---------------------------------------------------------------------------------------------------------------- launchers

enum Way { kAlone, kSquareTiles, kThinTiles };

template <class T>
Way way_of(const CayleyMatrices& some) {
  if (some.K <= kTile && shared_bytes<T>(some.N, some.K) <= kMostShared) return kAlone;
  return some.K < some.N ? kThinTiles : kSquareTiles;
}

// `batch` matrices of one shape in one launch, beginning with number `skip` of their CayleyMatrices; the workspace from `memory` on.
// Returns the bytes that they take of it.
template <class T>
int64_t lay_out(Matrices<T>& w, const CayleyMatrices& some, int64_t skip, int64_t, char*) {
  const int64_t size = some.N * some.K;
  w.N = static_cast<int>(some.N), w.K = static_cast<int>(some.K);
  w.m = static_cast<const T*>(some.m) + skip * size, w.g = static_cast<const T*>(some.g) + skip * size;
  w.out = static_cast<T*>(some.out) + skip * size;
  w.lr = some.lr ? some.lr + skip : nullptr, w.rate = some.rate;
  return 0;
}
template <class T>
int64_t lay_out(Work<T>& w, const CayleyMatrices& some, int64_t skip, int64_t batch, char* memory) {
  lay_out(static_cast<Matrices<T>&>(w), some, skip, batch, memory);
  const bool thin = some.K < some.N;
  w.order = w.K, w.width = 2 * w.K;
  w.tiles = (w.order + kTile - 1) / kTile;
  w.iterations = !thin && some.N >= kSeriesFrom ? kIterations : 0;
  const int64_t size = some.N * some.K, own = some.K * some.K, stages = w.iterations + 2;
  int64_t used = 0;
  auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + used);
    used += (count * batch * static_cast<int64_t>(sizeof(*pointer)) + 255) / 256 * 256;
  };
  take(w.squares, stages * w.tiles * w.tiles);
  take(w.status, stages);
  take(w.system, 2 * own);
  take(w.sum, size);
  take(w.terms, thin ? size : 2 * size);
  take(w.gram, thin ? 2 * own : 0);
  take(w.h, thin ? own : 0);
  return used;
}

unsigned tiles_of(int64_t rows) { return static_cast<unsigned>((rows + kTile - 1) / kTile); }

// f(batch, number of matrices) for one launch after the other of the matrices that go this way, which Some describes. Launches follow one another
// on the stream, so they share the workspace. Returns the bytes that the largest takes.
template <class T, class Some, class F>
int64_t each_launch(const CayleyArgs& args, Way way, F f) {
  Batch<Some> batch{};
  int64_t matrices = 0, used = 0, most = 0;
  auto finish = [&] {
    if (batch.shapes) f(batch, static_cast<unsigned>(matrices));
    most = used > most ? used : most;
    batch.shapes = 0, matrices = used = 0;
  };
  for (const CayleyMatrices& some : args.matrices) {
    if (way_of<T>(some) != way) continue;
    for (int64_t done = 0; done < some.batch;) {
      if (batch.shapes == kMostShapes || matrices == kLargestBatch) finish();
      const int64_t left = some.batch - done, room = kLargestBatch - matrices, count = left < room ? left : room;
      batch.first[batch.shapes] = static_cast<int>(matrices);
      used += lay_out(batch.of[batch.shapes], some, done, count, static_cast<char*>(args.workspace) + used);
      batch.shapes++, matrices += count, done += count;
    }
  }
  finish();
  return most;
}

template <class T>
void step_alone(const Batch<Matrices<T>>& all, unsigned batch, cudaStream_t stream) {
  int64_t bytes = 0;
  for (int s = 0; s < all.shapes; s++) {
    const int64_t needed = shared_bytes<T>(all.of[s].N, all.of[s].K);
    bytes = needed > bytes ? needed : bytes;
  }
  launch(cayley_block_kernel<T>, {dim3(batch), dim3(kThreads), stream, static_cast<size_t>(bytes)}, all);
}

template <class T>
void eliminate(const Batch<Work<T>>& all, int order, unsigned batch, cudaStream_t stream) {
  for (int first = 0; first < order; first += kTile) {
    const unsigned across = tiles_of(2 * order - (first + kTile < order ? first + kTile : order));
    launch(cayley_rows_kernel<T>, {dim3(across, 1, batch), dim3(kThreads), stream, sizeof(RowsShared<T>)}, all, first, first == 0);
    launch(cayley_update_kernel<T>, {dim3(across, tiles_of(order) - 1, batch), dim3(kThreads), stream}, all, first);
  }
}

template <class T>
void step_by_tiles(const Batch<Work<T>>& all, unsigned batch, bool thin, cudaStream_t stream) {
  int N = 0, K = 0, iterations = 0;
  for (int s = 0; s < all.shapes; s++) {
    const Work<T>& w = all.of[s];
    N = w.N > N ? w.N : N, K = w.K > K ? w.K : K, iterations = w.iterations > iterations ? w.iterations : iterations;
  }
  const unsigned tiles = tiles_of(K), tall = tiles_of(N);
  const auto grid = [&](unsigned x, unsigned y) { return Launch{dim3(x, y, batch), dim3(kThreads), stream}; };
  if (!thin) {
    launch(cayley_skew_kernel<T>, grid(tiles * (tiles + 1) / 2, 1), all);
    launch(cayley_begin_kernel<T>, grid(tiles, tiles), all);
    for (int done = 0; done < iterations; done++) launch(cayley_iterate_kernel<T>, grid(tiles, tiles), all, done);
    eliminate(all, K, batch, stream);
    launch(cayley_finish_kernel<T>, grid(tiles * tiles, 1), all);
  } else {
    launch(cayley_gram_kernel<T>, grid(tiles_of(2 * K), tiles), all);
    launch(cayley_coefficients_kernel<T>, grid(tiles, tiles), all);
    launch(cayley_project_kernel<T>, grid(tiles, tall), all);
    launch(cayley_system_kernel<T>, grid(tiles, tiles), all);
    launch(cayley_turn_kernel<T>, grid(tiles, tall), all);
    eliminate(all, K, batch, stream);
    launch(cayley_thin_finish_kernel<T>, grid(tiles, tall), all);
  }
}

template <class T>
void run(const CayleyArgs& args) {
  const DeviceGuard guard(args.device);
  const cudaStream_t stream = static_cast<cudaStream_t>(args.stream);
  each_launch<T, Matrices<T>>(args, kAlone, [&](const auto& all, unsigned batch) { step_alone(all, batch, stream); });
  for (const Way way : {kSquareTiles, kThinTiles})
    each_launch<T, Work<T>>(args, way, [&](const auto& all, unsigned batch) { step_by_tiles(all, batch, way == kThinTiles, stream); });
}

template <class T>
int64_t workspace(const CayleyArgs& args) {
  const auto nothing = [](const auto&, unsigned) {};
  const int64_t square = each_launch<T, Work<T>>(args, kSquareTiles, nothing), thin = each_launch<T, Work<T>>(args, kThinTiles, nothing);
  return square > thin ? square : thin;
}

}  // namespace

void cayley(const CayleyArgs& args) { args.dtype == kFloat64 ? run<double>(args) : run<float>(args); }

int64_t cayley_workspace(const CayleyArgs& args) { return args.dtype == kFloat64 ? workspace<double>(args) : workspace<float>(args); }

}  // namespace cuda
}  // namespace orthokern
