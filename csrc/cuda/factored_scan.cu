// factored_scan on CUDA: h_t = phi(U (s * (V^T h_{t-1})) + e_t), and its adjoint recurrence. scan.h describes the
// arguments, scan_low_rank.h, scan_resident.h and scan_cluster.h the computation of a step.
#include "cuda/scan_launch.h"

namespace orthokern::cuda {

ScanPlan plan_factored_scan(const ScanArgs& args, bool backward, const ScanOverrides& overrides) {
  return plan_scan<true>(args, backward, overrides);
}
void run_factored_scan(const ScanArgs& args, bool backward, const ScanPlan& plan, void* stream) {
  run_scan<true>(args, backward, plan, stream);
}

}  // namespace orthokern::cuda
