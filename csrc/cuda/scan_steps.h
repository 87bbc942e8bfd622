// The scan for any size: a kernel for every product, one or two a step, with the ending of the step inside; many steps
// reach the GPU in one launch of a CUDA graph (step_graph.h). No state stays on the chip, so a step costs a read of the
// maps from the L2 cache or from memory and the gap between two kernels (about a microsecond): the path for what the
// others cannot hold, and for sizes at which a product fills the GPU.
//
// A block computes a tile of kTile rows by kTile sequences, a thread 2 rows by 2 sequences of it; map and vectors pass
// through shared memory kTile columns at a time, the next ones on their way in registers. The sums are the FMA units'
// or, where a precision below IEEE is allowed, the tensor cores': then a warp has 16 rows by 8 sequences, and its lanes
// get what they would have had anyway. All tiles lie along x of the grid, those of the same sequences one after the
// other: y ends at 65535 tiles, which are no more than 2 million sequences, and chunks of time have more.
//
// Where the tiles are fewer than the multiprocessors, the blocks of a cluster share the columns of a tile. The others
// send their sums to the first one, which adds them in the order of their ranks and ends the step.
#pragma once

#include <limits.h>

#include <string>

#include "cuda/launch.h"
#include "cuda/scan_units.h"
#include "cuda/step_graph.h"

