// Threads for the CPU kernels: defined once, in select.cpp, for all instruction sets.
#pragma once

namespace orthokern {

// Runs fn(context, 0) ... fn(context, tasks - 1), each on a thread of its own as far as the pool gives them, and returns when all are done.
// What a task computes depends on its index only, never on the thread that happened to run it.
void parallel_run(int tasks, void (*fn)(void* context, int task), void* context);

}  // namespace orthokern
