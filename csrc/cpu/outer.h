// The product over rows for the gradients of the parameters: C += sum over rows r of d_r^T h_r.
//
// d and h are stored as [block of L columns][row][L] over the rows of several time steps, C [columns of d][ldc]
// row-major. One call sums its rows in registers and then adds once to C. A sum over thousands of rows is thus a sum of
// partial sums over about a hundred rows, and its rounding error grows with the number of calls, not of rows. RowSums
// limits that number too.
//
//                 h  <- NV vectors ->
//   d  MR columns [ MR x NV accumulators ]   per row: NV loads, MR broadcasts, MR x NV multiply-adds
#pragma once

#include "cpu/pairs.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int kOuterVectors = kLaneProducts ? 6 : 3;  // the largest NV
// Columns of d in a tile: a divisor of the block size such that NV vectors of h fit into the registers.
template <class T>
constexpr int kOuterRows = kLanes<T> < (kVectorBytes == 64 ? 8 : 4) ? kLanes<T> : (kVectorBytes == 64 ? 8 : 4);

template <class T, bool PAIRS, int NV>
void outer_tile(const T* d, const T* h, ptrdiff_t h_block, int rows, T* c, ptrdiff_t ldc) {
  constexpr int L = kLanes<T>;
  constexpr int MR = kOuterRows<T>;
  V<T> acc[MR][NV];
  ORTHOKERN_UNROLL for (int i = 0; i < MR; i++) ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) {
    acc[i][n] = V<T>{};
    __builtin_prefetch(c + i * ldc + n * L, 1, 3);  // read after the loop; C exceeds the caches at N = 1000
  }
  for (int r = 0; r < rows; r++) {
    V<T> x[NV];
    ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) x[n] = load(h + n * h_block);
    if constexpr (kLaneProducts) {
      static_assert(MR == L, "a tile has the columns of one vector of d");
      const V<T> y = load(d);
      ORTHOKERN_UNROLL for (int i = 0; i < MR; i++) ORTHOKERN_UNROLL for (int n = 0; n < NV; n++)
          add_product<T>(acc[i][n], x[n], y, i);
    } else if constexpr (PAIRS) {
      ORTHOKERN_UNROLL for (int i = 0; i < MR; i++) {
        const V<T> y = splat_pair(d + i);
        ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) add_pairs(&acc[i][n], x[n], y);
      }
    } else {
      ORTHOKERN_UNROLL for (int i = 0; i < MR; i++) {
        const T y = d[i];
        ORTHOKERN_UNROLL for (int n = 0; n < NV; n++) acc[i][n] += x[n] * y;
      }
    }
    d += L;
    h += L;
  }
  ORTHOKERN_UNROLL for (int i = 0; i < MR; i++) ORTHOKERN_UNROLL for (int n = 0; n < NV; n++)
      store(c + i * ldc + n * L, load(c + i * ldc + n * L) + acc[i][n]);
}

template <class T, bool PAIRS, int NV = kOuterVectors>
inline auto outer_tile_of(int vectors) {
  if constexpr (NV > 1)
    if (vectors < NV) return outer_tile_of<T, PAIRS, NV - 1>(vectors);
  return &outer_tile<T, PAIRS, NV>;
}

// d has d_blocks blocks and h has h_blocks blocks; blocks are `block` elements apart, and `rows` rows of each are used.
// With PAIRS they are pairs of rows. C [d_blocks * L][ldc].
template <class T, bool PAIRS = false>
inline void outer_add(const T* d, int d_blocks, const T* h, int h_blocks, ptrdiff_t block, int rows, T* c,
                      ptrdiff_t ldc) {
  constexpr int L = kLanes<T>;
  constexpr int MR = kOuterRows<T>;
  for (int j = 0; j < h_blocks;) {
    const int left = h_blocks - j, most = kOuterVectors;
    // 4 as 2 + 2: a single vector does not hide the latency
    const int take = left == most + 1 ? (most + 1) / 2 : left < most ? left : most;
    const auto tile = outer_tile_of<T, PAIRS>(take);
    for (int i = 0; i < d_blocks; i++) {
      for (int k = 0; k < L; k += MR) {
        const T* from = d + i * block + k;
        T* to = c + (static_cast<ptrdiff_t>(i) * L + k) * ldc + j * L;
        tile(from, h + j * block, block, rows, to, ldc);
      }
    }
    j += take;
  }
}

constexpr int kPartRows = 4096;

// The sums over the rows of one thread: float sums over kPartRows rows at a time, which are added up in double. A sum
// of at most kPartRows rows has one part, and so have sums of double. An object whose bytes are all zero is empty.
template <class T>
struct RowSums {
  Scratch<T> part;  // the destination of outer_add
  Scratch<double> total;
  size_t size;
  int64_t rows;  // of the part

  // all_rows: of all threads.
  bool allocate(size_t elements, int64_t all_rows) {
    return allocate_parts(elements, sizeof(T) == 4 && all_rows > kPartRows);
  }
  bool allocate_parts(size_t elements, bool several) {
    size = elements;
    return part.allocate(size) && (!several || total.allocate(size));
  }
  // Called after `count` rows have been added to the part.
  void added(int count) {
    rows += count;
    if (rows >= kPartRows) end_part();
  }
  void end_part() {
    if (!total.get()) return;
    T* from = part;
    double* to = total;
    for (size_t i = 0; i < size; i++) {
      to[i] += static_cast<double>(from[i]);
      from[i] = 0;
    }
    rows = 0;
  }
  // to[i] += the sum of element first + i.
  void add_to(double* to, ptrdiff_t first, int count) const {
    const T* of_part = part + first;
    const double* of_total = total.get() ? total + first : nullptr;
    for (int i = 0; i < count; i++) to[i] += static_cast<double>(of_part[i]);
    for (int i = 0; of_total && i < count; i++) to[i] += of_total[i];
  }
};

// to[i] = the total of element at + i of the RowSums *of_task(task) of all tasks.
template <class T, class F>
void row_totals(int tasks, const F& of_task, ptrdiff_t at, int count, T* to) {
  constexpr int kMost = 64;
  for (int i = 0; i < count; i += kMost) {
    const int some = count - i < kMost ? count - i : kMost;
    double total[kMost] = {};
    for (int task = 0; task < tasks; task++) of_task(task)->add_to(total, at + i, some);
    for (int j = 0; j < some; j++) to[i + j] = static_cast<T>(total[j]);
  }
}

}  // namespace orthokern::ORTHOKERN_ISA
