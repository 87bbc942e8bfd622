// The common part of the scan kernels: sums over the lanes of a warp, locations of the steps of a sequence in memory.
#pragma once

#include <math.h>

#include "cuda/activate.h"
#include "cuda/ptx.h"
#include "cuda/scan.h"

namespace orthokern::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// An activation: its number, known when a kernel is compiled, or kAnyActivation, for a number known only at run time.
// The second form costs an indirect branch in each call.
constexpr int kAnyActivation = -1;
template <int kNumber>
struct ActivationAt;
#define ORTHOKERN_AT(A)                 \
  template <>                           \
  struct ActivationAt<act::A::number> { \
    using Type = act::A;                \
  };
ORTHOKERN_ACTIVATIONS(ORTHOKERN_AT)
#undef ORTHOKERN_AT
// f(A{}) for it: one branch for all that f does. The bindings reject a number that is not in the list.
template <int kNumber, class F>
__device__ __forceinline__ auto with_activation(int number, F f) {
  if constexpr (kNumber != kAnyActivation) {
    return f(typename ActivationAt<kNumber>::Type());
  } else {
#define ORTHOKERN_CASE(A) \
  case act::A::number:    \
    return f(act::A());
    switch (number) { ORTHOKERN_ACTIVATIONS(ORTHOKERN_CASE) }
#undef ORTHOKERN_CASE
    __builtin_unreachable();
  }
}
template <int kNumber>
__device__ __forceinline__ float parameter_grad_as(int number, float g, float saved, float parameter) {
  return with_activation<kNumber>(number, [&](auto of) { return parameter_grad<decltype(of)>(g, saved, parameter); });
}

// A sum over many steps with compensation of its rounding error (Kahan): thousands of terms lose no more than a few do.
struct RunningSum {
  float sum, error;
  __device__ __forceinline__ void add(float value) {
    const float corrected = value - error;
    const float next = sum + corrected;
    error = (next - sum) - corrected;
    sum = next;
  }
};

// Sum v[i] over groups of kLanes lanes, for every i. The sums end up spread over the lanes. With at least as many
// values as lanes, a power of two of them, v[0 ... m) of a lane hold the sums of the m = kValues / kLanes indices from
// lane * m on; with fewer, v[0] is the sum of index scattered_index. Halving the values while halving the distance
// takes kValues - 1 exchanges, and one more for each odd number on the way, of which the middle one stays in both
// halves; one butterfly for each value would take kValues * log2(kLanes). The order of a sum does not depend on
// kValues. The lanes of a group are kStride apart, and `lane` is a lane's number in its group. between() runs while the
// first exchanges are in flight.
struct NoWork {
  __device__ __forceinline__ void operator()() const {}
};
template <int kLanes, int kValues, int kStride = 1, class V, class Between = NoWork>
__device__ __forceinline__ void reduce_scatter(V (&v)[kValues], int lane, Between between = {}) {
  int count = kValues;
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    const int half = (count + 1) / 2;
    const bool upper = (lane & mask) != 0;
    V received[(kValues + 1) / 2];
#pragma unroll
    for (int i = 0; i < (kValues + 1) / 2; i++) {
      if (i >= half) continue;
      if (i + half < count) {
        const V sent = upper ? v[i] : v[i + half];
        v[i] = upper ? v[i + half] : v[i];
        received[i] = __shfl_xor_sync(kAllLanes, sent, mask * kStride);
      } else {
        received[i] = __shfl_xor_sync(kAllLanes, v[i], mask * kStride);
      }
    }
    if (mask == kLanes / 2) between();
#pragma unroll
    for (int i = 0; i < (kValues + 1) / 2; i++)
      if (i < half) v[i] += received[i];
    count = half;
  }
}
// Which of kValues <= kLanes sums reduce_scatter leaves in v[0] of this lane. Several lanes may hold the same one, and
// `first` is true in one of them.
template <int kLanes, int kValues>
__device__ __forceinline__ int scattered_index(int lane, bool& first) {
  static_assert(kValues <= kLanes, "a lane would hold several sums");
  int index = 0, before = kLanes / 2;  // halvings of the values before this one: by 1, 2, 4, ...
  first = true;
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2, before /= 2) {
    const int count = (kValues + before - 1) / before, half = (count + 1) / 2;
    if (!(lane & mask)) continue;
    if (index + half < count) index += half;
    else first = false;
  }
  return index;
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(kAllLanes, v, mask);
  return v;
}

// The norms of `count` steps of the backward, from step first + begin of the sequence on, whose squares are in
// squares[step % kRing][width]; `warps` warps sum four steps each at a time.
template <int kRing>
__device__ __forceinline__ void sum_squares(const ScanArgs& a, const float* squares, int width, int warps, int first,
                                            int begin, int count) {
  constexpr int kSteps = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bool counts;
  const int index = scattered_index<32, kSteps>(lane, counts);
#pragma unroll 1
  for (int i = kSteps * warp; i < count; i += kSteps * warps) {
    float sums[kSteps];
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
      const float* const of_step = squares + ((begin + i + j) & (kRing - 1)) * width;
      sums[j] = 0;
#pragma unroll
      for (int k = 0; k < width; k += 32) sums[j] += of_step[k + lane];
    }
    reduce_scatter<32>(sums, lane);
    const int64_t t = a.T - 1 - (first + begin + i + index);
    if (counts && i + index < count) a.norms[t * gridDim.x + blockIdx.x] = sums[0];
  }
}

