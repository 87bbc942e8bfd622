// The Cayley step, one matrix or a batch:
//
//     A = G M^T - M G^T,    X = lr/2 A (skew),    M_new = M - 2 (I + X)^-1 X M.
//
// Square route, 2 K >= N. Everything stays in panels (panels.h):
//     P = G M^T  ->  X = lr/2 (P - P^T), in place  ->  its norms choose how (I + X)^-1 X is taken, Note [Which series]  ->
//     column panels of M, a few at a time and in the cache:  D = (I + X)^-1 X M,  out = M - 2 D.
//
// Thin route, 2 K < N: nothing of size N x N. A = P Q^T with P = [G, M] and Q = [M, -G], both [N, 2K], hence
//     M_new = M - lr P (I + lr/2 Q^T P)^-1 (Q^T M) = 2 P (I + lr/2 Q^T P)^-1 [0; I] - M  (the last for large steps),
// and both Q^T P [2K, 2K] and Q^T M (its last K columns) are blocks of the Gram matrix of [G, M].
//
// Note [Which series]
//     (I + X)^-1 X = X - X^2 + X^3 - ...; with S = X^2 (symmetric: half a product) and Z = X - S = X (I - X):
//         first      X               4 N^3 flops in all       next term X^2: symmetric, so it changes |M| at every step: allowed only
//                                                              where 3000 steps of it stay below one step's rounding
//         second     Z               5 N^3                     next term X^3: skew, harmless for orthogonality
//         fourth     (I + S) Z       7 N^3                     next term X^5
//         LU         of I + X        6.7 N^3, at a lower rate  without pivoting while X is moderate (lu.h), with it otherwise
//         large                      4.7 N^3, at a lower rate  for an X that turns M as a whole by about 90 degrees or more: the correction
//                                                              is no smaller than M then, and M_new = 2 (I + X)^-1 M - M rounds least
//     How large the next term is, is bounded from X's and S's rows and Frobenius norms, never from M: the choice is exact mathematics for any
//     M, orthogonal or not, and depends on nothing but the numbers.
//
// Limit: the rate of the multiply-adds. Float32, 2 matrices on 2 cores with AVX-512, form `first`, 4 N^3 operations a matrix; share of
// torch's SGEMM rate (1536^3) beside it, best of many: 77 % at N = 64, 86 at 128, 96 at 256, 95 at 512, 91 at 1000. The products alone reach SGEMM's rate while
// their factors fit the second cache. What is left: at small N packing, transposes and one fork; at N = 1000 the left factor, which is
// read from the third cache once for each group of panels.
//
// Rounding: every form but `large` rounds against the small correction, never against M, but for the one last subtraction.
//
// Threads: with at least one matrix for each thread a thread keeps a matrix to itself; otherwise rows and panels of a matrix are shared out.
// The bits are the same either way and for any number of threads.
#include "cpu/cayley.h"

#include "cpu/lu.h"

