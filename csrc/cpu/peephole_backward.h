// The backward of peephole_scan.cpp for a group of rows.
#pragma once

#include "cpu/gated.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kPeepholes = 3;

template <class T>
struct PeepholeBackward {
  static constexpr int L = kLanes<T>, kGates = 4;
  const GatedPlan<T>& plan;
  const PeepholeArgs& args;
  const T* const peephole;  // [3][round_up(N)]
  double* const sums;       // [3][round_up(N)]: gradients of the peepholes
  GatedRows<T> rows;
  // Blocked. What a step passes to the one before: to h by the product, and to c.
  Scratch<T> acc = {}, cell = {};
  // Of i, f, g, o, at this step and at the one before: the product still reads the former when the epilogue of its
  // first columns writes the latter.
  Scratch<T> d[kGates] = {}, d_next[kGates] = {};

  bool run() {
    if (!rows.allocate(acc, cell)) return false;
    for (int g = 0; g < kGates; g++)
      if (!rows.allocate_matrices(d[g], d_next[g])) return false;
    begin(rows.steps - 1, 0, plan.blocks());
    for (int64_t t = rows.steps - 1; t >= 0; t--) {
      Transfers<T> transfers;
      if (t > 0) prefetch(t - 1, &transfers);
      for (int g = 0; g < kGates; g++) d[g].swap(d_next[g]);
      Segment<T> from[kGates];
      for (int g = 0; g < kGates; g++) from[g] = {d[g], rows.block, plan.N};
      multiply<T>(from, kGates, plan.back, rows.R, acc, rows.block, &transfers, [&](int first, int last) {
        if (t > 0) begin(t - 1, first, last);
      });
    }
    unblock_rows<T>(acc, rows.block, rows.R, plan.N, rows.at(args.grad_h0, 0, 1), plan.N);
    unblock_rows<T>(cell, rows.block, rows.R, plan.N, rows.at(args.grad_c0, 0, 1), plan.N);
    if (plan.stream) stream_fence();
    return true;
  }

 private:
  const T* cell_before(int64_t t) const { return t ? rows.at(args.saved_cs, t - 1, 1) : rows.at(args.c0, 0, 1); }
  // The gradient of a result at step t; null: zeros.
  const T* grad_of(const void* result, int64_t t) const { return result ? rows.at(result, t, 1) : nullptr; }

  void prefetch(int64_t t, Transfers<T>* transfers) const {
    const ptrdiff_t N = plan.N;
    if (args.grad_hs) rows.prefetch(transfers, grad_of(args.grad_hs, t), N, t);
    if (args.grad_cs) rows.prefetch(transfers, grad_of(args.grad_cs, t), N, t);
    rows.prefetch(transfers, cell_before(t), N, t);
    transfers->prefetch(rows.at(args.saved_gates, t, kGates), kGates * N, L, rows.R, (kGates * plan.N + L - 1) / L);
  }
  // Blocks [first, last) of step t, from acc and cell.
  void begin(int64_t t, int first, int last) {
    const ptrdiff_t N = plan.N, padded = plan.padded();
    const bool stream = plan.stream;
    const T *grad_h = grad_of(args.grad_hs, t), *grad_c = grad_of(args.grad_cs, t), *from = acc;
    const T *cs = rows.at(args.saved_cs, t, 1), *cs_before = cell_before(t);
    const T* gates = rows.at(args.saved_gates, t, kGates);
    T *grad_x = rows.at(args.grad_x, t, kGates), *passed = cell;
    T *to_i = d_next[0], *to_f = d_next[1], *to_g = d_next[2], *to_o = d_next[3];
    const V<T> one = splat<T>(1);
    for (int b = first; b < last && b < plan.blocks(); b++) {
      const T* of_block = peephole + b * L;
      const V<T> p_i = load(of_block), p_f = load(of_block + padded), p_o = load(of_block + 2 * padded);
      V<T> sum[kPeepholes] = {V<T>{}, V<T>{}, V<T>{}};
      rows.each(t, b, b + 1, [&](int, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
        const ptrdiff_t of_h = r * N + b * L, of_gates = r * kGates * N + b * L;
        V<T> dh = load(from + at), dc = load(passed + at);
        if (grad_h) dh += read(grad_h + of_h, count);
        if (grad_c) dc += read(grad_c + of_h, count);
        const V<T> i = read(gates + of_gates, count), f = read(gates + of_gates + N, count),
                   g = read(gates + of_gates + 2 * N, count), o = read(gates + of_gates + 3 * N, count),
                   c = read(cs + of_h, count), before = read(cs_before + of_h, count);
        const V<T> shown = vtanh<T>(c);
        const V<T> d_o = dh * shown * (o * (one - o));
        dc += dh * o * (one - shown * shown) + d_o * p_o;
        const V<T> d_i = dc * g * (i * (one - i)), d_f = dc * before * (f * (one - f)), d_g = dc * i * (one - g * g);
        store(passed + at, dc * f + d_i * p_i + d_f * p_f);
        store(to_i + at, d_i), store(to_f + at, d_f), store(to_g + at, d_g), store(to_o + at, d_o);
        write(grad_x + of_gates, d_i, count, stream);
        write(grad_x + of_gates + N, d_f, count, stream);
        write(grad_x + of_gates + 2 * N, d_g, count, stream);
        write(grad_x + of_gates + 3 * N, d_o, count, stream);
        sum[0] += d_i * before, sum[1] += d_f * before, sum[2] += d_o * c;
      });
      for (int k = 0; k < kPeepholes; k++)
        for (int n = 0; n < L; n++) sums[k * padded + b * L + n] += static_cast<double>(sum[k][n]);
    }
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
