// gru_scan on the CPU: the equations are in orthokern/ops/gru_scan.py, those of the backward in Note [GRU scan
// backward] of the reference. gated.h describes the loops over rows and steps. The backward also writes the factor of
// the gradient of W_n that is neither a result nor an input.
//
//   forward
//     kanai   r, m = r*h  <- epilogue of h W_r^T      z <- epilogue of h W_z^T      n, h <- epilogue of m W_n^T
//     torch   r, z        <- epilogues of h W_r^T, h W_z^T                          q, n, h <- epilogue of h W_n^T
//   backward, from the last step
//     kanai   d_r <- epilogue of d_n W_n              ghat, d_z, d_n of t-1      <- epilogue of [d_r d_z] [W_r; W_z]
//     torch                                           d_r, d_z, d_q, d_n of t-1  <- epilogue of [d_r d_z d_q] W
//
// Cost per step and sequence: 6 N^2 flops each way. Traffic: see the op.
#include "cpu/direct.h"
#include "cpu/gated.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// The forward of a group of rows.
template <class T, bool KANAI>
struct GruForward {
  static constexpr int L = kLanes<T>;
  const GatedPlan<T>& plan;
  const GruArgs& args;
  const T* const bias;  // [3][round_up(N)]
  GatedRows<T> rows;
  // h by the parity of the step; results of products; m = r * h (torch: r); z
  Scratch<T> state[2] = {}, acc = {}, m = {}, z = {};

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

// The backward of a group of rows.
template <class T, bool KANAI>
struct GruBackward {
  static constexpr int L = kLanes<T>;
  const GatedPlan<T>& plan;
  const GruArgs& args;
  double* const norms;  // [T]: sums of squares of ghat_t
  GatedRows<T> rows;
  int now = 0;  // index of the current step's adjoints
  // Blocked. acc: results of products; direct: the part of ghat_{t-1} that needs no product. d_r, d_z and d_q have two
  // buffers, because a product still reads those of the step after.
  Scratch<T> acc = {}, direct = {}, d_n = {}, d_r[2] = {}, d_z[2] = {}, d_q[2] = {};

  bool run() {
    if (!rows.allocate(acc, direct, d_n, d_r[0], d_r[1], d_z[0], d_z[1]) ||
        !(KANAI || rows.allocate_matrices(d_q[0], d_q[1])))
      return false;
    // Rows whose last step has not been reached are zero in all of these, as required at their start.
    rows.template clear_padding<T>(args.grad_x, 3 * plan.N);
    rows.template clear_padding<T>(args.factor, plan.N);
    begin(rows.longest - 1, 0, plan.blocks());
    for (int64_t t = rows.longest - 1; t >= 0; t--) step(t);
    if (plan.to_h0) finish();
    if (plan.stream) stream_fence();
    return true;
  }

 private:
  // dL/dh0, and the part of dL/d reset_state from step 0.
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
  // The part of `carry` that a step passes to the state before it: zero if the step starts from reset_state, whose
  // gradient then receives `carry`.
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
  // The start of step t for some blocks. ghat_t is g_t plus the carry of step t + 1.
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

// The forward of a few steps, with weights that are read in place (direct.h). Results are bit-identical to GruForward.
template <class T, bool KANAI>
struct DirectGru {
  static constexpr int L = kLanes<T>;
  const GruArgs& args;
  int64_t row = 0;       // t B + b
  const T* h = nullptr;  // [N], h_{t-1}
  Scratch<T> m = {};     // kanai: r * h

