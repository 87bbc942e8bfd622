// The forward of gru_scan.cpp for a group of rows.
#pragma once

#include "cpu/gated.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T, bool KANAI>
struct GruForward {
  static constexpr int L = kLanes<T>;
  const GatedPlan<T>& plan;
  const GruArgs& args;
  const T* const bias;  // [3][round_up(N)]
  GatedRows<T> rows;
  Scratch<T> state[2], acc, m, z;  // h by the parity of the step; results of products; m = r * h (torch: r); z

  GruForward(const GatedPlan<T>& plan_, const GruArgs& args_, const T* bias_, int row0, int R)
      : plan(plan_), args(args_), bias(bias_), rows(plan_, args_, row0, R) {}

  bool run() {
    if (!rows.allocate(state[0], state[1], acc, m, z)) return false;
    rows.read_state(args.h0, state[0]);
    rows.clear_padding(args.hs, 1);
    rows.clear_padding(args.gates, 3);
    rows.clear_padding(args.pre, 1);
    for (int64_t t = 0; t < rows.longest; t++) step(t);
    if (plan.stream) stream_fence();
    return true;
  }

 private:
  void step(int64_t t) {
    const ptrdiff_t N = plan.N;
    T* h = state[t % 2];
    if (const uint8_t* cut = rows.resets_at(t))
      rows.each(t, 0, plan.blocks(), [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
        if (cut[r]) store(h + at, read(rows.start(r) + b * L, count));
      });
    // Prefetches what the next step reads first, a third with each product.
    Transfers<T> transfers[3];
    for (int g = 0; g < 3; g++) {
      if (t + 1 < rows.longest) rows.prefetch(&transfers[g], rows.at(args.x, t + 1, 3) + g * N, 3 * N, t + 1);
      if (!plan.stream) rows.prefetch(&transfers[g], rows.at(args.gates, t, 3) + g * N, 3 * N, t);
    }
    rows.prefetch(&transfers[2], rows.at(args.hs, t, 1), N, t);
    product(t, 0, h, transfers, [&](int first, int last) { reset_gate(t, first, last); });
    product(t, 1, h, transfers, [&](int first, int last) { update_gate(t, first, last); });
    product(t, 2, KANAI ? m.get() : h, transfers, [&](int first, int last) { new_state(t, first, last); });
  }
  void product(int64_t t, int g, const T* a, Transfers<T>* transfers, const Epilogue& after) const {
    const Segment<T> segment = {a, rows.block, plan.N};
    multiply<T>(&segment, 1, plan.gate[g], rows.active[t], acc, rows.block, &transfers[g], after);
  }
  // The epilogues of the three products, for blocks [first, last).
  ORTHOKERN_INLINE void reset_gate(int64_t t, int first, int last) const {
    const ptrdiff_t N = plan.N;
    const bool stream = plan.stream;
    const T *x = rows.at(args.x, t, 3), *h = state[t % 2], *sums = acc, *b_r = bias;
    T *gates = rows.at(args.gates, t, 3), *to_m = m;
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t to = r * 3 * N + b * L;
      const V<T> gate = sigmoid<T>(load(sums + at) + read(x + to, count) + load(b_r + b * L));
      write(gates + to, gate, count, stream);
      store(to_m + at, KANAI ? gate * load(h + at) : gate);
    });
  }
  ORTHOKERN_INLINE void update_gate(int64_t t, int first, int last) const {
    const ptrdiff_t N = plan.N;
    const bool stream = plan.stream;
    const T *x = rows.at(args.x, t, 3) + N, *sums = acc, *b_z = bias + plan.padded();
    T *gates = rows.at(args.gates, t, 3) + N, *to_z = z;
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t to = r * 3 * N + b * L;
      const V<T> gate = sigmoid<T>(load(sums + at) + read(x + to, count) + load(b_z + b * L));
      write(gates + to, gate, count, stream);
      store(to_z + at, gate);
    });
  }
  ORTHOKERN_INLINE void new_state(int64_t t, int first, int last) const {
    const ptrdiff_t N = plan.N;
    const bool stream = plan.stream;
    const T *x = rows.at(args.x, t, 3) + 2 * N, *h = state[t % 2], *sums = acc, *b_n = bias + 2 * plan.padded();
    const T *of_m = m, *of_z = z;
    T *gates = rows.at(args.gates, t, 3) + 2 * N, *hs = rows.at(args.hs, t, 1), *next = state[1 - t % 2];
    T* pre = KANAI ? nullptr : rows.at(args.pre, t, 1);
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t of_h = r * N + b * L, to = r * 3 * N + b * L;
      const V<T> q = load(sums + at) + load(b_n + b * L);
      if (!KANAI) write(pre + of_h, q, count, false);
      const V<T> n = vtanh<T>(read(x + to, count) + (KANAI ? q : load(of_m + at) * q));
      write(gates + to, n, count, stream);
      // h = n + z (h' - n), in the form of the definition: exact at z = 0 and z = 1
      const V<T> gate = load(of_z + at), now = gate * load(h + at) + (splat<T>(1) - gate) * n;
      store(next + at, now);
      write(hs + of_h, now, count, false);
    });
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
