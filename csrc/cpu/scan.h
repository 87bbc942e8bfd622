// The recurrent scan on a CPU, for the factored map U diag(s) V^T and for a dense map, forward and backward.
//
//   forward    h_t = phi(a_t),  a_t = map(h_{t-1}) + e_t
//   backward   ghat_t = g_t + map^T(delta_{t+1}),  delta_t = clip(phi'(a_t) * ghat_t)
//
// Here: the entry functions. scan_plan.h has what threads share, scan_rows.h a group of rows and one step forward,
// scan_backward.h the loop backward.
//
// Sequences are independent. A thread processes its rows of the batch for all steps, in groups of R rows. Threads
// synchronize only at the end, where the parameter gradients are added. Where the data of a step and a group is:
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
// Sequences of different lengths: step t computes the first R_t rows of a group, up to the last one that still runs,
// and the ring holds only these. In a batch sorted by falling length no step computes a row that has ended. In any
// other order, rows that have ended between running ones are computed and set to zero. Padding in the results is zero.
//
// Cost per step and sequence: 4 N K (factored) or 2 N^2 (dense) flops and 2 N D for the projection each way, and 2 N (N
// + D + 1) for the gradients. Memory traffic: forward 4 N bytes (8 N with a dense e), backward 8 N (12 N).
#pragma once

#include "cpu/scan_backward.h"
#include "cpu/scan_direct_backward.h"
#include "cpu/scan_team.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int kGroupRows = 104;  // rows of a group: its state fits into L2, whatever the batch size

template <class T>
struct ScanCall {
  ScanPlan<T> plan;
  ScanSums<T>* sums;  // [threads], backward only
  bool backward;
  bool failed;
};

template <class T, class A>
bool forward_rows(const ScanPlan<T>& plan, int row0, int R) {
  const ScanArgs& args = *plan.args;
  const int64_t N = plan.N, every = args.checkpoint_every;
  ScanRows<T> rows(plan, row0, R);
  if (!rows.allocate()) return false;
  rows.read_rows(static_cast<const T*>(args.h0) + row0 * N, N, R, N, rows.state, rows.block);
  T* hs = static_cast<T*>(args.hs);
  T* pre = static_cast<T*>(args.pre);
  T* ckpt = static_cast<T*>(args.ckpt);
  for (int64_t t = 0; t < args.T; t++) {
    if (ckpt && t % every == 0) {
      const int kept = t > 0 ? rows.active[t - 1] : R;
      rows.write_rows(rows.state, rows.block, kept, N, ckpt + ((t / every) * args.B + row0) * N, N);
      rows.clear_rest(t / every, kept, ckpt, N);
    }
    const int64_t at = (t * args.B + row0) * N;
    if (t < rows.longest) rows.template step<A>(t, hs + at, pre ? pre + at : nullptr, plan.stream);
    rows.clear_rest(t, rows.active[t], hs, N);
    if (pre) rows.clear_rest(t, rows.active[t], pre, N);
  }
  if (plan.stream) {
    rows.write_last(hs + ((rows.longest - 1) * args.B + row0) * N);
    stream_fence();
  }
  return true;
}

// Task i of a call: its rows of the batch, in groups.
template <class T>
void scan_task(void* context, int task) {
  ScanCall<T>& call = *static_cast<ScanCall<T>*>(context);
  const ScanPlan<T>& plan = call.plan;
  const FlushDenormals flush;
  const TileRelease release(plan.tiles);
  each_group(plan, task, kGroupRows, [&](int row0, int R) {
    bool ok = true;
    visit_activation(plan.args->activation, [&](auto a) {
      using A = decltype(a);
      ok = call.backward ? backward_rows<T, A>(plan, &call.sums[task], row0, R) : forward_rows<T, A>(plan, row0, R);
    });
    if (!ok) call.failed = true;
  });
}

template <class T>
bool forward_replica(const ScanArgs& args) {
  if (direct_serves(args)) return scan_direct<T>(args);
  ScanCall<T> call;
  call.sums = nullptr;
  call.backward = call.failed = false;
  if (!prepare_scan(&call.plan, args, false)) return false;
  if (team_serves(args)) return team_forward(&call.plan, args);
  parallel_run(call.plan.threads, scan_task<T>, &call);
  return !call.failed;
}

