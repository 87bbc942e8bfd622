// The tiled Cayley step, with tiles of 64 x 64: the kernels that cayley.cu launches in sequence.
#pragma once

#include "cuda/cayley_batch.h"

namespace orthokern::cuda {
namespace {

// ------------------------------------------------------------------------------------------------------------------
// square

// X = c (G M^T - M G^T). grid.x: the tiles on and above the diagonal.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_skew_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  int index = blockIdx.x, tile_row = 0;
  if (index >= w.tiles * (w.tiles + 1) / 2) return;
  while (index >= w.tiles - tile_row) index -= w.tiles - tile_row++;
  const int row = tile_row * kTile, column = (tile_row + index) * kTile;
  T acc[4][4] = {};
  auto left = [&](const T* p, T sign) {
    return [=](int i, int k) { return row + i < w.N ? sign * p[w.index(row + i, k)] : T(0); };
  };
  auto right = [&](const T* p) {
    return [=](int k, int j) { return column + j < w.N ? p[w.index(column + j, k)] : T(0); };
  };
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

// The tile of the product of X and a matrix [N, N].
template <class T>
__device__ __forceinline__ void times_x(T (&acc)[4][4], const Work<T>& w, int row, int column, Slices<T>& slices,
                                        const T* matrix, int stride) {
  multiply<true, false>(
      acc, w.N, slices, [&](int i, int k) { return row + i < w.N ? w.row(row + i)[k] : T(0); },
      [&](int k, int j) { return column + j < w.N ? matrix[static_cast<int64_t>(k) * stride + column + j] : T(0); });
}

// The right-hand side X M, which is also the first term; or M, for a large step.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_begin_kernel(const __grid_constant__ Batch<Work<T>> all) {
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
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_iterate_kernel(const __grid_constant__ Batch<Work<T>> all, int done) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (done >= w.iterations || row >= w.N || column >= w.N || w.settle(done) != kSeries) return;
  const int64_t size = static_cast<int64_t>(w.N) * w.N;
  T acc[4][4] = {};
  times_x(acc, w, row, column, slices[0], done ? w.terms + (done - 1) % 2 * size : w.system + w.N,
          done ? w.N : w.width);
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
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_finish_kernel(const __grid_constant__ Batch<Work<T>> all) {
  const Work<T> w = all.at(blockIdx.z);
  const int state = w.settled();
  if (state == kConverged) return;
  const int64_t size = static_cast<int64_t>(w.N) * w.N;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < size;
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    const T d = w.row(static_cast<int>(at / w.N))[w.N + at % w.N];
    w.out[at] = state == kLarge ? 2 * d - w.m[at] : w.m[at] - 2 * d;
  }
}

// -------------------------------------------------------------------------------------------------------------
// elimination

template <class T>
struct RowsShared {
  Slices<T> slices;
  T inverse[kTile][kTile + 1];
};

// The block of rows from `first` on: the columns after it (blockIdx.x) are multiplied by the inverse of its diagonal
// block. settle: the first launch of a square step, which checks the last term of the series.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_rows_kernel(const __grid_constant__ Batch<Work<T>> all, int first, bool settle) {
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

// Subtracts from the other rows. blockIdx.y: their tiles, without the rows of the block itself.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_update_kernel(const __grid_constant__ Batch<Work<T>> all, int first) {
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

// --------------------------------------------------------------------------------------------------------------------
// thin

// gram = M^T [M, G]
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_gram_kernel(const __grid_constant__ Batch<Work<T>> all) {
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
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_coefficients_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.K || column >= w.K) return;
  T acc[4][4] = {};
  multiply<true, false>(
      acc, w.K, slices[0],
      [&](int i, int k) { return row + i < w.K ? T(2 * (row + i == k)) - w.gram[2 * w.index(row + i, 0) + k] : T(0); },
      [&](int k, int j) { return column + j < w.K ? w.gram[2 * w.index(k, 0) + w.K + column + j] : T(0); });
  each(acc, row, column, w.K, w.K, [&](int i, int j, T value) { w.h[w.index(i, j)] = value; });
}

// M times a matrix [K, K] with rows `stride` apart.
template <class T>
__device__ __forceinline__ void m_times(T (&acc)[4][4], const Work<T>& w, const T* left, int row, int column,
                                        Slices<T>& slices, const T* matrix, int stride) {
  multiply<true, false>(
      acc, w.K, slices, [&](int i, int k) { return row + i < w.N ? left[w.index(row + i, k)] : T(0); },
      [&](int k, int j) { return column + j < w.K ? matrix[static_cast<int64_t>(k) * stride + column + j] : T(0); });
}

// G' = G - M H
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_project_kernel(const __grid_constant__ Batch<Work<T>> all) {
  ORTHOKERN_SHARED(Slices<T>, slices, [1]);
  const Work<T> w = all.at(blockIdx.z);
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  if (row >= w.N || column >= w.K) return;
  T acc[4][4] = {};
  m_times(acc, w, w.m, row, column, slices[0], w.h, w.K);
  each(acc, row, column, w.N, w.K, [&](int i, int j, T value) { w.sum[w.index(i, j)] = w.g[w.index(i, j)] - value; });
}

// F = c (H - H^T) + c^2 G'^T G', followed by the identity
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_system_kernel(const __grid_constant__ Batch<Work<T>> all) {
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
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_turn_kernel(const __grid_constant__ Batch<Work<T>> all) {
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
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    cayley_thin_finish_kernel(const __grid_constant__ Batch<Work<T>> all) {
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

}  // namespace
}  // namespace orthokern::cuda
