// The backward of scan.h for a few steps, with weights that are read in place (direct.h) and gradients that are written
// at once. delta, and the gradients of x and h0, have the bits of the packed way; the sums over rows are one chain in
// the order of the rows.
//
// With the factored map, the gradients of its factors may be asked for in place of M = dL/dW:
//
//   y_r = U^T delta_r,  z_r = V^T h_{r-1}      dU = sum_r delta_r (s z_r)^T,  ds = sum_r y_r z_r,  dV = sum_r h_{r-1} (s y_r)^T
//
// Memory traffic: W once for each step whose message is wanted, the gradients once. U, V and their gradients once each.
#pragma once

#include "cpu/scan_direct.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T, class A>
struct DirectBackward {
  static constexpr int L = kLanes<T>;
  const ScanArgs& args;
  int N, K, D, B, rows;    // rows: T B, numbered t B + b
  ptrdiff_t wide, across;  // elements from one row to the next of what has N columns, and K
  Scratch<T> delta;        // [rows][wide]
  Scratch<T> message;      // [B][wide], map^T(delta_{t+1})
  Scratch<T> y, scaled_y;  // [rows][across]: U^T delta, and s times it
  Scratch<T> z, scaled_z;  // [rows][across]: V^T h, and s times it
  int64_t step;            // that is computed

  static const T* at(const void* pointer) { return static_cast<const T*>(pointer); }
  static T* at(void* pointer) { return static_cast<T*>(pointer); }
  bool factors() const { return args.grad_first || args.grad_scale || args.grad_second; }
  const T* delta_row(int64_t row) const { return delta.get() + row * wide; }
  // h_{t-1} of a row.
  const T* before(int64_t row) const { return row < B ? at(args.h0) + row * N : at(args.states) + (row - B) * N; }

  bool allocate() {
    N = static_cast<int>(args.N), K = static_cast<int>(args.K), D = static_cast<int>(args.D);
    B = static_cast<int>(args.B), rows = static_cast<int>(args.T * args.B);
    wide = round_up(N, L), across = round_up(K, L);
    if (!delta.allocate(rows * wide) || !message.allocate(B * wide)) return false;
    if (K && !scaled_y.allocate(rows * across)) return false;
    return !factors() || (y.allocate(rows * across) && z.allocate(rows * across) && scaled_z.allocate(rows * across));
  }

