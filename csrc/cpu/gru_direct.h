// A few steps of the GRU, with weights that are read in place (direct.h); forward and backward.
#pragma once

#include "cpu/direct.h"
#include "cpu/gru.h"
#include "cpu/vmath.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// The forward of a few steps, with weights that are read in place (direct.h). Same bits.
template <class T, bool KANAI>
struct DirectGru {
  static constexpr int L = kLanes<T>;
  const GruArgs& args;
  int64_t row = 0;       // t B + b
  const T* h = nullptr;  // [N], h_{t-1}
  Scratch<T> m = {};     // kanai: r * h

  int lanes(int b) const { return args.N - b * L < L ? static_cast<int>(args.N) - b * L : L; }
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
  static void gates(void* context, int from, int to) {
    const DirectGru& self = *static_cast<DirectGru*>(context);
    for (int b = from; b < to; b++)
      for (int g = 0; g < 2; g++) {
        const V<T> value = sigmoid<T>(self.product(g, b, self.h) + self.x(g, b) + self.bias(g, b));
        store_part(self.gate(g, b), value, self.lanes(b));
        if (KANAI && g == 0)
          store_part(self.m + b * L, value * load_part(self.h + b * L, self.lanes(b)), self.lanes(b));
      }
  }
  // n and h_t of one block.
  static void states(void* context, int from, int to) {
    const DirectGru& self = *static_cast<DirectGru*>(context);
    const int64_t N = self.args.N;
    for (int b = from; b < to; b++) {
      const int count = self.lanes(b);
      const V<T> q = self.product(2, b, KANAI ? self.m.get() : self.h) + self.bias(2, b);
      if (!KANAI) store_part(static_cast<T*>(self.args.pre) + self.row * N + b * L, q, count);
      const V<T> n = vtanh<T>(self.x(2, b) + (KANAI ? q : load_part(self.gate(0, b), count) * q));
      store_part(self.gate(2, b), n, count);
      const V<T> z = load_part(self.gate(1, b), count);
      const V<T> now = z * load_part(self.h + b * L, count) + (splat<T>(1) - z) * n;
      store_part(static_cast<T*>(self.args.hs) + self.row * N + b * L, now, count);
    }
  }
  bool run() {
    const int64_t N = args.N;
    if (!m.allocate(N + L)) return false;
    const int blocks = static_cast<int>((N + L - 1) / L);
    for (; row < args.T * args.B; row++) {
      h = row < args.B ? static_cast<const T*>(args.h0) + row * N : static_cast<const T*>(args.hs) + (row - args.B) * N;
      direct_run(args.threads, 2 * N * N * sizeof(T), blocks, gates, this);
      direct_run(args.threads, N * N * sizeof(T), blocks, states, this);
    }
    return true;
  }
};

// The backward, with the gradients of all parameters, which are written at once; the equations are those of gru_scan.cpp.
template <class T, bool KANAI>
struct DirectGruBackward {
  static constexpr int L = kLanes<T>;
  const GruArgs& args;
  int N = 0, B = 0, D = 0, rows = 0;  // rows: T B, numbered t B + b
  ptrdiff_t wide = 0;                 // elements from one row to the next of what has N columns
  // [rows][3 N]: what W_in x + b gets, d_r, d_z, d_n, and what the products with h_{t-1} (kanai: W_n: with r h_{t-1}) get:
  // d_r, d_z, d_q. kanai: the same.
  Scratch<T> d_x = {}, d_w = {};
  Scratch<T> gated = {};              // kanai: [rows][N], r h_{t-1}
  Scratch<T> passed = {}, kept = {};  // [B][wide]: what a step passes to the one before by its products, and without

  static const T* at(const void* pointer) { return static_cast<const T*>(pointer); }
  static T* at(void* pointer) { return static_cast<T*>(pointer); }
  T* row_of(const Scratch<T>& of, int64_t row, int width) const { return of.get() + row * width * N; }
  const T* before(int64_t row) const { return row < B ? at(args.h0) + row * N : at(args.saved_hs) + (row - B) * N; }
  const T* gate(int64_t row, int g) const { return at(args.saved_gates) + (row * 3 + g) * N; }
  T* to_w(int64_t row) const { return row_of(KANAI ? d_x : d_w, row, 3); }

