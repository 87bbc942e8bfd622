// peephole_scan, the LSTM with peepholes, on the CPU: the equations are in the docstring of
// orthokern/ops/peephole_scan.py. gated.h describes the loops over rows and steps.
//
//   forward    i <- epilogue of h W_i^T    f, f*c' <- of h W_f^T    g, c <- of h W_g^T    o, h <- of h W_o^T
//   backward   dh, dc and d_i, d_f, d_g, d_o of step t - 1  <- epilogue of [d_i d_f d_g d_o] W of step t
//
// Gradients of peepholes are summed over the rows of a step in the working precision, and over steps in float64. Cost
// per step and sequence: 8 N^2 flops each way.
#include "cpu/peephole_backward.h"
#include "cpu/peephole_forward.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
bool run(const PeepholeArgs& args, bool backward) {
  GatedPlan<T> plan;
  Scratch<T> peephole;  // [3][round_up(N)]
  const size_t size = kPeepholes * static_cast<size_t>(round_up(args.N, kLanes<T>));
  if (!plan.start(args, 4, backward, false, backward ? size : 0) || !peephole.allocate(size)) return false;
  for (int k = 0; k < kPeepholes; k++)
    memcpy(peephole + k * plan.padded(), static_cast<const T*>(args.peephole) + k * plan.N, plan.N * sizeof(T));
  const bool ok = plan.each([&](int row0, int R, double* sums) {
    if (backward) return PeepholeBackward<T>{plan, args, peephole, sums, {plan, args, row0, R}}.run();
    return PeepholeForward<T>{plan, args, peephole, {plan, args, row0, R}}.run();
  });
  if (!ok || !backward) return ok;
  T* to = static_cast<T*>(args.grad_peephole);
  for (int k = 0; k < kPeepholes; k++)
    for (int n = 0; n < plan.N; n++)
      to[k * plan.N + n] =
          static_cast<T>(task_total(plan.threads, [&](int i) { return plan.sums + i * size; }, k * plan.padded() + n));
  return true;
}

}  // namespace

bool peephole_scan_fwd(const PeepholeArgs& args) {
  return args.dtype == kFloat64 ? run<double>(args, false) : run<float>(args, false);
}
bool peephole_scan_bwd(const PeepholeArgs& args) {
  return args.dtype == kFloat64 ? run<double>(args, true) : run<float>(args, true);
}

}  // namespace orthokern::ORTHOKERN_ISA
