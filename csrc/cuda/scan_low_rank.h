// The scan of factored maps of low rank: one block owns one sequence for all of its steps, and a step has one barrier.
//
//   registers      the maps and the state: a lane has kUnits units, 32 apart, and their rows of both maps. The map is
//                  then two products of a lane's own numbers, with one sum over the block, of K values, in between
//   shared memory  the sums of the warps, in two buffers; rings of the inputs of the next kAhead steps, filled by
//                  cp.async, of which a thread reads what it has fetched; backward: squares of the last steps
//   memory         as in scan_resident.h
//
// A step, beginning with the sums that each lane has of its own units, for every k:
//
//   the lanes exchange sums until each has one k (or two), of kParts parts of its warp (reduce_scatter); meanwhile the
//   results of the last step go to memory, and inputs of a later step are fetched (publish)
//   the barrier, after which each lane adds up the parts of all warps for its k, and scales the sum by s_k
//   the warp hands the K values to all of its lanes, which multiply them by their rows and end the step for their units
//
// The instructions of a warp for the sum over the block are the same for any number of units. So a lane has several
// units, and a scheduler one warp, as far as the registers suffice: the units hide the latency of each other's
// multiply-adds. tests/test_sass.py counts the instructions between the store and the barrier.
#pragma once

#include "cuda/scan_units.h"

namespace orthokern::cuda {

constexpr int kLowRankPart = 32;  // steps whose flags and token ids are read together, and whose squares are summed

// rank: K, padded. units: of a lane. warps: of a block, at most. activation: a number of common/activations.h, or
// kAnyActivation.
template <bool backward, int rank, int units, int warps, int activation>
struct LowRankTraits {
  static constexpr bool kBackward = backward;
  static constexpr int kRank = rank, kUnits = units, kWarps = warps, kActivation = activation;
  static constexpr int kSpread = rank < 32 ? rank : 32;  // lanes over which the sums of a warp are spread
  static constexpr int kOwn = rank / kSpread, kParts = 32 / kSpread;
  // Words of shared memory for the sums of one k: the distance of two of them avoids bank conflicts of 16-byte reads.
  static constexpr int kSumWords = kParts * warps + 4;
  // Steps that inputs are fetched ahead: at least 1 us, more than device memory takes to answer.
  static constexpr int kAhead = units > 4 ? 4 : 8;
  static constexpr bool kAny = activation == kAnyActivation;
  // Blocks that a multiprocessor holds: the code for a leak would otherwise take the registers of the fourth one.
  static constexpr int kBlocks = warps == 4 && !backward && kAny ? 4 : 1;
  static constexpr bool kGates = backward && (kAny || reads_of(activation) != act::kNothing);
  static constexpr bool kPre = kAny || (!backward && reads_of(activation) == act::kInput);
  static constexpr bool kLeak = kAny;
  static constexpr bool kSums = backward && (kAny || has_parameter(activation));
  static_assert(rank >= 8 && rank <= 64 && rank * units <= 64 && warps <= 8, "the maps do not fit into the registers");
};

template <class Traits>
struct LowRankMemory {                         // the block's shared memory, in words
  int y, inputs, gates, leak, squares, total;  // the sums come first
  __host__ __device__ LowRankMemory(int warps, bool has_leak) {
    const int vector = warps * 32 * Traits::kUnits, vectors = Traits::kAhead * vector;
    y = 2 * Traits::kRank * Traits::kSumWords;
    inputs = y + warps * Traits::kRank;
    gates = inputs + vectors;
    leak = gates + (Traits::kGates ? vectors : 0);
    squares = leak + (Traits::kLeak && has_leak ? 2 * vector : 0);
    total = squares + (Traits::kBackward ? 2 * kLowRankPart * warps * 32 : 0);
  }
};

// One thread of a block, and the parts of a step.
template <class Traits>
struct LowRankThread {
  static constexpr bool kBackward = Traits::kBackward;
  static constexpr int kRank = Traits::kRank, kUnits = Traits::kUnits, kActivation = Traits::kActivation;
  static constexpr int kSpread = Traits::kSpread, kOwn = Traits::kOwn, kParts = Traits::kParts;
  static constexpr int kAhead = Traits::kAhead, kSumWords = Traits::kSumWords;

  // One of 32 steps for each lane: the token id of the step whose inputs publish() fetches then, and the cut.
  struct Part {
    int64_t id;
    int cut;
  };

