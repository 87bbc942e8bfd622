// The derivative of the scan's backward, but for what passes through the states: Note [Second derivative of a scan] in
// orthokern/ops/_second_native.py.
//
// It is the tangent of the states, a recurrence that runs forward in time with the products of the forward, between
// products of all rows of several steps. Work is shared and blocked as in scan.h. For about kSecondRows rows at a time:
//
//   mu     <- of_x W_in^T + h_{t-1} of_map^T + x of_weight^T               one product
//   gam_t  <- phi'(a_t) (mu_t + map(gam_{t-1}))                            one step after the other
//   of h   <- delta of_map,   of x <- delta of_weight                      one product each
//   sums   <- delta^T [gam_{t-1}, of_x]                                    one product (outer.h)
#pragma once

#include "cpu/scan_backward.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kSecondRows = 128;

template <class T>
struct SecondPlan {
  const ScanSecondArgs* args;
  ScanArgs base;      // those of a scan without input, with the results that are sums over rows
  ScanPlan<T> scan;   // X counts the columns of of_x
  Packed<T> outside;  // [.., N]: W_in^T, of_map^T, of_weight^T, those that are given
  Packed<T> to_h;     // [N, N]: of_map
  Packed<T> to_x;     // [N, D]: of_weight
  Scratch<T> bias;    // [round_up(N)]
  ScanSums<T>* sums;  // [threads]
  bool failed;

  bool prepare() {
    base = args->base;
    const T *weight = static_cast<const T*>(base.weight), *of_map = static_cast<const T*>(args->of_map),
            *of_weight = static_cast<const T*>(args->of_weight);
    base.weight = base.bias = nullptr;
    set_sizes(&scan, base, false);
    scan.stream = false;
    const int N = scan.N, D = scan.D;
    const int depth = (args->of_x ? D : 0) + (of_map ? N : 0) + (of_weight ? D : 0);
    PackJobs<T> jobs;
    jobs.count = 0;
    jobs.parts = base.N >= 256 ? base.threads : scan.threads;
    if (!share_rows(&scan) || !plan_forward_weights(&scan, &jobs) || !outside.allocate(depth, N) ||
        (of_map && !to_h.allocate(N, N)) || (of_weight && !to_x.allocate(N, D)))
      return false;
    int row = 0;
    auto below = [&](const T* from, int rows) {
      jobs.add(&outside, row, rows, from, 1, rows);
      row += rows;
    };
    if (args->of_x) below(weight, D);
    if (of_map) below(of_map, N), jobs.add(&to_h, 0, N, of_map, N, 1);
    if (of_weight) below(of_weight, D), jobs.add(&to_x, 0, N, of_weight, D, 1);
    parallel_run(jobs.parts, pack_task<T>, &jobs);
    if (args->of_x) scan.X = D;
    return expand_param(&scan.param, static_cast<const T*>(base.act_param), base.act_param_size, N) &&
           expand_param(&bias, static_cast<const T*>(args->of_bias), N, N);
  }
};

// delta phi''(a) / phi'(a)^2 from h: this times kap is the gradient of h. Where phi' = 0, so is delta, and all that
// counts is that the quotient is a number.
template <class T, class A>
ORTHOKERN_INLINE V<T> bend(V<T> h, V<T> delta) {
  (void)h, (void)delta;
  const V<T> zero = V<T>{}, least = splat<T>(static_cast<T>(1e-30));
  if constexpr (A::number == act::Tanh::number) {
    const V<T> slope = 1 - h * h;
    return quotient(-2 * h * delta, slope > least ? slope : least);
  } else if constexpr (A::number == act::Softsign::number) {
    const V<T> left = 1 - (h < zero ? -h : h), with_sign = h > zero ? -2 * delta : (h < zero ? 2 * delta : zero);
    return quotient(with_sign, left > least ? left : least);
  }
  return zero;
}

template <class T>
struct SecondRows {
  static constexpr int L = kLanes<T>;
  const SecondPlan<T>& all;
  const ScanSecondArgs& args;
  const ScanPlan<T>& plan;
  ScanSums<T>* sums;
  ScanRows<T> rows;
  const int row0, R, N, D, blocks, x_blocks;
  const int steps;         // of a group
  const ptrdiff_t stride;  // elements from one block of a group to the next
  int64_t begin, end;      // the steps of the group
  int used;                // its rows
  Scratch<int> place;      // [steps] first row of a step
  // of a group, blocked: delta_t; gam_{t-1} and of_x; h_{t-1}; x; mu, and the products that are added to results
  Scratch<T> delta, inputs, before, x, sum;

