// A linear recurrence in modal coordinates with its readout and cross-entropy, and all gradients, in one call, which
// stores neither states nor logits (modal_loss). Its states: rotation_scan.cpp.
//
//   z_t = lambda z_{t-1} + x_t,  logits = C z_t + b,  d_t = c (softmax(logits) - onehot(target)),  g_t = C^T d_t,
//   delta_t = conj(lambda) delta_{t+1} + g_t,  and the sums of d_t z_t^T, d_t, delta_t (by id), delta_t conj(z_{t-1})
//
// A task processes a range of sequences, one after another. First the recurrence alone runs over a sequence and stores
// the state before every chunk of kSteps steps. Then the chunks are processed from the last to the first: states are
// computed again, as rows [step][Np] of type T, and logits [class][step], loss and gradients follow while this data is
// in the nearest caches. A batch of fewer sequences than threads leaves threads idle.
//
// The limit, for float32, N = 2 M = 128, C = 9 and vectors of 64 bytes, in multiply-adds per step and sequence:
// readout, its transpose and its gradient 72 each; recurrence and adjoint, float64, 32 each; diagonal 16; exponentials
// 7: 303, and 32 for the recurrence alone. Loads, stores, conversions and shuffles go to other units. T = 10 020,
// B = 50: 152 million cycles of a core that does one such multiply-add a cycle (Zen 4), half with two. Measured on Zen
// 4 with other work running: 60 ms of CPU time, 21 ms for the loss alone.
#include "cpu/modal.h"

#include <math.h>

#include "cpu/vmath.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// Steps of a chunk whose g stays in L1 until the adjoint reads it; a multiple of 4 that divides kSteps.
constexpr int kBackSteps = 16;
constexpr int kFlushChunks = 4;  // chunks whose readout gradient is summed in T

// Rows of a tile of logits: their sums over lanes fill a vector, or half of one.
template <class T>
constexpr int kLogitRows = kVectorBytes == 64   ? 8
                           : kVectorBytes == 32 ? 4
                                                : kLanes<T>;

template <class T>
using Id = typename Vec<T>::Id;

// Segments of S lanes in a and b -> segments whose lower half is a's, upper half b's, each the sum of its two halves.
template <class T, int S>
ORTHOKERN_INLINE V<T> fold(V<T> a, V<T> b) {
  constexpr int L = kLanes<T>;
  typename Vec<T>::I low, high;
  ORTHOKERN_UNROLL for (int i = 0; i < L; i++) {
    const int start = i / S * S, o = i % S;
    low[i] = o < S / 2 ? start + o : L + start + o - S / 2;
    high[i] = o < S / 2 ? start + o + S / 2 : L + start + o;
  }
  return pick<T>(a, b, low) + pick<T>(a, b, high);
}
// Sums of the lanes of kLogitRows accumulators, in order: L / kLogitRows lanes each, still to be added.
template <class T, int R, int S>
ORTHOKERN_INLINE V<T> fold_all(V<T>* a) {
  ORTHOKERN_UNROLL for (int i = 0; i < R / 2; i++) a[i] = fold<T, S>(a[i], a[i + R / 2]);
  if constexpr (R > 2) return fold_all<T, R / 2, S / 2>(a);
  return a[0];
}