  const ScanArgs& a;
  const int warps, lane, warp, n;              // n: the first unit
  int units;                                   // how many units the lane has
  float *sums, *y, *inputs, *gates, *squares;  // inputs, gates: of the first unit of the lane
  int begin, length;                           // the steps of the sequence
  int64_t stride, at;    // from one step to the next; the first unit in the step that publish() is called for next
  const int64_t* token;  // of step 0
  float first[kUnits][kRank], second[kUnits][kRank], scale[kOwn];
  float state[kUnits], after[kUnits], before[kUnits], parameter[kUnits];
  float square;  // sum of the squares of before
  RunningSum total[kUnits];

  __device__ __forceinline__ explicit LowRankThread(const ScanArgs& args)
      : a(args),
        warps(static_cast<int>(blockDim.x) / 32),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        n(32 * kUnits * warp + lane) {
    const LowRankMemory<Traits> places(warps, a.leak);
    sums = dynamic_shared<float>();
    y = sums + places.y + warp * kRank;
    inputs = sums + places.inputs + n, gates = sums + places.gates + n, squares = sums + places.squares;
    const int left = static_cast<int>(a.N) - n;
    square = 0;
    units = left <= 0 ? 0 : (left + 31) / 32 < kUnits ? (left + 31) / 32 : kUnits;
    const Sequence s = sequence<kBackward>(a, blockIdx.x);
    begin = s.begin, length = s.end - s.begin;
    stride = step_stride<kBackward>(a);
    at = s.first + begin * stride + n - kAhead * stride;  // start() fetches the first steps
    token = a.tokens ? token_of(a, s.first + begin * stride) : nullptr;
  }

  // One map after the other: all addresses at once would not fit into the registers.
  __device__ __forceinline__ void load_map(float (&map)[kUnits][kRank], const float* from) const {
    const int K = static_cast<int>(a.K);
#pragma unroll
    for (int r = 0; r < kUnits; r++) {
      const float* const row = from + static_cast<int64_t>(n + 32 * r) * K;
#pragma unroll
      for (int k = 0; k < kRank; k++) {
        map[r][k] = r < units && k < K ? row[k] : 0.f;
        if (k % 4 == 3) __syncwarp();  // as in MapTile::fill
      }
    }
  }
  // The ranks whose sums a lane has after reduce_scatter.
  __device__ __forceinline__ int own_k(int j) const { return lane % kSpread * kOwn + j; }
  __device__ __forceinline__ bool has_leak() const { return Traits::kLeak && a.leak; }
  // With a leak: the carried values of the lane's units, and their leaks. Recomputed rather than kept in registers.
  __device__ __forceinline__ float* carried() const {
    return (Traits::kGates ? gates : inputs) + kAhead * warps * 32 * kUnits;
  }
  __device__ __forceinline__ float* leaks() const { return carried() + warps * 32 * kUnits; }

  __device__ __forceinline__ void start() {
    load_map(first, a.first);
    load_map(second, a.second);
#pragma unroll
    for (int j = 0; j < kOwn; j++) scale[j] = own_k(j) < a.K ? a.scale[own_k(j)] : 0.f;
#pragma unroll
    for (int r = 0; r < kUnits; r++) {
      const bool unit = r < units;
      const int64_t row = n + 32 * r, place = blockIdx.x * a.N + row;
      state[r] = a.start && unit ? a.start[place] : 0.f;
      after[r] = before[r] = 0;
      parameter[r] = unit ? parameter_of(a, row) : 0.f;
      total[r] = {0, 0};
      if (Traits::kSums && a.sums && unit) total[r] = {a.sums[place], a.sums[gridDim.x * a.N + place]};
    }
    // the sums of warps that the block does not have, and the inputs of missing units, stay zero
    for (int i = threadIdx.x; i < LowRankMemory<Traits>(warps, a.leak).squares; i += blockDim.x) sums[i] = 0;
    __syncthreads();
    if (has_leak())
#pragma unroll
      for (int r = 0; r < kUnits; r++) {
        if (r >= units) continue;
        leaks()[32 * r] = leak_of(a, n + 32 * r);
        carried()[32 * r] = kBackward ? a.carried[blockIdx.x * a.N + n + 32 * r] : state[r];
      }
#pragma unroll 1
    for (int i = 0; i < kAhead - 1; i++) {
      fetch(i, a.tokens && i < length ? token[(kBackward ? -i : i) * a.B] : 0);
      cp_async_commit();
    }
  }

