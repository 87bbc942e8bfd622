// The results of the backward of scan.h that are sums over time and batch: the parts of the threads, and their totals.
#pragma once

#include "cpu/outer.h"
#include "cpu/scan_plan.h"

namespace orthokern::ORTHOKERN_ISA {

// A partial result of one thread. Those of all threads are added at the end, in the order of the threads.
template <class T>
struct ScanSums {
  RowSums<T> gradients;         // [round_up(N)][ldc]: columns of h, then of x, then the one
  Scratch<T> table_part;        // [D][round_up(N)] of the last few steps
  Scratch<double> table_total;  // [D][round_up(N)]
  Scratch<double> param;        // [round_up(N)]
  Scratch<double> leak;         // [round_up(N)]
  Scratch<double> norm;         // [T]

  bool allocate(const ScanPlan<T>& plan) {
    const ScanArgs& args = *plan.args;
    const size_t padded = plan.padded(), ldc = padded + round_up(plan.X, kLanes<T>);
    return param.allocate(padded) && leak.allocate(padded) && norm.allocate(args.T) &&
           (!args.grad_m || gradients.allocate(padded * ldc, args.T * args.B)) &&
           (!args.tokens || (table_part.allocate(plan.D * padded) && table_total.allocate(plan.D * padded)));
  }
};

// The gradient of a parameter [1] or [N] of the units, from one member of ScanSums.
template <class T>
void collect_param(const ScanPlan<T>& plan, const ScanSums<T>* sums, Scratch<double> ScanSums<T>::* part, void* to,
                   int64_t size) {
  if (!to) return;
  write_param_grad(static_cast<T*>(to), size, plan.args->N, [&](int64_t n) {
    double total = 0;
    for (int i = 0; i < plan.threads; i++) total += (sums[i].*part)[n];
    return total;
  });
}

// M = sum_t delta_t h_{t-1}^T, and the gradients of W_in and b for features.
template <class T>
void collect_products(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  const ScanArgs& args = *plan.args;
  const int N = plan.N, D = plan.D, padded = plan.padded();
  const ptrdiff_t ldc = padded + round_up(plan.X, kLanes<T>);
  auto total = [&](ptrdiff_t at) {
    double sum = sums[0].gradients.at(at);
    for (int i = 1; i < plan.threads; i++) sum += sums[i].gradients.at(at);
    return static_cast<T>(sum);
  };
  T *map = static_cast<T*>(args.grad_m), *weight = static_cast<T*>(args.grad_weight),
    *bias = static_cast<T*>(args.grad_bias);
  for (int n = 0; n < N; n++) {
    for (int m = 0; m < N; m++) map[static_cast<ptrdiff_t>(n) * N + m] = total(n * ldc + m);
    if (plan.X) {
      for (int d = 0; d < D; d++) weight[static_cast<ptrdiff_t>(n) * D + d] = total(n * ldc + padded + d);
      if (plan.bias_column) bias[n] = total(n * ldc + padded + D);
    }
  }
}

// The gradients of W_in and b for tokens.
template <class T>
void collect_table(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  T *weight = static_cast<T*>(plan.args->grad_weight), *bias = static_cast<T*>(plan.args->grad_bias);
  const int D = plan.D, padded = plan.padded();
  for (int n = 0; n < plan.N; n++) {
    double all = 0;
    for (int d = 0; d < D; d++) {
      double sum = 0;
      for (int i = 0; i < plan.threads; i++) sum += sums[i].table_total[static_cast<ptrdiff_t>(d) * padded + n];
      weight[static_cast<ptrdiff_t>(n) * D + d] = static_cast<T>(sum);
      all += sum;
    }
    if (bias) bias[n] = static_cast<T>(all);
  }
}

template <class T>
void collect_scan(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  write_norms(
      plan.threads, plan.args->T, [=](int i) { return sums[i].norm.get(); }, static_cast<T*>(plan.args->grad_norm));
  const ScanArgs& args = *plan.args;
  collect_param(plan, sums, &ScanSums<T>::param, args.grad_act_param, args.act_param_size);
  collect_param(plan, sums, &ScanSums<T>::leak, args.grad_leak, args.leak_size);
  if (!args.grad_m) return;
  collect_products(plan, sums);
  if (args.tokens) collect_table(plan, sums);
}

}  // namespace orthokern::ORTHOKERN_ISA
