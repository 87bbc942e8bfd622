// The scan for N up to 1024 on GPUs with clusters of blocks (compute capability 9.0 and up): a cluster owns sequences
// for all of their steps.
//
// Block r of a cluster of S computes rows [4 floor(r Q / S), 4 floor((r + 1) Q / S)) of each product, Q = ceil(rows /
// 4): at most 64, eight for each of its 8 warps. scan_cluster_maps.h has the maps and the products, on the FMA units or
// on tensor cores.
//
// Shared memory also holds the whole state and, factored, all of y = s * (V^T h): [group][columns] each. A finished row
// belongs to one lane; the lanes of 4 rows collect them and store 16 bytes into every block of the cluster with
// st.async, which counts the bytes down on an mbarrier there (VectorPipe). A product waits only for all bytes of its
// vector: not for a barrier of the cluster nor, on the FMA units, for one of a block.
//
// Two sets of sequences (Traits::kSets) have separate vectors and mbarriers and take turns: while the rows of one are
// in transit, the other is multiplied.
//
// One buffer for each vector is enough (two for the state of a dense map): a warp sends its rows of y only after it has
// read all of the state. So a warp that has all of y knows that no warp reads the old state any more, and may send rows
// of the new one; likewise from the new state to the next y. A dense map has no such answer in between, but knows that
// the state before the last one has been read. The argument needs rows of both products in every block, hence
// first_product_rows. A warp without rows of one product may read values that are being overwritten, and discards its
// sums. On tensor cores a warp reads a part of the state for the rows of all warps; it sends after the barrier at which
// all warps of the block have read theirs. The same holds for the buffer of their sums (TensorProduct::finish): a warp
// that has all of a vector knows that the warps of its own block have sent their rows, and hence read the sums.
#pragma once

#include "cuda/scan_cluster_maps.h"

namespace orthokern::cuda {

// Rows of the first product of a factored map of rank K. If K leaves some of the blocks without rows, rows of zeros are
// added: a block that sends nothing of y could be overtaken, and count bytes of the next state as bytes of the last
// one.
__host__ __device__ inline int first_product_rows(int K, int size) { return K > 4 * size ? K : 4 * size; }

// A vector of a set of sequences. Every block of a cluster has a copy of it and sends its rows to all blocks. It is y
// or the state of a factored map with kCopies = 1, or the state of a dense map, which alternates between two buffers.
// Version i is the result of step i.
template <class Traits, int kCopies>
struct VectorPipe {
  static constexpr int kHeld = Traits::kHeld;
  static constexpr int kSharing = 16 / Traits::kGroup;  // lanes that hold 4 rows, and divide the target blocks

  float* data;      // [kCopies][kGroup][pitch]
  Mbarrier* ready;  // [kCopies], a phase ends when all bytes of a version have arrived
  int pitch, bytes;
  int begin, end;  // rows that this block sends
  int peers;       // blocks that this lane sends to, beginning with lane / 2 % kSharing; 0 without rows

  __device__ __forceinline__ Mbarrier* barrier(int version) const {
    return kCopies == 1 ? ready : ready + (version & 1);
  }
  __device__ __forceinline__ float* place(int version) const {
    return kCopies == 1 ? data : data + (version & 1 ? 0 : Traits::kGroup * pitch);
  }
  // By one thread, before any block sends.
  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int copy = 0; copy < kCopies; copy++) mbarrier_init(ready + copy, 1);
  }
  __device__ __forceinline__ void arm(int version) const { mbarrier_arrive_expect(barrier(version), bytes); }
  // Waits until all of this version has arrived; version -1 is there from the beginning. One thread lets the barrier
  // expect the next version in the same buffer.
  __device__ __forceinline__ void wait(int version) const {
    mbarrier_wait(barrier(version), (kCopies == 1 ? version : version >> 1) & 1);
    if (threadIdx.x == 0) arm(version);
  }
  // The first of the 4 rows that this lane sends, counted within the block.
  static __device__ __forceinline__ int local_row() {
    return static_cast<int>(threadIdx.x) / 32 * 8 + 4 * (static_cast<int>(threadIdx.x) % 2);
  }
  // Send the finished rows (LaneRows) to every block, four at a time.
  __device__ __forceinline__ void send(const float (&v)[kHeld], int version) const {
    const int lane = threadIdx.x % 32, half = lane % 2, sequence = lane / 2 / kSharing;
    float row[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      row[j] = __shfl_sync(kAllLanes, v[j % kHeld], LaneRows<Traits>::lane_of(sequence, 4 * half + j));
    float* const to = place(version) + sequence * pitch + begin + local_row();
    Mbarrier* const of_version = barrier(version);
#pragma unroll 1
    for (int peer = lane / 2 % kSharing; peer < peers; peer += kSharing)
      st_async(cluster_address(to, peer), make_float4(row[0], row[1], row[2], row[3]),
               cluster_address(of_version, peer));
  }
};

