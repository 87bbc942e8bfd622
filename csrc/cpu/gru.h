// What the kernels of the GRU share: the plan of a call, and which rows of the batch run at which step.
#pragma once

#include "cpu/gated.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
struct GruPlan {
  const GruArgs* args;
  int B, N, threads;
  bool backward;
  bool stream;             // write gates with streaming stores
  Packed<T> gate[3];       // forward [N, N]: W_r^T, W_z^T, W_n^T
  Packed<T> back, back_n;  // backward: [2N or 3N, N] W_r, W_z (, W_n); kanai: [N, N] W_n
  Scratch<T> bias;         // [3][round_up(N)]
  Scratch<int> begin;      // [threads + 1]: task i has the rows [begin[i], begin[i + 1]) of the batch

  int length(int b) const { return static_cast<int>(args->lengths ? args->lengths[b] : args->T); }
  int padded() const { return round_up(N, kLanes<T>); }
  int blocks() const { return padded() / kLanes<T>; }
  int lanes(int b) const { return N - b * kLanes<T> < kLanes<T> ? N - b * kLanes<T> : kLanes<T>; }
};

// Task i packs its share of every matrix's panels.
template <class T>
void gru_pack_task(void* context, int task) {
  GruPlan<T>& plan = *static_cast<GruPlan<T>*>(context);
  const int N = plan.N, parts = plan.args->threads;
  const T* w = static_cast<const T*>(plan.args->w);
  auto fill = [&](Packed<T>* to, int row0, const T* source, ptrdiff_t row_stride, ptrdiff_t col_stride) {
    const int panels = to->panel_count();
    to->fill(panels * task / parts, panels * (task + 1) / parts, row0, N, source, row_stride, col_stride, nullptr);
  };
  for (int g = 0; g < 3; g++) {
    const T* of_gate = w + static_cast<ptrdiff_t>(g) * N * N;
    if (!plan.backward) fill(&plan.gate[g], 0, of_gate, 1, N);
    else if (plan.args->kanai && g == 2) fill(&plan.back_n, 0, of_gate, N, 1);
    else fill(&plan.back, g * N, of_gate, N, 1);
  }
}

// A plan with memory for its weights, and without streaming stores.
template <class T>
bool prepare_gru(GruPlan<T>* plan, const GruArgs& args, bool backward) {
  plan->args = &args, plan->backward = backward, plan->stream = false;
  plan->B = static_cast<int>(args.B), plan->N = static_cast<int>(args.N);
  plan->threads = static_cast<int>(args.threads < args.B ? args.threads : args.B);
  if (!share_rows(plan)) return false;
  const int N = plan->N;
  if (backward) return plan->back.allocate((args.kanai ? 2 : 3) * N, N) && (!args.kanai || plan->back_n.allocate(N, N));
  for (int g = 0; g < 3; g++)
    if (!plan->gate[g].allocate(N, N)) return false;
  return true;
}

// Which rows [row0, row0 + R) of a group run at which step.
template <class T>
struct GruRows {
  const GruPlan<T>& plan;
  const int row0, R;
  const bool ragged;
  int longest, shortest;  // steps
  Scratch<int> steps;     // ragged: [R]
  Scratch<int> active;    // ragged: [T] R_t, one more than the last row that runs at step t
  Scratch<int> running;   // ragged: [T] how many run; fewer than R_t where a row in between has ended

  GruRows(const GruPlan<T>& plan_, int row0_, int R_)
      : plan(plan_),
        row0(row0_),
        R(R_),
        ragged(plan_.args->lengths != nullptr),
        longest(static_cast<int>(plan_.args->T)),
        shortest(longest) {}

  bool allocate() {
    if (!ragged) return true;
    const int64_t T_ = plan.args->T;
    if (!steps.allocate(R) || !active.allocate(T_) || !running.allocate(T_)) return false;
    longest = 0;
    for (int r = 0; r < R; r++) {
      const int last = (steps[r] = plan.length(row0 + r)) - 1;
      active[last] = r + 1;
      running[last]++;
      if (last >= longest) longest = last + 1;
      if (last < shortest) shortest = last + 1;
    }
    for (int t = longest - 2; t >= 0; t--) {
      if (active[t] < active[t + 1]) active[t] = active[t + 1];
      running[t] += running[t + 1];
    }
    return true;
  }
  int at(int64_t t) const { return ragged ? active[t] : R; }
  // fn(block, count of lanes, row, element of blocked matrices) for all rows that run at step t, of some blocks.
  template <class F>
  ORTHOKERN_INLINE void each(int64_t t, int first, int last, const F& fn) const {
    constexpr int L = kLanes<T>;
    const int R_t = at(t);
    const bool gaps = ragged && running[t] < R_t;
    for (int b = first; b < last && b < plan.blocks(); b++) {
      const int count = plan.lanes(b);
      ptrdiff_t to = static_cast<ptrdiff_t>(b) * R * L;
      if (gaps) {
        for (int r = 0; r < R_t; r++, to += L)
          if (t < steps[r]) fn(b, count, r, to);
      } else if (count == L) {
        for (int r = 0; r < R_t; r++, to += L) fn(b, L, r, to);
      } else {
        for (int r = 0; r < R_t; r++, to += L) fn(b, count, r, to);
      }
    }
  }
  // Zeros for the padding of a result [T, B, width].
  void clear_padding(void* result, int64_t width) const {
    if (!ragged || !result) return;
    for (int64_t t = shortest; t < plan.args->T; t++)
      for (int r = 0; r < R; r++)
        if (steps[r] <= t)
          memset(static_cast<T*>(result) + (t * plan.B + row0 + r) * width, 0, static_cast<size_t>(width) * sizeof(T));
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