namespace orthokern::cuda {

constexpr int kTile = 32, kStepThreads = 256;
constexpr int kMostSplit = 4;     // blocks that share the columns of a tile
constexpr int kFewestSlices = 8;  // of kTile columns, for each of them: fewer take less time than sending the sums
// Rows of the operands' tiles begin at 16 aligned bytes, and are so many banks apart that the lanes' reads do not meet
// in one.
constexpr int kFromPitch = kTile + 4;
template <int kPrecision>
constexpr int kMapPitch = kPrecision == kIeee ? kTile + 4 : kTile + 8;
static_assert(kTile * kTile == 4 * kStepThreads, "a thread has 2 x 2 elements of a tile, and loads 4 of each operand");

// Blocks that cover `rows` by `sequences`. Throws Error for more than a grid holds.
inline int step_tiles(int64_t rows, int64_t sequences) {
  const int64_t tiles = (rows + kTile - 1) / kTile * ((sequences + kTile - 1) / kTile);
  if (tiles > INT_MAX)
    throw Error(std::to_string(sequences) + " sequences of " + std::to_string(rows) +
                " units are more than one launch holds: use a smaller batch");
  return static_cast<int>(tiles);
}
// Blocks that share the columns of a tile: as few as give every multiprocessor a block.
inline int step_split(int64_t tiles, int64_t columns, const DeviceLimits& limits) {
  int split = 1;
  while (limits.major >= 9 && split < kMostSplit && tiles * split < limits.multiprocessors &&
         columns >= 2 * split * kFewestSlices * kTile)
    split *= 2;
  return split;
}
// Where a tile begins.
struct StepTile {
  int row;
  int64_t sequence;
};
__device__ __forceinline__ StepTile step_tile(int rows, unsigned number) {
  const unsigned across = static_cast<unsigned>(rows + kTile - 1) / kTile, down = number / across;
  return {static_cast<int>(number - down * across) * kTile, static_cast<int64_t>(down) * kTile};
}

struct StepProduct {
  const float* map;  // element (row, column) at row * row_stride + column * column_stride
  int64_t row_stride, column_stride;
  const float* from;   // [Q, columns]
  float* to;           // [Q, rows]
  const float* scale;  // [rows]: the product ends with to = scale * sum; null: it ends a step
  int rows, columns;
  int split;  // blocks of a cluster, which share the columns
};

// A thread's part of a tile: rows row, row + 1 (a pair of oplu) by sequences sequence, sequence + 1.
struct StepPart {
  int row, sequence;
};
template <int kPrecision>
__device__ __forceinline__ StepPart step_part(int thread) {
  if constexpr (kPrecision == kIeee) return {thread % 16 * 2, thread / 16 * 2};
  const int lane = thread % 32, warp = thread / 32;
  return {warp % 2 * 16 + lane / 4 * 2, warp / 2 * 8 + lane % 4 * 2};
}

// Of x = head + rest, both TF32: the rest, and the head as a factor of the rests. An infinite head has a rest of zero
// and is zero as such a factor, since infinity times a rest, which may be 0 or of the other sign, would be NaN.
__device__ __forceinline__ void split_rest(float x, uint32_t head, uint32_t& rest, uint32_t& factor) {
  const bool infinite = (head & 0x7fffffffu) == 0x7f800000u;
  rest = infinite ? 0u : to_tf32(x - __uint_as_float(head));
  factor = infinite ? 0u : head;
}

// sums[2 m + n] += the kTile columns of row + m of the map, [column][row], times those of sequence + n of the vectors,
// [sequence][column].
//
// The tensor cores' operands (ptx.h) have rows i and i + 8 in a lane. Here row i of an operand is row 2 i of the warp's
// 16 and row i + 8 is row 2 i + 1, so that a lane ends up with a pair of neighbours.
//
// Tensor cores cut their sums instead of rounding them, which pulls a long sum towards zero. Each slice of kTile
// columns, and with kThreeTf32 each product of 8, therefore has an accumulator of its own, and these are added by the
// FMA units, which round to nearest. The last cut of each remains.
template <int kPrecision>
__device__ __forceinline__ void multiply_tile(const float (&map)[kTile][kMapPitch<kPrecision>],
                                              const float (&from)[kTile][kFromPitch], const StepPart part,
                                              float (&sums)[4]) {
  auto two_rows = [&](int column) { return *reinterpret_cast<const float2*>(&map[column][part.row]); };
  if constexpr (kPrecision == kIeee) {
#pragma unroll
    for (int c = 0; c < kTile; c += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&from[part.sequence][c]),
                   y = *reinterpret_cast<const float4*>(&from[part.sequence + 1][c]);
      const float first[4] = {x.x, x.y, x.z, x.w}, second[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float2 w = two_rows(c + k);
        sums[0] = fmaf(w.x, first[k], sums[0]), sums[1] = fmaf(w.x, second[k], sums[1]);
        sums[2] = fmaf(w.y, first[k], sums[2]), sums[3] = fmaf(w.y, second[k], sums[3]);
      }
    }
    return;
  }
  const int lane = threadIdx.x % 32, t = lane % 4;
  const float* const column_of =
      &from[part.sequence - 2 * t + lane / 4][0];  // the sequence whose vector this lane brings
  float slice[4] = {};
  auto add_slice = [&] {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] += slice[i];
  };
  if constexpr (kPrecision == kBfloat16) {
#pragma unroll
    for (int c = 0; c < kTile; c += 16) {
      uint32_t a[4], b[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int k = c + 8 * half + 2 * t;
        const float2 w = two_rows(k), next = two_rows(k + 1);
        a[2 * half] = to_bf16x2(w.x, next.x), a[2 * half + 1] = to_bf16x2(w.y, next.y);
        b[half] = to_bf16x2(column_of[k], column_of[k + 1]);
      }
      mma_bf16(slice, a, b);
    }
    add_slice();
    return;
  }
