// Which rows of a group of the batch run at which step of a scan, and which of them start from reset_state there.
//
// Sequences of different lengths: step t computes the first R_t rows of a group, up to the last one that still runs. In
// a batch sorted by descending length, no step computes a row that has ended.
#pragma once

#include "cpu/simd.h"

namespace orthokern::ORTHOKERN_ISA {

struct RowSteps {
  const int row0, R;  // rows [row0, row0 + R) of the batch
  const int64_t batch, steps;
  const int64_t* const lengths;  // [batch], or null: all steps
  const uint8_t* const flags;    // [steps, batch], or null: no resets
  int longest, shortest;         // steps
  Scratch<int> length;           // [R]
  Scratch<int> active;           // [steps + 1] R_t: one more than the last row that runs at step t, 0 after the longest
  Scratch<int> running;          // [steps + 1] running rows; fewer than R_t if a row in between has ended

  template <class Args>
  RowSteps(const Args& args, int row0_, int R_)
      : row0(row0_), R(R_), batch(args.B), steps(args.T), lengths(args.lengths), flags(args.resets) {}

  bool count_steps() {
    if (!length.allocate(R) || !active.allocate(steps + 1) || !running.allocate(steps + 1)) return false;
    longest = 0, shortest = static_cast<int>(steps);
    for (int r = 0; r < R; r++) {
      const int last = (length[r] = static_cast<int>(lengths ? lengths[row0 + r] : steps)) - 1;
      active[last] = r + 1;
      running[last]++;
      if (last >= longest) longest = last + 1;
      if (last < shortest) shortest = last + 1;
    }
    for (int t = longest - 2; t >= 0; t--) {
      if (active[t] < active[t + 1]) active[t] = active[t + 1];
      running[t] += running[t + 1];
    }
    return true;
  }
  // Sets the padding of a result [steps, batch, columns] to zero; the result may be null.
  template <class T>
  void clear_padding(void* result, ptrdiff_t columns) const {
    for (int64_t t = shortest; result && t < steps; t++)
      for (int r = 0; r < R; r++)
        if (ended(r, t)) memset(static_cast<T*>(result) + (t * batch + row0 + r) * columns, 0, columns * sizeof(T));
  }
  bool ended(int r, int64_t t) const { return length[r] <= t; }
  bool gapless(int64_t t) const { return running[t] == active[t]; }
  // The flags of the rows at step t, if any of the first R_t resets there; else null.
  const uint8_t* resets_at(int64_t t) const {
    if (!flags) return nullptr;
    const uint8_t* of_step = flags + t * batch + row0;
    // a bool tensor that was viewed from bytes may have values other than 0 and 1
    for (int r = 0; r < active[t]; r++)
      if (of_step[r]) return of_step;
    return nullptr;
  }
  bool resets(const uint8_t* of_step, int r, int64_t t) const { return of_step[r] && !ended(r, t); }
};

}  // namespace orthokern::ORTHOKERN_ISA
