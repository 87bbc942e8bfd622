// The states of a linear recurrence in modal coordinates, z_t = lambda z_{t-1} + x_t, and its adjoint, the same
// recurrence from the last step to the first with conj(lambda), and the sums of delta_t conj(z_{t-1}). The input x_t
// may be a linear map of features, W u_t + b. Then x and delta exist for a chunk of steps only, in the nearest cache,
// and the gradients of W, b and u are products of the chunk.
//
// The lanes of a SIMD vector are modes. The last vector of a row ends with the row and may repeat modes of the vector
// before it, so rows need no padding; with fewer modes than lanes, a "vector" (type X) is one double. A task has a
// range of sequences and processes them in chunks of kSteps steps, so that rows are read and written about in the order
// of memory. During a chunk, states and sums of a group of vectors are in registers, in float64.
//
// Limit: memory traffic. A call reads x, and h for the sums, and writes z; with features, it reads or writes those
// instead of x or, in the backward, of z.
#include "cpu/gemm.h"
#include "cpu/modal.h"
#include "cpu/outer.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class X, class T>
ORTHOKERN_INLINE X read_as(const T* p) {
  if constexpr (sizeof(X) == sizeof(double)) return static_cast<double>(*p);
  else return load_wide(p);
}
template <class T>
ORTHOKERN_INLINE void write(T* p, double v) {
  *p = static_cast<T>(v);
}
template <class T>
ORTHOKERN_INLINE void write(T* p, V<double> v) {
  store_narrow(p, v);
}
template <class X>
ORTHOKERN_INLINE void keep(double* p, X v) {
  memcpy(p, &v, sizeof v);
}

// The rows of consecutive steps of one sequence, in the order of the recurrence: row-major [2M] rows, or the blocked
// rows of a chunk (packed.h).
template <class T>
struct Rows {
  T* first;          // null for none
  ptrdiff_t stride;  // elements from one row to the next
  bool blocked;

  Rows from(int step) const { return {first ? first + step * stride : nullptr, stride, blocked}; }
};
// Steps of which only the first may start from zero. h: row-major states of the forward before each step, or null.
template <class T>
struct Steps {
  Rows<const T> x;
  Rows<T> z;
  Rows<const T> h;
  int count;

  Steps part(int begin, int end) const { return {x.from(begin), z.from(begin), h.from(begin), end - begin}; }
};

// Recurrence and sums for vectors X of modes; vector v of a row begins with mode at(v). The columns of blocked rows are
// those of all groups, each with the real parts of its kGroup vectors and then the imaginary ones.
template <class T, class X>
struct Rotations {
  static constexpr int kWide = sizeof(X) / sizeof(double), kGroup = kModeVectors;  // lanes, vectors of a group
  static constexpr ptrdiff_t kBlock = kSteps * kLanes<T>;  // from one block of columns to the next
  const double *re, *im;
  double sign;  // of im
  int M, vectors, groups;

  explicit Rotations(const RotationArgs& args)
      : re(args.re), im(args.im), sign(args.reverse ? -1 : 1), M(static_cast<int>(args.M)) {
    vectors = (M + kWide - 1) / kWide;
    groups = (vectors + kGroup - 1) / kGroup;
  }
  int at(int v) const { return (v + 1) * kWide <= M ? v * kWide : M - kWide; }
  int columns() const { return groups * 2 * kGroup * kWide; }
  // The element of a row [2M] in a column of blocked rows (-1: none), and whether an earlier column holds it too.
  int element(int column, bool* repeated) const {
    const int v = column / (2 * kGroup * kWide) * kGroup + column / kWide % kGroup,
              imaginary = column / (kGroup * kWide) % 2;
    if (v >= vectors) return -1;
    const int mode = at(v) + column % kWide;
    *repeated = mode < v * kWide;
    return imaginary * M + mode;
  }

  // state and sums: [kGroup][2][kWide], the real parts of a vector, then the imaginary ones. sums: with h.
  void advance(int group, const Steps<T>& steps, double* state, double* sums) const {
    const int first = group * kGroup, count = vectors - first;
    if (count >= kGroup) {
      if (steps.h.first) advance_vectors<kGroup, true>(first, steps, state, sums);
      else advance_vectors<kGroup, false>(first, steps, state, sums);
      return;
    }
    for (int k = 0; k < count; k++) {
      if (steps.h.first) advance_vectors<1, true>(first + k, steps, state + 2 * kWide * k, sums + 2 * kWide * k);
      else advance_vectors<1, false>(first + k, steps, state + 2 * kWide * k, nullptr);
    }
  }

