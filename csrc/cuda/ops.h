// The arguments of the CUDA launchers: plain addresses and sizes, without torch and the CUDA headers.
// Contiguous, row-major, in the memory of one device; the element type is `dtype`. B batch, T time, N hidden, K rank, D
// input features or number of token ids.
//
// A launcher enqueues its kernels on the stream and returns without synchronising. It throws cuda::Error (launch.h).
#pragma once

#include <stdint.h>

#include <vector>

#include "common/activations.h"
#include "common/fields.h"

namespace orthokern::cuda {

enum Dtype { kFloat32 = 0, kFloat64 = 1 };

struct ActivationArgs {
  int64_t rows, N;
  int dtype, activation, device;
  void* stream;
  const void* x;           // [rows, N]
  const void* act_param;   // [act_param_size] or null
  int64_t act_param_size;  // 1 or N
  void* y;                 // [rows, N]           (forward)
  const void* grad_y;      // [rows, N]           (backward)
  void* grad_x;            // [rows, N]
  void* grad_act_param;    // [act_param_size] or null
  void* workspace;         // activation_workspace() bytes, or null without grad_act_param

  ORTHOKERN_FIELDS_OF(forward, rows, N, dtype, activation, device, stream, x, act_param, act_param_size, y);
  ORTHOKERN_FIELDS_OF(backward, rows, N, dtype, activation, device, stream, x, act_param, act_param_size, grad_y,
                      grad_x, grad_act_param, workspace);
};
void activation_fwd(const ActivationArgs& args);
void activation_bwd(const ActivationArgs& args);
int64_t activation_workspace(const ActivationArgs& args);  // bytes that the backward needs for grad_act_param

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
