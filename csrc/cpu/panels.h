// Panel storage and its product, for the Cayley step and its LU.
//
// A matrix of R rows and C columns is stored as panels of W = 2 L columns (L lanes of a vector). Element (r, c) is at
//     panel(c / W) + r * W + c % W.
// The same form is used for a left factor (broadcast an element), a right factor (load W of a row) and a result. So a
// result can be either factor of the next product, and a factorization in place needs no repacking. The two forms of
// gemm.h would need a copy between any two products. The inner loop is the same.
//
//                      k                         W columns of the right factor
//            +-----------------+                 +-----+
//   MR rows  |  a, one element |        depth k  |  b  |   per step of depth: 2 loads, MR broadcasts and
//            +-----------------+                 |     |   2 MR fused multiply-adds
//                                                +-----+   result: MR x 2 vectors in registers,
//                                                          out = add + alpha * (a . b)
//
// On aarch64 the elements of `a` are lanes of vectors instead, see add_lane_products.
//
// Each element of a result is one chain of multiply-adds in ascending depth, in every tile and on every thread: results
// do not depend on how rows and panels are divided.
#pragma once

#include "cpu/tasks.h"
#include "cpu/transpose.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T>
constexpr int kWidth = 2 * kLanes<T>;  // W

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int min_of(int a, int b) { return a < b ? a : b; }
inline int max_of(int a, int b) { return a > b ? a : b; }

template <class T>
struct Panels {
  T* p;
  ptrdiff_t stride;  // elements from one panel to the next
  T* at(int row, int panel) const { return p + panel * stride + static_cast<ptrdiff_t>(row) * kWidth<T>; }
  Panels from(int panel) const { return {p + panel * stride, stride}; }
};

// Allocated rows of a panel of `rows` rows: whole vectors of rows for the transposes, and no power-of-two distance
// between panels, which would map all of them to the same few sets of L1.
template <class T>
inline int panel_rows(int rows) {
  return ceil_div(rows, kLanes<T>) * kLanes<T> + 4;
}

// a: MR rows (or, transposed, MR columns) of panels, b: [depth, W] of one panel, add and out: [MR, NV * L] with
// separate row distances. add may be null, and may be out.
template <class T>
using ProductTile = void (*)(const T* a, ptrdiff_t a_stride, const T* b, int depth, const T* add, ptrdiff_t add_row,
                             T alpha, T* out, ptrdiff_t out_row);

template <class T, int MR, int NV, bool TRANSPOSED>
void product_tile(const T* a, ptrdiff_t a_stride, const T* b, int depth, const T* add, ptrdiff_t add_row, T alpha,
                  T* out, ptrdiff_t out_row) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  V<T> acc[MR][NV];
  ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) acc[r][n] = V<T>{};
  while (depth > 0) {
    const int count = TRANSPOSED || depth < W ? depth : W;
    if (!TRANSPOSED && depth > W) {
      // The rows of the next panel are far away, and the hardware does not prefetch them. That costs 3 % if A comes
      // from L3.
      ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) {
        __builtin_prefetch(a + a_stride + r * W, 0, 3);
        __builtin_prefetch(a + a_stride + r * W + L, 0, 3);
      }
    }
    int j = 0;
    if constexpr (kLaneProducts && !TRANSPOSED)
      for (; j + L <= count; j += L, b += L * W) add_lane_products<T>(acc, a + j, W, b, W, 0);
    for (; j < count; j++) {
      V<T> w[NV];
      ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) w[n] = load(b + n * L);
      ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) {
        const T x = TRANSPOSED ? a[j * W + r] : a[r * W + j];
        ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) acc[r][n] += w[n] * x;
      }
      b += W;
    }
    a += a_stride;
    depth -= count;
  }
  if (add) {
    ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int n = 0; n < NV; n++)
        store(out + r * out_row + n * L, load(add + r * add_row + n * L) + alpha * acc[r][n]);
  } else {
    ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int n = 0; n < NV; n++)
        store(out + r * out_row + n * L, alpha * acc[r][n]);
  }
}

template <class T, int NV, bool TRANSPOSED, int MR = kMaxRows>
inline ProductTile<T> product_tile_for_rows(int rows) {
  if constexpr (MR > 1)
    if (rows < MR) return product_tile_for_rows<T, NV, TRANSPOSED, MR - 1>(rows);
  return product_tile<T, MR, NV, TRANSPOSED>;
}

