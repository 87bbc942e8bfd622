// The scan for small N: one block owns sequences for all of their steps, and meets no other block.
//
//   registers      the maps: warp w has 16 rows of each, lane l of it the tile of 8 rows 16 w + 2 i + l / 16 and C
//                  columns;
//                  factored and N above 128 (a wide shape): 20 rows, and a tile of 5 rows 20 w + 4 i + l / 8 and 20
//                  columns
//   shared memory  the states and, factored, y = s * (V^T h); rings of the inputs of the next kAhead steps, filled by
//                  cp.async;
//                  backward: squares of the last steps, to be summed 16 steps at a time
//   memory         x_t (or a row of the table) and, backward, h_t or a_t in; h_t (a_t) or delta_t out
//
// A step is one or two products. In each, a thread loads its elements of the state (one conflict-free read of 16 bytes
// for every four), multiplies them into 8 or 5 sums, and the 16 or 8 lanes of a tile exchange sums until each row is
// complete in one lane (reduce_scatter), which ends the step for that row. Then the block meets at a barrier: two a
// step, or one for a dense map, whose state alternates between two places. Two sequences at a time fill the lanes that
// one sequence leaves idle at the end, and hide each other's latency; a wide shape has no registers for them.
//
// C warps serve N up to 16 C. Registers limit C: 16 C weights of a factored map and about 50 more per thread in 65536 /
// (32 C). 10 warps would have 168 for 160 weights and all else, as a multiprocessor gives registers to warps by fours;
// 8 warps have 255 for the same maps, 200 weights a thread. Fewer lanes for longer rows leave 5 sums and 6 exchanges,
// not 10 and 11, for twice the reads of the state.
//
// A product of N x N is N^2 / 128 clocks of fused multiply-adds; the loads of the state and the exchanges take half of
// that each (wide: 0.8 and a quarter), on other units. What comes on top is latency: about 33 clocks of loads, 120 of
// exchanges (wide: 90) and 45 of the barrier (docs/cuda-scans.md).
#pragma once

#include "cuda/scan_units.h"

namespace orthokern {
namespace cuda {

constexpr int kAhead = 8;  // steps that inputs are fetched ahead: some 1.3 us, more than device memory takes to answer
constexpr int kIdRing = 32;     // token ids are fetched another kAhead + 1 steps ahead of what they point to
constexpr int kNormSteps = 16;  // steps whose squares are summed together
static_assert(kIdRing > 2 * kAhead + 1, "a token id would be overwritten before it is used");

// How maps of 16 C x 16 C lie in the threads of kWarps warps. kMany: a block has several sequences.
template <bool factored, bool backward, int warps, int C, bool many>
struct ResidentShape {
  static constexpr bool kFactored = factored, kBackward = backward, kMany = many, kWide = C > warps;
  static constexpr int kWarps = warps, kThreads = 32 * warps, kPadded = 16 * C;
  static constexpr int kLanes = kWide ? 8 : 16, kTiles = 32 / kLanes;                    // of a tile, in a warp
  static constexpr int kRows = kPadded / (warps * kTiles), kColumns = kPadded / kLanes;  // of a lane's tile
  static constexpr int kSequences = many && !kWide ? 2 : 1;                              // at a time
  static_assert(C % 2 == 0 && kRows * warps * kTiles == kPadded,
                "a lane reads its columns in pairs, a warp has whole tiles");
  static_assert(kRows * kSequences <= kLanes, "a lane ends the step of at most one row of one sequence");
  static_assert((factored ? 2 : 1) * kRows * kColumns + 50 <= 65536 / kThreads,
                "the maps and all else do not fit into the registers");
};

template <class Shape>
struct ResidentMemory {  // the block's shared memory, in bytes
  int64_t first, steps, ids, state, y, inputs, gates, squares, total;
  __host__ __device__ ResidentMemory(int group, bool tokens) {
    int64_t end = 0;
    auto take = [&](int64_t bytes) {
      const int64_t begin = end;
      end += (bytes + 15) / 16 * 16;
      return begin;
    };
    const int64_t vectors = static_cast<int64_t>(group) * Shape::kPadded * sizeof(float);
    first = take(group * sizeof(int64_t));
    steps = take(2 * group * sizeof(int));
    ids = take(tokens ? group * kIdRing * sizeof(int64_t) : 0);
    state = take((Shape::kFactored ? 1 : 2) * vectors);
    y = take(Shape::kFactored ? vectors : 0);
    inputs = take(kAhead * vectors);
    gates = take(Shape::kBackward ? kAhead * vectors : 0);
    squares = take(Shape::kBackward ? 2 * kNormSteps * Shape::kThreads * sizeof(float) : 0);
    total = end;
  }
};

// Columns of a lane's tile: element j is column vector * (kLanes (j / vector) + lane) + j % vector, so that lanes read
// neighbouring places.
template <int kColumns, int kLanes = 16>
struct TileColumns {
  static constexpr int kVector = kColumns % 4 ? 2 : 4;
  static __device__ __forceinline__ int column(int j, int lane) {
    return kVector * (kLanes * (j / kVector) + lane) + j % kVector;
  }
  // Elements kVector q and the next ones, `to` being the place of the first.
  static __device__ __forceinline__ void load(float* to, int q, const float* from, int lane) {
    const float* place = from + kVector * (kLanes * q + lane);
    if constexpr (kVector == 4) {
      const float4 four = *reinterpret_cast<const float4*>(place);
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
      const float2 two = *reinterpret_cast<const float2*>(place);
      to[0] = two.x, to[1] = two.y;
    }
  }
  static __device__ __forceinline__ void load(float (&to)[kColumns], const float* from, int lane) {
#pragma unroll
    for (int q = 0; q < kColumns / kVector; q++) load(to + kVector * q, q, from, lane);
  }
};

// A lane's tile of one map, in registers.
template <class Shape>
struct MapTile {
  using Columns = TileColumns<Shape::kColumns, Shape::kLanes>;
  static constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kVector = Columns::kVector;
  float weights[kRows][kColumns];

