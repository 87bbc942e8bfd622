// Threads and memory for the CPU kernels: defined once, in select.cpp, for all instruction sets.
#pragma once

#include <stddef.h>

namespace orthokern {

// Runs fn(context, 0) ... fn(context, tasks - 1), each on a thread of its own as far as the pool gives them, and returns when all are done.
// What a task computes depends on its index only, never on the thread that happened to run it.
void parallel_run(int tasks, void (*fn)(void* context, int task), void* context);

// Runs fn(context, i, members) once for every i in [0, members), all at the same time, each on a thread of its own: they may wait for each other.
// The pool decides how many there are, at most `most`.
void parallel_team(int most, void (*fn)(void* context, int index, int members), void* context);
// Sleeps until *word is no longer `value`, or for no reason at all; wakes those who sleep on it.
void sleep_on(int* word, int value);
void wake_sleepers(int* word);

// Where the members of a team wait for each other, many times in a row. They spin for a few microseconds, then sleep: on a machine that has
// other work, the member that is waited for may need this very core. Their writes before it are seen by all after it.
class SpinBarrier {
 public:
  void wait(int members) {
    const int now = __atomic_load_n(&phase_, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == members) {
      __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&phase_, now + 1, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST)) wake_sleepers(&phase_);
      return;
    }
    for (int spins = 0; __atomic_load_n(&phase_, __ATOMIC_ACQUIRE) == now; spins++) {
      if (spins >= kSpins) {
        __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
        sleep_on(&phase_, now);
        __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_RELAXED);
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

 private:
  static constexpr int kSpins = 200;
  alignas(64) int arrived_ = 0;
  alignas(64) int phase_ = 0;
  int sleepers_ = 0;
};

// Uninitialised memory, from what earlier calls used where that fits (buffer.h): null if there is none. For kLargeScratch / 2 bytes and more.
constexpr size_t kLargeScratch = 2 << 20;
void* large_scratch(size_t* bytes);  // *bytes becomes what was really given
void free_large_scratch(void* memory, size_t bytes);

}  // namespace orthokern
