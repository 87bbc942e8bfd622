// The arguments of the CUDA launchers: plain addresses and sizes, without torch and the CUDA headers.
// Contiguous, row-major, in the memory of one device; the element type is `dtype`. B batch, T time, N hidden, K rank, D
// input features or number of token ids.
//
// A launcher enqueues its kernels on the stream and returns without synchronising. It throws cuda::Error (launch.h).
#pragma once

#include <stdint.h>

#include <vector>

#include "common/fields.h"

namespace orthokern::cuda {

enum Dtype { kFloat32 = 0, kFloat64 = 1 };

struct CayleyMatrices {  // of one shape
  int64_t batch, N, K;
  const void* m;     // [batch, N, K]
  const void* g;     // [batch, N, K]
  const double* lr;  // [batch], or null: then every matrix has the rate `rate`
  double rate;
  void* out;  // [batch, N, K]

  ORTHOKERN_FIELDS_OF(fields, batch, N, K, m, g, lr, rate, out);
};
struct CayleyArgs {
  int dtype, device;
  void* stream;
  std::vector<CayleyMatrices> matrices;
  void* workspace;  // cayley_workspace() bytes

  ORTHOKERN_FIELDS_OF(fields, dtype, device, stream, matrices, workspace);
};
void cayley(const CayleyArgs& args);
int64_t cayley_workspace(const CayleyArgs& args);

}  // namespace orthokern::cuda
