// The common part of the gru_scan kernels: one unit of a step, the steps of a sequence.
#pragma once

#include "cuda/gru_scan.h"
#include "cuda/scan_units.h"

namespace orthokern::cuda {

// The number of steps of sequence b.
__device__ __forceinline__ int gru_steps_of(const GruScanArgs& a, int64_t b) {
  if (b >= a.B) return 0;
  if (!a.lengths) return static_cast<int>(a.T);
  const int64_t length = a.lengths[b];
  return static_cast<int>(length < 0 ? 0 : length < a.T ? length : a.T);
}

// Whether step t of sequence b starts from reset_state; false after the last step.
__device__ __forceinline__ bool gru_resets(const GruScanArgs& a, int64_t t, int64_t b) {
  return a.resets && t < a.T && a.resets[t * a.B + b];
}
__device__ __forceinline__ float gru_reset_state(const GruScanArgs& a, int64_t b, int unit) {
  return a.reset_state ? a.reset_state[b * a.N + unit] : 0.f;
}
// The part of `carry` that step t of sequence b passes to the state before it: zero if it starts from reset_state. One
// thread has a unit in all steps.
__device__ __forceinline__ float gru_passed(const GruScanArgs& a, int64_t t, int64_t b, int unit, float carry) {
  if (!gru_resets(a, t, b)) return carry;
  if (a.grad_reset_state) a.grad_reset_state[b * a.N + unit] += carry;
  return 0;
}

// The inputs of one unit in a backward step; g is the direct contribution of the loss to dL/dh_t.
struct GruUnit {
  float g, before, r, z, n, q;
};
// The first half of a backward step of one unit; ghat is the complete dL/dh_t.
struct GruAdjoint {
  float d_z, d_n, d_r, d_q;  // d_r and d_q: only for the variant "torch"
};
__device__ __forceinline__ GruAdjoint gru_adjoint(const GruUnit& u, float ghat) {
  GruAdjoint d;
  d.d_z = ghat * (u.before - u.n) * (u.z * (1.f - u.z));
  d.d_n = ghat * (1.f - u.z) * (1.f - u.n * u.n);
  d.d_q = d.d_n * u.r;
  d.d_r = d.d_n * u.q * (u.r * (1.f - u.r));
  return d;
}

}  // namespace orthokern::cuda
