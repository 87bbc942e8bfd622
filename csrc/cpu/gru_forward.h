// Steps of the forward of gru_scan.cpp.
#pragma once

#include "cpu/gru.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// Blocked matrices [N/L][R][L] of R rows: h by the parity of the step; results of products; m = r * h (torch: r); z.
template <class T>
struct GruStates {
  Scratch<T> state[2], acc, m, z;

  bool start(const GruPlan<T>& plan, int row0, int R) {
    if (!allocate_rows(plan, R, state[0], state[1], acc, m, z)) return false;
    block_rows(plan, static_cast<const T*>(plan.args->h0) + static_cast<ptrdiff_t>(row0) * plan.N, R, state[0].get());
    return true;
  }
};

// One step of some rows: its matrices, and its place in the results.
template <class T, bool KANAI>
struct GruStep {
  const GruPlan<T>& plan;
  const GruRows<T>& rows;
  const int64_t t;
  T *const h, *const next, *const acc, *const m, *const z;
  const bool stream;                      // of the gates
  const T* const x;                       // [.., 3 N]
  T *const gates, *const hs, *const pre;  // [.., 3 N], [.., N]; torch: [.., N]

  GruStep(const GruPlan<T>& plan_, const GruRows<T>& rows_, const GruStates<T>& states, int64_t t_, bool stream_)
      : plan(plan_),
        rows(rows_),
        t(t_),
        h(states.state[t % 2]),
        next(states.state[1 - t % 2]),
        acc(states.acc),
        m(states.m),
        z(states.z),
        stream(stream_),
        x(static_cast<const T*>(plan.args->x) + row() * 3 * plan.N),
        gates(static_cast<T*>(plan.args->gates) + row() * 3 * plan.N),
        hs(static_cast<T*>(plan.args->hs) + row() * plan.N),
        pre(KANAI ? nullptr : static_cast<T*>(plan.args->pre) + row() * plan.N) {}
  ptrdiff_t row() const { return t * plan.B + rows.row0; }

  // Panels [from, to) of r and z, and of n and h_t (kanai: which need all of m); and the transfers of each gate.
  ORTHOKERN_INLINE void compute_gates(int from, int to, Transfers<T>* transfers) const {
    product(0, h, from, to, transfers, [&](int first, int last) { reset_gate(first, last); });
    product(1, h, from, to, transfers, [&](int first, int last) { update_gate(first, last); });
  }
  ORTHOKERN_INLINE void compute_state(int from, int to, Transfers<T>* transfers) const {
    product(2, KANAI ? m : h, from, to, transfers, [&](int first, int last) { state(first, last); });
  }

 private:
  template <class After>
  ORTHOKERN_INLINE void product(int g, const T* a, int from, int to, Transfers<T>* transfers,
                                const After& after) const {
    const ptrdiff_t block = static_cast<ptrdiff_t>(rows.R) * kLanes<T>;
    const Segment<T> segment = {a, block, plan.N};
    multiply<T>(&segment, 1, plan.gate[g], rows.at(t), acc, block, &transfers[g], after, from, to);
  }
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

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