 private:
  // The offset of a vector's real or imaginary part in a row.
  ptrdiff_t place(int v, int part, bool blocked) const {
    if (!blocked) return at(v) + part * M;
    const int column = ((v / kGroup * 2 + part) * kGroup + v % kGroup) * kWide;
    return column / kLanes<T> * kBlock + column % kLanes<T>;
  }

  template <int COUNT, bool SUMS>
  void advance_vectors(int first, const Steps<T>& steps, double* state, double* sums) const {
    X a[COUNT], b[COUNT], zr[COUNT], zi[COUNT], sr[COUNT], si[COUNT];
    ptrdiff_t x_at[COUNT][2], z_at[COUNT][2], h_at[COUNT];
    ORTHOKERN_UNROLL for (int k = 0; k < COUNT; k++) {
      const int v = first + k;
      for (int part = 0; part < 2; part++)
        x_at[k][part] = place(v, part, steps.x.blocked), z_at[k][part] = place(v, part, steps.z.blocked);
      h_at[k] = at(v);
      a[k] = read_as<X>(re + at(v)), b[k] = read_as<X>(im + at(v)) * sign;
      zr[k] = read_as<X>(state + 2 * kWide * k), zi[k] = read_as<X>(state + 2 * kWide * k + kWide);
      sr[k] = si[k] = X{};
    }
    const T *x = steps.x.first, *h = steps.h.first;
    T* z = steps.z.first;
    for (int r = 0; r < steps.count; r++, x += steps.x.stride, z += steps.z.stride) {
      ORTHOKERN_UNROLL for (int k = 0; k < COUNT; k++) {
        const X real = read_as<X>(x + x_at[k][0]) + a[k] * zr[k], imag = read_as<X>(x + x_at[k][1]) + a[k] * zi[k];
        const X old = zr[k];
        zr[k] = real - b[k] * zi[k];
        zi[k] = imag + b[k] * old;
        write(z + z_at[k][0], zr[k]), write(z + z_at[k][1], zi[k]);
        if (!SUMS) continue;
        const X hr = read_as<X>(h + h_at[k]), hi = read_as<X>(h + h_at[k] + M);
        sr[k] += zr[k] * hr, si[k] += zi[k] * hr;
        sr[k] += zi[k] * hi, si[k] -= zr[k] * hi;
      }
      if (SUMS) h += steps.h.stride;
    }
    ORTHOKERN_UNROLL for (int k = 0; k < COUNT; k++) {
      double* const s = state + 2 * kWide * k;
      keep(s, zr[k]), keep(s + kWide, zi[k]);
      if (!SUMS) continue;
      double* const to = sums + 2 * kWide * k;
      keep(to, read_as<X>(to) + sr[k]), keep(to + kWide, read_as<X>(to + kWide) + si[k]);
    }
  }
};

// Data shared by the tasks: W and b in the order of blocked columns.
template <class T, class X>
struct Call {
  const RotationArgs& args;
  const Rotations<T, X> modes;
  const int D, columns;
  Packed<T> weight;    // [D + 1, columns]: W^T, b
  Packed<T> weight_t;  // [columns, D]: W, for the gradient of the features; rows of repeated modes are zero

  explicit Call(const RotationArgs& a) : args(a), modes(a), D(static_cast<int>(a.D)), columns(modes.columns()) {}

  bool pack() {
    if (args.reverse && !args.grad_features) return true;
    const ptrdiff_t depth = D + 1;
    const T *from = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);
    Scratch<T> rows;  // [columns][depth]
    if (!rows.allocate(columns * depth)) return false;
    for (int c = 0; c < columns; c++) {
      bool repeated = false;
      const int n = modes.element(c, &repeated);
      if (n < 0 || (repeated && args.reverse)) continue;
      memcpy(rows + c * depth, from + n * static_cast<ptrdiff_t>(D), D * sizeof(T));
      rows[c * depth + D] = bias ? bias[n] : T(0);
    }
    if (!args.reverse) {
      if (!weight.allocate(D + 1, columns)) return false;
      weight.fill(0, weight.panel_count(), 0, D + 1, rows, 1, depth, nullptr);
    } else if (args.grad_features) {
      if (!weight_t.allocate(columns, D)) return false;
      weight_t.fill(0, weight_t.panel_count(), 0, columns, rows, depth, 1, nullptr);
    }
    return true;
  }
};

template <class T>
struct Sums {
  Scratch<double> modes;  // [groups][kGroup][2][kWide]
  RowSums<T> weight;      // [round_up(columns)][round_up(D + 1)]
};

// The sequences [begin, end) of one task.
template <class T, class X>
class Task {
 public:
  Task(const Call<T, X>& c, int64_t begin_, int64_t end_, Sums<T>* s)
      : call(c), args(c.args), modes(c.modes), row(2 * c.args.M), begin(begin_), end(end_), sums(*s) {}

