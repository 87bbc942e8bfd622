// The register-blocked product that every CPU kernel here is made of, and its two storage forms.
//
// Blocked rows:  a matrix of R rows and C columns is stored as [ceil(C/L)][R][L], L lanes of a vector: column c of row r lies at
//                block(c / L) + r * L + c % L. Broadcasting an element and storing a vector of a row both need constant offsets only, and a
//                product's output is at once the next product's input.
// Panels:        a weight matrix of `depth` rows and `cols` columns is packed as panels of 2 L columns, each [depth][2 L] and contiguous;
//                a last panel of at most L columns is [depth][L]. Missing columns are zero.
//
//            panel  <- 2 L columns ->
//            +---------------------+
//   rows     |  b0  |  b1          |   per step of depth: 2 loads of weights, one broadcast a row, 2 fused multiply-adds a row
//   +----+   |      |              |
//   | a  | x |      |              | = MR x 2 accumulators, all in registers
//   +----+   +---------------------+
//
// Each output element is one chain of multiply-adds in ascending depth, whatever the tile it falls in: results do not depend on how rows
// are grouped. A call with few rows takes several panels at once, so that there are chains enough to hide the latency.
#pragma once

#include "cpu/simd.h"

namespace orthokern {
namespace ORTHOKERN_ISA {

constexpr int kMaxSegments = 3;

// One stretch of the depth: `depth` columns of a blocked matrix, blocks `block` elements apart, at its first row.
template <class T>
struct Segment {
  const T* a;
  ptrdiff_t block;
  int depth;
};

// Traffic with memory that rides along with a product, a few vectors after every stretch of its depth. In one go it would fill the few
// buffers that a core has for outstanding lines, and the multiply-adds would wait behind it; spread out it costs next to nothing.
//
// An errand is a grid of vectors, rows within blocks of columns: fetched ahead of their use, or copied to memory past the caches.
template <class T>
struct Errand {
  const T* from;
  T* to;  // null: fetch
  ptrdiff_t from_row, from_block, to_row, to_block;
  int rows, left, row, pace;  // left: vectors still to do, the next one in row `row`

  void run(int n) {
    if (n > left) n = left;
    left -= n;
    while (n > 0) {
      const int take = n < rows - row ? n : rows - row;
      if (to) {
        for (int i = 0; i < take; i++, from += from_row, to += to_row) store_stream(to, load(from));
      } else {
        for (int i = 0; i < take; i++, from += from_row) __builtin_prefetch(from, 0, 2);
      }
      row += take;
      n -= take;
      if (row < rows) return;
      row = 0;
      from += from_block - rows * from_row;
      if (to) to += to_block - rows * to_row;
    }
  }
};
template <class T>
class Errands {
 public:
  Errands() : count_(0) {}
  void fetch(const T* from, ptrdiff_t row, ptrdiff_t block, int rows, int blocks) { add({from, nullptr, row, block, 0, 0, rows, rows * blocks, 0, 0}); }
  void copy(const T* from, ptrdiff_t from_row, ptrdiff_t from_block, T* to, ptrdiff_t to_row, ptrdiff_t to_block, int rows, int blocks) {
    add({from, to, from_row, from_block, to_row, to_block, rows, rows * blocks, 0, 0});
  }
  // To be done with in so many stops.
  void set_pace(int stops) {
    for (int i = 0; i < count_; i++) list_[i].pace = (list_[i].left + stops - 1) / stops;
  }
  ORTHOKERN_INLINE void stop() {
    for (int i = 0; i < count_; i++)
      if (list_[i].left > 0) list_[i].run(list_[i].pace);
  }
  void finish() {
    for (int i = 0; i < count_; i++) list_[i].run(list_[i].left);
  }

 private:
  static constexpr int kMost = 8;
  void add(const Errand<T>& errand) {
    if (errand.left > 0) list_[count_++] = errand;
  }

  int count_;
  Errand<T> list_[kMost];
};

template <class T>
using TileKernel = void (*)(const Segment<T>* segments, int segment_count, const T* panel, ptrdiff_t panel_stride, T* out,
                            ptrdiff_t out_block, const T* prefetch, Errands<T>* errands);

// PANELS panels of two vectors, or (PANELS == 0) one panel of one vector.
template <class T, int MR, int PANELS, bool PREFETCH>
void tile_kernel(const Segment<T>* segments, int segment_count, const T* panel, ptrdiff_t panel_stride, T* out, ptrdiff_t out_block,
                 const T* prefetch, Errands<T>* errands) {
  constexpr int L = kLanes<T>;
  constexpr int W = PANELS == 0 ? 1 : 2;        // vectors of a panel row
  constexpr int NP = PANELS == 0 ? 1 : PANELS;  // panels
  V<T> acc[MR][NP * W];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int n = 0; n < NP * W; n++) acc[r][n] = V<T>{};
  const T* b = panel;
  const T* ahead = prefetch;
  for (int i = 0; i < segment_count; i++) {
    const T* a = segments[i].a;
    int left = segments[i].depth;
    while (left > 0) {
      const int count = left < L ? left : L;
      for (int j = 0; j < count; j++) {
        V<T> w[NP * W];
#pragma GCC unroll 16
        for (int n = 0; n < NP * W; n++) w[n] = load(b + (n / W) * panel_stride + (n % W) * L);
        if (PREFETCH) {
          __builtin_prefetch(ahead, 0, 3);
          __builtin_prefetch(ahead + L, 0, 3);
          ahead += W * L;
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          const T x = a[r * L + j];
#pragma GCC unroll 16
          for (int n = 0; n < NP * W; n++) acc[r][n] += w[n] * x;
        }
        b += W * L;
      }
      a += segments[i].block;
      left -= count;
      errands->stop();
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < NP * W; n++)
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) store(out + n * out_block + r * L, acc[r][n]);
}

template <class T, int PANELS, bool PREFETCH>
inline TileKernel<T> tile_kernel_for_rows(int rows) {
  constexpr int limit = PANELS <= 1 ? kMaxRows : PANELS == 2 ? kMaxRows / 2 : kMaxRows / 4;
#define ORTHOKERN_ROWS(m) \
  case m:                 \
    return tile_kernel<T, (m <= limit ? m : 1), PANELS, PREFETCH>;
  switch (rows) {
    ORTHOKERN_ROWS(1)
    ORTHOKERN_ROWS(2)
    ORTHOKERN_ROWS(3)
    ORTHOKERN_ROWS(4)
    ORTHOKERN_ROWS(5)
    ORTHOKERN_ROWS(6)
    ORTHOKERN_ROWS(7)
    ORTHOKERN_ROWS(8)
    ORTHOKERN_ROWS(9)
    ORTHOKERN_ROWS(10)
    ORTHOKERN_ROWS(11)
    ORTHOKERN_ROWS(12)
    ORTHOKERN_ROWS(13)
  }
#undef ORTHOKERN_ROWS
  return nullptr;
}

inline int round_up(int n, int m) { return (n + m - 1) / m * m; }

// A weight matrix [depth, cols] in panels.
template <class T>
struct Packed {
  Scratch<T> panels;
  int depth = 0;
  int cols = 0;