namespace orthokern {
namespace ORTHOKERN_ISA {
namespace {

template <class T>
struct Epsilon;
template <>
struct Epsilon<float> {
  static constexpr double value = 1.2e-7;
};
template <>
struct Epsilon<double> {
  static constexpr double value = 2.2e-16;
};

// Bounds on what a series may leave out, relative to M.
constexpr double kSkewRemainder = 1.0 / 32;        // of the rounding unit
constexpr double kSymmetricRemainder = 1.0 / 2048;  // the same, where it adds up over the steps
// Up to this Frobenius norm of X, LU without pivoting loses nothing against LU with it.
constexpr double kNoPivotNorm = 4;
// From this root mean square of X's singular values on, M_new = 2 (I + X)^-1 M - M has the smaller error and drift (measured, N = 128).
constexpr double kLargeTurn = 0.75;
// The same for a thin M, from the root mean square of c Q'^T P' (see thin_step).
constexpr double kLargeThinTurn = 1.5;

inline double square_root(double x) { return __builtin_sqrt(x); }

enum Form { kFirst, kSecond, kFourth, kLu, kLarge };

struct Norms {
  double frobenius, largest_row;
};

// What one matrix needs on the square route.
template <class T>
struct SquareWork {
  Panels<T> x;     // [N, N]: P, then X, then Z
  Panels<T> s;     // [N, N]: the panels of G, then S or the LU factors
  T* inverses;     // [blocks][W][W]: of diagonal blocks
  double* sums;    // [N]: squared norms of rows
  int* swaps;      // [N]
};
// What one thread needs.
template <class T>
struct GroupWork {
  T* m;      // panels of M or M^T, [N, group * W]
  T* d;      // panels of D, the same
  T* tile;   // [kMaxRows, W]
};

// A matrix in work and the thread that works on it.
template <class Matrix, class Thread>
struct Slot {
  Matrix matrix;
  Thread thread;
};

struct SquareShape {
  int N, K;
  int blocks;        // panels of N columns
  int columns;       // panels of K columns
  int rows;          // rows given to a panel
  int group;         // panels of M that a thread takes through the cache at once
  int lu_group;      // panels of an [N, N] matrix that share one pass over it: more than one where it outgrows the cache
  ptrdiff_t stride;  // elements from a panel to the next
};

template <class T>
SquareShape square_shape(int N, int K, int threads) {
  constexpr int W = kWidth<T>;
  SquareShape s;
  s.N = N;
  s.K = K;
  s.blocks = ceil_div(N, W);
  s.columns = ceil_div(K, W);
  s.rows = panel_rows<T>(N);
  s.stride = static_cast<ptrdiff_t>(s.rows) * W;
  const int cached = static_cast<int>((512 << 10) / (s.stride * sizeof(T)));  // two such groups and what streams past: a share of L2
  const int groups = max_of(ceil_div(s.blocks, max_of(cached, 1)), min_of(threads, s.columns));
  s.group = ceil_div(s.blocks, groups);
  s.lu_group = s.stride * sizeof(T) * s.blocks > (1200 << 10) ? max_of(1, 128 / W) : 1;
  return s;
}

// x [N, N] = scale (x - x^T), block by block with its mirror.
template <class T>
void make_skew(const Panels<T>& x, int N, T scale, int threads) {
  constexpr int L = kLanes<T>;
  const int blocks = ceil_div(N, L);
  share(threads, blocks, [&](int i) {
    for (int j = i; j < blocks; j++) {
      V<T> a[L], b[L];
      load_transposed<T>(block_at(x, j, i), kWidth<T>, b);
      load_block<T>(block_at(x, i, j), a);
#pragma GCC unroll 16
      for (int r = 0; r < L; r++) a[r] = scale * (a[r] - b[r]);
      store_block<T>(block_at(x, i, j), a);
      if (j == i) continue;
      load_transposed<T>(block_at(x, i, j), kWidth<T>, b);
#pragma GCC unroll 16
      for (int r = 0; r < L; r++) b[r] = -b[r];
      store_block<T>(block_at(x, j, i), b);
    }
  });
}

// Copies the blocks above the diagonal of s [N, N] below it.
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
#pragma GCC unroll 16
    for (int r = 0; r < L; r++) acc[r] = V<T>{};
    for (int j = 0; j < blocks; j++) {
      const T* from = block_at(x, i, j);
#pragma GCC unroll 16
      for (int r = 0; r < L; r++) {
        const V<T> v = load(from + r * kWidth<T>);
        acc[r] += v * v;
      }
    }
    alignas(64) T rows[L * L];
    for (int r = 0; r < L; r++) store(rows + r * L, acc[r]);
    load_transposed<T>(rows, L, acc);
    V<T> sum = acc[0];
    for (int r = 1; r < L; r++) sum += acc[r];
    for (int r = 0; r < L && i * L + r < N; r++) sums[i * L + r] = static_cast<double>(sum[r]);
  });
  double total = 0, largest = 0;
  for (int r = 0; r < N; r++) {
    total += sums[r];
    if (sums[r] > largest) largest = sums[r];
  }
  return {square_root(total), square_root(largest)};
}

// s = x^2 for x [N, N]: the tiles of rows and panels that reach above the diagonal, then their mirror images. group: panels that share one
// pass over x.
template <class T>
void square_skew(const Panels<T>& x, int N, int group, const Panels<T>& s, int threads) {
  constexpr int W = kWidth<T>;
  const int blocks = ceil_div(N, W), items = ceil_div(blocks, group);
  share(threads, items, [&](int i) {
    const int first = (items - 1 - i) * group, end = min_of(first + group, blocks);  // the longest panels first
    const RowTiles split(min_of(end * W, N));
    for (int j = 0, row = 0; j < split.tiles; row += split.count(j), j++) {
      const int from = max_of(first, row / W);
      product<T>(x, row, split.count(j), 0, N, x.from(from), end - from, min_of(W, N - (end - 1) * W), nullptr, T(1), s.from(from));
    }
  });
  mirror<T>(s, N, threads);
}

