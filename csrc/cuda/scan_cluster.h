// The scan for N up to 1024 where blocks form clusters (compute capability 9.0 and up): a cluster owns sequences for
// all of their steps.
//
// Block r of a cluster of S computes rows [4 floor(r Q / S), 4 floor((r + 1) Q / S)) of each product, Q = ceil(rows /
// 4): at most 64, eight for each of its 8 warps. A lane has 4 neighbouring columns out of every 128 ("chunk"). Where
// the chunks of a block's rows are:
//
//   registers       the first kInRegisters chunks of the first map
//   shared memory   of the others, as many as fit
//   L2 cache        what remains is read again in every step, by cp.async into a ring of kStages half chunks; each lane
//                   fetches just what
//                   it will multiply, so no barrier is needed, and chunks of the two kinds alternate, so that fetching
//                   never pauses
//
// Besides, shared memory holds the whole state and, factored, all of y = s * (V^T h): [group][columns] each. A finished
// row belongs to one lane; the lanes of 4 rows collect them and store 16 bytes into every block of the cluster with
// st.async, which counts the bytes down on an mbarrier there. A product waits for all bytes of its vector and for
// nothing else: no barrier of a block or of the cluster.
//
// Why one place for each vector is enough (two for the state of a dense map): a warp sends its rows of y only when it
// has read all of the state, so whoever has all of y knows that nobody reads the old state any more, and may send rows
// of the new one; likewise from the new state to the next y. A dense map has no such answer in between, but knows that
// the state before the last one has been read. The argument needs rows of both products in every block, hence
// first_product_rows; a warp without rows of one product may read what is being overwritten, and throws its sums away.
#pragma once

#include "cuda/scan_units.h"

