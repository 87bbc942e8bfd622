// The thin route of the Cayley step, 2 K < N; cayley.cpp has the mathematics.
#pragma once

#include "cpu/cayley_square.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kThinRows = 256;  // rows of a block that fits into the cache
constexpr int kThinParts = 32;  // largest number of partial Gram matrices

template <class T>
struct ThinShape {
  static constexpr int W = kWidth<T>;
  int N, K;
  int columns = ceil_div(K, W), blocks = ceil_div(2 * K, W);       // panels of K columns, and of 2 K
  ptrdiff_t stride = ptrdiff_t{panel_rows<T>(K)} * W;              // of panels with K rows
  ptrdiff_t stride2 = ptrdiff_t{panel_rows<T>(2 * K)} * W;         // of panels with 2 K rows
  ptrdiff_t row_stride = ptrdiff_t{panel_rows<T>(kThinRows)} * W;  // of panels with kThinRows rows
  // Separate partial matrices for the threads, with at most about the memory of M and G.
  int most = max_of(1, min_of(min_of(kThinParts, ceil_div(N, kThinRows)), 2 * N / (3 * K)));
  int part_rows = ceil_div(N, most), parts = ceil_div(N, part_rows);
};

// The three Gram matrices, each [K, K].
template <class T>
struct Grams {
  Panels<T> gg, gm, mm;  // G^T G, G^T M, M^T M; for gg and mm only the upper triangle
};

// The working memory of a matrix and of the thread that computes it.
template <class T>
struct ThinWork {
  Scratch<T> grams;    // [parts][3][columns][stride]
  Scratch<T> y;        // panels [2 K, 2 K]: Y = lr/2 Q^T P, then the LU factors of I + Y
  Scratch<T> w, w2;    // panels [2 K, K]
  Scratch<int> swaps;  // [2 K]
  Scratch<T> m, g, d;  // panels [kThinRows, K]

  bool allocate(const ThinShape<T>& s, bool matrix) {
    const size_t rows = s.columns * s.row_stride;
    return m.allocate(rows, false) && g.allocate(rows, false) && d.allocate(rows, false) &&
           (!matrix || (grams.allocate(s.parts * 3 * s.columns * s.stride, false) &&
                        y.allocate(s.blocks * s.stride2, false) && w.allocate(s.columns * s.stride2, false) &&
                        w2.allocate(s.columns * s.stride2, false) && swaps.allocate(2 * s.K, false)));
  }
};

template <class T>
ORTHOKERN_INLINE T& element(const Panels<T>& a, int row, int col) {
  return a.at(row, col / kWidth<T>)[col % kWidth<T>];
}

template <class T>
Grams<T> grams_of(const ThinShape<T>& s, T* grams, int part) {
  const ptrdiff_t whole = s.stride * s.columns;
  T* p = grams + part * 3 * whole;
  return {{p, s.stride}, {p + whole, s.stride}, {p + 2 * whole, s.stride}};
}

// out [K, K] = (add ? out : 0) + a^T b for a, b [rows, K]; upper: blocks below the diagonal are not computed.
template <class T>
void gram(const Panels<T>& a, const Panels<T>& b, int rows, int K, bool upper, bool add, const Panels<T>& out) {
  constexpr int W = kWidth<T>;
  const int panels = ceil_div(K, W), last = last_width<T>(K);
  for (int i = 0; i < panels; i++) {
    const RowTiles split(min_of(W, K - i * W));
    for (int j = 0, row = 0; j < split.tiles; row += split.count(j), j++)
      for (int q = upper ? i : 0; q < panels; q++) {
        T* to = out.at(i * W + row, q);
        const bool narrow = q == panels - 1 && last <= kLanes<T>;
        const int count = split.count(j);
        const ProductTile<T> tile =
            narrow ? product_tile_for_rows<T, 1, true>(count) : product_tile_for_rows<T, 2, true>(count);
        tile(a.at(0, i) + row, 0, b.at(0, q), rows, add ? to : nullptr, W, T(1), to, W);
      }
  }
}

// Computes the Gram matrices of m and g [N, K] in grams[0] of the first thread: partial ones for blocks of rows, then
// their sum.
template <class T>
void thin_grams(const ThinShape<T>& s, const ThinWork<T>* team, const T* m, const T* g, int threads) {
  const int N = s.N, K = s.K;
  T* grams = team[0].grams;
  share(threads, min_of(threads, s.parts), [&](int t) {
    const ThinWork<T>& own = team[t];
    const Panels<T> mp = {own.m, s.row_stride}, gp = {own.g, s.row_stride};
    for (int part = t; part < s.parts; part += threads) {
      const Grams<T> h = grams_of<T>(s, grams, part);
      const int begin = part * s.part_rows, end = min_of(begin + s.part_rows, N);
      for (int row = begin; row < end; row += kThinRows) {
        const int rows = min_of(kThinRows, end - row);
        pack<T>(m + static_cast<ptrdiff_t>(row) * K, K, 0, rows, 0, K, mp);
        pack<T>(g + static_cast<ptrdiff_t>(row) * K, K, 0, rows, 0, K, gp);
        gram<T>(gp, gp, rows, K, true, row > begin, h.gg);
        gram<T>(gp, mp, rows, K, false, row > begin, h.gm);
        gram<T>(mp, mp, rows, K, true, row > begin, h.mm);
      }
    }
  });
  const ptrdiff_t whole = 3 * s.stride * s.columns;
  for (int part = 1; part < s.parts; part++)
    for (ptrdiff_t i = 0; i < whole; i++) grams[i] += grams[part * whole + i];
}

