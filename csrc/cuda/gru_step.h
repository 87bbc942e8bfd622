// The pointwise parts of a step of gru_scan with library products (GruPath::kLibrary). The caller multiplies, and calls
// a part for each product:
//
//              forward                                         backward
//   kanai      kGates      of h W_rz^T: r, z; m = r * h        kReset  of d_n W_n: d_r, factor
//              kCandidate  of m W_n^T: n, h                    kCarry  of (d_r, d_z) W_rz: d_z, d_n of the step before
//   torch      kAll        of h W^T: r, z, q, n, h             kCarry  of (d_r, d_z, d_q) W: all of the step before
//
// A thread has one unit of one sequence.
#pragma once

#include "cuda/gru_units.h"
#include "cuda/scan_step.h"

namespace orthokern::cuda {

enum class GruStep { kGates, kCandidate, kAll, kReset, kCarry };

// product: a row for each sequence. passed: the input of the next product; forward m or the state that step t + 1
// starts from [B, N], backward [B, 3N]: (d_r, d_z, d_q), or (d_r, d_z, d_n) of kanai. In the backward, steps are
// counted from the last one, and the one after all of them, t = -1 of kCarry, gives grad_h0.
template <GruStep kStep>
__global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    gru_step_kernel(const Stored<GruScanArgs>* stored, const float* product, float* passed, const int step) {
  ORTHOKERN_SHARED(float, squares, [kStepThreads / 32]);
  const GruScanArgs a = stored->args;
  const int i = static_cast<int>(stored->first) + step;
  const int t = kStep == GruStep::kReset || kStep == GruStep::kCarry ? static_cast<int>(a.T) - 1 - i : i;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kStepThreads + threadIdx.x, N = a.N, b = number / N;
  const int u = static_cast<int>(number - b * N);
  const int64_t unit = b * N, offset = t * a.B * N + unit + u;
  const bool live = b < a.B && t < gru_steps_of(a, b);
  float square = 0;
  if (live && t < 0) {
    a.grad_h0[unit + u] = gru_passed(a, 0, b, u, product[unit + u] + a.work[unit + u]);
  } else if (live) {
    const float before = gru_resets(a, t, b) ? gru_reset_state(a, b, u) : t ? a.hs[offset - a.B * N] : a.h0[unit + u];
    const int64_t of_gates = 3 * (offset - u) + u;
    float* const gates = a.gates + of_gates;
    auto bias = [&](int block) { return a.bias ? a.bias[block * N + u] : 0.f; };
    if constexpr (kStep == GruStep::kGates) {
      const float *x = a.x + of_gates, *sums = product + 2 * unit + u;
      const float reset = sigmoid(sums[0] + bias(0) + x[0]);
      gates[0] = reset, gates[N] = sigmoid(sums[N] + bias(1) + x[N]);
      passed[unit + u] = reset * before;
    } else if constexpr (kStep == GruStep::kAll || kStep == GruStep::kCandidate) {
      const float* const x = a.x + of_gates;
      float reset = 1, q;
      if constexpr (kStep == GruStep::kAll) {
        const float* const sums = product + 3 * unit + u;
        reset = gates[0] = sigmoid(sums[0] + bias(0) + x[0]);
        gates[N] = sigmoid(sums[N] + bias(1) + x[N]);
        q = a.pre[offset] = sums[2 * N] + bias(2);
      } else {
        q = product[unit + u] + bias(2);
      }
      const float z = gates[N], candidate = tanhf(x[2 * N] + reset * q), h = z * before + (1.f - z) * candidate;
      gates[2 * N] = candidate;
      a.hs[offset] = h;
      passed[unit + u] = gru_resets(a, t + 1, b) ? gru_reset_state(a, b, u) : h;
    } else if constexpr (kStep == GruStep::kReset) {
      const float reset = gates[0], sum = product[unit + u];
      passed[3 * unit + u] = a.grad_x[of_gates] = sum * before * (reset * (1.f - reset));
      a.factor[offset] = reset * before;
      a.work[unit + u] += reset * sum;
    } else {
      const GruUnit values = {a.grad_hs[offset], before,       gates[0],
                              gates[N],          gates[2 * N], a.kanai ? 0.f : a.pre[offset]};
      const float ghat = values.g + gru_passed(a, t + 1, b, u, product[unit + u] + a.work[unit + u]);
      const GruAdjoint d = gru_adjoint(values, ghat);
      float* const grad_x = a.grad_x + of_gates;
      square = ghat * ghat;
      a.work[unit + u] = ghat * values.z;
      float* const to = passed + 3 * unit + u;
      to[N] = grad_x[N] = d.d_z, to[2 * N] = grad_x[2 * N] = d.d_n;
      if (!a.kanai) {
        to[0] = grad_x[0] = d.d_r;
        to[2 * N] = a.factor[offset] = d.d_q;
      }
    }
  }
  if (kStep != GruStep::kCarry || t < 0 || !a.norms) return;
  const float sum = block_sum(square, squares);
  if (threadIdx.x == 0) a.norms[static_cast<int64_t>(t) * gridDim.x + blockIdx.x] = sum;
}

}  // namespace orthokern::cuda
