// gru_scan for small N: one block computes all steps of its sequences, without communication between blocks.
//
//   registers      w, or backward its transpose: of each of the three matrices, lane l of warp v has the tile of the 8
//                  rows [16 v + 8 (l / 16), ...) and C columns
//   shared memory  the vectors that the products read; ring buffers of the inputs of the next kGruAhead steps, filled
//                  by cp.async, each element by the thread that reads it; backward: squares of the last steps, which
//                  are summed kNormSteps at a time
//   memory         forward: x_t in, r, z, n, h_t (q) out; backward: g_t, h', r, z, n (q) in, d_r, d_z, d_n and the
//                  factor of W_n out
//
// Products of a step, a barrier after each line:
//
//              forward                                     backward
//   kanai      r, z of h; m = r * h                        d_m of d_n; d_r
//              n of m; h                                   carry of (d_r, d_z); d_z, d_n of the step before
//   torch      r, z, q of h; h                             carry of (d_r, d_z, d_q); the same of the step before
//
// After a product, the 16 lanes of a tile exchange sums until each row is complete: for r and z together one row per
// lane (r in lanes 0 to 7, z in 8 to 15), for other products one row per two lanes, of which the first is used.
//
// C warps are used for N up to 16 C, with 24 C weights per thread. A product of N x N takes N^2 / 128 clocks of fused
// multiply-adds, and each line above about 200 more for loads of the vectors, exchanges and the barrier
// (docs/cuda-scans.md).
#pragma once

#include "cuda/gru_units.h"
#include "cuda/scan_resident.h"

namespace orthokern::cuda {

constexpr int kNormSteps = 16;  // steps whose squares are summed together
constexpr int kGruAhead = 4;    // steps of prefetch of the inputs: about 2 us, above the latency of memory

struct GruMemory {                    // layout of the shared memory of a block, in bytes
  static constexpr int kVectors = 7;  // largest number of vectors of a sequence
  int64_t steps, vectors, inputs, squares, total;
  __host__ __device__ GruMemory(bool backward, int padded, int group, int threads) {
    int64_t end = 0;
    auto take = [&](int64_t bytes) {
      const int64_t begin = end;
      end += (bytes + 15) / 16 * 16;
      return begin;
    };
    const int64_t vector = static_cast<int64_t>(group) * padded * sizeof(float);
    steps = take(group * sizeof(int));
    vectors = take(kVectors * vector);
    inputs = take(kGruAhead * (backward ? 6 : 3) * vector);
    squares = take(backward ? 2 * kNormSteps * threads * sizeof(float) : 0);
    total = end;
  }
};

// Whether a block has sequence `g`. Unsigned 32-bit: at N = 128 there is no register to spare.
__device__ __forceinline__ bool gru_has(const GruScanArgs& a, unsigned group, unsigned g) {
  return blockIdx.x * group + g < static_cast<unsigned>(a.B);
}
// The first element of sequence b in a row [B, N].
__device__ __forceinline__ int64_t gru_place(unsigned b, unsigned n) {
  return static_cast<int64_t>(static_cast<uint64_t>(b) * n);
}

// sums[i] += row i of the tile times a vector, over the lane's C columns.
template <int C>
__device__ __forceinline__ void add_tile(float* sums, const float (&weights)[8][C], const float (&x)[C]) {
#pragma unroll
  for (int j = 0; j < C; j++)
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] = fmaf(weights[i][j], x[j], sums[i]);
}

