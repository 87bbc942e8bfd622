// The common part of the gated scans, gru_scan and peephole_scan: the plan of a call with its packed weights, a group
// of rows, and vectors of row-major matrices whose rows need not fill whole vectors.
//
// As in scan.h, a thread processes its rows of the batch for all steps, in groups of at most kGroupRows rows whose
// state stays blocked in the caches. Threads never synchronize. The gradients of weights and biases are sums over
// sequences: products over all steps that the caller computes afterwards. The epilogue of a gate runs per panel of 2 L
// columns, while the product's result is in the nearest cache, and skips rows that have ended between others that run.
// Padding in the results is zero. The state of rows that reset is overwritten before the step.
#pragma once

#include "cpu/gemm.h"
#include "cpu/ops.h"
#include "cpu/rows.h"
#include "cpu/tasks.h"
#include "cpu/vmath.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kMostGates = 4;

template <class T>
struct GatedPlan {
  int N, gates, threads;
  bool stream;                 // write gates, or their gradients, with streaming stores
  bool to_h0;                  // backward: the adjoint of step 0 is passed to h0 or to reset_state
  Packed<T> gate[kMostGates];  // forward [N, N]: the transposes of the gates' weights
  Packed<T> back, back_last;   // backward: [gates N, N], without the last gate if that is separate
  size_t sum_size;
  Scratch<double> sums;  // [threads][sum_size]: sums of the tasks
  Scratch<int> begin;    // [threads + 1]: task i has the rows [begin[i], begin[i + 1]) of the batch

  int padded() const { return round_up(N, kLanes<T>); }
  int blocks() const { return padded() / kLanes<T>; }

  template <class Args>
  bool start(const Args& args, int gates_, bool backward, bool apart, size_t sum_size_) {
    const int B = static_cast<int>(args.B);
    N = static_cast<int>(args.N), gates = gates_, threads = args.threads < B ? args.threads : B;
    sum_size = sum_size_;
    stream = streams<T>(backward ? args.grad_x : args.gates, args.T * B * gates, N);
    if (!share_rows(threads, B, args.lengths, args.T, &begin) || !sums.allocate(threads * sum_size)) return false;
    to_h0 = backward && (args.grad_h0 || args.resets);
    if (backward && args.T == 1 && !to_h0 && !apart) return true;  // no product
    if (backward && (!back.allocate((gates - apart) * N, N) || (apart && !back_last.allocate(N, N)))) return false;
    PackJobs<T> jobs;
    const T* w = static_cast<const T*>(args.w);
    for (int g = 0; g < gates; g++, w += static_cast<ptrdiff_t>(N) * N) {
      if (!backward && !gate[g].allocate(N, N)) return false;
      if (!backward) jobs.add(&gate[g], 0, N, w, 1, N);
      else if (apart && g == gates - 1) jobs.add(&back_last, 0, N, w, N, 1);
      else jobs.add(&back, g * N, N, w, N, 1);
    }
    jobs.run(args.threads);
    return true;
  }
  // run(row0, R, sums of the task) for every group of rows; false if one of them ran out of memory.
  template <class F>
  bool each(const F& run) const {
    return run_tasks(threads, [&](int task) {
      return each_group(begin, task, kGroupRows, [&](int row0, int R) { return run(row0, R, sums + task * sum_size); });
    });
  }
};

// A group of rows. Its blocked matrices are [N/L][R][L].
template <class T>
struct GatedRows : RowSteps {
  static constexpr int L = kLanes<T>;
  const GatedPlan<T>& plan;
  const T *reset_state, *x;  // [B, N], or null: zeros; [T, B, gates N]
  T* const gates;            // like x, or null
  const ptrdiff_t N, block;
  Scratch<T> zeros;  // one row, used if there is no reset_state

  template <class Args>
  GatedRows(const GatedPlan<T>& plan_, const Args& args, int row0_, int R_)
      : RowSteps(args, row0_, R_),
        plan(plan_),
        reset_state(static_cast<const T*>(args.reset_state)),
        x(static_cast<const T*>(args.x)),
        gates(static_cast<T*>(args.gates)),
        N(plan_.N),
        block(static_cast<ptrdiff_t>(R_) * L) {}

  // Also allocates blocked matrices, which products write in whole panels.
  template <class... Matrix>
  bool allocate(Matrix&... matrix) {
    return count_steps() && zeros.allocate(plan.padded()) && allocate_matrices(matrix...);
  }
  template <class... Matrix>
  bool allocate_matrices(Matrix&... matrix) const {
    return (matrix.allocate(static_cast<size_t>(round_up(plan.N, 2 * L)) * R) && ...);
  }
  // The first row of the group at step t of a matrix [T, B, width N].
  const T* at(const void* matrix, int64_t t, int width) const {
    return static_cast<const T*>(matrix) + (t * batch + row0) * width * N;
  }
  T* at(void* matrix, int64_t t, int width) const { return static_cast<T*>(matrix) + (t * batch + row0) * width * N; }
  const T* start(int r) const { return reset_state ? reset_state + (row0 + r) * N : zeros.get(); }
  // fn(block, count of lanes, row, element of blocked matrices) for all rows of some blocks that run at step t.
  template <class F>
  ORTHOKERN_INLINE void each(int64_t t, int first, int last, const F& fn) const {
    const int R_t = active[t];
    const bool gaps = !gapless(t);
    for (int b = first; b < last && b < plan.blocks(); b++) {
      const int count = lanes_of<T>(N, b);
      ptrdiff_t to = b * block;
      if (gaps) {
        for (int r = 0; r < R_t; r++, to += L)
          if (!ended(r, t)) fn(b, count, r, to);
      } else if (count == L) {
        for (int r = 0; r < R_t; r++, to += L) fn(b, L, r, to);
      } else {
        for (int r = 0; r < R_t; r++, to += L) fn(b, count, r, to);
      }
    }
  }
  void prefetch(Transfers<T>* transfers, const T* from, ptrdiff_t row, int64_t t) const {
    transfers->prefetch(from, row, L, active[t], plan.blocks());
  }
  // Per product, a share of the inputs that step t + 1 forward reads first and of the gates that step t writes.
  void prefetch_gates(Transfers<T>* transfers, int64_t t) const {
    const ptrdiff_t row = plan.gates * N;
    for (int g = 0; g < plan.gates; g++) {
      if (t + 1 < longest) prefetch(&transfers[g], at(x, t + 1, plan.gates) + g * N, row, t + 1);
      if (gates && !plan.stream) prefetch(&transfers[g], at(gates, t, plan.gates) + g * N, row, t);
    }
  }
  // Gate g of step t forward: value(b, count, r, at, product of its weights and h, its input), stored in `gates` if
  // that is not null.
  template <class F>
  ORTHOKERN_INLINE void gate(int64_t t, int g, const T* h, T* acc, Transfers<T>* transfers, const F& value) const {
    const ptrdiff_t row = plan.gates * N;
    const bool stream = plan.stream;
    const T *from = at(x, t, plan.gates) + g * N, *sums = acc;
    T* results = gates ? at(gates, t, plan.gates) + g * N : nullptr;
    const Segment<T> segment = {h, block, plan.N};
    multiply<T>(&segment, 1, plan.gate[g], active[t], acc, block, &transfers[g], [&](int first, int last) {
      each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
        const ptrdiff_t to = r * row + b * L;
        const V<T> result = value(b, count, r, at, load(sums + at), read(from + to, count));
        if (results) write(results + to, result, count, stream);
      });
    });
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
