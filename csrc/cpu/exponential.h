// The arguments of the backward of a few steps of a recurrence whose matrix is made of an exponential of a skew A.
#pragma once

#include <stdint.h>

#include "common/fields.h"
#include "cpu/ops.h"

namespace orthokern {

// W = B exp(A), or, with a basis P = B exp(A), V = P Theta P^T of a NonNormalRNN.
// The arguments of scan_steps_bwd with a dense map, but for grad_map and grad_delta; and more.
struct ExponentialArgs : ScanArgs {
  int64_t terms;   // even, at least 4
  int mask_block;  // Theta's triangle: 1: below the 2 x 2 blocks, 0: below the diagonal
  // Note [Gradient of an exponential from few rows] in orthokern/nn/_few_rows.py
  const void* turn;     // [N, N], X^T
  const void* s;        // [N, N], 4 X^2 + 2 I
  const void* weights;  // [terms, terms], C
  const void* basis;    // [N, N], P, or null; the others of NonNormalRNN are then null, too
  const void* gamma;    // [ceil(N / 2)]
  const void* theta;    // [floor(N / 2)]
  // results, or null
  void* grad_skew;      // [N, N], strictly lower triangular
  void* grad_gamma;     // [ceil(N / 2)]
  void* grad_theta;     // [floor(N / 2)]
  void* grad_triangle;  // [N, N], zero outside the mask

  template <class Visit>
  void fields(Visit& visit) {
    R = 1;
    ORTHOKERN_FIELDS(visit, B, T, N, D, dtype, activation, threads, x, second, h0, weight, act_param, act_param_size,
                     grad_hs, states, saved_pre, grad_x, grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm);
    ORTHOKERN_FIELDS(visit, terms, mask_block, turn, s, weights, basis, gamma, theta, grad_skew, grad_gamma, grad_theta,
                     grad_triangle);
  }
};

}  // namespace orthokern
