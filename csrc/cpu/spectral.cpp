// The parts of the spectral-norm projection: W^T W, whether a symmetric matrix is positive definite, and three passes
// over a matrix, in float64 where its own dtype would lose digits.
//
// The first two use panels (panels.h) and half the operations of a general product, M K^2 and K^3 / 3.
//
//     W^T W:      block (p, i) = (columns of panel p)^T . panel i, for p <= i. Blocks below the diagonal are copied.
//     Cholesky:   A = R^T R by rows of blocks of W x W, left-looking, in the upper half only:
//                     R(p, p)^T R(p, p) = A(p, p) - R(<p, p)^T R(<p, p)        one thread
//                     R(p, i) = R(p, p)^-T (A(p, i) - R(<p, p)^T R(<p, i))     p < i, divided among threads
//                 In exact arithmetic it exists if and only if A is positive definite. In floating point every R(p, i)
//                 is computed by products and substitutions alone. So R^T R differs from A by at most about
//                 (K + 4) u sqrt(a_ii a_jj), where u is the unit roundoff (Higham 2002, theorem 10.3, and three
//                 roundings for the reciprocals of pivots). With an inverse of the diagonal block this would not hold.
//
// Both factors of every product are read in storage order, the columns of a as scalars. Limit: the rate of the
// multiply-adds. A chunk of both panels stays in L1.
//
// The passes: |A - B|_F (rows in the dtype of W, their sum in float64), and W V and W - T V^T for few columns of V.
// Both are computed in float64, in registers and L1 only: a float64 copy of W would need five times the memory traffic.
//
// Each element is one chain in ascending order, apart from the sums of chunks. The bits do not depend on the number of
// threads.
#include "cpu/ops.h"
#include "cpu/panels.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kDepth = 256;     // of a chunk
constexpr int kPackRows = 128;  // that one item of packing covers

// Item `item` of `items` for work that decreases with the index. Every second round of items runs over the threads in
// reverse order, so that all threads get about the same work.
inline int there_and_back(int item, int items, int threads) {
  const int round = item / threads, first = round * threads, count = min_of(threads, items - first);
  return round % 2 ? first + count - 1 - (item - first) : item;
}

// out [columns, W] (+)= alpha (columns [0, columns) of panel a)^T . panel b, over `depth` rows; add may be null.
template <class T>
void transposed_product(const T* a, int columns, const T* b, int depth, const T* add, ptrdiff_t add_row, T alpha,
                        T* out, ptrdiff_t out_row) {
  const RowTiles split(columns);
  for (int i = 0, row = 0; i < split.tiles; row += split.count(i), i++)
    product_tile_for_rows<T, 2, true>(split.count(i))(a + row, 0, b, depth, add ? add + row * add_row : nullptr,
                                                      add_row, alpha, out + row * out_row, out_row);
}

