// A linear recurrence in its own modes, z_t = lambda z_{t-1} + x_t, in chunks of time: a thread owns one mode of one
// sequence in one chunk. The adjoint is the same recurrence from the last step to the first.
//
// Coefficients and states are double in registers from the first step of a chunk to the last. Threads of a warp are
// neighbouring modes, so that rows are read and written with unit stride. kAhead steps are loaded together: their loads
// are under way while earlier steps are computed. Without atomics or exchange between threads.
//
// Three passes make a scan: every chunk from a zero state (the first one from z0), for the states that it ends with; the
// recurrence of these ends with lambda^chunk, for the states between chunks; and every chunk from its state.
//
// Limit: memory bandwidth. A call reads x (twice, once to find the states between chunks) and writes z.
#include "cuda/launch.h"
#include "cuda/modal.h"
#include "cuda/ops.h"

namespace orthokern::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 4;  // steps

// One launch over all chunks.
struct ModalPass {
  int64_t T, B, M, chunk, power;  // of lambda
  int reverse;
  const void* x;
  const double* re;
  const double* im;
  const double* z0;      // null: zeros
  const double* states;  // the state after each chunk; null: zeros
  void* z;               // or null
  double* ends;          // or null
};

template <class X, class Z>
__global__ void __launch_bounds__(kThreads) modal_scan_kernel(ModalPass a) {
  const int64_t R = a.B * a.M, index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t c = index / R, n = index % R, low = c * a.chunk;
  if (low >= a.T) return;
  const int64_t m = n % a.M, place = n / a.M * 2 * a.M + m,
                row = a.B * 2 * a.M;  // of the real part; elements of a step
  const int64_t steps = low + a.chunk < a.T ? a.chunk : a.T - low;
  const int64_t first = a.reverse ? low + steps - 1 : low, stride = a.reverse ? -row : row;
  const X* const x = static_cast<const X*>(a.x) + first * row + place;
  Z* const z = a.z ? static_cast<Z*>(a.z) + first * row + place : nullptr;
  double re = 1, im = 0, base_re = a.re[m], base_im = a.reverse ? -a.im[m] : a.im[m];
  for (int64_t left = a.power; left; left >>= 1) {
    if (left & 1) {
      const double old = re;
      re = old * base_re - im * base_im, im = old * base_im + im * base_re;
    }
    const double old = base_re;
    base_re = old * old - base_im * base_im, base_im = 2 * old * base_im;
  }
  const int64_t before = a.reverse ? c + 1 : c - 1;  // the chunk whose end is the start of this one
  const bool begins = before < 0 || before * a.chunk >= a.T;
  const double* const start = begins ? a.z0 : a.states ? a.states + before * row : nullptr;
  double real = start ? start[place] : 0, imag = start ? start[place + a.M] : 0;
  for (int64_t begin = 0; begin < steps; begin += kAhead) {
    double x_real[kAhead], x_imag[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const bool inside = begin + i < steps;
      x_real[i] = inside ? static_cast<double>(x[(begin + i) * stride]) : 0;
      x_imag[i] = inside ? static_cast<double>(x[(begin + i) * stride + a.M]) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (begin + i >= steps) break;
      const double old = real;
      real = x_real[i] + re * old - im * imag;
      imag = x_imag[i] + im * old + re * imag;
      if (!z) continue;
      z[(begin + i) * stride] = static_cast<Z>(real);
      z[(begin + i) * stride + a.M] = static_cast<Z>(imag);
    }
  }
  if (a.ends) a.ends[c * row + place] = real, a.ends[c * row + place + a.M] = imag;
}

template <class X, class Z>
void run_pass(const ModalArgs& args, const ModalPass& pass) {
  const int64_t chunks = (pass.T + pass.chunk - 1) / pass.chunk;
  const int64_t blocks = (pass.B * pass.M * chunks + kThreads - 1) / kThreads;
  if (blocks > 0x7fffffff)
    throw Error("modal: more modes and chunks of time than one launch of the cuda backend holds");
  const Launch at{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), static_cast<cudaStream_t>(args.stream)};
  launch(modal_scan_kernel<X, Z>, at, pass);
}

template <class X, class Z>
void run_passes(const ModalArgs& args) {
  const int64_t chunks = (args.T + args.chunk - 1) / args.chunk;
  ModalPass pass{args.T,  args.B,  args.M,  args.chunk, 1,      args.reverse, args.x,
                 args.re, args.im, args.z0, nullptr,    args.z, nullptr};
  if (chunks > 1) {
    if (!args.ends || !args.states) throw Error("modal: a scan of several chunks needs workspace");
    ModalPass ends = pass, states = pass;
    ends.z = nullptr, ends.ends = args.ends;
    states.T = states.chunk = chunks, states.power = args.chunk;
    states.x = args.ends, states.z0 = nullptr, states.z = args.states;
    run_pass<X, Z>(args, ends);
    run_pass<double, double>(args, states);
    pass.states = args.states;
  }
  run_pass<X, Z>(args, pass);
}

}  // namespace

void modal_scan(const ModalArgs& args) {
  const DeviceGuard guard(args.device);
  if (args.dtype == kFloat64) run_passes<double, double>(args);
  else if (args.wide) run_passes<float, double>(args);
  else run_passes<float, float>(args);
}

}  // namespace orthokern::cuda
