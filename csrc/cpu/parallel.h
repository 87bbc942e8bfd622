// Threads and memory for the CPU kernels: defined once, in select.cpp, for all instruction sets.
#pragma once

#include <stddef.h>

namespace orthokern {

// Runs fn(context, 0) ... fn(context, tasks - 1) on the threads of the pool, and returns when all are done. What a task
// computes depends on its index only, not on the thread that runs it.
void parallel_run(int tasks, void (*fn)(void* context, int task), void* context);

// Uninitialized memory, if possible a block that earlier calls used (buffer.h); null if memory ran out. For
// kLargeScratch / 2 bytes and more.
constexpr size_t kLargeScratch = 2 << 20;
void* large_scratch(size_t* bytes);  // *bytes becomes the allocated size
void free_large_scratch(void* memory, size_t bytes);

// Gives each of plan->threads tasks about the same number of steps, summed over its rows of the batch: task i gets the
// rows [begin[i], begin[i + 1]). A task may get no rows, where neighbouring sequences have very different lengths.
template <class Plan>
bool share_rows(Plan* plan) {
  const int64_t tasks = plan->threads;
  if (!plan->begin.allocate(tasks + 1)) return false;
  int64_t total = 0, taken = 0;
  for (int b = 0; b < plan->B; b++) total += plan->length(b);
  int b = 0;
  for (int64_t task = 1; task < tasks; task++) {
    // a row on the boundary goes to the side that has more of its steps
    while (b < plan->B && (2 * taken + plan->length(b)) * tasks < 2 * total * task) taken += plan->length(b++);
    plan->begin[task] = b;
  }
  plan->begin[tasks] = plan->B;
  return true;
}

// fn(row0, R) for each group, of at most `most` rows, of the rows of a task.
template <class Plan, class F>
void each_group(const Plan& plan, int task, int most, const F& fn) {
  const int64_t first = plan.begin[task], rows = plan.begin[task + 1] - first, groups = (rows + most - 1) / most;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row0 = first + rows * g / groups;
    fn(static_cast<int>(row0), static_cast<int>(first + rows * (g + 1) / groups - row0));
  }
}

}  // namespace orthokern
