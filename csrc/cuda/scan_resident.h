// The scan for small N: one block owns sequences for all of their steps, and meets no other block.
//
//   registers      the maps: warp w has 16 rows of each, lane (w, l) the tile of 8 rows [16 w + 8 (l / 16), ...) and C columns
//   shared memory  the states and, factored, y = s * (V^T h); rings of the inputs of the next kAhead steps, filled by cp.async;
//                  backward: squares of the last steps, to be summed 16 steps at a time
//   memory         x_t (or a row of the table) and, backward, h_t or a_t in; h_t (a_t) or delta_t out
//
// A step is one or two products. In each, a thread loads its C elements of the state (one conflict-free read of 16 bytes for every four),
// multiplies them into 8 sums, and the 16 lanes of a tile's rows exchange sums until each row is complete in one lane (reduce_scatter),
// which ends the step for that row. Then the block meets at a barrier: two a step, or one for a dense map, whose state alternates between
// two places. kSequences = 2 sequences at a time fill the lanes that one sequence leaves idle at the end, and hide each other's latency.
//
// C warps serve N up to 16 C. Registers limit C: 16 C weights of a factored map and about 50 more per thread in 65536 / (32 C).
// A product of N x N is N^2 / 128 clocks of fused multiply-adds; the loads of the state and the exchanges take half of that each, on other
// units. What comes on top is latency: about 33 clocks of loads, 120 of exchanges and 45 of the barrier (docs/cuda-scans.md).
#pragma once

#include "cuda/scan_units.h"

