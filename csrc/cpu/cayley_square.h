// The square route of the Cayley step, 2 K >= N; cayley.cpp has the mathematics.
#pragma once

#include "cpu/lu.h"
#include "cpu/ops.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
constexpr double kEpsilon = sizeof(T) == 4 ? 1.2e-7 : 2.2e-16;
// Bounds on the truncation error of a series, relative to M.
constexpr double kSkewRemainder = 1.0 / 32;         // of the rounding unit
constexpr double kSymmetricRemainder = 1.0 / 2048;  // the same, if it accumulates over the steps
// At or above this root mean square of the singular values of X, M_new = 2 (I + X)^-1 M - M has the smaller error and
// drift (measured, N = 128).
constexpr double kLargeTurn = 0.75;

enum Form { kSeries, kFourth, kLu, kLarge };

struct Norms {
  double frobenius, largest_row;
};

template <class T>
struct SquareShape {
  static constexpr int W = kWidth<T>;
  int N, K, threads;
  int blocks = ceil_div(N, W), columns = ceil_div(K, W);  // panels of N columns, and of K
  int rows = panel_rows<T>(N);                            // of a panel, with padding
  ptrdiff_t stride = static_cast<ptrdiff_t>(rows) * W;    // elements from one panel to the next
  // panels of M that a thread processes together: two such groups and the data that is read once fit into L2
  int cached = max_of(static_cast<int>((512 << 10) / (stride * sizeof(T))), 1);
  int group = ceil_div(blocks, max_of(ceil_div(blocks, cached), min_of(threads, columns)));
  // panels of an [N, N] matrix that share one pass over it; above 1 if it does not fit into the cache
  int lu_group = stride * sizeof(T) * blocks > (1200 << 10) ? max_of(1, 128 / W) : 1;
};

// The working memory of a matrix and of the thread that computes it.
template <class T>
struct SquareWork {
  Scratch<T> x;          // panels [N, N]: P, then X, then Z
  Scratch<T> s;          // panels [N, N]: G, then S or the LU factors
  Scratch<double> sums;  // [N]: squared norms of rows
  Scratch<int> swaps;    // [N]
  Scratch<T> m;          // panels of M or M^T, [N, group * W]
  Scratch<T> d;          // panels of D, [N, group * W]

  bool allocate(const SquareShape<T>& shape, bool matrix) {
    const size_t whole = shape.stride * shape.blocks, group = shape.stride * shape.group;
    return m.allocate(group, false) && d.allocate(group, false) &&
           (!matrix || (x.allocate(whole, false) && s.allocate(whole, false) && sums.allocate(shape.N, false) &&
                        swaps.allocate(shape.N, false)));
  }
};

// x [N, N] = scale (x - x^T), one block and the transposed block at a time.
template <class T>
void make_skew(const Panels<T>& x, int N, T scale, int threads) {
  constexpr int L = kLanes<T>;
  const int blocks = ceil_div(N, L);
  share(threads, blocks, [&](int i) {
    for (int j = i; j < blocks; j++) {
      V<T> a[L], b[L];
      load_transposed<T>(block_at(x, j, i), kWidth<T>, b);
      load_block<T>(block_at(x, i, j), a);
      ORTHOKERN_UNROLL for (int r = 0; r < L; r++) a[r] = scale * (a[r] - b[r]);
      store_block<T>(block_at(x, i, j), a);
      if (j == i) continue;
      load_transposed<T>(block_at(x, i, j), kWidth<T>, b);
      ORTHOKERN_UNROLL for (int r = 0; r < L; r++) b[r] = -b[r];
      store_block<T>(block_at(x, j, i), b);
    }
  });
}

// Copies the blocks above the diagonal of s [N, N] to the transposed blocks below it.
template <class T>
void mirror(const Panels<T>& s, int N, int threads) {
  constexpr int L = kLanes<T>;
  const int blocks = ceil_div(N, L);
  share(threads, blocks, [&](int i) {
    for (int j = i + 1; j < blocks; j++) {
      V<T> a[L];
      load_transposed<T>(block_at(s, i, j), kWidth<T>, a);
      store_block<T>(block_at(s, j, i), a);
    }
  });
}