template <bool kKanai, int C>
__global__ void __launch_bounds__(32 * C, 1) gru_resident_fwd_kernel(const GruScanArgs a, const int group) {
  static_assert(C % 2 == 0 && C <= 8, "a lane reads its columns in pairs; 8 warps have 255 registers a thread");
  constexpr int kPadded = 16 * C, kThreads = 32 * C;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const GruMemory at(false, kPadded, group, kThreads);
  const int slots = group * kPadded;
  int* const ends = reinterpret_cast<int*>(memory + at.steps);  // [group]
  float* const states =
      reinterpret_cast<float*>(memory + at.vectors);  // [2][group][kPadded]: alternate with the variant "torch"
  float* const m = states + 2 * slots;                // [group][kPadded]: kanai
  float* const zs = m + slots;                        // [group][kPadded]: kanai
  float* const inputs = reinterpret_cast<float*>(memory + at.inputs);  // [kGruAhead][3][group][kPadded]

  const int thread = threadIdx.x, lane = thread % 16, tile = thread / 16;
  const int N = static_cast<int>(a.N);
  const int gate_row = 8 * tile + lane % 8,
            which = lane / 8;           // the row of this lane, of r (which = 0) or z (which = 1)
  const int row = 8 * tile + lane / 2;  // and of the candidate
  const bool has_gate = gate_row < N, has_unit = lane % 2 == 0 && row < N;
  const unsigned b0 = blockIdx.x * group;
  const int64_t stride = a.B * a.N;
  auto first_unit = [&](int g) { return gru_place(b0 + g, N); };

  for (int g = thread; g < group; g += kThreads) ends[g] = gru_has(a, group, g) ? gru_steps_of(a, b0 + g) : 0;
  for (int i = thread; i < slots; i += kThreads) {
    const int64_t b = b0 + i / kPadded;
    const int n = i % kPadded;
    states[i] = !gru_has(a, group, i / kPadded) || n >= N ? 0.f
                : gru_resets(a, 0, b)                     ? gru_reset_state(a, b, n)
                                                          : a.h0[b * N + n];
    states[slots + i] = m[i] = zs[i] = 0;
  }
  float weights[3][8][C];
#pragma unroll
  for (int k = 0; k < 3; k++)
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < C; j++) {
        const int r = 8 * tile + i, c = TileColumns<C>::column(j, lane);
        weights[k][i][j] = r < N && c < N ? a.w[(static_cast<int64_t>(k) * N + r) * N + c] : 0.f;
      }
  const float gate_bias = a.bias && has_gate ? a.bias[which * N + gate_row] : 0.f;
  const float bias = a.bias && has_unit ? a.bias[2 * N + row] : 0.f;
  __syncthreads();
  int longest = 0;
  for (int g = 0; g < group; g++) longest = ends[g] > longest ? ends[g] : longest;

  // Prefetches the two inputs of step t of sequence g that this thread reads, to addresses that only this thread uses.
  auto place = [&](int t, int k, int g) { return inputs + ((t % kGruAhead * 3 + k) * group + g) * kPadded; };
  auto fetch = [&](int g, int t) {
    const float* const from = a.x + 3 * (t * stride + first_unit(g));
    const bool wanted = t < ends[g];
    cp_async_if<4>(wanted && has_gate, place(t, which, g) + gate_row, from + which * N + gate_row);
    cp_async_if<4>(wanted && has_unit, place(t, 2, g) + row, from + 2 * N + row);
  };
#pragma unroll 1
  for (int t = 0; t < kGruAhead; t++) {  // the rest of the last of these steps is fetched by the first publish()
    for (int g = 0; g < group - (t == kGruAhead - 1); g++) fetch(g, t);
    if (t < kGruAhead - 1) cp_async_commit();
  }

  // Only the new state is computed between the last sum of a step and the barrier. Results are stored and later inputs
  // are fetched while the lanes exchange the first sums of the next product.
  float n = 0, q = 0, h = 0;
  bool has_result = false;
  auto publish = [&](int t, int g) {
    const int64_t offset = t * stride + first_unit(g);
    if (has_result) a.gates[3 * offset + 2 * N + row] = n;
    if (has_result && !kKanai) a.pre[offset + row] = q;
    if (has_result) a.hs[offset + row] = h;
    fetch(g, t + kGruAhead);
  };
  // The result before sequence g in step t. kanai: in the second product, which is followed by inputs of the next step.
  constexpr int kPending = kKanai ? kGruAhead - 2 : kGruAhead - 1;
  auto publish_last = [&](int t, int g) {
    publish(g > 0 ? t : t - 1, g > 0 ? g - 1 : group - 1);
    if (g == 0) cp_async_commit();
    cp_async_wait<kPending>();
  };
  // The end of step t of sequence g, for the row of this lane.
  auto end_step = [&](int t, int g, bool cut, const float* state, float* next, float r, float z) {
    has_result = has_unit && t < ends[g];
    if (!has_result) return;
    n = tanhf(place(t, 2, g)[row] + r * q);
    h = z * state[g * kPadded + row] + (1.f - z) * n;
    next[g * kPadded + row] = cut ? gru_reset_state(a, b0 + g, row) : h;
  };

  if (kKanai) cp_async_wait<kPending>();
