// The arguments of the gradient of an exponential from few rows; the mathematics: Note [Gradient of an exponential from
// few rows] in orthokern/nn/_few_rows.py.
#pragma once

#include <stdint.h>

#include "common/fields.h"

namespace orthokern {

struct FewRowsArgs {
  int64_t R, N, terms;  // terms: even, at least 4
  int dtype;            // 0 float32, 1 float64
  int threads;
  const void* k;        // [R, N]
  const void* h;        // [R, N]
  const void* turn;     // [N, N], X^T
  const void* s;        // [N, N], 4 X^2 + 2 I
  const void* weights;  // [terms, terms], C
  void* grad;           // [N, N], strictly lower triangular

  template <class Visit>
  void fields(Visit& visit) {
    ORTHOKERN_FIELDS(visit, R, N, terms, dtype, threads, k, h, turn, s, weights, grad);
  }
};

}  // namespace orthokern