template <class T>
bool gram_of(const SpectralArgs& args) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  const int M = static_cast<int>(args.M), K = static_cast<int>(args.K), blocks = ceil_div(K, W),
            threads = max_of(1, args.threads);
  const T* w = static_cast<const T*>(args.w);
  T* out = static_cast<T*>(args.out);
  const ptrdiff_t stride = static_cast<ptrdiff_t>(panel_rows<T>(M)) * W;
  Scratch<T> memory;
  if (!memory.allocate(stride * blocks, false)) return false;
  const Panels<T> panels = {memory, stride};
  share(threads, ceil_div(M, kPackRows),
        [&](int item) { pack<T>(w, K, item * kPackRows, min_of(kPackRows, M - item * kPackRows), 0, K, panels); });
  share(threads, blocks, [&](int item) {
    const int i = blocks - 1 - there_and_back(item, blocks, threads), width = min_of(W, K - i * W);
    alignas(64) T edge[W * W];  // where the matrix ends within a panel
    for (int k = 0; k < M; k += kDepth) {
      const int depth = min_of(kDepth, M - k);
      for (int p = 0; p <= i; p++) {
        T* block = out + static_cast<ptrdiff_t>(p) * W * K + i * W;
        const int columns = min_of(W, K - p * W);
        if (width == W) {
          transposed_product<T>(panels.at(k, p), columns, panels.at(k, i), depth, k > 0 ? block : nullptr, K, T(1),
                                block, K);
          continue;
        }
        transposed_product<T>(panels.at(k, p), columns, panels.at(k, i), depth, nullptr, 0, T(1), edge, W);
        for (int r = 0; r < columns; r++)
          for (int c = 0; c < width; c++)
            block[static_cast<ptrdiff_t>(r) * K + c] =
                (k > 0 ? block[static_cast<ptrdiff_t>(r) * K + c] : T(0)) + edge[r * W + c];
      }
    }
  });
  const int tiles = ceil_div(K, L);
  share(threads, tiles, [&](int item) {  // rows of blocks below the diagonal
    const int i = tiles - 1 - there_and_back(item, tiles, threads), rows = min_of(L, K - i * L);
    for (int j = 0; j <= i; j++) {
      const T* from = out + static_cast<ptrdiff_t>(j) * L * K + i * L;
      T* to = out + static_cast<ptrdiff_t>(i) * L * K + j * L;
      if (i == j || rows < L) {
        for (int r = 0; r < rows; r++)
          for (int c = 0; c < (i == j ? r : L); c++)
            to[static_cast<ptrdiff_t>(r) * K + c] = from[static_cast<ptrdiff_t>(c) * K + r];
        continue;
      }
      V<T> v[L];
      load_transposed<T>(from, K, v);
      ORTHOKERN_UNROLL for (int r = 0; r < L; r++) store(to + static_cast<ptrdiff_t>(r) * K, v[r]);
    }
  });
  return true;
}

// R(p, p) of a block [size, size] with rows of W, in place on and above the diagonal; what is below it is left
// undefined. False if there is none.
template <class T>
bool factor_block(T* a, int size) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  for (int k = 0; k < size; k++) {
    T* pivot_row = a + k * W;
    const T pivot = pivot_row[k];
    if (!(pivot > 0) || pivot - pivot != 0) return false;  // NaN and infinity too
    const T scale = static_cast<T>(1 / __builtin_sqrt(static_cast<double>(pivot)));
    const V<T> u0 = load(pivot_row) * scale, u1 = load(pivot_row + L) * scale;
    store(pivot_row, u0);
    store(pivot_row + L, u1);
    for (int r = k + 1; r < size; r++) {
      const T f = pivot_row[r];
      T* row = a + r * W;
      if (r < L) store(row, load(row) - f * u0);
      store(row + L, load(row + L) - f * u1);
    }
  }
  return true;
}

// b [size, W] = R^-T b for R [size, size] of factor_block; rows of W.
template <class T>
void substitute(const T* r, int size, T* b) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  for (int j = 0; j < size; j++) {
    const T scale = T(1) / r[j * W + j];
    const V<T> z0 = load(b + j * W) * scale, z1 = load(b + j * W + L) * scale;
    store(b + j * W, z0);
    store(b + j * W + L, z1);
    for (int i = j + 1; i < size; i++) {
      const T f = r[j * W + i];
      store(b + i * W, load(b + i * W) - f * z0);
      store(b + i * W + L, load(b + i * W + L) - f * z1);
    }
  }
}

template <class T>
bool definite(const SpectralArgs& args) {
  constexpr int W = kWidth<T>;
  const int K = static_cast<int>(args.K), blocks = ceil_div(K, W), threads = max_of(1, args.threads);
  const T* a = static_cast<const T*>(args.a);
  const T* diagonal = static_cast<const T*>(args.diagonal);
  const ptrdiff_t stride = static_cast<ptrdiff_t>(panel_rows<T>(K)) * W;
  Scratch<T> memory;
  if (!memory.allocate(stride * blocks, false)) return false;
  const Panels<T> r = {memory, stride};
  *args.definite = 0;
  share(threads, blocks, [&](int item) {
    const int p = there_and_back(item, blocks, threads);
    pack<T>(a, K, p * W, min_of(W, K - p * W), p * W, K - p * W, r.from(p));
    for (int j = 0; j < W && p * W + j < K; j++) r.at(p * W + j, p)[j] = diagonal[p * W + j];
  });
  for (int p = 0; p < blocks; p++) {
    const int size = min_of(W, K - p * W), above = p * W;
    T* own = r.at(above, p);
    if (above > 0) transposed_product<T>(r.at(0, p), size, r.at(0, p), above, own, W, T(-1), own, W);
    if (!factor_block<T>(own, size)) return true;
    share(threads, blocks - p - 1, [&](int item) {
      const int i = p + 1 + item;
      T* block = r.at(above, i);
      if (above > 0) transposed_product<T>(r.at(0, p), size, r.at(0, i), above, block, W, T(-1), block, W);
      substitute<T>(own, size, block);
    });
  }
  *args.definite = 1;
  return true;
}

