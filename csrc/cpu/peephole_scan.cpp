// peephole_scan, the LSTM with peepholes, on the CPU: the equations are in the docstring of
// orthokern/ops/peephole_scan.py. gated.h describes the loops over rows and steps.
//
//   forward    i <- epilogue of h W_i^T    f, f*c' <- of h W_f^T    g, c <- of h W_g^T    o, h <- of h W_o^T
//   backward   dh, dc and d_i, d_f, d_g, d_o of step t - 1  <- epilogue of [d_i d_f d_g d_o] W of step t
//
// Gradients of peepholes are summed over the rows of a step in the working precision, and over steps in float64. Cost
// per step and sequence: 8 N^2 flops each way.
#include "cpu/gated.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kGates = 4, kPeepholes = 3;

// The forward of a group of rows.
template <class T>
struct PeepholeForward {
  static constexpr int L = kLanes<T>;
  const GatedPlan<T>& plan;
  const PeepholeArgs& args;
  const T* const peephole;  // [3][round_up(N)]
  GatedRows<T> rows;
  // blocked: h by the parity of the step, results of products, c, and i
  Scratch<T> state[2] = {}, acc = {}, cell = {}, in = {};

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

// The backward of a group of rows.
template <class T>
struct PeepholeBackward {
  static constexpr int L = kLanes<T>;
  const GatedPlan<T>& plan;
  const PeepholeArgs& args;
  const T* const peephole;  // [3][round_up(N)]
  double* const sums;       // [3][round_up(N)]: gradients of the peepholes
  GatedRows<T> rows;
  // Blocked. The gradients that a step passes to the step before: of h, by the product, and of c.
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

template <class T>
bool run(const PeepholeArgs& args, bool backward) {
  GatedPlan<T> plan;
  Scratch<T> peephole;  // [3][round_up(N)]
  const size_t size = kPeepholes * static_cast<size_t>(round_up(args.N, kLanes<T>));
  if (!plan.start(args, 4, backward, false, backward ? size : 0) || !peephole.allocate(size)) return false;
  for (int k = 0; k < kPeepholes; k++)
    memcpy(peephole + k * plan.padded(), static_cast<const T*>(args.peephole) + k * plan.N, plan.N * sizeof(T));
  const bool ok = plan.each([&](int row0, int R, double* sums) {
    if (backward) return PeepholeBackward<T>{plan, args, peephole, sums, {plan, args, row0, R}}.run();
    return PeepholeForward<T>{plan, args, peephole, {plan, args, row0, R}}.run();
  });
  if (!ok || !backward) return ok;
  T* to = static_cast<T*>(args.grad_peephole);
  for (int k = 0; k < kPeepholes; k++)
    for (int n = 0; n < plan.N; n++)
      to[k * plan.N + n] =
          static_cast<T>(task_total(plan.threads, [&](int i) { return plan.sums + i * size; }, k * plan.padded() + n));
  return true;
}

}  // namespace

bool peephole_scan_fwd(const PeepholeArgs& args) {
  return args.dtype == kFloat64 ? run<double>(args, false) : run<float>(args, false);
}
bool peephole_scan_bwd(const PeepholeArgs& args) {
  return args.dtype == kFloat64 ? run<double>(args, true) : run<float>(args, true);
}

}  // namespace orthokern::ORTHOKERN_ISA
