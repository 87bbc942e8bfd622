// The arguments of the CUDA kernels of gru_scan: plain addresses and sizes, no torch. float32, contiguous,
// row-major. B batch, T time, N hidden. Blocks of 3N in the order reset gate r, update gate z, candidate n. Equations:
// orthokern/ops/gru_scan.py; those of the backward and the names d_*: Note [GRU scan backward] of the reference.
//
// With lengths, a sequence has the steps before its length, and padding of the results is not written. The values of
// lengths are not checked on the host: a value below 0 is read as 0, and one above T as T.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/fields.h"
#include "cuda/scan.h"

namespace orthokern::cuda {

enum class GruPath {
  kResident = 0,  // one block owns sequences, w stays in its registers (gru_resident.h)
  kLibrary = 1,   // the caller multiplies with a library, and run_gru_step does the rest of each step (gru_step.h)
};

// The execution plan of a scan, made by plan_gru_scan from sizes and the device only.
struct GruPlan {
  int path;
  int group;         // sequences of a block
  int blocks;        // of the grid
  int norm_columns;  // partial sums of squares per step in `norms`
  int64_t work;      // floats of workspace
  int64_t shared_bytes;

  ORTHOKERN_FIELDS_OF(fields, path, group, blocks, norm_columns, work, shared_bytes);
};

struct GruScanArgs {
  int device;
  int64_t T, B, N;
  int kanai;                 // 1: reset gate before W_n; 0: after W_n, as in torch
  const float* w;            // [3N, N]
  const float* h0;           // [B, N]
  const int64_t* lengths;    // [B] or null: T for all
  const uint8_t* resets;     // [T, B] or null: if not 0, the step starts from reset_state instead of h_{t-1}
  const float* reset_state;  // [B, N], null: zeros

  const float* x;     // forward: [T, B, 3N]
  const float* bias;  // forward: [3N] or null
  float* hs;          // [T, B, N]; hs, gates and pre are results of the forward and inputs of the backward
  float* gates;       // [T, B, 3N]
  float* pre;         // [T, B, N]: W_n h_{t-1} + b_n; null for kanai

  const float* grad_hs;     // backward: [T, B, N]
  float* grad_x;            // [T, B, 3N]: d_r, d_z, d_n
  float* factor;            // [T, B, N]: one factor of the gradient of W_n: r h_{t-1}, or (not kanai) d_q
  float* grad_h0;           // [B, N]
  float* grad_reset_state;  // [B, N] or null; must be zero on entry
  // [T, norm_columns] partial sums of squares of dL/dh_t; must be zero on entry, and stays zero on padding
  float* norms;
  float* work;  // see GruPlan

  // the fields that plan_gru_scan reads
  ORTHOKERN_FIELDS_OF(planned, device, T, B, N, kanai);
  template <class Visit>
  void fields(Visit& visit) {
    planned(visit);
    ORTHOKERN_FIELDS(visit, w, h0, lengths, resets, reset_state, x, bias, hs, gates, pre, grad_hs, grad_x, factor,
                     grad_h0, grad_reset_state, norms, work);
  }
};

// Planner overrides; the defaults leave the choice to the planner. Tests use them to reach every path at small sizes.
struct GruOverrides {
  int path = -1, group = 0;

  ORTHOKERN_FIELDS_OF(fields, path, group);
};

GruPlan plan_gru_scan(const GruScanArgs& args, bool backward, const GruOverrides& overrides);
// `stream` is a cudaStream_t of args.device.
void run_gru_scan(const GruScanArgs& args, bool backward, const GruPlan& plan, void* stream);
// GruPath::kLibrary: `part` is a number of enum GruStep (gru_step.h), which describes product and passed.
void store_gru(const GruScanArgs& args, void* stored, void* stream);
void run_gru_step(const StepArgs& args);

}  // namespace orthokern::cuda
