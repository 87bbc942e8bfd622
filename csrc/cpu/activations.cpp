// The activations as ops of their own on the CPU: one pass over memory, 8 (float32) bytes per element forward and 12
// backward.
#include "cpu/activate.h"
#include "cpu/ops.h"
#include "cpu/tasks.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

// Rows summed in working precision before a parameter's gradient goes to its double total.
constexpr int64_t kSumRows = 64;

template <class T>
struct ActivationCall {
  const ActivationArgs* args;
  int64_t rows, N;  // one unit per column; or all in one row, if all units are treated alike
  int tasks;
  Scratch<T> param;      // [round_up(N)], or one vector if all units share it
  Scratch<double> sums;  // [tasks][round_up(N)] or [tasks][L]
  bool flat;
};

// Columns [0, N) of rows [begin, end); where `flat`, elements [begin, end) of one row.
template <class T, class A, bool BACKWARD>
void activation_rows(ActivationCall<T>& call, int task, int64_t begin, int64_t end) {
  constexpr int L = kLanes<T>;
  const T *x = static_cast<const T*>(call.args->x), *grad_y = static_cast<const T*>(call.args->grad_y);
  T* out = static_cast<T*>(BACKWARD ? call.args->grad_x : call.args->y);
  const int64_t N = call.N, padded = call.flat ? L : round_up(N, L);
  double* sums = BACKWARD ? call.sums + task * padded : nullptr;
  auto one = [&](int64_t at, int count, V<T> param, V<T>* param_grad) {
    const V<T> a = read(x + at, count);
    V<T> y = activate<T, A>(a, param);
    if (BACKWARD) y = activate_grad<T, A>(A::needs_input ? a : y, read(grad_y + at, count), param, param_grad);
    write(out + at, y, count);
  };
  auto add = [&](int64_t column, V<T> part) {
    if (BACKWARD && A::has_parameter)
      for (int i = 0; i < L; i++) sums[column + i] += part[i];
  };
  if (call.flat) {
    const V<T> param = load(call.param.get());
    for (int64_t at = begin; at < end;) {
      V<T> part = V<T>{};
      const int64_t stop = end - at < kSumRows * L ? end : at + kSumRows * L;
      for (; at < stop; at += L) one(at, static_cast<int>(stop - at < L ? stop - at : L), param, &part);
      at = stop;
      add(0, part);
    }
    return;
  }
  for (int64_t row = begin; row < end; row += kSumRows) {
    const int64_t stop = end - row < kSumRows ? end : row + kSumRows;
    for (int64_t n = 0; n < N; n += L) {
      const int count = static_cast<int>(N - n < L ? N - n : L);
      const V<T> param = load(call.param + n);
      V<T> part = V<T>{};
      for (int64_t r = row; r < stop; r++) one(r * N + n, count, param, &part);
      add(n, part);
    }
  }
}

template <class T, bool BACKWARD>
void activation_task(void* context, int task) {
  ActivationCall<T>& call = *static_cast<ActivationCall<T>*>(context);
  // Flat work is divided at whole vectors. This keeps pairs together, and only the last task has a partial vector.
  const int64_t unit = call.flat ? kLanes<T> : 1, whole = call.flat ? call.N : call.rows;
  const int64_t parts = (whole + unit - 1) / unit;
  const int64_t begin = parts * task / call.tasks * unit, stop = parts * (task + 1) / call.tasks * unit;
  const int64_t end = stop < whole ? stop : whole;
  visit_activation(call.args->activation,
                   [&](auto a) { activation_rows<T, decltype(a), BACKWARD>(call, task, begin, end); });
}

template <class T, bool BACKWARD>
bool run(const ActivationArgs& args) {
  constexpr int L = kLanes<T>;
  ActivationCall<T> call;
  call.args = &args;
  const bool shared = !args.act_param || args.act_param_size == 1;
  call.flat = shared && (!on_pairs(args.activation) || args.N % 2 == 0);
  call.rows = call.flat ? 1 : args.rows;
  call.N = call.flat ? args.rows * args.N : args.N;
  const int64_t useful = args.rows * args.N / 16384 + 1;  // fewer elements are not worth another thread
  call.tasks = static_cast<int>(useful < args.threads ? useful : args.threads);
  const int64_t padded = call.flat ? L : round_up(call.N, L);
  if (!expand_param(&call.param, static_cast<const T*>(args.act_param), args.act_param_size, call.flat ? L : call.N))
    return false;
  if (BACKWARD && !call.sums.allocate(static_cast<size_t>(call.tasks) * padded)) return false;
  parallel_run(call.tasks, activation_task<T, BACKWARD>, &call);
  const int64_t size = args.act_param_size;
  if (BACKWARD && args.grad_act_param)
    write_param_grad(static_cast<T*>(args.grad_act_param), size, size == 1 ? padded : args.N, [&](int64_t n) {
      return task_total(call.tasks, [&](int i) { return call.sums + i * padded; }, n);
    });
  return true;
}

}  // namespace

bool activation_fwd(const ActivationArgs& args) {
  return args.dtype == kFloat64 ? run<double, false>(args) : run<float, false>(args);
}
bool activation_bwd(const ActivationArgs& args) {
  return args.dtype == kFloat64 ? run<double, true>(args) : run<float, true>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