  SecondRows(const SecondPlan<T>& all_, ScanSums<T>* sums_, int row0_, int R_)
      : all(all_),
        args(*all_.args),
        plan(all_.scan),
        sums(sums_),
        rows(all_.scan, row0_, R_),
        row0(row0_),
        R(R_),
        N(plan.N),
        D(plan.D),
        blocks(plan.blocks()),
        x_blocks(round_up(plan.X, L) / L),
        steps(kSecondRows / R_ > 1 ? kSecondRows / R_ : 1),
        stride(static_cast<ptrdiff_t>(steps) * R_ * L) {}

  bool allocate() {
    const size_t wide = round_up(N > D ? N : D, 2 * L) / L;
    return rows.allocate() && place.allocate(steps) && delta.allocate(blocks * stride) &&
           inputs.allocate((blocks + x_blocks) * stride) && sum.allocate(wide * stride) &&
           (!args.of_map || before.allocate(blocks * stride)) &&
           (!args.of_weight || x.allocate(round_up(D, L) / L * stride));
  }
  static const T* in(const void* from) { return static_cast<const T*>(from); }
  static T* out(void* to) { return static_cast<T*>(to); }
  // The first row of step t in a row-major [T, B, columns].
  ptrdiff_t row(int64_t t, int columns) const { return (t * plan.B + row0) * columns; }
  ptrdiff_t at(int64_t t) const { return static_cast<ptrdiff_t>(place[t - begin]) * L; }

  template <class A>
  void run() {
    if (args.grad_before) memset(out(args.grad_before) + row(0, N), 0, sizeof(T) * R * N);
    if (args.of_h0) rows.read_rows(in(args.of_h0) + row0 * static_cast<ptrdiff_t>(N), N, R, N, rows.state, rows.block);
    for (begin = 0; begin < rows.longest; begin = end) {
      end = begin + steps < rows.longest ? begin + steps : rows.longest;
      used = 0;
      for (int64_t t = begin; t < end; t++) {
        place[t - begin] = used;
        used += rows.active[t];
        read(t);
      }
      multiply_outside();
      for (int64_t t = begin; t < end; t++) step<A>(t);
      if (args.of_map) add_product(all.to_h, args.grad_before, N, true);
      if (args.of_weight && args.grad_x) add_product(all.to_x, args.grad_x, D, false);
      if (all.base.grad_map) {
        outer_add<T>(delta, blocks, inputs, blocks + x_blocks, stride, used, sums->gradients.part,
                     (blocks + x_blocks) * L);
        sums->gradients.added(used);
      }
    }
    for (int64_t t = 0; t < all.base.T; t++) {
      if (args.grad_hs) rows.clear_rest(t, rows.active[t], out(args.grad_hs), N);
      if (args.grad_before) rows.clear_rest(t + 1, rows.active[t], out(args.grad_before), N);
      if (args.grad_x) rows.clear_rest(t, rows.active[t], out(args.grad_x), D);
    }
  }

  void read(int64_t t) {
    const int R_t = rows.active[t];
    rows.read_rows(in(args.delta) + row(t, N), N, R_t, N, delta + at(t), stride);
    T* of_x = inputs + blocks * stride + at(t);
    if (args.of_x) rows.read_rows(in(args.of_x) + row(t, D), D, R_t, D, of_x, stride);
    if (!rows.gapless(t)) rows.clear_ended(t, of_x, stride, x_blocks);  // may hold NaN or infinities
    const T* h = t ? in(args.states) + row(t - 1, N) : in(all.base.h0) + row(0, N);
    if (args.of_map) rows.read_rows(h, N, R_t, N, before + at(t), stride);
    if (args.of_weight) rows.read_rows(in(all.base.x) + row(t, D), D, R_t, D, x + at(t), stride);
  }

  void multiply_outside() {
    Segment<T> from[3];
    int count = 0;
    if (args.of_x) from[count++] = {inputs + blocks * stride, stride, D};
    if (args.of_map) from[count++] = {before, stride, N};
    if (args.of_weight) from[count++] = {x, stride, D};
    if (count) multiply<T>(from, count, all.outside, used, sum, stride);
    else memset(sum, 0, blocks * stride * sizeof(T));
  }

