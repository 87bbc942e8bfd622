// The factors of the products of gemm.h and tiles.h in their two storage forms, and memory transfers during a product.
//
// Blocked rows:  a matrix of R rows and C columns is stored as [ceil(C/L)][R][L], with L lanes of a vector. Column c of
//                row r is at
//                    block(c / L) + r * L + c % L.
//                Broadcasting an element and storing a vector of a row both need constant offsets only, and the output
//                of a product can be the input of the next one.
// Panels:        a weight matrix of `depth` rows and `cols` columns is packed as panels of 2 L columns, each
//                [depth][2 L] and contiguous. A last panel of at most L columns is [depth][L]. Missing columns are 0.
#pragma once

#include "cpu/pairs.h"
#include "cpu/tasks.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int kMaxSegments = 4;

// One segment of the depth: `depth` columns of a blocked matrix with blocks `block` elements apart, at its first row.
template <class T>
struct Segment {
  const T* a;
  ptrdiff_t block;
  int depth;
};

// Memory transfers during a product: a few vectors after every L steps of its depth. All at once they would fill the
// few buffers that a core has for outstanding cache lines, and the multiply-adds would wait for them. Spread over the
// product, they take almost no time.
//
// A transfer is a grid of vectors, rows within blocks of columns. It is a prefetch, or a copy with streaming stores.
template <class T>
struct Transfer {
  const T* from;
  T* to;  // null: prefetch
  ptrdiff_t from_row, from_block, to_row, to_block;
  int rows, left, row, rate;  // left: vectors still to do, the next one in row `row`

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
// The transfers that one product performs.
template <class T>
class Transfers {
 public:
  Transfers() : count_(0) {}
  // row, block: elements from one row, and from one block of columns, to the next.
  void prefetch(const T* from, ptrdiff_t row, ptrdiff_t block, int rows, int blocks) {
    add({from, nullptr, row, block, 0, 0, rows, rows * blocks, 0, 0});
  }
  void stream(const T* from, ptrdiff_t from_row, ptrdiff_t from_block, T* to, ptrdiff_t to_row, ptrdiff_t to_block,
              int rows, int blocks) {
    add({from, to, from_row, from_block, to_row, to_block, rows, rows * blocks, 0, 0});
  }
  // Sets the rate so that `calls` calls of advance() complete all transfers.
  void set_rate(int calls) {
    for (int i = 0; i < count_; i++) list_[i].rate = (list_[i].left + calls - 1) / calls;
  }
  ORTHOKERN_INLINE void advance() {
    for (int i = 0; i < count_; i++)
      if (list_[i].left > 0) list_[i].run(list_[i].rate);
  }
  void finish() {
    for (int i = 0; i < count_; i++) list_[i].run(list_[i].left);
  }

 private:
  static constexpr int kMost = 8;
  void add(const Transfer<T>& transfer) {
    if (transfer.left > 0) list_[count_++] = transfer;
  }

  int count_;
  Transfer<T> list_[kMost];
};

// The epilogue of columns, fn(first block, last block), by reference: products are compiled once for all epilogues.
class Epilogue {
 public:
  template <class F>
  Epilogue(const F& fn) : context_(&fn), call_(call<F>) {}
  void operator()(int first, int last) const { call_(context_, first, last); }

 private:
  template <class F>
  static void call(const void* context, int first, int last) {
    (*static_cast<const F*>(context))(first, last);
  }
  const void* context_;
  void (*call_)(const void* context, int first, int last);
};

// Blocked <- row-major [rows][columns], rows `stride` elements apart; and back.
template <class T>
inline void block_rows(const T* from, ptrdiff_t stride, int rows, int columns, T* to, ptrdiff_t to_block) {
  constexpr int L = kLanes<T>;
  const int whole = columns / L;
  for (int r = 0; r < rows; r++, from += stride, to += L) {
    for (int b = 0; b < whole; b++) store(to + b * to_block, load(from + b * L));
    if (whole * L < columns) store(to + whole * to_block, load_part(from + whole * L, columns - whole * L));
  }
}
template <class T>
inline void unblock_rows(const T* from, ptrdiff_t from_block, int rows, int columns, T* to, ptrdiff_t stride) {
  constexpr int L = kLanes<T>;
  const int whole = columns / L;
  for (int r = 0; r < rows; r++, from += L, to += stride) {
    for (int b = 0; b < whole; b++) store(to + b * L, load(from + b * from_block));
    if (whole * L < columns) store_part(to + whole * L, load(from + whole * from_block), columns - whole * L);
  }
}

constexpr int kTilePairs = 16;  // depth of a tile

// Number of pairs in a sum of n terms. For tiles, it is rounded up to whole tiles; the missing pairs are zero.
inline int paired_depth(int n, bool tiles) { return tiles ? round_up(pair_count(n), kTilePairs) : pair_count(n); }

// A weight matrix [depth, cols] in panels; or [2 depth, cols], whose rows form pairs.
template <class T>
struct Packed {
  Scratch<T> panels;
  int depth = 0;
  int cols = 0;
  bool pairs = false;
  bool tiles = false;  // of pairs, for the product of tiles.h

