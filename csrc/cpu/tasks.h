// How work is divided among threads.
#pragma once

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace orthokern::ORTHOKERN_ISA {

// fn(0) ... fn(items - 1), divided among threads: items t, t + threads, ... go to thread t.
template <class Fn>
void share(int threads, int items, const Fn& fn) {
  if (threads > items) threads = items;
  if (threads <= 1) {
    for (int i = 0; i < items; i++) fn(i);
    return;
  }
  struct Context {
    const Fn* fn;
    int threads, items;
  } context = {&fn, threads, items};
  parallel_run(
      threads,
      [](void* p, int task) {
        const Context& c = *static_cast<const Context*>(p);
        FlushDenormals flush;
        for (int i = task; i < c.items; i += c.threads) (*c.fn)(i);
      },
      &context);
}

// fn(0) ... fn(tasks - 1), each on a thread of its own; false if one of them returns false: its memory ran out.
template <class Fn>
bool run_tasks(int tasks, const Fn& fn) {
  bool failed = false;
  share(tasks, tasks, [&](int task) {
    const FlushDenormals flush;
    if (!fn(task)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return !failed;
}

// Gives each task about the same number of steps, summed over its rows of the batch: task i gets the rows
// [begin[i], begin[i + 1]). A task may get no rows, where neighbouring sequences have very different lengths.
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

// fn(row0, R) for each group, of at most `most` rows, of the rows of a task; false if one returns false.
template <class F>
bool each_group(const int* begin, int task, int most, const F& fn) {
  const int64_t first = begin[task], rows = begin[task + 1] - first, groups = (rows + most - 1) / most;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row0 = first + rows * g / groups;
    if (!fn(static_cast<int>(row0), static_cast<int>(first + rows * (g + 1) / groups - row0))) return false;
  }
  return true;
}

// A partial result S of each task. All zero bytes are an empty S.
template <class S>
class TaskSums {
 public:
  ~TaskSums() {
    for (int i = 0; i < count_; i++) get()[i].~S();
  }
  bool allocate(int count) {
    if (!memory_.allocate(sizeof(S) * count)) return false;
    count_ = count;
    return true;
  }
  S* get() const { return reinterpret_cast<S*>(memory_.get()); }
  S& operator[](int i) const { return get()[i]; }

 private:
  Scratch<char> memory_;
  int count_ = 0;
};

// norm[t]: the square root of the sum over all tasks of of_task(i)[t].
template <class T, class F>
void write_norms(int tasks, int64_t steps, const F& of_task, T* norm) {
  for (int64_t t = 0; t < steps; t++) {
    double total = 0;
    for (int i = 0; i < tasks; i++) total += of_task(i)[t];
    norm[t] = static_cast<T>(__builtin_sqrt(total));
  }
}

}  // namespace orthokern::ORTHOKERN_ISA