namespace orthokern {
namespace cuda {

constexpr int kAhead = 8;       // steps that inputs are fetched ahead: some 1.3 us, more than device memory takes to answer
constexpr int kIdRing = 32;     // token ids are fetched another kAhead + 1 steps ahead of what they point to
constexpr int kNormSteps = 16;  // steps whose squares are summed together
static_assert(kIdRing > 2 * kAhead + 1, "a token id would be overwritten before it is used");

template <bool kFactored, bool kBackward>
struct ResidentMemory {  // the block's shared memory, in bytes
  int64_t first, steps, ids, state, y, inputs, gates, squares, total;
  __host__ __device__ ResidentMemory(int padded, int group, int threads, bool tokens) {
    int64_t end = 0;
    auto take = [&](int64_t bytes) {
      const int64_t begin = end;
      end += (bytes + 15) / 16 * 16;
      return begin;
    };
    const int64_t vectors = static_cast<int64_t>(group) * padded * sizeof(float);
    first = take(group * sizeof(int64_t));
    steps = take(2 * group * sizeof(int));
    ids = take(tokens ? group * kIdRing * sizeof(int64_t) : 0);
    state = take((kFactored ? 1 : 2) * vectors);
    y = take(kFactored ? vectors : 0);
    inputs = take(kAhead * vectors);
    gates = take(kBackward ? kAhead * vectors : 0);
    squares = take(kBackward ? 2 * kNormSteps * threads * sizeof(float) : 0);
    total = end;
  }
};

// Columns of a lane's tile: element j is column vector * (16 (j / vector) + lane) + j % vector, so that lanes read neighbouring places.
template <int C>
struct TileColumns {
  static constexpr int kVector = C % 4 ? 2 : 4;
  static __device__ __forceinline__ int column(int j, int lane) { return kVector * (16 * (j / kVector) + lane) + j % kVector; }
  static __device__ __forceinline__ void load(float (&to)[C], const float* from, int lane) {
#pragma unroll
    for (int q = 0; q < C / kVector; q++) {
      const float* place = from + kVector * (16 * q + lane);
      if constexpr (kVector == 4) {
        const float4 four = *reinterpret_cast<const float4*>(place);
        to[4 * q] = four.x, to[4 * q + 1] = four.y, to[4 * q + 2] = four.z, to[4 * q + 3] = four.w;
      } else {
        const float2 two = *reinterpret_cast<const float2*>(place);
        to[2 * q] = two.x, to[2 * q + 1] = two.y;
      }
    }
  }
};

// sums[8 g + i] = row i of the tile times vector g, summed over the 16 lanes of the row; left as reduce_scatter does.
template <int C, int kSequences>
__device__ __forceinline__ void tile_product(float (&sums)[8 * kSequences], const float (&weights)[8][C], const float* vectors, int padded,
                                             int lane) {
#pragma unroll
  for (int g = 0; g < kSequences; g++) {
    float x[C];
    TileColumns<C>::load(x, vectors + g * padded, lane);
#pragma unroll
    for (int i = 0; i < 8; i++) sums[8 * g + i] = weights[i][0] * x[0];
#pragma unroll
    for (int j = 1; j < C; j++)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[8 * g + i] = fmaf(weights[i][j], x[j], sums[8 * g + i]);
  }
  reduce_scatter<16>(sums, lane);
}

template <bool kFactored, bool kBackward, int C, int kSequences>
__global__ void __launch_bounds__(32 * C, 1) resident_scan_kernel(const ScanArgs a, const int group_size) {
  static_assert(C % 2 == 0 && C <= 16, "a lane reads its columns in pairs, 16 warps have 128 registers a thread");
  static_assert(kSequences == 1 || kSequences == 2, "16 lanes end the step of 8 rows of at most two sequences");
  constexpr int kPadded = 16 * C, kThreads = 32 * C;
  const int group = kSequences == 1 ? 1 : group_size;  // one sequence at a time means one in all: its loops and indices vanish
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const ResidentMemory<kFactored, kBackward> at(kPadded, group, kThreads, a.tokens != nullptr);
  int64_t* const first = reinterpret_cast<int64_t*>(memory + at.first);  // [group]
  int* const begins = reinterpret_cast<int*>(memory + at.steps);         // [group]
  int* const ends = begins + group;                                      // [group]
  int64_t* const ids = reinterpret_cast<int64_t*>(memory + at.ids);      // [group][kIdRing]
  float* const state = reinterpret_cast<float*>(memory + at.state);      // [1 or 2][group][kPadded]
  float* const y = reinterpret_cast<float*>(memory + at.y);              // [group][kPadded]
  float* const inputs = reinterpret_cast<float*>(memory + at.inputs);    // [kAhead][group][kPadded]
  float* const gates = reinterpret_cast<float*>(memory + at.gates);      // [kAhead][group][kPadded]
  float* const squares = reinterpret_cast<float*>(memory + at.squares);  // [2][kNormSteps][kThreads]

  const int thread = threadIdx.x, lane = thread % 16, tile = thread / 16;
  // what this lane holds after a product: one row of one sequence; with one sequence, two lanes hold the same and the first one counts
  const int held = kSequences == 1 ? lane / 2 : lane;
  const int row = 8 * tile + held % 8, own = held / 8;
  const int partner = kSequences == 1 ? 2 : 1;  // distance of the lane that holds the other unit of the pair
  const bool counts = kSequences == 2 || lane % 2 == 0;
  const int N = static_cast<int>(a.N), K = static_cast<int>(a.K);
  const bool second = row % 2;
  const bool unit = counts && row < N, unit_y = counts && row < K;
  const int64_t stride = step_stride<kBackward>(a);
  const int64_t q0 = static_cast<int64_t>(blockIdx.x) * group;
  const StepRange range = steps_to_run<kBackward>(a, q0, group);
  const int length = range.end - range.begin;  // step i below is step range.begin + i of a sequence

  for (int g = thread; g < group; g += kThreads) {
    Sequence s = sequence<kBackward>(a, q0 + g);
    s.first += range.begin * stride, s.begin -= range.begin, s.end -= range.begin;
    first[g] = s.first, begins[g] = s.begin, ends[g] = s.end;
    if (a.tokens)
      for (int i = 0; i <= 2 * kAhead && i < s.end; i++) ids[g * kIdRing + i] = *token_of(a, s.first + i * stride);
  }
  for (int i = thread; i < group * kPadded; i += kThreads) {
    const int g = i / kPadded, n = i % kPadded;
    state[i] = a.start && n < N && q0 + g < a.sequences ? a.start[(q0 + g) * N + n] : 0.f;
    if (!kFactored) state[group * kPadded + i] = 0;
    if (kFactored) y[i] = 0;
  }

  float weights1[8][kFactored ? C : 1], weights2[8][C];
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < C; j++) {
      const int r = 8 * tile + i, c = TileColumns<C>::column(j, lane);
      if constexpr (kFactored) {
        weights1[i][j] = r < K && c < N ? a.map1[static_cast<int64_t>(c) * K + r] : 0.f;
        weights2[i][j] = r < N && c < K ? a.map2[static_cast<int64_t>(r) * K + c] : 0.f;
      } else {
        weights2[i][j] = r < N && c < N ? a.map2[static_cast<int64_t>(kBackward ? c : r) * N + (kBackward ? r : c)] : 0.f;
      }
    }
  const float scale = kFactored && row < K ? a.scale[row] : 0.f;
  const float parameter = row < N ? parameter_of(a, row) : 0.f;
  RunningSum total{0, 0};
  const int64_t sums_at = (static_cast<int64_t>(blockIdx.x) * kSequences + own) * N + row;
  const int64_t sums_size = static_cast<int64_t>(gridDim.x) * kSequences * N;
  if (kBackward && a.sums && unit) total = {a.sums[sums_at], a.sums[sums_size + sums_at]};
  __syncthreads();