// parts[c] for kLogitRows rows of z and CT classes of the readout [C][Np]: see fold_all.
template <class T, int CT>
ORTHOKERN_INLINE void logits_tile(const T* z, const T* readout, int Np, V<T>* parts) {
  constexpr int L = kLanes<T>, R = kLogitRows<T>;
  V<T> acc[CT][R];
  ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) ORTHOKERN_UNROLL for (int r = 0; r < R; r++) acc[c][r] = V<T>{};
  for (int n = 0; n < Np; n += L) {
    V<T> w[CT];
    ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) w[c] = load(readout + static_cast<ptrdiff_t>(c) * Np + n), pin(w[c]);
    ORTHOKERN_UNROLL for (int r = 0; r < R; r++) {
      V<T> s = load(z + static_cast<ptrdiff_t>(r) * Np + n);
      pin(s);
      ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) acc[c][r] += w[c] * s;
    }
  }
  ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) parts[c] = fold_all<T, R, L>(acc[c]);
}
// logits[c][0 .. L) of L rows, CT classes; rows of logits are kSteps apart.
template <class T, int CT>
void logits_of(const T* z, const T* readout, const T* bias, int Np, T* logits) {
  constexpr int L = kLanes<T>, R = kLogitRows<T>;
  V<T> parts[L / R][CT];
  for (int i = 0; i < L / R; i++) logits_tile<T, CT>(z + static_cast<ptrdiff_t>(i) * R * Np, readout, Np, parts[i]);
  typename Vec<T>::I even, odd;
  for (int i = 0; i < L; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
  ORTHOKERN_UNROLL for (int c = 0; c < CT; c++) {
    static_assert(L / R <= 2, "a tile's sums are whole or in two lanes");
    const V<T> sum =
        L == R ? parts[0][c]
               : pick<T>(parts[0][c], parts[L / R - 1][c], even) + pick<T>(parts[0][c], parts[L / R - 1][c], odd);
    store(logits + static_cast<ptrdiff_t>(c) * kSteps, sum + bias[c]);
  }
}

// g[r][n ..] = sum_c d[c][r] readout[c][n ..], R rows, NV vectors.
template <class T, int R, int NV>
void back_tile(const T* d, int C, const T* readout, int Np, T* g) {
  constexpr int L = kLanes<T>;
  V<T> acc[R][NV];
  ORTHOKERN_UNROLL for (int r = 0; r < R; r++) ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = V<T>{};
  for (int c = 0; c < C; c++) {
    V<T> w[NV];
    ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) w[v] = load(readout + v * L), pin(w[v]);
    ORTHOKERN_UNROLL for (int r = 0; r < R; r++) ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) acc[r][v] += w[v] * d[r];
    d += kSteps, readout += Np;
  }
  ORTHOKERN_UNROLL for (int r = 0; r < R; r++) ORTHOKERN_UNROLL for (int v = 0; v < NV; v++)
      store(g + static_cast<ptrdiff_t>(r) * Np + v * L, acc[r][v]);
}
// g [steps][Np] = d^T readout, and up to 3 more rows
template <class T>
void back_product(const T* d, int C, const T* readout, int steps, int Np, T* g) {
  constexpr int L = kLanes<T>, R = 4, NV = k32Registers ? 4 : 2;
  for (int r = 0; r < steps; r += R) {
    T* to = g + static_cast<ptrdiff_t>(r) * Np;
    int n = 0;
    for (; n + NV * L <= Np; n += NV * L) back_tile<T, R, NV>(d + r, C, readout + n, Np, to + n);
    for (; n < Np; n += L) back_tile<T, R, 1>(d + r, C, readout + n, Np, to + n);
  }
}

// The sums of a task.
template <class T>
struct Sums {
  Scratch<double> table, re, im, pairs, readout, bias;  // [D][Np], [Mp], [Mp], [P][4], [C][Np], [C]
  Scratch<Id<T>> hits;                                  // [T], and room for whole vectors
  double loss;

  bool allocate(const ModalArgs& a, const Modes& modes) {
    if (!hits.allocate(static_cast<size_t>(a.T) + kLanes<T>)) return false;
    return !a.need_grad || ((!a.table || table.allocate(static_cast<size_t>(a.D) * modes.Np)) &&
                            re.allocate(modes.Mp) && im.allocate(modes.Mp) && pairs.allocate(4 * a.P) &&
                            readout.allocate(static_cast<size_t>(a.C) * modes.Np) && bias.allocate(a.C));
  }
};

template <class T>
struct Call {
  const ModalArgs* args;
  Modes modes;
  Scratch<double> coefficients, table;  // in float64: [Np], [D][Np]
  Scratch<T> readout, bias;             // [C][Np], [C]
  int tasks;
  Scratch<int> begin;  // [tasks + 1]: a task has the sequences [begin[i], begin[i + 1])
  TaskSums<Sums<T>> sums;
};

template <class T>
struct Worker {
  const Call<T>& call;
  const ModalArgs& args;
  const Modes& modes;
  Sums<T>& sums;
  const int C, Np;
  // Inputs in float64, [Np] each: rows of the table, or of a chunk of features [kSteps][Np].
  const double* inputs[kSteps];
  int64_t ids[kSteps];
  Scratch<double> features;
  Scratch<T> z, g, d;            // [1 + kSteps][Np], row 0 the state before the chunk; [kSteps][Np]; [C][kSteps]
  Scratch<T> gradient;           // [C][Np]: the readout's, over a few chunks
  Scratch<double> state, delta;  // [Np]
  Scratch<double> starts;        // [chunks][Np]: the states before the chunks of a sequence
  Id<T> targets[kSteps];
  int unflushed = 0;

