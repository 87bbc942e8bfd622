// A linear readout and its cross-entropy on the CPU, loss and all gradients in one pass over the states.
//
//   logits = hidden W^T + b,  loss = sum (log sum exp(logits) - logits[target]),  d = softmax(logits) - onehot(target)
//   grad_hidden = d W,  grad_W = d^T hidden,  grad_b = sum d
//
// A thread processes a range of rows in groups of up to 104. hidden is copied to blocked rows with a column of ones
// (gemm.h). logits and d exist for one group only, in L2. The gradients of W and b are a product over the rows of the
// group (outer.h). Memory traffic: hidden is read, grad_hidden is written. 6 N C flops per row.
#include <math.h>

#include "cpu/gemm.h"
#include "cpu/ops.h"
#include "cpu/outer.h"
#include "cpu/tasks.h"
#include "cpu/vmath.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
ORTHOKERN_INLINE T max_lanes(V<T> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps((__m512)v);
#endif
  T m = v[0];
  for (int i = 1; i < kLanes<T>; i++) m = v[i] > m ? v[i] : m;
  return m;
}
template <class T>
struct ReadoutCall {
  const LinearCrossEntropyArgs& args;
  const int N = static_cast<int>(args.N), C = static_cast<int>(args.C);
  const int depth = N + (args.bias ? 1 : 0);
  // rows of a group: fewer if they are long, so that states and their gradients stay in L2
  const int rows = N <= 256 ? kGroupRows : N <= 512 ? kGroupRows / 2 : kGroupRows / 4;
  const int64_t useful = args.rows / rows + 1;
  const int tasks = static_cast<int>(useful < args.threads ? useful : args.threads);
  const bool need_grad = args.grad_weight != nullptr, stream = streams<T>(args.grad_hidden, args.rows, N);
  Packed<T> weight = {};           // [depth, C]: W^T, b
  Packed<T> weight_t = {};         // [C, N]: W
  Scratch<double> loss = {};       // [tasks]
  TaskSums<RowSums<T>> sums = {};  // with need_grad: [round_up(C)][ldc]
};

