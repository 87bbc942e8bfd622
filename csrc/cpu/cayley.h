// The arguments of the Cayley step; see cayley.cpp for the mathematics.
// N rows, K <= N columns of a matrix.
#pragma once

#include <stdint.h>

#include "common/fields.h"

namespace orthokern {

struct CayleyArgs {
  int64_t batch, N, K;
  int dtype;  // 0 float32, 1 float64
  int threads;
  const void* m;     // [batch, N, K], contiguous
  const void* g;     // [batch, N, K], contiguous: the gradient with respect to m
  const double* lr;  // [batch]
  void* out;         // [batch, N, K], contiguous; overlaps neither m nor g

  ORTHOKERN_FIELDS_OF(fields, batch, N, K, dtype, threads, m, g, lr, out);
};

}  // namespace orthokern