  bool run() {
    if (!states.allocate((end - begin) * size()) || !zeros.allocate(row)) return false;
    if (args.grad_re && !sums.modes.allocate(size())) return false;
    if (args.features && !allocate_chunk()) return false;
    for (int64_t b = begin; b < end; b++) start(b);
    for (int64_t i = 0; i < args.T; i += kSteps)
      for (int64_t b = begin; b < end; b++) chunk(b, i, i + kSteps < args.T ? i + kSteps : args.T);
    if (args.grad_re)
      for (int64_t b = begin; b < end; b++) finish(b);
    return true;
  }

 private:
  static constexpr int kWide = Rotations<T, X>::kWide, kGroup = Rotations<T, X>::kGroup;
  static constexpr ptrdiff_t kBlock = Rotations<T, X>::kBlock;
  const Call<T, X>& call;
  const RotationArgs& args;
  const Rotations<T, X>& modes;
  const int64_t row, begin, end;
  Sums<T>& sums;
  Scratch<double> states;          // [sequences][groups][kGroup][2][kWide]
  Scratch<T> zeros;                // [2M]
  Scratch<T> chunk_rows;           // blocked: x_t, or delta_t
  Scratch<T> features, gradients;  // blocked: u_t and a one; the gradient of u_t

  ptrdiff_t size() const { return static_cast<ptrdiff_t>(modes.groups) * 2 * kGroup * kWide; }
  double* state(int64_t b) const { return states + (b - begin) * size(); }
  bool is_reset(int64_t t, int64_t b) const { return args.resets && args.resets[t * args.B + b]; }
  // Whether step i in the order of the recurrence starts from a state of zero.
  bool starts_from_zero(int64_t i, int64_t b) const {
    return args.reverse ? i > 0 && is_reset(args.T - i, b) : is_reset(i, b);
  }

  bool allocate_chunk() {
    const auto blocks = [](int columns, int unit) { return static_cast<size_t>(round_up(columns, unit)) * kSteps; };
    return chunk_rows.allocate(blocks(call.columns, 2 * kLanes<T>)) &&
           features.allocate(blocks(call.D + 1, kLanes<T>)) &&
           (!args.grad_features || gradients.allocate(blocks(call.D, 2 * kLanes<T>))) &&
           (!args.grad_re || sums.weight.allocate(static_cast<size_t>(round_up(call.columns, kLanes<T>)) *
                                                      round_up(call.D + 1, kLanes<T>),
                                                  args.T * args.B));
  }
  void start(int64_t b) {
    const T* from = static_cast<const T*>(args.z0) + b * row;
    for (int v = 0; v < modes.vectors; v++)
      for (int i = 0; i < 2 * kWide; i++)
        state(b)[2 * kWide * v + i] = static_cast<double>(from[modes.at(v) + (i < kWide ? i : args.M + i - kWide)]);
  }
  // The gradient of h0, conj(lambda) delta_1.
  void finish(int64_t b) {
    T* to = static_cast<T*>(args.grad_h0) + b * row;
    for (int v = 0; v < modes.vectors; v++) {
      for (int i = 0; i < kWide; i++) {
        const int m = modes.at(v) + i;
        const double re = state(b)[2 * kWide * v + i], im = state(b)[2 * kWide * v + kWide + i];
        to[m] = is_reset(0, b) ? T(0) : static_cast<T>(args.re[m] * re + args.im[m] * im);
        to[args.M + m] = is_reset(0, b) ? T(0) : static_cast<T>(args.re[m] * im - args.im[m] * re);
      }
    }
  }