template <class T>
bool readout_task(ReadoutCall<T>& call, int task) {
  constexpr int L = kLanes<T>;
  const LinearCrossEntropyArgs& args = call.args;
  const int N = call.N, C = call.C, rows = call.rows;
  const int h_blocks = round_up(call.depth, L) / L, c_blocks = round_up(C, L) / L;
  const T* hidden = static_cast<const T*>(args.hidden);
  T* grad_hidden = static_cast<T*>(args.grad_hidden);
  const T scale = args.mean ? T(1) / static_cast<T>(args.rows) : T(1);
  const V<T> zero = V<T>{};
  const V<T> lowest = splat<T>(static_cast<T>(-__builtin_inf()));
  // h [depth/L][rows][L], logits and d [C/L][rows][L], out [N/L][rows][L]; blocks of a group are `block` elements
  // apart.
  Scratch<T> h, d, out;
  if (!h.allocate(static_cast<size_t>(h_blocks) * rows * L) ||
      !d.allocate(static_cast<size_t>(round_up(C, 2 * L)) * rows) ||
      !out.allocate(static_cast<size_t>(round_up(N, 2 * L)) * rows))
    return false;
  if (call.need_grad && !call.sums[task].allocate(static_cast<size_t>(c_blocks) * L * h_blocks * L, args.rows))
    return false;
  typename Vec<T>::I missing;  // lanes of the last block without a class
  for (int i = 0; i < L; i++) missing[i] = (c_blocks - 1) * L + i < C ? 0 : -1;
  double loss = 0;
  const int64_t begin = args.rows * task / call.tasks, end = args.rows * (task + 1) / call.tasks;
  for (int64_t row = begin; row < end; row += rows) {
    const int R = static_cast<int>(end - row < rows ? end - row : rows);
    const ptrdiff_t block = static_cast<ptrdiff_t>(R) * L;
    for (int r = 0; r < R; r++) {
      const T* from = hidden + (row + r) * N;
      for (int n = 0; n < N; n += L) {
        store(h + (n / L) * block + r * L, read(from + n, lanes_of<T>(N, n / L)));
        __builtin_prefetch(from + n + static_cast<ptrdiff_t>(rows) * N, 0, 2);
      }
      if (call.depth > N) h[(N / L) * block + r * L + N % L] = 1;
    }
    const Segment<T> states = {h, block, call.depth};
    multiply<T>(&states, 1, call.weight, R, d, block);
    for (int r = 0; r < R; r++) {
      const int64_t target = args.target[row + r];
      T* at = d + r * L;
      V<T> top = lowest;
      for (int b = 0; b < c_blocks; b++) {
        V<T> x = load(at + b * block);
        if (b == c_blocks - 1) x = missing ? lowest : x;
        store(at + b * block, x);
        top = x > top ? x : top;
      }
      const T greatest = max_lanes<T>(top);
      V<T> total = zero;
      const T hit = at[(target / L) * block + target % L];
      for (int b = 0; b < c_blocks; b++) {
        const V<T> p = vexp<T>(load(at + b * block) - greatest);
        store(at + b * block, p);
        total += p;
      }
      const T sum = sum_lanes<T>(total);
      loss += static_cast<double>(greatest - hit) +
              static_cast<double>(sizeof(T) == 4 ? logf(static_cast<float>(sum)) : log(sum));
      if (!call.need_grad) continue;
      const T share = scale / sum;
      for (int b = 0; b < c_blocks; b++) store(at + b * block, load(at + b * block) * share);
      at[(target / L) * block + target % L] -= scale;
    }
    if (!call.need_grad) continue;
    const Segment<T> errors = {d, block, C};
    multiply<T>(&errors, 1, call.weight_t, R, out, block);
    // Row by row: by column blocks, every store would access another page.
    if (!call.stream) unblock_rows<T>(out, block, R, N, grad_hidden + row * N, N);
    for (int r = 0; call.stream && r < R; r++)
      for (int n = 0; n < N; n += L) store_stream(grad_hidden + (row + r) * N + n, load(out + n / L * block + r * L));
    outer_add<T>(d, c_blocks, h, h_blocks, block, R, call.sums[task].part, static_cast<ptrdiff_t>(h_blocks) * L);
    call.sums[task].added(R);
  }
  if (call.stream) stream_fence();
  call.loss[task] = loss;
  return true;
}

template <class T>
bool run(const LinearCrossEntropyArgs& args) {
  constexpr int L = kLanes<T>;
  ReadoutCall<T> call{args};
  const T* weight = static_cast<const T*>(args.weight);
  if (!call.weight.allocate(call.depth, call.C) || !call.weight_t.allocate(call.C, call.N) ||
      !call.loss.allocate(call.tasks) || !call.sums.allocate(call.tasks))
    return false;
  call.weight.fill(0, call.weight.panel_count(), 0, call.N, weight, 1, call.N, nullptr);
  if (args.bias)
    call.weight.fill(0, call.weight.panel_count(), call.N, 1, static_cast<const T*>(args.bias), 0, 1, nullptr);
  call.weight_t.fill(0, call.weight_t.panel_count(), 0, call.C, weight, call.N, 1, nullptr);

  if (!run_tasks(call.tasks, [&](int task) { return readout_task(call, task); })) return false;
  double loss = 0;
  for (int i = 0; i < call.tasks; i++) loss += call.loss[i];
  *static_cast<T*>(args.loss) = static_cast<T>(args.mean ? loss / static_cast<double>(args.rows) : loss);
  const ptrdiff_t ldc = round_up(call.depth, L);
  T *grad_weight = static_cast<T*>(args.grad_weight), *grad_bias = static_cast<T*>(args.grad_bias);
  const auto of_task = [&](int task) { return &call.sums[task]; };
  for (int c = 0; call.need_grad && c < call.C; c++) {
    row_totals(call.tasks, of_task, c * ldc, call.N, grad_weight + static_cast<ptrdiff_t>(c) * call.N);
    if (args.bias) row_totals(call.tasks, of_task, c * ldc + call.N, 1, grad_bias + c);
  }
  return true;
}

}  // namespace

bool linear_cross_entropy_fwd(const LinearCrossEntropyArgs& args) {
  return args.dtype == kFloat64 ? run<double>(args) : run<float>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
