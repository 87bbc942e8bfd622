// The scans of scan.h for a few steps, with weights that are read in place (direct.h). Results are bit-identical to
// scan.h, except for the sums over rows in the backward, which are one chain in the order of the rows.
#pragma once

#include "cpu/activate.h"
#include "cpu/direct.h"
#include "cpu/ops.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T, class A>
struct DirectScan {
  static constexpr int L = kLanes<T>;
  const ScanArgs& args;
  int N = static_cast<int>(args.N), K = static_cast<int>(args.K), D = static_cast<int>(args.D);
  Scratch<T> z = {};  // [round_up(K)], V^T h
  // of the current row
  const T* h = nullptr;  // [N], h_{t-1}
  int64_t row = 0;       // t B + b

  static const T* at(const void* pointer) { return static_cast<const T*>(pointer); }

  // `count` values from unit n on of a parameter [1] or [N].
  static V<T> unit_values(const void* from, int64_t size, int n, int count) {
    return size == 1 ? splat<T>(at(from)[0]) : load_part(at(from) + n, count);
  }
  // Block b of h_t.
  void state(int b) const {
    const int count = lanes_of<T>(N, b), depth = K ? K : N, n = b * L;
    V<T> a = direct_rows<T>(at(args.second) + static_cast<ptrdiff_t>(n) * depth, depth, count, depth, K ? z.get() : h,
                            V<T>{});
    const V<T> bias = args.bias ? load_part(at(args.bias) + n, count) : V<T>{};
    const T* weight = at(args.weight) + static_cast<ptrdiff_t>(n) * D;
    if (args.tokens) {
      V<T> e = V<T>{};
      for (int i = 0; i < count; i++) e[i] = weight[static_cast<ptrdiff_t>(i) * D + args.tokens[row]];
      if (args.bias) e += bias;
      a += e;
    } else if (args.weight) {
      a = direct_rows<T>(weight, D, count, D, at(args.x) + row * D, a);
      if (args.bias) a += bias;
    } else {
      a += load_part(at(args.x) + row * N + n, count);
    }
    const V<T> param = args.act_param ? unit_values(args.act_param, args.act_param_size, n, count) : V<T>{};
    V<T> to = activate<T, A>(a, param);
    if (args.leak) to = leaky<T>(load_part(h + n, count), to, unit_values(args.leak, args.leak_size, n, count));
    store_part(static_cast<T*>(args.hs) + row * N + n, to, count);
    if (args.pre) store_part(static_cast<T*>(args.pre) + row * N + n, a, count);
  }

  bool run() {
    if (!z.allocate(K + L)) return false;
    const size_t depth = K ? K : N, bytes = depth * N * sizeof(T);
    for (; row < args.T * args.B; row++) {
      h = row < args.B ? at(args.h0) + row * N : at(args.hs) + (row - args.B) * N;
      if (K)  // z = diag(s) V^T h
        direct_share(args.threads, bytes, K, L, [this](int first, int last) {
          direct_columns<T, true>(at(args.first), K, first, last, N, h, 0, 1, at(args.scale), z, 0);
        });
      direct_share(args.threads, bytes, (N + L - 1) / L, 1, [this](int first, int last) {
        for (int b = first; b < last; b++) state(b);
      });
    }
    return true;
  }
};

// Whether a call of scan_fwd has so few steps that it may read the weights in place.
inline bool direct_serves(const ScanArgs& args) {
  return args.T * args.B <= kDirectRows && !args.lengths && !args.resets && !args.checkpoint_every;
}

// Gradients are written at once. Memory traffic: W once for each step, the gradients once, and without M the factors of
// W once more.
template <class T, class A>
struct DirectBackward {
  static constexpr int L = kLanes<T>;
  const ScanArgs& args;
  int N = static_cast<int>(args.N), K = static_cast<int>(args.K), D = static_cast<int>(args.D);
  int B = static_cast<int>(args.B), rows = static_cast<int>(args.T) * B;  // numbered t B + b
  // elements from one row to the next of matrices with N columns, and with K
  ptrdiff_t wide = round_up(N, L), across = round_up(K, L);
  Scratch<T> delta = {};    // [rows][wide]
  Scratch<T> message = {};  // [B][wide], map^T(delta_{t+1})
  Scratch<T> z = {};        // [rows][across], s U^T delta_t
  int64_t step = 0;         // the current one

  static const T* at(const void* pointer) { return static_cast<const T*>(pointer); }
  static T* at(void* pointer) { return static_cast<T*>(pointer); }
  const T* delta_row(int64_t row) const { return delta.get() + row * wide; }
  // h_{t-1} of a row.
  const T* before(int64_t row) const { return row < B ? at(args.h0) + row * N : at(args.states) + (row - B) * N; }

  template <class F>
  void share(int size, int unit, const F& fn) const {
    direct_share(args.threads, static_cast<size_t>(N) * (K ? K : N) * sizeof(T), size, unit, fn);
  }

