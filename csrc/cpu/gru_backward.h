// The backward of gru_scan.cpp for a group of rows.
#pragma once

#include "cpu/gated.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T, bool KANAI>
struct GruBackward {
  static constexpr int L = kLanes<T>;
  const GatedPlan<T>& plan;
  const GruArgs& args;
  double* const norms;  // [T]: sums of squares of ghat_t
  GatedRows<T> rows;
  int now = 0;  // which of two steps' adjoints are those of the current step
  // Blocked. acc: results of products; direct: the part of ghat_{t-1} that needs no product. d_r, d_z and d_q of two
  // steps, because a product still reads those of the step after.
  Scratch<T> acc = {}, direct = {}, d_n = {}, d_r[2] = {}, d_z[2] = {}, d_q[2] = {};

  bool run() {
    if (!rows.allocate(acc, direct, d_n, d_r[0], d_r[1], d_z[0], d_z[1]) ||
        !(KANAI || rows.allocate_matrices(d_q[0], d_q[1])))
      return false;
    // Rows whose last step has not been reached are zero in all of these, which is what they have to start with.
    rows.template clear_padding<T>(args.grad_x, 3 * plan.N);
    rows.template clear_padding<T>(args.factor, plan.N);
    begin(rows.longest - 1, 0, plan.blocks());
    for (int64_t t = rows.longest - 1; t >= 0; t--) step(t);
    if (plan.to_h0) finish();
    if (plan.stream) stream_fence();
    return true;
  }

 private:
  // dL/dh0, and the part of step 0 in dL/d reset_state.
  void finish() {
    T* grad_h0 = args.grad_h0 ? rows.at(args.grad_h0, 0, 1) : nullptr;
    const uint8_t* cut = rows.resets_at(0);
    const ptrdiff_t N = plan.N;
    rows.each(0, 0, plan.blocks(), [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const V<T> carry = passed(cut, load(acc + at) + load(direct + at), b, count, r);
      if (grad_h0) write(grad_h0 + r * N + b * L, carry, count, false);
    });
  }
  const T* state_before(int64_t t) const { return t ? rows.at(args.saved_hs, t - 1, 1) : rows.at(args.h0, 0, 1); }
  // What a step passes to the state before it, of what it has for it. A step that starts from reset_state passes it
  // there.
  ORTHOKERN_INLINE V<T> passed(const uint8_t* cut, V<T> carry, int b, int count, int r) const {
    if (!cut || !cut[r]) return carry;
    if (args.grad_reset_state) {
      T* sum = rows.at(args.grad_reset_state, 0, 1) + r * static_cast<ptrdiff_t>(plan.N) + b * L;
      write(sum, read(sum, count) + carry, count, false);
    }
    return V<T>{};
  }
  // The state from which a step starts, in rows h.
  ORTHOKERN_INLINE V<T> started(const uint8_t* cut, const T* h, int b, int count, int r) const {
    return read(cut && cut[r] ? rows.start(r) + b * L : h + r * static_cast<ptrdiff_t>(plan.N) + b * L, count);
  }