// One thread of a block for a set of sequences, and the parts of a step. Step i is step range.begin + i of a sequence.
template <class Traits>
struct ClusterThread {
  static constexpr bool kFactored = Traits::kFactored, kBackward = Traits::kBackward, kPlain = Traits::kPlain;
  static constexpr int kGroup = Traits::kGroup, kHeld = Traits::kHeld;
  static constexpr int kAhead = 6;  // steps between the fetch of an input to L2 and to registers
  using StatePipe = VectorPipe<Traits, Traits::kVectorCopies>;
  using YPipe = VectorPipe<Traits, 1>;

  const ScanArgs& a;
  const int set, size, rank, lane, warp;  // of the cluster; of the block
  const int N, K, rows1;                  // rows of the first product; the second always gives N
  const int64_t cluster, q0, stride;      // first sequence; elements from one step to the next
  const StepRange range;                  // the same in all blocks of the cluster
  StatePipe state;
  YPipe y;
  float* partial;
  const LaneRows<Traits> held;  // the rows that this lane ends
  const int g;                  // its sequence
  Sequence where;
  int row0;    // its first row
  int64_t at;  // element of that row in the step whose input was fetched last
  bool unit[kHeld];
  float parameter[kHeld], scale[kHeld];
  RunningSum total[kHeld];
  // Inputs of a step, and of the next one, which are fetched while the blocks exchange a vector. Two sets fetch theirs
  // together: at the end of an iteration the compiler waits for loads that have just begun. A token id is fetched one
  // more step ahead.
  struct Inputs {
    float x[kHeld], gate[kHeld];
    bool cut;
  } input, next;
  int64_t id, first_token;

  __device__ __forceinline__ ClusterThread(const ScanArgs& args, const ScanPlan& plan, int set)
      : a(args),
        set(set),
        size(plan.cluster),
        rank(cluster_rank()),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        N(static_cast<int>(args.N)),
        K(static_cast<int>(args.K)),
        rows1(kFactored ? first_product_rows(K, size) : N),
        cluster(static_cast<int64_t>(blockIdx.x) / size),
        q0((cluster * Traits::kSets + set) * kGroup),
        stride(step_stride<kBackward>(args)),
        range(steps_to_run<kBackward>(args, cluster * Traits::kSequences, Traits::kSequences)),
        held(lane),
        g(held.sequence) {}

  __device__ __forceinline__ bool has_rows1() const { return y.begin + 8 * warp < y.end; }
  __device__ __forceinline__ bool has_rows2() const { return state.begin + 8 * warp < state.end; }
  __device__ __forceinline__ int64_t sums_at(int row) const { return (q0 + g) * N + row; }
  __device__ __forceinline__ int64_t sums_size() const {
    return static_cast<int64_t>(gridDim.x) / size * Traits::kSequences * N;
  }
  __device__ __forceinline__ bool live(int i) const { return i >= where.begin && i < where.end; }

