// The forward of scan.h for a few steps, with weights that are read in place (direct.h). Results are bitwise those of
// scan.h.
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
  // of the row that is computed
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

inline bool direct_serves(const ScanArgs& args) {
  return args.T * args.B <= kDirectRows && !args.lengths && !args.resets && !args.checkpoint_every;
}

}  // namespace orthokern::ORTHOKERN_ISA
