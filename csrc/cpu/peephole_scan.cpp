// peephole_scan, the LSTM with peepholes, on the CPU: the equations are in the docstring of
// orthokern/ops/peephole_scan.py.
//
// As in gru_scan.cpp a thread processes its rows of the batch for all steps, in groups of at most kGatedGroupRows rows
// whose states stay blocked in the caches, and the gradient of the weights is a product over all steps that the caller
// computes afterwards. Threads never synchronize. The epilogue of
// a gate runs per panel of 2 L columns:
//
//   forward    i <- epilogue of h W_i^T    f, f*c' <- of h W_f^T    g, c <- of h W_g^T    o, h <- of h W_o^T
//   backward   dh, dc and d_i, d_f, d_g, d_o of step t - 1  <- epilogue of [d_i d_f d_g d_o] W of step t
//
// Weights are packed once per call. Gradients of peepholes are summed over the rows of a step in the working precision,
// and over steps in float64. Cost per step and sequence: 8 N^2 flops each way.
#include "cpu/gated.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

constexpr int kGates = 4, kPeepholes = 3;

template <class T>
struct PeepholeCall {
  const PeepholeArgs* args;
  int B, N, threads;
  bool backward, failed;
  bool stream;           // write gates, or their gradients, with streaming stores
  Packed<T> gate[4];     // forward [N, N]: the transposes of W_i, W_f, W_g, W_o
  Packed<T> back;        // backward [4N, N]: W
  Scratch<T> peephole;   // [3][round_up(N)]
  Scratch<double> sums;  // [threads][3][round_up(N)]: gradients of the peepholes
  Scratch<int> begin;    // [threads + 1]: task i has the rows [begin[i], begin[i + 1]) of the batch

  int length(int) const { return static_cast<int>(args->T); }
  int padded() const { return round_up(N, kLanes<T>); }
  int blocks() const { return padded() / kLanes<T>; }
  int lanes(int b) const { return N - b * kLanes<T> < kLanes<T> ? N - b * kLanes<T> : kLanes<T>; }
  V<T> peephole_of(int k, int b) const { return load(peephole + k * padded() + b * kLanes<T>); }
};

// fn(block, count of lanes, row, element of blocked matrices) for R rows of the blocks [first, last).
template <class T, class F>
ORTHOKERN_INLINE void each_row(const PeepholeCall<T>& call, int R, int first, int last, const F& fn) {
  constexpr int L = kLanes<T>;
  for (int b = first; b < last && b < call.blocks(); b++) {
    const int count = call.lanes(b);
    ptrdiff_t at = static_cast<ptrdiff_t>(b) * R * L;
    if (count == L) {
      for (int r = 0; r < R; r++, at += L) fn(b, L, r, at);
    } else {
      for (int r = 0; r < R; r++, at += L) fn(b, count, r, at);
    }
  }
}

// Task i packs its share of every matrix's panels.
template <class T>
void peephole_pack_task(void* context, int task) {
  PeepholeCall<T>& call = *static_cast<PeepholeCall<T>*>(context);
  const int N = call.N, parts = call.args->threads;
  for (int g = 0; g < kGates; g++) {
    const T* w = static_cast<const T*>(call.args->w) + static_cast<ptrdiff_t>(g) * N * N;
    Packed<T>* to = call.backward ? &call.back : &call.gate[g];
    const int panels = to->panel_count(), first = panels * task / parts, last = panels * (task + 1) / parts;
    if (call.backward) to->fill(first, last, g * N, N, w, N, 1, nullptr);
    else to->fill(first, last, 0, N, w, 1, N, nullptr);
  }
}

// Blocked matrices [N/L][R][L] of R rows: h by the parity of the step, results of products, c, and i.
template <class T>
struct PeepholeStates {
  Scratch<T> state[2], acc, cell, in;

  bool start(const PeepholeCall<T>& call, int row0, int R) {
    if (!allocate_rows(call, R, state[0], state[1], acc, cell, in)) return false;
    const ptrdiff_t from = static_cast<ptrdiff_t>(row0) * call.N;
    block_rows(call, static_cast<const T*>(call.args->h0) + from, R, state[0].get());
    block_rows(call, static_cast<const T*>(call.args->c0) + from, R, cell.get());
    return true;
  }
};

