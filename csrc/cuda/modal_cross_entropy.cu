// The cross-entropy of rows of logits, its gradient in their place, and whether the largest one is the target's: a warp
// owns a row, its lanes every 32nd class. Part of modal_cross_entropy, whose other kernels are those of modal_scan.cu.
//
// Limit: memory bandwidth, with few classes the instructions of a row. A row is read three times (largest, sum of
// exponentials, gradient), the second and third time from a cache, and written once.
#include "cuda/modal_units.h"

namespace orthokern::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAll = ~0u;

template <class T>
__global__ void __launch_bounds__(kThreads) modal_loss_kernel(ModalLossArgs a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= a.T * a.B) return;  // whole warps
  T* const logits = static_cast<T*>(a.logits) + row * a.C;
  const T* const bias = static_cast<const T*>(a.bias);
  if (row / a.B >= steps_of(a.lengths, row % a.B, a.first, a.T)) {
    for (int64_t c = lane; a.grad && c < a.C; c += 32) logits[c] = 0;
    if (lane == 0) a.loss[row] = 0, a.right[row] = 0;
    return;
  }
  const auto logit = [&](int64_t c) { return bias ? logits[c] + bias[c] : logits[c]; };
  const int64_t target = load_id(a.target, a.target_bytes, row);
  const double wrong = target >= 0 && target < a.C ? 0 : not_a_number();

  T top = -static_cast<T>(__builtin_inf());
  int64_t best = a.C;  // the first of equal ones
  for (int64_t c = lane; c < a.C; c += 32) {
    const T value = logit(c);
    if (value > top || best == a.C) top = value, best = c;
  }
#pragma unroll
  for (int bits = 16; bits; bits /= 2) {
    const T other = __shfl_xor_sync(kAll, top, bits);
    const int64_t at = __shfl_xor_sync(kAll, best, bits);
    if (other > top || (other == top && at < best)) top = other, best = at;
  }
  T rest = 0;  // the other classes: a small loss keeps its digits in 1 + rest
  for (int64_t c = lane; c < a.C; c += 32)
    if (c != best) rest += exp(logit(c) - top);
#pragma unroll
  for (int bits = 16; bits; bits /= 2) rest += __shfl_xor_sync(kAll, rest, bits);
  if (lane == 0) {
    const T hit = wrong == 0 ? logit(target) : top;
    a.loss[row] = static_cast<double>(top - hit) + log1p(static_cast<double>(rest)) + wrong;
    a.right[row] = best == target;
  }
  __syncwarp();  // the target's logit has been read
  if (!a.grad) return;
  const T scale = static_cast<T>(*a.scale + wrong), share = scale / (1 + rest);
  for (int64_t c = lane; c < a.C; c += 32) logits[c] = exp(logit(c) - top) * share - (c == target ? scale : T(0));
}

}  // namespace

void modal_loss(const ModalLossArgs& args) {
  const DeviceGuard guard(args.device);
  launch(args.dtype == kFloat64 ? modal_loss_kernel<double> : modal_loss_kernel<float>,
         {blocks_for(args.T * args.B, kThreads / 32), dim3(kThreads), static_cast<cudaStream_t>(args.stream)}, args);
}

}  // namespace orthokern::cuda
