// exp and tanh on vectors, float and double, to about one unit in the last place.
//
// Both reduce y = n ln 2 + r, |r| <= ln(2)/2, and use a polynomial for (e^r - 1 - r) / r^2 (Taylor coefficients; at
// degree 5 (float) and 11 (double) the truncation error is below half a unit in the last place). tanh is computed from
// m = e^{2|x|} - 1, which is small if tanh is small: tanh |x| = m / (m + 2) has no cancellation.
#pragma once

#include "cpu/simd.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  static constexpr int kMantissa = 23;
  static constexpr float kLog2e = 1.442695040888963f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kLowest = -87.0f, kHighest = 88.0f;
  static constexpr float kTanhLimit = 20.0f;  // of 2|x|: tanh(10) is 1 in float
  static ORTHOKERN_INLINE V<float> tail(V<float> r) {
    return 0.5f +
           r * (1.6666667e-1f + r * (4.1666668e-2f + r * (8.3333338e-3f + r * (1.3888889e-3f + r * 1.9841270e-4f))));
  }
};
template <>
struct Exp2<double> {
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissa = 52;
  static constexpr double kLog2e = 1.4426950408889634074;
  static constexpr double kLn2High = 6.93147180369123816490e-1, kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kLowest = -708.0, kHighest = 709.0;
  static constexpr double kTanhLimit = 44.0;
  static ORTHOKERN_INLINE V<double> tail(V<double> r) {
    V<double> sum = splat<double>(1.0 / 6227020800.0);
    constexpr double kFactorials[] = {479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2};
    ORTHOKERN_UNROLL for (int i = 0; i < 11; i++) sum = 1 / kFactorials[i] + r * sum;
    return sum;
  }
};

// e^r - 1 for the reduced argument and 2^n, with y = n ln 2 + r; y within [kLowest, kHighest].
template <class T>
ORTHOKERN_INLINE void reduce_exp(V<T> y, V<T>* expm1_r, V<T>* two_to_n) {
  using E = Exp2<T>;
  typedef typename Vec<T>::I I;
  const V<T> shifted = y * E::kLog2e + E::kRound;
  const V<T> n = shifted - E::kRound;
  V<T> r = y - n * E::kLn2High;
  r = r - n * E::kLn2Low;
  *expm1_r = r + (r * r) * E::tail(r);
  *two_to_n = (V<T>)(((I)shifted << E::kMantissa) + (I)splat<T>(1));  // the high bits of kRound are shifted out
}

template <class T>
ORTHOKERN_INLINE V<T> vexp(V<T> y) {
  using E = Exp2<T>;
  const V<T> low = splat<T>(E::kLowest), high = splat<T>(E::kHighest);
  V<T> clamped = y < low ? low : y;
  clamped = clamped > high ? high : clamped;
  V<T> p, scale;
  reduce_exp<T>(clamped, &p, &scale);
  const V<T> result = p * scale + scale;
  return y < low ? V<T>{} : result;
}

// 1 / (1 + e^{-x}), accurate in relative terms; propagates NaN.
template <class T>
ORTHOKERN_INLINE V<T> sigmoid(V<T> x) {
  const V<T> one = splat<T>(1);
  return quotient(one, one + vexp<T>(-x));
}

ORTHOKERN_INLINE V<double> vtanh_abs(V<double> y) {
  V<double> p, scale;
  reduce_exp<double>(y, &p, &scale);
  const V<double> m = p * scale + (scale - 1.0);
  return m / (m + 2.0);
}
// A faster tanh for the scans: one reduction step (its error is relevant only where tanh is flat), a fitted polynomial
// of one degree less, and a division by an estimated reciprocal with one correction step.
ORTHOKERN_INLINE V<float> vtanh_abs(V<float> y) {
  using E = Exp2<float>;
  typedef typename Vec<float>::I I;
  const V<float> shifted = y * E::kLog2e + E::kRound;
  const V<float> n = shifted - E::kRound;
  const V<float> r = y - n * 0.693147181f;
  const V<float> tail = 0.5f + r * (0.166665770f + r * (0.0416665546f + r * (0.00836317905f + r * 0.00139261836f)));
  const V<float> p = r + (r * r) * tail;
  const V<float> scale = (V<float>)(((I)shifted << 23) + 0x3f800000);
  const V<float> m = p * scale + (scale - 1.0f);
  return quotient(m, m + 2.0f);
}

template <class T>
ORTHOKERN_INLINE V<T> vtanh(V<T> x) {
  typedef typename Vec<T>::I I;
  const V<T> limit = splat<T>(Exp2<T>::kTanhLimit);
  const I sign = ~I{} << (8 * sizeof(T) - 1);
  V<T> y = (V<T>)((I)x & ~sign);
  y = y + y;
  y = limit < y ? limit : y;  // this order propagates NaN
  return (V<T>)((I)vtanh_abs(y) | ((I)x & sign));
}

}  // namespace orthokern::ORTHOKERN_ISA
