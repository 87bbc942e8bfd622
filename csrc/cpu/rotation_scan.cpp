// The states of a linear recurrence in modal coordinates, z_t = lambda z_{t-1} + x_t, and its adjoint, the same
// recurrence from the last step to the first with conj(lambda), and the sums of delta_t conj(z_{t-1}). The input x_t may
// be a linear map of features, W u_t + b. Then x and delta exist for a chunk of steps only, in the nearest cache, and
// the gradients of W, b and u are products of the chunk.
//
// The lanes of a SIMD vector are modes. The last vector of a row ends with the row and may repeat modes of the vector
// before it, so rows need no padding; with fewer modes than lanes, a "vector" W is one double. A task has a range of
// sequences and processes them in chunks of kSteps steps, so that rows are read and written about in the order of
// memory. During a chunk, states and sums of a group of vectors are in registers, in float64.
//
// Limit: memory traffic. A call reads x, and h for the sums, and writes z; with features, it reads or writes those in
// place of x or of z in the backward.
#include "cpu/modal.h"
#include "cpu/outer.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class W, class T>
ORTHOKERN_INLINE W read_as(const T* p) {
  if constexpr (sizeof(W) == sizeof(double)) return static_cast<double>(*p);
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
template <class W>
ORTHOKERN_INLINE void keep(double* p, W v) {
  memcpy(p, &v, sizeof v);
}

// The rows of consecutive steps of one sequence, in the order of the recurrence: row-major [2M] rows, or the blocked
// rows of a chunk (packed.h).
template <class T>
struct Rows {
  T* first;          // null for none
  ptrdiff_t stride;  // elements from a row to the next one
  bool blocked;

  Rows from(int step) const { return {first ? first + step * stride : nullptr, stride, blocked}; }
};
// Steps of which none but the first starts from zero. h: row-major states of the forward before each step, or null.
template <class T>
struct Steps {
  Rows<const T> x;
  Rows<T> z;
  Rows<const T> h;
  int count;

  Steps part(int begin, int end) const { return {x.from(begin), z.from(begin), h.from(begin), end - begin}; }
};

// Recurrence and sums for vectors W of modes; vector v of a row begins with mode at(v). The columns of blocked rows are
// those of all groups, each with the real parts of its K vectors and then the imaginary ones.
template <class T, class W>
struct Rotations {
  static constexpr int L = sizeof(W) / sizeof(double), K = kModeVectors;  // lanes, vectors of a group
  static constexpr ptrdiff_t kBlock = kSteps * kLanes<T>;                 // from one block of columns to the next
  const double *re, *im;
  double sign;  // of im
  int M, vectors, groups;

  explicit Rotations(const RotationArgs& args)
      : re(args.re), im(args.im), sign(args.reverse ? -1 : 1), M(static_cast<int>(args.M)) {
    vectors = (M + L - 1) / L;
    groups = (vectors + K - 1) / K;
  }
  int at(int v) const { return (v + 1) * L <= M ? v * L : M - L; }
  int columns() const { return groups * 2 * K * L; }
  // The element of a row [2M] that a column of blocked rows has, -1 for none, and whether an earlier column has it too.
  int element(int column, bool* repeated) const {
    const int v = column / (2 * K * L) * K + column / L % K, imaginary = column / (K * L) % 2;
    if (v >= vectors) return -1;
    const int mode = at(v) + column % L;
    *repeated = mode < v * L;
    return imaginary * M + mode;
  }

  // state and sums: [K][2][L], the real parts of a vector, then the imaginary ones. sums: with h.
  void advance(int group, const Steps<T>& steps, double* state, double* sums) const {
    const int first = group * K, count = vectors - first;
    if (count >= K) {
      if (steps.h.first) advance_vectors<K, true>(first, steps, state, sums);
      else advance_vectors<K, false>(first, steps, state, sums);
      return;
    }
    for (int k = 0; k < count; k++) {
      if (steps.h.first) advance_vectors<1, true>(first + k, steps, state + 2 * L * k, sums + 2 * L * k);
      else advance_vectors<1, false>(first + k, steps, state + 2 * L * k, nullptr);
    }
  }

 private:
  // The place of a vector's real or imaginary part in a row.
  ptrdiff_t place(int v, int part, bool blocked) const {
    if (!blocked) return at(v) + part * M;
    const int column = ((v / K * 2 + part) * K + v % K) * L;
    return column / kLanes<T> * kBlock + column % kLanes<T>;
  }

  template <int COUNT, bool SUMS>
  void advance_vectors(int first, const Steps<T>& steps, double* state, double* sums) const {
    W a[COUNT], b[COUNT], zr[COUNT], zi[COUNT], sr[COUNT], si[COUNT];
    ptrdiff_t x_at[COUNT][2], z_at[COUNT][2], h_at[COUNT];
    ORTHOKERN_UNROLL for (int k = 0; k < COUNT; k++) {
      const int v = first + k;
      for (int part = 0; part < 2; part++)
        x_at[k][part] = place(v, part, steps.x.blocked), z_at[k][part] = place(v, part, steps.z.blocked);
      h_at[k] = at(v);
      a[k] = read_as<W>(re + at(v)), b[k] = read_as<W>(im + at(v)) * sign;
      zr[k] = read_as<W>(state + 2 * L * k), zi[k] = read_as<W>(state + 2 * L * k + L);
      sr[k] = si[k] = W{};
    }
    const T *x = steps.x.first, *h = steps.h.first;
    T* z = steps.z.first;
    for (int r = 0; r < steps.count; r++, x += steps.x.stride, z += steps.z.stride) {
      ORTHOKERN_UNROLL for (int k = 0; k < COUNT; k++) {
        const W real = read_as<W>(x + x_at[k][0]) + a[k] * zr[k], imag = read_as<W>(x + x_at[k][1]) + a[k] * zi[k];
        const W old = zr[k];
        zr[k] = real - b[k] * zi[k];
        zi[k] = imag + b[k] * old;
        write(z + z_at[k][0], zr[k]), write(z + z_at[k][1], zi[k]);
        if (!SUMS) continue;
        const W hr = read_as<W>(h + h_at[k]), hi = read_as<W>(h + h_at[k] + M);
        sr[k] += zr[k] * hr, si[k] += zi[k] * hr;
        sr[k] += zi[k] * hi, si[k] -= zr[k] * hi;
      }
      if (SUMS) h += steps.h.stride;
    }
    ORTHOKERN_UNROLL for (int k = 0; k < COUNT; k++) {
      double *s = state + 2 * L * k, *to = sums + 2 * L * k;
      keep(s, zr[k]), keep(s + L, zi[k]);
      if (SUMS) keep(to, read_as<W>(to) + sr[k]), keep(to + L, read_as<W>(to + L) + si[k]);
    }
  }
};

// What the tasks share: W and b in the order of blocked columns.
template <class T, class W>
struct Call {
  const RotationArgs& args;
  const Rotations<T, W> modes;
  const int D, columns;
  Packed<T> weight;    // [D + 1, columns]: W^T, b
  Packed<T> weight_t;  // [columns, D]: W, for the gradient of the features; rows of repeated modes are zero

  explicit Call(const RotationArgs& a) : args(a), modes(a), D(static_cast<int>(a.D)), columns(modes.columns()) {}

  bool pack() {
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
  Scratch<double> modes;  // [groups][K][2][L]
  RowSums<T> weight;      // [round_up(columns)][round_up(D + 1)]
};

// The sequences [begin, end) of one task.
template <class T, class W>
class Task {
 public:
  Task(const Call<T, W>& c, int64_t begin_, int64_t end_, Sums<T>* s)
      : call(c), args(c.args), modes(c.modes), row(2 * c.args.M), begin(begin_), end(end_), sums(*s) {}

  bool run() {
    if (!states.allocate((end - begin) * size()) || !zeros.allocate(row)) return false;
    if (args.h && !sums.modes.allocate(size())) return false;
    if (args.features && !allocate_chunk()) return false;
    for (int64_t b = begin; b < end; b++) start(b);
    for (int64_t i = 0; i < args.T; i += kSteps)
      for (int64_t b = begin; b < end; b++) chunk(b, i, i + kSteps < args.T ? i + kSteps : args.T);
    if (args.h)
      for (int64_t b = begin; b < end; b++) finish(b);
    return true;
  }

 private:
  static constexpr int L = Rotations<T, W>::L, K = Rotations<T, W>::K;
  static constexpr ptrdiff_t kBlock = Rotations<T, W>::kBlock;
  const Call<T, W>& call;
  const RotationArgs& args;
  const Rotations<T, W>& modes;
  const int64_t row, begin, end;
  Sums<T>& sums;
  Scratch<double> states;          // [sequences][groups][K][2][L]
  Scratch<T> zeros;                // [2M]
  Scratch<T> chunk_rows;           // blocked: x_t, or delta_t
  Scratch<T> features, gradients;  // blocked: u_t and a one; the gradient of u_t

  ptrdiff_t size() const { return static_cast<ptrdiff_t>(modes.groups) * 2 * K * L; }
  double* state(int64_t b) const { return states + (b - begin) * size(); }
  bool is_reset(int64_t t, int64_t b) const { return args.resets && args.resets[t * args.B + b]; }
  // Whether step i of the recurrence, in its order, starts from a state of zero.
  bool starts_from_zero(int64_t i, int64_t b) const {
    return args.reverse ? i > 0 && is_reset(args.T - i, b) : is_reset(i, b);
  }

  bool allocate_chunk() {
    constexpr int P = kLanes<T>;
    const auto blocks = [](int columns, int unit) { return static_cast<size_t>(round_up(columns, unit)) * kSteps; };
    return chunk_rows.allocate(blocks(call.columns, 2 * P)) && features.allocate(blocks(call.D + 1, P)) &&
           gradients.allocate(blocks(call.D, 2 * P)) &&
           (!args.h || sums.weight.allocate(static_cast<size_t>(round_up(call.columns, P)) * round_up(call.D + 1, P),
                                            args.T * args.B));
  }
  void start(int64_t b) {
    const T* from = static_cast<const T*>(args.z0) + b * row;
    for (int v = 0; v < modes.vectors; v++)
      for (int i = 0; i < 2 * L; i++)
        state(b)[2 * L * v + i] = static_cast<double>(from[modes.at(v) + (i < L ? i : args.M + i - L)]);
  }
  // The gradient of h0, conj(lambda) delta_1.
  void finish(int64_t b) {
    T* to = static_cast<T*>(args.grad_h0) + b * row;
    for (int v = 0; v < modes.vectors; v++) {
      for (int i = 0; i < L; i++) {
        const int m = modes.at(v) + i;
        const double re = state(b)[2 * L * v + i], im = state(b)[2 * L * v + L + i];
        to[m] = is_reset(0, b) ? T(0) : static_cast<T>(args.re[m] * re + args.im[m] * im);
        to[args.M + m] = is_reset(0, b) ? T(0) : static_cast<T>(args.re[m] * im - args.im[m] * re);
      }
    }
  }

  // Steps [i, last) of the recurrence, in its order.
  void chunk(int64_t b, int64_t i, int64_t last) {
    const int count = static_cast<int>(last - i);
    const int64_t t = args.reverse ? args.T - 1 - i : i, rows = args.reverse ? -args.B : args.B;
    const ptrdiff_t at = t * args.B + b, stride = rows * row;
    const Rows<T> inner = {chunk_rows, kLanes<T>, true};
    const T *x = static_cast<const T*>(args.x), *h = static_cast<const T*>(args.h);
    T* const z = static_cast<T*>(args.z);
    Steps<T> steps = {{x ? x + at * row : nullptr, stride, false},
                      {z ? z + at * row : nullptr, stride, false},
                      {h ? h + at * row + stride : nullptr, stride, false},
                      count};
    if (args.features) {
      const T* from = static_cast<const T*>(args.features) + at * call.D;
      block_rows<T>(from, rows * call.D, count, call.D, features, kBlock);
      T* const ones = features + call.D / kLanes<T> * kBlock + call.D % kLanes<T>;
      for (int r = 0; r < count; r++) ones[r * kLanes<T>] = 1;
      if (args.h) {
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
    if (args.features && args.h) add_products(at, rows, count);
  }
  // first: with h, the step of the sequence that is the last one here.
  void advance(int64_t b, int64_t first, const Steps<T>& steps) {
    const bool begins = args.h && (first == 0 || is_reset(first, b));  // then the state before it is not in h
    Steps<T> rest = steps.part(steps.count - begins, steps.count);
    if (begins) rest.h.first = is_reset(first, b) ? zeros.get() : static_cast<const T*>(args.h0) + b * row;
    for (int g = 0; g < modes.groups; g++) {
      double *here = state(b) + g * 2 * K * L, *to = sums.modes + g * 2 * K * L;
      if (steps.count > begins) modes.advance(g, steps.part(0, steps.count - begins), here, to);
      if (begins) modes.advance(g, rest, here, to);
    }
  }
  // The gradients of W, b and u from the delta of a chunk.
  void add_products(ptrdiff_t at, int64_t rows, int count) {
    constexpr int P = kLanes<T>;
    const int depth = round_up(call.D + 1, P);
    outer_add<T>(chunk_rows, round_up(call.columns, P) / P, features, depth / P, kBlock, count, sums.weight.part,
                 depth);
    sums.weight.added(count);
    if (!args.grad_features) return;
    const Segment<T> delta = {chunk_rows, kBlock, call.columns};
    multiply<T>(&delta, 1, call.weight_t, count, gradients, kBlock);
    unblock_rows<T>(gradients, kBlock, count, call.D, static_cast<T*>(args.grad_features) + at * call.D, rows * call.D);
  }
};

template <class T, class W>
void collect(const Call<T, W>& call, const TaskSums<Sums<T>>& sums, int tasks) {
  const RotationArgs& args = call.args;
  constexpr int L = Rotations<T, W>::L;
  const auto total = [&](ptrdiff_t i) {
    double sum = 0;
    for (int task = 0; task < tasks; task++) sum += sums[task].modes[i];
    return sum;
  };
  for (int v = 0; v < call.modes.vectors; v++) {
    for (int i = 0; i < L; i++) {
      args.grad_re[call.modes.at(v) + i] = total(2 * L * v + i);
      args.grad_im[call.modes.at(v) + i] = total(2 * L * v + L + i);
    }
  }
  if (!args.features) return;
  T *weight = static_cast<T*>(args.grad_weight), *bias = static_cast<T*>(args.grad_bias);
  const ptrdiff_t D = call.D, ldc = round_up(call.D + 1, kLanes<T>);
  for (int c = 0; c < call.columns; c++) {
    bool repeated = false;
    const int n = call.modes.element(c, &repeated);
    if (n < 0 || repeated) continue;
    for (ptrdiff_t d = 0; d <= D; d++) {
      double sum = 0;
      for (int task = 0; task < tasks; task++) sum += sums[task].weight.at(c * ldc + d);
      (d < D ? weight[n * D + d] : bias[n]) = static_cast<T>(sum);
    }
  }
}

template <class T, class W>
bool run_scan(const RotationArgs& args) {
  Call<T, W> call(args);
  if (args.features && !call.pack()) return false;
  const int tasks = static_cast<int>(args.B < args.threads ? args.B : args.threads);
  Scratch<bool> failed;
  TaskSums<Sums<T>> sums;
  if (!failed.allocate(tasks) || !sums.allocate(tasks, [](Sums<T>&) { return true; })) return false;
  share(tasks, tasks, [&](int task) {
    const FlushDenormals flush;
    Task<T, W> work(call, args.B * task / tasks, args.B * (task + 1) / tasks, &sums[task]);
    failed[task] = !work.run();
  });
  for (int i = 0; i < tasks; i++)
    if (failed[i]) return false;
  if (args.h) collect(call, sums, tasks);
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