#pragma unroll 1
  for (int t = 0; t < longest; t++) {
    float* const state = kKanai ? states : states + t % 2 * slots;
    float* const next = kKanai ? states : states + (1 - t % 2) * slots;
#pragma unroll 1
    for (int g = 0; g < group; g++) {
      float x[C], sums[16] = {}, candidate[8] = {};
      TileColumns<C>::load(x, state + g * kPadded, lane);
      add_tile<C>(sums, weights[0], x);
      add_tile<C>(sums + 8, weights[1], x);
      if constexpr (!kKanai) add_tile<C>(candidate, weights[2], x);
      reduce_scatter<16, 16>(sums, lane, [&] {
        if (!kKanai) publish_last(t, g);
      });
      const bool live = has_gate && t < ends[g];
      const float gate = sigmoid(sums[0] + gate_bias + (live ? place(t, which, g)[gate_row] : 0.f));
      float* const to = a.gates + 3 * (t * stride + first_unit(g)) + which * N + gate_row;
      if constexpr (kKanai) {
        if (has_gate && which == 0) m[g * kPadded + gate_row] = gate * state[g * kPadded + gate_row];
        if (has_gate && which == 1) zs[g * kPadded + gate_row] = gate;
        if (live) *to = gate;
      } else {
        bool cut = false;
        reduce_scatter<16, 8>(candidate, lane, [&] {
          if (live) *to = gate;
          cut = t + 1 < ends[g] && gru_resets(a, t + 1, b0 + g);
        });
        const int first = thread % 32 - lane;
        const float r = __shfl_sync(kAllLanes, gate, first + lane / 2),
                    z = __shfl_sync(kAllLanes, gate, first + 8 + lane / 2);
        q = candidate[0] + bias;
        end_step(t, g, cut, state, next, r, z);
      }
    }
    if constexpr (kKanai) {
      __syncthreads();
#pragma unroll 1
      for (int g = 0; g < group; g++) {
        bool cut = false;
        float x[C], sums[8] = {};
        TileColumns<C>::load(x, m + g * kPadded, lane);
        add_tile<C>(sums, weights[2], x);
        reduce_scatter<16, 8>(sums, lane, [&] {
          publish_last(t, g);
          cut = t + 1 < ends[g] && gru_resets(a, t + 1, b0 + g);
        });
        q = sums[0] + bias;
        end_step(t, g, cut, state, next, 1.f, zs[g * kPadded + row]);
      }
    }
    __syncthreads();
  }
  publish(longest - 1, group - 1);
}