namespace orthokern {
namespace cuda {

constexpr int kClusterThreads = 256, kClusterWarps = 8;
constexpr int kClusterRows = 64;                     // rows of a block
constexpr int kChunk = 128;                          // columns of a chunk
constexpr int kChunkFloats = kClusterRows * kChunk;  // packed: [warp][row of 8][lane][4]
constexpr int kStages = 2;
constexpr int kStageFloats = kClusterWarps * 4 * kChunk;  // half a chunk: 4 rows of each warp
template <int kGroup>
constexpr int kInRegisters = kGroup <= 2   ? 4
                             : kGroup <= 4 ? 3
                                           : 1;  // what 255 registers leave room for beside 8 kGroup sums

struct ClusterMemory {  // the block's shared memory, in bytes
  int64_t barriers, state, y, chunks, ring, total;
  __host__ __device__ ClusterMemory(int group, int columns1, int columns2, int shared_chunks, bool streams) {
    const bool factored = columns2 > 0;
    barriers = 0;
    state = 2 * sizeof(Mbarrier);
    y = state + static_cast<int64_t>(factored ? 1 : 2) * group * columns1 * sizeof(float);
    chunks = y + static_cast<int64_t>(group) * columns2 * sizeof(float);
    ring = chunks + static_cast<int64_t>(shared_chunks) * kChunkFloats * sizeof(float);
    total = ring + (streams ? kStages * kStageFloats * static_cast<int64_t>(sizeof(float)) : 0);
  }
};

// Rows of the first product of a factored map of rank K. Where K gives some of the blocks none, rows of zeros are
// added: a block that sends nothing of y could be overtaken, and count bytes of the next state as bytes of the last one.
__host__ __device__ inline int first_product_rows(int K, int size) { return K > 4 * size ? K : 4 * size; }

// First of the rows of block `rank`, in units of 4 rows.
__host__ __device__ inline int first_quad(int rows, int rank, int size) { return (rows + 3) / 4 * rank / size; }

// packed [size][chunks][kChunkFloats] <- element (r, c) of a map at from[r * row_stride + c * column_stride], zero
// beyond its edges. The blocks share `shared_rows` >= rows.
static __global__ void __launch_bounds__(256)
    pack_chunks_kernel(const float* from, int64_t row_stride, int64_t column_stride, int rows, int shared_rows,
                       int columns, int chunks, int size, float* packed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= static_cast<int64_t>(size) * chunks * kChunkFloats) return;
  const int c = static_cast<int>(i % kChunk), local = static_cast<int>(i / kChunk % kClusterRows);
  const int64_t block = i / kChunkFloats;
  const int rank = static_cast<int>(block / chunks), column = static_cast<int>(block % chunks) * kChunk + c;
  const int row = 4 * first_quad(shared_rows, rank, size) + local, end = 4 * first_quad(shared_rows, rank + 1, size);
  packed[i] = row < end && row < rows && column < columns ? from[row * row_stride + column * column_stride] : 0.f;
}

template <int kGroup>
__device__ __forceinline__ void multiply_add(float (&sums)[8 * kGroup], int index, const float4 w, const float4 x) {
  sums[index] = fmaf(w.x, x.x, sums[index]);
  sums[index] = fmaf(w.y, x.y, sums[index]);
  sums[index] = fmaf(w.z, x.z, sums[index]);
  sums[index] = fmaf(w.w, x.w, sums[index]);
}

// Those chunks of the two maps that are not in registers, in the order of their use. Of `count`, `streamed` come from
// the ring, spread evenly over the others: bit r of `ring` says that the r-th one does. Two maps of 1024 columns have
// 16 chunks.
struct ChunkOrder {
  int count, streamed;
  unsigned ring;
  __device__ ChunkOrder(int count, int streamed) : count(count), streamed(streamed), ring(0) {
    for (int r = 0; r < count; r++)
      if ((r + 1) * streamed / count != r * streamed / count) ring |= 1u << r;
  }
  __device__ __forceinline__ bool streams(int r) const { return ring >> r & 1; }
  // Of the chunks before r, those that stay in shared memory.
  __device__ __forceinline__ int shared_before(int r) const { return r - __popc(ring & ((1u << r) - 1)); }
  // The first chunk of the ring behind r, or from the beginning again.
  __device__ __forceinline__ int streamed_after(int r) const {
    const unsigned behind = ring & ~((2u << r) - 1);
    return __ffs(static_cast<int>(behind ? behind : ring)) - 1;
  }
};
static_assert(2 * kClusterRows * 16 / kChunk <= 31, "a bit for every chunk");

template <bool kFactored, bool kBackward, int kGroup>
__global__ void __launch_bounds__(kClusterThreads, 1) cluster_scan_kernel(const ScanArgs a, const ScanPlan plan) {
  constexpr int kRegisters = kInRegisters<kGroup>;
  constexpr int kHeld = kGroup <= 4 ? 1 : kGroup / 4;    // rows that a lane ends the step of
  constexpr int kCopies = kGroup <= 4 ? 4 / kGroup : 1;  // lanes that hold the same row
  static_assert(kGroup == 1 || kGroup == 2 || kGroup == 4 || kGroup == 8, "8 * group rows are spread over 32 lanes");

  const int size = plan.cluster, rank = cluster_rank(), thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int N = static_cast<int>(a.N), K = static_cast<int>(a.K);
  const int rows1 = kFactored ? first_product_rows(K, size) : N;  // of the first product; the second always gives N
  const int columns1 = plan.chunks1 * kChunk, columns2 = kFactored ? plan.chunks2 * kChunk : 0;
  const int in_registers = plan.chunks1 < kRegisters ? plan.chunks1 : kRegisters;
  const int rest1 = plan.chunks1 - in_registers;  // chunks of the first map outside registers
  const ChunkOrder order{rest1 + (kFactored ? plan.chunks2 : 0),
                         rest1 + (kFactored ? plan.chunks2 : 0) - plan.shared_chunks};

  unsigned char* const memory = dynamic_shared<unsigned char>();
  const ClusterMemory at(kGroup, columns1, columns2, plan.shared_chunks, order.streamed > 0);
  Mbarrier* const state_ready = reinterpret_cast<Mbarrier*>(memory + at.barriers);
  Mbarrier* const y_ready = state_ready + 1;                           // dense: the second one of the state
  float* const state = reinterpret_cast<float*>(memory + at.state);    // [1 or 2][kGroup][columns1]
  float* const y = reinterpret_cast<float*>(memory + at.y);            // [kGroup][columns2]
  float* const chunks = reinterpret_cast<float*>(memory + at.chunks);  // [shared_chunks][kChunkFloats]
  float* const ring = reinterpret_cast<float*>(memory + at.ring);      // [kStages][kStageFloats]

  const int64_t q0 = static_cast<int64_t>(blockIdx.x) / size * kGroup;
  const int64_t stride = step_stride<kBackward>(a);
  const StepRange range = steps_to_run<kBackward>(a, q0, kGroup);  // the same in all blocks of the cluster
  const int length = range.end - range.begin;                      // step i below is step range.begin + i of a sequence
  const int begin1 = 4 * first_quad(rows1, rank, size), end1 = 4 * first_quad(rows1, rank + 1, size);
  const int begin2 = 4 * first_quad(N, rank, size), end2 = 4 * first_quad(N, rank + 1, size);
  const bool warp_1 = begin1 + 8 * warp < end1, warp_2 = begin2 + 8 * warp < end2;
  const int state_bytes = kGroup * ((N + 3) / 4 * 4) * static_cast<int>(sizeof(float));
  const int y_bytes = kGroup * ((rows1 + 3) / 4 * 4) * static_cast<int>(sizeof(float));

  for (int i = thread; i < kGroup * columns1; i += kClusterThreads) {
    const int g = i / columns1, n = i % columns1;
    state[i] = a.start && n < N && q0 + g < a.sequences ? a.start[(q0 + g) * N + n] : 0.f;
    if (!kFactored) state[kGroup * columns1 + i] = 0;
  }
  for (int i = thread; i < kGroup * columns2; i += kClusterThreads) y[i] = 0;
  // this lane's part of a chunk; rows of a warp are 128 floats apart
  const int own = warp * 8 * kChunk + 4 * lane;
  auto chunk_source = [&](int r) {
    const float* const map =
        r < rest1 ? a.packed1 + (static_cast<int64_t>(rank) * plan.chunks1 + in_registers + r) * kChunkFloats
                  : a.packed2 + (static_cast<int64_t>(rank) * plan.chunks2 + r - rest1) * kChunkFloats;
    return map + own;
  };
  for (int r = 0; r < order.count; r++) {
    if (order.streams(r)) continue;
    float* const to = chunks + order.shared_before(r) * kChunkFloats + own;
#pragma unroll
    for (int i = 0; i < 8; i++)
      *reinterpret_cast<float4*>(to + i * kChunk) = *reinterpret_cast<const float4*>(chunk_source(r) + i * kChunk);
  }
  float4 weights[kRegisters][8];
#pragma unroll
  for (int c = 0; c < kRegisters; c++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      weights[c][i] =
          c < in_registers
              ? *reinterpret_cast<const float4*>(
                    a.packed1 + (static_cast<int64_t>(rank) * plan.chunks1 + c) * kChunkFloats + own + i * kChunk)
              : make_float4(0, 0, 0, 0);
  if (thread == 0) {
    mbarrier_init(state_ready, 1);
    mbarrier_init(y_ready, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(state_ready, state_bytes);
    mbarrier_arrive_expect(y_ready, kFactored ? y_bytes : state_bytes);
  }
  // The barrier of the state that step i gives, and the parity of its phase. A dense map needs two in turn: a block
  // that has all of one state may send of the next one while others still miss a part of the first.
  auto state_barrier = [&](int i) { return kFactored ? state_ready : state_ready + (i & 1); };
  auto state_parity = [&](int i) { return kFactored ? i & 1 : i >> 1 & 1; };

  // What this lane ends: rows `held`, `held + 1`, ... of its warp's eight, of one sequence.
  const int held = lane * kHeld / kCopies, g = held / 8;
  Sequence where = sequence<kBackward>(a, q0 + g);
  where.first += range.begin * stride, where.begin -= range.begin, where.end -= range.begin;
  const bool counts = lane % kCopies == 0 && warp_2;
  float parameter[kHeld], scale[kHeld];
  RunningSum total[kHeld];
  const int64_t sums_at = (static_cast<int64_t>(blockIdx.x) / size * kGroup + g) * N;
  const int64_t sums_size = static_cast<int64_t>(gridDim.x) / size * kGroup * N;
  int rows[kHeld];  // of the state, of this lane
  bool unit[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; j++) {
    const int local = 8 * warp + (held + j) % 8;
    rows[j] = begin2 + local;
    unit[j] = counts && local < end2 - begin2 && rows[j] < N;
    const int row1 = begin1 + local;
    scale[j] = kFactored && local < end1 - begin1 && row1 < K ? a.scale[row1] : 0.f;
    parameter[j] = unit[j] ? parameter_of(a, rows[j]) : 0.f;
    total[j] = {0, 0};
    if (kBackward && a.sums && unit[j]) total[j] = {a.sums[sums_at + rows[j]], a.sums[sums_size + sums_at + rows[j]]};
  }

  // Send the finished rows (v[j] is row held + j of this warp's eight of sequence g) to every block, four at a time.
  constexpr int kQuadLanes = 4 * kCopies / kHeld;  // lanes that hold 4 rows, and share the blocks to send them to
  auto send = [&](const float (&v)[kHeld], float* vector, int columns, int begin, int end, Mbarrier* ready) {
    const int quad = lane / kQuadLanes;  // of the 2 * kGroup of this warp
    float row[4];
#pragma unroll
    for (int j = 0; j < 4; j++) row[j] = __shfl_sync(kAllLanes, v[j % kHeld], (4 * quad + j) * kCopies / kHeld);
    const int local = 8 * warp + 4 * (quad % 2);
    if (local >= end - begin) return;
    float* const to = vector + (quad / 2) * columns + begin + local;
    for (int peer = lane % kQuadLanes; peer < size; peer += kQuadLanes)
      st_async(cluster_address(to, peer), make_float4(row[0], row[1], row[2], row[3]), cluster_address(ready, peer));
  };

  // The ring: half chunks in the order of their use, over and over.
  int next_chunk = order.streamed ? order.streamed_after(order.count) : 0, next_half = 0;
  int fetch_stage = 0, use_stage = 0;
  auto fetch_half = [&] {
    if (!order.streamed) return;
    const float* const source = chunk_source(next_chunk) + next_half * 4 * kChunk;
    float* const to = ring + fetch_stage * kStageFloats + warp * 4 * kChunk + 4 * lane;
#pragma unroll
    for (int i = 0; i < 4; i++) cp_async<16>(to + i * kChunk, source + i * kChunk);
    cp_async_commit();
    if (next_half) next_chunk = order.streamed_after(next_chunk);
    next_half ^= 1;
    fetch_stage = fetch_stage + 1 == kStages ? 0 : fetch_stage + 1;
  };
  // sums += the chunks [r0, r1) outside registers, times `vector` from column c0 on
  auto multiply_rest = [&](float (&sums)[8 * kGroup], int r0, int r1, const float* vector, int columns, int c0) {
#pragma unroll 1
    for (int r = r0; r < r1; r++, c0 += kChunk) {
      float4 x[kGroup];
#pragma unroll
      for (int s = 0; s < kGroup; s++) x[s] = *reinterpret_cast<const float4*>(vector + s * columns + c0 + 4 * lane);
      if (order.streams(r)) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          cp_async_wait<kStages - 1>();
          const float* const w = ring + use_stage * kStageFloats + warp * 4 * kChunk + 4 * lane;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float4 four = *reinterpret_cast<const float4*>(w + i * kChunk);
#pragma unroll
            for (int s = 0; s < kGroup; s++) multiply_add<kGroup>(sums, 8 * s + 4 * half + i, four, x[s]);
          }
          use_stage = use_stage + 1 == kStages ? 0 : use_stage + 1;
          fetch_half();
        }
      } else {
        const float* const w = chunks + order.shared_before(r) * kChunkFloats + own;
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float4 four = *reinterpret_cast<const float4*>(w + i * kChunk);
#pragma unroll
          for (int s = 0; s < kGroup; s++) multiply_add<kGroup>(sums, 8 * s + i, four, x[s]);
        }
      }
    }
  };

  // Inputs, fetched as soon as those of the step before are used: a step (a microsecond and more) ahead. A token id yet
  // another one.
  float input[kHeld], gate[kHeld];
  int64_t id = -1;
  // tokens are [T, B]: one for N elements of the others
  const int64_t first_token = a.tokens ? where.first / N : 0, token_stride = kBackward ? -a.B : a.B;
  auto fetch_id = [&](int i) {
    if (a.tokens && i < where.end) id = a.tokens[first_token + i * token_stride];
  };
  auto fetch_input = [&](int i) {
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      input[j] = gate[j] = 0;
      if (!unit[j] || i < where.begin || i >= where.end) continue;
      const int64_t offset = where.first + i * stride + rows[j];
      if (a.tokens) input[j] = id >= 0 && id < a.D ? a.table[id * N + rows[j]] : NAN;
      else input[j] = a.x[offset];
      if (kBackward && a.gate) gate[j] = a.gate[offset];
    }
  };
  fetch_id(0);
  fetch_input(0);
  fetch_id(1);
  __syncthreads();
  cluster_sync();  // every block's vectors and barriers are there before anybody sends

  if (warp_1 || warp_2) {
#pragma unroll 1
    for (int s = 0; s < kStages; s++) fetch_half();
    const float* from = state;
    float* to = kFactored ? state : state + kGroup * columns1;
#pragma unroll 1
    for (int i = 0; i < length; i++) {
      float sums[8 * kGroup];
      const bool live_step = i >= where.begin && i < where.end;
      float v[kHeld];
      if (i > 0) {
        mbarrier_wait(state_barrier(i - 1), state_parity(i - 1));
        if (thread == 0) mbarrier_arrive_expect(state_barrier(i - 1), state_bytes);
      }
#pragma unroll
      for (int k = 0; k < 8 * kGroup; k++) sums[k] = 0;
#pragma unroll
      for (int c = 0; c < kRegisters; c++) {
        if (c >= in_registers) continue;
#pragma unroll
        for (int s = 0; s < kGroup; s++) {
          const float4 x = *reinterpret_cast<const float4*>(from + s * columns1 + c * kChunk + 4 * lane);
#pragma unroll
          for (int k = 0; k < 8; k++) multiply_add<kGroup>(sums, 8 * s + k, weights[c][k], x);
        }
      }
      multiply_rest(sums, 0, rest1, from, columns1, in_registers * kChunk);
      reduce_scatter<32>(sums, lane);

      if constexpr (kFactored) {
#pragma unroll
        for (int j = 0; j < kHeld; j++) v[j] = sums[j] * scale[j];
        send(v, y, columns2, begin1, end1, y_ready);
        mbarrier_wait(y_ready, i & 1);
        if (thread == 0) mbarrier_arrive_expect(y_ready, y_bytes);
#pragma unroll
        for (int k = 0; k < 8 * kGroup; k++) sums[k] = 0;
        multiply_rest(sums, rest1, order.count, y, columns2, 0);
        reduce_scatter<32>(sums, lane);
      }

      float before[kHeld], square = 0;
#pragma unroll
      for (int j = 0; j < kHeld; j++) before[j] = sums[j] + input[j];
#pragma unroll
      for (int j = 0; j < kHeld; j++) {
        float other = 0, other_gate = 0;
        if (on_pairs(a.activation)) {  // the other unit of the pair is this lane's other row, or another lane's
          if constexpr (kHeld > 1) {
            other = before[j ^ 1], other_gate = gate[j ^ 1];
          } else {
            other = __shfl_xor_sync(kAllLanes, before[j], kCopies);
            if (kBackward) other_gate = __shfl_xor_sync(kAllLanes, gate[j], kCopies);
          }
        }
        const bool second = (held + j) % 2;
        float after;
        if constexpr (kBackward) {
          after = clip_message(activate_grad(a.activation, before[j], gate[j], other, other_gate, second, parameter[j]),
                               a.clip);
          if (unit[j] && live_step) {
            square = fmaf(before[j], before[j], square);
            if (a.sums) total[j].add(parameter_grad(a.activation, before[j], gate[j], parameter[j]));
          }
        } else {
          after = activate(a.activation, before[j], other, second, parameter[j]);
        }
        v[j] = rows[j] < N && live_step ? after : 0.f;  // beyond the last unit stays zero, whatever lies around it
      }
      if (a.cut) {
        float passed[kHeld];
#pragma unroll
        for (int j = 0; j < kHeld; j++)
          passed[j] = unit[j] && live_step ? state_to_pass<kBackward>(a, q0 + g, rows[j], range.begin + i, v[j]) : v[j];
        send(passed, to, columns1, begin2, end2, state_barrier(i));
      } else {
        send(v, to, columns1, begin2, end2, state_barrier(i));
      }
#pragma unroll
      for (int j = 0; j < kHeld; j++) {
        if (!unit[j]) continue;
        if (a.end && i + 1 == length && q0 + g < a.sequences) a.end[(q0 + g) * N + rows[j]] = v[j];
        if (!live_step) continue;
        const int64_t offset = where.first + i * stride + rows[j];
        if (a.out) a.out[offset] = v[j];
        if (!kBackward && a.pre) a.pre[offset] = before[j];
      }
      fetch_input(i + 1);
      fetch_id(i + 2);
      if (kBackward && a.norms) {
        square = warp_sum(square);
        const int64_t t = a.T - 1 - (range.begin + i);
        if (lane == 0) a.norms[(t * gridDim.x + blockIdx.x) * kClusterWarps + warp] = square;
      }
      if (!kFactored) {
        float* const read = const_cast<float*>(from);
        from = to, to = read;
      }
    }
    cp_async_wait<0>();
    if (length > 0) mbarrier_wait(state_barrier(length - 1), state_parity(length - 1));
#pragma unroll
    for (int j = 0; j < kHeld; j++)
      if (kBackward && a.sums && unit[j])
        a.sums[sums_at + rows[j]] = total[j].sum, a.sums[sums_size + sums_at + rows[j]] = total[j].error;
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while others may still send to it
}

}  // namespace cuda
}  // namespace orthokern