  // weight(i, j): row i, column j of the tile.
  template <class Weight>
  __device__ __forceinline__ void fill(Weight weight) {
#pragma unroll
    for (int q = 0; q < kColumns / kVector; q++) {
#pragma unroll
      for (int i = 0; i < kRows; i++) {
#pragma unroll
        for (int e = 0; e < kVector; e++) weights[i][kVector * q + e] = weight(i, kVector * q + e);
        // the compiler keeps loads on their side of it: all addresses at once would not fit into the registers
        __syncwarp();
      }
    }
  }
  // sums[kRows g + i] = row i times vector g, summed over the lanes of the tile; left as reduce_scatter does.
  __device__ __forceinline__ void product(float (&sums)[kRows * Shape::kSequences], const float* vectors,
                                          int lane) const {
#pragma unroll
    for (int g = 0; g < Shape::kSequences; g++)
#pragma unroll
      for (int q = 0; q < kColumns / kVector; q++) {
        float x[kVector];
        Columns::load(x, q, vectors + g * Shape::kPadded, lane);
#pragma unroll
        for (int e = 0; e < kVector; e++)
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            const float weight = weights[i][kVector * q + e];
            float& sum = sums[kRows * g + i];
            sum = q + e == 0 ? weight * x[e] : fmaf(weight, x[e], sum);
          }
      }
    reduce_scatter<Shape::kLanes>(sums, lane);
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) resident_scan_kernel(const ScanArgs a, const int group_size) {
  constexpr bool kFactored = Shape::kFactored, kBackward = Shape::kBackward, kMany = Shape::kMany;
  constexpr int kPadded = Shape::kPadded, kThreads = Shape::kThreads, kLanes = Shape::kLanes, kTiles = Shape::kTiles;
  constexpr int kRows = Shape::kRows, kSequences = Shape::kSequences;
  const int group = kMany ? group_size : 1;  // of one sequence, loops and indices vanish
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const ResidentMemory<Shape> at(group, a.tokens != nullptr);
  int64_t* const first = reinterpret_cast<int64_t*>(memory + at.first);  // [group]
  int* const begins = reinterpret_cast<int*>(memory + at.steps);         // [group]
  int* const ends = begins + group;                                      // [group]
  int64_t* const ids = reinterpret_cast<int64_t*>(memory + at.ids);      // [group][kIdRing]
  float* const state = reinterpret_cast<float*>(memory + at.state);      // [1 or 2][group][kPadded]
  float* const y = reinterpret_cast<float*>(memory + at.y);              // [group][kPadded]
  float* const inputs = reinterpret_cast<float*>(memory + at.inputs);    // [kAhead][group][kPadded]
  float* const gates = reinterpret_cast<float*>(memory + at.gates);      // [kAhead][group][kPadded]
  float* const squares = reinterpret_cast<float*>(memory + at.squares);  // [2][kNormSteps][kThreads]

  const int thread = threadIdx.x, lane = thread % kLanes, tile = thread % 32 / kLanes;
  // what this lane holds after a product: one row of one sequence. A warp's tiles take turns at its rows, so that the
  // other unit of a pair is in the next tile, kLanes away.
  bool counts;
  const int index = scattered_index<kLanes, kRows * kSequences>(lane, counts);
  const int held = kSequences == 1 ? index : index % kRows, own = kSequences == 1 ? 0 : index / kRows;
  auto row_of = [&](int i) { return kTiles * (kRows * (thread / 32) + i) + tile; };
  const int row = row_of(held);
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

  MapTile<Shape> map1, map2;
  using Columns = typename MapTile<Shape>::Columns;
  if constexpr (kFactored)
    map1.fill([&](int i, int j) {
      const int r = row_of(i), c = Columns::column(j, lane);
      return r < K && c < N ? a.first[c * K + r] : 0.f;
    });
  map2.fill([&](int i, int j) {
    const int r = row_of(i), c = Columns::column(j, lane);
    if constexpr (kFactored) return r < N && c < K ? a.second[r * K + c] : 0.f;
    return r < N && c < N ? a.second[(kBackward ? c : r) * N + (kBackward ? r : c)] : 0.f;
  });
  const float scale = kFactored && row < K ? a.scale[row] : 0.f;
  const float parameter = row < N ? parameter_of(a, row) : 0.f;
  RunningSum total{0, 0};
  auto sums_at = [&](int unit_row) { return (static_cast<int64_t>(blockIdx.x) * kSequences + own) * N + unit_row; };
  const int64_t sums_size = static_cast<int64_t>(gridDim.x) * kSequences * N;
  if (kBackward && a.sums && unit) total = {a.sums[sums_at(row)], a.sums[sums_size + sums_at(row)]};
  __syncthreads();

  // The inputs of step i of sequence g, into the place where this thread reads them. `offset`: of the unit in step i.
  auto fetch = [&](int g, int i, int64_t offset, int begin, int end) {
    if (!unit || i < begin || i >= end) return;
    const int place = ((i % kAhead) * group + g) * kPadded + row;
    if (a.tokens) {
      const int64_t id = ids[g * kIdRing + i % kIdRing];
      if (id >= 0 && id < a.D) cp_async<4>(inputs + place, a.table + id * N + row);
      else inputs[place] = NAN;
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
        float sums[kRows * kSequences];
        map1.product(sums, from + g0 * kPadded, lane);
        if (unit_y) y[(g0 + own) * kPadded + row] = sums[0] * scale;
      }
      __syncthreads();
    }
    float square = 0;
#pragma unroll 1
    for (int g0 = 0; g0 < group; g0 += kSequences) {
      float sums[kRows * kSequences];
      map2.product(sums, (kFactored ? y : from) + g0 * kPadded, lane);
      const int g = g0 + own;
      const int begin = !kBackward ? 0 : kMany ? begins[g] : only_begin, end = kMany ? ends[g] : only_end;
      const bool live = unit && i >= begin && i < end;
      const int place = ((i % kAhead) * group + g) * kPadded + row;
      const int64_t offset = (kMany ? first[g] + row : only_first) + moved;
      const float before = sums[0] + (live ? inputs[place] : 0.f);
      float after;
      if constexpr (kBackward) {
        const float gate = live && a.gate ? gates[place] : 0.f;
        float other = 0, other_gate = 0;
        if (on_pairs(a.activation)) {
          other = __shfl_xor_sync(kAllLanes, before, kLanes);
          other_gate = __shfl_xor_sync(kAllLanes, gate, kLanes);
        }
        after = clip_message(activate_grad(a.activation, before, gate, other, other_gate, second, parameter), a.clip);
        if (live) {
          square = fmaf(before, before, square);
          if (a.sums) total.add(parameter_grad(a.activation, before, gate, parameter));
        }
      } else {
        const float other = on_pairs(a.activation) ? __shfl_xor_sync(kAllLanes, before, kLanes) : 0.f;
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
      for (int j = thread / 32; j <= i % kNormSteps; j += Shape::kWarps) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < Shape::kWarps; k++)
          sum += squares[(half * kNormSteps + j) * kThreads + 32 * k + thread % 32];
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
  if (kBackward && a.sums) {
    // the row by a way that the compiler does not see through: the place from above would take registers, or a spill,
    // during the loop
    const int64_t place = sums_at(__shfl_sync(kAllLanes, row, thread % 32));
    if (unit) a.sums[place] = total.sum, a.sums[sums_size + place] = total.error;
  }
}

}  // namespace cuda
}  // namespace orthokern
