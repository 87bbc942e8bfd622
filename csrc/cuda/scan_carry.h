// The states at the borders of chunks: starts[c + 1] = map starts[c] + ends[c], one block for each row of the batch.
//
// In float64: a power of the map that is rounded to float32 would cost eps |W^chunk| at every border, more than the
// steps that it replaces.
//
// The steps depend on each other, so latency is the limit: the map is in the registers of the block, in tiles of 4 rows
// x 8 columns, as in scan_resident.h. Above 128 units the caller multiplies with a library.
#pragma once

#include "cuda/scan_units.h"

namespace orthokern::cuda {

constexpr int kCarryUnits = 128, kCarryThreads = 512;

// power [N, N], transposed: element (m, n) is the contribution of unit m to unit n. ends [count, B, N]; starts [count +
// 1, B, N], of which the first is an input. N up to kCarryUnits.
static __global__ void __launch_bounds__(kCarryThreads)
    scan_carry_kernel(const double* power, const float* ends, float* starts, int count, int B, int N) {
  constexpr int kLanes = 16, kRows = kCarryUnits * kLanes / kCarryThreads, kColumns = kCarryUnits / kLanes;
  constexpr int kAhead = 4;  // steps that `ends` is read ahead
  ORTHOKERN_SHARED(double, state, [2][kCarryUnits]);
  const int lane = threadIdx.x % kLanes, tile = threadIdx.x / kLanes;
  bool counts;
  const int row = kRows * tile + scattered_index<kLanes, kRows>(lane, counts);
  const bool unit = counts && row < N;
  const int64_t stride = static_cast<int64_t>(B) * N, first = static_cast<int64_t>(blockIdx.x) * N;
  double weights[kRows][kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; j++)
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int n = kRows * tile + i, m = kLanes * j + lane;
      weights[i][j] = n < N && m < N ? power[static_cast<int64_t>(m) * N + n] : 0.0;
    }
  if (threadIdx.x < kCarryUnits) {
    state[0][threadIdx.x] = threadIdx.x < N ? starts[first + threadIdx.x] : 0.0;
    state[1][threadIdx.x] = 0;
  }
  const float* next = ends + first + row;
  float* out = starts + stride + first + row;
  float end[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; i++, next += stride) end[i] = unit && i < count ? *next : 0.f;
  __syncthreads();
#pragma unroll 1
  for (int c0 = 0; c0 < count; c0 += kAhead)
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (c0 + i >= count) break;  // the same for all threads
      const double* const from = state[i % 2];
      double sums[kRows] = {};
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        const double x = from[kLanes * j + lane];
#pragma unroll
        for (int k = 0; k < kRows; k++) sums[k] = fma(weights[k][j], x, sums[k]);
      }
      reduce_scatter<kLanes>(sums, lane);
      const double after = sums[0] + end[i];
      if (unit) state[1 - i % 2][row] = after;
      __syncthreads();
      if (unit) *out = static_cast<float>(after);
      end[i] = unit && c0 + i + kAhead < count ? *next : 0.f;
      next += stride, out += stride;
    }
}

}  // namespace orthokern::cuda