  // Fetches the inputs of a step to the place where this thread reads them. The step is kAhead steps after that of
  // `at`, which advances to the next step.
  __device__ __forceinline__ void fetch(int step, int64_t id) {
    const int place = (step & (kAhead - 1)) * warps * 32 * kUnits, limit = step < length ? units : 0;
    const bool known = static_cast<uint64_t>(id) < static_cast<uint64_t>(a.D);
    const int64_t ahead = at + kAhead * stride;
    const float* const from = kBackward || !a.tokens ? a.x + ahead : a.table + (known ? id * a.N : 0) + n;
    const bool nan = !kBackward && a.tokens && !known;
#pragma unroll
    for (int r = 0; r < kUnits; r++) cp_async_if<4>(r < limit && !nan, inputs + place + 32 * r, from + 32 * r);
    if (nan)
#pragma unroll
      for (int r = 0; r < kUnits; r++)
        if (r < limit) inputs[place + 32 * r] = NAN;
    if constexpr (Traits::kGates)
      if (!Traits::kAny || a.gate)
#pragma unroll
        for (int r = 0; r < kUnits; r++) cp_async_if<4>(r < limit, gates + place + 32 * r, a.gate + ahead + 32 * r);
    at += stride;
  }

  // The Part of this lane for the steps from `step` on.
  __device__ __forceinline__ Part part(int step) const {
    Part result{0, 0};
    const int mine = step + lane, fetched = mine + kAhead - 1;
    if (!kBackward && a.tokens && fetched < length) result.id = token[fetched * a.B];
    if (mine < length) result.cut = is_cut<kBackward>(a, blockIdx.x, begin + mine);
    return result;
  }

  // The rest of a step: its results to memory, inputs of a later step, and a wait for those of the next step. Called
  // for consecutive steps, from -1 on. id: the token of the later step.
  __device__ __forceinline__ void publish(int step, int64_t id) {
    const int limit = step >= 0 ? units : 0;
    if (a.out)
#pragma unroll
      for (int r = 0; r < kUnits; r++)
        if (r < limit) a.out[at + 32 * r] = after[r];
    if (Traits::kPre && a.pre)
#pragma unroll
      for (int r = 0; r < kUnits; r++)
        if (r < limit) a.pre[at + 32 * r] = before[r];
    if (kBackward) squares[(step & (2 * kLowRankPart - 1)) * warps * 32 + threadIdx.x] = square;
    fetch(step + kAhead, id);
    cp_async_commit();
    cp_async_wait<kAhead - 1>();
  }

