// A linear recurrence in its own modes, z_t = lambda z_{t-1} + x_t, and its adjoint, delta_t = conj(lambda) delta_{t+1}
// + g_t: a thread owns a lane in one chunk of time (modal.h).
//
// Coefficients, states, adjoints and sums are double in registers from the first step of a chunk to the last. Threads of
// a warp are neighbouring modes, so that rows are read and written with unit stride. kAhead steps are loaded together:
// their loads are under way while earlier steps are computed. Without atomics or exchange between threads.
//
// Limit: memory bandwidth. Forward reads x (twice, once to find the states between chunks; ids and a table of few rows
// come from a cache) and writes z; backward reads g twice and z once, and writes delta where that is asked for.
#include "cuda/modal_units.h"

namespace orthokern::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 4;  // steps

struct Complex {
  double r, i;
};
// lambda z + x
__device__ __forceinline__ Complex step(Complex lambda, Complex z, Complex x) {
  return {x.r + lambda.r * z.r - lambda.i * z.i, x.i + lambda.i * z.r + lambda.r * z.i};
}
// The thread's lane and chunk: `items` of them in a chunk.
struct Place {
  int64_t chunk, n;
  int64_t low, high;  // steps
  bool inside;
  __device__ __forceinline__ Place(const ModalArgs& a, int64_t items) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    chunk = index / items, n = index % items;
    low = chunk * a.chunk, high = low + a.chunk < a.T ? low + a.chunk : a.T;
    inside = low < a.T;
  }
};
// Mode m of row `row`.
template <class T>
__device__ __forceinline__ Complex mode_of(const void* rows, int64_t row, int64_t m, int64_t M) {
  const T* at = static_cast<const T*>(rows) + row * 2 * M + m;
  return {static_cast<double>(at[0]), static_cast<double>(at[M])};
}
template <class T>
__device__ __forceinline__ void put_mode(void* rows, int64_t row, int64_t m, int64_t M, Complex z) {
  T* at = static_cast<T*>(rows) + row * 2 * M + m;
  at[0] = static_cast<T>(z.r), at[M] = static_cast<T>(z.i);
}
// Lane n of block c in [.., 2, R].
__device__ __forceinline__ Complex lane_of(const double* of, int64_t c, int64_t n, int64_t R) {
  return {of[2 * c * R + n], of[(2 * c + 1) * R + n]};
}
__device__ __forceinline__ void put_lane(double* of, int64_t c, int64_t n, int64_t R, Complex z) {
  of[2 * c * R + n] = z.r, of[(2 * c + 1) * R + n] = z.i;
}

template <class T>
__global__ void __launch_bounds__(kThreads) modal_forward_kernel(ModalArgs a) {
  const int64_t R = a.B * a.M;
  const Place at(a, R);
  if (!at.inside) return;
  const int64_t b = at.n / a.M, m = at.n % a.M, end = steps_of(a.lengths, b, a.first, a.T);
  const Complex lambda = {a.re[m], a.im[m]};
  Complex z = a.state ? lane_of(a.state, at.chunk, at.n, R) : Complex{0, 0};
  for (int64_t begin = at.low; begin < at.high; begin += kAhead) {
    Complex x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int64_t t = begin + i, row = t * a.B + b;
      x[i] = {0, 0};
      if (t >= at.high || t >= end) continue;
      if (a.ids) {
        const int64_t id = load_id(a.ids, a.id_bytes, row);
        x[i] = id >= 0 && id < a.D ? mode_of<T>(a.table, id, m, a.M) : Complex{not_a_number(), not_a_number()};
      } else {
        x[i] = mode_of<T>(a.x, row, m, a.M);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int64_t t = begin + i;
      if (t >= at.high) break;
      z = t < end ? step(lambda, z, x[i]) : Complex{0, 0};
      if (a.z) put_mode<T>(a.z, t * a.B + b, m, a.M, z);
    }
  }
  if (a.end) put_lane(a.end, at.chunk, at.n, R, z);
}

