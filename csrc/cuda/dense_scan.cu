// dense_scan on CUDA: h_t = phi(W h_{t-1} + e_t), and its adjoint recurrence. scan.h says what a caller passes,
// scan_resident.h, scan_cluster.h and scan_steps.h how a step is carried out.
#include "cuda/scan_launch.h"

namespace orthokern {
namespace cuda {

ScanPlan plan_dense_scan(const ScanArgs& args, bool backward, const ScanWish& wish) { return plan_scan<false>(args, backward, wish); }
void run_dense_scan(const ScanArgs& args, bool backward, const ScanPlan& plan, void* stream) {
  run_scan<false>(args, backward, plan, stream);
}

}  // namespace cuda
}  // namespace orthokern
