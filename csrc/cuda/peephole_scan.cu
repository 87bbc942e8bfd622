// peephole_scan on CUDA: the pointwise part of a step with a library product. A thread has one unit of one sequence, in
// all steps. The names d_* are those of Note [Peephole scan backward] of the reference.
#include "cuda/peephole_scan.h"
#include "cuda/scan_step.h"

namespace orthokern::cuda {
namespace {

template <bool kBackward>
__global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    peephole_step_kernel(const Stored<PeepholeScanArgs>* stored, const float* product, float* passed, const int step) {
  const PeepholeScanArgs a = stored->args;
  const int64_t N = a.N, unit = static_cast<int64_t>(blockIdx.x) * kStepThreads + threadIdx.x, u = unit % N;
  if (unit >= a.B * N) return;
  const int64_t t = kBackward ? a.T - 1 - stored->first - step : stored->first + step, offset = t * a.B * N + unit;
  const int64_t of_row = 4 * (unit - u) + u, of_gates = 4 * (offset - u) + u;
  const float before = t ? a.cs[offset - a.B * N] : a.c0[unit];
  const float p_i = a.peephole[u], p_f = a.peephole[N + u], p_o = a.peephole[2 * N + u];
  float* const gates = a.gates + of_gates;
  if constexpr (!kBackward) {
    const float *x = a.x + of_gates, *sums = product + of_row;
    const float i = sigmoid(sums[0] + x[0] + p_i * before), f = sigmoid(sums[N] + x[N] + p_f * before);
    const float g = tanhf(sums[2 * N] + x[2 * N]), c = f * before + i * g;
    const float o = sigmoid(sums[3 * N] + x[3 * N] + p_o * c);
    gates[0] = i, gates[N] = f, gates[2 * N] = g, gates[3 * N] = o;
    a.cs[offset] = c;
    a.hs[offset] = passed[unit] = o * tanhf(c);
  } else {
    const float i = gates[0], f = gates[N], g = gates[2 * N], o = gates[3 * N], shown = tanhf(a.cs[offset]);
    const float dh = product[unit] + (a.grad_hs ? a.grad_hs[offset] : 0.f), d_o = dh * shown * (o * (1.f - o));
    const float dc =
        a.grad_c0[unit] + (a.grad_cs ? a.grad_cs[offset] : 0.f) + dh * o * (1.f - shown * shown) + d_o * p_o;
    const float d_i = dc * g * (i * (1.f - i)), d_f = dc * before * (f * (1.f - f)), d_g = dc * i * (1.f - g * g);
    a.grad_c0[unit] = dc * f + d_i * p_i + d_f * p_f;
    float *const grad_x = a.grad_x + of_gates, *const to = passed + of_row;
    grad_x[0] = to[0] = d_i, grad_x[N] = to[N] = d_f;
    grad_x[2 * N] = to[2 * N] = d_g, grad_x[3 * N] = to[3 * N] = d_o;
  }
}

}  // namespace

void store_peephole(const PeepholeScanArgs& args, void* stored, void* stream) { store_args(args, stored, stream); }
void run_peephole_step(const StepArgs& a) {
  const auto kernel = a.part ? peephole_step_kernel<true> : peephole_step_kernel<false>;
  launch_step<PeepholeScanArgs>(kernel, a, step_blocks(a.rows * a.N));
}

}  // namespace orthokern::cuda
