// The states at the borders of chunks: starts[c + 1] = map starts[c] + ends[c], one block for each row of the batch.
//
// In float64: a power of the map that is rounded to float32 would cost eps |W^chunk| at every border, more than the
// steps it stands for. The map is read from the L2 cache in every step, which at the some hundred steps of a call takes
// less than keeping it would.
#pragma once

#include "cuda/scan_units.h"

namespace orthokern {
namespace cuda {

constexpr int kCarryThreads = 256;

// power [N, N], transposed: element (m, n) is what unit m gives to unit n. ends [count, B, N]; starts [count + 1, B,
// N], of which the first comes in. Dynamic shared memory: the state, double [2][N].
static __global__ void __launch_bounds__(kCarryThreads)
    scan_carry_kernel(const double* power, const float* ends, float* starts, int count, int B, int N) {
  double* const state = dynamic_shared<double>();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * N, stride = static_cast<int64_t>(B) * N;
  for (int n = threadIdx.x; n < N; n += kCarryThreads) state[n] = starts[row + n];
  __syncthreads();
  for (int c = 0; c < count; c++) {
    const double* const from = state + c % 2 * N;
    double* const to = state + (c + 1) % 2 * N;
    for (int n = threadIdx.x; n < N; n += kCarryThreads) {
      double sum = ends[c * stride + row + n];
#pragma unroll 8
      for (int m = 0; m < N; m++) sum = fma(power[static_cast<int64_t>(m) * N + n], from[m], sum);
      to[n] = sum;
      starts[(c + 1) * stride + row + n] = static_cast<float>(sum);
    }
    __syncthreads();
  }
}

}  // namespace cuda
}  // namespace orthokern
