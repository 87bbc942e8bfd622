// How work is divided among threads.
#pragma once

#include <new>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int kGroupRows = 13 * 8;         // maximum rows of a group: whole tiles, and its state stays in L2
constexpr int64_t kStreamBytes = 8 << 20;  // results larger than this are written with streaming stores

// Whether a result [rows, N] is written with streaming stores; false for null.
template <class T>
bool streams(const void* result, int64_t rows, int64_t N) {
  return result && N % kLanes<T> == 0 && reinterpret_cast<uintptr_t>(result) % kVectorBytes == 0 &&
         rows * N * static_cast<int64_t>(sizeof(T)) > kStreamBytes;
}

// fn(0) ... fn(items - 1), divided among threads: items t, t + threads, ... go to thread t.
template <class Fn>
void share(int threads, int items, const Fn& fn) {
  struct Context {
    const Fn* fn;
    int threads, items;
  } context = {&fn, threads < items ? threads : items, items};
  const auto run = [](void* p, int task) {
    const Context& c = *static_cast<const Context*>(p);
    const FlushDenormals flush;
    for (int i = task; i < c.items; i += c.threads) (*c.fn)(i);
  };
  parallel_run(context.threads, run, &context);
}

// fn(0) ... fn(tasks - 1), each on its own thread; false if one of them returns false: its memory ran out.
template <class Fn>
bool run_tasks(int tasks, const Fn& fn) {
  bool failed = false;
  share(tasks, tasks, [&](int task) {
    if (!fn(task)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return !failed;
}

// Gives each task about the same number of steps, summed over its rows of the batch: task i gets the rows
// [begin[i], begin[i + 1]). A task may get no rows if neighbouring sequences have very different lengths.
inline bool share_rows(int tasks, int B, const int64_t* lengths, int64_t T, Scratch<int>* begin) {
  if (!begin->allocate(tasks + 1)) return false;
  auto length = [&](int b) { return lengths ? lengths[b] : T; };
  int64_t total = 0, passed = 0;
  for (int b = 0; b < B; b++) total += length(b);
  int b = 0;
  for (int64_t task = 1; task < tasks; task++) {
    // a row on the boundary goes to the side that has more of its steps
    while (b < B && (2 * passed + length(b)) * tasks < 2 * total * task) passed += length(b++);
    begin->get()[task] = b;
  }
  begin->get()[tasks] = B;
  return true;
}

// fn(row0, R) for each group of at most `most` rows of a task; false if one call returns false.
template <class F>
bool each_group(const int* begin, int task, int most, const F& fn) {
  const int64_t first = begin[task], rows = begin[task + 1] - first, groups = (rows + most - 1) / most;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row0 = first + rows * g / groups;
    if (!fn(static_cast<int>(row0), static_cast<int>(first + rows * (g + 1) / groups - row0))) return false;
  }
  return true;
}

// A partial result S of each task. An S whose bytes are all zero is empty.
template <class S>
class TaskSums {
 public:
  ~TaskSums() { delete[] sums_; }
  bool allocate(int count) { return (sums_ = new (std::nothrow) S[count]()); }
  S* get() const { return sums_; }
  S& operator[](int i) const { return sums_[i]; }

 private:
  S* sums_ = nullptr;
};

// The sum over all tasks of of_task(task)[i].
template <class F>
double task_total(int tasks, const F& of_task, ptrdiff_t i) {
  double total = 0;
  for (int task = 0; task < tasks; task++) total += of_task(task)[i];
  return total;
}
// norm[t]: the square root of the task_total of t.
template <class T, class F>
void write_norms(int tasks, int64_t steps, const F& of_task, T* norm) {
  for (int64_t t = 0; t < steps; t++) norm[t] = static_cast<T>(__builtin_sqrt(task_total(tasks, of_task, t)));
}

}  // namespace orthokern::ORTHOKERN_ISA
