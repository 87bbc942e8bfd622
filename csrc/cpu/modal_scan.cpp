// The states of a linear recurrence in modal coordinates, and its backward: see modal.h. Work is divided over
// sequences, and over time where there are few of them.
//
// Limit: memory traffic. Forward reads x and writes z; backward reads dL/dz and z and writes grad_x.
#include "cpu/modal.h"
#include "cpu/parallel.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
struct Call {
  const ModalArgs* args;
  ModalTables<T> tables;
  Pieces pieces;
  ModalSums* sums;  // [tasks] (backward)
  bool backward;
  bool ends;     // this pass computes the ends of pieces that start from zero
  bool* failed;  // [tasks]
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
    return (call.backward || input.allocate(args, modes, call.tables.table)) &&
           z.allocate(static_cast<size_t>(kSteps) * Np) &&
           (!call.backward || g.allocate(static_cast<size_t>(kSteps) * Np)) && state.allocate(Np);
  }
  void forward(int64_t b, int64_t begin, int64_t end) {
    const SequenceRows<T> out(static_cast<T*>(args.z), args, b);
    for (int64_t t = begin; t < end; t += kSteps) {
      const int steps = static_cast<int>(end - t < kSteps ? end - t : kSteps);
      input.take(b, t, steps);
      if (call.ends) {
        advance<T, false>(modes, input.rows, steps, state, z);
        continue;
      }
      advance<T, true>(modes, input.rows, steps, state, z);
      write_rows<T>(modes, z, out, t, steps);
    }
  }

  void backward(int64_t b, int64_t begin, int64_t end, ModalSums* sums) {
    const SequenceRows<const T> grad_z(static_cast<const T*>(args.grad_z), args, b),
        states(static_cast<const T*>(args.states), args, b);
    const SequenceRows<T> grad_x(static_cast<T*>(args.grad_x), args, b);
    int64_t ids[kSteps];
    for (int64_t last = end; last > begin;) {
      const int steps = static_cast<int>((last - begin) % kSteps ? (last - begin) % kSteps : kSteps);
      const int64_t t = last - steps;
      read_rows(modes, grad_z, t, steps, g.get());
      double* table = args.table && !call.ends ? sums->table.get() : nullptr;
      if (table) read_column(args.ids, args.id_bytes, t * args.B + b, args.B, steps, ids);
      retreat<T>(modes, steps, state, g, ids, table);
      last = t;
      if (call.ends) continue;
      if (t) {
        read_rows(modes, states, t - 1, steps, z.get());
      } else {
        spread(modes, static_cast<const T*>(args.z0) + b * 2 * modes.M, z.get());
        read_rows(modes, states, 0, steps - 1, z + Np);
      }
      sums->template add_chunk<T>(args, modes, steps, g, z);
      if (args.grad_x) write_rows<T>(modes, g, grad_x, t, steps);
    }
  }

  void piece(int64_t b, int cut, ModalSums* sums) {
    const Pieces& pieces = call.pieces;
    const int64_t begin = pieces.border(b, cut), end = pieces.border(b, cut + 1);
    if (call.ends) memset(state, 0, sizeof(double) * Np);
    else memcpy(state, pieces.at(call.backward ? pieces.deltas : pieces.states, modes, b, cut), sizeof(double) * Np);
    if (call.backward) backward(b, begin, end, sums);
    else forward(b, begin, end);
    if (call.ends) {
      memcpy(pieces.at(pieces.ends, modes, b, cut), state, sizeof(double) * Np);
      return;
    }
    if (cut == 0 && call.backward) {
      step_back(modes, state);
      gather(modes, state.get(), static_cast<T*>(args.grad_z0) + b * 2 * modes.M);
    }
    T* out = static_cast<T*>(call.backward ? args.grad_x : args.z);
    const SequenceRows<T> rows(out, args, b);
    for (int64_t t = length_of(args, b); cut + 1 == pieces.cuts && out && t < args.T; t++)
      memset(rows[t], 0, sizeof(T) * 2 * modes.M);
  }
};

template <class T>
void task_of(void* context, int task) {
  Call<T>& call = *static_cast<Call<T>*>(context);
  const FlushDenormals flush;
  Worker<T> worker(call);
  ModalSums* sums = call.sums ? call.sums + task : nullptr;
  if (!worker.allocate() || (sums && !call.ends && !sums->allocate(*call.args, call.tables.modes))) {
    call.failed[task] = true;
    return;
  }
  call.pieces.each(task, [&](int64_t b, int cut) { worker.piece(b, cut, sums); });
}

template <class T>
bool run(const ModalArgs& args, bool backward) {
  Call<T> call;
  call.args = &args;
  call.backward = backward, call.ends = false;
  const Modes& modes = call.tables.modes;
  Scratch<bool> failed;
  Scratch<char> memory;
  if (!call.tables.allocate(args) || !call.pieces.allocate(args, modes, true) || !failed.allocate(call.pieces.tasks) ||
      !memory.allocate(sizeof(ModalSums) * call.pieces.tasks))
    return false;
  const int tasks = call.pieces.tasks;
  call.failed = failed;
  call.sums = backward ? reinterpret_cast<ModalSums*>(memory.get()) : nullptr;  // all zero bytes: empty
  for (int64_t b = 0; b < args.B; b++)
    spread(modes, static_cast<const T*>(args.z0) + b * 2 * modes.M, call.pieces.at(call.pieces.states, modes, b, 0));
  if (call.pieces.cuts > 1) {
    call.ends = true;
    parallel_run(tasks, task_of<T>, &call);
    call.pieces.join(modes, backward);
    call.ends = false;
  }
  parallel_run(tasks, task_of<T>, &call);
  bool ok = true;
  for (int i = 0; i < tasks; i++) ok = ok && !failed[i];
  if (backward && ok) {
    for (int i = 1; i < tasks; i++) call.sums[0].merge(args, modes, call.sums[i]);
    call.sums[0].template write<T>(args, modes);
  }
  for (int i = 0; backward && i < tasks; i++) call.sums[i].~ModalSums();
  return ok;
}

}  // namespace

bool modal_scan_fwd(const ModalArgs& args) {
  return args.dtype == kFloat64 ? run<double>(args, false) : run<float>(args, false);
}
bool modal_scan_bwd(const ModalArgs& args) {
  return args.dtype == kFloat64 ? run<double>(args, true) : run<float>(args, true);
}

}  // namespace orthokern::ORTHOKERN_ISA
