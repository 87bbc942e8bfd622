// The results of the backward of scan.h that are sums over time and batch: the parts of the threads, and their totals.
#pragma once

#include "cpu/outer.h"
#include "cpu/scan_plan.h"

namespace orthokern::ORTHOKERN_ISA {

// A partial result of one thread. Those of all threads are added at the end, in the order of the threads.
template <class T>
struct ScanSums {
  RowSums<T> gradients;         // [round_up(N)][ldc]: columns of h (for M), then of x, then the one
  RowSums<T> m_v, mt_u;         // thin: M V and M^T U diag(s), [round_up(N)][round_up(K)]
  RowSums<T> table;             // [D][round_up(N)]
  Scratch<double> param, leak;  // [round_up(N)]
  Scratch<double> norm;         // [T]

  // parts: whether the sums of tokens have several parts.
  bool allocate(const ScanPlan<T>& plan, bool parts) {
    const ScanArgs& args = plan.args;
    const size_t padded = plan.padded(), thin = padded * round_up(plan.K, kLanes<T>);
    const int64_t rows = args.T * args.B;
    return param.allocate(padded) && leak.allocate(padded) && norm.allocate(args.T) &&
           (!plan.params || gradients.allocate(padded * plan.summed_columns(), rows)) &&
           (!plan.thin || (m_v.allocate(thin, rows) && mt_u.allocate(thin, rows))) &&
           (!plan.params || !args.tokens || table.allocate_parts(plan.D * padded, parts));
  }
};

// The gradient of a parameter [1] or [N] of the units, from one member of ScanSums.
template <class T>
void collect_param(const ScanPlan<T>& plan, const ScanSums<T>* sums, Scratch<double> ScanSums<T>::* part, void* to,
                   int64_t size) {
  if (!to) return;
  write_param_grad(static_cast<T*>(to), size, plan.args.N, [&](int64_t n) {
    return task_total(plan.threads, [&](int i) { return (sums[i].*part).get(); }, n);
  });
}

// M = sum_t delta_t h_{t-1}^T, and the gradients of W_in and b for features.
template <class T>
void collect_products(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  const ScanArgs& args = plan.args;
  const int N = plan.N, before = plan.state_columns();
  const ptrdiff_t ldc = plan.summed_columns();
  // row n of a result [N, count] <- `count` columns of the sums, starting at `from`
  const auto write = [&](void* to, int n, ptrdiff_t from, int count) {
    if (to)
      row_totals(
          plan.threads, [&](int i) { return &sums[i].gradients; }, n * ldc + from, count,
          static_cast<T*>(to) + n * ptrdiff_t{count});
  };
  direct_share(args.threads, N * ldc * sizeof(T), N, 1, [&](int first, int last) {
    for (int n = first; n < last; n++) {
      write(args.grad_m, n, 0, N);
      if (plan.X) write(args.grad_weight, n, before, plan.D);
      if (plan.bias_column) write(args.grad_bias, n, before + plan.D, 1);
    }
  });
}

// The gradients of V, s and U from M^T U diag(s) and M V.
template <class T>
void collect_factors(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  const ScanArgs& args = plan.args;
  const int N = plan.N, K = plan.K, across = round_up(K, kLanes<T>);
  const T *u = static_cast<const T*>(args.second), *s = static_cast<const T*>(args.scale);
  T *of_v = static_cast<T*>(args.grad_first), *of_u = static_cast<T*>(args.grad_second);
  direct_share(args.threads, static_cast<size_t>(N) * K * sizeof(T), N, 1, [&](int first, int last) {
    for (int n = first; n < last; n++) {
      const ptrdiff_t from = static_cast<ptrdiff_t>(n) * across, to = static_cast<ptrdiff_t>(n) * K;
      row_totals(plan.threads, [&](int i) { return &sums[i].mt_u; }, from, K, of_v + to);
      row_totals(plan.threads, [&](int i) { return &sums[i].m_v; }, from, K, of_u + to);
    }
  });
  direct_share(args.threads, static_cast<size_t>(N) * K * sizeof(T), K, kLanes<T>, [&](int first, int last) {
    for (int k0 = first; k0 < last; k0 += kLanes<T>) {
      double sum[kLanes<T>] = {};
      const int count = last - k0 < kLanes<T> ? last - k0 : kLanes<T>;
      for (int n = 0; n < N; n++) {
        for (int k = 0; k < count; k++) {
          T* const m_v = of_u + static_cast<ptrdiff_t>(n) * K + k0 + k;
          sum[k] += static_cast<double>(*m_v) * static_cast<double>(u[static_cast<ptrdiff_t>(n) * K + k0 + k]);
          *m_v *= s[k0 + k];
        }
      }
      for (int k = 0; k < count; k++) static_cast<T*>(args.grad_scale)[k0 + k] = static_cast<T>(sum[k]);
    }
  });
}

// The gradients of W_in and b for tokens.
template <class T>
void collect_table(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  constexpr int L = kLanes<T>, kUnits = 64;  // units that are written together
  T *weight = static_cast<T*>(plan.args.grad_weight), *bias = static_cast<T*>(plan.args.grad_bias);
  const ptrdiff_t D = plan.D, padded = plan.padded();
  direct_share(plan.args.threads, D * padded * sizeof(T), plan.N, kUnits, [&](int first, int last) {
    for (int begin = first; begin < last; begin += kUnits) {
      const int units = last - begin < kUnits ? last - begin : kUnits;
      double all[kUnits] = {};
      T rows[L][kUnits] = {};
      for (int d = 0; d < D; d += L) {
        const int ids = D - d < L ? D - d : L;
        for (int i = 0; i < ids; i++) {
          double sum[kUnits] = {};
          for (int task = 0; task < plan.threads; task++) sums[task].table.add_to(sum, (d + i) * padded + begin, units);
          for (int n = 0; n < units; n++) all[n] += sum[n], rows[i][n] = static_cast<T>(sum[n]);
        }
        for (int n = 0; n < units; n += L) {
          V<T> square[L];
          load_transposed<T>(rows[0] + n, kUnits, square);
          for (int i = 0; i < L && n + i < units; i++) write(weight + (begin + n + i) * D + d, square[i], ids);
        }
      }
      for (int n = 0; bias && n < units; n++) bias[begin + n] = static_cast<T>(all[n]);
    }
  });
}

template <class T>
void collect_scan(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  write_norms(
      plan.threads, plan.args.T, [=](int i) { return sums[i].norm.get(); }, static_cast<T*>(plan.args.grad_norm));
  const ScanArgs& args = plan.args;
  collect_param(plan, sums, &ScanSums<T>::param, args.grad_act_param, args.act_param_size);
  collect_param(plan, sums, &ScanSums<T>::leak, args.grad_leak, args.leak_size);
  if (!plan.params) return;
  collect_products(plan, sums);
  if (plan.thin) collect_factors(plan, sums);
  if (args.tokens) collect_table(plan, sums);
}

}  // namespace orthokern::ORTHOKERN_ISA
