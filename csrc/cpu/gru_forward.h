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
  Scratch<T> state[2] = {}, acc = {}, m = {},
             z = {};  // h by the parity of the step; results of products; m = r * h (torch: r); z

  bool run() {
    if (!rows.allocate(state[0], state[1], acc, m, z)) return false;
    block_rows<T>(rows.at(args.h0, 0, 1), plan.N, rows.R, plan.N, state[0], rows.block);
    rows.template clear_padding<T>(args.hs, plan.N);
    rows.template clear_padding<T>(args.gates, 3 * plan.N);
    rows.template clear_padding<T>(args.pre, plan.N);
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
    Transfers<T> transfers[3];
    rows.prefetch_gates(transfers, t);
    rows.prefetch(&transfers[2], rows.at(args.hs, t, 1), N, t);

    const T *b_r = bias, *b_z = b_r + plan.padded(), *b_n = b_z + plan.padded();
    T *to_m = m, *to_z = z, *hs = rows.at(args.hs, t, 1), *next = state[1 - t % 2];
    T* pre = KANAI ? nullptr : rows.at(args.pre, t, 1);
    rows.gate(t, 0, h, acc, transfers,
              [=](int b, int, int, ptrdiff_t at, V<T> sum, V<T> x) __attribute__((always_inline)) {
                const V<T> r = sigmoid<T>(sum + x + load(b_r + b * L));
                store(to_m + at, KANAI ? r * load(h + at) : r);
                return r;
              });
    rows.gate(t, 1, h, acc, transfers,
              [=](int b, int, int, ptrdiff_t at, V<T> sum, V<T> x) __attribute__((always_inline)) {
                const V<T> z_t = sigmoid<T>(sum + x + load(b_z + b * L));
                store(to_z + at, z_t);
                return z_t;
              });
    rows.gate(t, 2, KANAI ? to_m : h, acc, transfers,
              [=](int b, int count, int r, ptrdiff_t at, V<T> sum, V<T> x) __attribute__((always_inline)) {
                const ptrdiff_t of_h = r * N + b * L;
                const V<T> q = sum + load(b_n + b * L);
                if (!KANAI) write(pre + of_h, q, count, false);
                const V<T> n = vtanh<T>(x + (KANAI ? q : load(to_m + at) * q));
                // h = n + z (h' - n), in the form of the definition: exact at z = 0 and z = 1
                const V<T> z_t = load(to_z + at), now = z_t * load(h + at) + (splat<T>(1) - z_t) * n;
                store(next + at, now);
                write(hs + of_h, now, count, false);
                return n;
              });
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