  Worker(const Call<T>& c, Sums<T>& s)
      : call(c), args(*c.args), modes(c.modes), sums(s), C(static_cast<int>(args.C)), Np(modes.Np) {}

  bool allocate() {
    const int64_t chunks = (args.T + kSteps - 1) / kSteps;
    if ((!args.table && !features.allocate(static_cast<size_t>(kSteps) * Np)) ||
        !z.allocate(static_cast<size_t>(1 + kSteps) * Np) || !d.allocate(static_cast<size_t>(C) * kSteps) ||
        !state.allocate(Np))
      return false;
    if (!args.need_grad) return true;
    return g.allocate(static_cast<size_t>(kSteps) * Np) && gradient.allocate(static_cast<size_t>(C) * Np) &&
           delta.allocate(Np) && starts.allocate(static_cast<size_t>(chunks) * Np, false);
  }

  // The inputs of steps t .. t + steps of sequence b.
  void read_inputs(int64_t b, int64_t t, int steps) {
    if (!args.table)
      read_rows<T>(modes, SequenceRows<const T>(static_cast<const T*>(args.x), args, b), t, steps, features.get());
    for (int r = 0; r < steps; r++) {
      if (args.table) ids[r] = args.tokens[(t + r) * args.B + b];
      inputs[r] = args.table ? call.table + ids[r] * Np : features + static_cast<ptrdiff_t>(r) * Np;
    }
  }

  // Logits of the chunk in z, softmax, loss and hits; with kGrad d, else d is left as logits. Lanes run over steps.
  template <bool kGrad>
  void readout_and_loss(int64_t b, int64_t t, int steps) {
    typedef typename Vec<T>::I I;
    constexpr int L = kLanes<T>, W = kLanes<double>;
    const V<T> zero = V<T>{}, scale = splat<T>(static_cast<T>(args.scale));
    for (int r = 0; r < steps; r++) targets[r] = static_cast<Id<T>>(args.target[(t + r) * args.B + b]);
    for (int r = steps; r % L; r++) targets[r] = -1;  // no class: ignored
    V<double> loss = V<double>{}, product = loss + 1.0;
    for (int begin = 0; begin < steps; begin += L) {
      T* at = d.get() + begin;
      const T* rows = z + static_cast<ptrdiff_t>(1 + begin) * Np;
      int c = 0;
      for (; c + kClasses <= C; c += kClasses)
        logits_of<T, kClasses>(rows, call.readout + static_cast<ptrdiff_t>(c) * Np, call.bias + c, Np,
                               at + static_cast<ptrdiff_t>(c) * kSteps);
      for (; c < C; c++)
        logits_of<T, 1>(rows, call.readout + static_cast<ptrdiff_t>(c) * Np, call.bias + c, Np,
                        at + static_cast<ptrdiff_t>(c) * kSteps);
      I target, best = I{};
      memcpy(&target, targets + begin, sizeof target);
      const I valid = target >= 0;
      V<T> top = load(at), hit = top;
      for (c = 1; c < C; c++) {
        const V<T> l = load(at + static_cast<ptrdiff_t>(c) * kSteps);
        const I more = l > top;
        best = more ? I{} + c : best;
        top = more ? l : top;
        hit = target == c ? l : hit;
      }
      hit = valid ? hit : top;
      V<T> rest = zero;  // the other classes: a small loss keeps its digits in 1 + rest
      for (c = 0; c < C; c++) {
        const V<T> p = vexp<T>(load(at + static_cast<ptrdiff_t>(c) * kSteps) - top);
        if (kGrad) store(at + static_cast<ptrdiff_t>(c) * kSteps, p);
        rest += best == c ? p - p : p;  // 0, or NaN for a logit that is not finite
      }
      I count;
      memcpy(&count, sums.hits + t + begin, sizeof count);
      count -= (best == target);  // true is -1
      memcpy(sums.hits + t + begin, &count, sizeof count);
      T tops[L], hits[L], others[L];
      store(tops, top), store(hits, hit), store(others, valid ? rest : zero);
      for (int i = 0; i < L; i += W) {
        loss += load_wide(tops + i) - load_wide(hits + i);
        product *= 1.0 + load_wide(others + i);
      }
      if (!kGrad) continue;
      const V<T> share = scale / (rest + T(1));
      for (c = 0; c < C; c++) {
        T* p = at + static_cast<ptrdiff_t>(c) * kSteps;
        const V<T> value = load(p) * share - (target == c ? scale : zero);
        store(p, valid ? value : zero);
      }
    }
    // One logarithm for several rows: a lane's product is at most C^(kSteps / W).
    for (int i = 0; i < W; i++) sums.loss += log(product[i]) + loss[i];
  }