  // The inputs of step i of sequence g, into the place where this thread reads them. `offset`: of the unit in step i.
  auto fetch = [&](int g, int i, int64_t offset, int begin, int end) {
    if (!unit || i < begin || i >= end) return;
    const int place = ((i % kAhead) * group + g) * kPadded + row;
    if (a.tokens) {
      const int64_t id = ids[g * kIdRing + i % kIdRing];
      if (id >= 0 && id < a.D)
        cp_async<4>(inputs + place, a.table + id * N + row);
      else
        inputs[place] = NAN;
    } else {
      cp_async<4>(inputs + place, a.x + offset);
    }
    if (kBackward && a.gate) cp_async<4>(gates + place, a.gate + offset);
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; i++) {
    for (int g = own; g < group; g += kSequences) fetch(g, i, first[g] + i * stride + row, begins[g], ends[g]);
    cp_async_commit();
  }
  const int64_t only_first = first[own] + row;  // of the sequence that this lane has, where it has no other
  const int only_begin = kBackward ? begins[own] : 0, only_end = ends[own];
  int64_t moved = 0;  // i * stride

  const float* from = state;
  float* to = kFactored ? state : state + group * kPadded;
#pragma unroll 1
  for (int i = 0; i < length; i++) {
    cp_async_wait<kAhead - 1>();
    if constexpr (kFactored) {
#pragma unroll 1
      for (int g0 = 0; g0 < group; g0 += kSequences) {
        float sums[8 * kSequences];
        tile_product<C, kSequences>(sums, weights1, from + g0 * kPadded, kPadded, lane);
        if (unit_y) y[(g0 + own) * kPadded + row] = sums[0] * scale;
      }
      __syncthreads();
    }
    float square = 0;
#pragma unroll 1
    for (int g0 = 0; g0 < group; g0 += kSequences) {
      float sums[8 * kSequences];
      tile_product<C, kSequences>(sums, weights2, (kFactored ? y : from) + g0 * kPadded, kPadded, lane);
      const int g = g0 + own;
      const int begin = !kBackward ? 0 : kSequences == 1 ? only_begin : begins[g], end = kSequences == 1 ? only_end : ends[g];
      const bool live = unit && i >= begin && i < end;
      const int place = ((i % kAhead) * group + g) * kPadded + row;
      const int64_t offset = (kSequences == 1 ? only_first : first[g] + row) + moved;
      const float before = sums[0] + (live ? inputs[place] : 0.f);
      float after;
      if constexpr (kBackward) {
        const float gate = live && a.gate ? gates[place] : 0.f;
        float other = 0, other_gate = 0;
        if (a.activation == kOplu) {
          other = __shfl_xor_sync(kAllLanes, before, partner);
          other_gate = __shfl_xor_sync(kAllLanes, gate, partner);
        }
        after = clip_message(activate_grad(a.activation, before, gate, other, other_gate, second, parameter), a.clip);
        if (live) {
          square = fmaf(before, before, square);
          if (a.sums) total.add(parameter_grad(a.activation, before, gate));
        }
      } else {
        const float other = a.activation == kOplu ? __shfl_xor_sync(kAllLanes, before, partner) : 0.f;
        after = activate(a.activation, before, other, second, parameter);
      }
      if (live) {  // before a sequence begins its state is zero and stays so
        to[g * kPadded + row] = after;
        if (a.out) a.out[offset] = after;
        if (!kBackward && a.pre) a.pre[offset] = before;
      }
      fetch(g, i + kAhead, offset + kAhead * stride, begin, end);
    }
    if (a.tokens && thread < group) {
      const int next = i + 2 * kAhead + 1;
      if (next < ends[thread])
        cp_async<8>(ids + thread * kIdRing + next % kIdRing, token_of(a, first[thread] + next * stride));
    }
    cp_async_commit();
    const int half = i / kNormSteps % 2;
    if (kBackward && a.norms) squares[(half * kNormSteps + i % kNormSteps) * kThreads + thread] = square;
    __syncthreads();
    if (kBackward && a.norms && (i % kNormSteps == kNormSteps - 1 || i + 1 == length)) {
      // the other half of the squares is written meanwhile, and this one again after many barriers
#pragma unroll 1
      for (int j = thread / 32; j <= i % kNormSteps; j += C) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < C; k++) sum += squares[(half * kNormSteps + j) * kThreads + 32 * k + thread % 32];
        sum = warp_sum(sum);
        const int64_t t = a.T - 1 - (range.begin + i - i % kNormSteps + j);
        if (thread % 32 == 0) a.norms[t * gridDim.x + blockIdx.x] = sum;
      }
    }
    moved += stride;
    if (!kFactored) {
      const float* const written = to;
      to = const_cast<float*>(from);
      from = written;
    }
  }
  if (a.end && unit)
    for (int g = own; g < group; g += kSequences)
      if (q0 + g < a.sequences) a.end[(q0 + g) * N + row] = ends[g] == a.chunk ? from[g * kPadded + row] : 0.f;
  if (kBackward && a.sums && unit) a.sums[sums_at] = total.sum, a.sums[sums_size + sums_at] = total.error;
}

}  // namespace cuda
}  // namespace orthokern
