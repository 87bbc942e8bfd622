// The register tiles of the CPU kernels against plain loops, bit by bit: see test_cpu_tiles.py.
//
// Each element of a product is one chain of multiply-adds in ascending depth, whatever tile computes it.
#include <math.h>
#include <stdio.h>

#include "cpu/gemm.h"
#include "cpu/outer.h"
#include "cpu/panels.h"

namespace orthokern {
void parallel_run(int tasks, void (*fn)(void*, int), void* context) {
  for (int i = 0; i < tasks; i++) fn(context, i);
}
void* large_scratch(size_t* bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, 64, *bytes) ? nullptr : memory;
}
void free_large_scratch(void* memory, size_t) { free(memory); }

namespace ORTHOKERN_ISA {
namespace {

int failures = 0;

template <class T>
T chain(T sum, T w, T x) {
#if defined(__aarch64__)
  return sizeof(T) == 4 ? static_cast<T>(fmaf(w, x, sum)) : static_cast<T>(fma(w, x, sum));
#else
  return sum + w * x;  // compiled for the baseline, which has no fused multiply-add
#endif
}

template <class T>
void fill(T* to, size_t count) {
  static uint32_t state = 1;
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    to[i] = static_cast<T>(state >> 8) / static_cast<T>(1 << 23) - 1;
  }
}

void check(bool same, const char* what, size_t bytes, int rows, int depth, int cols) {
  if (same) return;
  failures++;
  printf("%s of %d-byte numbers: rows %d, depth %d, columns %d\n", what, static_cast<int>(bytes), rows, depth, cols);
}

// A product of two segments, as in the scans, and one whose depth is computed in chunks.
template <class T>
void packed_product(int rows, int first, int second, int cols) {
  constexpr int L = kLanes<T>;
  const int depth = first + second;
  const ptrdiff_t block = static_cast<ptrdiff_t>(rows) * L;
  Scratch<T> weights(static_cast<size_t>(depth) * cols), a(round_up(first, L) * rows), b(round_up(second, L) * rows),
      out(static_cast<size_t>(round_up(cols, 2 * L)) * rows);
  Packed<T> packed;
  packed.allocate(depth, cols);
  fill(weights.get(), static_cast<size_t>(depth) * cols);
  fill(a.get(), round_up(first, L) * rows), fill(b.get(), round_up(second, L) * rows);
  packed.fill(0, packed.panel_count(), 0, depth, weights, cols, 1, nullptr);
  const Segment<T> segments[2] = {{a, block, first}, {b, block, second}};
  multiply<T>(segments, second ? 2 : 1, packed, rows, out, block);
  bool same = true;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < cols; c++) {
      T sum = 0;
      for (int k = 0; k < depth; k++) {
        const int at = k < first ? k : k - first;
        sum = chain(sum, weights[k * cols + c], (k < first ? a : b)[at / L * block + r * L + at % L]);
      }
      same = same && sum == out[c / L * block + r * L + c % L];
    }
  check(same, "packed product", sizeof(T), rows, depth, cols);
}

// Panels that are added to.
template <class T>
void panel_product(int rows, int depth, int cols) {
  constexpr int W = kWidth<T>;
  const ptrdiff_t row_stride = static_cast<ptrdiff_t>(panel_rows<T>(rows)) * W,
                  depth_stride = static_cast<ptrdiff_t>(panel_rows<T>(depth)) * W;
  const int deep = ceil_div(depth, W), wide = ceil_div(cols, W);
  Scratch<T> left(row_stride * deep), right(depth_stride * wide), add(row_stride * wide), out(row_stride * wide);
  fill(left.get(), row_stride * deep), fill(right.get(), depth_stride * wide), fill(add.get(), row_stride * wide);
  const Panels<T> a = {left, row_stride}, b = {right, depth_stride}, plus = {add, row_stride}, to = {out, row_stride};
  product<T>(a, 0, rows, 0, depth, b, wide, last_width<T>(cols), &plus, T(1), to);
  bool same = true;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < cols; c++) {
      T sum = 0;
      for (int k = 0; k < depth; k++) sum = chain(sum, b.at(k, c / W)[c % W], a.at(r, k / W)[k % W]);
      same = same && plus.at(r, c / W)[c % W] + sum == to.at(r, c / W)[c % W];
    }
  check(same, "product of panels", sizeof(T), rows, depth, cols);
}

template <class T>
void outer_sum(int rows, int d_blocks, int h_blocks) {
  constexpr int L = kLanes<T>;
  const ptrdiff_t block = static_cast<ptrdiff_t>(rows) * L;
  const int ldc = h_blocks * L;
  Scratch<T> d(block * d_blocks), h(block * h_blocks), c(d_blocks * L * ldc), before(d_blocks * L * ldc);
  fill(d.get(), block * d_blocks), fill(h.get(), block * h_blocks), fill(before.get(), d_blocks * L * ldc);
  memcpy(c, before, sizeof(T) * d_blocks * L * ldc);
  outer_add<T>(d, d_blocks, h, h_blocks, block, rows, c, ldc);
  bool same = true;
  for (int i = 0; i < d_blocks * L; i++)
    for (int j = 0; j < ldc; j++) {
      T sum = 0;
      for (int r = 0; r < rows; r++)
        sum = chain(sum, h[j / L * block + r * L + j % L], d[i / L * block + r * L + i % L]);
      same = same && before[i * ldc + j] + sum == c[i * ldc + j];
    }
  check(same, "outer product", sizeof(T), d_blocks * L, rows, ldc);
}

template <class T>
void all() {
  const int rows[] = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13, 23}, depths[] = {1, 2, 3, 4, 5, 8, 11, 30},
            cols[] = {1, 4, 5, 8, 9, 17, 40};
  for (int r : rows)
    for (int k : depths)
      for (int c : cols) packed_product<T>(r, k, 0, c), packed_product<T>(r, k, 5, c), panel_product<T>(r, k, c);
  packed_product<T>(13, 401, 3, 9);
  packed_product<T>(11, 700, 0, 300);  // weights that are prefetched
  for (int r : rows)
    for (int blocks = 1; blocks < 15; blocks++) outer_sum<T>(r, 2, blocks);
}

}  // namespace
}  // namespace ORTHOKERN_ISA
}  // namespace orthokern

int main() {
  orthokern::ORTHOKERN_ISA::all<float>();
  orthokern::ORTHOKERN_ISA::all<double>();
  printf("%d rows of a tile, %d failures\n", orthokern::ORTHOKERN_ISA::kMaxRows, orthokern::ORTHOKERN_ISA::failures);
  return orthokern::ORTHOKERN_ISA::failures != 0;
}
