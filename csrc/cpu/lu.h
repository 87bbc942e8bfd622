// Block LU of a matrix in panel storage, and the solve with it.
//
// A = L U by blocks of W x W, where W is the width of a panel. Except for the factorization of one panel at a time, all
// work is long products:
//
//      D U U U U    row blocks above the diagonal:  U(i, p) = L(i, i)^-1 (A(i, p) - L(i, <i) U(<i, p))
//      L D U U U    below:                          L(i, p) = (A(i, p) - L(i, <p) U(<p, p)) U(p, p)^-1
//      L L D U U
//      L L L D U
//      L L L L D
//
// Left-looking: all updates of a panel are applied when it is factored. Panels are processed in groups. If the matrix
// does not fit into the cache, the columns of L that a group needs are read once for the whole group.
//
// Rows are exchanged within a panel as in the textbook method, and the diagonal block holds unit L and U. Substitution
// with these blocks is more accurate than products with their inverses: those made a thin M shrink by 4e-10 per step
// (float32, measured).
#pragma once

#include "cpu/panels.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T>
struct Lu {
  int n;
  Panels<T> a;  // [n, n]
  int* swaps;   // [n]: row i was exchanged with row swaps[i] >= i

  int blocks() const { return ceil_div(n, kWidth<T>); }
  int size(int block) const { return min_of(kWidth<T>, n - block * kWidth<T>); }
};

template <class T>
inline void swap_rows(T* a, T* b) {
  constexpr int L = kLanes<T>;
  const V<T> a0 = load(a), a1 = load(a + L), b0 = load(b), b1 = load(b + L);
  store(a, b0);
  store(a + L, b1);
  store(b, a0);
  store(b + L, a1);
}

// Applies the exchanges of rows [row0, row1) to a panel [n, W].
template <class T>
inline void apply_swaps(const int* swaps, int row0, int row1, T* panel) {
  for (int i = row0; i < row1; i++)
    if (swaps[i] != i)
      swap_rows(panel + static_cast<ptrdiff_t>(i) * kWidth<T>, panel + static_cast<ptrdiff_t>(swaps[i]) * kWidth<T>);
}

// Textbook LU with partial pivoting of the panel [rows, W], of which `size` columns count: unit L below the diagonal, U
// on and above it. swaps [size]: relative to the panel's first row.
template <class T>
inline void factor_panel(T* panel, int rows, int size, int* swaps) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  // Lane numbers of the first vector of a row, to pick out a column by comparison: writing one element of a row and
  // reading the row back at once would stall.
  typename Vec<T>::I lane;
  for (int i = 0; i < L; i++) lane[i] = i;
  const V<T> zero = V<T>{};
  for (int k = 0; k < size; k++) {
    int best = k;
    T largest = T(-1);
    for (int r = k; r < rows; r++) {
      const T x = panel[static_cast<ptrdiff_t>(r) * W + k];
      const T size_of = x < 0 ? -x : x;
      if (size_of > largest) largest = size_of, best = r;
    }
    swaps[k] = best;
    T* pivot_row = panel + k * W;
    if (best != k) swap_rows(pivot_row, panel + static_cast<ptrdiff_t>(best) * W);
    const typename Vec<T>::I at0 = lane == k, at1 = lane == k - L;
    const T p = T(1) / pivot_row[k];
    const V<T> u0 = lane > k ? load(pivot_row) : zero, u1 = lane > k - L ? load(pivot_row + L) : zero;
    for (int r = k + 1; r < rows; r++) {
      T* row = panel + static_cast<ptrdiff_t>(r) * W;
      const T f = row[k] * p;
      const V<T> fs = splat<T>(f);
      if (k < L) {
        const V<T> x0 = load(row) - f * u0;
        store(row, at0 ? fs : x0);
      }
      const V<T> x1 = load(row + L) - f * u1;
      store(row + L, at1 ? fs : x1);
    }
  }
}