// Panels [from, to) of step t, which need all of h_{t-1} and these columns of c_{t-1}; and the transfers of each gate.
template <class T>
void peephole_step(const PeepholeCall<T>& call, PeepholeStates<T>& states, int64_t t, int row0, int R, int from, int to,
                   bool stream, Transfers<T>* transfers) {
  constexpr int L = kLanes<T>;
  const PeepholeArgs& args = *call.args;
  const ptrdiff_t N = call.N, block = static_cast<ptrdiff_t>(R) * L, row = t * call.B + row0;
  const T* x = static_cast<const T*>(args.x) + row * kGates * N;
  T *gates = static_cast<T*>(args.gates) + row * kGates * N, *hs = static_cast<T*>(args.hs) + row * N;
  T *cs = static_cast<T*>(args.cs) + row * N, *h_new = states.state[1 - t % 2];
  T *acc = states.acc, *cell = states.cell, *in = states.in;
  const Segment<T> h = {states.state[t % 2], block, call.N};

  // The argument of gate g's function, without the peephole; and the gate as a result.
  auto argument = [&](int g, int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
    return load(acc + at) + read(x + (r * kGates + g) * N + b * L, count);
  };
  auto give = [&](int g, int b, int count, int r, V<T> value)
                  __attribute__((always_inline)) { write(gates + (r * kGates + g) * N + b * L, value, count, stream); };
  auto i_gate = [&](int first, int last) {
    each_row(call, R, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const V<T> i = sigmoid<T>(argument(0, b, count, r, at) + call.peephole_of(0, b) * load(cell + at));
      give(0, b, count, r, i);
      store(in + at, i);
    });
  };
  auto f_gate = [&](int first, int last) {
    each_row(call, R, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const V<T> c = load(cell + at), f = sigmoid<T>(argument(1, b, count, r, at) + call.peephole_of(1, b) * c);
      give(1, b, count, r, f);
      store(cell + at, f * c);
    });
  };
  auto new_cell = [&](int first, int last) {
    each_row(call, R, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const V<T> g = vtanh<T>(argument(2, b, count, r, at)), c = load(cell + at) + load(in + at) * g;
      give(2, b, count, r, g);
      store(cell + at, c);
      write(cs + r * N + b * L, c, count, false);
    });
  };
  auto new_state = [&](int first, int last) {
    each_row(call, R, first, last, [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
      const V<T> c = load(cell + at), o = sigmoid<T>(argument(3, b, count, r, at) + call.peephole_of(2, b) * c);
      const V<T> now = o * vtanh<T>(c);
      give(3, b, count, r, o);
      store(h_new + at, now);
      write(hs + r * N + b * L, now, count, false);
    });
  };
  multiply<T>(&h, 1, call.gate[0], R, acc, block, &transfers[0], i_gate, from, to);
  multiply<T>(&h, 1, call.gate[1], R, acc, block, &transfers[1], f_gate, from, to);
  multiply<T>(&h, 1, call.gate[2], R, acc, block, &transfers[2], new_cell, from, to);
  multiply<T>(&h, 1, call.gate[3], R, acc, block, &transfers[3], new_state, from, to);
}

template <class T>
bool peephole_forward(const PeepholeCall<T>& call, int row0, int R) {
  constexpr int L = kLanes<T>;
  const PeepholeArgs& args = *call.args;
  const ptrdiff_t N = call.N;
  PeepholeStates<T> states;
  if (!states.start(call, row0, R)) return false;
  for (int64_t t = 0; t < args.T; t++) {
    // Prefetches what the next step reads first, a quarter with each product.
    const ptrdiff_t row = t * call.B + row0;
    const T* x_next = static_cast<const T*>(args.x) + (row + call.B) * kGates * N;
    Transfers<T> transfers[kGates];
    for (int g = 0; g < kGates; g++) {
      if (t + 1 < args.T) transfers[g].prefetch(x_next + g * N, kGates * N, L, R, call.blocks());
      if (!call.stream)
        transfers[g].prefetch(static_cast<T*>(args.gates) + (row * kGates + g) * N, kGates * N, L, R, call.blocks());
    }
    transfers[2].prefetch(static_cast<T*>(args.cs) + row * N, N, L, R, call.blocks());
    transfers[3].prefetch(static_cast<T*>(args.hs) + row * N, N, L, R, call.blocks());
    peephole_step(call, states, t, row0, R, 0, call.gate[0].panel_count(), call.stream, transfers);
  }
  if (call.stream) stream_fence();
  return true;
}

