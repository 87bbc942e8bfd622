// gru_scan for any size: one or two kernels per step, each a tiled product with the activations of the step as its
// epilogue. The products read the states, gates and adjoints from the results in global memory; no state is kept on the
// chip. A step costs a read of w from the L2 cache or from memory, and the gap between two kernels.
//
//              forward                                   backward
//   kanai      kGates      r, z of h; m = r * h          kReset  d_m of d_n; d_r, factor
//              kCandidate  n of m; h                     kCarry  carry of (d_r, d_z); d_z, d_n of the step before
//   torch      kAll        r, z, q of h; h               kCarry  carry of (d_r, d_z, d_q); all adjoints of the step
//              before
//
// A block computes a tile of kTile units by kTile sequences for each matrix, a thread 2 units by 2 sequences. Matrix
// and vectors are copied to shared memory kTile columns at a time, while the next columns are loaded into registers.
#pragma once

#include "cuda/gru_units.h"
#include "cuda/scan_steps.h"

namespace orthokern::cuda {

constexpr int kTilePitch = kTile + 1;  // row pitch of a tile: adjacent rows are one bank apart

enum class GruStep { kGates, kCandidate, kAll, kReset, kCarry };

// The vectors of a product: `count` columns of sequence b at `from` + b * pitch, plus `per_step` elements for each step
// before those of the graph.
struct GruColumns {
  const float* from;
  int64_t pitch;
  int count;
  int64_t per_step;
};
struct GruProduct {
  GruColumns columns[2];  // concatenated; a product without columns is zero
  const float*
      map;  // element (row, column) at row * row_stride + column * column_stride; of matrix k, k * N rows on (kAll)
  int64_t row_stride, column_stride;
  int rows;  // of one matrix
};

template <bool kKanai, GruStep kStep>
__global__ void __launch_bounds__(kStepThreads, kStep == GruStep::kAll ? 3 : 4)  // without it, kAll spills
    gru_step_kernel(const GruScanArgs a, const GruProduct p, const StepIndex index) {
  constexpr int kMaps = kStep == GruStep::kAll ? 3 : 1;
  constexpr bool kBackward = kStep == GruStep::kReset || kStep == GruStep::kCarry;
  ORTHOKERN_SHARED(float, map_tile, [kMaps][kTile][kTilePitch]);  // [column][row]
  ORTHOKERN_SHARED(float, from_tile, [kTile][kTilePitch]);        // [column][sequence]
  ORTHOKERN_SHARED(float, warp_squares, [kStepThreads / 32]);
  const StepTile tile = step_tile(p.rows, blockIdx.x);
  const int thread = threadIdx.x, row0 = tile.row, N = static_cast<int>(a.N);
  const int64_t b0 = tile.sequence, stride = a.B * a.N;
  const bool along_rows = p.row_stride == 1;  // adjacent threads read adjacent elements of the map
  const int depth = p.columns[0].count + p.columns[1].count;
  const float* const first_from = p.columns[0].from + index.steps_before() * p.columns[0].per_step;
  const float* const second_from =
      kStep == GruStep::kCarry ? p.columns[1].from + index.steps_before() * p.columns[1].per_step : nullptr;

  // kCarry ends the carry of step t and begins step t - 1; t = T has only a beginning, t = 0 only an end. Asked for
  // twice rather than kept in a register, of which the product has none to spare.
  auto step_here = [&] { return kStep == GruStep::kCarry ? index.at() - 1 : index.at(); };
  if (a.lengths) {  // a tile whose sequences have no such step
    const int64_t b = b0 + thread;
    const int step = step_here();
    if (step >= 0 && !__syncthreads_or(thread < kTile && step < gru_steps_of(a, b))) return;
  }

  float next_map[kMaps][4], next_from[4];
  auto load = [&](int c0) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int fast = thread % kTile, slow = thread / kTile + k * (kStepThreads / kTile);
      const int row = row0 + (along_rows ? fast : slow), column = c0 + (along_rows ? slow : fast);
#pragma unroll
      for (int map = 0; map < kMaps; map++)
        next_map[map][k] =
            row < p.rows && column < depth ? p.map[(row + map * a.N) * p.row_stride + column * p.column_stride] : 0.f;
      const int64_t b = b0 + slow;
      const bool second = kStep == GruStep::kCarry && c0 + fast >= p.columns[0].count;
      const float* const from = second ? second_from : first_from;
      const int64_t pitch = second ? p.columns[1].pitch : p.columns[0].pitch;
      const int at = c0 + fast - (second ? p.columns[0].count : 0);
      const bool of_state = kStep == GruStep::kGates || kStep == GruStep::kAll;
      if (of_state && a.resets && b < a.B && c0 + fast < depth && gru_resets(a, index.at(), b))
        next_from[k] = gru_reset_state(a, b, at);
      else next_from[k] = b < a.B && c0 + fast < depth ? from[b * pitch + at] : 0.f;
    }
  };
  float sums[kMaps][2][2] = {};  // [unit][sequence]
  const int r = thread % 16 * 2, s = thread / 16 * 2;
  if (depth) load(0);
  for (int c0 = 0; c0 < depth; c0 += kTile) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int fast = thread % kTile, slow = thread / kTile + k * (kStepThreads / kTile);