  // The two vectors, their places, their first contents.
  __device__ __forceinline__ void start_vectors(unsigned char* memory, const ClusterMemory<Traits>& at, int columns1,
                                                int columns2) {
    auto bytes_of = [](int count) { return kGroup * ((count + 3) / 4 * 4) * static_cast<int>(sizeof(float)); };
    auto from = [&](int count, int block) { return 4 * first_quad(count, block, size); };
    auto peers = [&](int count) {
      return StatePipe::local_row() < from(count, rank + 1) - from(count, rank) ? size : 0;
    };
    Mbarrier* const barriers = reinterpret_cast<Mbarrier*>(memory + at.barriers) + 2 * set;
    state = {reinterpret_cast<float*>(memory + at.state) + set * Traits::kVectorCopies * kGroup * at.pitch1,
             barriers,
             at.pitch1,
             bytes_of(N),
             from(N, rank),
             from(N, rank + 1),
             peers(N)};
    y = {reinterpret_cast<float*>(memory + at.y) + set * kGroup * at.pitch2,
         barriers + 1,
         at.pitch2,
         bytes_of(rows1),
         from(rows1, rank),
         from(rows1, rank + 1),
         peers(rows1)};
    partial = reinterpret_cast<float*>(memory + at.partial);
    float* const first = state.place(-1);
    for (int i = threadIdx.x; i < kGroup * columns1; i += kClusterThreads) {
      const int s = i / columns1, n = i % columns1;
      first[s * state.pitch + n] = a.start && n < N && q0 + s < a.sequences ? a.start[(q0 + s) * N + n] : 0.f;
      if (!kFactored) state.place(0)[s * state.pitch + n] = 0;
    }
    for (int i = threadIdx.x; i < kGroup * columns2; i += kClusterThreads)
      y.data[i / columns2 * y.pitch + i % columns2] = 0;
    if (threadIdx.x > 0) return;
    state.init();
    if (kFactored) y.init();
    mbarrier_init_fence();
    if (kFactored) y.arm(0);
    else state.arm(0);
  }

