// Block LU of a matrix in panel storage, and the solve with it.
//
// A = L U by blocks of W x W (W the width of a panel): L has identity blocks on its diagonal, and of U's diagonal blocks the inverses are
// kept. The forward solve then needs no triangular solve at all and the backward one a small product for each block, so that apart from the
// factorisation of one panel at a time everything is a long product:
//
//      U U U U      row blocks above the diagonal:  U(i, p) = A(i, p) - L(i, <i) U(<i, p)
//      L D U U      below:                          L(i, p) = (A(i, p) - L(i, <p) U(<p, p)) D(p)^-1
//      L L D U      left-looking, each panel is finished in one visit. Panels are visited in groups: where the matrix outgrows the cache,
//      L L L D      the columns of L that a group needs are read once for the whole group.
//
// Pivoting is optional. Without it the matrix must have a positive definite symmetric part that is not small against the rest: for I + X with
// X skew, the symmetric part of every Schur complement is at least I and its norm at most 1 + |X|^2, so a small or moderate X needs none.
// With it, rows are exchanged within a panel as in the textbook method.
#pragma once

#include "cpu/panels.h"

namespace orthokern {
namespace ORTHOKERN_ISA {

template <class T>
struct Lu {
  int n;
  Panels<T> a;   // [n, n]
  T* inverses;   // [blocks][W][W]: of U's diagonal blocks
  int* swaps;    // [n]: row i was exchanged with row swaps[i] >= i; null: no pivoting
  T* scratch;    // [W][W]

  int blocks() const { return ceil_div(n, kWidth<T>); }
  int size(int block) const { return min_of(kWidth<T>, n - block * kWidth<T>); }
  Panels<T> inverse(int block) const { return {inverses + static_cast<ptrdiff_t>(block) * kWidth<T> * kWidth<T>, 0}; }
};

// Lane numbers of the two vectors of a row, to pick out a column by comparison: writing one element of a row and reading the row back at
// once would stall.
template <class T>
struct Columns {
  typename Vec<T>::I first, second;
  Columns() {
    for (int i = 0; i < kLanes<T>; i++) first[i] = i, second[i] = i + kLanes<T>;
  }
};

// inverse[W, W] = a[size, size]^-1 by Gauss-Jordan without pivoting. Both have rows of W; a is left as it is.
template <class T>
inline void invert_block(const T* a, int size, T* inverse) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  const Columns<T> column;
  const V<T> zero = V<T>{}, one = splat<T>(1);
  memcpy(inverse, a, static_cast<size_t>(size) * W * sizeof(T));
  for (int k = 0; k < size; k++) {
    T* pivot_row = inverse + k * W;
    const typename Vec<T>::I at0 = column.first == k, at1 = column.second == k;
    const T p = T(1) / pivot_row[k];
    const V<T> u0 = (at0 ? one : load(pivot_row)) * p, u1 = (at1 ? one : load(pivot_row + L)) * p;
    for (int r = 0; r < size; r++) {
      T* row = inverse + r * W;
      const T f = row[k];
      const V<T> x0 = at0 ? zero : load(row), x1 = at1 ? zero : load(row + L);
      store(row, x0 - f * u0);
      store(row + L, x1 - f * u1);
    }
    store(pivot_row, u0);
    store(pivot_row + L, u1);
  }
}

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
    if (swaps[i] != i) swap_rows(panel + static_cast<ptrdiff_t>(i) * kWidth<T>, panel + static_cast<ptrdiff_t>(swaps[i]) * kWidth<T>);
}

// Textbook LU with partial pivoting of the panel [rows, W], of which `size` columns count: unit L below the diagonal, U on and above it.
// swaps [size]: relative to the panel's first row.
template <class T>
inline void factor_panel(T* panel, int rows, int size, int* swaps) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  const Columns<T> column;
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
    const typename Vec<T>::I at0 = column.first == k, at1 = column.second == k;
    const T p = T(1) / pivot_row[k];
    const V<T> u0 = column.first > k ? load(pivot_row) : zero, u1 = column.second > k ? load(pivot_row + L) : zero;
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

// From a block [size, size] that holds unit L and U: lower[W, W] = L^-1 and product[W, W] = U^-1 L^-1. All have rows of W.
template <class T>
inline void invert_factors(const T* a, int size, T* lower, T* product_) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  for (int i = 0; i < size; i++) {
    T* row = lower + i * W;
    memset(row, 0, W * sizeof(T));
    row[i] = T(1);
    V<T> x0 = load(row), x1 = load(row + L);
    for (int j = 0; j < i; j++) {
      const T f = a[i * W + j];
      x0 -= f * load(lower + j * W);
      x1 -= f * load(lower + j * W + L);
    }
    store(row, x0);
    store(row + L, x1);
  }
  for (int i = size - 1; i >= 0; i--) {
    V<T> x0 = load(lower + i * W), x1 = load(lower + i * W + L);
    for (int j = i + 1; j < size; j++) {
      const T f = a[i * W + j];
      x0 -= f * load(product_ + j * W);
      x1 -= f * load(product_ + j * W + L);
    }
    store(product_ + i * W, x0 / a[i * W + i]);
    store(product_ + i * W + L, x1 / a[i * W + i]);
  }
}

