// The derivative of gru_scan's backward: Note [Second derivative of the GRU] in orthokern/ops/_second_gru.py.
//
// It is the tangent of the states, a recurrence that runs forward in time with the products of the forward, and what
// each step of it gives to the gates and the state before. Work is shared and blocked as in gru_scan.cpp:
//
//   kanai   r', (r h)' <- epilogue of v W_r^T      z' <- epilogue of v W_z^T      the rest <- epilogue of (r h)' W_n^T
//   torch   r', z'     <- epilogues of v W_r^T, v W_z^T                           the rest <- epilogue of v W_n^T
#pragma once

#include "cpu/gru.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
struct GruSecondCall {
  const GruSecondArgs* args;
  GruPlan<T> plan;
  bool failed;
};

template <class T, bool KANAI>
bool second_rows(const GruSecondArgs& args, const GruPlan<T>& plan, int row0, int R) {
  constexpr int L = kLanes<T>;
  const ptrdiff_t N = plan.N, block = static_cast<ptrdiff_t>(R) * L;
  Scratch<T> state, next, acc, a_r, a_z, m;  // v' and v; the tangents of what r and z are made of; kanai: that of r h
  if (!allocate_rows(plan, R, state, next, acc, a_r, a_z) || (KANAI && !allocate_rows(plan, R, m))) return false;
  GruRows<T> rows(plan, row0, R);
  if (!rows.allocate()) return false;
  rows.clear_padding(args.v, N);
  rows.clear_padding(args.gates, 3 * N);
  rows.clear_padding(args.pre, N);
  rows.clear_padding(args.before, N);
  block_rows(plan, static_cast<const T*>(args.v0) + row0 * N, R, state.get());
  const V<T> one = splat<T>(1), two = splat<T>(2);

  for (int64_t t = 0; t < rows.longest; t++) {
    const int R_t = rows.at(t);
    const ptrdiff_t row = t * plan.B + row0;
    auto in = [&](const void* from, int width) {
      return from ? static_cast<const T*>(from) + row * width * N : nullptr;
    };
    auto out = [&](void* to, int width) { return static_cast<T*>(to) + row * width * N; };
    const T *x = in(args.x, 3), *added = in(args.added, 3), *gates = in(args.saved_gates, 3);
    const T *pre = in(args.saved_pre, 1), *ghat = in(args.ghat, 1), *d_m = in(args.d_m, 1), *sent = in(args.sent, 1);
    const T* h =
        t ? static_cast<const T*>(args.saved_hs) + (row - plan.B) * N : static_cast<const T*>(args.base.h0) + row0 * N;
    T *to_v = out(args.v, 1), *to_gates = out(args.gates, 3), *to_pre = out(args.pre, 1), *to_h = out(args.before, 1);
    const Segment<T> from_v = {state, block, plan.N}, from_m = {m, block, plan.N};
    T *v = state, *v_new = next;

    Transfers<T> transfers[3];
    for (int g = 0; g < 3; g++) {
      transfers[g].prefetch(x + g * N, 3 * N, L, R_t, plan.blocks());
      transfers[g].prefetch(gates + g * N, 3 * N, L, R_t, plan.blocks());
    }
    // The tangent of the argument of gate g's function.
    auto argument = [&](int g, int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t from = (r * 3 + g) * N + b * L;
      const V<T> sum = load(acc + at) + read(x + from, count);
      return added ? sum + read(added + from, count) : sum;
    };
    multiply<T>(&from_v, 1, plan.gate[0], R_t, acc, block, &transfers[0], [&](int first, int last) {
      rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
        const V<T> a = argument(0, b, count, r, at);
        store(a_r + at, a);
        if (!KANAI) return;
        const V<T> gate = read(gates + r * 3 * N + b * L, count);
        const V<T> both = a * (gate * (one - gate)) * read(h + r * N + b * L, count) + gate * load(v + at);
        store(m + at, both);
        write(to_pre + r * N + b * L, both, count, false);
      });
    });
    multiply<T>(&from_v, 1, plan.gate[1], R_t, acc, block, &transfers[1], [&](int first, int last) {
      rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
        store(a_z + at, argument(1, b, count, r, at));
      });
    });
    multiply<T>(KANAI ? &from_m : &from_v, 1, plan.gate[2], R_t, acc, block, &transfers[2], [&](int first, int last) {
      rows.each(t, first, last, [&](int b, int count, int r_, ptrdiff_t at) __attribute__((always_inline)) {
        const ptrdiff_t of_h = r_ * N + b * L, of_r = r_ * 3 * N + b * L;
        const V<T> r = read(gates + of_r, count), z = read(gates + of_r + N, count),
                   n = read(gates + of_r + 2 * N, count), h_ = read(h + of_h, count), g = read(ghat + of_h, count);
        const V<T> dv = load(v + at), da_r = load(a_r + at), da_z = load(a_z + at);
        const V<T> by_r = r * (one - r), by_z = z * (one - z), by_n = one - n * n;
        const V<T> dr = by_r * da_r, dz = by_z * da_z, g_n = g * (one - z);
        V<T> da_n, of_r_, of_before = g * dz;
        if (KANAI) {
          const V<T> from_n = read(d_m + of_h, count);
          da_n = argument(2, b, count, r_, at);
          of_r_ = from_n * (dv + h_ * (one - two * r) * da_r);
          of_before += from_n * dr;
          if (sent) {
            const V<T> more = read(sent + of_h, count);
            of_r_ += more * h_;
            of_before += more * r;
          }
        } else {
          const V<T> q = read(pre + of_h, count), d_n = g_n * by_n;
          V<T> dq = load(acc + at);
          if (added) dq += read(added + of_r + 2 * N, count);
          da_n = read(x + of_r + 2 * N, count) + dr * q + r * dq;
          of_r_ = d_n * (dq + q * (one - two * r) * da_r);
          write(to_pre + of_h, d_n * dr, count, false);
        }
        const V<T> dn = by_n * da_n, now = dz * (h_ - n) + z * dv + (one - z) * dn;
        store(v_new + at, now);
        write(to_v + of_h, now, count, false);
        write(to_gates + of_r, of_r_, count, false);
        write(to_gates + of_r + N, g * (dv - dn + (h_ - n) * (one - two * z) * da_z), count, false);
        write(to_gates + of_r + 2 * N, -(g * dz) - two * n * g_n * da_n, count, false);
        write(to_h + of_h, of_before, count, false);
      });
    });
    state.swap(next);
  }
  return true;
}

template <class T>
void gru_second_task(void* context, int task) {
  GruSecondCall<T>& call = *static_cast<GruSecondCall<T>*>(context);
  const GruPlan<T>& plan = call.plan;
  const FlushDenormals flush;
  each_group(plan, task, kGatedGroupRows, [&](int row0, int R) {
    if (!(plan.args->kanai ? second_rows<T, true>(*call.args, plan, row0, R)
                           : second_rows<T, false>(*call.args, plan, row0, R)))
      call.failed = true;
  });
}

template <class T>
bool run_gru_second(const GruSecondArgs& args) {
  GruSecondCall<T> call;
  GruPlan<T>& plan = call.plan;
  call.args = &args, call.failed = false;
  if (!prepare_gru(&plan, args.base, false)) return false;
  parallel_run(plan.args->threads, gru_pack_task<T>, &plan);
  parallel_run(plan.threads, gru_second_task<T>, &call);
  return !call.failed;
}

}  // namespace
}  // namespace orthokern::ORTHOKERN_ISA
