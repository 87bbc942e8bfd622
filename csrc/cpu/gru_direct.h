// The forward of a few steps of the GRU, with weights that are read in place (direct.h). Results are bitwise those of
// gru_forward.h.
#pragma once

#include "cpu/direct.h"
#include "cpu/ops.h"
#include "cpu/vmath.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

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

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
