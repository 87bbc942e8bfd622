// What the scans with gates share: sizes, and vectors of row-major matrices whose rows need not fill whole vectors.
#pragma once

#include "cpu/gemm.h"
#include "cpu/vmath.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kGatedGroupRows = 104;            // of a group: its state stays in L2 whatever the batch
constexpr int64_t kGatedStreamBytes = 8 << 20;  // gates larger than this are written with streaming stores

template <class T>
ORTHOKERN_INLINE V<T> read(const T* from, int count) {
  return count == kLanes<T> ? load(from) : load_part(from, count);
}
template <class T>
ORTHOKERN_INLINE void write(T* to, V<T> v, int count, bool stream) {
  if (stream) store_stream(to, v);
  else if (count == kLanes<T>) store(to, v);
  else store_part(to, v, count);
}

// Rows [R] of a row-major matrix, blocked.
template <class T, class Plan>
void block_rows(const Plan& plan, const T* from, int R, T* to) {
  constexpr int L = kLanes<T>;
  for (int b = 0; b < plan.blocks(); b++)
    for (int r = 0; r < R; r++)
      store(to + (static_cast<ptrdiff_t>(b) * R + r) * L,
            read(from + static_cast<ptrdiff_t>(r) * plan.N + b * L, plan.lanes(b)));
}

// Blocked matrices [N/L][R][L], which products write by whole panels.
template <class T, class Plan, class... More>
bool allocate_rows(const Plan& plan, int R, Scratch<T>& first, More&... more) {
  const size_t size = static_cast<size_t>(round_up(plan.N, 2 * kLanes<T>)) * R;
  return first.allocate(size) && (more.allocate(size) && ...);
}

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