template <bool kKanai, int C>
__global__ void __launch_bounds__(32 * C, 1) gru_resident_bwd_kernel(const GruScanArgs a, const int group) {
  static_assert(C % 2 == 0 && C <= 8, "a lane reads its columns in pairs; 8 warps have 255 registers a thread");
  constexpr int kPadded = 16 * C, kThreads = 32 * C;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const GruMemory at(true, kPadded, group, kThreads);
  const int slots = group * kPadded;
  int* const ends = reinterpret_cast<int*>(memory + at.steps);  // [group]
  float* const vectors =
      reinterpret_cast<float*>(memory + at.vectors);                   // [7][group][kPadded], see vector() and direct()
  float* const inputs = reinterpret_cast<float*>(memory + at.inputs);  // [kGruAhead][6][group][kPadded]
  float* const squares = reinterpret_cast<float*>(memory + at.squares);  // [2][kNormSteps][kThreads]

  const int thread = threadIdx.x, lane = thread % 16, tile = thread / 16;
  const int N = static_cast<int>(a.N);
  const int row = 8 * tile + lane / 2;
  const bool has_unit = lane % 2 == 0 && row < N;
  const unsigned b0 = blockIdx.x * group;
  const int64_t stride = a.B * a.N;
  auto first_unit = [&](int g) { return gru_place(b0 + g, N); };

  // d_r, d_z and d_n (kanai) or d_q, double-buffered, because a product may still read those of the next step (kanai:
  // d_r and d_n have one buffer, since a barrier is in between).
  auto vector = [&](int k, int half, int g) { return vectors + ((half * 3 + k) * group + g) * kPadded; };
  // The part of the carry that needs no product, or (kanai) only the product with W_n.
  auto direct = [&](int g) { return vectors + (6 * group + g) * kPadded + row; };

  for (int g = thread; g < group; g += kThreads) ends[g] = gru_has(a, group, g) ? gru_steps_of(a, b0 + g) : 0;
  for (int i = thread; i < GruMemory::kVectors * slots; i += kThreads) vectors[i] = 0;
  float weights[3][8][C];  // of W_r^T, W_z^T, W_n^T
#pragma unroll
  for (int k = 0; k < 3; k++)
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < C; j++) {
        const int r = 8 * tile + i, c = TileColumns<C>::column(j, lane);
        weights[k][i][j] = r < N && c < N ? a.w[(static_cast<int64_t>(k) * N + c) * N + r] : 0.f;
      }
  __syncthreads();
  int longest = 0;
  for (int g = 0; g < group; g++) longest = ends[g] > longest ? ends[g] : longest;

  auto place = [&](int t, int k, int g) { return inputs + ((t % kGruAhead * 6 + k) * group + g) * kPadded + row; };
  auto fetch = [&](int g, int t) {
    if (t < 0 || t >= ends[g] || !has_unit) return;
    const int64_t unit = first_unit(g) + row, offset = t * stride + unit, of_gates = 3 * offset - 2 * row;
    cp_async<4>(place(t, 0, g), a.grad_hs + offset);
    if (gru_resets(a, t, b0 + g)) *place(t, 1, g) = gru_reset_state(a, b0 + g, row);
    else cp_async<4>(place(t, 1, g), t ? a.hs + offset - stride : a.h0 + unit);
    for (int k = 0; k < 3; k++) cp_async<4>(place(t, 2 + k, g), a.gates + of_gates + k * N);
    if (!kKanai) cp_async<4>(place(t, 5, g), a.pre + offset);
  };
