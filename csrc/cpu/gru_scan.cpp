// gru_scan on the CPU: the equations are in orthokern/ops/gru_scan.py, those of the backward in Note [GRU scan
// backward] of the reference. gated.h describes the loops over rows and steps. The backward also writes the factor of
// the gradient of W_n that is neither a result nor an input.
//
//   forward
//     kanai   r, m = r*h  <- epilogue of h W_r^T      z <- epilogue of h W_z^T      n, h <- epilogue of m W_n^T
//     torch   r, z        <- epilogues of h W_r^T, h W_z^T                          q, n, h <- epilogue of h W_n^T
//   backward, from the last step
//     kanai   d_r <- epilogue of d_n W_n              ghat, d_z, d_n of t-1      <- epilogue of [d_r d_z] [W_r; W_z]
//     torch                                           d_r, d_z, d_q, d_n of t-1  <- epilogue of [d_r d_z d_q] W
//
// Cost per step and sequence: 6 N^2 flops each way. Traffic: see the op.
#include "cpu/gru_backward.h"
#include "cpu/gru_direct.h"
#include "cpu/gru_forward.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T, bool KANAI>
bool forward(const GruArgs& args) {
  if (args.T * args.B <= kDirectRows && !args.lengths && !args.resets) return DirectGru<T, KANAI>{args}.run();
  GatedPlan<T> plan;
  Scratch<T> bias;  // [3][round_up(N)]
  if (!plan.start(args, 3, false, false, 0) || !bias.allocate(3 * static_cast<size_t>(plan.padded()))) return false;
  for (int g = 0; args.bias && g < 3; g++)
    memcpy(bias + g * plan.padded(), static_cast<const T*>(args.bias) + g * plan.N, plan.N * sizeof(T));
  return plan.each(
      [&](int row0, int R, double*) { return GruForward<T, KANAI>{plan, args, bias, {plan, args, row0, R}}.run(); });
}

template <class T, bool KANAI>
bool backward(const GruArgs& args) {
  GatedPlan<T> plan;
  if (!plan.start(args, 3, true, KANAI, args.T)) return false;
  if (!plan.each([&](int row0, int R, double* norms) {
        return GruBackward<T, KANAI>{plan, args, norms, {plan, args, row0, R}}.run();
      }))
    return false;
  write_norms(plan.threads, args.T, [&](int i) { return plan.sums + i * args.T; }, static_cast<T*>(args.grad_norm));
  return true;
}

}  // namespace

bool gru_scan_fwd(const GruArgs& args) {
  if (args.dtype == kFloat64) return args.kanai ? forward<double, true>(args) : forward<double, false>(args);
  return args.kanai ? forward<float, true>(args) : forward<float, false>(args);
}
bool gru_scan_bwd(const GruArgs& args) {
  if (args.dtype == kFloat64) return args.kanai ? backward<double, true>(args) : backward<double, false>(args);
  return args.kanai ? backward<float, true>(args) : backward<float, false>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