  void flush() {
    constexpr int L = kLanes<T>;
    for (ptrdiff_t i = 0; i < static_cast<ptrdiff_t>(C) * Np; i += L) {
      add_wide<T>(sums.readout + i, load(gradient + i));
      store(gradient + i, V<T>{});
    }
    unflushed = 0;
  }

  // Processes a chunk from the state before it and, with gradients, from delta after it.
  void chunk(int64_t b, int64_t t, int steps, const double* before) {
    read_inputs(b, t, steps);
    if (before != state) memcpy(state, before, sizeof(double) * Np);
    for (int n = 0; n < Np; n++) z[n] = static_cast<T>(before[n]);
    advance<T, true>(modes, inputs, steps, state, z + Np);
    keep_steps(b, t, steps, z + Np, args.step_states);
    if (!args.need_grad) {
      readout_and_loss<false>(b, t, steps);
      return;
    }
    readout_and_loss<true>(b, t, steps);
    readout_gradient<T>(d, C, z + Np, steps, Np, gradient);
    for (int c = 0; c < C; c++) {
      V<T> sum = V<T>{};
      for (int r = 0; r < steps; r += kLanes<T>) sum += load(d + c * kSteps + r);
      sums.bias[c] += static_cast<double>(sum_lanes<T>(sum));
    }
    if (++unflushed == kFlushChunks) flush();
    for (int first = (steps - 1) / kBackSteps * kBackSteps; first >= 0; first -= kBackSteps) {
      const int count = steps - first < kBackSteps ? steps - first : kBackSteps;
      T* here = g + static_cast<ptrdiff_t>(first) * Np;
      back_product<T>(d + first, C, call.readout, count, Np, here);
      retreat<T>(modes, count, delta, here, ids + first, sums.table.get());
    }
    diagonal_sums<T>(modes, steps, g, z, sums.re, sums.im);
    pair_sums<T>(modes, steps, g, z, args.pairs, args.P, sums.pairs);
    if (args.grad_x) write_rows<T>(modes, g, SequenceRows<T>(static_cast<T*>(args.grad_x), args, b), t, steps);
    keep_steps(b, t, steps, g, args.step_adjoints);
  }

  // Copies the rows [steps][Np] of the requested steps to [K, B, 2M].
  void keep_steps(int64_t b, int64_t t, int steps, const T* rows, void* to) {
    for (int64_t k = 0; k < args.K; k++) {
      const int64_t r = args.steps[k] - t;
      if (r >= 0 && r < steps) gather(modes, rows + r * Np, static_cast<T*>(to) + (k * args.B + b) * 2 * modes.M);
    }
  }

  static int steps_of(int64_t length, int64_t t) { return static_cast<int>(length - t < kSteps ? length - t : kSteps); }

  // Runs the recurrence alone and stores the state before every chunk; then processes the chunks from the last to the
  // first.
  void backward(int64_t b, int64_t length) {
    const int64_t chunks = (length + kSteps - 1) / kSteps;
    for (int64_t i = 0; i < chunks; i++) {
      memcpy(starts + i * Np, state, sizeof(double) * Np);
      if (i + 1 == chunks) break;
      read_inputs(b, i * kSteps, kSteps);
      advance<T, false>(modes, inputs, kSteps, state, z);
    }
    for (int64_t i = chunks - 1; i >= 0; i--) chunk(b, i * kSteps, steps_of(length, i * kSteps), starts + i * Np);
  }

  void sequence(int64_t b) {
    const int64_t length = args.lengths ? args.lengths[b] : args.T;
    spread(modes, static_cast<const T*>(args.z0) + b * 2 * modes.M, state.get());
    if (!args.need_grad) {
      for (int64_t t = 0; t < length; t += kSteps) chunk(b, t, steps_of(length, t), state);
      return;
    }
    memset(delta, 0, sizeof(double) * Np);
    backward(b, length);
    step_back(modes, delta);
    gather(modes, delta.get(), static_cast<T*>(args.grad_z0) + b * 2 * modes.M);
    const SequenceRows<T> grad_x(static_cast<T*>(args.grad_x), args, b);
    for (int64_t t = length; args.grad_x && t < args.T; t++) memset(grad_x[t], 0, sizeof(T) * 2 * modes.M);
  }
};

