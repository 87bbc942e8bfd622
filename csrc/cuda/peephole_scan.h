// The arguments of the CUDA kernels of peephole_scan, the LSTM with peepholes: plain addresses and sizes, no torch.
// float32, contiguous, row-major. B batch, T time, N hidden. Blocks of 4N in the order input gate i, forget gate f, cell
// candidate g, output gate o; of 3N in the order i, f, o. Equations: orthokern/ops/peephole_scan.py.
#pragma once

#include <stdint.h>

#include "common/fields.h"
#include "cuda/scan.h"

namespace orthokern::cuda {

struct PeepholeScanArgs {
  int device;
  int64_t T, B, N;
  const float* peephole;  // [3, N]
  const float* c0;        // [B, N]
  const float* x;         // forward: [T, B, 4N]
  float* hs;              // forward: [T, B, N]
  float* cs;              // [T, B, N]; cs and gates are results of the forward and inputs of the backward
  float* gates;           // [T, B, 4N]

  const float* grad_hs;  // backward: [T, B, N], null: zeros
  const float* grad_cs;  // [T, B, N], null: zeros
  float* grad_x;         // [T, B, 4N]
  float* grad_c0;        // [B, N]: dL/dc of the step before, from one step to the next; must be zero on entry

  ORTHOKERN_FIELDS_OF(fields, device, T, B, N, peephole, c0, x, hs, cs, gates, grad_hs, grad_cs, grad_x, grad_c0);
};

void store_peephole(const PeepholeScanArgs& args, void* stored, void* stream);
// `part`: 0 forward, 1 backward. Forward, product is W h_{t-1} [B, 4N], and passed receives h_t [B, N]. Backward, steps
// are counted from the last one, product is (d_i, d_f, d_g, d_o) W [B, N] of the step after, and passed receives (d_i,
// d_f, d_g, d_o) [B, 4N].
void run_peephole_step(const StepArgs& args);

}  // namespace orthokern::cuda