constexpr int kPassRows = 32;  // that one item of a pass covers
constexpr int kPassColumns = 512;

// sums [rows]: of squares of a - b in each row; b may be null.
template <class T>
void squares_of_rows(const T* a, const T* b, int rows, int K, double* sums) {
  constexpr int L = kLanes<T>;
  for (int r = 0; r < rows; r++, a += K, b = b ? b + K : b) {
    V<T> acc[4] = {};
    int k = 0;
    for (; k + 4 * L <= K; k += 4 * L) {
      ORTHOKERN_UNROLL for (int i = 0; i < 4; i++) {
        const V<T> d = b ? load(a + k + i * L) - load(b + k + i * L) : load(a + k + i * L);
        acc[i] += d * d;
      }
    }
    alignas(64) T lanes[L];
    store(lanes, (acc[0] + acc[1]) + (acc[2] + acc[3]));
    double sum = 0;
    for (int i = 0; i < L; i++) sum += lanes[i];
    for (; k < K; k++) {
      const double d = static_cast<double>(a[k]) - (b ? static_cast<double>(b[k]) : 0.0);
      sum += d * d;
    }
    sums[r] = sum;
  }
}

template <class T>
bool distance_of(const SpectralArgs& args) {
  const int M = static_cast<int>(args.M), K = static_cast<int>(args.K);
  Scratch<double> sums;
  if (!sums.allocate(M, false)) return false;
  share(max_of(1, args.threads), ceil_div(M, kPassRows), [&](int item) {
    const int row = item * kPassRows;
    const T* b = static_cast<const T*>(args.other);
    const ptrdiff_t at = static_cast<ptrdiff_t>(row) * K;
    squares_of_rows<T>(static_cast<const T*>(args.w) + at, b ? b + at : nullptr, min_of(kPassRows, M - row), K,
                       sums + row);
  });
  double sum = 0;
  for (int r = 0; r < M; r++) sum += sums[r];
  *args.distance = __builtin_sqrt(sum);
  return true;
}

// A block of up to kPassBlock rows of W, float64. Each load of V is used for all of them.
constexpr int kPassBlock = 4;
// Not 4 KiB: with 4 KiB between rows, the processor mistakes a load from one row for one of a store to another.
constexpr int kPassStride = kPassColumns + 8;

typedef double WideBlock[kPassBlock][kPassStride];

// fn(row, rows, k, columns, block) for the blocks of W [M, K], columns [k, k + columns) of rows [row, row + rows); the
// block's other rows are 0.
template <class T, class Fn>
void for_wide_blocks(const SpectralArgs& args, const Fn& fn) {
  const int M = static_cast<int>(args.M), K = static_cast<int>(args.K);
  share(max_of(1, args.threads), ceil_div(M, kPassRows), [&](int item) {
    alignas(64) WideBlock block;
    const int end = min_of(M, (item + 1) * kPassRows);
    for (int row = item * kPassRows; row < end; row += kPassBlock) {
      const int rows = min_of(kPassBlock, end - row);
      for (int k = 0; k < K; k += kPassColumns) {
        const int columns = min_of(kPassColumns, K - k);
        const T* w = static_cast<const T*>(args.w) + static_cast<ptrdiff_t>(row) * K + k;
        for (int r = 0; r < rows; r++, w += K)
          for (int i = 0; i < columns; i++) block[r][i] = static_cast<double>(w[i]);
        for (int r = rows; r < kPassBlock; r++) memset(block[r], 0, columns * sizeof(double));
        fn(row, rows, k, columns, block);
      }
    }
  });
}