template <class T>
Norms norms(const Panels<T>& x, int N, double* sums, int threads) {
  constexpr int L = kLanes<T>;
  const int blocks = ceil_div(N, L);
  share(threads, blocks, [&](int i) {
    V<T> acc[L];
    ORTHOKERN_UNROLL for (int r = 0; r < L; r++) acc[r] = V<T>{};
    for (int j = 0; j < blocks; j++) {
      const T* from = block_at(x, i, j);
      ORTHOKERN_UNROLL for (int r = 0; r < L; r++) {
        const V<T> v = load(from + r * kWidth<T>);
        acc[r] += v * v;
      }
    }
    ORTHOKERN_UNROLL for (int r = 0; r < L; r++) if (i * L + r < N) sums[i * L + r] =
        static_cast<double>(sum_lanes<T>(acc[r]));
  });
  double total = 0, largest = 0;
  for (int r = 0; r < N; r++) {
    total += sums[r];
    if (sums[r] > largest) largest = sums[r];
  }
  return {__builtin_sqrt(total), __builtin_sqrt(largest)};
}

// s = x^2 for x [N, N]: the tiles with elements above the diagonal are computed and copied to the transposed tiles.
// group: number of panels that share one pass over x.
template <class T>
void square_skew(const Panels<T>& x, int N, int group, const Panels<T>& s, int threads) {
  constexpr int W = kWidth<T>;
  const int blocks = ceil_div(N, W), items = ceil_div(blocks, group);
  share(threads, items, [&](int i) {
    const int first = (items - 1 - i) * group, end = min_of(first + group, blocks);  // the longest panels first
    const RowTiles split(min_of(end * W, N));
    for (int j = 0, row = 0; j < split.tiles; row += split.count(j), j++) {
      const int from = max_of(first, row / W);
      product<T>(x, row, split.count(j), 0, N, x.from(from), end - from, min_of(W, N - (end - 1) * W), nullptr, T(1),
                 s.from(from));
    }
  });
  mirror<T>(s, N, threads);
}

// Chooses the form for x = X and prepares it. kSeries: x = X or Z; kFourth: x = Z, s = S; kLu and kLarge: x = X, s =
// the factors of I + X.
template <class T>
Form prepare(const SquareShape<T>& shape, const Panels<T>& X, const Panels<T>& S, double* sums, const Lu<T>& lu,
             int threads) {
  constexpr int W = kWidth<T>;
  const int N = shape.N;
  const double skew_limit = kSkewRemainder * kEpsilon<T>;
  const Norms x = norms<T>(X, N, sums, threads);
  if (2 * x.largest_row * x.frobenius <= kSymmetricRemainder * kEpsilon<T>) return kSeries;
  // Lower bounds on the norms of S from the norms of X: rows of norm |X|^2 / N, and |S|_F >= |X|^2 / sqrt(N). If the
  // remainder is too large even with these, S is not computed.
  const double least_row = x.frobenius * x.frobenius / N, least_norm = x.frobenius / __builtin_sqrt(__builtin_sqrt(N));
  if (2 * least_row * least_norm * least_norm * least_norm <= skew_limit) {
    square_skew<T>(X, N, shape.lu_group, S, threads);
    const Norms s = norms<T>(S, N, sums, threads);
    const double bound = __builtin_sqrt(s.frobenius);  // |X| <= |S|^(1/2)
    const bool second = 2 * s.largest_row * bound <= skew_limit;
    if (second || 2 * s.largest_row * bound * bound * bound <= skew_limit) {
      share(threads, shape.blocks, [&](int p) {
        T* z = X.at(0, p);
        const T* square = S.at(0, p);
        for (int i = 0; i < N * W; i += kLanes<T>) store(z + i, load(z + i) - load(square + i));
      });
      return second ? kSeries : kFourth;
    }
  }
  share(threads, shape.blocks, [&](int p) {
    memcpy(S.at(0, p), X.at(0, p), static_cast<size_t>(N) * W * sizeof(T));
    for (int c = 0; c < W && p * W + c < N; c++) S.at(p * W + c, p)[c] = T(1);
  });
  factor<T>(lu, shape.lu_group, threads);
  return x.frobenius > kLargeTurn * __builtin_sqrt(N) ? kLarge : kLu;
}