  // gam_t, into the next step's inputs or, at the end of the group, rows.state.
  template <class A>
  void step(int64_t t) {
    const int R_t = rows.active[t];
    Segment<T> from = {inputs + at(t), stride, N};
    if (t == begin)
      for (int b = 0; b < blocks; b++)
        memcpy(inputs + b * stride + at(t), rows.state + b * rows.block, sizeof(T) * R_t * L);
    Transfers<T> none;
    if (plan.factored) {
      multiply<T>(&from, 1, plan.first, R_t, rows.z, rows.block);
      from = {rows.z, rows.block, plan.K};
    }
    multiply<T>(&from, 1, plan.second, R_t, rows.next, rows.block, &none,
                [&](int first, int last) { finish_blocks<A>(t, first, last); });
  }
  template <class A>
  void finish_blocks(int64_t t, int first, int last) {
    const bool inside = t + 1 < end;
    const int R_t = rows.active[t], kept = rows.active[t + 1];
    T* const next = inside ? inputs + at(t + 1) : rows.state.get();
    const ptrdiff_t next_block = inside ? stride : rows.block;
    const T* source = in(A::needs_input ? args.saved_pre : args.states) + row(t, N);
    for (int b = first; b < last && b < blocks; b++) {
      const int count = rows.lanes(b);
      const V<T> param = load(plan.param + b * L), bias = load(all.bias + b * L);
      V<T> of_param = V<T>{};
      for (int r = 0; r < R_t; r++) {
        const ptrdiff_t to = static_cast<ptrdiff_t>(r) * N + b * L;
        V<T> gam = V<T>{}, bent = V<T>{};
        if (!rows.ended(r, t)) {
          V<T> kap = load(rows.next + b * rows.block + r * L) + load(sum + b * stride + at(t) + r * L) + bias;
          if (args.e) kap += load_part(in(args.e) + row(t, N) + to, count);
          const V<T> saved = load_part(source + to, count);
          gam = activate_grad<T, A>(saved, kap, param, &of_param);
          bent = kap * bend<T, A>(saved, load(delta + b * stride + at(t) + r * L));
        }
        if (r < kept) store(next + b * next_block + r * L, gam);
        if (args.grad_hs) store_part(out(args.grad_hs) + row(t, N) + to, gam, count);
        if (args.grad_before) store_part(out(args.grad_before) + row(t + 1, N) + to, bent, count);
      }
    }
  }

  // delta times a matrix, written to the rows of a result or added to them.
  void add_product(const Packed<T>& matrix, void* result, int columns, bool add) {
    const Segment<T> from = {delta, stride, N};
    Transfers<T> none;
    multiply<T>(&from, 1, matrix, used, sum, stride, &none, [&](int first, int last) {
      for (int64_t t = begin; t < end; t++)
        for (int b = first; b < last && b * L < columns; b++) {
          const int count = columns - b * L < L ? columns - b * L : L;
          const T* product = sum + b * stride + at(t);
          T* to = out(result) + row(t, columns) + b * L;
          for (int r = 0; r < rows.active[t]; r++, product += L, to += columns)
            store_part(to, add ? load_part(to, count) + load(product) : load(product), count);
        }
    });
  }
};

template <class T>
void scan_second_task(void* context, int task) {
  SecondPlan<T>& call = *static_cast<SecondPlan<T>*>(context);
  const FlushDenormals flush;
  each_group(call.scan, task, kGroupRows, [&](int row0, int R) {
    SecondRows<T> rows(call, &call.sums[task], row0, R);
    if (rows.allocate()) visit_activation(call.base.activation, [&](auto a) { rows.template run<decltype(a)>(); });
    else call.failed = true;
  });
}

template <class T>
bool run_scan_second(const ScanSecondArgs& args) {
  SecondPlan<T> call;
  call.args = &args, call.failed = false;
  if (!call.prepare()) return false;
  const int threads = call.scan.threads;
  Scratch<char> memory(sizeof(ScanSums<T>) * threads);
  if (!memory.get()) return false;
  call.sums = reinterpret_cast<ScanSums<T>*>(memory.get());  // all zero bytes: empty scratch buffers
  bool ok = true;
  for (int i = 0; i < threads && ok; i++) ok = call.sums[i].allocate(call.scan);
  if (ok) parallel_run(threads, scan_second_task<T>, &call);
  if (ok && !call.failed && call.base.grad_map) collect_products(call.scan, call.sums);
  for (int i = 0; i < threads; i++) call.sums[i].~ScanSums<T>();
  return ok && !call.failed;
}

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