// Splits `rows` into the fewest register tiles, of nearly equal height.
struct RowTiles {
  int rows, tiles;
  explicit RowTiles(int rows_) : rows(rows_), tiles(ceil_div(rows_, kMaxRows)) {}
  int count(int i) const { return rows / tiles + (i < rows % tiles ? 1 : 0); }
};

// One result of a product: rows [row0, row0 + rows) of `panels` panels, the last of them `last` columns wide.
//   out(panel q) = add(panel q) + alpha * a[rows, k0 .. k0 + depth) . b[k0 .. k0 + depth, panel q]
// where k0 is a multiple of W.
// out may be add. It may be a if the product has one panel of depth and one of width. It must not be b.
template <class T>
ORTHOKERN_INLINE void product(const Panels<T>& a, int row0, int rows, int k0, int depth, const Panels<T>& b, int panels,
                              int last, const Panels<T>* add, T alpha, const Panels<T>& out) {
  constexpr int W = kWidth<T>;
  const RowTiles split(rows);
  for (int i = 0, row = row0; i < split.tiles; row += split.count(i), i++) {
    const int count = split.count(i);
    const ProductTile<T> wide = product_tile_for_rows<T, 2, false>(count);
    for (int q = 0; q < panels; q++) {
      const bool narrow = q == panels - 1 && last <= kLanes<T>;
      const ProductTile<T> tile = narrow ? product_tile_for_rows<T, 1, false>(count) : wide;
      tile(a.at(row, k0 / W), a.stride, b.at(k0, q), depth, add ? add->at(row, q) : nullptr, W, alpha, out.at(row, q),
           W);
    }
  }
}

// Width of the last of the panels that hold `cols` columns.
template <class T>
inline int last_width(int cols) {
  return cols - (ceil_div(cols, kWidth<T>) - 1) * kWidth<T>;
}

// Panels of rows [row0, row0 + rows) and columns [col0, col0 + cols) of a row-major matrix: source [*, ld]. The columns
// that fill up the last panel are zero.
template <class T>
inline void pack(const T* source, ptrdiff_t ld, int row0, int rows, int col0, int cols, const Panels<T>& to) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  for (int c = 0; c < cols; c += W) {
    const T* from = source + row0 * ld + col0 + c;
    T* out = to.at(row0, c / W);
    const int width = min_of(W, cols - c);
    for (int r = 0; r < rows; r++, from += ld, out += W) {
      if (width == W) {
        store(out, load(from));
        store(out + L, load(from + L));
      } else {
        for (int j = 0; j < W; j++) out[j] = j < width ? from[j] : T(0);
      }
    }
  }
}

// Panels of the transpose: source [*, ld] row-major; its rows [row0, row0 + rows) become columns 0 .. rows of `to`, its
// `depth` columns rows.
template <class T>
inline void pack_transposed(const T* source, ptrdiff_t ld, int row0, int rows, int depth, const Panels<T>& to) {
  constexpr int L = kLanes<T>;
  constexpr int W = kWidth<T>;
  const int filled = ceil_div(rows, W) * W;
  for (int c = 0; c < filled; c += L) {
    const T* from = source + (row0 + c) * ld;
    T* out = to.at(0, c / W) + c % W;
    const int width = min_of(L, rows - c);
    int k = 0;
    if (width == L) {
      for (; k + L <= depth; k += L) {
        V<T> v[L];
        load_transposed<T>(from + k, ld, v);
        ORTHOKERN_UNROLL for (int i = 0; i < L; i++) store(out + (k + i) * W, v[i]);
      }
    }
    for (; k < depth; k++)
      for (int i = 0; i < L; i++) out[k * W + i] = i < width ? from[i * ld + k] : T(0);
  }
}

// The L x L block (i, j) of panels, in units of L rows and columns.
template <class T>
ORTHOKERN_INLINE T* block_at(const Panels<T>& a, int i, int j) {
  return a.at(i * kLanes<T>, j / 2) + (j % 2) * kLanes<T>;
}
template <class T>
ORTHOKERN_INLINE void load_block(const T* from, V<T> (&v)[kLanes<T>]) {
  ORTHOKERN_UNROLL for (int i = 0; i < kLanes<T>; i++) v[i] = load(from + i * kWidth<T>);
}
template <class T>
ORTHOKERN_INLINE void store_block(T* to, const V<T> (&v)[kLanes<T>]) {
  ORTHOKERN_UNROLL for (int i = 0; i < kLanes<T>; i++) store(to + i * kWidth<T>, v[i]);
}

}  // namespace orthokern::ORTHOKERN_ISA