  static constexpr int kWidth = 2 * kLanes<T>;
  int panel_count() const { return (cols + kWidth - 1) / kWidth; }
  bool narrow(int p) const { return cols - p * kWidth <= kLanes<T>; }
  const T* panel(int p) const { return panels + static_cast<ptrdiff_t>(p) * kWidth * depth; }
  const T* row(int p, int k) const { return panel(p) + static_cast<ptrdiff_t>(k) * (narrow(p) ? kLanes<T> : kWidth); }

  bool allocate(int rows, int cols_, bool pairs_ = false, bool tiles_ = false) {
    pairs = pairs_;
    tiles = tiles_;
    depth = pairs ? paired_depth(rows, tiles) : rows;
    cols = cols_;
    return panels.allocate(static_cast<size_t>(panel_count()) * kWidth * depth, pairs);
  }
  // Fills rows [row0, row0 + rows) of panels [first, last) with
  //     w(row, col) = source[row * row_stride + col * col_stride] * scale[col], where scale may be null.
  void fill(int first, int last, int row0, int rows, const T* source, ptrdiff_t row_stride, ptrdiff_t col_stride,
            const T* scale) {
    for (int p = first; p < last; p++) {
      const int width = narrow(p) ? kLanes<T> : kWidth;
      const int count = cols - p * kWidth < width ? cols - p * kWidth : width;
      T* panel = panels + static_cast<ptrdiff_t>(p) * kWidth * depth;
      const T* from = source + p * kWidth * col_stride;
      if (pairs) {
        fill_pairs(reinterpret_cast<uint16_t*>(panel), width, count, row0, rows, from, row_stride, col_stride,
                   scale ? scale + p * kWidth : nullptr);
        continue;
      }
      T* to = panel + static_cast<ptrdiff_t>(row0) * width;
      for (int r = 0; r < rows; r++) {
        for (int c = 0; c < count; c++)
          to[static_cast<ptrdiff_t>(r) * width + c] =
              from[r * row_stride + c * col_stride] * (scale ? scale[p * kWidth + c] : T(1));
        for (int c = count; c < width; c++) to[static_cast<ptrdiff_t>(r) * width + c] = 0;
      }
    }
  }

 private:
  // For one panel; elements that it does not write are zero.
  static void fill_pairs(uint16_t* panel, int width, int count, int row0, int rows, const T* from, ptrdiff_t row_stride,
                         ptrdiff_t col_stride, const T* scale) {
    for (int k = row0; k < row0 + rows; k++, from += row_stride) {
      uint16_t* to = panel + 2 * static_cast<ptrdiff_t>(k / 2) * width + k % 2;
      for (int c = 0; c < count; c++)
        to[2 * c] = to_bfloat16(static_cast<float>(from[c * col_stride] * (scale ? scale[c] : T(1))));
    }
  }
};

// Rows [row0, row0 + rows) of a packed matrix, see Packed::fill. The panels of all jobs are divided among `parts`
// tasks, which saves time at N = 1000.
template <class T>
struct PackJob {
  Packed<T>* to;
  int row0, rows;
  const T* source;
  ptrdiff_t row_stride, col_stride;
  const T* scale;
};
template <class T>
struct PackJobs {
  PackJob<T> job[8];
  int count = 0;

  void add(Packed<T>* to, int row0, int rows, const T* source, ptrdiff_t row_stride, ptrdiff_t col_stride,
           const T* scale = nullptr) {
    job[count++] = {to, row0, rows, source, row_stride, col_stride, scale};
  }
  void run(int parts) const {
    share(parts, parts, [&](int task) {
      for (int i = 0; i < count; i++) {
        const PackJob<T>& j = job[i];
        const int panels = j.to->panel_count();
        j.to->fill(panels * task / parts, panels * (task + 1) / parts, j.row0, j.rows, j.source, j.row_stride,
                   j.col_stride, j.scale);
      }
    });
  }
};

}  // namespace orthokern::ORTHOKERN_ISA
