// Transposes of square blocks.
#pragma once

#include "cpu/simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace orthokern::ORTHOKERN_ISA {

// Pieces of 16 bytes, `step` elements apart, side by side in one vector.
template <class T>
ORTHOKERN_INLINE V<T> gather_pieces(const T* from, ptrdiff_t step) {
#if defined(__AVX512F__)
  __m128 p[4];
  ORTHOKERN_UNROLL for (int i = 0; i < 4; i++) memcpy(&p[i], from + i * step, sizeof p[i]);
  __m512 v = _mm512_castps128_ps512(p[0]);
  v = _mm512_insertf32x4(v, p[1], 1);
  v = _mm512_insertf32x4(v, p[2], 2);
  return (V<T>)_mm512_insertf32x4(v, p[3], 3);
#elif defined(__AVX2__)
  __m128 p[2];
  memcpy(&p[0], from, sizeof p[0]);
  memcpy(&p[1], from + step, sizeof p[1]);
  return (V<T>)_mm256_insertf128_ps(_mm256_castps128_ps256(p[0]), p[1], 1);
#else
  (void)step;
  return load(from);
#endif
}

// Interleaves the halves of every 16 bytes of a and b: a becomes the lower halves of both, b the upper ones, in units
// of `unit` elements.
//     float, unit 1:   a0 b0 a1 b1 | a2 b2 a3 b3
//     float, unit 2:   a0 a1 b0 b1 | a2 a3 b2 b3
//     double, unit 1:  a0 b0 | a1 b1
template <class T>
ORTHOKERN_INLINE void interleave(V<T>& a, V<T>& b, int unit) {
  constexpr int L = kLanes<T>;
  constexpr int P = 16 / sizeof(T);  // elements of a piece
  typename Vec<T>::I low, high;
  ORTHOKERN_UNROLL for (int i = 0; i < L; i++) {
    const int piece = i / P * P, at = i % P, from_b = at / unit % 2;
    low[i] = piece + at / (2 * unit) * unit + at % unit + from_b * L;
    high[i] = low[i] + P / 2;
  }
  const V<T> x = a, y = b;
  a = pick<T>(x, y, low);
  b = pick<T>(x, y, high);
}

// v[j][i] = from[i * step + j], an L x L block. Most of the transpose is done by loads of 16 bytes: only one port
// shuffles.
template <class T>
ORTHOKERN_INLINE void load_transposed(const T* from, ptrdiff_t step, V<T> (&v)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  constexpr int P = 16 / sizeof(T);
  ORTHOKERN_UNROLL for (int c = 0; c < L; c += P) {
    ORTHOKERN_UNROLL for (int i = 0; i < P; i++) v[c + i] = gather_pieces(from + i * step + c, P * step);
    interleave<T>(v[c], v[c + 1], 1);
    if (P == 2) continue;
    V<T>&v1 = v[c + 1], &v2 = v[c + P - 2], &v3 = v[c + P - 1];
    // v[c] has rows 0 and 1 of columns 0 and 1; v1 has those of columns 2 and 3
    interleave<T>(v2, v3, 1);
    interleave<T>(v[c], v2, 2);
    interleave<T>(v1, v3, 2);
    const V<T> second = v2;
    v2 = v1;
    v1 = second;
  }
}
// The same for a block of `rows` rows and `columns` columns; the rest is zero.
template <class T>
inline void load_transposed(const T* from, ptrdiff_t step, int rows, int columns, V<T> (&v)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  T whole[L * L] = {};
  const bool copied = rows < L || columns < L;
  for (int i = 0; copied && i < rows; i++) memcpy(whole + i * L, from + i * step, columns * sizeof(T));
  load_transposed<T>(copied ? whole : from, copied ? L : step, v);
}

}  // namespace orthokern::ORTHOKERN_ISA