// Rows that one item of shared-out work covers.
constexpr int kRowsPerItem = 4 * kMaxRows;

// Factors lu.a in place. group: panels that share one pass over L.
template <class T>
void factor(const Lu<T>& lu, int group, int threads) {
  constexpr int W = kWidth<T>;
  const int n = lu.n, blocks = lu.blocks();
  const Panels<T>& a = lu.a;
  for (int first = 0; first < blocks; first += group) {
    const int end = min_of(first + group, blocks), panels = end - first, done = first * W;
    const int last = min_of(W, n - (end - 1) * W);
    if (first > 0) {
      const int parts = threads < panels ? threads : panels;
      share(parts, parts, [&](int t) {
        for (int i = 1; i < first; i++)
          for (int p = first + t; p < end; p += parts) {
            const Panels<T> c = a.from(p);
            product<T>(a, i * W, W, 0, i * W, c, 1, lu.size(p), &c, T(-1), c);
          }
      });
      share(threads, ceil_div(n - done, kRowsPerItem), [&](int t) {
        const Panels<T> c = a.from(first);
        const int row = done + t * kRowsPerItem;
        product<T>(a, row, min_of(kRowsPerItem, n - row), 0, done, c, panels, last, &c, T(-1), c);
      });
    }
    for (int p = first; p < end; p++) {
      const Panels<T> c = a.from(p);
      const int row0 = p * W, size = lu.size(p), depth = row0 - done;
      for (int i = first + 1; i < p; i++) product<T>(a, i * W, W, done, i * W - done, c, 1, size, &c, T(-1), c);
      const int items = ceil_div(n - row0 - size, kRowsPerItem);
      if (!lu.swaps) {
        if (depth > 0) product<T>(a, row0, size, done, depth, c, 1, size, &c, T(-1), c);
        const Panels<T> inverse = lu.inverse(p);
        invert_block<T>(c.at(row0, 0), size, inverse.p);
        share(threads, items, [&](int t) {
          const int row = row0 + size + t * kRowsPerItem, rows = min_of(kRowsPerItem, n - row);
          if (depth > 0) product<T>(a, row, rows, done, depth, c, 1, size, &c, T(-1), c);
          product<T>(c, row, rows, 0, size, inverse, 1, size, nullptr, T(1), c);
        });
        continue;
      }
      if (depth > 0)
        share(threads, ceil_div(n - row0, kRowsPerItem), [&](int t) {
          const int row = row0 + t * kRowsPerItem;
          product<T>(a, row, min_of(kRowsPerItem, n - row), done, depth, c, 1, size, &c, T(-1), c);
        });
      int* swaps = lu.swaps + row0;
      factor_panel<T>(c.at(row0, 0), n - row0, size, swaps);
      for (int i = 0; i < size; i++) swaps[i] += row0;
      for (int q = 0; q < blocks; q++)
        if (q != p) apply_swaps<T>(lu.swaps, row0, row0 + size, a.at(0, q));
      const Panels<T> lower = {lu.scratch, 0};
      invert_factors<T>(c.at(row0, 0), size, lower.p, lu.inverse(p).p);
      share(threads, items, [&](int t) {
        const int row = row0 + size + t * kRowsPerItem;
        product<T>(c, row, min_of(kRowsPerItem, n - row), 0, size, lower, 1, size, nullptr, T(1), c);
      });
    }
  }
}

// b = A^-1 b for b [n, (panels - 1) W + last] in panels. scratch: [W][W] of the caller's thread.
template <class T>
void solve(const Lu<T>& lu, const Panels<T>& b, int panels, int last, T* scratch) {
  constexpr int W = kWidth<T>;
  const int blocks = lu.blocks();
  if (lu.swaps)
    for (int q = 0; q < panels; q++) apply_swaps<T>(lu.swaps, 0, lu.n, b.at(0, q));
  for (int i = 1; i < blocks; i++) product<T>(lu.a, i * W, lu.size(i), 0, i * W, b, panels, last, &b, T(-1), b);
  for (int i = blocks - 1; i >= 0; i--) {
    const int size = lu.size(i), below = (i + 1) * W;
    if (below < lu.n) product<T>(lu.a, i * W, size, below, lu.n - below, b, panels, last, &b, T(-1), b);
    for (int q = 0; q < panels; q++) {
      memcpy(scratch, b.at(i * W, q), static_cast<size_t>(size) * W * sizeof(T));
      const Panels<T> right = {scratch, 0}, out = {b.at(i * W, q), 0};
      product<T>(lu.inverse(i), 0, size, 0, size, right, 1, q == panels - 1 ? last : W, nullptr, T(1), out);
    }
  }
}

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
