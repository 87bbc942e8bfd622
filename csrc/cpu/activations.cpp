// The activations as separate ops on the CPU: one pass over memory, 8 (float32) bytes per element forward and 12
// backward.
#include "cpu/activate.h"
#include "cpu/ops.h"
#include "cpu/tasks.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// Rows summed in working precision before a parameter's gradient is added to its double total.
constexpr int64_t kSumRows = 64;

template <class T, class A, bool BACKWARD>
bool run(const ActivationArgs& args) {
  constexpr int L = kLanes<T>;
  const T *x = static_cast<const T*>(args.x), *grad_y = static_cast<const T*>(args.grad_y);
  T* out = static_cast<T*>(BACKWARD ? args.grad_x : args.y);
  // One unit per column; or all in one row, if all units are treated alike.
  const int64_t size = args.act_param_size, all = args.rows * args.N;
  const bool flat = (!args.act_param || size == 1) && (!A::pairs || args.N % 2 == 0);
  const int64_t padded = flat ? L : round_up(args.N, L), useful = all / 16384 + 1;  // fewer are not worth a thread
  const int tasks = static_cast<int>(useful < args.threads ? useful : args.threads);
  Scratch<T> params;     // [padded]
  Scratch<double> sums;  // [tasks][padded]
  if (!expand_param(&params, static_cast<const T*>(args.act_param), size, flat ? L : args.N) ||
      (BACKWARD && !sums.allocate(tasks * padded)))
    return false;
  const auto one = [&](int64_t at, int count, V<T> param, V<T>* param_grad) {
    const V<T> a = read(x + at, count);
    V<T> y = activate<T, A>(a, param);
    if (BACKWARD) y = activate_grad<T, A>(A::needs_input ? a : y, read(grad_y + at, count), param, param_grad);
    write(out + at, y, count);
  };
  // Flat work is divided at whole vectors. This keeps pairs together, and only the last task has a partial vector.
  const int64_t unit = flat ? L : 1, whole = flat ? all : args.rows, parts = (whole + unit - 1) / unit;
  const auto rows_of = [&](int task) {
    const int64_t stop = parts * (task + 1) / tasks * unit, end = stop < whole ? stop : whole;
    for (int64_t from = parts * task / tasks * unit, to; from < end; from = to) {
      to = end - from < kSumRows * unit ? end : from + kSumRows * unit;
      for (int64_t n = 0; n < (flat ? 1 : args.N); n += L) {
        const V<T> param = load(params + n);
        V<T> part = V<T>{};
        if (flat)
          for (int64_t at = from; at < to; at += L) one(at, static_cast<int>(to - at < L ? to - at : L), param, &part);
        else
          for (int64_t row = from; row < to; row++) one(row * args.N + n, lanes_of<T>(args.N, n / L), param, &part);
        if constexpr (BACKWARD && A::has_parameter)
          for (int i = 0; i < L; i++) sums[task * padded + n + i] += part[i];
      }
    }
  };
  // not share(), which flushes subnormal numbers
  parallel_run(tasks, [](void* fn, int task) { (*static_cast<decltype(rows_of)*>(fn))(task); }, (void*)&rows_of);
  if (BACKWARD && args.grad_act_param)
    write_param_grad(static_cast<T*>(args.grad_act_param), size, size == 1 ? padded : args.N,
                     [&](int64_t n) { return task_total(tasks, [&](int i) { return sums + i * padded; }, n); });
  return true;
}

template <class T, bool BACKWARD>
bool run(const ActivationArgs& args) {
  bool ok = true;
  visit_activation(args.activation, [&](auto a) { ok = run<T, decltype(a), BACKWARD>(args); });
  return ok;
}

}  // namespace

bool activation_fwd(const ActivationArgs& args) {
  return args.dtype == kFloat64 ? run<double, false>(args) : run<float, false>(args);
}
bool activation_bwd(const ActivationArgs& args) {
  return args.dtype == kFloat64 ? run<double, true>(args) : run<float, true>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
