// bfloat16 factors of float32 products, which precision "bf16" of the scans selects if the CPU supports them.
//
// A pair is two bfloat16 numbers in the 32 bits of a float: the factors of two consecutive terms of a sum, the first in
// the lower half. One instruction adds both products to a float32 sum, at the rate of a multiply-add of float32. So a
// matrix of pairs has the layout of a matrix of floats of half the depth. A missing second number is zero.
#pragma once

#include "cpu/ops.h"
#include "cpu/simd.h"

namespace orthokern::ORTHOKERN_ISA {

// Whether kernels with pairs are built. args.bf16 says whether the CPU supports them.
template <class T>
constexpr bool kPairs = ORTHOKERN_HAVE_BF16 && kVectorBytes == 64 && sizeof(T) == 4;

inline int pair_count(int n) { return (n + 1) / 2; }

// Rounds to the nearest bfloat16, ties to even.
ORTHOKERN_INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // a NaN stays a NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512BW__)

// Inline assembly: intrinsics need functions compiled for CPUs that have these instructions, and the rest of a kernel
// would have to be compiled a second time.

// acc += the two products of each lane
ORTHOKERN_INLINE void add_pairs(V<float>* acc, V<float> a, V<float> b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(*acc) : "v"(a), "v"(b));
}
// The pair at an address, in all lanes.
ORTHOKERN_INLINE V<float> splat_pair(const float* p) {
  int32_t bits;
  memcpy(&bits, p, sizeof bits);
  return (V<float>)_mm512_set1_epi32(bits);
}
// Pairs of consecutive lanes: 8 of `low`, then 8 of `high`.
ORTHOKERN_INLINE V<float> pair_lanes(V<float> low, V<float> high) {
  V<float> pairs;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(pairs) : "v"(low), "v"(high));
  return pairs;
}
// Lane i of both.
ORTHOKERN_INLINE V<float> pair_vectors(V<float> first, V<float> second) {
  typedef int16_t Halves __attribute__((vector_size(kVectorBytes)));
  Halves order;
  for (int i = 0; i < 32; i++) order[i] = static_cast<int16_t>(i / 2 + i % 2 * 16);
  return (V<float>)_mm512_permutexvar_epi16((__m512i)order, (__m512i)pair_lanes(first, second));
}

// Pairs of consecutive columns of blocked rows [ceil(columns / L)][..][L], blocked: [ceil(columns / 2 L)][..][L]. The
// blocks are `block` and `to_block` elements apart.
__attribute__((noinline)) inline void pair_columns(const float* from, ptrdiff_t block, int rows, int columns, float* to,
                                                   ptrdiff_t to_block) {
  constexpr int L = kLanes<float>;
  for (; columns >= 2 * L; columns -= 2 * L, from += 2 * block, to += to_block)
    for (int r = 0; r < rows; r++) store(to + r * L, pair_lanes(load(from + r * L), load(from + block + r * L)));
  if (columns == 0) return;
  for (int r = 0; r < rows; r++) {
    const V<float> low = load_part(from + r * L, columns < L ? columns : L);
    const V<float> high = columns > L ? load_part(from + block + r * L, columns - L) : V<float>{};
    store(to + r * L, pair_lanes(low, high));
  }
}

// Pair k of consecutive rows of L elements, zeros from `rows` on.
ORTHOKERN_INLINE V<float> pair_of_rows(const float* from, int k, int rows) {
  constexpr int L = kLanes<float>;
  const V<float> first = 2 * k < rows ? load(from + 2 * k * L) : V<float>{};
  return pair_vectors(first, 2 * k + 1 < rows ? load(from + (2 * k + 1) * L) : V<float>{});
}
// Pairs of consecutive rows: [blocks][rows][L] to [blocks][depth][L].
__attribute__((noinline)) inline void pair_rows(const float* from, ptrdiff_t block, int rows, int blocks, float* to,
                                                ptrdiff_t to_block, int depth) {
  for (int b = 0; b < blocks; b++)
    for (int k = 0; k < depth; k++)
      store(to + b * to_block + k * kLanes<float>, pair_of_rows(from + b * block, k, rows));
}

#endif

}  // namespace orthokern::ORTHOKERN_ISA