  void step(int64_t t) {
    const ptrdiff_t N = plan.N;
    // Prefetches what step t - 1 reads.
    Transfers<T> transfers[2];
    if (t > 0) {
      Transfers<T>* first = &transfers[KANAI ? 0 : 1];
      rows.prefetch(first, rows.at(args.grad_hs, t - 1, 1), N, t - 1);
      rows.prefetch(first, state_before(t - 1), N, t - 1);
      transfers[1].prefetch(rows.at(args.saved_gates, t - 1, 3), 3 * N, L, rows.active[t - 1],
                            (3 * plan.N + L - 1) / L);
      if (!KANAI) rows.prefetch(&transfers[1], rows.at(args.saved_pre, t - 1, 1), N, t - 1);
    }
    const int R_t = rows.active[t];
    const ptrdiff_t block = rows.block;
    if (KANAI) {
      const Segment<T> from = {d_n, block, plan.N};
      multiply<T>(&from, 1, plan.back_last, R_t, acc, block, &transfers[0],
                  [&](int first, int last) { reset_gate(t, first, last); });
    }
    const Segment<T> from[3] = {{d_r[now], block, plan.N}, {d_z[now], block, plan.N}, {d_q[now], block, plan.N}};
    now = 1 - now;
    if (t == 0 && !plan.to_h0) return;
    multiply<T>(from, KANAI ? 2 : 3, plan.back, R_t, acc, block, &transfers[1], [&](int first, int last) {
      if (t > 0) begin(t - 1, first, last);
    });
  }
  // The start of step t for some blocks. ghat_t is g_t and what step t + 1 passes.
  void begin(int64_t t, int first, int last) {
    const ptrdiff_t N = plan.N;
    const bool stream = plan.stream;
    const T *g = rows.at(args.grad_hs, t, 1), *h = state_before(t), *gates = rows.at(args.saved_gates, t, 3);
    const T *pre = KANAI ? nullptr : rows.at(args.saved_pre, t, 1), *sums = acc;
    T *grad_x = rows.at(args.grad_x, t, 3), *factor = rows.at(args.factor, t, 1);
    T *to_z = d_z[now], *to_r = d_r[now], *to_q = d_q[now], *to_n = d_n, *kept = direct;
    const uint8_t *cut = rows.resets_at(t), *cut_after = rows.resets_at(t + 1);
    SquareSum<T> square;
    const V<T> one = splat<T>(1);
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t of_h = r * N + b * L, of_r = r * 3 * N + b * L;
      const V<T> ghat = read(g + of_h, count) + passed(cut_after, load(sums + at) + load(kept + at), b, count, r);
      square.add(ghat);
      const V<T> z = read(gates + of_r + N, count), n = read(gates + of_r + 2 * N, count),
                 before = started(cut, h, b, count, r);
      const V<T> by_z = z * (one - z), by_n = one - n * n;
      const V<T> z_out = ghat * (before - n) * by_z, n_out = ghat * (one - z) * by_n;
      store(to_z + at, z_out);
      store(kept + at, ghat * z);
      write(grad_x + of_r + N, z_out, count, stream);
      write(grad_x + of_r + 2 * N, n_out, count, stream);
      if (KANAI) {
        store(to_n + at, n_out);
      } else {
        const V<T> gate = read(gates + of_r, count), by_r = gate * (one - gate);
        const V<T> q_out = n_out * gate, r_out = n_out * read(pre + of_h, count) * by_r;
        store(to_r + at, r_out);
        store(to_q + at, q_out);
        write(grad_x + of_r, r_out, count, stream);
        write(factor + of_h, q_out, count, false);
      }
    });
    norms[t] += square.total();
  }
  // kanai: d_r of step t from d_m = W_n^T d_n, which is in acc.
  void reset_gate(int64_t t, int first, int last) {
    const ptrdiff_t N = plan.N;
    const bool stream = plan.stream;
    const T *h = state_before(t), *gates = rows.at(args.saved_gates, t, 3), *sums = acc;
    T *grad_x = rows.at(args.grad_x, t, 3), *factor = rows.at(args.factor, t, 1), *to_r = d_r[now], *kept = direct;
    const uint8_t* cut = rows.resets_at(t);
    const V<T> one = splat<T>(1);
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t of_h = r * N + b * L, of_r = r * 3 * N + b * L;
      const V<T> gate = read(gates + of_r, count), before = started(cut, h, b, count, r), d_m = load(sums + at);
      const V<T> r_out = d_m * before * (gate * (one - gate));
      store(to_r + at, r_out);
      write(grad_x + of_r, r_out, count, stream);
      write(factor + of_h, gate * before, count, false);
      store(kept + at, load(kept + at) + gate * d_m);
    });
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
