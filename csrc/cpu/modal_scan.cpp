// The states of a linear recurrence in its own modes, and its backward: see modal.h.
//
// The work is cut into pieces: sequences, and where there are fewer of them than threads each one's time too. A piece that does not begin a sequence
// starts from a state that is found first: every piece but the last runs from zero, and the results are joined, one after another, by
// lambda^steps. The adjoint does the same from the end.
#include "cpu/modal.h"
#include "cpu/parallel.h"

namespace orthokern {
namespace ORTHOKERN_ISA {
namespace {

template <class T>
struct Call {
  const ModalArgs* args;
  ModalTables<T> tables;
  int tasks, cuts;         // cuts: pieces of a sequence
  Scratch<double> ends;    // [B][cuts][Np]: what a piece that runs from zero ends with
  Scratch<double> starts;  // [B][cuts][Np]: the state before each piece, or the adjoint after it
  ModalSums* sums;         // [tasks] (backward)
  bool backward, local;    // local: find ends
  bool* failed;            // [tasks]

  int64_t border(int64_t b, int64_t cut) const {
    const int64_t length = length_of(*args, b), chunks = (length + kSteps - 1) / kSteps, step = chunks * cut / cuts * kSteps;
    return step < length ? step : length;
  }
};

template <class T>
struct Worker {
  Call<T>& call;
  const ModalArgs& args;
  const Modes& modes;
  const int Np;
  ModalInput<T> input;
  Scratch<T> z, g;        // [kSteps][Np]
  Scratch<double> state;  // [Np]

  explicit Worker(Call<T>& c) : call(c), args(*c.args), modes(c.tables.modes), Np(modes.Np) {}
  bool allocate() {
    return (call.backward || input.allocate(args, modes, call.tables.table)) && z.allocate(static_cast<size_t>(kSteps) * Np) &&
           (!call.backward || g.allocate(static_cast<size_t>(kSteps) * Np)) && state.allocate(Np);
  }
  template <class E>
  E* row(E* base, int64_t t, int64_t b) const {
    return base + (t * args.B + b) * 2 * modes.M;
  }

  void forward(int64_t b, int64_t begin, int64_t end) {
    T* out = static_cast<T*>(args.z);
    for (int64_t t = begin; t < end; t += kSteps) {
      const int steps = static_cast<int>(end - t < kSteps ? end - t : kSteps);
      input.take(b, t, steps);
      if (call.local) {
        advance<T, false>(modes, input.rows, steps, state, z);
        continue;
      }
      advance<T, true>(modes, input.rows, steps, state, z);
      for (int r = 0; r < steps; r++) gather(modes, z + static_cast<ptrdiff_t>(r) * Np, row(out, t + r, b));
    }
  }

  void backward(int64_t b, int64_t begin, int64_t end, ModalSums* sums) {
    const T *grad_z = static_cast<const T*>(args.grad_z), *states = static_cast<const T*>(args.states);
    T* grad_x = static_cast<T*>(args.grad_x);
    int64_t ids[kSteps];
    for (int64_t last = end; last > begin;) {
      const int steps = static_cast<int>((last - begin) % kSteps ? (last - begin) % kSteps : kSteps);
      const int64_t t = last - steps;
      for (int r = 0; r < steps; r++) spread(modes, row(grad_z, t + r, b), g + static_cast<ptrdiff_t>(r) * Np);
      retreat<T>(modes, steps, state, g);
      last = t;
      if (call.local) continue;
      for (int r = 0; r < steps; r++)
        spread(modes, t + r ? row(states, t + r - 1, b) : row(static_cast<const T*>(args.z0), 0, b), z + static_cast<ptrdiff_t>(r) * Np);
      if (args.table) read_column(args.ids, args.id_bytes, t * args.B + b, args.B, steps, ids);
      sums->template add_chunk<T>(args, modes, steps, g, z, ids);
      for (int r = 0; grad_x && r < steps; r++) gather(modes, g + static_cast<ptrdiff_t>(r) * Np, row(grad_x, t + r, b));
    }
  }

  void padding(int64_t b, T* out) const {
    for (int64_t t = length_of(args, b); out && t < args.T; t++) memset(row(out, t, b), 0, sizeof(T) * 2 * modes.M);
  }