// b = L^-1 b and b = U^-1 b for a diagonal block [size, size] that holds unit L and U, and b [size, W]; both have rows
// of W elements.
template <class T>
inline void lower_solve(const T* a, int size, T* b) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  for (int j = 0; j < size; j++) {
    const V<T> z0 = load(b + j * W), z1 = load(b + j * W + L);
    for (int r = j + 1; r < size; r++) {
      store(b + r * W, load(b + r * W) - a[r * W + j] * z0);
      store(b + r * W + L, load(b + r * W + L) - a[r * W + j] * z1);
    }
  }
}
template <class T>
inline void upper_solve(const T* a, int size, T* b) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  for (int j = size - 1; j >= 0; j--) {
    const V<T> z0 = load(b + j * W) / a[j * W + j], z1 = load(b + j * W + L) / a[j * W + j];
    store(b + j * W, z0);
    store(b + j * W + L, z1);
    for (int r = 0; r < j; r++) {
      store(b + r * W, load(b + r * W) - a[r * W + j] * z0);
      store(b + r * W + L, load(b + r * W + L) - a[r * W + j] * z1);
    }
  }
}

// Rows per work item.
constexpr int kRowsPerItem = 4 * kMaxRows;

// Factors lu.a in place. group: panels that share one pass over L.
template <class T>
void factor(const Lu<T>& lu, int group, int threads) {
  constexpr int W = kWidth<T>;
  const int n = lu.n, blocks = lu.blocks();
  const Panels<T>& a = lu.a;
  // Completes row block i of panel p, above the diagonal, with the columns from `done` on.
  const auto finish_upper = [&](int i, int p, int done) {
    const Panels<T> c = a.from(p);
    const int depth = i * W - done;
    if (depth > 0) product<T>(a, i * W, W, done, depth, c, 1, lu.size(p), &c, T(-1), c);
    lower_solve<T>(a.at(i * W, i), W, c.at(i * W, 0));
  };
  for (int first = 0; first < blocks; first += group) {
    const int end = min_of(first + group, blocks), panels = end - first, done = first * W;
    if (first > 0) {
      const int parts = min_of(threads, panels);
      share(parts, parts, [&](int t) {
        for (int i = 0; i < first; i++)
          for (int p = first + t; p < end; p += parts) finish_upper(i, p, 0);
      });
      share(threads, ceil_div(n - done, kRowsPerItem), [&](int t) {
        const Panels<T> c = a.from(first);
        const int row = done + t * kRowsPerItem;
        product<T>(a, row, min_of(kRowsPerItem, n - row), 0, done, c, panels, lu.size(end - 1), &c, T(-1), c);
      });
    }
    for (int p = first; p < end; p++) {
      const Panels<T> c = a.from(p);
      const int row0 = p * W, size = lu.size(p), depth = row0 - done;
      for (int i = first; i < p; i++) finish_upper(i, p, done);
      if (depth > 0)
        share(threads, ceil_div(n - row0, kRowsPerItem), [&](int t) {
          const int row = row0 + t * kRowsPerItem;
          product<T>(a, row, min_of(kRowsPerItem, n - row), done, depth, c, 1, size, &c, T(-1), c);
        });
      factor_panel<T>(c.at(row0, 0), n - row0, size, lu.swaps + row0);
      for (int i = row0; i < row0 + size; i++) lu.swaps[i] += row0;
      for (int q = 0; q < blocks; q++)
        if (q != p) apply_swaps<T>(lu.swaps, row0, row0 + size, a.at(0, q));
    }
  }
}

// b = A^-1 b for b [n, (panels - 1) W + last] in panels.
template <class T>
void solve(const Lu<T>& lu, const Panels<T>& b, int panels, int last) {
  constexpr int W = kWidth<T>;
  const int blocks = lu.blocks();
  for (int q = 0; q < panels; q++) apply_swaps<T>(lu.swaps, 0, lu.n, b.at(0, q));
  for (int i = 0; i < blocks; i++) {
    if (i > 0) product<T>(lu.a, i * W, lu.size(i), 0, i * W, b, panels, last, &b, T(-1), b);
    for (int q = 0; q < panels; q++) lower_solve<T>(lu.a.at(i * W, i), lu.size(i), b.at(i * W, q));
  }
  for (int i = blocks - 1; i >= 0; i--) {
    const int below = (i + 1) * W;
    if (below < lu.n) product<T>(lu.a, i * W, lu.size(i), below, lu.n - below, b, panels, last, &b, T(-1), b);
    for (int q = 0; q < panels; q++) upper_solve<T>(lu.a.at(i * W, i), lu.size(i), b.at(i * W, q));
  }
}

}  // namespace orthokern::ORTHOKERN_ISA