// What a step of the backward reads and writes besides the blocked adjoints: rows of matrices [T, B, ..]; null: zeros.
template <class T>
struct PeepholeStep {
  const T *grad_h, *grad_c, *c, *before, *gates;
  T* grad_x;

  PeepholeStep(const PeepholeCall<T>& call, int64_t t, int row0) {
    const PeepholeArgs& args = *call.args;
    const ptrdiff_t N = call.N, row = t * call.B + row0;
    auto at = [&](const void* from, ptrdiff_t width) {
      return from ? static_cast<const T*>(from) + row * width : nullptr;
    };
    grad_h = at(args.grad_hs, N), grad_c = at(args.grad_cs, N), c = at(args.saved_cs, N);
    before = t ? c - call.B * N : static_cast<const T*>(args.c0) + row0 * N;
    gates = at(args.saved_gates, kGates * N);
    grad_x = static_cast<T*>(args.grad_x) + row * kGates * N;
  }
};

template <class T>
bool peephole_backward(const PeepholeCall<T>& call, double* sums, int row0, int R) {
  constexpr int L = kLanes<T>;
  const PeepholeArgs& args = *call.args;
  const ptrdiff_t N = call.N, block = static_cast<ptrdiff_t>(R) * L;
  Scratch<T> acc, cell;  // what a step passes to the one before: to h by the product, and to c
  // Of i, f, g, o, at this step and at the one before: the product still reads the former when the epilogue of its first
  // columns writes the latter.
  Scratch<T> d[kGates], d_next[kGates];
  if (!allocate_rows(call, R, acc, cell)) return false;
  for (int g = 0; g < kGates; g++)
    if (!allocate_rows(call, R, d[g], d_next[g])) return false;
  const bool stream = call.stream;
  const V<T> one = splat<T>(1);

  // Blocks [first, last) of step t, from acc and cell.
  auto begin = [&](int64_t t, int first, int last) {
    const PeepholeStep<T> step(call, t, row0);
    T *to_i = d_next[0], *to_f = d_next[1], *to_g = d_next[2], *to_o = d_next[3];
    for (int b = first; b < last && b < call.blocks(); b++) {
      const V<T> p_i = call.peephole_of(0, b), p_f = call.peephole_of(1, b), p_o = call.peephole_of(2, b);
      V<T> sum[kPeepholes] = {V<T>{}, V<T>{}, V<T>{}};
      each_row(call, R, b, b + 1, [&](int, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
        const ptrdiff_t of_h = r * N + b * L, of_gates = r * kGates * N + b * L;
        V<T> dh = load(acc + at), dc = load(cell + at);
        if (step.grad_h) dh += read(step.grad_h + of_h, count);
        if (step.grad_c) dc += read(step.grad_c + of_h, count);
        const V<T> i = read(step.gates + of_gates, count), f = read(step.gates + of_gates + N, count),
                   g = read(step.gates + of_gates + 2 * N, count), o = read(step.gates + of_gates + 3 * N, count),
                   c = read(step.c + of_h, count), before = read(step.before + of_h, count);
        const V<T> shown = vtanh<T>(c);
        const V<T> d_o = dh * shown * (o * (one - o));
        dc += dh * o * (one - shown * shown) + d_o * p_o;
        const V<T> d_i = dc * g * (i * (one - i)), d_f = dc * before * (f * (one - f)), d_g = dc * i * (one - g * g);
        store(cell + at, dc * f + d_i * p_i + d_f * p_f);
        store(to_i + at, d_i), store(to_f + at, d_f), store(to_g + at, d_g), store(to_o + at, d_o);
        write(step.grad_x + of_gates, d_i, count, stream);
        write(step.grad_x + of_gates + N, d_f, count, stream);
        write(step.grad_x + of_gates + 2 * N, d_g, count, stream);
        write(step.grad_x + of_gates + 3 * N, d_o, count, stream);
        sum[0] += d_i * before, sum[1] += d_f * before, sum[2] += d_o * c;
      });
      for (int k = 0; k < kPeepholes; k++)
        for (int n = 0; n < L; n++) sums[k * call.padded() + b * L + n] += static_cast<double>(sum[k][n]);
    }
  };

  begin(args.T - 1, 0, call.blocks());
  for (int64_t t = args.T - 1; t >= 0; t--) {
    Transfers<T> transfers;
    if (t > 0) {
      const PeepholeStep<T> step(call, t - 1, row0);
      if (step.grad_h) transfers.prefetch(step.grad_h, N, L, R, call.blocks());
      if (step.grad_c) transfers.prefetch(step.grad_c, N, L, R, call.blocks());
      transfers.prefetch(step.before, N, L, R, call.blocks());
      transfers.prefetch(step.gates, kGates * N, L, R, (kGates * call.N + L - 1) / L);
    }
    for (int g = 0; g < kGates; g++) d[g].swap(d_next[g]);
    const Segment<T> from[kGates] = {
        {d[0], block, call.N}, {d[1], block, call.N}, {d[2], block, call.N}, {d[3], block, call.N}};
    multiply<T>(from, kGates, call.back, R, acc, block, &transfers, [&](int first, int last) {
      if (t > 0) begin(t - 1, first, last);
    });
  }
  T *grad_h0 = static_cast<T*>(args.grad_h0) + row0 * N, *grad_c0 = static_cast<T*>(args.grad_c0) + row0 * N;
  each_row(call, R, 0, call.blocks(), [&](int b, int count, int r, ptrdiff_t at) __attribute__((always_inline)) {
    write(grad_h0 + r * N + b * L, load(acc + at), count, false);
    write(grad_c0 + r * N + b * L, load(cell + at), count, false);
  });
  if (stream) stream_fence();
  return true;
}