  // rows of a times a matrix [depth, N] -> passed.
  void multiply(const T* matrix, int depth, const T* a) {
    direct_share(args.threads, static_cast<size_t>(depth) * N * sizeof(T), N, kDirectPanel * L,
                 [&](int first, int last) {
                   direct_columns<T, false>(matrix, N, first, last, depth, a, 3 * static_cast<ptrdiff_t>(N), B, nullptr,
                                            passed, wide);
                 });
  }
  // All that a row's step needs no product for. Returns dL/dh_t.
  V<T> begin(int64_t row, int b, int n, int count) {
    const V<T> one = splat<T>(1);
    const ptrdiff_t here = b * wide + n;
    const V<T> ghat = load_part(at(args.grad_hs) + row * N + n, count) + (load(passed + here) + load(kept + here));
    const V<T> z = load_part(gate(row, 1) + n, count), value = load_part(gate(row, 2) + n, count),
               h = load_part(before(row) + n, count);
    const V<T> by_z = z * (one - z), by_n = one - value * value;
    const V<T> z_out = ghat * (h - value) * by_z, n_out = ghat * (one - z) * by_n;
    store(kept + here, ghat * z);
    store_part(row_of(d_x, row, 3) + N + n, z_out, count);
    store_part(row_of(d_x, row, 3) + 2 * N + n, n_out, count);
    if (KANAI) return ghat;
    const V<T> r = load_part(gate(row, 0) + n, count), by_r = r * (one - r);
    const V<T> q_out = n_out * r, r_out = n_out * load_part(at(args.saved_pre) + row * N + n, count) * by_r;
    store_part(row_of(d_x, row, 3) + n, r_out, count);
    store_part(to_w(row) + n, r_out, count);
    store_part(to_w(row) + N + n, z_out, count);
    store_part(to_w(row) + 2 * N + n, q_out, count);
    return ghat;
  }
  // kanai: d_r from d_m = W_n^T d_n.
  void reset_gate(int64_t row, int b, int n, int count) {
    const V<T> r = load_part(gate(row, 0) + n, count), h = load_part(before(row) + n, count);
    const V<T> d_m = load(passed + b * wide + n), to_gate = d_m * h;
    store_part(row_of(d_x, row, 3) + n, to_gate * (r * (splat<T>(1) - r)), count);
    store_part(row_of(gated, row, 1) + n, r * h, count);
    store(kept + b * wide + n, load(kept + b * wide + n) + r * d_m);
  }
  template <class F>
  void each(int64_t step, const F& fn) {
    for (int n = 0; n < N; n += L)
      for (int b = 0; b < B; b++) fn(step * B + b, b, n, N - n < L ? N - n : L);
  }
  void run_step(int64_t step) {
    const int64_t row = step * B;
    const T* w = at(args.w);
    SquareSum<T> square;
    each(step, [&](int64_t at_row, int b, int n, int count) { square.add(begin(at_row, b, n, count)); });
    if (args.grad_norm) at(args.grad_norm)[step] = static_cast<T>(__builtin_sqrt(square.total()));
    if (KANAI) {
      multiply(w + 2 * static_cast<ptrdiff_t>(N) * N, N, row_of(d_x, row, 3) + 2 * N);
      each(step, [&](int64_t at_row, int b, int n, int count) { reset_gate(at_row, b, n, count); });
    }
    if (step > 0 || args.grad_h0) multiply(w, (KANAI ? 2 : 3) * N, to_w(row));
  }
  void parameter_gradients() const {
    auto x = [this](int r) { return row_of(d_x, r, 3); };
    auto w = [this](int r) { return to_w(r); };
    auto h = [this](int r) { return before(r); };
    direct_outer<T>(args.threads, rows, w, h, args.grad_w, (KANAI ? 2 : 3) * N, N);
    if (KANAI && args.grad_w)
      direct_outer<T>(
          args.threads, rows, [this](int r) { return row_of(d_x, r, 3) + 2 * N; },
          [this](int r) { return row_of(gated, r, 1); }, at(args.grad_w) + 2 * static_cast<ptrdiff_t>(N) * N, N, N);
    direct_sum<T>(rows, w, args.grad_bias, 3 * N);
    direct_sum<T>(rows, x, args.grad_input_bias, 3 * N);
    direct_outer<T>(
        args.threads, rows, x, [this](int r) { return at(args.features) + static_cast<ptrdiff_t>(r) * D; },
        args.grad_weight, 3 * N, D);
  }
  bool run() {
    const FlushDenormals flush;
    N = static_cast<int>(args.N), B = static_cast<int>(args.B), D = static_cast<int>(args.D);
    rows = static_cast<int>(args.T * args.B), wide = round_up(N, L);
    const size_t size = static_cast<size_t>(rows) * N;
    if (!d_x.allocate(3 * size) || !(KANAI ? gated.allocate(size) : d_w.allocate(3 * size)) ||
        !passed.allocate(B * wide) || !kept.allocate(B * wide))
      return false;
    for (int64_t step = args.T - 1; step >= 0; step--) run_step(step);
    if (args.grad_h0)
      each(0, [&](int64_t row, int b, int n, int count) {
        store_part(at(args.grad_h0) + row * N + n, load(passed + b * wide + n) + load(kept + b * wide + n), count);
      });
    parameter_gradients();
    return !args.grad_features || direct_features<T>(at(args.weight), D, 3 * N, d_x, 3 * static_cast<ptrdiff_t>(N),
                                                     rows, at(args.grad_features));
  }
};

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