#pragma unroll
  for (int c = 0; c < kTile; c += 8) {
    const float2 w0 = two_rows(c + t), w4 = two_rows(c + t + 4);
    const float w[4] = {w0.x, w0.y, w4.x, w4.y}, x[2] = {column_of[c + t], column_of[c + t + 4]};
    uint32_t a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = to_tf32(w[i]);
#pragma unroll
    for (int i = 0; i < 2; i++) b[i] = to_tf32(x[i]);
    if constexpr (kPrecision == kThreeTf32) {  // what rounding took, first: the small terms
      uint32_t a_rest[4], b_rest[2], a_finite[4], b_finite[2];
#pragma unroll
      for (int i = 0; i < 4; i++) split_rest(w[i], a[i], a_rest[i], a_finite[i]);
#pragma unroll
      for (int i = 0; i < 2; i++) split_rest(x[i], b[i], b_rest[i], b_finite[i]);
      mma_tf32(slice, a_rest, b_finite);
      mma_tf32(slice, a_finite, b_rest);
      float product[4] = {};
      mma_tf32(product, a, b);
#pragma unroll
      for (int i = 0; i < 4; i++) sums[i] += product[i];
    } else {
      mma_tf32(slice, a, b);
    }
  }
  add_slice();
}

template <bool kBackward, int kPrecision>
__global__ void __launch_bounds__(kStepThreads)
    step_product_kernel(const ScanArgs a, const StepProduct p, const StepIndex index) {
  ORTHOKERN_SHARED(float, map_tile, [kTile][kMapPitch<kPrecision>]);  // [column][row]
  ORTHOKERN_SHARED(float, from_tile, [kTile][kFromPitch]);            // [sequence][column]
  ORTHOKERN_SHARED(float, warp_squares, [kStepThreads / 32]);
  ORTHOKERN_SHARED(float4, sums_of_others, [kMostSplit - 1][kStepThreads]);
  ORTHOKERN_SHARED(Mbarrier, sums_arrived, [1]);
  const int split = kHasClusters ? p.split : 1;
  const unsigned number = blockIdx.x / static_cast<unsigned>(split);
  const int rank = static_cast<int>(blockIdx.x) - static_cast<int>(number) * split;
  const StepTile tile = step_tile(p.rows, number);
  const int i = index.at();  // without lengths, the product does not wait for it
  const int thread = threadIdx.x, row0 = tile.row;
  const int64_t q0 = tile.sequence;
  const bool along_rows = p.row_stride == 1;  // neighbouring threads read neighbouring elements of the map

  if (a.lengths) {  // a tile whose sequences have no such step: their states are zeros
    const int64_t q = q0 + thread;
    const Sequence where = thread < kTile ? sequence<kBackward>(a, q) : Sequence{0, 0, 0};
    if (!__syncthreads_or(i >= where.begin && i < where.end)) {
      if (p.scale || rank) return;
      for (int k = thread; k < kTile * kTile; k += kStepThreads) {
        const int64_t at = q0 + k / kTile;
        const int row = row0 + k % kTile;
        if (at >= a.sequences || row >= p.rows) continue;
        p.to[at * p.rows + row] = 0;
        if (a.end && i + 1 == a.chunk) a.end[at * p.rows + row] = 0;
      }
      return;
    }
  }

  float next_map[4], next_from[4];
  auto load = [&](int c0) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int fast = thread % kTile, slow = thread / kTile + k * (kStepThreads / kTile);
      const int row = row0 + (along_rows ? fast : slow), column = c0 + (along_rows ? slow : fast);
      next_map[k] = row < p.rows && column < p.columns ? p.map[row * p.row_stride + column * p.column_stride] : 0.f;
      const int64_t q = q0 + slow;
      next_from[k] = q < a.sequences && c0 + fast < p.columns ? p.from[q * p.columns + c0 + fast] : 0.f;
    }
  };
  if (split > 1) {
    if (rank == 0 && thread == 0) {
      mbarrier_init(sums_arrived, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect(sums_arrived, (split - 1) * kStepThreads * static_cast<int>(sizeof(float4)));
    }
    cluster_arrive();
  }
  float sums[4] = {};  // [row][sequence]
  const StepPart part = step_part<kPrecision>(thread);
  const int share = ((p.columns + kTile - 1) / kTile + split - 1) / split * kTile;  // columns of a block
  const int begin = rank * share, end = min(p.columns, begin + share);
  load(begin);
  for (int c0 = begin; c0 < end; c0 += kTile) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int fast = thread % kTile, slow = thread / kTile + k * (kStepThreads / kTile);
      map_tile[along_rows ? slow : fast][along_rows ? fast : slow] = next_map[k];
      from_tile[slow][fast] = next_from[k];
    }
    __syncthreads();
    if (c0 + kTile < end) load(c0 + kTile);
    multiply_tile<kPrecision>(map_tile, from_tile, part, sums);
    __syncthreads();
  }
  if (split > 1) {
    cluster_wait();  // the first block has initialised its mbarrier
    if (rank) {
      st_async(cluster_address(&sums_of_others[rank - 1][thread], 0), make_float4(sums[0], sums[1], sums[2], sums[3]),
               cluster_address(sums_arrived, 0));
      return;
    }
    mbarrier_wait(sums_arrived, 0);
    for (int other = 0; other + 1 < split; other++) {
      const float4 more = sums_of_others[other][thread];
      sums[0] += more.x, sums[1] += more.y, sums[2] += more.z, sums[3] += more.w;
    }
  }

  float square = 0;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int64_t q = q0 + part.sequence + n;
    const int row = row0 + part.row;
    if (q >= a.sequences || row >= p.rows) continue;
    if (p.scale) {
#pragma unroll
      for (int m = 0; m < 2; m++)
        if (row + m < p.rows) p.to[q * p.rows + row + m] = sums[2 * m + n] * p.scale[row + m];
      continue;
    }
    const Sequence where = sequence<kBackward>(a, q);
    if (i < where.begin || i >= where.end) {
      for (int m = 0; m < 2 && row + m < p.rows; m++) {
        p.to[q * p.rows + row + m] = 0;
        if (a.end && i + 1 == a.chunk) a.end[q * p.rows + row + m] = 0;
      }
      continue;
    }
    const int64_t offset = where.first + i * step_stride<kBackward>(a);
    const int64_t id = a.tokens ? *token_of(a, offset) : 0;
    float before[2], gate[2] = {0, 0};