// What enters every chunk, the chunks of a lane one after another.
__global__ void __launch_bounds__(kThreads) modal_join_kernel(ModalJoinArgs a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, R = a.lanes;
  if (n >= R) return;
  Complex power = {a.re[n % a.M], a.backward ? -a.im[n % a.M] : a.im[n % a.M]};
  for (int i = 0; i < a.squarings; i++) power = {(power.r - power.i) * (power.r + power.i), 2 * power.r * power.i};
  Complex z = lane_of(a.entering, 0, n, R);
  for (int64_t begin = 0; begin < a.chunks; begin += kAhead) {
    Complex end[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {  // what the last one ends with enters none, and may not be there
      const int64_t c = begin + i;
      end[i] = c + 1 < a.chunks ? lane_of(a.end, a.backward ? a.chunks - 1 - c : c, n, R) : Complex{0, 0};
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int64_t c = begin + i;
      if (c >= a.chunks) break;
      put_lane(a.state, a.backward ? a.chunks - 1 - c : c, n, R, z);
      z = step(power, z, end[i]);
    }
  }
}

// The state of mode m before step t.
template <class T>
__device__ __forceinline__ Complex state_before(const ModalArgs& a, int64_t t, int64_t b, int64_t m) {
  return t ? mode_of<T>(a.states, (t - 1) * a.B + b, m, a.M) : mode_of<T>(a.before, b, m, a.M);
}

template <class T>
__global__ void __launch_bounds__(kThreads) modal_backward_kernel(ModalArgs a) {
  const int64_t R = a.B * a.M;
  const Place at(a, R);
  if (!at.inside) return;
  const int64_t b = at.n / a.M, m = at.n % a.M, end = steps_of(a.lengths, b, a.first, a.T);
  const Complex lambda = {a.re[m], -a.im[m]};
  Complex delta = a.state ? lane_of(a.state, at.chunk, at.n, R) : Complex{0, 0}, sums = {0, 0}, run = {0, 0};
  int64_t id = -1;  // of the steps that `run` holds the sum of
  // A thread alone reads and writes its lane of its chunk's sums by id.
  const auto flush = [&] {
    if (id >= 0 && id < a.D) {
      double* const to = a.table_sums + (at.chunk * a.D + id) * 2 * R + at.n;
      to[0] += run.r, to[R] += run.i;
    }
    run = {0, 0};
  };
  for (int64_t last = at.high; last > at.low; last -= kAhead) {
    Complex g[kAhead], z[kAhead];
    int64_t ids[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int64_t t = last - 1 - i;
      g[i] = z[i] = {0, 0}, ids[i] = -1;
      if (t < at.low || t >= end) continue;
      g[i] = mode_of<T>(a.g, t * a.B + b, m, a.M);
      if (a.sums) z[i] = state_before<T>(a, t, b, m);
      if (a.table_sums) ids[i] = load_id(a.ids, a.id_bytes, t * a.B + b);
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int64_t t = last - 1 - i;
      if (t < at.low) break;
      delta = t < end ? step(lambda, delta, g[i]) : Complex{0, 0};
      if (a.delta) put_mode<T>(a.delta, t * a.B + b, m, a.M, delta);
      if (a.wide) put_mode<double>(a.wide, t * a.B + b, m, a.M, delta);
      sums.r += delta.r * z[i].r + delta.i * z[i].i;
      sums.i += delta.i * z[i].r - delta.r * z[i].i;
      if (!a.table_sums) continue;
      if (ids[i] != id) flush(), id = ids[i];
      run.r += delta.r, run.i += delta.i;
    }
  }
  if (a.table_sums) flush();
  put_lane(a.end, at.chunk, at.n, R, delta);
  if (a.sums) put_lane(a.sums, at.chunk, at.n, R, sums);
}

// The adjoint of mode j once more, for the sums of delta_t[j] z_{t-1}[k]: a lane is a pair of a sequence. A pair of no
// modes gives NaN.
template <class T>
__global__ void __launch_bounds__(kThreads) modal_pairs_kernel(ModalArgs a) {
  const int64_t items = a.B * a.P, R = a.B * a.M;
  const Place at(a, items);
  if (!at.inside) return;
  const int64_t b = at.n / a.P, j = a.pairs[at.n % a.P * 2], k = a.pairs[at.n % a.P * 2 + 1];
  const bool modes = j >= 0 && j < a.M && k >= 0 && k < a.M;
  const int64_t end = modes ? steps_of(a.lengths, b, a.first, a.T) : 0;
  const Complex lambda = modes ? Complex{a.re[j], -a.im[j]} : Complex{0, 0};
  Complex delta = modes ? lane_of(a.state, at.chunk, b * a.M + j, R) : Complex{0, 0};
  const double nothing = modes ? 0 : not_a_number();
  double rr = nothing, ri = nothing, ir = nothing, ii = nothing;
  for (int64_t t = at.high - 1; t >= at.low; t--) {
    if (t >= end) continue;  // delta is zero
    delta = step(lambda, delta, mode_of<T>(a.g, t * a.B + b, j, a.M));
    const Complex z = state_before<T>(a, t, b, k);
    rr += delta.r * z.r, ri += delta.r * z.i, ir += delta.i * z.r, ii += delta.i * z.i;
  }
  double* const to = a.sums + 4 * at.chunk * items + at.n;
  to[0] = rr, to[items] = ri, to[2 * items] = ir, to[3 * items] = ii;
}

template <class A>
void launch_over(void (*narrow)(A), void (*wide)(A), const A& a, int64_t items) {
  const DeviceGuard guard(a.device);
  const int64_t chunks = (a.T + a.chunk - 1) / a.chunk;
  launch(a.dtype == kFloat64 ? wide : narrow,
         {blocks_for(items * chunks, kThreads), dim3(kThreads), static_cast<cudaStream_t>(a.stream)}, a);
}

}  // namespace

void modal_forward(const ModalArgs& args) {
  launch_over(modal_forward_kernel<float>, modal_forward_kernel<double>, args, args.B * args.M);
}
void modal_backward(const ModalArgs& args) {
  launch_over(modal_backward_kernel<float>, modal_backward_kernel<double>, args, args.B * args.M);
}
void modal_pairs(const ModalArgs& args) {
  launch_over(modal_pairs_kernel<float>, modal_pairs_kernel<double>, args, args.B * args.P);
}
void modal_join(const ModalJoinArgs& args) {
  const DeviceGuard guard(args.device);
  launch(modal_join_kernel, {blocks_for(args.lanes, kThreads), dim3(kThreads), static_cast<cudaStream_t>(args.stream)},
         args);
}

}  // namespace orthokern::cuda
