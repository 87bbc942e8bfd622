// gru_scan on CUDA: a gated recurrent unit and its adjoint recurrence. gru_scan.h says what a caller passes,
// gru_resident.h and gru_steps.h how a step is carried out; here: the choice between them and their launches.
#include "cuda/gru_resident.h"
#include "cuda/gru_steps.h"
#include "cuda/scan_launch.h"

namespace orthokern::cuda {
namespace {

// Warps of the resident kernels: 16 units each. Three matrices of more do not fit into the registers.
int gru_warps(int64_t n) {
  for (int warps : {2, 4, 8})
    if (n <= 16 * warps) return warps;
  return 0;
}
int64_t gru_bytes(bool backward, int warps, int64_t group) {
  return GruMemory(backward, 16 * warps, static_cast<int>(group), 32 * warps).total;
}

int64_t gru_models(const GruScanArgs& a) { return a.B ? a.B / a.of_model : 1; }

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

// A kernel of step t, on the stream or into a graph; `direction` is that of the loop.
template <bool kKanai, GruStep kStep, class To>
void put_gru_step(const To& to, const GruScanArgs& a, const GruProduct& p, int64_t t, int direction) {
  const dim3 grid(static_cast<unsigned>(step_tiles(p.rows, a.B)));
  to(gru_step_kernel<kKanai, kStep>, {grid, dim3(kStepThreads)}, a, p,
     StepIndex{to.base, static_cast<int>(t), direction});
}

template <bool kKanai>
StepLoop gru_loop(const GruScanArgs& a, const GruPlan& plan, cudaStream_t stream, bool backward) {
  int* const base = reinterpret_cast<int*>(a.work + a.B * a.N);
  return {a.device, stream, 4 + 2 * kKanai + backward, plan.graph_steps, base, 0, a.T};
}

template <bool kKanai>
void gru_steps_forward(const GruScanArgs& a, const GruPlan& plan, cudaStream_t stream) {
  const int N = static_cast<int>(a.N);
  const int64_t stride = a.B * a.N;
  auto step = [&](const auto& to, int64_t t) {
    const GruColumns none = {nullptr, 0, 0, 0}, m = {a.work, N, N, 0};
    const GruColumns h = t ? GruColumns{a.hs + (t - 1) * stride, N, N, stride} : GruColumns{a.h0, N, N, 0};
    if constexpr (kKanai) {
      put_gru_step<kKanai, GruStep::kGates>(to, a, {{h, none}, a.w, N, 1, 2 * N}, t, 1);
      put_gru_step<kKanai, GruStep::kCandidate>(to, a, {{m, none}, a.w + 2 * a.N * a.N, N, 1, N}, t, 1);
    } else {
      put_gru_step<kKanai, GruStep::kAll>(to, a, {{h, none}, a.w, N, 1, N}, t, 1);
    }
  };
  step(OntoStream{stream}, 0);  // its state lies elsewhere
  StepLoop loop = gru_loop<kKanai>(a, plan, stream, false);
  loop.first = 1;
  run_step_loop(loop, step);
}

template <bool kKanai>
void gru_steps_backward(const GruScanArgs& a, const GruPlan& plan, cudaStream_t stream) {
  const int N = static_cast<int>(a.N);
  const int64_t stride = a.B * a.N;
  const GruColumns none = {nullptr, 0, 0, 0};
  fill_zero(a.work, static_cast<size_t>(stride) * sizeof(float), stream);
  put_gru_step<kKanai, GruStep::kCarry>(OntoStream{stream}, a, {{none, none}, a.w, 1, N, N}, a.T, -1);
  run_step_loop(gru_loop<kKanai>(a, plan, stream, true), [&](const auto& to, int64_t i) {
    const int64_t t = a.T - 1 - i;
    const float* const grad_x = a.grad_x + 3 * t * stride;
    const GruColumns rz = {grad_x, 3 * a.N, 2 * N, -3 * stride};
    GruColumns q = none;
    if constexpr (kKanai) {
      const GruColumns n = {grad_x + 2 * N, 3 * a.N, N, -3 * stride};
      put_gru_step<kKanai, GruStep::kReset>(to, a, {{n, none}, a.w + 2 * a.N * a.N, 1, N, N}, t, -1);
    } else {
      q = {a.factor + t * stride, N, N, -stride};
    }
    put_gru_step<kKanai, GruStep::kCarry>(to, a, {{rz, q}, a.w, 1, N, N}, t, -1);
  });
}

}  // namespace

GruPlan plan_gru_scan(const GruScanArgs& a, bool backward, const GruOverrides& overrides) {
  const DeviceGuard guard(a.device);
  const DeviceLimits limits = device_limits();
  GruPlan plan{};
  const int warps = gru_warps(a.N);
  const int64_t models = gru_models(a);
  if (warps && models <= 65535 && a.B <= INT_MAX - kLargestGroup &&
      overrides.path != static_cast<int>(GruPath::kSteps)) {
    // As few sequences a block as keep every multiprocessor busy, see plan_resident.
    auto fits = [&](int64_t group) {
      return gru_bytes(backward, warps, group) <= static_cast<int64_t>(limits.shared_per_block);
    };
    int64_t largest = overrides.group ? overrides.group : kLargestGroup;
    while (largest > 1 && !fits(largest)) largest--;
    const int64_t waves = std::max<int64_t>(1, divide_up(a.B, largest * limits.multiprocessors));
    const int64_t of_model = std::max<int64_t>(1, a.of_model);
    const int64_t spread = std::clamp<int64_t>(divide_up(a.B, waves * limits.multiprocessors), 1, of_model);
    const int64_t group = overrides.group ? largest : spread;
    plan.path = static_cast<int>(GruPath::kResident);
    plan.group = static_cast<int>(group);
    plan.blocks = plan.norm_columns = static_cast<int>(models * divide_up(a.of_model, group));
    plan.shared_bytes = gru_bytes(backward, warps, group);
    if (fits(group)) return plan;
  }
  if (overrides.path == static_cast<int>(GruPath::kResident))
    throw Error("the path that was asked for does not serve this size on this device");
  if (models > 1) throw Error("so many models of this size are not served by one launch");
  plan = {};
  plan.path = static_cast<int>(GruPath::kSteps);
  plan.group = kTile;
  plan.blocks = plan.norm_columns = step_tiles(a.N, a.B);
  plan.work = a.B * a.N + 1;
  plan.graph_steps = graph_steps_of(overrides.graph_steps);
  return plan;
}

void run_gru_scan(const GruScanArgs& a, bool backward, const GruPlan& plan, void* stream_address) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_address);
  if (!a.T || !a.B) return;
  const DeviceGuard guard(a.device);
  if (a.lengths) {
    const unsigned blocks = static_cast<unsigned>(divide_up(a.T * a.B, kPaddingThreads / 32));
    launch(clear_gru_padding_kernel, {dim3(blocks), dim3(kPaddingThreads), stream}, a, backward ? a.grad_x : a.gates,
           backward ? a.factor : a.hs, backward ? nullptr : a.pre);
  }
  if (plan.path == static_cast<int>(GruPath::kResident)) {
    const int warps = gru_warps(a.N);
    const unsigned models = static_cast<unsigned>(gru_models(a));
    const Launch at{dim3(plan.blocks / models, models), dim3(static_cast<unsigned>(32 * warps)), stream,
                    static_cast<size_t>(plan.shared_bytes)};
    with_gru_kernel(backward, a.kanai, warps, [&](auto kernel) { launch(kernel, at, a, plan.group); });
    return;
  }
  with_direction(a.kanai, [&](auto variant) {
    if (backward) gru_steps_backward<decltype(variant)::value>(a, plan, stream);
    else gru_steps_forward<decltype(variant)::value>(a, plan, stream);
  });
}

}  // namespace orthokern::cuda
