// The forward of scan.h with threads that share the columns of every product (team.h).
#pragma once

#include "cpu/scan_rows.h"
#include "cpu/team.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T>
struct ScanTeam {
  Team team;
  const ScanPlan<T>* plan;
  Scratch<T> state[2], z;  // [N/L][B][L], by the parity of the step; [K/L][B][L]
};

// plan.threads is the number of rows where that is smaller.
inline bool team_serves(const ScanArgs& args) {
  const bool plain = args.R == 1 && !args.lengths && !args.resets && !args.checkpoint_every;
  const int64_t bytes = (args.K ? args.K : args.N) * args.N * (args.dtype == kFloat64 ? 8 : 4);
  return plain && share_columns(args.B, args.threads, bytes);
}

// Whether a phase is the first product of a factored map.
template <class T>
bool first_product(const ScanPlan<T>& plan, int64_t phase) {
  return plan.factored && phase % 2 == 0;
}

// Panels [from, to) of a phase, by a thread with rows of its own: they hold the input of the step.
template <class T, class A>
void team_panels(ScanTeam<T>& call, ScanRows<T>& rows, int64_t phase, int from, int to) {
  const ScanPlan<T>& plan = *call.plan;
  const ScanArgs& args = *plan.args;
  const int per_step = plan.factored ? 2 : 1;
  const int64_t t = phase / per_step, N = plan.N;
  T *state = call.state[t % 2], *out = call.state[1 - t % 2];
  Transfers<T> none;
  if (first_product(plan, phase)) {
    const Segment<T> all = rows.factor(state, rows.block, rows.R, plan.N, rows.paired);
    multiply<T>(&all, 1, plan.first, rows.R, call.z, rows.block, &none, [](int, int) {}, from, to);
    return;
  }
  const bool has_e = rows.read_input(t, &none);
  const int64_t at = t * plan.B * N;
  T* pre = args.pre ? static_cast<T*>(args.pre) + at : nullptr;
  const Segment<T> segments[2] = {
      rows.factor(plan.factored ? call.z : state, rows.block, rows.R, plan.factored ? plan.K : plan.N, rows.paired),
      rows.factor(rows.x, rows.block, rows.R, plan.X, rows.paired_x)};
  multiply<T>(
      segments, plan.X ? 2 : 1, plan.second, rows.R, out, rows.block, &none,
      [&](int first, int last) {
        rows.template activate_blocks<A>(first, last, rows.R, has_e, out, static_cast<T*>(args.hs) + at, pre, false);
      },
      from, to);
}

template <class T>
void team_task(void* context, int task) {
  ScanTeam<T>& call = *static_cast<ScanTeam<T>*>(context);
  const FlushDenormals flush;
  const TileRelease release(call.plan->tiles);
  ScanRows<T> rows(*call.plan, 0, call.plan->B);
  if (!rows.allocate()) return call.team.fail();
  visit_activation(call.plan->args->activation, [&](auto a) {
    call.team.run(task, call.plan->args->T * (call.plan->factored ? 2 : 1), [&](int64_t phase, int part) {
      const Packed<T>& weights = first_product(*call.plan, phase) ? call.plan->first : call.plan->second;
      call.team.each_panel(weights.panel_count(), part,
                           [&](int from, int to) { team_panels<T, decltype(a)>(call, rows, phase, from, to); });
    });
  });
}

template <class T>
bool team_forward(ScanPlan<T>* plan, const ScanArgs& args) {
  plan->stream = false;
  ScanTeam<T> call = {};
  call.plan = plan;
  call.team.start(args.threads);
  const size_t n = static_cast<size_t>(round_up(plan->N, 2 * kLanes<T>)) * plan->B;
  if (!call.state[0].allocate(n) || !call.state[1].allocate(n) ||
      !call.z.allocate(static_cast<size_t>(round_up(plan->K, 2 * kLanes<T>)) * plan->B))
    return false;
  ScanRows<T> rows(*plan, 0, plan->B);
  rows.read_rows(static_cast<const T*>(args.h0), plan->N, plan->B, plan->N, call.state[0], rows.block);
  parallel_run(call.team.threads, team_task<T>, &call);
  return !call.team.failed;
}

}  // namespace orthokern::ORTHOKERN_ISA