  void piece(int64_t b, int cut, ModalSums* sums) {
    const int64_t at = (b * call.cuts + cut) * Np;
    const int64_t begin = call.border(b, cut), end = call.border(b, cut + 1);
    if (call.local) {
      if (cut == (call.backward ? 0 : call.cuts - 1)) return;
      memset(state, 0, sizeof(double) * Np);
    } else {
      memcpy(state, call.starts + at, sizeof(double) * Np);
    }
    if (call.backward) backward(b, begin, end, sums);
    else forward(b, begin, end);
    if (call.local) {
      memcpy(call.ends + at, state, sizeof(double) * Np);
    } else if (cut == 0 && call.backward) {
      step_back(modes, state);
      gather(modes, state.get(), row(static_cast<T*>(args.grad_z0), 0, b));
    }
    if (!call.local && cut + 1 == call.cuts) padding(b, static_cast<T*>(call.backward ? args.grad_x : args.z));
  }
};

template <class T>
void task_of(void* context, int task) {
  Call<T>& call = *static_cast<Call<T>*>(context);
  const FlushDenormals flush;
  Worker<T> worker(call);
  ModalSums* sums = call.sums ? call.sums + task : nullptr;
  if (!worker.allocate() || (sums && !call.local && !sums->allocate(*call.args, call.tables.modes))) {
    call.failed[task] = true;
    return;
  }
  if (call.cuts == 1) {
    const int64_t end = first_sequence(*call.args, task + 1, call.tasks);
    for (int64_t b = first_sequence(*call.args, task, call.tasks); b < end; b++) worker.piece(b, 0, sums);
    return;
  }
  for (int64_t b = 0; b < call.args->B; b++) worker.piece(b, task, sums);
}

// z <- lambda^steps z, or with the conjugate.
inline void turn(const Modes& modes, int64_t steps, bool conjugate, double* z) {
  for (int m = 0; m < modes.Mp; m++) {
    double pr = 1, pi = 0, r = modes.re[m], i = conjugate ? -modes.im[m] : modes.im[m];
    for (int64_t n = steps; n; n >>= 1) {
      if (n & 1) {
        const double old = pr;
        pr = pr * r - pi * i, pi = old * i + pi * r;
      }
      const double old = r;
      r = r * r - i * i, i = 2 * old * i;
    }
    const double zr = z[m], zi = z[modes.Mp + m];
    z[m] = pr * zr - pi * zi, z[modes.Mp + m] = pr * zi + pi * zr;
  }
}

// What every piece starts from; with more than one to a sequence after a pass over them.
template <class T>
void find_starts(Call<T>& call) {
  const ModalArgs& args = *call.args;
  const Modes& modes = call.tables.modes;
  const int Np = modes.Np;
  if (call.cuts > 1) {
    call.local = true;
    parallel_run(call.tasks, task_of<T>, &call);
    call.local = false;
  }
  for (int64_t b = 0; b < args.B; b++) {
    double *starts = call.starts + b * call.cuts * Np, *ends = call.ends + b * call.cuts * Np;
    if (!call.backward) spread(modes, static_cast<const T*>(args.z0) + b * 2 * modes.M, starts);
    for (int i = 1; i < call.cuts; i++) {
      const int from = call.backward ? call.cuts - i : i - 1, to = call.backward ? from - 1 : from + 1;
      double* next = starts + static_cast<ptrdiff_t>(to) * Np;
      memcpy(next, starts + static_cast<ptrdiff_t>(from) * Np, sizeof(double) * Np);
      turn(modes, call.border(b, from + 1) - call.border(b, from), call.backward, next);
      for (int n = 0; n < Np; n++) next[n] += ends[static_cast<ptrdiff_t>(from) * Np + n];
    }
  }
}

template <class T>
bool run(const ModalArgs& args, bool backward) {
  Call<T> call;
  call.args = &args;
  call.backward = backward, call.local = false;
  const int64_t chunks = (args.T + kSteps - 1) / kSteps;
  const bool short_batch = args.B < args.threads && chunks > 1;
  call.tasks = static_cast<int>(!short_batch ? (args.B < args.threads ? args.B : args.threads) : chunks < args.threads ? chunks : args.threads);
  call.cuts = short_batch ? call.tasks : 1;
  Scratch<bool> failed;
  Scratch<char> memory;
  const Modes& modes = call.tables.modes;
  if (!call.tables.allocate(args) || !call.starts.allocate(static_cast<size_t>(args.B) * call.cuts * modes.Np) ||
      !call.ends.allocate(static_cast<size_t>(args.B) * call.cuts * modes.Np) || !failed.allocate(call.tasks) ||
      !memory.allocate(sizeof(ModalSums) * call.tasks))
    return false;
  call.failed = failed;
  call.sums = backward ? reinterpret_cast<ModalSums*>(memory.get()) : nullptr;  // all zero bytes: empty
  find_starts(call);
  parallel_run(call.tasks, task_of<T>, &call);
  bool ok = true;
  for (int i = 0; i < call.tasks; i++) ok = ok && !failed[i];
  if (backward && ok) {
    for (int i = 1; i < call.tasks; i++) call.sums[0].merge(args, modes, call.sums[i]);
    call.sums[0].template write<T>(args, modes);
  }
  for (int i = 0; backward && i < call.tasks; i++) call.sums[i].~ModalSums();
  return ok;
}

}  // namespace

bool modal_scan_fwd(const ModalArgs& args) { return args.dtype == kFloat64 ? run<double>(args, false) : run<float>(args, false); }
bool modal_scan_bwd(const ModalArgs& args) { return args.dtype == kFloat64 ? run<double>(args, true) : run<float>(args, true); }

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