  // The rows that this lane ends, and the inputs of the first step.
  __device__ __forceinline__ void start_rows() {
    where = sequence<kBackward>(a, q0 + g);
    const int64_t first = where.first + range.begin * stride;
    where.begin -= range.begin, where.end -= range.begin;
    const bool counts = lane % Traits::kCopies == 0 && has_rows2();
    row0 = state.begin + 8 * warp + held.row;
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      const int row = row0 + j, row1 = y.begin + 8 * warp + held.row + j;
      unit[j] = counts && row < state.end && row < N;
      scale[j] = kFactored && row1 < y.end && row1 < K ? a.scale[row1] : 0.f;
      parameter[j] = unit[j] ? parameter_of(a, row) : 0.f;
      total[j] = {0, 0};
      if (has_sums() && unit[j]) total[j] = {a.sums[sums_at(row)], a.sums[sums_size() + sums_at(row)]};
      next.x[j] = next.gate[j] = 0;
    }
    at = first + row0 - stride;
    // tokens are [T, B]: one for N elements of the others
    id = -1, first_token = has_tokens() ? first / N : 0;
    fetch_id(0);
    fetch_input(0);
    input = next;
  }
  __device__ __forceinline__ bool has_tokens() const { return !kPlain && !kBackward && a.tokens; }
  __device__ __forceinline__ bool has_cut() const { return !kPlain && a.cut; }
  __device__ __forceinline__ bool has_sums() const { return !kPlain && kBackward && a.sums; }
  __device__ __forceinline__ bool has_norms() const { return !kPlain && kBackward && a.norms; }
  __device__ __forceinline__ bool has_gate() const { return kBackward && (kPlain || a.gate); }
  __device__ __forceinline__ void fetch_id(int i) {
    if (has_tokens() && i < where.end) id = a.tokens[first_token + i * a.B];
  }
  // Called in the order of i. An input that is not in L2 would arrive later than the other blocks' rows.
  __device__ __forceinline__ void fetch_input(int i) {
    at += stride;
    if (has_cut()) next.cut = live(i) && is_cut<kBackward>(a, q0 + g, range.begin + i);
    if (live(i)) {
      const bool ahead = i + kAhead < where.end;
#pragma unroll
      for (int j = 0; j < kHeld; j++) {
        if (!unit[j]) continue;
        if (has_tokens()) {
          next.x[j] = id >= 0 && id < a.D ? a.table[id * N + row0 + j] : NAN;
          continue;
        }
        next.x[j] = a.x[at + j];
        if (has_gate()) next.gate[j] = a.gate[at + j];
        if (!ahead) continue;
        prefetch(a.x + at + j + kAhead * stride);
        if (has_gate()) prefetch(a.gate + at + j + kAhead * stride);
      }
    }
    fetch_id(i + 1);
  }

  __device__ __forceinline__ float* carried(int j) const { return a.carried + (q0 + g) * N + row0 + j; }

  // The new state of this lane's rows from their complete a; zero for a row beyond the last unit, and for a sequence
  // that does not have the step. `passed`: the last state of all rows.
  __device__ __forceinline__ void end_step(float (&before)[kHeld], float (&after)[kHeld], bool live_step,
                                           const float* passed) {
    constexpr bool kLeak = !kPlain;
    constexpr int kActivation = Traits::kActivation;
    Leak<kLeak> leak[kHeld];
    float argument[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      // from memory, since registers are few: backward the lane's own element of `carried`
      if (kLeak && a.leak && unit[j] && live_step)
        leak[j] = {leak_of(a, row0 + j), kBackward ? *carried(j) : passed[g * state.pitch + row0 + j]};
      argument[j] = argument_of<kBackward, kActivation>(a, before[j], input.gate[j], leak[j], parameter[j]);
    }
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      float other = 0, other_gate = 0;
      if (!kPlain && on_pairs(a.activation)) {
        // the other unit of the pair is this lane's other row, or another lane's
        if constexpr (kHeld > 1) {
          other = argument[j ^ 1], other_gate = input.gate[j ^ 1];
        } else {
          other = __shfl_xor_sync(kAllLanes, argument[j], Traits::kCopies);
          if (kBackward) other_gate = __shfl_xor_sync(kAllLanes, input.gate[j], Traits::kCopies);
        }
      }
      const bool second = (held.row + j) % 2;
      const float value = state_after<kBackward, kActivation>(a, argument[j], input.gate[j], other, other_gate, second,
                                                              parameter[j], leak[j]);
      if (kLeak && kBackward && a.leak && unit[j] && live_step) *carried(j) = a.cut && input.cut ? 0.f : before[j];
      after[j] = row0 + j < N && live_step ? value : 0.f;
    }
  }

  // Backward: the squares of a, and this lane's share of act_param's gradient.
  __device__ __forceinline__ float add_sums(const float (&before)[kHeld], bool live_step) {
    float square = 0;
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      if (!unit[j] || !live_step) continue;
      square = fmaf(before[j], before[j], square);
      if (has_sums())
        total[j].add(parameter_grad_as<kAnyActivation>(a.activation, before[j], input.gate[j], parameter[j]));
    }
    return square;
  }

  // The state that a step passes on to the others: with a cut, restart or zeros instead of its own.
  __device__ __forceinline__ void pass(int i, const float (&after)[kHeld]) const {
    float passed[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      passed[j] = after[j];
      if (has_cut() && unit[j] && input.cut) passed[j] = restart_of(a, q0 + g, row0 + j);
    }
    state.send(passed, i);
  }

  // The rest of step i after its state has been sent: results to memory, norms. The input of step i + 1 has been
  // fetched.
  __device__ __forceinline__ void publish(int i, const float (&before)[kHeld], const float (&after)[kHeld],
                                          bool live_step) {
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      if (!unit[j] || !live_step) continue;
      const int64_t offset = at - stride + j;
      if (kPlain || a.out) a.out[offset] = after[j];
      if (!kPlain && a.pre) a.pre[offset] = before[j];
    }
    if (has_sums() || has_norms()) {
      const float square = warp_sum(add_sums(before, live_step));
      const int64_t t = a.T - 1 - (range.begin + i);
      if (a.norms && lane == 0)
        a.norms[((t * gridDim.x + blockIdx.x) * Traits::kSets + set) * kClusterWarps + warp] = square;
    }
    input = next;
  }

  // `last`: the state of the last step.
  __device__ __forceinline__ void finish(const float (&last)[kHeld], bool any_step) {
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
      if (!unit[j]) continue;
      if (a.end && any_step && q0 + g < a.sequences) a.end[(q0 + g) * N + row0 + j] = last[j];
      if (has_sums())
        a.sums[sums_at(row0 + j)] = total[j].sum, a.sums[sums_size() + sums_at(row0 + j)] = total[j].error;
    }
  }
};

// The maps of a block, and the steps of its sequences.
template <class Traits>
struct ClusterSteps {
  static constexpr bool kFactored = Traits::kFactored, kBackward = Traits::kBackward;
  static constexpr int kHeld = Traits::kHeld;
  using Thread = ClusterThread<Traits>;

  ClusterMaps<Traits> maps;
  const ClusterMemory<Traits> at;
  float4 weights1[Traits::kRegisters1][Traits::kVectors];
  float4 weights2[Traits::kRegisters2 ? Traits::kRegisters2 : 1][Traits::kVectors];