// out [rows, cols], rows K apart: s m + t d, for panels m and d.
template <class T>
void combine(T s, const Panels<T>& m, T t, const Panels<T>& d, int rows, int cols, T* out, ptrdiff_t K) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  for (int c = 0; c < cols; c += W) {
    const T *a = m.at(0, c / W), *b = d.at(0, c / W);
    T* to = out + c;
    for (int r = 0; r < rows; r++, a += W, b += W, to += K) {
      if (cols - c >= W) {
        store(to, s * load(a) + t * load(b));
        store(to + L, s * load(a + L) + t * load(b + L));
      } else {
        for (int j = 0; j < cols - c; j++) to[j] = s * a[j] + t * b[j];
      }
    }
  }
}

// Columns [col0, col0 + cols) of the step: m, out [N, K] row-major.
template <class T>
void finish_group(const SquareShape<T>& shape, const Panels<T>& x, Form form, const Lu<T>& lu, const SquareWork<T>& own,
                  const T* m, int col0, int cols, T* out) {
  constexpr int W = kWidth<T>;
  const int N = shape.N, K = shape.K;
  const int panels = ceil_div(cols, W), last = last_width<T>(cols);
  Panels<T> mp = {own.m, shape.stride}, d = {own.d, shape.stride};
  pack<T>(m, K, 0, N, col0, cols, mp);
  if (form == kLarge) pack<T>(m, K, 0, N, col0, cols, d);
  else product<T>(x, 0, N, 0, N, mp, panels, last, nullptr, T(1), d);
  if (form == kLu || form == kLarge) solve<T>(lu, d, panels, last);
  if (form == kFourth) {
    product<T>(lu.a, 0, N, 0, N, d, panels, last, &d, T(1), mp);  // D = Z M + S Z M replaces M,
    pack<T>(m, K, 0, N, col0, cols, d);                           // and M replaces Z M
    const Panels<T> swap = mp;
    mp = d;
    d = swap;
  }
  if (form == kLarge) combine<T>(T(-1), mp, T(2), d, N, cols, out + col0, K);
  else combine<T>(T(1), mp, T(-2), d, N, cols, out + col0, K);
}

template <class T>
struct SquareRoute {
  typedef SquareWork<T> Work;
  SquareShape<T> own, shared;
  SquareRoute(int N, int K, int threads) : own{N, K, 1}, shared{N, K, threads} {}
  bool allocate(Work& work, bool matrix) const { return work.allocate(own, matrix); }
  // m, g, out [N, K].
  void step(const Work* team, const T* m, const T* g, double lr, T* out, int threads) const {
    constexpr int W = kWidth<T>;
    const SquareShape<T>& shape = threads > 1 ? shared : own;
    const int N = shape.N, K = shape.K;
    const Panels<T> x = {team[0].x, shape.stride}, s = {team[0].s, shape.stride};
    share(threads, ceil_div(N, kRowsPerItem), [&](int t) {
      const int row = t * kRowsPerItem;
      pack<T>(g, K, row, min_of(kRowsPerItem, N - row), 0, K, s);
    });
    // The products do not write the padding rows of the last block of a transpose.
    for (int p = 0; p < shape.blocks; p++) memset(x.at(N, p), 0, static_cast<size_t>(shape.rows - N) * W * sizeof(T));
    const int p_groups = ceil_div(shape.blocks, shape.group);
    share(threads, min_of(threads, p_groups), [&](int t) {
      for (int q = t; q < p_groups; q += threads) {
        const int first = q * shape.group * W, cols = min_of(shape.group * W, N - first);
        const Panels<T> mt = {team[t].m, shape.stride};
        pack_transposed<T>(m, K, first, cols, K, mt);
        product<T>(s, 0, N, 0, K, mt, ceil_div(cols, W), last_width<T>(cols), nullptr, T(1), x.from(q * shape.group));
      }
    });
    make_skew<T>(x, N, static_cast<T>(lr / 2), threads);
    const Lu<T> lu = {N, s, team[0].swaps};
    const Form form = prepare<T>(shape, x, s, team[0].sums, lu, threads);
    const int m_groups = ceil_div(shape.columns, shape.group);
    share(threads, min_of(threads, m_groups), [&](int t) {
      for (int q = t; q < m_groups; q += threads) {
        const int first = q * shape.group * W;
        finish_group<T>(shape, x, form, lu, team[t], m, first, min_of(shape.group * W, K - first), out);
      }
    });
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