  // The sums over the units of the lane, for every k.
  __device__ __forceinline__ void first_product(float (&of_lane)[kRank]) const {
#pragma unroll
    for (int r = 0; r < kUnits; r++)
#pragma unroll
      for (int k = 0; k < kRank; k++)
        of_lane[k] = r == 0 ? first[r][k] * state[r] : fmaf(first[r][k], state[r], of_lane[k]);
  }
  __device__ __forceinline__ float* sums_of(int step, int j) const {
    return sums + (((step & 1) * kOwn + j) * kSpread + lane % kSpread) * kSumWords;
  }
  // The sum over the block for the lane's own k, times s_k.
  __device__ __forceinline__ void block_sums(float (&own)[kOwn], int step) const {
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
      const float4* const from = reinterpret_cast<const float4*>(sums_of(step, j));
      auto sum_from = [&](int begin_quad) {
        float sum = 0;
#pragma unroll
        for (int q = 0; q < kParts; q++) {
          const float4 four = from[begin_quad + q];
          const float of_quad = (four.x + four.y) + (four.z + four.w);
          sum = q == 0 ? of_quad : sum + of_quad;
        }
        return sum;
      };
      float sum = sum_from(0);
      if (Traits::kWarps > 4 && warps > 4) sum += sum_from(kParts);
      own[j] = sum * scale[j];
    }
  }
  // before[r] = second times y, which the lanes of the warp hold, plus the input.
  __device__ __forceinline__ void second_product(const float (&own)[kOwn], const float (&input)[kUnits]) {
    constexpr int kChains = kUnits < 4 ? 4 / kUnits : 1;  // sums of a unit that do not wait for each other
    float chains[kUnits][kChains] = {};
    auto multiply = [&](int k, float value) {
#pragma unroll
      for (int r = 0; r < kUnits; r++) chains[r][k % kChains] = fmaf(second[r][k], value, chains[r][k % kChains]);
    };
    if constexpr (kRank == 8) {
#pragma unroll
      for (int k = 0; k < kRank; k++) multiply(k, __shfl_sync(kAllLanes, own[0], k));
    } else {
#pragma unroll
      for (int j = 0; j < kOwn; j++)
        if (lane < kSpread) y[own_k(j)] = own[j];
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kRank; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(y + k);
        multiply(k, four.x), multiply(k + 1, four.y), multiply(k + 2, four.z), multiply(k + 3, four.w);
      }
    }
#pragma unroll
    for (int r = 0; r < kUnits; r++) {
      float sum = chains[r][0];
#pragma unroll
      for (int c = 1; c < kChains; c++) sum += chains[r][c];
      before[r] = sum + input[r];
    }
  }

  // The states after this step, and its share of the gradients, so that a thread need not keep more of it.
  __device__ __forceinline__ void end_step(float (&gate)[kUnits], bool cut) {
    with_activation<kActivation>(a.activation, [&](auto activation) {
      using A = decltype(activation);
#pragma unroll
      for (int r = 0; r < kUnits; r++) {
        Leak<Traits::kLeak> leak;
        if (has_leak()) leak = {leaks()[32 * r], carried()[32 * r]};
        const float argument = argument_of<kBackward, A::number>(a, before[r], gate[r], leak, parameter[r]);
        float other = 0, other_gate = 0;
        if constexpr (A::pairs) {
          other = __shfl_xor_sync(kAllLanes, argument, 1);
          if (kBackward) other_gate = __shfl_xor_sync(kAllLanes, gate[r], 1);
        }
        const bool second_of_pair = lane % 2;
        after[r] = state_after<kBackward, A::number>(a, argument, gate[r], other, other_gate, second_of_pair,
                                                     parameter[r], leak);
        if (A::has_parameter && Traits::kSums && a.sums)
          total[r].add(parameter_grad<A>(before[r], gate[r], parameter[r]));
      }
    });
    square = 0;
#pragma unroll
    for (int r = 0; r < kUnits; r++) square = fmaf(before[r], before[r], square);
#pragma unroll
    for (int r = 0; r < kUnits; r++) state[r] = after[r];
    if (cut)
#pragma unroll
      for (int r = 0; r < kUnits; r++) state[r] = r < units ? restart_of(a, blockIdx.x, n + 32 * r) : 0.f;
    if (has_leak())
#pragma unroll
      for (int r = 0; r < kUnits; r++) carried()[32 * r] = kBackward ? (cut ? 0.f : before[r]) : state[r];
  }

  __device__ __forceinline__ void step(int i, int64_t id, bool cut) {
    float of_lane[kRank], own[kOwn], input[kUnits], gate[kUnits];
    first_product(of_lane);
    reduce_scatter<kSpread>(of_lane, lane % kSpread, [&] { publish(i - 1, id); });
#pragma unroll
    for (int j = 0; j < kOwn; j++) sums_of(i, j)[warp * kParts + lane / kSpread] = of_lane[j];
    __syncthreads();
    const int place = (i & (kAhead - 1)) * warps * 32 * kUnits;
#pragma unroll
    for (int r = 0; r < kUnits; r++) {
      input[r] = inputs[place + 32 * r];
      gate[r] = Traits::kGates ? gates[place + 32 * r] : 0.f;
    }
    block_sums(own, i);
    second_product(own, input);
    end_step(gate, cut);
  }

  __device__ __forceinline__ void norms(int from, int count) const {
    if (kBackward && a.norms) sum_squares<2 * kLowRankPart>(a, squares, warps * 32, warps, begin, from, count);
  }

  __device__ __forceinline__ void finish(int summed) {
    publish(length - 1, 0);
    if (kBackward && a.norms) {
      __syncthreads();
      norms(summed, length - summed);
    }
#pragma unroll
    for (int r = 0; r < kUnits; r++) {
      const int64_t place = blockIdx.x * a.N + n + 32 * r;
      if (r >= units) continue;
      if (a.end) a.end[place] = begin + length == a.chunk ? state[r] : 0.f;
      if (kBackward && has_leak()) a.carried[place] = carried()[32 * r];
      if (Traits::kSums && a.sums) a.sums[place] = total[r].sum, a.sums[gridDim.x * a.N + place] = total[r].error;
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kWarps, Traits::kBlocks) low_rank_scan_kernel(const ScanArgs a) {
  LowRankThread<Traits> self(a);
  self.start();
  const int length = self.length;
  int summed = 0;  // steps whose norms are written
  auto next = self.part(0);
  // The first part is one step, so that the squares of a whole part have passed a barrier when another one is over.
  for (int begin = 0, end; begin < length; begin = end) {
    end = begin == 0 ? 1 : begin + kLowRankPart < length ? begin + kLowRankPart : length;
    const auto part = next;
    next = self.part(end);
    const unsigned cuts = __ballot_sync(kAllLanes, part.cut);
    if (begin > 1) self.norms(summed, kLowRankPart), summed += kLowRankPart;
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      const int at = i - begin;
      self.step(i, a.tokens ? __shfl_sync(kAllLanes, part.id, at) : 0, cuts >> at & 1);
    }
  }
  self.finish(summed);
}

}  // namespace orthokern::cuda
