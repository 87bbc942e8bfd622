// Products of a few vectors with a row-major weight matrix that is read in place, once: for calls of so few steps that
// packing the weights (gemm.h) would take longer than the steps.
//
// A block of L rows of the matrix is read in squares of L x L, each transposed in registers, so that an element of the
// result is the same chain of multiply-adds in ascending depth as in the packed product: the bits are equal.
#pragma once

#include "cpu/simd.h"

namespace orthokern {
namespace ORTHOKERN_ISA {

constexpr int64_t kDirectRows = 4;                // largest T B for which reading the weights in place is faster
constexpr size_t kDirectThreadBytes = 256 << 10;  // least bytes of weights for which a product is divided among threads

// Exchanges bit S of the row's index with that of the lane's.
template <class T, int S>
ORTHOKERN_INLINE void transpose_bit(V<T>* rows) {
  constexpr int L = kLanes<T>;
  ORTHOKERN_UNROLL for (int i = 0; i < L; i++) {
    if (i & S) continue;
    const V<T> a = rows[i], b = rows[i + S];
#if defined(__clang__)
    for (int l = 0; l < L; l++) {
      rows[i][l] = l & S ? b[l - S] : a[l];
      rows[i + S][l] = l & S ? b[l] : a[l + S];
    }
#else
    typename Vec<T>::I low, high;
    for (int l = 0; l < L; l++) {
      low[l] = l & S ? L + l - S : l;
      high[l] = l & S ? L + l : l + S;
    }
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + S] = __builtin_shuffle(a, b, high);
#endif
  }
}
template <class T>
ORTHOKERN_INLINE void transpose_square(V<T>* rows) {
  constexpr int L = kLanes<T>;
  if constexpr (L >= 2) transpose_bit<T, 1>(rows);
  if constexpr (L >= 4) transpose_bit<T, 2>(rows);
  if constexpr (L >= 8) transpose_bit<T, 4>(rows);
  if constexpr (L >= 16) transpose_bit<T, 8>(rows);
}

// sum + the products of `a` [depth] with `count` <= L rows of w, `stride` elements apart; one lane for each row.
template <class T>
inline V<T> direct_rows(const T* w, ptrdiff_t stride, int count, int depth, const T* a, V<T> sum) {
  constexpr int L = kLanes<T>;
  int k = 0;
  if (count == L) {
    for (; k + L <= depth; k += L) {
      V<T> square[L];
      ORTHOKERN_UNROLL for (int i = 0; i < L; i++) square[i] = load(w + i * stride + k);
      transpose_square<T>(square);
      ORTHOKERN_UNROLL for (int j = 0; j < L; j++) sum += square[j] * a[k + j];
    }
  }
  for (; k < depth; k++) {
    V<T> column = V<T>{};
    for (int i = 0; i < count; i++) column[i] = w[i * stride + k];
    sum += column * a[k];
  }
  return sum;
}

// The products of `a` [depth] with `count` <= L columns of w * diag(scale), rows `stride` elements apart.
template <class T>
inline V<T> direct_columns(const T* w, ptrdiff_t stride, int count, int depth, const T* a, const T* scale) {
  V<T> sum = V<T>{};
  if (count == kLanes<T>) {
    const V<T> s = load(scale);
    for (int k = 0; k < depth; k++, w += stride) {
      const V<T> scaled = load(w) * s;
      sum += scaled * a[k];
    }
  } else {
    const V<T> s = load_part(scale, count);
    for (int k = 0; k < depth; k++, w += stride) {
      const V<T> scaled = load_part(w, count) * s;
      sum += scaled * a[k];
    }
  }
  return sum;
}

// fn(context, first block, last block) for blocks of L columns, on the threads that a product of these bytes pays for.
struct DirectShare {
  void (*fn)(void* context, int first, int last);
  void* context;
  int blocks, tasks;
};
inline void direct_task(void* context, int task) {
  const DirectShare& share = *static_cast<DirectShare*>(context);
  const FlushDenormals flush;
  share.fn(share.context, share.blocks * task / share.tasks, share.blocks * (task + 1) / share.tasks);
}
inline void direct_run(int threads, size_t bytes, int blocks, void (*fn)(void*, int, int), void* context) {
  DirectShare share = {fn, context, blocks, bytes < kDirectThreadBytes ? 1 : threads};
  if (share.tasks > blocks) share.tasks = blocks;
  parallel_run(share.tasks, direct_task, &share);
}

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
