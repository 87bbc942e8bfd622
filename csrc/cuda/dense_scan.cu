// dense_scan on CUDA: h_t = phi(W h_{t-1} + e_t), and its adjoint recurrence. scan.h describes the arguments,
// scan_resident.h and scan_cluster.h the computation of a step. This file also has the end of a step of both scans with
// library products.
#include "cuda/scan_carry.h"
#include "cuda/scan_launch.h"

namespace orthokern::cuda {

ScanPlan plan_dense_scan(const ScanArgs& args, bool backward, const ScanOverrides& overrides) {
  return plan_scan<false>(args, backward, overrides);
}
void run_dense_scan(const ScanArgs& args, bool backward, const ScanPlan& plan, void* stream) {
  run_scan<false>(args, backward, plan, stream);
}
void store_scan(const ScanArgs& args, void* stored, void* stream) { store_args(args, stored, stream); }
void run_scan_step(const StepArgs& a) {
  with_direction(a.part != 0, [&](auto direction) {
    launch_step<ScanArgs>(scan_step_kernel<decltype(direction)::value>, a, scan_step_blocks(a.rows, a.N));
  });
}
void run_scan_carry(const ScanCarryArgs& a) {
  const DeviceGuard guard(a.device);
  const cudaStream_t stream = static_cast<cudaStream_t>(a.stream);
  const dim3 blocks(static_cast<unsigned>(a.B));
  const int count = static_cast<int>(a.count), B = static_cast<int>(a.B), N = static_cast<int>(a.N);
  launch(scan_carry_kernel, {blocks, dim3(kCarryThreads), stream}, a.power, a.ends, a.starts, count, B, N);
}

}  // namespace orthokern::cuda