// The leak of a unit, and its carried value from the step before (scan.h). kLeak: whether the kernel serves leaks.
template <bool kLeak>
struct Leak {
  float share = 1, carried = 0;
  __device__ __forceinline__ float with_carried(const ScanArgs& a, float value) const {
    return kLeak && a.leak ? fmaf(1 - share, carried, value) : value;
  }
};
__device__ __forceinline__ float leak_of(const ScanArgs& a, int64_t n) {
  return a.leak ? a.leak[n * a.leak_stride] : 1.f;
}

// The state after a step from `before`, its a: phi(a), or backward phi'(.) times the result of argument_of, within
// ScanArgs::clip, which propagates NaN. `second`: whether it is the second unit of a pair; `other`: the other one.
template <bool kBackward, int kNumber, bool kLeak>
__device__ __forceinline__ float state_after(const ScanArgs& a, float before, float gate, float other, float other_gate,
                                             bool second, float parameter, const Leak<kLeak>& leak) {
  const float after = with_activation<kNumber>(a.activation, [&](auto of) {
    using A = decltype(of);
    if constexpr (kBackward) return activate_grad<A>(before, gate, other, other_gate, second, parameter);
    else return activate<A>(before, other, second, parameter);
  });
  if (kBackward) return maximum(-a.clip, minimum(after, a.clip));
  return leak.with_carried(a, kLeak ? leak.share * after : after);
}
// Backward: adds the carried value to the a of a step, sets `gate` to what phi' reads, returns the factor of phi'.
template <bool kBackward, int kNumber, bool kLeak>
__device__ __forceinline__ float argument_of(const ScanArgs& a, float& before, float& gate, const Leak<kLeak>& leak,
                                             float parameter) {
  if (!kBackward || !kLeak || !a.leak) return before;
  before = leak.with_carried(a, before);
  gate = with_activation<kNumber>(a.activation, [&](auto of) {
    using A = decltype(of);
    if constexpr (A::reads == act::kOutput) return activate<A>(gate, 0.f, false, parameter);
    else return gate;
  });
  return leak.share * before;
}

// Steps of the first `T` of a tensor that belong to row b of the batch.
__device__ __forceinline__ int64_t steps_of_row(const ScanArgs& a, int64_t b) {
  if (!a.lengths) return a.T;
  const int64_t length = a.lengths[b];  // anything: compared before time is taken off, so that nothing overflows
  return length <= a.time ? 0 : length - a.time < a.T ? length - a.time : a.T;
}

// Locations of the steps of virtual sequence q: element (step i, unit n) of a [T, B, N] tensor is first + i * stride +
// n. It has the steps i in [begin, end); begin > 0 only if lengths make a backward begin late. None for q beyond the
// last sequence.
struct Sequence {
  int64_t first;
  int begin, end;
};
template <bool kBackward>
__device__ __forceinline__ Sequence sequence(const ScanArgs& a, int64_t q) {
  if (q >= a.sequences) return {0, 0, 0};
  const int64_t c = q / a.B, b = q - c * a.B, start = c * a.chunk, left = a.T - start;
  const int64_t steps = left < a.chunk ? left : a.chunk, all = steps_of_row(a, b);
  const int64_t first = ((kBackward ? a.T - 1 - start : start) * a.B + b) * a.N;
  // those of time T - 1 - start - i < all, or of time start + i < all
  const int64_t border = kBackward ? left - all : all - start;
  const int inside = static_cast<int>(border < 0 ? 0 : border < steps ? border : steps);
  return {first, kBackward ? inside : 0, kBackward ? static_cast<int>(steps) : inside};
}

// The steps that any of the `group` sequences from q0 on has; all of them if `end` is requested, which is written after
// the last one.
struct StepRange {
  int begin, end;
};
template <bool kBackward>
__device__ __forceinline__ StepRange steps_to_run(const ScanArgs& a, int64_t q0, int group) {
  const int all = static_cast<int>(a.chunk < a.T ? a.chunk : a.T);
  if (!a.lengths || a.end) return {0, all};
  StepRange range{all, 0};
  for (int g = 0; g < group; g++) {
    const Sequence s = sequence<kBackward>(a, q0 + g);
    if (s.begin >= s.end) continue;
    if (s.begin < range.begin) range.begin = s.begin;
    if (s.end > range.end) range.end = s.end;
  }
  return range.begin < range.end ? range : StepRange{0, 0};
}
template <bool kBackward>
__device__ __forceinline__ int64_t step_stride(const ScanArgs& a) {
  return kBackward ? -a.B * a.N : a.B * a.N;
}
// The element of `tokens` of the same step: ids are [T, B], one for N elements of the others.
__device__ __forceinline__ const int64_t* token_of(const ScanArgs& a, int64_t row_offset) {
  return a.tokens + row_offset / a.N;
}

// Whether the state of sequence b is replaced after step i, and the new value of unit n. There are no chunks: a
// sequence is a row.
template <bool kBackward>
__device__ __forceinline__ bool is_cut(const ScanArgs& a, int64_t b, int64_t i) {
  return a.cut && a.cut[(kBackward ? a.T - 1 - i : i) * a.B + b];
}
__device__ __forceinline__ float restart_of(const ScanArgs& a, int64_t b, int64_t n) {
  return a.restart ? a.restart[b * a.N + n] : 0.f;
}
// The value of unit n of sequence b after step i that the next product reads.
template <bool kBackward>
__device__ __forceinline__ float state_to_pass(const ScanArgs& a, int64_t b, int64_t n, int64_t i, float after) {
  return is_cut<kBackward>(a, b, i) ? restart_of(a, b, n) : after;
}

__device__ __forceinline__ float parameter_of(const ScanArgs& a, int64_t n) {
  return a.act_param ? a.act_param[n * a.act_param_stride] : 0.f;
}

}  // namespace orthokern::cuda