// out [N, K] = M - 2 D, where D = G upper + M lower; upper and lower [K, K].
template <class T>
void thin_result(const ThinShape<T>& s, const ThinWork<T>* team, const T* m, const T* g, const Panels<T>& upper,
                 const Panels<T>& lower, T* out, int threads) {
  const int N = s.N, K = s.K, last_columns = last_width<T>(K);
  const int pieces = ceil_div(N, kThinRows);
  share(threads, min_of(threads, pieces), [&](int task) {
    const ThinWork<T>& own = team[task];
    const Panels<T> mp = {own.m, s.row_stride}, gp = {own.g, s.row_stride}, d = {own.d, s.row_stride};
    for (int piece = task; piece < pieces; piece += threads) {
      const int rows = min_of(kThinRows, N - piece * kThinRows);
      const ptrdiff_t offset = static_cast<ptrdiff_t>(piece) * kThinRows * K;
      pack<T>(m + offset, K, 0, rows, 0, K, mp);
      pack<T>(g + offset, K, 0, rows, 0, K, gp);
      product<T>(gp, 0, rows, 0, K, upper, s.columns, last_columns, nullptr, T(1), d);
      product<T>(mp, 0, rows, 0, K, lower, s.columns, last_columns, &d, T(1), d);
      combine<T>(T(1), mp, T(-2), d, rows, K, out + offset, K);
    }
  });
}

template <class T>
struct ThinRoute {
  typedef ThinWork<T> Work;
  ThinShape<T> s;
  ThinRoute(int N, int K, int) : s{N, K} {}
  bool allocate(Work& work, bool matrix) const { return work.allocate(s, matrix); }
  // m, g, out [N, K].
  void step(const Work* team, const T* m, const T* g, double lr, T* out, int threads) const {
    constexpr int W = kWidth<T>;
    const int K = s.K;
    const Panels<T> y = {team[0].y, s.stride2};
    Panels<T> w = {team[0].w, s.stride2};
    thin_grams<T>(s, team, m, g, threads);
    const Grams<T> h = grams_of<T>(s, team[0].grams.get(), 0);

    // t is a power of two such that t G and M have about the same norm. Then t A = P' Q'^T with P' = [t G, M] and
    // Q' = [M, -t G], and the blocks of Q'^T P' have entries of similar size, as the choice of pivots requires.
    double gg = 0, mm = 0;
    for (int i = 0; i < K; i++) {
      gg += static_cast<double>(element<T>(h.gg, i, i));
      mm += static_cast<double>(element<T>(h.mm, i, i));
    }
    double t = 1;
    if (gg > 0 && mm > 0) {
      while (t * t * gg > 2 * mm && t > 1e-30) t /= 2;
      while (t * t * gg < mm / 2 && t < 1e30) t *= 2;
    }
    const double c = lr / 2 / t;
    // W0 = Q'^T M and Y = c Q'^T P'.
    double y_norm = 0, w_norm = 0;
    for (int i = 0; i < K; i++)
      for (int j = 0; j < K; j++) {
        const T m_m = i <= j ? element<T>(h.mm, i, j) : element<T>(h.mm, j, i);
        const T g_g = i <= j ? element<T>(h.gg, i, j) : element<T>(h.gg, j, i);
        const T top = m_m, bottom = static_cast<T>(-t) * element<T>(h.gm, i, j);
        element<T>(w, i, j) = top;
        element<T>(w, K + i, j) = bottom;
        const T y00 = static_cast<T>(c * t) * element<T>(h.gm, j, i), y01 = static_cast<T>(c) * top;
        const T y10 = static_cast<T>(-c * t * t) * g_g, y11 = static_cast<T>(c) * bottom;
        element<T>(y, i, j) = y00;
        element<T>(y, i, K + j) = y01;
        element<T>(y, K + i, j) = y10;
        element<T>(y, K + i, K + j) = y11;
        w_norm += static_cast<double>(top) * top + static_cast<double>(bottom) * bottom;
        y_norm += static_cast<double>(y00) * y00 + static_cast<double>(y01) * y01;
        y_norm += static_cast<double>(y10) * y10 + static_cast<double>(y11) * y11;
      }
    y_norm = __builtin_sqrt(y_norm);
    // Bounds the second term of the series, relative to M.
    const double first = 2 * __builtin_fabs(c) * __builtin_sqrt((t * t * gg + mm) * w_norm) * y_norm;
    const int last = last_width<T>(K);
    if (first > kSymmetricRemainder * kEpsilon<T> && first * y_norm <= kSkewRemainder * kEpsilon<T>) {
      const Panels<T> w2 = {team[0].w2, s.stride2};
      product<T>(y, 0, 2 * K, 0, 2 * K, w, s.columns, last, &w, T(-1), w2);
      w = w2;
    } else if (first > kSymmetricRemainder * kEpsilon<T>) {
      for (int i = 0; i < 2 * K; i++) element<T>(y, i, i) += T(1);
      const Lu<T> lu = {2 * K, y, team[0].swaps};
      factor<T>(lu, 1, threads);
      share(threads, min_of(threads, s.columns), [&](int task) {
        for (int q = task; q < s.columns; q += threads) solve<T>(lu, w.from(q), 1, q == s.columns - 1 ? last : W);
      });
    }
    // D = c P' W = G (c t W_upper) + M (c W_lower), with the upper and lower half of W, and M_new = M - 2 D.
    for (int q = 0; q < s.columns; q++)
      for (int i = 0; i < 2 * K; i++)
        for (int j = 0; j < W; j++) w.at(i, q)[j] *= static_cast<T>(i < K ? c * t : c);
    const Panels<T> lower = {w.p + static_cast<ptrdiff_t>(K) * W, w.stride};
    thin_result<T>(s, team, m, g, w, lower, out, threads);
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
