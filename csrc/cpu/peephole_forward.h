// The forward of peephole_scan.cpp for a group of rows.
#pragma once

#include "cpu/gated.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
struct PeepholeForward {
  static constexpr int L = kLanes<T>, kGates = 4;
  const GatedPlan<T>& plan;
  const PeepholeArgs& args;
  const T* const peephole;  // [3][round_up(N)]
  GatedRows<T> rows;
  Scratch<T> state[2] = {}, acc = {}, cell = {},
             in = {};  // blocked: h by the parity of the step, results of products, c, and i

  bool run() {
    if (!rows.allocate(state[0], state[1], acc, cell, in)) return false;
    block_rows<T>(rows.at(args.h0, 0, 1), plan.N, rows.R, plan.N, state[0], rows.block);
    block_rows<T>(rows.at(args.c0, 0, 1), plan.N, rows.R, plan.N, cell, rows.block);
    for (int64_t t = 0; t < rows.steps; t++) step(t);
    if (plan.stream) stream_fence();
    return true;
  }

 private:
  void step(int64_t t) {
    const ptrdiff_t N = plan.N;
    Transfers<T> transfers[kGates];
    rows.prefetch_gates(transfers, t);
    rows.prefetch(&transfers[2], rows.at(args.cs, t, 1), N, t);
    rows.prefetch(&transfers[3], rows.at(args.hs, t, 1), N, t);

    const T* h = state[t % 2];
    T *to_i = in, *c_of = cell, *next = state[1 - t % 2], *hs = rows.at(args.hs, t, 1), *cs = rows.at(args.cs, t, 1);
    const T *p_i = peephole, *p_f = p_i + plan.padded(), *p_o = p_f + plan.padded();
    rows.gate(t, 0, h, acc, transfers,
              [=](int b, int, int, ptrdiff_t at, V<T> a, V<T> x) __attribute__((always_inline)) {
                const V<T> i = sigmoid<T>(a + x + load(p_i + b * L) * load(c_of + at));
                store(to_i + at, i);
                return i;
              });
    rows.gate(t, 1, h, acc, transfers,
              [=](int b, int, int, ptrdiff_t at, V<T> a, V<T> x) __attribute__((always_inline)) {
                const V<T> c = load(c_of + at), f = sigmoid<T>(a + x + load(p_f + b * L) * c);
                store(c_of + at, f * c);
                return f;
              });
    rows.gate(t, 2, h, acc, transfers,
              [=](int b, int count, int r, ptrdiff_t at, V<T> a, V<T> x) __attribute__((always_inline)) {
                const V<T> g = vtanh<T>(a + x), c = load(c_of + at) + load(to_i + at) * g;
                store(c_of + at, c);
                write(cs + r * N + b * L, c, count, false);
                return g;
              });
    rows.gate(t, 3, h, acc, transfers,
              [=](int b, int count, int r, ptrdiff_t at, V<T> a, V<T> x) __attribute__((always_inline)) {
                const V<T> c = load(c_of + at), o = sigmoid<T>(a + x + load(p_o + b * L) * c);
                const V<T> now = o * vtanh<T>(c);
                store(next + at, now);
                write(hs + r * N + b * L, now, count, false);
                return o;
              });
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
