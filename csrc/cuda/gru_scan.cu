// gru_scan on CUDA: a gated recurrent unit and its adjoint recurrence. gru_scan.h describes the arguments,
// gru_resident.h and gru_step.h the computation of a step. This file has the choice between them and their launches.
#include "cuda/gru_resident.h"
#include "cuda/gru_step.h"
#include "cuda/scan_launch.h"

namespace orthokern::cuda {
namespace {

// Warps of the resident kernels: 16 units each. Three larger matrices do not fit into the registers.
int gru_warps(int64_t n) {
  for (int warps : {2, 4, 8})
    if (n <= 16 * warps) return warps;
  return 0;
}
int64_t gru_bytes(bool backward, int warps, int64_t group) {
  return GruMemory(backward, 16 * warps, static_cast<int>(group), 32 * warps).total;
}

template <class F>
void with_gru_kernel(bool backward, bool kanai, int warps, F f) {
  with_direction(kanai, [&](auto variant) {
    with_value<2, 4, 8>(warps, [&](auto c) {
      constexpr bool kKanai = decltype(variant)::value;
      constexpr int C = decltype(c)::value;
      if (backward) f(gru_resident_bwd_kernel<kKanai, C>);
      else f(gru_resident_fwd_kernel<kKanai, C>);
    });
  });
}

int64_t step_elements(const GruScanArgs& a) { return a.B * a.N; }

}  // namespace

GruPlan plan_gru_scan(const GruScanArgs& a, bool backward, const GruOverrides& overrides) {
  const DeviceGuard guard(a.device);
  const DeviceLimits limits = device_limits();
  GruPlan plan{};
  const int warps = gru_warps(a.N);
  if (warps && a.B <= INT_MAX - kLargestGroup && overrides.path != static_cast<int>(GruPath::kLibrary)) {
    // The fewest sequences per block that keep every multiprocessor busy, see plan_resident.
    auto fits = [&](int64_t group) {
      return gru_bytes(backward, warps, group) <= static_cast<int64_t>(limits.shared_per_block);
    };
    int64_t largest = overrides.group ? overrides.group : kLargestGroup;
    while (largest > 1 && !fits(largest)) largest--;
    const int64_t waves = std::max<int64_t>(1, divide_up(a.B, largest * limits.multiprocessors));
    const int64_t spread = std::max<int64_t>(1, divide_up(a.B, waves * limits.multiprocessors));
    const int64_t group = overrides.group ? largest : spread;
    plan.path = static_cast<int>(GruPath::kResident);
    plan.group = static_cast<int>(group);
    plan.blocks = plan.norm_columns = static_cast<int>(divide_up(a.B, group));
    plan.shared_bytes = gru_bytes(backward, warps, group);
    if (fits(group)) return plan;
  }
  if (overrides.path == static_cast<int>(GruPath::kResident))
    throw Error("the path that was asked for does not serve this size on this device");
  plan = {};
  plan.path = static_cast<int>(GruPath::kLibrary);
  plan.blocks = plan.norm_columns = step_blocks(step_elements(a));
  plan.work = backward ? step_elements(a) : 0;
  return plan;
}

void run_gru_scan(const GruScanArgs& a, bool backward, const GruPlan& plan, void* stream_address) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_address);
  if (!a.T || !a.B) return;
  const DeviceGuard guard(a.device);
  const int warps = gru_warps(a.N);
  const Launch at{dim3(static_cast<unsigned>(plan.blocks)), dim3(static_cast<unsigned>(32 * warps)), stream,
                  static_cast<size_t>(plan.shared_bytes)};
  with_gru_kernel(backward, a.kanai, warps, [&](auto kernel) { launch(kernel, at, a, plan.group); });
}

void store_gru(const GruScanArgs& args, void* stored, void* stream) { store_args(args, stored, stream); }
void run_gru_step(const StepArgs& a) {
  auto run = [&](auto kernel) { launch_step<GruScanArgs>(kernel, a, step_blocks(a.rows * a.N)); };
  switch (static_cast<GruStep>(a.part)) {
    case GruStep::kGates:
      return run(gru_step_kernel<GruStep::kGates>);
    case GruStep::kCandidate:
      return run(gru_step_kernel<GruStep::kCandidate>);
    case GruStep::kAll:
      return run(gru_step_kernel<GruStep::kAll>);
    case GruStep::kReset:
      return run(gru_step_kernel<GruStep::kReset>);
    case GruStep::kCarry:
      return run(gru_step_kernel<GruStep::kCarry>);
  }
  throw Error("gru_step has no part " + std::to_string(a.part));
}

}  // namespace orthokern::cuda