  // delta_t, |dL/dh_t| and the part of the activation's parameter; the order of the sums is that of scan_backward.h.
  void finish(bool last, const T* param, double* param_grad) {
    SquareSum<T> square;
    for (int n = 0; n < N; n += L) {
      const int count = N - n < L ? N - n : L;
      V<T> of_param = V<T>{};
      for (int b = 0; b < B; b++) {
        const int64_t row = step * B + b;
        V<T> g = load_part(at(args.grad_hs) + row * N + n, count);
        if (!last) g += load(message + b * wide + n);
        square.add(g);
        const V<T> saved = load_part(at(A::needs_input ? args.saved_pre : args.states) + row * N + n, count);
        store(delta + row * wide + n, activate_grad<T, A>(saved, g, load(param + n), &of_param));
      }
      if (A::has_parameter)
        for (int i = 0; i < L; i++) param_grad[n + i] += of_param[i];
    }
    at(args.grad_norm)[step] = static_cast<T>(__builtin_sqrt(square.total()));
  }

  T* projected() const { return z + step * B * across; }
  // s U^T delta of a step's rows.
  void project() {
    share(K, kDirectPanel * L, [this](int first, int last) {
      direct_columns<T, true>(at(args.second), K, first, last, N, delta_row(step * B), wide, B, at(args.scale),
                              projected(), across);
    });
  }
  // The message of a step's rows.
  void pass() {
    if (!K) {
      share(N, kDirectPanel * L, [this](int first, int last) {
        direct_columns<T, false>(at(args.second), N, first, last, N, delta_row(step * B), wide, B, nullptr, message,
                                 wide);
      });
      return;
    }
    share(N, L, [this](int first, int last) {
      for (int n = first; n < last; n += L)
        for (int b = 0; b < B; b++)
          store(message + b * wide + n,
                direct_rows<T>(at(args.first) + static_cast<ptrdiff_t>(n) * K, K, last - n < L ? last - n : L, K,
                               projected() + b * across, V<T>{}));
    });
  }

  // to [rows][across] = `rows` rows of `from` times w [N, K].
  template <class Row>
  void times(const T* w, const Row& from, T* to) const {
    share(K, kDirectPanel * L, [=](int first, int last) {
      for (int r = 0; r < rows; r++)
        direct_columns<T, false>(w, K, first, last, N, from(r), 0, 1, nullptr, to + r * across, across);
    });
  }
  // The gradients of V, s and U.
  bool factor_gradients() {
    Scratch<T> of_h, of_delta;  // [rows][across]: V^T h_{t-1}, then multiplied by s, and U^T delta_t
    if (!of_h.allocate(rows * across) || !of_delta.allocate(rows * across)) return false;
    auto d = [this](int r) { return delta_row(r); };
    auto h = [this](int r) { return before(r); };
    times(at(args.first), h, of_h), times(at(args.second), d, of_delta);  // z has the factor s, which may be 0
    const T* s = at(args.scale);
    for (int k = 0; k < K; k++) {
      double sum = 0;
      for (int r = 0; r < rows; r++) {
        T* const here = of_h + r * across + k;
        sum += static_cast<double>(*here) * static_cast<double>(of_delta[r * across + k]);
        *here *= s[k];
      }
      at(args.grad_scale)[k] = static_cast<T>(sum);
    }
    auto scaled = [&](int r) { return of_h + r * across; };
    auto z_row = [this](int r) { return z + r * across; };
    direct_outer<T>(args.threads, rows, h, z_row, args.grad_first, N, K);
    direct_outer<T>(args.threads, rows, d, scaled, args.grad_second, N, K);
    return true;
  }
  void parameter_gradients() {
    auto d = [this](int r) { return delta_row(r); };
    auto h = [this](int r) { return before(r); };
    auto x = [this](int r) { return at(args.x) + static_cast<ptrdiff_t>(r) * D; };
    direct_outer<T>(args.threads, rows, d, h, args.grad_m, N, N);
    if (args.weight) direct_outer<T>(args.threads, rows, d, x, args.grad_weight, N, D);
    const T one = 1;
    direct_outer<T>(args.threads, rows, [&](int) { return &one; }, d, args.grad_bias, 1, N);
  }
  void input_gradients() {
    for (int b = 0; b < B && args.grad_h0; b++)
      memcpy(at(args.grad_h0) + b * static_cast<ptrdiff_t>(N), message + b * wide, N * sizeof(T));
    T* const to = at(args.grad_x);
    if (to && args.weight) direct_columns<T, false>(at(args.weight), D, 0, D, N, delta, wide, rows, nullptr, to, D);
    for (int r = 0; to && !args.weight && r < rows; r++) memcpy(to + r * ptrdiff_t{N}, delta_row(r), N * sizeof(T));
  }

  bool run() {
    const FlushDenormals flush;
    Scratch<T> param;
    Scratch<double> param_grad;
    if (!delta.allocate(rows * wide) || !message.allocate(B * wide) || (K && !z.allocate(rows * across)) ||
        !param_grad.allocate(wide) || !expand_param(&param, at(args.act_param), args.act_param_size, N))
      return false;
    for (step = args.T - 1; step >= 0; step--) {
      finish(step == args.T - 1, param, param_grad);
      if (K && (step > 0 || args.grad_h0 || args.grad_first)) project();
      if (step > 0 || args.grad_h0) pass();
    }
    if (args.grad_act_param)
      write_param_grad(at(args.grad_act_param), args.act_param_size, N, [&](int64_t n) { return param_grad[n]; });
    parameter_gradients();
    input_gradients();
    return !args.grad_first || factor_gradients();
  }
};

// The same for scan_bwd.
inline bool direct_backward_serves(const ScanArgs& args) {
  return direct_serves(args) && !args.tokens && args.clip == __builtin_inf() && !args.leak;
}

}  // namespace orthokern::ORTHOKERN_ISA
