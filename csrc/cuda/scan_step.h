// The end of one step of a scan with library products (ScanPath::kLibrary): the caller multiplies all states by the
// map, and this kernel adds the input, applies the activation and stores the results. A thread has two neighbouring
// units of one sequence, which are a pair of oplu.
#pragma once

#include "cuda/launch.h"
#include "cuda/scan_units.h"

namespace orthokern::cuda {

constexpr int kStepThreads = 256;
constexpr int kStepBlocks = 4;  // at least, of a multiprocessor; without a bound ptxas spills a word for sm_100

// Blocks for `count` elements with one thread each.
inline int step_blocks(int64_t count) { return static_cast<int>((count + kStepThreads - 1) / kStepThreads); }

inline int scan_step_blocks(int64_t sequences, int64_t N) { return step_blocks(sequences * ((N + 1) / 2)); }

template <class Args>
__global__ void store_kernel(const Args a, Stored<Args>* to) {
  to->first = 0;
  to->args = a;
}
template <class Args>
void store_args(const Args& a, void* to, void* stream) {
  static_assert(sizeof(Stored<Args>) <= kStoredBytes, "see kStoredBytes");
  const DeviceGuard guard(a.device);
  launch(store_kernel<Args>, {dim3(1), dim3(1), static_cast<cudaStream_t>(stream)}, a, static_cast<Stored<Args>*>(to));
}
// Launch a kernel of one step, one thread for each of `blocks` * kStepThreads elements.
template <class Args, class Kernel>
void launch_step(Kernel kernel, const StepArgs& at, int blocks) {
  const DeviceGuard guard(at.device);
  launch(kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kStepThreads), static_cast<cudaStream_t>(at.stream)},
         static_cast<const Stored<Args>*>(at.stored), at.product, at.passed, static_cast<int>(at.step));
}

// The sum of a value over the block, in its first thread.
__device__ __forceinline__ float block_sum(float value, float (&of_warps)[kStepThreads / 32]) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kStepThreads / 32; w++) sum += of_warps[w];
  return sum;
}

// product [Q, N]: the map applied to the states that enter the step. state [Q, N]: those that the next step multiplies.
template <bool kBackward>
__global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    scan_step_kernel(const Stored<ScanArgs>* stored, const float* product, float* state, const int step) {
  ORTHOKERN_SHARED(float, squares, [kStepThreads / 32]);
  const ScanArgs a = stored->args;
  const int i = static_cast<int>(stored->first) + step;
  const int64_t pairs = (a.N + 1) / 2, number = static_cast<int64_t>(blockIdx.x) * kStepThreads + threadIdx.x;
  const int64_t q = number / pairs, row = 2 * (number - q * pairs), at = q * a.N + row;
  const Sequence where = sequence<kBackward>(a, q);
  const bool live = i >= where.begin && i < where.end;
  const int64_t offset = where.first + i * step_stride<kBackward>(a);
  const int64_t id = live && a.tokens ? *token_of(a, offset) : 0;
  float before[2] = {0, 0}, gate[2] = {0, 0}, argument[2] = {0, 0}, square = 0;
  Leak<true> leak[2];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    if (!live || row + m >= a.N) continue;
    const float input = !a.tokens ? a.x[offset + row + m] : id >= 0 && id < a.D ? a.table[id * a.N + row + m] : NAN;
    before[m] = product[at + m] + input;
    if (kBackward && a.gate) gate[m] = a.gate[offset + row + m];
    if (a.leak) leak[m] = {leak_of(a, row + m), (kBackward ? a.carried : state)[at + m]};
    argument[m] = argument_of<kBackward, kAnyActivation>(a, before[m], gate[m], leak[m], parameter_of(a, row + m));
  }
#pragma unroll
  for (int m = 0; m < 2; m++) {
    if (q >= a.sequences || row + m >= a.N) continue;
    float after = 0;
    if (live) {
      const float parameter = parameter_of(a, row + m);
      after = state_after<kBackward, kAnyActivation>(a, argument[m], gate[m], argument[1 - m], gate[1 - m], m == 1,
                                                     parameter, leak[m]);
      if constexpr (kBackward) {
        square = fmaf(before[m], before[m], square);
        if (a.sums) {  // launches follow one another, so that no other thread has this element
          const int64_t size = a.sequences * a.N;
          RunningSum total{a.sums[at + m], a.sums[size + at + m]};
          total.add(parameter_grad_as<kAnyActivation>(a.activation, before[m], gate[m], parameter));
          a.sums[at + m] = total.sum, a.sums[size + at + m] = total.error;
        }
        if (a.leak) a.carried[at + m] = is_cut<true>(a, q, i) ? 0.f : before[m];
      }
      if (a.pre) a.pre[offset + row + m] = before[m];
      if (a.out) a.out[offset + row + m] = after;
    }
    const float passed = live ? state_to_pass<kBackward>(a, q, row + m, i, after) : 0.f;
    if (a.precision != kBfloat16) state[at + m] = passed;
    else reinterpret_cast<uint16_t*>(state)[at + m] = static_cast<uint16_t>(to_bf16x2(passed, 0));
    if (a.end && i + 1 == a.chunk) a.end[at + m] = after;
  }
  if (!kBackward || !a.norms) return;
  const float sum = block_sum(square, squares);
  if (threadIdx.x == 0) a.norms[(a.T - 1 - i) * gridDim.x + blockIdx.x] = sum;
}

}  // namespace orthokern::cuda