#pragma unroll
    for (int m = 0; m < 2; m++) {
      before[m] = 0;
      if (row + m >= p.rows) continue;
      const float input = !a.tokens ? a.x[offset + row + m] : id >= 0 && id < a.D ? a.table[id * a.N + row + m] : NAN;
      before[m] = sums[2 * m + n] + input;
      if (kBackward && a.gate) gate[m] = a.gate[offset + row + m];
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      if (row + m >= p.rows) continue;
      const float parameter = parameter_of(a, row + m);
      float after;
      if constexpr (kBackward) {
        after = clip_message(
            activate_grad(a.activation, before[m], gate[m], before[1 - m], gate[1 - m], m == 1, parameter), a.clip);
        square = fmaf(before[m], before[m], square);
        if (a.sums) {  // nobody else has this element, and launches follow one another
          const int64_t at = q * p.rows + row + m, size = a.sequences * p.rows;
          RunningSum total{a.sums[at], a.sums[size + at]};
          total.add(parameter_grad(a.activation, before[m], gate[m], parameter));
          a.sums[at] = total.sum, a.sums[size + at] = total.error;
        }
      } else {
        after = activate(a.activation, before[m], before[1 - m], m == 1, parameter);
        if (a.pre) a.pre[offset + row + m] = before[m];
      }
      p.to[q * p.rows + row + m] = state_to_pass<kBackward>(a, q, row + m, i, after);
      if (a.out) a.out[offset + row + m] = after;
      if (a.end && i + 1 == a.chunk) a.end[q * p.rows + row + m] = after;
    }
  }
  if (!kBackward || !a.norms || p.scale) return;
  square = warp_sum(square);
  if (thread % 32 == 0) warp_squares[thread / 32] = square;
  __syncthreads();
  if (thread > 0) return;
  float sum = 0;
  for (int w = 0; w < kStepThreads / 32; w++) sum += warp_squares[w];
  a.norms[(a.T - 1 - i) * (gridDim.x / split) + number] = sum;
}

}  // namespace orthokern::cuda