  static constexpr int kWidth = 2 * kLanes<T>;
  int panel_count() const { return (cols + kWidth - 1) / kWidth; }
  bool narrow(int p) const { return cols - p * kWidth <= kLanes<T>; }
  const T* panel(int p) const { return panels + static_cast<ptrdiff_t>(p) * kWidth * depth; }

  bool allocate(int depth_, int cols_) {
    depth = depth_;
    cols = cols_;
    return panels.allocate(static_cast<size_t>(panel_count()) * kWidth * depth, false);
  }
  // Fill rows [row0, row0 + rows) of panels [first, last) from w(row, col) = source[row * row_stride + col * col_stride] * scale[col] (scale may
  // be null).
  void fill(int first, int last, int row0, int rows, const T* source, ptrdiff_t row_stride, ptrdiff_t col_stride, const T* scale) {
    for (int p = first; p < last; p++) {
      const int width = narrow(p) ? kLanes<T> : kWidth;
      const int count = cols - p * kWidth < width ? cols - p * kWidth : width;
      T* to = panels + static_cast<ptrdiff_t>(p) * kWidth * depth + static_cast<ptrdiff_t>(row0) * width;
      const T* from = source + p * kWidth * col_stride;
      for (int r = 0; r < rows; r++) {
        for (int c = 0; c < count; c++)
          to[static_cast<ptrdiff_t>(r) * width + c] = from[r * row_stride + c * col_stride] * (scale ? scale[p * kWidth + c] : T(1));
        for (int c = count; c < width; c++) to[static_cast<ptrdiff_t>(r) * width + c] = 0;
      }
    }
  }
};

// out = a . w for blocked a (given by its segments) and blocked out, R rows; panels one after another, so that `after(first_block, last_block)`
// may finish those columns while they are in the nearest cache.
template <class T, class After>
ORTHOKERN_INLINE void multiply(const Segment<T>* segments, int segment_count, const Packed<T>& w, int rows, T* out, ptrdiff_t out_block,
                               Errands<T>* errands, const After& after) {
  constexpr int L = kLanes<T>;
  const int panels = w.panel_count();
  const ptrdiff_t stride = static_cast<ptrdiff_t>(Packed<T>::kWidth) * w.depth;
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  errands->set_pace((w.depth + L - 1) / L * tiles * panels);
  for (int p = 0; p < panels;) {
    const bool narrow = w.narrow(p);
    int take = 1;
    if (!narrow) {
      const int wide = panels - p - (w.narrow(panels - 1) ? 1 : 0);  // panels of full width from here on
      if (rows <= kMaxRows / 4 && wide >= 4) take = 4;
      else if (rows <= kMaxRows / 2 && wide >= 2) take = 2;
    }
    const T* panel = w.panel(p);
    const T* next = p + take < panels ? w.panel(p + take) : w.panel(0);
    for (int i = 0, row = 0; i < tiles; i++) {
      const int count = rows / tiles + (i < rows % tiles ? 1 : 0);
      Segment<T> at[kMaxSegments];
      for (int s = 0; s < segment_count; s++) at[s] = {segments[s].a + row * L, segments[s].block, segments[s].depth};
      TileKernel<T> kernel;
      if (narrow) kernel = tile_kernel_for_rows<T, 0, false>(count);
      else if (take == 4) kernel = tile_kernel_for_rows<T, 4, false>(count);
      else if (take == 2) kernel = tile_kernel_for_rows<T, 2, false>(count);
      else if (i == 0 && tiles > 1) kernel = tile_kernel_for_rows<T, 1, true>(count);
      else kernel = tile_kernel_for_rows<T, 1, false>(count);
      kernel(at, segment_count, panel, stride, out + 2 * p * out_block + row * L, out_block, next, errands);
      row += count;
    }
    after(2 * p, narrow ? 2 * p + 1 : 2 * (p + take));
    p += take;
  }
  errands->finish();
}
template <class T>
inline void multiply(const Segment<T>* segments, int segment_count, const Packed<T>& w, int rows, T* out, ptrdiff_t out_block) {
  Errands<T> none;
  multiply<T>(segments, segment_count, w, rows, out, out_block, &none, [](int, int) {});
}

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
