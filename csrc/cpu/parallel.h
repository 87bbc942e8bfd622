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

}  // namespace orthokern
