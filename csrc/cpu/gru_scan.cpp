// gru_scan on the CPU: the equations are in orthokern/ops/gru_scan.py, those of the backward in Note [GRU scan
// backward] of the reference.
//
// As in scan.h a thread processes its rows of the batch for all steps, in groups of at most kGatedGroupRows rows whose
// state stays blocked in the caches. Threads never synchronize. The gradients of weights and biases, which are sums over sequences, are
// products over all steps that the caller computes afterwards. The backward writes the one factor of them that is not
// a result or an input.
//
//   forward
//     kanai   r, m = r*h  <- epilogue of h W_r^T      z <- epilogue of h W_z^T      n, h <- epilogue of m W_n^T
//     torch   r, z        <- epilogues of h W_r^T, h W_z^T                          q, n, h <- epilogue of h W_n^T
//   backward, from the last step
//     kanai   d_r <- epilogue of d_n W_n              ghat, d_z, d_n of t-1      <- epilogue of [d_r d_z] [W_r; W_z]
//     torch                                           d_r, d_z, d_q, d_n of t-1  <- epilogue of [d_r d_z d_q] W
//
// The epilogue of a gate runs per panel of 2 L columns, while the product's result is in the nearest cache. Weights are
// packed once per call.
//
// Sequences of different lengths: step t computes the first R_t rows of a group, up to the last one that still runs,
// and the epilogues skip rows between them that have ended. In a batch sorted by falling length no product computes a
// row that has ended. Padding in the results is zero. Resets: the rows that a step starts anew are overwritten in the
// blocked state before its products. Cost per step and sequence: 6 N^2 flops each way. Traffic: see the op.
#include "cpu/gru_direct.h"
#include "cpu/gru_forward.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
struct GruCall {
  GruPlan<T> plan;
  Scratch<double> norms;  // [threads][T]: sums of squares of ghat_t
  bool failed;
};

// Where the rows [row0, row0 + R) of a group start from reset_state.
template <class T>
struct GruCuts {
  const GruPlan<T>& plan;
  const int row0, R;
  Scratch<T> zeros;  // a row of them, in place of a reset_state

  GruCuts(const GruPlan<T>& plan_, int row0_, int R_) : plan(plan_), row0(row0_), R(R_) {}
  bool allocate() {
    return !plan.args->resets || plan.args->reset_state || zeros.allocate(static_cast<size_t>(plan.padded()));
  }
  // [R], not 0 for the rows that reset at step t; null if none does.
  const uint8_t* at(int64_t t) const {
    if (!plan.args->resets || t >= plan.args->T) return nullptr;
    const uint8_t* flags = plan.args->resets + t * plan.B + row0;
    for (int r = 0; r < R; r++)
      if (flags[r]) return flags;
    return nullptr;
  }
  const T* start(int r) const {
    const T* state = static_cast<const T*>(plan.args->reset_state);
    return state ? state + static_cast<ptrdiff_t>(row0 + r) * plan.N : zeros.get();
  }
};

template <class T, bool KANAI>
bool forward_rows(const GruPlan<T>& plan, int row0, int R) {
  constexpr int L = kLanes<T>;
  const GruArgs& args = *plan.args;
  const ptrdiff_t N = plan.N;
  GruStates<T> states;
  if (!states.start(plan, row0, R)) return false;
  GruRows<T> rows(plan, row0, R);
  GruCuts<T> cuts(plan, row0, R);
  if (!rows.allocate() || !cuts.allocate()) return false;
  rows.clear_padding(args.hs, N);
  rows.clear_padding(args.gates, 3 * N);
  rows.clear_padding(args.pre, N);
  const bool stream = plan.stream;

  for (int64_t t = 0; t < rows.longest; t++) {
    const int R_t = rows.at(t);
    const GruStep<T, KANAI> step(plan, rows, states, t, stream);
    const T* x_next = step.x + static_cast<ptrdiff_t>(plan.B) * 3 * N;

    if (const uint8_t* cut = cuts.at(t))
      rows.each(t, 0, plan.blocks(), [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
        if (cut[r]) store(step.h + at, read(cuts.start(r) + b * L, count));
      });

    // Prefetches what the next step reads first, a third with each product.
    Transfers<T> transfers[3];
    if (t + 1 < rows.longest)
      for (int g = 0; g < 3; g++) transfers[g].prefetch(x_next + g * N, 3 * N, L, rows.at(t + 1), plan.blocks());
    if (!stream)
      for (int g = 0; g < 3; g++) transfers[g].prefetch(step.gates + g * N, 3 * N, L, R_t, plan.blocks());
    transfers[2].prefetch(step.hs, N, L, R_t, plan.blocks());

    const int panels = plan.gate[0].panel_count();
    step.compute_gates(0, panels, transfers);
    step.compute_state(0, panels, transfers);
  }
  if (stream) stream_fence();
  return true;
}

// Working memory of the backward, blocked. direct: the part of ghat_{t-1} that needs no product. d_r, d_z and d_q of
// two steps, because a product still reads those of the step after.
template <class T>
struct GruAdjoints {
  Scratch<T> acc, direct, d_n, d_r[2], d_z[2], d_q[2];

