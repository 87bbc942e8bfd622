// Products of a few vectors with a row-major weight matrix that is read in place, once: for calls of so few steps that
// packing the weights (gemm.h) would take longer than the steps.
//
// A block of L rows of the matrix is read in squares of L x L, which are transposed in registers. An element of the
// result is the same chain of multiply-adds in ascending depth as in the packed product: results are bit-identical.
#pragma once

#include "cpu/tasks.h"
#include "cpu/transpose.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int64_t kDirectRows = 4;                // largest T B for which reading the weights in place is faster
constexpr size_t kDirectThreadBytes = 256 << 10;  // minimum bytes of weights to divide a product among threads

// sum + the products of `a` [depth] with `count` <= L rows of w, `stride` elements apart; one lane for each row.
template <class T>
inline V<T> direct_rows(const T* w, ptrdiff_t stride, int count, int depth, const T* a, V<T> sum) {
  constexpr int L = kLanes<T>;
  int k = 0;
  if (count == L) {
    for (; k + L <= depth; k += L) {
      V<T> square[L];
      load_transposed<T>(w + k, stride, square);
      ORTHOKERN_UNROLL for (int j = 0; j < L; j++) sum += square[j] * a[k + j];
    }
  }
  for (; k < depth; k++) {
    V<T> column = V<T>{};
    for (int i = 0; i < count; i++) column[i] = w[i * stride + k];
    sum += column * a[k];
  }
  return sum;
}

constexpr int kDirectPanel =
    4;  // vectors of columns that direct_panel computes at a time: chains that hide the latency

// MR rows of `a` times PV vectors of columns of w * diag(scale) (scale null: of w); the last has `count` columns.
// Rows are a_row, stride and to_row elements apart.
template <class T, int MR, int PV, bool SCALED>
inline void direct_tile(const T* w, ptrdiff_t stride, int count, int depth, const T* a, ptrdiff_t a_row, const T* scale,
                        T* to, ptrdiff_t to_row) {
  constexpr int L = kLanes<T>;
  V<T> acc[MR][PV] = {}, s[PV];
  auto part = [&](const T* from, int v) __attribute__((always_inline)) {
    return v + 1 < PV || count == L ? load(from + v * L) : load_part(from + v * L, count);
  };
  ORTHOKERN_UNROLL for (int v = 0; v < PV; v++) s[v] = SCALED ? part(scale, v) : V<T>{};
  for (int k = 0; k < depth; k++, w += stride) {
    V<T> column[PV];
    ORTHOKERN_UNROLL for (int v = 0; v < PV; v++) column[v] = SCALED ? part(w, v) * s[v] : part(w, v);
    ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int v = 0; v < PV; v++) acc[r][v] +=
        column[v] * a[r * a_row + k];
  }
  ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int v = 0; v < PV; v++)
      write(to + r * to_row + v * L, acc[r][v], v + 1 < PV ? L : count);
}
template <class T, int PV, bool SCALED>
inline void direct_tiles(const T* w, ptrdiff_t stride, int count, int depth, const T* a, ptrdiff_t a_row, int rows,
                         const T* scale, T* to, ptrdiff_t to_row) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    direct_tile<T, 4, PV, SCALED>(w, stride, count, depth, a + r * a_row, a_row, scale, to + r * to_row, to_row);
  for (; r + 2 <= rows; r += 2)
    direct_tile<T, 2, PV, SCALED>(w, stride, count, depth, a + r * a_row, a_row, scale, to + r * to_row, to_row);
  if (r < rows)
    direct_tile<T, 1, PV, SCALED>(w, stride, count, depth, a + r * a_row, a_row, scale, to + r * to_row, to_row);
}
// `rows` rows of `a` times columns [first, last) of w [depth, .] * diag(scale), or of w: each element is summed in the
// order of the packed product.
template <class T, bool SCALED>
inline void direct_columns(const T* w, ptrdiff_t stride, int first, int last, int depth, const T* a, ptrdiff_t a_row,
                           int rows, const T* scale, T* to, ptrdiff_t to_row) {
  constexpr int L = kLanes<T>;
  for (int c = first; c < last;) {
    const T* at = SCALED ? scale + c : nullptr;
    if (c + kDirectPanel * L <= last) {
      direct_tiles<T, kDirectPanel, SCALED>(w + c, stride, L, depth, a, a_row, rows, at, to + c, to_row);
      c += kDirectPanel * L;
    } else {
      direct_tiles<T, 1, SCALED>(w + c, stride, last - c < L ? last - c : L, depth, a, a_row, rows, at, to + c, to_row);
      c += L;
    }
  }
}
// fn(first, last) for elements [0, size), in blocks of `unit`, on as many threads as a product of this size can use.
template <class F>
inline void direct_share(int threads, size_t bytes, int size, int unit, const F& fn) {
  const int blocks = (size + unit - 1) / unit;
  int tasks = bytes < kDirectThreadBytes ? 1 : threads;
  if (tasks > blocks) tasks = blocks;
  share(tasks, tasks, [&](int task) {
    const int first = blocks * task / tasks * unit, last = blocks * (task + 1) / tasks * unit;
    fn(first, last < size ? last : size);
  });
}

// to [size, cols] = sum_r left(r) right(r)^T over `rows` rows; does nothing if `to` is null.
template <class T, class Left, class Right>
inline void direct_outer(int threads, int rows, const Left& left, const Right& right, void* to, int size, int cols) {
  const T *l[kDirectRows], *r[kDirectRows];
  for (int i = 0; i < rows; i++) l[i] = left(i), r[i] = right(i);
  direct_share(threads, static_cast<size_t>(size) * cols * sizeof(T), to ? size : 0, 1, [&](int first, int last) {
    for (int n = first; n < last; n++) {
      T* row = static_cast<T*>(to) + static_cast<ptrdiff_t>(n) * cols;
      const auto put = [&](int m, int count) __attribute__((always_inline)) {
        V<T> sum = V<T>{};
        for (int i = 0; i < rows; i++) sum += read(r[i] + m, count) * l[i][n];
        write(row + m, sum, count);
      };
      int m = 0;
      for (; m + kLanes<T> <= cols; m += kLanes<T>) put(m, kLanes<T>);
      if (m < cols) put(m, cols - m);
    }
  });
}

}  // namespace orthokern::ORTHOKERN_ISA