// Chooses the form for x = X and prepares it. kSecond: x = Z; kFourth: x = Z, s = S; kLu and kLarge: x = X, s = the factors of I + X.
template <class T>
Form prepare(const SquareShape& shape, const SquareWork<T>& w, Lu<T>* lu, int threads) {
  constexpr int W = kWidth<T>;
  const int N = shape.N;
  const double skew_limit = kSkewRemainder * Epsilon<T>::value;
  const Norms x = norms<T>(w.x, N, w.sums, threads);
  if (2 * x.largest_row * x.frobenius <= kSymmetricRemainder * Epsilon<T>::value) return kFirst;
  // The least that S's norms can be, given X's: rows of norm |X|^2 / N, and |S|_F >= |X|^2 / sqrt(N). If even these leave too much, S is not
  // worth forming.
  const double least_row = x.frobenius * x.frobenius / N, least_norm = x.frobenius / square_root(square_root(N));
  if (2 * least_row * least_norm * least_norm * least_norm <= skew_limit) {
    square_skew<T>(w.x, N, shape.lu_group, w.s, threads);
    const Norms s = norms<T>(w.s, N, w.sums, threads);
    const double bound = square_root(s.frobenius);  // |X| <= |S|^(1/2)
    const bool second = 2 * s.largest_row * bound <= skew_limit;
    if (second || 2 * s.largest_row * bound * bound * bound <= skew_limit) {
      share(threads, shape.blocks, [&](int p) {
        T* z = w.x.at(0, p);
        const T* square = w.s.at(0, p);
        for (int i = 0; i < N * W; i += kLanes<T>) store(z + i, load(z + i) - load(square + i));
      });
      return second ? kSecond : kFourth;
    }
  }
  share(threads, shape.blocks, [&](int p) {
    memcpy(w.s.at(0, p), w.x.at(0, p), static_cast<size_t>(N) * W * sizeof(T));
    for (int c = 0; c < W && p * W + c < N; c++) w.s.at(p * W + c, p)[c] = T(1);
  });
  const bool pivoting = !(x.frobenius <= kNoPivotNorm);  // also where it is not a number
  *lu = {N, w.s, w.inverses, pivoting ? w.swaps : nullptr};
  factor<T>(*lu, shape.lu_group, threads);
  return x.frobenius > kLargeTurn * square_root(N) ? kLarge : kLu;
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

// out [N, cols], rows K apart: m - 2 x . m for x [N, N] and panels m [N, cols]; scratch [kMaxRows, W].
template <class T>
void subtract_product(const Panels<T>& x, const Panels<T>& m, int N, int cols, T* scratch, T* out, ptrdiff_t K) {
  constexpr int W = kWidth<T>;
  const RowTiles split(N);
  for (int i = 0, row = 0; i < split.tiles; row += split.count(i), i++) {
    const int count = split.count(i);
    const ProductTile<T> tile = product_tile_for_rows<T, 2, false>(count);
    T* to = out + row * K;
    int c = 0;
    for (; c + W <= cols; c += W) tile(x.at(row, 0), x.stride, m.at(0, c / W), N, m.at(row, c / W), W, T(-2), to + c, K);
    if (c == cols) continue;
    const int left = cols - c;
    const ProductTile<T> rest = left <= kLanes<T> ? product_tile_for_rows<T, 1, false>(count) : tile;
    rest(x.at(row, 0), x.stride, m.at(0, c / W), N, m.at(row, c / W), W, T(-2), scratch, W);
    for (int r = 0; r < count; r++)
      for (int j = 0; j < left; j++) to[r * K + c + j] = scratch[r * W + j];
  }
}

// Columns [col0, col0 + cols) of the step: m, out [N, K] row-major.
template <class T>
void finish_group(const SquareShape& shape, const SquareWork<T>& w, Form form, const Lu<T>& lu, const GroupWork<T>& g, const T* m, int col0,
                  int cols, T* out) {
  constexpr int W = kWidth<T>;
  const int N = shape.N, K = shape.K;
  const int panels = ceil_div(cols, W), last = last_width<T>(cols);
  Panels<T> mp = {g.m, shape.stride}, d = {g.d, shape.stride};
  pack<T>(m, K, 0, N, col0, cols, mp);
  if (form == kFirst || form == kSecond) return subtract_product<T>(w.x, mp, N, cols, g.tile, out + col0, K);
  if (form == kLarge) pack<T>(m, K, 0, N, col0, cols, d);
  else product<T>(w.x, 0, N, 0, N, mp, panels, last, nullptr, T(1), d);
  if (form == kLu || form == kLarge) solve<T>(lu, d, panels, last);
  if (form == kFourth) {
    product<T>(w.s, 0, N, 0, N, d, panels, last, &d, T(1), mp);  // D = Z M + S Z M takes M's place,
    pack<T>(m, K, 0, N, col0, cols, d);                          // and M that of Z M
    const Panels<T> swap = mp;
    mp = d;
    d = swap;
  }
  if (form == kLarge) combine<T>(T(-1), mp, T(2), d, N, cols, out + col0, K);
  else combine<T>(T(1), mp, T(-2), d, N, cols, out + col0, K);
}

// m, g, out [N, K].
template <class T>
void square_step(const SquareShape& shape, const SquareWork<T>& w, const Slot<SquareWork<T>, GroupWork<T>>* slots, const T* m, const T* g,
                 double lr, T* out, int threads) {
  constexpr int W = kWidth<T>;
  const int N = shape.N, K = shape.K;
  share(threads, ceil_div(N, kRowsPerItem), [&](int t) {
    const int row = t * kRowsPerItem;
    pack<T>(g, K, row, min_of(kRowsPerItem, N - row), 0, K, w.s);
  });
  // No product writes the rows that fill up the last block of a transpose.
  for (int p = 0; p < shape.blocks; p++) memset(w.x.at(N, p), 0, static_cast<size_t>(shape.rows - N) * W * sizeof(T));
  const int p_groups = ceil_div(shape.blocks, shape.group);
  share(threads, min_of(threads, p_groups), [&](int t) {
    for (int q = t; q < p_groups; q += threads) {
      const int first = q * shape.group * W, cols = min_of(shape.group * W, N - first);
      const Panels<T> mt = {slots[t].thread.m, shape.stride};
      pack_transposed<T>(m, K, first, cols, K, mt);
      product<T>(w.s, 0, N, 0, K, mt, ceil_div(cols, W), last_width<T>(cols), nullptr, T(1), w.x.from(q * shape.group));
    }
  });
  make_skew<T>(w.x, N, static_cast<T>(lr / 2), threads);
  Lu<T> lu = {};
  const Form form = prepare<T>(shape, w, &lu, threads);
  const int m_groups = ceil_div(shape.columns, shape.group);
  share(threads, min_of(threads, m_groups), [&](int t) {
    for (int q = t; q < m_groups; q += threads) {
      const int first = q * shape.group * W;
      finish_group<T>(shape, w, form, lu, slots[t].thread, m, first, min_of(shape.group * W, K - first), out);
    }
  });
}

template <class T>
struct SquareRoute {
  typedef SquareWork<T> Matrix;
  typedef GroupWork<T> Thread;
  SquareShape own, shared;
  SquareRoute(int N, int K, int threads) : own(square_shape<T>(N, K, 1)), shared(square_shape<T>(N, K, threads)) {}
  void take(Carver& from, Matrix* matrix) const {
    constexpr int W = kWidth<T>;
    const size_t whole = own.stride * own.blocks;
    matrix->x = {from.take<T>(whole), own.stride};
    matrix->s = {from.take<T>(whole), own.stride};
    matrix->inverses = from.take<T>(static_cast<size_t>(own.blocks) * W * W);
    matrix->sums = from.take<double>(own.N);
    matrix->swaps = from.take<int>(own.N);
  }
  void take(Carver& from, Thread* thread) const {
    thread->m = from.take<T>(own.stride * own.group);
    thread->d = from.take<T>(own.stride * own.group);
    thread->tile = from.take<T>(kMaxRows * kWidth<T>);
  }
  void step(const Matrix& work, const Slot<Matrix, Thread>* slots, const T* m, const T* g, double lr, T* out, int threads) const {
    square_step<T>(threads > 1 ? shared : own, work, slots, m, g, lr, out, threads);
  }
};

// The thin route.

constexpr int kThinRows = 256;  // rows that pass through the cache together
constexpr int kThinParts = 32;  // at most so many partial Gram matrices

struct ThinShape {
  int N, K;
  int columns;         // panels of K columns
  int blocks;          // panels of 2 K columns
  ptrdiff_t stride;    // of panels with K rows
  ptrdiff_t stride2;   // of panels with 2 K rows
  ptrdiff_t row_stride;  // of panels with kThinRows rows
  int parts, part_rows;
};

// The three Gram matrices, each [K, K].
template <class T>
struct Grams {
  Panels<T> gg, gm, mm;  // G^T G and M^T M: only their upper triangle; G^T M
};

template <class T>
struct ThinMatrix {
  T* grams;      // [parts][3][columns][stride]
  Panels<T> y;   // [2 K, 2 K]: lr/2 Q^T P, then the LU factors of I + it
  Panels<T> w;   // [2 K, K]
  Panels<T> w2;  // [2 K, K]
  int* swaps;    // [2 K]
};
template <class T>
struct ThinThread {
  T *m, *g, *d;  // panels [kThinRows, K]
};

template <class T>
ORTHOKERN_INLINE T& element(const Panels<T>& a, int row, int col) {
  return a.at(row, col / kWidth<T>)[col % kWidth<T>];
}

template <class T>
Grams<T> grams_of(const ThinShape& s, T* grams, int part) {
  const ptrdiff_t whole = s.stride * s.columns;
  T* p = grams + part * 3 * whole;
  return {{p, s.stride}, {p + whole, s.stride}, {p + 2 * whole, s.stride}};
}

// out [K, K] = (add ? out : 0) + a^T b for a, b [rows, K]; upper: nothing below the diagonal blocks.
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
        const ProductTile<T> tile = narrow ? product_tile_for_rows<T, 1, true>(count) : product_tile_for_rows<T, 2, true>(count);
        tile(a.at(0, i) + row, 0, b.at(0, q), rows, add ? to : nullptr, W, T(1), to, W);
      }
  }
}