  template <class F>
  void share(int size, int unit, const F& fn) const {
    direct_share(args.threads, map_bytes(), size, unit, fn);
  }
  size_t map_bytes() const { return static_cast<size_t>(N) * (K ? K : N) * sizeof(T); }

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
    if (args.grad_norm) at(args.grad_norm)[step] = static_cast<T>(__builtin_sqrt(square.total()));
  }

  // s U^T delta_t of the rows of a step, and what of U^T delta_t the gradients of the factors need.
  void project() {
    share(K, kDirectPanel * L, [this](int first, int last) {
      const int64_t row = step * B;
      for (int c = first; c < last; c += kDirectPanel * L) {  // a panel stays in the caches for both
        const int end = c + kDirectPanel * L < last ? c + kDirectPanel * L : last;
        direct_columns<T, true>(at(args.second), K, c, end, N, delta_row(row), wide, B, at(args.scale),
                                scaled_y + row * across, across);
        if (factors())
          direct_columns<T, false>(at(args.second), K, c, end, N, delta_row(row), wide, B, nullptr, y + row * across,
                                   across);
      }
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
                               scaled_y + (step * B + b) * across, V<T>{}));
    });
  }

  template <class Left, class Right>
  void outer(const Left& left, const Right& right, void* to, int size, int cols) const {
    direct_outer<T>(args.threads, rows, left, right, to, size, cols);
  }
  // V^T h of the rows [first, last), which are `from`. Zeros for states of zeros, the start of most sequences: then V is
  // not read. (A forward with weights that are not finite has given NaN before.)
  void project_states(const T* from, int first, int last) {
    const ptrdiff_t size = static_cast<ptrdiff_t>(last - first) * N;
    ptrdiff_t i = 0;
    while (i < size && from[i] == 0) i++;
    if (i == size) return;
    share(K, kDirectPanel * L, [=](int begin, int end) {
      direct_columns<T, false>(at(args.first), K, begin, end, N, from, N, last - first, nullptr, z + first * across,
                               across);
    });
  }
  void factor_gradients() {
    project_states(at(args.h0), 0, B);
    project_states(at(args.states), B, rows);
    for (int k = 0; k < K; k += L) {
      const int count = K - k < L ? K - k : L;
      const V<T> s = load_part(at(args.scale) + k, count);
      V<T> sum = V<T>{};
      for (int r = 0; r < rows; r++) {
        const V<T> by_v = load(z + r * across + k);
        store(scaled_z + r * across + k, by_v * s);
        sum += load(y + r * across + k) * by_v;
      }
      if (args.slope) sum *= load_part(at(args.slope) + k, count);
      if (args.grad_scale) store_part(at(args.grad_scale) + k, sum, count);
    }
    auto d = [this](int r) { return delta_row(r); };
    auto h = [this](int r) { return before(r); };
    outer(d, [this](int r) { return scaled_z + r * across; }, args.grad_second, N, K);
    outer(h, [this](int r) { return scaled_y + r * across; }, args.grad_first, N, K);
  }
  void parameter_gradients() {
    auto d = [this](int r) { return delta_row(r); };
    outer(d, [this](int r) { return before(r); }, args.grad_map, N, N);
    if (args.weight)
      outer(d, [this](int r) { return at(args.x) + static_cast<ptrdiff_t>(r) * D; }, args.grad_weight, N, D);
    direct_sum<T>(rows, d, args.grad_bias, N);
    if (factors()) factor_gradients();
  }
  bool input_gradients() {
    for (int r = 0; args.grad_delta && r < rows; r++)
      memcpy(at(args.grad_delta) + r * static_cast<ptrdiff_t>(N), delta_row(r), N * sizeof(T));
    for (int b = 0; args.grad_h0 && b < B; b++)
      memcpy(at(args.grad_h0) + b * static_cast<ptrdiff_t>(N), message + b * wide, N * sizeof(T));
    if (!args.grad_x) return true;
    if (!args.weight) {
      for (int r = 0; r < rows; r++)
        memcpy(at(args.grad_x) + r * static_cast<ptrdiff_t>(N), delta_row(r), N * sizeof(T));
      return true;
    }
    return direct_features<T>(at(args.weight), D, N, delta, wide, rows, at(args.grad_x));
  }

  bool run() {
    const FlushDenormals flush;
    Scratch<T> param;
    Scratch<double> param_grad;
    if (!allocate() || !param_grad.allocate(wide) || !expand_param(&param, at(args.act_param), args.act_param_size, N))
      return false;
    for (step = args.T - 1; step >= 0; step--) {
      finish(step == args.T - 1, param, param_grad);
      const bool passes = step > 0 || args.grad_h0;
      if (K && (passes || factors())) project();
      if (passes) pass();
    }
    if (args.grad_act_param)
      write_param_grad(at(args.grad_act_param), args.act_param_size, N, [&](int64_t n) { return param_grad[n]; });
    parameter_gradients();
    return input_gradients();
  }
};

// Whether a call of scan_bwd is one of a few steps that may read the weights in place.
inline bool direct_backward_serves(const ScanArgs& args) {
  return direct_serves(args) && !args.tokens && args.message_clip == 0 && args.grad_steps == args.T;
}

template <class T>
bool scan_direct_backward(const ScanArgs& args) {
  bool ok = true;
  visit_activation(args.activation, [&](auto a) {
    DirectBackward<T, decltype(a)> scan = {args, 0, 0, 0, 0, 0, 0, 0, {}, {}, {}, {}, {}, {}, 0};
    ok = scan.run();
  });
  return ok;
}

}  // namespace orthokern::ORTHOKERN_ISA
