// A linear recurrence in its own modes, z_t = lambda z_{t-1} + x_t, in chunks of time: a thread owns one mode of one
// sequence in one chunk. The adjoint is the same recurrence from the last step to the first.
//
// Coefficients and states are double in registers from the first step of a chunk to the last. Threads of a warp are
// neighbouring modes, so that rows are read and written with unit stride. kAhead steps are loaded together: their loads
// are under way while earlier steps are computed. Without atomics or exchange between threads.
//
// Limit: memory bandwidth. A call reads x (twice, once to find the states between chunks) and writes z.
#include "cuda/launch.h"
#include "cuda/modal.h"
#include "cuda/ops.h"

namespace orthokern::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 4;  // steps

template <class X, class Z>
__global__ void __launch_bounds__(kThreads) modal_scan_kernel(ModalArgs a) {
  const int64_t R = a.B * a.M, index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t c = index / R, n = index % R, low = c * a.chunk;
  if (low >= a.T) return;
  const int64_t m = n % a.M, place = n / a.M * 2 * a.M + m,
                row = a.B * 2 * a.M;  // of the real part; elements of a step
  const int64_t steps = low + a.chunk < a.T ? a.chunk : a.T - low;
  const int64_t first = a.reverse ? low + steps - 1 : low, stride = a.reverse ? -row : row;
  const X* const x = static_cast<const X*>(a.x) + first * row + place;
  Z* const z = a.z ? static_cast<Z*>(a.z) + first * row + place : nullptr;
  const double re = a.re[m], im = a.reverse ? -a.im[m] : a.im[m];
  const int64_t between = c * row + place;
  double real = a.state ? a.state[between] : 0, imag = a.state ? a.state[between + a.M] : 0;
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
  if (a.end) a.end[between] = real, a.end[between + a.M] = imag;
}

}  // namespace

void modal_scan(const ModalArgs& args) {
  const DeviceGuard guard(args.device);
  const int64_t chunks = (args.T + args.chunk - 1) / args.chunk;
  const int64_t blocks = (args.B * args.M * chunks + kThreads - 1) / kThreads;
  if (blocks > 0x7fffffff)
    throw Error("modal: more modes and chunks of time than one launch of the cuda backend holds");
  const Launch at{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), static_cast<cudaStream_t>(args.stream)};
  if (args.dtype == kFloat64) launch(modal_scan_kernel<double, double>, at, args);
  else if (args.wide) launch(modal_scan_kernel<float, double>, at, args);
  else launch(modal_scan_kernel<float, float>, at, args);
}

}  // namespace orthokern::cuda
