// Threads and memory for the CPU kernels: defined once, in select.cpp, for all instruction sets.
#pragma once

#include <stddef.h>

namespace orthokern {

// Runs fn(context, 0) ... fn(context, tasks - 1), each on a thread of its own as far as the pool gives them, and
// returns when all are done. What a task computes depends on its index only, never on the thread that happened to run
// it.
void parallel_run(int tasks, void (*fn)(void* context, int task), void* context);

// Uninitialised memory, from what earlier calls used where that fits (buffer.h): null if there is none. For
// kLargeScratch / 2 bytes and more.
constexpr size_t kLargeScratch = 2 << 20;
void* large_scratch(size_t* bytes);  // *bytes becomes what was really given
void free_large_scratch(void* memory, size_t bytes);

}  // namespace orthokern
