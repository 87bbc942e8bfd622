// What the two routes of the Cayley step share; cayley.cpp has the mathematics.
#pragma once

#include "cpu/cayley.h"
#include "cpu/lu.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
struct Epsilon;
template <>
struct Epsilon<float> {
  static constexpr double value = 1.2e-7;
};
template <>
struct Epsilon<double> {
  static constexpr double value = 2.2e-16;
};

// Bounds on the truncation error of a series, relative to M.
constexpr double kSkewRemainder = 1.0 / 32;         // of the rounding unit
constexpr double kSymmetricRemainder = 1.0 / 2048;  // the same, where it adds up over the steps
// Up to this Frobenius norm of X, LU without pivoting loses nothing against LU with it.
constexpr double kNoPivotNorm = 4;
// From this root mean square of X's singular values on, M_new = 2 (I + X)^-1 M - M has the smaller error and drift
// (measured, N = 128).
constexpr double kLargeTurn = 0.75;
// The same for a thin M, from the root mean square of c Q'^T P' (see thin_step).
constexpr double kLargeThinTurn = 1.5;

inline double square_root(double x) { return __builtin_sqrt(x); }

enum Form { kFirst, kSecond, kFourth, kLu, kLarge };

struct Norms {
  double frobenius, largest_row;
};

// The working memory of a matrix and of the thread that computes it.
template <class Matrix, class Thread>
struct Slot {
  Matrix matrix;
  Thread thread;
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