// image [M, S] = W V, v being V^T [S, K].
template <class T>
void image_of(const SpectralArgs& args) {
  constexpr int L = kLanes<double>;
  const int K = static_cast<int>(args.K), S = static_cast<int>(args.S);
  for_wide_blocks<T>(args, [&](int row, int rows, int k, int columns, const WideBlock& block) {
    const int whole = columns / L * L;
    for (int q = 0; q < S; q++) {
      const double* v = args.v_rows + static_cast<ptrdiff_t>(q) * K + k;
      V<double> acc[kPassBlock] = {};
      for (int i = 0; i < whole; i += L) {
        const V<double> x = load(v + i);
        ORTHOKERN_UNROLL for (int r = 0; r < kPassBlock; r++) acc[r] += load(block[r] + i) * x;
      }
      for (int r = 0; r < rows; r++) {
        double sum = 0;
        for (int i = 0; i < L; i++) sum += acc[r][i];
        for (int i = whole; i < columns; i++) sum += block[r][i] * v[i];
        double* to = args.image + static_cast<ptrdiff_t>(row + r) * S + q;
        *to = k > 0 ? *to + sum : sum;
      }
    }
  });
}

// out [M, K] = W - T V^T, rounded once; image being T [M, S], v V^T [S, K]. out may be W.
template <class T>
void subtract_of(const SpectralArgs& args) {
  constexpr int L = kLanes<double>;
  const int K = static_cast<int>(args.K), S = static_cast<int>(args.S);
  for_wide_blocks<T>(args, [&](int row, int rows, int k, int columns, WideBlock& block) {
    const int whole = columns / L * L;
    for (int q = 0; q < S; q++) {
      const double* v = args.v_rows + static_cast<ptrdiff_t>(q) * K + k;
      double f[kPassBlock];
      for (int r = 0; r < kPassBlock; r++) f[r] = r < rows ? args.image[static_cast<ptrdiff_t>(row + r) * S + q] : 0.0;
      for (int i = 0; i < whole; i += L) {
        const V<double> x = load(v + i);
        ORTHOKERN_UNROLL for (int r = 0; r < kPassBlock; r++) store(block[r] + i, load(block[r] + i) - f[r] * x);
      }
      for (int r = 0; r < rows; r++)
        for (int i = whole; i < columns; i++) block[r][i] -= f[r] * v[i];
    }
    T* out = static_cast<T*>(args.out) + static_cast<ptrdiff_t>(row) * K + k;
    for (int r = 0; r < rows; r++, out += K)
      for (int i = 0; i < columns; i++) out[i] = static_cast<T>(block[r][i]);
  });
}

// Another thread must save more than the few microseconds that waking it costs, in `is_definite` once for each row of
// blocks.
inline SpectralArgs with_useful_threads(const SpectralArgs& args, double flops) {
  SpectralArgs given = args;
  const double useful = flops / 4e6;
  if (useful < given.threads) given.threads = max_of(1, static_cast<int>(useful));
  return given;
}

}  // namespace

bool gram(const SpectralArgs& args) {
  FlushDenormals flush;
  const SpectralArgs given = with_useful_threads(args, static_cast<double>(args.M) * args.K * args.K);
  return args.dtype == kFloat64 ? gram_of<double>(given) : gram_of<float>(given);
}

bool is_definite(const SpectralArgs& args) {
  FlushDenormals flush;
  const SpectralArgs given = with_useful_threads(args, static_cast<double>(args.K) * args.K * args.K / 3);
  return args.dtype == kFloat64 ? definite<double>(given) : definite<float>(given);
}

bool distance(const SpectralArgs& args) {
  const SpectralArgs given = with_useful_threads(args, 20.0 * args.M * args.K);
  return args.dtype == kFloat64 ? distance_of<double>(given) : distance_of<float>(given);
}

bool wide_product(const SpectralArgs& args) {
  const SpectralArgs given = with_useful_threads(args, (10.0 + 4 * args.S) * args.M * args.K);
  args.dtype == kFloat64 ? image_of<double>(given) : image_of<float>(given);
  return true;
}

bool subtract_product(const SpectralArgs& args) {
  const SpectralArgs given = with_useful_threads(args, (20.0 + 4 * args.S) * args.M * args.K);
  args.dtype == kFloat64 ? subtract_of<double>(given) : subtract_of<float>(given);
  return true;
}

}  // namespace orthokern::ORTHOKERN_ISA