  // Steps [i, last) in the order of the recurrence.
  void chunk(int64_t b, int64_t i, int64_t last) {
    const int count = static_cast<int>(last - i);
    const int64_t t = args.reverse ? args.T - 1 - i : i, rows = args.reverse ? -args.B : args.B;
    const ptrdiff_t at = t * args.B + b, stride = rows * row;
    const Rows<T> inner = {chunk_rows, kLanes<T>, true};
    const T *x = static_cast<const T*>(args.x), *h = static_cast<const T*>(args.h);
    T* const z = static_cast<T*>(args.z);
    Steps<T> steps = {{x ? x + at * row : nullptr, stride, false},
                      {z ? z + at * row : nullptr, stride, false},
                      {h ? h + (at - (t > 0 ? args.B : 0)) * row : nullptr, stride, false},
                      count};
    if (args.features) {
      const T* from = static_cast<const T*>(args.features) + at * call.D;
      block_rows<T>(from, rows * call.D, count, call.D, features, kBlock);
      T* const ones = features + call.D / kLanes<T> * kBlock + call.D % kLanes<T>;
      for (int r = 0; r < count; r++) ones[r * kLanes<T>] = 1;
      if (args.grad_re) {
        steps.z = inner;
      } else {
        const Segment<T> depth = {features, kBlock, call.D + 1};
        multiply<T>(&depth, 1, call.weight, count, inner.first, kBlock);
        steps.x = {inner.first, inner.stride, true};
      }
    }
    for (int64_t from = i, stop; from < last; from = stop) {
      if (starts_from_zero(from, b)) memset(state(b), 0, sizeof(double) * size());
      for (stop = from + 1; stop < last && !starts_from_zero(stop, b);) stop++;
      advance(b, args.T - stop, steps.part(static_cast<int>(from - i), static_cast<int>(stop - i)));
    }
    if (args.features && args.grad_re) add_products(at, rows, count);
  }
  // first: with h, the step of the sequence that is processed last here.
  void advance(int64_t b, int64_t first, const Steps<T>& steps) {
    const bool begins = args.grad_re && (first == 0 || is_reset(first, b));  // then the state before it is not in h
    Steps<T> rest = steps.part(steps.count - begins, steps.count);
    if (begins) rest.h.first = is_reset(first, b) ? zeros.get() : static_cast<const T*>(args.h0) + b * row;
    for (int g = 0; g < modes.groups; g++) {
      double* const here = state(b) + g * 2 * kGroup * kWide;
      double* const to = args.grad_re ? sums.modes + g * 2 * kGroup * kWide : nullptr;
      if (steps.count > begins) modes.advance(g, steps.part(0, steps.count - begins), here, to);
      if (begins) modes.advance(g, rest, here, to);
    }
  }
  // The gradients of W, b and u from the delta of a chunk.
  void add_products(ptrdiff_t at, int64_t rows, int count) {
    const int depth = round_up(call.D + 1, kLanes<T>);
    outer_add<T>(chunk_rows, round_up(call.columns, kLanes<T>) / kLanes<T>, features, depth / kLanes<T>, kBlock, count,
                 sums.weight.part, depth);
    sums.weight.added(count);
    if (!args.grad_features) return;
    const Segment<T> delta = {chunk_rows, kBlock, call.columns};
    multiply<T>(&delta, 1, call.weight_t, count, gradients, kBlock);
    unblock_rows<T>(gradients, kBlock, count, call.D, static_cast<T*>(args.grad_features) + at * call.D, rows * call.D);
  }
};

template <class T, class X>
void collect(const Call<T, X>& call, const TaskSums<Sums<T>>& sums, int tasks) {
  const RotationArgs& args = call.args;
  constexpr int kWide = Rotations<T, X>::kWide;
  const auto total = [&](ptrdiff_t i) {
    return task_total(tasks, [&](int task) { return sums[task].modes.get(); }, i);
  };
  for (int v = 0; v < call.modes.vectors; v++) {
    for (int i = 0; i < kWide; i++) {
      args.grad_re[call.modes.at(v) + i] = total(2 * kWide * v + i);
      args.grad_im[call.modes.at(v) + i] = total(2 * kWide * v + kWide + i);
    }
  }
  if (!args.features) return;
  T *weight = static_cast<T*>(args.grad_weight), *bias = static_cast<T*>(args.grad_bias);
  const ptrdiff_t ldc = round_up(call.D + 1, kLanes<T>);
  const auto of_task = [&](int task) { return &sums[task].weight; };
  for (int c = 0; c < call.columns; c++) {
    bool repeated = false;
    const int n = call.modes.element(c, &repeated);
    if (n < 0 || repeated) continue;
    row_totals(tasks, of_task, c * ldc, call.D, weight + n * ptrdiff_t{call.D});
    row_totals(tasks, of_task, c * ldc + call.D, 1, bias + n);
  }
}

template <class T, class X>
bool run_scan(const RotationArgs& args) {
  Call<T, X> call(args);
  if (args.features && !call.pack()) return false;
  const int tasks = static_cast<int>(args.B < args.threads ? args.B : args.threads);
  TaskSums<Sums<T>> sums;
  if (!sums.allocate(tasks)) return false;
  const bool ok = run_tasks(tasks, [&](int task) {
    return Task<T, X>(call, args.B * task / tasks, args.B * (task + 1) / tasks, &sums[task]).run();
  });
  if (!ok) return false;
  if (args.grad_re) collect(call, sums, tasks);
  return true;
}

template <class T>
bool run_scan(const RotationArgs& args) {
  return args.M < kLanes<double> ? run_scan<T, double>(args) : run_scan<T, V<double>>(args);
}

}  // namespace

bool rotation_scan(const RotationArgs& args) {
  return args.dtype == kFloat64 ? run_scan<double>(args) : run_scan<float>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