  bool allocate(size_t size, bool kanai) {
    if (!acc.allocate(size) || !direct.allocate(size) || !d_n.allocate(size)) return false;
    for (int i = 0; i < 2; i++)
      if (!d_r[i].allocate(size) || !d_z[i].allocate(size) || (!kanai && !d_q[i].allocate(size))) return false;
    return true;
  }
};

template <class T, bool KANAI>
bool backward_rows(const GruPlan<T>& plan, double* norms, int row0, int R) {
  constexpr int L = kLanes<T>;
  const GruArgs& args = *plan.args;
  const ptrdiff_t N = plan.N, block = static_cast<ptrdiff_t>(R) * L;
  const size_t size = static_cast<size_t>(round_up(plan.N, 2 * L)) * R;
  GruAdjoints<T> memory;
  GruRows<T> rows(plan, row0, R);
  GruCuts<T> cuts(plan, row0, R);
  if (!memory.allocate(size, KANAI) || !rows.allocate() || !cuts.allocate()) return false;
  Scratch<T>&acc = memory.acc, &direct = memory.direct, &d_n = memory.d_n;
  Scratch<T>*d_r = memory.d_r, *d_z = memory.d_z, *d_q = memory.d_q;
  const bool stream = plan.stream;
  int now = 0;  // which of the two is that of the current step

  // Rows whose last step has not been reached are zero in all of these, which is what they have to start with.
  rows.clear_padding(args.grad_x, 3 * N);
  rows.clear_padding(args.factor, N);
  auto rows_of = [&](const void* from, int64_t t, int width) {
    return static_cast<T*>(const_cast<void*>(from)) + (t * plan.B + row0) * width * N;
  };
  auto grad_of_state = [&](int64_t t) { return rows_of(args.grad_hs, t, 1); };
  auto state_before = [&](int64_t t) {
    return t ? rows_of(args.saved_hs, t - 1, 1) : static_cast<const T*>(args.h0) + row0 * N;
  };

  // What step t passes to the state before it: acc, the result of its products, and direct, the part that needs none.
  // A step that starts from reset_state passes it there, and nothing to the state before.
  auto passed = [&](const uint8_t* cut, int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
    const V<T> carry = load(acc + at) + load(direct + at);
    if (!cut || !cut[r]) return carry;
    if (args.grad_reset_state) {
      T* sum = static_cast<T*>(args.grad_reset_state) + (row0 + r) * N + b * L;
      write(sum, read(sum, count) + carry, count, false);
    }
    return V<T>{};
  };
  auto started = [&](const uint8_t* cut, const T* h, int b, int count, int r) __attribute__((always_inline)) {
    return read(cut && cut[r] ? cuts.start(r) + b * L : h + r * N + b * L, count);
  };

  // The start of step t for some blocks. ghat_t is g_t and what step t + 1 passes.
  auto begin = [&](int64_t t, int first, int last) {
    const T *g = grad_of_state(t), *h = state_before(t), *gates = rows_of(args.saved_gates, t, 3);
    const T* pre = KANAI ? nullptr : rows_of(args.saved_pre, t, 1);
    T *grad_x = rows_of(args.grad_x, t, 3), *factor = rows_of(args.factor, t, 1);
    T *to_z = d_z[now], *to_r = d_r[now], *to_q = d_q[now];
    const uint8_t *cut = cuts.at(t), *cut_after = cuts.at(t + 1);
    SquareSum<T> square;
    const V<T> one = splat<T>(1);
    rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const ptrdiff_t of_h = r * N + b * L, of_r = r * 3 * N + b * L;
      const V<T> ghat = read(g + of_h, count) + passed(cut_after, b, count, r, at);
      square.add(ghat);
      const V<T> z = read(gates + of_r + N, count), n = read(gates + of_r + 2 * N, count),
                 before = started(cut, h, b, count, r);
      const V<T> by_z = z * (one - z), by_n = one - n * n;
      const V<T> z_out = ghat * (before - n) * by_z, n_out = ghat * (one - z) * by_n;
      store(to_z + at, z_out);
      store(direct + at, ghat * z);
      write(grad_x + of_r + N, z_out, count, stream);
      write(grad_x + of_r + 2 * N, n_out, count, stream);
      if (KANAI) {
        store(d_n + at, n_out);
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
  };

  begin(rows.longest - 1, 0, plan.blocks());
  for (int64_t t = rows.longest - 1; t >= 0; t--) {
    const int R_t = rows.at(t), R_next = t > 0 ? rows.at(t - 1) : 0;
    // Prefetches what step t - 1 reads.
    Transfers<T> transfers[2];
    const int with_r = KANAI ? 0 : 1;
    if (t > 0) {
      transfers[with_r].prefetch(grad_of_state(t - 1), N, L, R_next, plan.blocks());
      transfers[with_r].prefetch(state_before(t - 1), N, L, R_next, plan.blocks());
      transfers[1].prefetch(rows_of(args.saved_gates, t - 1, 3), 3 * N, L, R_next, (3 * plan.N + L - 1) / L);
      if (!KANAI) transfers[1].prefetch(rows_of(args.saved_pre, t - 1, 1), N, L, R_next, plan.blocks());
    }
    if (KANAI) {
      const T *h = state_before(t), *gates = rows_of(args.saved_gates, t, 3);
      T *grad_x = rows_of(args.grad_x, t, 3), *factor = rows_of(args.factor, t, 1), *to_r = d_r[now];
      const uint8_t* cut = cuts.at(t);
      const Segment<T> from = {d_n, block, plan.N};
      multiply<T>(&from, 1, plan.back_n, R_t, acc, block, &transfers[0], [&](int first, int last) {
        const V<T> one = splat<T>(1);
        rows.each(t, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
          const ptrdiff_t of_h = r * N + b * L, of_r = r * 3 * N + b * L;
          const V<T> gate = read(gates + of_r, count), before = started(cut, h, b, count, r), d_m = load(acc + at);
          const V<T> r_out = d_m * before * (gate * (one - gate));
          store(to_r + at, r_out);
          write(grad_x + of_r, r_out, count, stream);
          write(factor + of_h, gate * before, count, false);
          store(direct + at, load(direct + at) + gate * d_m);
        });
      });
    }
    const Segment<T> from[3] = {{d_r[now], block, plan.N}, {d_z[now], block, plan.N}, {d_q[now], block, plan.N}};
    now = 1 - now;
    multiply<T>(from, KANAI ? 2 : 3, plan.back, R_t, acc, block, &transfers[1], [&](int first, int last) {
      if (t > 0) begin(t - 1, first, last);
    });
  }
  T* grad_h0 = static_cast<T*>(args.grad_h0) + row0 * N;
  const uint8_t* cut_first = cuts.at(0);
  rows.each(0, 0, plan.blocks(), [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
    write(grad_h0 + r * N + b * L, passed(cut_first, b, count, r, at), count, false);
  });
  if (stream) stream_fence();
  return true;
}

