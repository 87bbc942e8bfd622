// A linear recurrence in modal coordinates, z_t = lambda z_{t-1} + x_t, in chunks of time: a thread owns one mode of
// one sequence in one chunk. The adjoint is the same recurrence from the last step to the first, and sums its products
// with the states on the way.
//
// Coefficients and states are double in registers from the first step of a chunk to the last. Threads of a warp are
// neighbouring modes, so that rows are read and written with unit stride. kAhead steps are loaded together: their loads
// are in flight while earlier steps are computed. There are no atomics and no exchange between threads.
//
// A scan has three passes: every chunk from a zero state (the first one from z0), for its last state; the recurrence of
// these last states with lambda^chunk, for the states between chunks; and every chunk from its own state.
//
// Limit: memory bandwidth. A call reads x (twice, once to find the states between chunks; rows of a table stay in the
// cache) and h, and writes z.
#include <math.h>

#include "cuda/modal_launch.h"

namespace orthokern::cuda {
namespace {

constexpr int kAhead = 4;  // steps

enum Kind { kDense, kTokens, kSums };  // x is a tensor; rows of a table; a tensor, and sums with h are computed

// One launch over all chunks, with the eigenvalues to a power; states: the state after each chunk, null: zeros.
template <class X, class Z, Kind kKind>
__global__ void __launch_bounds__(kModalThreads) modal_scan_kernel(ModalArgs a, int64_t power, const double* states) {
  const int64_t R = a.B * a.M, index = static_cast<int64_t>(blockIdx.x) * kModalThreads + threadIdx.x;
  const int64_t c = index / R, n = index % R, low = c * a.chunk, b = n / a.M, m = n % a.M;
  if (low >= a.T) return;
  const int64_t row = a.B * 2 * a.M, place = b * 2 * a.M + m;  // elements of a step; of the real part
  const int64_t steps = low + a.chunk < a.T ? a.chunk : a.T - low, alive = living(a.lengths, a.T, a.start, b);
  const int64_t first = a.reverse ? low + steps - 1 : low, stride = a.reverse ? -1 : 1;
  double re = 1, im = 0, base_re = a.re[m], base_im = a.reverse ? -a.im[m] : a.im[m];
  for (int64_t left = power; left; left >>= 1) {
    if (left & 1) {
      const double old = re;
      re = old * base_re - im * base_im, im = old * base_im + im * base_re;
    }
    const double old = base_re;
    base_re = old * old - base_im * base_im, base_im = 2 * old * base_im;
  }
  const int64_t before = a.reverse ? c + 1 : c - 1;  // the chunk whose end is the start of this one
  const bool begins = before < 0 || before * a.chunk >= a.T;
  const double* const start = begins ? a.z0 : states ? states + before * row : nullptr;
  const int64_t step = stride * row;
  const int64_t* ids = a.tokens + first * a.B + b;
  const X* x = kKind == kTokens ? static_cast<const X*>(a.table) + m : static_cast<const X*>(a.x) + first * row + place;
  const X* h = static_cast<const X*>(a.h) + (first - 1) * row + place;  // the state before the step
  Z* z = static_cast<Z*>(a.z) + first * row + place;
  double real = start ? start[place] : 0, imag = start ? start[place + a.M] : 0, sum_re = 0, sum_im = 0;
  for (int64_t begin = 0, t = first; begin < steps; begin += kAhead, t += kAhead * stride) {
    double x_re[kAhead], x_im[kAhead], h_re[kAhead], h_im[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      x_re[i] = x_im[i] = h_re[i] = h_im[i] = 0;
      if (begin + i >= steps || t + i * stride >= alive) continue;
      if (kKind == kTokens) {
        const int64_t id = ids[i * stride * a.B];
        const bool known = id >= 0 && id < a.D;
        x_re[i] = known ? static_cast<double>(x[id * 2 * a.M]) : NAN;
        x_im[i] = known ? static_cast<double>(x[id * 2 * a.M + a.M]) : NAN;
      } else {
        x_re[i] = x[i * step], x_im[i] = x[i * step + a.M];
      }
      if (kKind != kSums) continue;
      const bool starts = t + i * stride == 0;
      if (a.resets && a.resets[(t + i * stride) * a.B + b]) continue;
      h_re[i] = starts ? a.h0[place] : static_cast<double>(h[i * step]);
      h_im[i] = starts ? a.h0[place + a.M] : static_cast<double>(h[i * step + a.M]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (begin + i >= steps) break;
      const int64_t continues = t + i * stride + (a.reverse ? 1 : 0);  // the step that a reset separates
      if (kKind != kTokens && a.resets && continues < a.T && a.resets[continues * a.B + b]) real = imag = 0;
      const double old = real;
      real = x_re[i] + re * old - im * imag;
      imag = x_im[i] + im * old + re * imag;
      if (kKind == kSums) {
        sum_re += real * h_re[i] + imag * h_im[i];
        sum_im += imag * h_re[i] - real * h_im[i];
      }
      if (!a.z) continue;
      const bool kept = t + i * stride < alive;
      z[i * step] = kept ? static_cast<Z>(real) : Z(0);
      z[i * step + a.M] = kept ? static_cast<Z>(imag) : Z(0);
    }
    ids += kAhead * stride * a.B;
    if (kKind != kTokens) x += kAhead * step;
    h += kAhead * step, z += kAhead * step;
  }
  if (a.ends) a.ends[c * row + place] = real, a.ends[c * row + place + a.M] = imag;
  if (kKind != kSums) return;
  a.sums[index] = sum_re;
  a.sums[(a.T + a.chunk - 1) / a.chunk * R + index] = sum_im;
}

template <class X, class Z>
void run_pass(const ModalArgs& pass, int64_t power, const double* states) {
  const int64_t chunks = (pass.T + pass.chunk - 1) / pass.chunk;
  const Launch at = over((pass.B * pass.M * chunks + kModalThreads - 1) / kModalThreads, pass.stream);
  const auto kernel = pass.tokens ? modal_scan_kernel<X, Z, kTokens>
                      : pass.h    ? modal_scan_kernel<X, Z, kSums>
                                  : modal_scan_kernel<X, Z, kDense>;
  launch(kernel, at, pass, power, states);
}

template <class X, class Z>
void run_passes(const ModalArgs& args) {
  ModalArgs last = args;
  const int64_t chunks = (args.T + args.chunk - 1) / args.chunk;
  if (chunks > 1) {
    if (!args.ends || !args.states || (args.resets && !args.chunk_resets))
      throw Error("modal: a scan of several chunks needs workspace");
    ModalArgs ends = args, states = args;
    ends.z = nullptr, ends.h = nullptr, last.ends = nullptr;
    states.T = states.chunk = chunks;
    states.x = args.ends, states.z = args.states, states.ends = nullptr;
    states.z0 = nullptr, states.h = nullptr, states.tokens = nullptr, states.lengths = nullptr;
    states.resets = args.chunk_resets;
    run_pass<X, Z>(ends, 1, nullptr);
    run_pass<double, double>(states, args.chunk, nullptr);
    if (!args.z && !args.h) return;
  }
  run_pass<X, Z>(last, 1, args.states);
}

}  // namespace

void modal_scan(const ModalArgs& args) {
  const DeviceGuard guard(args.device);
  if (args.dtype == kFloat64) run_passes<double, double>(args);
  else if (args.wide) run_passes<float, double>(args);
  else run_passes<float, float>(args);
}

}  // namespace orthokern::cuda