#pragma unroll
      for (int map = 0; map < kMaps; map++)
        map_tile[map][along_rows ? slow : fast][along_rows ? fast : slow] = next_map[map][k];
      from_tile[fast][slow] = next_from[k];
    }
    __syncthreads();
    if (c0 + kTile < depth) load(c0 + kTile);
#pragma unroll
    for (int c = 0; c < kTile; c++)
#pragma unroll
      for (int map = 0; map < kMaps; map++)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int n = 0; n < 2; n++)
            sums[map][m][n] = fmaf(map_tile[map][c][r + m], from_tile[c][s + n], sums[map][m][n]);
    __syncthreads();
  }

  float square = 0;
  const int step = step_here();
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const int64_t b = b0 + s + n;
      const int row = row0 + r + m;
      if (b >= a.B || row >= p.rows) continue;
      const float sum = sums[0][m][n];
      if (kStep == GruStep::kCarry && step < 0) {
        a.grad_h0[b * N + row] = gru_passed(a, 0, b, row, sum + a.work[b * N + row]);
        continue;
      }
      if (step >= gru_steps_of(a, b)) continue;
      const int64_t unit = b * N, offset = step * stride + unit;
      auto bias = [&](int of) { return a.bias ? a.bias[of] : 0.f; };
      const int u = kStep == GruStep::kGates ? row % N : row;
      const float before = gru_resets(a, step, b) ? gru_reset_state(a, b, u)
                           : step                 ? a.hs[offset - stride + u]
                                                  : a.h0[unit + u];
      if constexpr (kStep == GruStep::kGates) {
        const float gate = sigmoid(sum + bias(row) + a.x[3 * offset + row]);
        a.gates[3 * offset + row] = gate;
        if (row < N) a.work[unit + row] = gate * before;
      } else if constexpr (!kBackward) {
        float reset = 1, z, q = sum + bias(2 * N + row);
        if constexpr (kStep == GruStep::kAll) {
          reset = sigmoid(sum + bias(row) + a.x[3 * offset + row]);
          z = sigmoid(sums[kMaps / 2][m][n] + bias(N + row) + a.x[3 * offset + N + row]);
          q = sums[kMaps - 1][m][n] + bias(2 * N + row);
          a.gates[3 * offset + row] = reset, a.gates[3 * offset + N + row] = z;
          a.pre[offset + row] = q;
        } else {
          z = a.gates[3 * offset + N + row];
        }
        const float candidate = tanhf(a.x[3 * offset + 2 * N + row] + reset * q);
        a.gates[3 * offset + 2 * N + row] = candidate;
        a.hs[offset + row] = z * before + (1.f - z) * candidate;
      } else if constexpr (kStep == GruStep::kReset) {
        const float reset = a.gates[3 * offset + row];
        a.grad_x[3 * offset + row] = sum * before * (reset * (1.f - reset));
        a.factor[offset + row] = reset * before;
        a.work[unit + row] += reset * sum;
      } else {
        const float* const gates = a.gates + 3 * offset + row;
        const GruUnit values = {a.grad_hs[offset + row],           before, gates[0], gates[N], gates[2 * N],
                                kKanai ? 0.f : a.pre[offset + row]};
        const float ghat = values.g + gru_passed(a, step + 1, b, row, sum + a.work[unit + row]);
        const GruAdjoint d = gru_adjoint(values, ghat);
        square = fmaf(ghat, ghat, square);
        a.work[unit + row] = ghat * values.z;
        float* const grad_x = a.grad_x + 3 * offset + row;
        grad_x[N] = d.d_z, grad_x[2 * N] = d.d_n;
        if (!kKanai) grad_x[0] = d.d_r, a.factor[offset + row] = d.d_q;
      }
    }
  if (kStep != GruStep::kCarry || step < 0) return;
  square = warp_sum(square);
  if (thread % 32 == 0) warp_squares[thread / 32] = square;
  __syncthreads();
  if (thread > 0) return;
  float sum = 0;
  for (int w = 0; w < kStepThreads / 32; w++) sum += warp_squares[w];
  a.norms[static_cast<int64_t>(step) * gridDim.x + blockIdx.x] = sum;
}

}  // namespace orthokern::cuda
