// The cross-entropy of a linear readout of modal states, and its gradient.
#include <math.h>

#include "cuda/modal_launch.h"

namespace orthokern::cuda {
namespace {

// A warp owns one row of logits; its lanes are neighbouring classes.
template <class X>
__global__ void __launch_bounds__(kModalThreads) modal_readout_kernel(ModalReadoutArgs a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kModalThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= a.T * a.B) return;
  X* const logits = static_cast<X*>(a.logits) + row * a.C;
  const bool padding = row / a.B >= living(a.lengths, a.T, a.start, row % a.B);
  const int64_t target = padding ? 0 : a.target[row];
  const bool known = target >= 0 && target < a.C;
  X largest = -INFINITY;
  int64_t place = a.C;  // of the first of the largest logits
  for (int64_t c = lane; c < a.C; c += 32)
    if (logits[c] > largest) largest = logits[c], place = c;
  for (int bits = 16; bits; bits /= 2) {
    const X other = __shfl_xor_sync(~0u, largest, bits);
    const int64_t there = __shfl_xor_sync(~0u, place, bits);
    if (other > largest || (other == largest && there < place)) largest = other, place = there;
  }
  X sum = 0;
  for (int64_t c = lane; c < a.C; c += 32) sum += exp(logits[c] - largest);
  for (int bits = 16; bits; bits /= 2) sum += __shfl_xor_sync(~0u, sum, bits);
  const double scale = a.count ? a.scale / *a.count : a.scale;
  const X log_sum = log(sum), of_target = known ? logits[target] - largest : X(NAN);
  __syncwarp();  // the target's logit is read before it is overwritten
  for (int64_t c = lane; c < a.C; c += 32) {
    const X gradient = exp(logits[c] - largest - log_sum) - (c == target ? X(1) : X(0));
    logits[c] = padding ? X(0) : known ? gradient * static_cast<X>(scale) : X(NAN);
  }
  if (lane) return;
  a.losses[row] = padding ? 0.0 : static_cast<double>(log_sum - of_target) * scale;
  a.right[row] = !padding && place == target;
}

}  // namespace

void modal_readout(const ModalReadoutArgs& args) {
  const DeviceGuard guard(args.device);
  const Launch at = over((args.T * args.B + kModalThreads / 32 - 1) / (kModalThreads / 32), args.stream);
  if (args.dtype == kFloat64) launch(modal_readout_kernel<double>, at, args);
  else launch(modal_readout_kernel<float>, at, args);
}

}  // namespace orthokern::cuda