template <class T>
void peephole_task(void* context, int task) {
  PeepholeCall<T>& call = *static_cast<PeepholeCall<T>*>(context);
  const FlushDenormals flush;
  each_group(call, task, kGatedGroupRows, [&](int row0, int R) {
    double* sums = call.backward ? call.sums + static_cast<ptrdiff_t>(task) * kPeepholes * call.padded() : nullptr;
    if (!(call.backward ? peephole_backward(call, sums, row0, R) : peephole_forward(call, row0, R))) call.failed = true;
  });
}

template <class T>
bool run_peephole(const PeepholeArgs& args, bool backward) {
  PeepholeCall<T> call;
  call.args = &args, call.backward = backward, call.failed = false;
  const int N = call.N = static_cast<int>(args.N), B = call.B = static_cast<int>(args.B);
  call.threads = args.threads < B ? args.threads : B;
  const int64_t bytes = args.T * args.B * args.N * kGates * static_cast<int64_t>(sizeof(T));
  call.stream = N % kLanes<T> == 0 && bytes > kGatedStreamBytes &&
                reinterpret_cast<uintptr_t>(backward ? args.grad_x : args.gates) % kVectorBytes == 0;
  if (!share_rows(&call) || !call.peephole.allocate(kPeepholes * static_cast<size_t>(call.padded()))) return false;
  for (int k = 0; k < kPeepholes; k++)
    memcpy(call.peephole + k * call.padded(), static_cast<const T*>(args.peephole) + k * N, N * sizeof(T));
  if (backward) {
    if (!call.back.allocate(kGates * N, N) ||
        !call.sums.allocate(static_cast<size_t>(call.threads) * kPeepholes * call.padded()))
      return false;
  } else {
    for (int g = 0; g < kGates; g++)
      if (!call.gate[g].allocate(N, N)) return false;
  }
  parallel_run(args.threads, peephole_pack_task<T>, &call);
  parallel_run(call.threads, peephole_task<T>, &call);
  if (backward && !call.failed) {
    T* to = static_cast<T*>(args.grad_peephole);
    for (int k = 0; k < kPeepholes; k++)
      for (int n = 0; n < N; n++) {
        double total = 0;
        for (int i = 0; i < call.threads; i++) total += call.sums[(i * kPeepholes + k) * call.padded() + n];
        to[k * N + n] = static_cast<T>(total);
      }
  }
  return !call.failed;
}

}  // namespace

bool peephole_scan_fwd(const PeepholeArgs& args) {
  return args.dtype == kFloat64 ? run_peephole<double>(args, false) : run_peephole<float>(args, false);
}
bool peephole_scan_bwd(const PeepholeArgs& args) {
  return args.dtype == kFloat64 ? run_peephole<double>(args, true) : run_peephole<float>(args, true);
}

}  // namespace orthokern::ORTHOKERN_ISA