  int lanes(int b) const { return lanes_of<T>(args.N, b); }
  T* gate(int g, int b) const { return static_cast<T*>(args.gates) + (row * 3 + g) * args.N + b * L; }
  V<T> x(int g, int b) const {
    return load_part(static_cast<const T*>(args.x) + (row * 3 + g) * args.N + b * L, lanes(b));
  }
  V<T> bias(int g, int b) const {
    return args.bias ? load_part(static_cast<const T*>(args.bias) + g * args.N + b * L, lanes(b)) : V<T>{};
  }
  V<T> product(int g, int b, const T* a) const {
    const T* w = static_cast<const T*>(args.w) + (g * args.N + b * L) * args.N;
    return direct_rows<T>(w, args.N, lanes(b), static_cast<int>(args.N), a, V<T>{});
  }
  // r, z of one block, and m.
  void gates(int b) const {
    for (int g = 0; g < 2; g++) {
      const V<T> value = sigmoid<T>(product(g, b, h) + x(g, b) + bias(g, b));
      store_part(gate(g, b), value, lanes(b));
      if (KANAI && g == 0) store_part(m + b * L, value * load_part(h + b * L, lanes(b)), lanes(b));
    }
  }
  // n and h_t of one block.
  void state(int b) const {
    const int64_t N = args.N;
    const int count = lanes(b);
    const V<T> q = product(2, b, KANAI ? m.get() : h) + bias(2, b);
    if (!KANAI) store_part(static_cast<T*>(args.pre) + row * N + b * L, q, count);
    const V<T> n = vtanh<T>(x(2, b) + (KANAI ? q : load_part(gate(0, b), count) * q));
    store_part(gate(2, b), n, count);
    const V<T> z = load_part(gate(1, b), count);
    const V<T> now = z * load_part(h + b * L, count) + (splat<T>(1) - z) * n;
    store_part(static_cast<T*>(args.hs) + row * N + b * L, now, count);
  }
  bool run() {
    const int64_t N = args.N;
    if (!m.allocate(N + L)) return false;
    const int blocks = static_cast<int>((N + L - 1) / L);
    for (; row < args.T * args.B; row++) {
      h = row < args.B ? static_cast<const T*>(args.h0) + row * N : static_cast<const T*>(args.hs) + (row - args.B) * N;
      direct_share(args.threads, 2 * N * N * sizeof(T), blocks, 1, [this](int from, int to) {
        for (int b = from; b < to; b++) gates(b);
      });
      direct_share(args.threads, N * N * sizeof(T), blocks, 1, [this](int from, int to) {
        for (int b = from; b < to; b++) state(b);
      });
    }
    return true;
  }
};

template <class T, bool KANAI>
bool forward(const GruArgs& args) {
  if (args.T * args.B <= kDirectRows && !args.lengths && !args.resets) return DirectGru<T, KANAI>{args}.run();
  GatedPlan<T> plan;
  Scratch<T> bias;  // [3][round_up(N)]
  if (!plan.start(args, 3, false, false, 0) || !bias.allocate(3 * static_cast<size_t>(plan.padded()))) return false;
  for (int g = 0; args.bias && g < 3; g++)
    memcpy(bias + g * plan.padded(), static_cast<const T*>(args.bias) + g * plan.N, plan.N * sizeof(T));
  return plan.each(
      [&](int row0, int R, double*) { return GruForward<T, KANAI>{plan, args, bias, {plan, args, row0, R}}.run(); });
}

template <class T, bool KANAI>
bool backward(const GruArgs& args) {
  GatedPlan<T> plan;
  if (!plan.start(args, 3, true, KANAI, args.T)) return false;
  if (!plan.each([&](int row0, int R, double* norms) {
        return GruBackward<T, KANAI>{plan, args, norms, {plan, args, row0, R}}.run();
      }))
    return false;
  write_norms(plan.threads, args.T, [&](int i) { return plan.sums + i * args.T; }, static_cast<T*>(args.grad_norm));
  return true;
}

}  // namespace

bool gru_scan_fwd(const GruArgs& args) {
  if (args.dtype == kFloat64) return args.kanai ? forward<double, true>(args) : forward<double, false>(args);
  return args.kanai ? forward<float, true>(args) : forward<float, false>(args);
}
bool gru_scan_bwd(const GruArgs& args) {
  if (args.dtype == kFloat64) return args.kanai ? backward<double, true>(args) : backward<double, false>(args);
  return args.kanai ? backward<float, true>(args) : backward<float, false>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
