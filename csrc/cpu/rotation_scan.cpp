// The states of a linear recurrence in modal coordinates, z_t = lambda z_{t-1} + x_t, and its adjoint, the same
// recurrence from the last step to the first with conj(lambda), and the sums of delta_t conj(z_{t-1}).
//
// A task processes a range of sequences, one after another, in chunks of kSteps steps. A batch of fewer sequences than
// threads leaves threads idle. Limit: memory traffic. A call reads x, and h for the sums, and writes z.
#include "cpu/modal.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// A task: the recurrence over sequences, and the gradients of the eigenvalues where `h` is present.
template <class T>
class ScanWorker {
 public:
  ScanWorker(const ModalArgs& a, const Modes& m, ModalSums& s) : args(a), modes(m), sums(s) {}

  bool allocate() {
    const size_t chunk = static_cast<size_t>(kSteps) * modes.Np;
    for (int r = 0; r < kSteps; r++) starts[r] = static_cast<ptrdiff_t>(r) * modes.Np;
    return state.allocate(modes.Np) && in.allocate(chunk) && z.allocate(chunk) && (!args.h || before.allocate(chunk));
  }

  void sequence(int64_t b) {
    const SequenceRows<const T> x(static_cast<const T*>(args.x), args, b, args.reverse);
    const SequenceRows<T> out(static_cast<T*>(args.z), args, b, args.reverse);
    spread(modes, static_cast<const T*>(args.z0) + b * 2 * modes.M, state.get());
    for (int64_t t = 0; t < args.T; t += kSteps) {
      const int steps = static_cast<int>(args.T - t < kSteps ? args.T - t : kSteps);
      read_rows(modes, x, t, steps, in.get());
      advance_between_resets(b, t, steps);
      write_rows<T>(modes, z, out, t, steps);
      if (!args.h) continue;
      read_states(b, t, steps);
      sums.template add_chunk<T>(args, modes, steps, z, before);
    }
  }

 private:
  const ModalArgs& args;
  const Modes& modes;
  ModalSums& sums;
  Scratch<double> state, in;  // [Np], [kSteps][Np]
  Scratch<T> z, before;       // [kSteps][Np]: results; with h, the states of the forward before each step
  ptrdiff_t starts[kSteps];   // of the rows in `in`

  bool is_reset(int64_t t, int64_t b) const { return args.resets && args.resets[t * args.B + b]; }
  // Whether step i of the recurrence, in its order, starts from a state of zero.
  bool starts_from_zero(int64_t i, int64_t b) const {
    return args.reverse ? i > 0 && is_reset(args.T - i, b) : is_reset(i, b);
  }

  void advance_between_resets(int64_t b, int64_t t, int steps) {
    const double* rows[kSteps];
    for (int r = 0; r < steps; r++) rows[r] = in + starts[r];
    for (int begin = 0, end; begin < steps; begin = end) {
      if (starts_from_zero(t + begin, b)) memset(state, 0, sizeof(double) * modes.Np);
      for (end = begin + 1; end < steps && !starts_from_zero(t + end, b);) end++;
      advance<T, true>(modes, rows + begin, end - begin, state, z + starts[begin]);
    }
  }

  // The states of the forward before the steps of a chunk of the adjoint.
  void read_states(int64_t b, int64_t t, int steps) {
    const SequenceRows<const T> h(static_cast<const T*>(args.h), args, b);
    for (int r = 0; r < steps; r++) {
      const int64_t step = args.T - 1 - (t + r);
      T* const row = before + starts[r];
      if (step > kAhead) h.prefetch(step - 1 - kAhead);
      if (is_reset(step, b)) memset(row, 0, sizeof(T) * modes.Np);
      else if (step) spread(modes, h[step - 1], row);
      else spread(modes, static_cast<const T*>(args.h0) + b * 2 * modes.M, row);
    }
  }
};

template <class T>
bool run_scan(const ModalArgs& args) {
  ModalTables<T> tables;
  const int tasks = task_count(args);
  Scratch<bool> failed;
  TaskSums<ModalSums> sums;
  const Modes& modes = tables.modes;
  const auto allocate = [&](ModalSums& one) { return !args.h || one.allocate(args, modes); };
  if (!tables.allocate(args) || !failed.allocate(tasks) || !sums.allocate(tasks, allocate)) return false;
  share(tasks, tasks, [&](int task) {
    const FlushDenormals flush;
    ScanWorker<T> worker(args, modes, sums[task]);
    failed[task] = !worker.allocate();
    if (failed[task]) return;
    for (int64_t b = args.B * task / tasks; b < args.B * (task + 1) / tasks; b++) worker.sequence(b);
  });
  for (int i = 0; i < tasks; i++)
    if (failed[i]) return false;
  if (!args.h) return true;
  for (int i = 1; i < tasks; i++) sums[0].merge(args, modes, sums[i]);
  sums[0].template write<T>(args, modes);
  return true;
}

}  // namespace

bool modal_scan(const ModalArgs& args) {
  return args.dtype == kFloat64 ? run_scan<double>(args) : run_scan<float>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
