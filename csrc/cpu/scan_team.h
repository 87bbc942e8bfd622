// The forward of scan.h where the batch has fewer rows than there are threads and the weights are large: all threads
// share the columns of every product. One sequence at N = 1000 is bound by the 4 MB of weights that a step reads, of
// which each core then reads its part, from its own cache if the part fits there.
//
// A product is a phase, divided into as many parts as there are threads. A thread first takes the part with its own
// number, whose weights are in its cache, and then any part that no thread has taken. So a phase ends even if some
// threads have not started, and no thread waits for one that does not run. An element of a result is the same chain of
// multiply-adds on every thread.
//
// A thread that is preempted within its part delays the others until the scheduler returns to it, and where other
// processes use the cores that may happen in every step. So the first thread that waits much longer than its own part
// took computes the rest alone, and the others leave.
#pragma once

#include <sched.h>
#include <time.h>

#include "cpu/scan_rows.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int64_t kTeamBytes = 256 << 10;   // least size of one product's weights
constexpr int kTeamMost = 64;               // threads
constexpr int kTeamSpins = 2000;            // reads of the counter before sched_yield
constexpr int64_t kTeamPatience = 8;        // a thread waits this many times as long as its own part took, and at least
constexpr int64_t kTeamLeastWait = 500000;  // ns

inline int64_t team_clock() {  // ns
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

template <class T>
struct Team {
  const ScanPlan<T>* plan;
  int threads;
  Scratch<T> state[2], z;  // [N/L][B][L], by the parity of the step; [K/L][B][L]
  bool failed;
  struct alignas(64) Counter {
    int64_t value;
  };
  Counter taken[kTeamMost];  // the next phase in which a part is to be taken
  Counter done;              // parts computed, of all phases
  int alone;                 // the thread that computes the rest alone, counted from 1; 0 while there is none

  bool take(int part, int64_t phase) {
    int64_t expected = phase;
    return __atomic_compare_exchange_n(&taken[part].value, &expected, phase + 1, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
  }
  // Waits until all parts of earlier phases are computed. part_time: ns that this thread's last part took.
  void wait(int64_t phase, int task, int64_t part_time) {
    int64_t since = 0;
    for (int spins = 0; __atomic_load_n(&done.value, __ATOMIC_ACQUIRE) < phase * threads; spins++) {
      if (spins < kTeamSpins) continue;
      if (!since) since = team_clock();
      sched_yield();
      const int64_t waited = team_clock() - since;
      int nobody = 0;
      if (waited > kTeamLeastWait && waited > kTeamPatience * part_time)
        __atomic_compare_exchange_n(&alone, &nobody, task + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
  }
  // Whether another thread computes the rest. It has tried all parts of the phases that it has passed, so those that
  // are not computed yet have been taken, and their threads leave only after them.
  bool superfluous(int task) {
    const int who = __atomic_load_n(&alone, __ATOMIC_RELAXED);
    return who && who != task + 1;
  }
};

// Whether the threads share the columns: plan.threads is the number of rows where that is smaller.
inline bool team_serves(const ScanArgs& args) {
  const int64_t bytes = (args.K ? args.K : args.N) * args.N * (args.dtype == kFloat64 ? 8 : 4);
  const bool plain = args.R == 1 && !args.lengths && !args.resets && !args.checkpoint_every;
  return plain && args.B < args.threads && bytes >= kTeamBytes;
}

// Part `part` of a phase, by a thread with rows of its own: they hold the input of the step.
template <class T, class A>
void team_part(Team<T>& team, ScanRows<T>& rows, int64_t phase, int part) {
  const ScanPlan<T>& plan = *team.plan;
  const ScanArgs& args = *plan.args;
  const int per_step = plan.factored ? 2 : 1;
  const int64_t t = phase / per_step, N = plan.N;
  T *state = team.state[t % 2], *out = team.state[1 - t % 2];
  const Packed<T>& weights = phase % per_step == 0 && plan.factored ? plan.first : plan.second;
  const int panels = weights.panel_count();
  const int from = panels * part / team.threads, to = panels * (part + 1) / team.threads;
  if (from == to) return;
  Transfers<T> none;
  if (&weights == &plan.first) {
    const Segment<T> all = rows.factor(state, rows.block, rows.R, plan.N, rows.paired);
    multiply<T>(&all, 1, weights, rows.R, team.z, rows.block, &none, [](int, int) {}, from, to);
    return;
  }
  const bool has_e = rows.read_input(t, &none);
  const int64_t at = t * plan.B * N;
  T* pre = args.pre ? static_cast<T*>(args.pre) + at : nullptr;
  const Segment<T> segments[2] = {
      rows.factor(plan.factored ? team.z : state, rows.block, rows.R, plan.factored ? plan.K : plan.N, rows.paired),
      rows.factor(rows.x, rows.block, rows.R, plan.X, rows.paired_x)};
  multiply<T>(
      segments, plan.X ? 2 : 1, weights, rows.R, out, rows.block, &none,
      [&](int first, int last) {
        rows.template activate_blocks<A>(first, last, rows.R, has_e, out, static_cast<T*>(args.hs) + at, pre, false);
      },
      from, to);
}

template <class T>
void team_task(void* context, int task) {
  Team<T>& team = *static_cast<Team<T>*>(context);
  const FlushDenormals flush;
  const TileRelease release(team.plan->tiles);
  ScanRows<T> rows(*team.plan, 0, team.plan->B);
  if (!rows.allocate()) {
    __atomic_store_n(&team.failed, true, __ATOMIC_RELAXED);
    return;  // the other threads take its parts
  }
  const int64_t phases = team.plan->args->T * (team.plan->factored ? 2 : 1);
  visit_activation(team.plan->args->activation, [&](auto a) {
    int64_t part_time = 0;
    for (int64_t phase = 0; phase < phases && !team.superfluous(task); phase++) {
      team.wait(phase, task, part_time);
      for (int i = 0; i < team.threads; i++) {
        const int part = (task + i) % team.threads;
        if (!team.take(part, phase)) continue;
        const int64_t start = team_clock();
        team_part<T, decltype(a)>(team, rows, phase, part);
        part_time = team_clock() - start;
        __atomic_fetch_add(&team.done.value, 1, __ATOMIC_ACQ_REL);
      }
    }
  });
}

template <class T>
bool team_forward(ScanPlan<T>* plan, const ScanArgs& args) {
  plan->stream = false;
  Team<T> team = {};
  team.plan = plan;
  team.threads = args.threads < kTeamMost ? args.threads : kTeamMost;
  const size_t n = static_cast<size_t>(round_up(plan->N, 2 * kLanes<T>)) * plan->B;
  if (!team.state[0].allocate(n) || !team.state[1].allocate(n) ||
      !team.z.allocate(static_cast<size_t>(round_up(plan->K, 2 * kLanes<T>)) * plan->B))
    return false;
  ScanRows<T> rows(*plan, 0, plan->B);
  rows.read_rows(static_cast<const T*>(args.h0), plan->N, plan->B, plan->N, team.state[0], rows.block);
  parallel_run(team.threads, team_task<T>, &team);
  return !team.failed;
}

}  // namespace orthokern::ORTHOKERN_ISA