template <class T>
void gru_task(void* context, int task) {
  GruCall<T>& call = *static_cast<GruCall<T>*>(context);
  const GruPlan<T>& plan = call.plan;
  const FlushDenormals flush;
  double* norms = call.norms + task * plan.args->T;
  each_group(plan, task, kGatedGroupRows, [&](int row0, int R) {
    bool ok;
    if (plan.backward)
      ok = plan.args->kanai ? backward_rows<T, true>(plan, norms, row0, R)
                            : backward_rows<T, false>(plan, norms, row0, R);
    else ok = plan.args->kanai ? forward_rows<T, true>(plan, row0, R) : forward_rows<T, false>(plan, row0, R);
    if (!ok) call.failed = true;
  });
}

template <class T>
bool run_gru(const GruArgs& args, bool backward) {
  GruCall<T> call;
  GruPlan<T>& plan = call.plan;
  call.failed = false;
  if (!prepare_gru(&plan, args, backward)) return false;
  const void* large = backward ? args.grad_x : args.gates;
  plan.stream = plan.N % kLanes<T> == 0 &&
                args.T * args.B * args.N * 3 * static_cast<int64_t>(sizeof(T)) > kGatedStreamBytes &&
                reinterpret_cast<uintptr_t>(large) % kVectorBytes == 0;
  const int N = plan.N;
  if (backward) {
    if (!call.norms.allocate(static_cast<size_t>(plan.threads) * args.T)) return false;
  } else {
    if (!plan.bias.allocate(3 * static_cast<size_t>(plan.padded()))) return false;
    if (args.bias)
      for (int g = 0; g < 3; g++)
        memcpy(plan.bias + g * plan.padded(), static_cast<const T*>(args.bias) + g * N, N * sizeof(T));
  }
  parallel_run(plan.args->threads, gru_pack_task<T>, &plan);
  parallel_run(plan.threads, gru_task<T>, &call);
  if (backward && !call.failed) {
    T* norm = static_cast<T*>(args.grad_norm);
    for (int64_t t = 0; t < args.T; t++) {
      double total = 0;
      for (int i = 0; i < plan.threads; i++) total += call.norms[i * args.T + t];
      norm[t] = static_cast<T>(__builtin_sqrt(total));
    }
  }
  return !call.failed;
}

}  // namespace

bool gru_scan_fwd(const GruArgs& args) {
  if (args.T * args.B <= kDirectRows && !args.lengths && !args.resets) {
    if (args.dtype == kFloat64)
      return args.kanai ? DirectGru<double, true>{args}.run() : DirectGru<double, false>{args}.run();
    return args.kanai ? DirectGru<float, true>{args}.run() : DirectGru<float, false>{args}.run();
  }
  return args.dtype == kFloat64 ? run_gru<double>(args, false) : run_gru<float>(args, false);
}
bool gru_scan_bwd(const GruArgs& args) {
  return args.dtype == kFloat64 ? run_gru<double>(args, true) : run_gru<float>(args, true);
}

}  // namespace orthokern::ORTHOKERN_ISA