#pragma unroll 1
  for (int t = longest - 1; t > longest - 1 - kGruAhead; t--) {
    for (int g = 0; g < group; g++) fetch(g, t);
    cp_async_commit();
  }

  // The part of step t that needs no product, for this lane's unit of sequence g; carry: the contribution of the later
  // steps to dL/dh_t.
  auto begin = [&](int g, int t, int half, float carry) {
    if (!has_unit || t >= ends[g]) return 0.f;
    const GruUnit u = {*place(t, 0, g), *place(t, 1, g), *place(t, 2, g),
                       *place(t, 3, g), *place(t, 4, g), kKanai ? 0.f : *place(t, 5, g)};
    const float ghat = u.g + carry;
    const GruAdjoint d = gru_adjoint(u, ghat);
    const int64_t offset = t * stride + first_unit(g) + row;
    float* const grad_x = a.grad_x + 3 * offset - 2 * row;
    vector(1, half, g)[row] = d.d_z;
    grad_x[N] = d.d_z;
    grad_x[2 * N] = d.d_n;
    *direct(g) = ghat * u.z;
    if constexpr (kKanai) {
      vector(2, 0, g)[row] = d.d_n;
    } else {
      vector(0, half, g)[row] = d.d_r;
      vector(2, half, g)[row] = d.d_q;
      grad_x[0] = d.d_r;
      a.factor[offset] = d.d_q;
    }
    return ghat;
  };

  // Squares of step t. They are summed kNormSteps at a time while the other half of the buffer is written.
  auto keep_square = [&](int i, float square) { squares[i % (2 * kNormSteps) * kThreads + thread] = square; };
  auto sum_squares = [&](int i) {  // after the barrier that follows keep_square(i)
    if (!a.norms || (i % kNormSteps != kNormSteps - 1 && i + 1 != longest)) return;
    const int half = i / kNormSteps % 2;
#pragma unroll 1
    for (int j = thread / 32; j <= i % kNormSteps; j += C) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < C; k++) sum += squares[(half * kNormSteps + j) * kThreads + 32 * k + thread % 32];
      sum = warp_sum(sum);
      const int64_t t = longest - 1 - (i - i % kNormSteps + j);
      if (thread % 32 == 0) a.norms[t * gridDim.x + blockIdx.x] = sum;
    }
  };

  cp_async_wait<kGruAhead - 1>();
  float square = 0;
  for (int g = 0; g < group && longest; g++) {
    const float ghat = begin(g, longest - 1, 0, 0.f);
    square = fmaf(ghat, ghat, square);
  }
  keep_square(0, square);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < longest; i++) {
    const int t = longest - 1 - i, half = i % 2;
    sum_squares(i);
    if constexpr (kKanai) {
#pragma unroll 1
      for (int g = 0; g < group; g++) {
        float x[C], sums[8] = {};
        TileColumns<C>::load(x, vector(2, 0, g), lane);
        add_tile<C>(sums, weights[2], x);
        reduce_scatter<16>(sums, lane);
        if (has_unit && t < ends[g]) {
          const float d_m = sums[0], before = *place(t, 1, g), r = *place(t, 2, g),
                      d_r = d_m * before * (r * (1.f - r));
          const int64_t offset = t * stride + first_unit(g) + row;
          vector(0, 0, g)[row] = d_r;
          *direct(g) += r * d_m;
          a.grad_x[3 * offset - 2 * row] = d_r;
          a.factor[offset] = r * before;
        }
      }
      __syncthreads();
    }
    cp_async_wait<kGruAhead - 2>();  // of step t - 1
    square = 0;
#pragma unroll 1
    for (int g = 0; g < group; g++) {
      float x[C], sums[8] = {};
#pragma unroll
      for (int k = 0; k < (kKanai ? 2 : 3); k++) {
        TileColumns<C>::load(x, vector(k, kKanai && k == 0 ? 0 : half, g), lane);
        add_tile<C>(sums, weights[k], x);
      }
      reduce_scatter<16>(sums, lane);
      const float carry = has_unit && t < ends[g] ? gru_passed(a, t, b0 + g, row, sums[0] + *direct(g)) : 0.f;
      if (t > 0) {
        const float ghat = begin(g, t - 1, 1 - half, carry);
        square = fmaf(ghat, ghat, square);
      } else if (has_unit && gru_has(a, group, g)) {
        a.grad_h0[first_unit(g) + row] = carry;
      }
      fetch(g, t - kGruAhead);
    }
    cp_async_commit();
    if (t > 0) keep_square(i + 1, square);
    __syncthreads();
  }
  if (!longest && has_unit)
    for (int g = 0; g < group; g++)
      if (gru_has(a, group, g)) a.grad_h0[first_unit(g) + row] = 0;
}

}  // namespace orthokern::cuda