// m, g, out [N, K].
template <class T>
void thin_step(const ThinShape& s, const ThinMatrix<T>& work, const Slot<ThinMatrix<T>, ThinThread<T>>* slots, const T* m, const T* g,
               double lr, T* out, int threads) {
  constexpr int W = kWidth<T>;
  const int N = s.N, K = s.K;
  share(threads, min_of(threads, s.parts), [&](int t) {
    const ThinThread<T>& own = slots[t].thread;
    const Panels<T> mp = {own.m, s.row_stride}, gp = {own.g, s.row_stride};
    for (int part = t; part < s.parts; part += threads) {
      const Grams<T> h = grams_of<T>(s, work.grams, part);
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
  const Grams<T> h = grams_of<T>(s, work.grams, 0);
  const ptrdiff_t whole = 3 * s.stride * s.columns;
  for (int part = 1; part < s.parts; part++)
    for (ptrdiff_t i = 0; i < whole; i++) work.grams[i] += work.grams[part * whole + i];

  // A power of two t that makes t G about as large as M: with P' = [t G, M] and Q' = [M, -t G], t A = P' Q'^T, the blocks of Q'^T P' are of
  // one size and pivots are chosen among equals.
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
      element<T>(work.w, i, j) = top;
      element<T>(work.w, K + i, j) = bottom;
      const T y00 = static_cast<T>(c * t) * element<T>(h.gm, j, i), y01 = static_cast<T>(c) * top;
      const T y10 = static_cast<T>(-c * t * t) * g_g, y11 = static_cast<T>(c) * bottom;
      element<T>(work.y, i, j) = y00;
      element<T>(work.y, i, K + j) = y01;
      element<T>(work.y, K + i, j) = y10;
      element<T>(work.y, K + i, K + j) = y11;
      w_norm += static_cast<double>(top) * top + static_cast<double>(bottom) * bottom;
      y_norm += static_cast<double>(y00) * y00 + static_cast<double>(y01) * y01;
      y_norm += static_cast<double>(y10) * y10 + static_cast<double>(y11) * y11;
    }
  y_norm = square_root(y_norm);
  // Bounds the second term of the series, relative to M.
  const double first = 2 * __builtin_fabs(c) * square_root((t * t * gg + mm) * w_norm) * y_norm;
  const int last = last_width<T>(K);
  Panels<T> w = work.w;
  bool large = false;
  if (first <= kSymmetricRemainder * Epsilon<T>::value) {
  } else if (first * y_norm <= kSkewRemainder * Epsilon<T>::value) {
    product<T>(work.y, 0, 2 * K, 0, 2 * K, w, s.columns, last, &w, T(-1), work.w2);
    w = work.w2;
  } else {
    large = y_norm > kLargeThinTurn * square_root(2.0 * K);
    if (large)
      for (int q = 0; q < s.columns; q++)
        for (int i = 0; i < 2 * K; i++)
          for (int j = 0; j < W; j++) w.at(i, q)[j] = i == K + q * W + j ? T(1) : T(0);
    for (int i = 0; i < 2 * K; i++) element<T>(work.y, i, i) += T(1);
    const Lu<T> lu = {2 * K, work.y, nullptr, work.swaps};
    factor<T>(lu, 1, threads);
    share(threads, min_of(threads, s.columns), [&](int task) {
      for (int q = task; q < s.columns; q += threads) solve<T>(lu, w.from(q), 1, q == s.columns - 1 ? last : W);
    });
  }
  // D = c P' W = G (c t W's upper half) + M (c W's lower half), and M_new = M - 2 D; if large, D = P' W and M_new = 2 D - M.
  const double scale = large ? 1 : c;
  for (int q = 0; q < s.columns; q++)
    for (int i = 0; i < 2 * K; i++)
      for (int j = 0; j < W; j++) w.at(i, q)[j] *= static_cast<T>(i < K ? scale * t : scale);
  const Panels<T> lower = {w.p + static_cast<ptrdiff_t>(K) * W, w.stride};
  const int pieces = ceil_div(N, kThinRows);
  share(threads, min_of(threads, pieces), [&](int task) {
    const ThinThread<T>& own = slots[task].thread;
    const Panels<T> mp = {own.m, s.row_stride}, gp = {own.g, s.row_stride}, d = {own.d, s.row_stride};
    for (int piece = task; piece < pieces; piece += threads) {
      const int rows = min_of(kThinRows, N - piece * kThinRows);
      const ptrdiff_t offset = static_cast<ptrdiff_t>(piece) * kThinRows * K;
      pack<T>(m + offset, K, 0, rows, 0, K, mp);
      pack<T>(g + offset, K, 0, rows, 0, K, gp);
      product<T>(gp, 0, rows, 0, K, w, s.columns, last, nullptr, T(1), d);
      product<T>(mp, 0, rows, 0, K, lower, s.columns, last, &d, T(1), d);
      combine<T>(large ? T(-1) : T(1), mp, large ? T(2) : T(-2), d, rows, K, out + offset, K);
    }
  });
}

template <class T>
struct ThinRoute {
  typedef ThinMatrix<T> Matrix;
  typedef ThinThread<T> Thread;
  ThinShape s;
  ThinRoute(int N, int K, int) {
    constexpr int W = kWidth<T>;
    s.N = N;
    s.K = K;
    s.columns = ceil_div(K, W);
    s.blocks = ceil_div(2 * K, W);
    s.stride = static_cast<ptrdiff_t>(panel_rows<T>(K)) * W;
    s.stride2 = static_cast<ptrdiff_t>(panel_rows<T>(2 * K)) * W;
    s.row_stride = static_cast<ptrdiff_t>(panel_rows<T>(kThinRows)) * W;
    // Parts of their own for threads, but no more than take about the memory of M and G.
    s.parts = max_of(1, min_of(min_of(kThinParts, ceil_div(N, kThinRows)), 2 * N / (3 * K)));
    s.part_rows = ceil_div(N, s.parts);
    s.parts = ceil_div(N, s.part_rows);
  }
  void take(Carver& from, Matrix* matrix) const {
    matrix->grams = from.take<T>(s.parts * 3 * s.columns * s.stride);
    matrix->y = {from.take<T>(s.blocks * s.stride2), s.stride2};
    matrix->w = {from.take<T>(s.columns * s.stride2), s.stride2};
    matrix->w2 = {from.take<T>(s.columns * s.stride2), s.stride2};
    matrix->swaps = from.take<int>(2 * s.K);
  }
  void take(Carver& from, Thread* thread) const {
    thread->m = from.take<T>(s.columns * s.row_stride);
    thread->g = from.take<T>(s.columns * s.row_stride);
    thread->d = from.take<T>(s.columns * s.row_stride);
  }
  void step(const Matrix& work, const Slot<Matrix, Thread>* slots, const T* m, const T* g, double lr, T* out, int threads) const {
    thin_step<T>(s, work, slots, m, g, lr, out, threads);
  }
};

// Memory of `count` owners, in allocations of their own: the C library keeps what is freed in moderate pieces for the next call, and returns
// larger ones to the system, which then has to clear all of it again at every step.
class MemoryList {
 public:
  MemoryList() : list_(nullptr), count_(0) {}
  ~MemoryList() {
    for (int i = 0; i < count_; i++) free(list_[i]);
    free(list_);
  }
  MemoryList(const MemoryList&) = delete;
  MemoryList& operator=(const MemoryList&) = delete;
  bool start(int count) {
    list_ = static_cast<void**>(calloc(count, sizeof(void*)));
    if (list_) count_ = count;
    return list_ != nullptr;
  }
  char* allocate(int i, size_t bytes) { return posix_memalign(&list_[i], 64, bytes) == 0 ? static_cast<char*>(list_[i]) : nullptr; }

 private:
  void** list_;
  int count_;
};

template <class T, template <class> class RouteOf>
bool batch(const CayleyArgs& args, int threads, bool cooperate) {
  typedef RouteOf<T> Route;
  typedef Slot<typename Route::Matrix, typename Route::Thread> Work;
  const Route route(static_cast<int>(args.N), static_cast<int>(args.K), threads);
  // As many matrices as fill all threads evenly keep to one thread each; the rest share all of them if that pays.
  const int64_t alone = cooperate ? args.batch / threads * threads : args.batch;
  Scratch<Work> slots;
  MemoryList memory;
  if (!slots.allocate(threads) || !memory.start(threads)) return false;
  for (int t = 0; t < threads; t++) {
    char* base = nullptr;
    for (int pass = 0; pass < 2; pass++) {
      Carver carver(base);
      if (t == 0 || alone) route.take(carver, &slots[t].matrix);
      route.take(carver, &slots[t].thread);
      if (pass == 0 && !(base = memory.allocate(t, carver.used()))) return false;
    }
  }
  const ptrdiff_t size = static_cast<ptrdiff_t>(args.N) * args.K;
  const auto step = [&](int64_t i, int t, int team) {
    const T* m = static_cast<const T*>(args.m) + i * size;
    T* out = static_cast<T*>(args.out) + i * size;
    if (args.lr[i] == 0) memcpy(out, m, size * sizeof(T));
    else route.step(slots[t].matrix, slots + t, m, static_cast<const T*>(args.g) + i * size, args.lr[i], out, team);
  };
  share(threads, alone ? threads : 0, [&](int t) {
    for (int64_t i = t; i < alone; i += threads) step(i, t, 1);
  });
  for (int64_t i = alone; i < args.batch; i++) step(i, 0, threads);
  return true;
}

}  // namespace

bool cayley(const CayleyArgs& args) {
  if (args.batch <= 0 || args.N <= 0 || args.K <= 0) return true;
  FlushDenormals flush;
  const bool thin = 2 * args.K < args.N;
  // A thread more has to save more than the microseconds that waking it takes: once for a batch of matrices, some ten times for a matrix
  // that is shared.
  const double flops = static_cast<double>(args.N) * args.K * (thin ? 10 * args.K : 4 * args.N);
  const bool cooperate = flops > 1.6e7;
  double useful = cooperate ? flops / 4e6 * args.batch : flops / 2e5 * args.batch;
  if (!cooperate && useful > args.batch) useful = args.batch;
  const int threads = useful < args.threads ? max_of(1, static_cast<int>(useful)) : max_of(1, args.threads);
  if (args.dtype == 0) return thin ? batch<float, ThinRoute>(args, threads, cooperate) : batch<float, SquareRoute>(args, threads, cooperate);
  return thin ? batch<double, ThinRoute>(args, threads, cooperate) : batch<double, SquareRoute>(args, threads, cooperate);
}

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