template <class T>
bool backward_replica(const ScanArgs& args) {
  if (direct_backward_serves(args)) return scan_direct_backward<T>(args);
  ScanCall<T> call;
  call.backward = true;
  call.failed = false;
  if (!prepare_scan(&call.plan, args, true)) return false;
  const ScanPlan<T>& plan = call.plan;
  Scratch<char> memory(sizeof(ScanSums<T>) * plan.threads);
  if (!memory.get()) return false;
  call.sums = reinterpret_cast<ScanSums<T>*>(memory.get());  // all zero bytes: empty scratch buffers
  bool ok = true;
  for (int i = 0; i < plan.threads && ok; i++) ok = call.sums[i].allocate(plan);
  if (ok) {
    parallel_run(plan.threads, scan_task<T>, &call);
    if (!call.failed) collect_scan(plan, call.sums);
  }
  for (int i = 0; i < plan.threads; i++) call.sums[i].~ScanSums<T>();
  return ok && !call.failed;
}

// Moves pointers by this many bytes, except for null pointers.
template <class... P>
void advance(int64_t bytes, P*&... pointers) {
  ((pointers = pointers ? reinterpret_cast<P*>(reinterpret_cast<uintptr_t>(pointers) + bytes) : nullptr), ...);
}

// The arguments of replica r alone.
template <class T>
ScanArgs replica(const ScanArgs& all, int64_t r) {
  ScanArgs one = all;
  one.R = 1;
  const int64_t B = all.B, N = all.N, D = all.D, size = r * static_cast<int64_t>(sizeof(T));
  const int64_t rows = all.T * B, inputs = all.weight ? D : N, columns = all.K ? all.K : N;
  const int64_t every = all.checkpoint_every, kept = every ? ((all.T - 1) / every + 1) * B : rows;
  if (!all.shared_x) {
    advance(size * rows * inputs, one.x);
    advance(r * rows * static_cast<int64_t>(sizeof(int64_t)), one.tokens);
  }
  advance(r * B * static_cast<int64_t>(sizeof(int64_t)), one.lengths);
  advance(r * rows, one.resets);
  advance(size * columns, one.scale);
  advance(size * N, one.bias, one.grad_bias);
  advance(size * N * columns, one.first, one.second);
  advance(size * N * N, one.grad_map);
  advance(size * N * D, one.weight, one.grad_weight);
  advance(size * B * N, one.h0, one.reset_state, one.grad_h0, one.grad_reset_state);
  advance(size * rows * N, one.hs, one.pre, one.saved_pre, one.grad_delta);
  advance(size * all.grad_steps * B * N, one.grad_hs);
  advance(size * kept * N, one.ckpt, one.states);
  advance(size * rows * inputs, one.grad_x);
  advance(size * all.act_param_size, one.act_param, one.grad_act_param);
  advance(size * all.T, one.grad_norm);
  return one;
}

// Whole replicas, one per thread at a time.
struct ReplicasCall {
  const ScanArgs* args;
  int64_t whole;  // replicas [0, whole), a multiple of the number of threads
  bool (*run)(const ScanArgs& args);
  ScanArgs (*select)(const ScanArgs& all, int64_t r);
  bool failed;
};

inline void replicas_task(void* context, int task) {
  ReplicasCall& call = *static_cast<ReplicasCall*>(context);
  for (int64_t r = task; r < call.whole; r += call.args->threads) {
    ScanArgs one = call.select(*call.args, r);
    one.threads = 1;
    if (!call.run(one)) call.failed = true;
  }
}

// As many replicas as the threads can share out evenly run on one thread each: then threads never wait for each other
// within a replica. The rest, fewer than the threads, run one after the other, each with its rows on all threads.
template <class T>
bool run_replicas(const ScanArgs& args, bool (*run)(const ScanArgs& args)) {
  ReplicasCall call{&args, args.R - args.R % args.threads, run, replica<T>, false};
  if (call.whole) parallel_run(args.threads, replicas_task, &call);
  for (int64_t r = call.whole; r < args.R; r++)
    if (!run(replica<T>(args, r))) call.failed = true;
  return !call.failed;
}

template <class T>
bool scan_forward(const ScanArgs& args) {
  return run_replicas<T>(args, forward_replica<T>);
}
template <class T>
bool scan_backward(const ScanArgs& args) {
  return run_replicas<T>(args, backward_replica<T>);
}

// Compiled once, in factored_scan.cpp, for both ops.
#ifndef ORTHOKERN_DEFINE_SCAN
extern template bool scan_forward<float>(const ScanArgs&);
extern template bool scan_forward<double>(const ScanArgs&);
extern template bool scan_backward<float>(const ScanArgs&);
extern template bool scan_backward<double>(const ScanArgs&);
extern template bool scan_direct_backward<float>(const ScanArgs&);
extern template bool scan_direct_backward<double>(const ScanArgs&);
#endif

}  // namespace orthokern::ORTHOKERN_ISA
