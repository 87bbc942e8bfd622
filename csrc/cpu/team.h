// Threads that share the columns of every product of a scan, for batches with fewer rows than there are threads and
// large weights. One sequence at N = 1000 is bound by the 4 MB of weights that a product reads, of which each core then
// reads its part, from its own cache if the part fits there.
//
// A product is a phase, or several products that do not depend on each other. A phase is divided into as many parts as
// there are threads. A thread first takes the part with its own number, whose weights are in its cache, and then any
// part that no thread has taken. So a phase ends even if some threads have not started, and no thread waits for one
// that does not run. An element of a result is the same chain of multiply-adds on every thread.
//
// A thread that is preempted within its part delays the others until the scheduler returns to it, and where other
// processes use the cores that may happen in every step. So the first thread that waits much longer than its own part
// took computes the rest alone, and the others leave.
#pragma once

#include <sched.h>
#include <time.h>

#include "cpu/simd.h"

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

// Whether threads share the columns of products of `rows` rows, each with weights of `bytes`.
inline bool share_columns(int64_t rows, int threads, int64_t bytes) { return rows < threads && bytes >= kTeamBytes; }

struct Team {
  int threads;
  bool failed;
  struct alignas(64) Counter {
    int64_t value;
  };
  Counter taken[kTeamMost];  // the next phase in which a part is to be taken
  Counter done;              // parts computed, of all phases
  int alone;                 // the thread that computes the rest alone, counted from 1; 0 while there is none

  void start(int available) { threads = available < kTeamMost ? available : kTeamMost; }
  // compute(from, to): the panels of a part, if it has any, of `panels`.
  template <class F>
  void each_panel(int panels, int part, const F& compute) const {
    const int from = panels * part / threads, to = panels * (part + 1) / threads;
    if (from < to) compute(from, to);
  }
  void fail() { __atomic_store_n(&failed, true, __ATOMIC_RELAXED); }
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
  // The share of thread `task`: compute(phase, part) for the parts that it takes. A thread that cannot take part, for
  // want of memory, calls fail() instead, and the others take its parts.
  template <class F>
  void run(int task, int64_t phases, const F& compute) {
    int64_t part_time = 0;
    for (int64_t phase = 0; phase < phases && !superfluous(task); phase++) {
      wait(phase, task, part_time);
      for (int i = 0; i < threads; i++) {
        const int part = (task + i) % threads;
        if (!take(part, phase)) continue;
        const int64_t start = team_clock();
        compute(phase, part);
        part_time = team_clock() - start;
        __atomic_fetch_add(&done.value, 1, __ATOMIC_ACQ_REL);
      }
    }
  }
};

}  // namespace orthokern::ORTHOKERN_ISA
