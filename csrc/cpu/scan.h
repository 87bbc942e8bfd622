// The recurrent scan on a CPU, for the factored map U diag(s) V^T and for a dense map, forward and backward.
//
//   forward    h_t = phi(a_t),  a_t = map(h_{t-1}) + e_t
//   backward   ghat_t = g_t + map^T(delta_{t+1}),  delta_t = clip(phi'(a_t) * ghat_t)
//
// and with a leak l of each unit
//
//   forward    h_t = (1 - l) h_{t-1} + l phi(a_t)
//   backward   ghat_t = g_t + map^T(delta_{t+1}) + (1 - l) ghat_{t+1},  delta_t = clip(phi'(a_t) * l ghat_t)
//
// This file has the entry functions, scan_plan.h the data shared by the threads, scan_rows.h a group of rows and one
// step forward, scan_backward.h the backward loop.
//
// Sequences are independent. A thread processes its rows of the batch for all steps, in groups of R rows. Threads
// synchronize only at the end, when the parameter gradients are added. Locations of the data of a step and a group:
//
//   registers  one tile of 13 rows x 2 vectors of a product (gemm.h)
//   L1         the state, blocked [N/L][R][L]; one panel of weights
//   L2         all panels (packed once per call, s folded into those of V, or of U in backward); the ring of the last
//              steps
//   memory     read: e_t, x_t or token ids. Written: h_t, with streaming stores if the result is large.
//              Backward reads g_t and h_t, and writes grad_x.
//
// The input projection W_in x_t + b is part of the product: x_t and a one are further columns of the state, W_in and b
// further rows of the map's panels. Token ids instead select a row of a table W_in^T + b.
//
// Sequences of different lengths (rows.h): the ring holds only the R_t rows of a step. Rows that have ended between
// running ones are computed and set to zero. Padding in the results is zero.
//
// Cost per step and sequence: 4 N K (factored) or 2 N^2 (dense) flops and 2 N D for the projection each way; for the
// gradients 2 N (N + D + 1), or without M 6 N K + 2 N (D + 1). Memory traffic: forward 4 N bytes (8 N with a dense e),
// backward 8 N (12 N).
#pragma once

#include "cpu/scan_backward.h"
#include "cpu/scan_direct.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T>
bool forward_rows(const ScanPlan<T>& plan, int row0, int R) {
  const ScanArgs& args = plan.args;
  const int64_t N = plan.N, every = args.checkpoint_every;
  const TileRelease release(plan.tiles);
  ScanRows<T> rows(plan, row0, R);
  if (!rows.allocate()) return false;
  block_rows<T>(static_cast<const T*>(args.h0) + row0 * N, N, R, N, rows.state, rows.block);
  T* hs = static_cast<T*>(args.hs);
  T* pre = static_cast<T*>(args.pre);
  T* ckpt = static_cast<T*>(args.ckpt);
  for (int64_t t = 0; t < args.T; t++) {
    if (ckpt && t % every == 0) {
      const int kept = t > 0 ? rows.active[t - 1] : R;
      unblock_rows<T>(rows.state, rows.block, kept, N, ckpt + ((t / every) * args.B + row0) * N, N);
      memset(ckpt + ((t / every) * args.B + row0 + kept) * N, 0, (R - kept) * N * sizeof(T));
    }
    const int64_t at = (t * args.B + row0) * N;
    if (t < rows.longest) rows.step(t, hs + at, pre ? pre + at : nullptr, plan.stream);
  }
  if (plan.stream) {
    rows.write_last(hs + ((rows.longest - 1) * args.B + row0) * N);
    stream_fence();
  }
  rows.template clear_padding<T>(hs, N);
  rows.template clear_padding<T>(pre, N);
  return true;
}

template <template <class, class> class Direct, class T>
bool run_direct(const ScanArgs& args) {
  bool ok = true;
  visit_activation(args.activation, [&](auto a) { ok = Direct<T, decltype(a)>{args}.run(); });
  return ok;
}

template <class T>
bool scan_forward(const ScanArgs& args) {
  if (direct_serves(args)) return run_direct<DirectScan, T>(args);
  ScanPlan<T> plan{args, false};
  if (!plan.prepare()) return false;
  return run_tasks(plan.threads, [&](int task) {
    return each_group(plan.begin, task, kGroupRows, [&](int row0, int R) { return forward_rows(plan, row0, R); });
  });
}

template <class T>
bool scan_backward(const ScanArgs& args) {
  if (direct_backward_serves(args)) return run_direct<DirectBackward, T>(args);
  ScanPlan<T> plan{args, true};
  if (!plan.prepare()) return false;
  const int rows = plan.low_rank() ? kMaxRows : kGroupRows;
  const bool parts = plan.B > rows || args.T * args.B > args.D;  // of the sums of tokens
  TaskSums<ScanSums<T>> sums;
  if (!sums.allocate(plan.threads)) return false;
  const bool ok = run_tasks(plan.threads, [&](int task) {
    return sums[task].allocate(plan, parts) && each_group(plan.begin, task, rows, [&](int row0, int R) {
             return BackwardRows<T>(plan, &sums[task], row0, R).run();
           });
  });
  if (!ok) return false;
  collect_scan(plan, sums.get());
  return true;
}

}  // namespace orthokern::ORTHOKERN_ISA