  __device__ __forceinline__ ClusterSteps(const ScanArgs& a, const ScanPlan& plan, unsigned char* memory)
      : maps(a, plan, cluster_rank()),
        at(plan.chunks1 * kChunk, kFactored ? plan.chunks2 * kChunk : 0, plan.shared_chunks, maps.order.streamed > 0) {
    maps.chunks = reinterpret_cast<float*>(memory + at.chunks), maps.ring = reinterpret_cast<float*>(memory + at.ring);
    maps.load_shared();
    maps.load_registers(weights1, maps.packed1, maps.registers1);
    if constexpr (Traits::kRegisters2 > 0) maps.load_registers(weights2, maps.packed2, maps.registers2);
  }
  __device__ __forceinline__ void first_product(const Thread& self, int i, float (&v)[kHeld]) {
    const bool last_set = self.set == Traits::kSets - 1;
    ClusterProduct<Traits> product;
    self.state.wait(i - 1);
    const float* const from = self.state.place(i - 1);
    product.clear();
    maps.multiply_registers(product, weights1, maps.registers1, from, at.pitch1);
    maps.multiply_rest(product, 0, maps.rest1, from + maps.registers1 * kChunk, at.pitch1, last_set);
    product.finish(v, self.partial);
  }
  __device__ __forceinline__ void second_product(const Thread& self, int i, float (&v)[kHeld]) {
    const bool last_set = self.set == Traits::kSets - 1;
    ClusterProduct<Traits> product;
    self.y.wait(i);
    product.clear();
    if constexpr (Traits::kRegisters2 > 0)
      maps.multiply_registers(product, weights2, maps.registers2, self.y.data, at.pitch2);
    maps.multiply_rest(product, maps.rest1, maps.order.count, self.y.data + maps.registers2 * kChunk, at.pitch2,
                       last_set);
    product.finish(v, self.partial);
  }
  // Factored: the first half of a step, up to y.
  __device__ __forceinline__ void begin_step(Thread& self, int i) {
    float v[kHeld];
    first_product(self, i, v);
#pragma unroll
    for (int j = 0; j < kHeld; j++) v[j] *= self.scale[j];
    self.y.send(v, i);
  }
  // The rest of a step: the state.
  __device__ __forceinline__ void end_step(Thread& self, int i, float (&before)[kHeld], float (&after)[kHeld]) {
    if constexpr (kFactored) second_product(self, i, before);
    else first_product(self, i, before);
#pragma unroll
    for (int j = 0; j < kHeld; j++) before[j] += self.input.x[j];
    self.end_step(before, after, self.live(i), self.state.place(i - 1));
    self.pass(i, after);
  }
};

template <class Traits>
__global__ void __launch_bounds__(kClusterThreads, 1) cluster_scan_kernel(const ScanArgs a, const ScanPlan plan) {
  constexpr bool kFactored = Traits::kFactored, kTwo = Traits::kSets > 1;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  ClusterThread<Traits> one(a, plan, 0), other(a, plan, Traits::kSets - 1);
  ClusterSteps<Traits> steps(a, plan, memory);
  const int columns1 = plan.chunks1 * kChunk, columns2 = kFactored ? plan.chunks2 * kChunk : 0;
  one.start_vectors(memory, steps.at, columns1, columns2);
  one.start_rows();
  if constexpr (kTwo) {
    other.start_vectors(memory, steps.at, columns1, columns2);
    other.start_rows();
  }
  __syncthreads();
  cluster_sync();  // the vectors and barriers of all blocks are ready before any block sends

  const int length = one.range.end - one.range.begin;
  if (Traits::kTensor || one.has_rows1() || one.has_rows2()) {
    float before[Traits::kHeld], last[Traits::kHeld] = {}, other_last[Traits::kHeld] = {};
    steps.maps.start_ring();
#pragma unroll 1
    for (int i = 0; i < length; i++) {
      if constexpr (kFactored) {
        steps.begin_step(one, i);
        if constexpr (kTwo) steps.begin_step(other, i);
      }
      steps.end_step(one, i, before, last);
      one.fetch_input(i + 1);
      if constexpr (kTwo) other.fetch_input(i + 1);
      one.publish(i, before, last, one.live(i));
      if constexpr (kTwo) {
        steps.end_step(other, i, before, other_last);
        other.publish(i, before, other_last, other.live(i));
      }
    }
    cp_async_wait<0>();
    one.state.wait(length - 1);
    one.finish(last, length > 0);
    if constexpr (kTwo) {
      other.state.wait(length - 1);
      other.finish(other_last, length > 0);
    }
  }
  __syncwarp();
  cluster_sync();  // no block exits while others may still send to it
}

}  // namespace orthokern::cuda
