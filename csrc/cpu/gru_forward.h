// The forward of gru_scan.cpp: by threads with rows of their own, or (gru_team.h) by threads that share the columns.
#pragma once

#include "cpu/gru.h"
#include "cpu/team.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// Blocked matrices [N/L][R][L] of one step, and the rows of it in the arguments of the call.
template <class T, bool KANAI>
struct GruStep {
  const GruPlan<T>& plan;
  const GruRows<T>& rows;
  const int64_t t;
  const T* const h;                       // h_{t-1}
  T *const next, *const acc;              // h_t; results of products
  T *const m, *const z;                   // kanai: r * h, torch: r; z
  const bool stream;                      // of the gates
  const T* const x;                       // [.., 3 N]
  T *const gates, *const hs, *const pre;  // [.., 3 N], [.., N]; torch: [.., N]

  GruStep(const GruPlan<T>& plan_, const GruRows<T>& rows_, int64_t t_, const T* h_, T* next_, T* acc_, T* m_, T* z_,
          bool stream_)
      : plan(plan_),
        rows(rows_),
        t(t_),
        h(h_),
        next(next_),
        acc(acc_),
        m(m_),
        z(z_),
        stream(stream_),
        x(static_cast<const T*>(plan.args->x) + row() * 3 * plan.N),
        gates(static_cast<T*>(plan.args->gates) + row() * 3 * plan.N),
        hs(static_cast<T*>(plan.args->hs) + row() * plan.N),
        pre(KANAI ? nullptr : static_cast<T*>(plan.args->pre) + row() * plan.N) {}
  ptrdiff_t row() const { return t * plan.B + rows.row0; }

  // The epilogues of the three products, for blocks [first, last).
  ORTHOKERN_INLINE void reset_gate(int first, int last) const {
    constexpr int L = kLanes<T>;
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t to = r * 3 * static_cast<ptrdiff_t>(plan.N) + b * L;
      const V<T> gate = sigmoid<T>(load(acc + at) + read(x + to, count) + load(plan.bias + b * L));
      write(gates + to, gate, count, stream);
      store(m + at, KANAI ? gate * load(h + at) : gate);
    });
  }
  ORTHOKERN_INLINE void update_gate(int first, int last) const {
    constexpr int L = kLanes<T>;
    const ptrdiff_t N = plan.N;
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t to = r * 3 * N + N + b * L;
      const V<T> gate = sigmoid<T>(load(acc + at) + read(x + to, count) + load(plan.bias + plan.padded() + b * L));
      write(gates + to, gate, count, stream);
      store(z + at, gate);
    });
  }
  ORTHOKERN_INLINE void state(int first, int last) const {
    constexpr int L = kLanes<T>;
    const ptrdiff_t N = plan.N;
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t to = r * 3 * N + 2 * N + b * L;
      const V<T> q = load(acc + at) + load(plan.bias + 2 * plan.padded() + b * L);
      if (!KANAI) write(pre + r * N + b * L, q, count, false);
      const V<T> n = vtanh<T>(read(x + to, count) + (KANAI ? q : load(m + at) * q));
      write(gates + to, n, count, stream);
      // h = n + z (h' - n), in the form of the definition: exact at z = 0 and z = 1
      const V<T> gate = load(z + at), now = gate * load(h + at) + (splat<T>(1) - gate) * n;
      store(next + at, now);
      write(hs + r * N + b * L, now, count, false);
    });
  }
};

// Threads that share the columns of every product.
template <class T>
struct GruTeam {
  Team team;
  const GruPlan<T>* plan;
  Scratch<T> state[2], acc, m, z;  // [N/L][B][L] each; the state by the parity of the step
};

inline bool team_serves(const GruArgs& args) {
  return !args.lengths && !args.resets &&
         share_columns(args.B, args.threads, args.N * args.N * (args.dtype == kFloat64 ? 8 : 4));
}

// Part `part` of a phase. kanai: r and z are one phase and n another, which needs all of r * h. torch: all are one.
template <class T, bool KANAI>
void team_part(GruTeam<T>& call, const GruRows<T>& rows, int64_t phase, int part) {
  constexpr int phases = KANAI ? 2 : 1;
  const GruPlan<T>& plan = *call.plan;
  const int panels = plan.gate[0].panel_count(), parts = call.team.threads;
  const int from = panels * part / parts, to = panels * (part + 1) / parts;
  if (from == to) return;
  const int64_t t = phase / phases;
  const ptrdiff_t block = static_cast<ptrdiff_t>(rows.R) * kLanes<T>;
  const GruStep<T, KANAI> step(plan, rows, t, call.state[t % 2], call.state[1 - t % 2], call.acc, call.m, call.z,
                               false);
  const Segment<T> from_h = {call.state[t % 2], block, plan.N}, from_m = {call.m, block, plan.N};
  auto product = [&](int g, const Segment<T>& a, auto after) {
    Transfers<T> none;
    multiply<T>(&a, 1, plan.gate[g], rows.R, call.acc, block, &none, after, from, to);
  };
  if (phase % phases == 0) {
    product(0, from_h, [&](int first, int last) { step.reset_gate(first, last); });
    product(1, from_h, [&](int first, int last) { step.update_gate(first, last); });
  }
  if (phase % phases == phases - 1)
    product(2, KANAI ? from_m : from_h, [&](int first, int last) { step.state(first, last); });
}

template <class T>
void gru_team_task(void* context, int task) {
  GruTeam<T>& call = *static_cast<GruTeam<T>*>(context);
  const GruPlan<T>& plan = *call.plan;
  const FlushDenormals flush;
  const GruRows<T> rows(plan, 0, plan.B);
  if (plan.args->kanai)
    call.team.run(task, 2 * plan.args->T,
                  [&](int64_t phase, int part) { team_part<T, true>(call, rows, phase, part); });
  else
    call.team.run(task, plan.args->T, [&](int64_t phase, int part) { team_part<T, false>(call, rows, phase, part); });
}

template <class T>
bool team_forward(const GruPlan<T>& plan) {
  GruTeam<T> call = {};
  call.plan = &plan;
  call.team.threads = plan.args->threads < kTeamMost ? plan.args->threads : kTeamMost;
  const size_t size = static_cast<size_t>(round_up(plan.N, 2 * kLanes<T>)) * plan.B;
  if (!call.state[0].allocate(size) || !call.state[1].allocate(size) || !call.acc.allocate(size) ||
      !call.m.allocate(size) || !call.z.allocate(size))
    return false;
  block_rows(plan, static_cast<const T*>(plan.args->h0), plan.B, call.state[0].get());
  parallel_run(call.team.threads, gru_team_task<T>, &call);
  return !call.team.failed;
}

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