// The sums of all tasks, in order, into sums[0]; then out.
template <class T>
void collect(const Call<T>& call) {
  Sums<T>* sums = call.sums.get();
  const ModalArgs& args = *call.args;
  const Modes& modes = call.modes;
  for (int i = 1; i < call.tasks; i++) sums[0].loss += sums[i].loss;
  for (int64_t t = 0; t < args.T; t++) {
    int64_t total = 0;
    for (int i = 0; i < call.tasks; i++) total += sums[i].hits[t];
    args.hits[t] = total;
  }
  *static_cast<T*>(args.loss) = static_cast<T>(sums[0].loss * args.scale);
  if (!args.need_grad) return;
  const auto add = [&](Scratch<double> Sums<T>::* part, int64_t count) {
    for (int i = 1; i < call.tasks; i++)
      for (int64_t k = 0; k < count; k++) (sums[0].*part)[k] += (sums[i].*part)[k];
  };
  add(&Sums<T>::table, args.table ? args.D * modes.Np : 0), add(&Sums<T>::pairs, 4 * args.P);
  add(&Sums<T>::re, modes.Mp), add(&Sums<T>::im, modes.Mp);
  add(&Sums<T>::readout, args.C * modes.Np), add(&Sums<T>::bias, args.C);
  memcpy(args.grad_re, sums[0].re, sizeof(double) * modes.M);
  memcpy(args.grad_im, sums[0].im, sizeof(double) * modes.M);
  if (args.P) memcpy(args.grad_pairs, sums[0].pairs, sizeof(double) * 4 * args.P);
  T *grad_table = static_cast<T*>(args.grad_table), *grad_readout = static_cast<T*>(args.grad_readout),
    *grad_bias = static_cast<T*>(args.grad_bias);
  for (int64_t d = 0; args.table && d < args.D; d++)
    gather(modes, sums[0].table + d * modes.Np, grad_table + d * 2 * modes.M);
  for (int64_t c = 0; c < args.C; c++) {
    gather(modes, sums[0].readout + c * modes.Np, grad_readout + c * 2 * modes.M);
    if (grad_bias) grad_bias[c] = static_cast<T>(sums[0].bias[c]);
  }
}

template <class T>
bool run_loss(const ModalArgs& args) {
  Call<T> call;
  call.args = &args;
  call.tasks = static_cast<int>(args.B < args.threads ? args.B : args.threads);
  Modes& modes = call.modes;
  modes.M = static_cast<int>(args.M), modes.Mp = round_up(modes.M, kLanes<T>), modes.Np = 2 * modes.Mp;
  if (!call.coefficients.allocate(modes.Np) || !call.readout.allocate(static_cast<size_t>(args.C) * modes.Np) ||
      !call.bias.allocate(args.C) || (args.table && !call.table.allocate(static_cast<size_t>(args.D) * modes.Np)))
    return false;
  modes.re = call.coefficients, modes.im = call.coefficients + modes.Mp;
  for (int m = 0; m < modes.M; m++) call.coefficients[m] = args.re[m], call.coefficients[modes.Mp + m] = args.im[m];
  for (int64_t d = 0; args.table && d < args.D; d++)
    spread(modes, static_cast<const T*>(args.table) + d * 2 * modes.M, call.table + d * modes.Np);
  for (int64_t c = 0; c < args.C; c++) {
    spread(modes, static_cast<const T*>(args.readout) + c * 2 * modes.M, call.readout + c * modes.Np);
    if (args.bias) call.bias[c] = static_cast<const T*>(args.bias)[c];
  }
  if (!share_rows(call.tasks, static_cast<int>(args.B), args.lengths, args.T, &call.begin) ||
      !call.sums.allocate(call.tasks))
    return false;
  const bool ok = run_tasks(call.tasks, [&](int task) {
    Worker<T> worker(call, call.sums[task]);
    if (!call.sums[task].allocate(args, modes) || !worker.allocate()) return false;
    for (int b = call.begin[task]; b < call.begin[task + 1]; b++) worker.sequence(b);
    if (args.need_grad) worker.flush();
    return true;
  });
  if (!ok) return false;
  collect(call);
  return true;
}

}  // namespace

bool modal_loss(const ModalArgs& args) {
  return args.dtype == kFloat64 ? run_loss<double>(args) : run_loss<float>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
