// The scan for small N: one block owns sequences for all of their steps, without communication between blocks.
//
//   registers      the maps: warp w has kRows rows for each of its 4 tiles, row 4 (kRows w + i) + tile, and a lane has
//                  2 C of their columns; lane l has tile l % 4 and, of each 32 columns, the four from 4 (l / 4) on
//   shared memory  the states and, factored, y = s * (V^T h); rings of the inputs of the next kAhead steps, filled by
//                  cp.async; backward: squares of the last steps, which are summed kSquareSteps at a time
//   memory         x_t (or a row of the table) and, backward, h_t or a_t in; h_t (a_t) or delta_t out
//
// A step is one or two products. In each, a thread loads its elements of the state (16 bytes at a time), multiplies
// them into the sums of its rows, and the 8 lanes of a tile exchange sums until each row is complete in one lane
// (reduce_scatter). That lane ends the step for the row and stores its state. A barrier of the block follows: two per
// step, or one for a dense map, whose state alternates between two buffers.
//
// Only work for the next product is done between the last sum and the barrier. Everything else of a step (its stores to
// memory, the fetch of later inputs, sums of gradients) is done by publish(), while the lanes exchange the sums of the
// next product. tests/test_sass.py counts the instructions between the store and the barrier.
//
// C warps serve N up to 16 C. Registers limit C: 16 C weights of a factored map and about 50 more per thread in 65536 /
// (32 C). 10 warps would have 168 for 160 weights and everything else, because registers are allocated to warps in
// groups of four. 8 warps have 255 for the same maps, 200 weights per thread (5 rows of 20 columns). If they fit, two
// sequences are multiplied at a time: their sums fill the lanes that one sequence leaves idle at the end.
//
// docs/gpu.md has the instructions of a step.
#pragma once

#include "cuda/scan_units.h"

namespace orthokern::cuda {

// How a kernel holds maps of 16 C x 16 C in `warps` warps, and what a step includes. many: a block has several
// sequences. activation: a number of common/activations.h, or kAnyActivation. inputs: the source of the inputs of a
// step; with kAnyInputs, the arguments select it. cuts: the calls with ScanArgs::cut or leak, whose sequences are
// multiplied one at a time, since their code needs registers.
enum ResidentInputs { kFeatures, kTokens, kAnyInputs };
template <bool factored, bool backward, int warps, int C, bool many, int activation, ResidentInputs inputs, bool cuts>
struct ResidentTraits {
  static constexpr bool kFactored = factored, kBackward = backward, kMany = many, kCuts = cuts;
  static constexpr int kActivation = activation;
  static constexpr int kWarps = warps, kThreads = 32 * warps, kPadded = 16 * C;
  static constexpr int kLanes = 8, kTiles = 32 / kLanes;                                 // of a tile; in a warp
  static constexpr int kRows = kPadded / (warps * kTiles), kColumns = kPadded / kLanes;  // of a lane's tile
  static constexpr int kSequences = many && !cuts && 2 * kRows <= kLanes ? 2 : 1;        // at a time
  // Blocks that a multiprocessor holds: one map of 128 units leaves room for two, which hide each other's latency.
  static constexpr int kBlocks = !factored && C == 8 && !cuts ? 2 : 1;
  // Steps that inputs are fetched ahead: at least 1 us, more than device memory takes to answer.
  static constexpr int kAhead = many ? 4 : 8;
  // Token ids are fetched another kAhead + 1 steps ahead of the rows that they select.
  static constexpr int kIdRing = 4 * kAhead;
  static constexpr bool kAny = activation == kAnyActivation;
  static __device__ __forceinline__ bool tokens(const ScanArgs& a) {
    return !backward && (inputs == kAnyInputs ? a.tokens != nullptr : inputs == kTokens);
  }
  static constexpr bool kGates = backward && (kAny || reads_of(activation) != act::kNothing);
  static constexpr bool kPre = cuts || (!backward && (kAny || reads_of(activation) == act::kInput));
  static constexpr bool kSums = backward && (kAny || has_parameter(activation));
  static constexpr int kSquares = kPadded * kSequences;           // of a step, one for each sum
  static constexpr int kSquareSteps = kSequences == 1 ? 32 : 16;  // steps whose squares are summed together
  static_assert(C % 2 == 0 && kRows * warps * kTiles == kPadded, "a lane reads four columns, a warp has whole tiles");
  static_assert(kRows * kSequences <= kLanes, "a lane ends the step of at most one row of one sequence");
  static_assert((factored ? 2 : 1) * kRows * kColumns + 50 <= 65536 / (kThreads * kBlocks),
                "the maps and all else do not fit into the registers");
};

// The steps of a sequence. Step i of its unit n is element first + i * stride + n of a [T, B, N] tensor, and it has the
// steps i in [begin, begin + count).
struct alignas(16) SequenceSteps {
  int64_t first;
  int begin, count;
  __device__ __forceinline__ bool has(int step) const {
    return static_cast<unsigned>(step - begin) < static_cast<unsigned>(count);
  }
};

template <class Traits>
struct ResidentMemory {  // the block's shared memory, in bytes
  int64_t sequences, ids, state, y, inputs, gates, squares, carried, total;
  __host__ __device__ ResidentMemory(int group, bool tokens, bool leak) {
    int64_t end = 0;
    auto take = [&](int64_t bytes) {
      const int64_t begin = end;
      end += (bytes + 15) / 16 * 16;
      return begin;
    };
    const int64_t vectors = static_cast<int64_t>(group) * Traits::kPadded * sizeof(float);
    sequences = take(group * sizeof(SequenceSteps));
    ids = take(tokens ? group * Traits::kIdRing * sizeof(int64_t) : 0);
    state = take((Traits::kFactored ? 1 : 2) * vectors);
    y = take(Traits::kFactored ? vectors : 0);
    inputs = take(Traits::kAhead * vectors);
    gates = take(Traits::kGates ? Traits::kAhead * vectors : 0);
    squares = take(Traits::kBackward ? 2 * Traits::kSquareSteps * Traits::kSquares * sizeof(float) : 0);
    carried = take(Traits::kBackward && leak ? vectors : 0);
    total = end;
  }
};

// Columns of a lane's tile: element j is column vector * (kLanes (j / vector) + lane) + j % vector, so that lanes read
// neighbouring elements.
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
template <class Traits>
struct MapTile {
  static constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns;
  using Columns = TileColumns<kColumns, Traits::kLanes>;
  float weights[kRows][kColumns];

  // weight(i, j): row i, column j of the tile.
  template <class Weight>
  __device__ __forceinline__ void fill(Weight weight) {
#pragma unroll
    for (int q = 0; q < kColumns / 4; q++) {
#pragma unroll
      for (int i = 0; i < kRows; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) weights[i][4 * q + e] = weight(i, 4 * q + e);
        // the compiler moves no loads across it: all addresses at once would not fit into the registers
        __syncwarp();
      }
    }
  }
  // sums[i] = row i times the vector of which x has this lane's columns.
  __device__ __forceinline__ void multiply(float* sums, const float (&x)[kColumns]) const {
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int i = 0; i < kRows; i++) sums[i] = j == 0 ? weights[i][j] * x[j] : fmaf(weights[i][j], x[j], sums[i]);
  }
};

// One thread of a block, and the parts of a step.
template <class Traits>
struct ResidentThread {
  static constexpr bool kFactored = Traits::kFactored, kBackward = Traits::kBackward, kMany = Traits::kMany;
  static constexpr int kPadded = Traits::kPadded, kThreads = Traits::kThreads, kTiles = Traits::kTiles;
  static constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns, kSequences = Traits::kSequences;
  static constexpr int kAhead = Traits::kAhead, kIdRing = Traits::kIdRing, kSums = kRows * kSequences;
  static constexpr int kSquareSteps = Traits::kSquareSteps;
  using Tile = MapTile<Traits>;

  // The data of a step of one sequence for publish().
  struct Result {
    int g, place;  // its sequence, and the place of its inputs and of those of a later step
    float after, before, gate;
    SequenceSteps s;  // kMany, not kCuts: the steps of its sequence
    int64_t id;       // the token of the step whose inputs publish() fetches
  };

  // The location of one step of one sequence in memory: its results, and the inputs of the step kAhead later.
  struct Cursor {
    float *out, *pre;
    const float *x, *gate;
    __device__ __forceinline__ void advance(int64_t elements) {
      out += elements;
      if (Traits::kPre) pre += elements;
      x += elements;
      if (Traits::kGates) gate += elements;
    }
  };

  const ScanArgs& a;
  const int group;
  SequenceSteps* sequences;                     // [group]
  int64_t* ids;                                 // [group][kIdRing]
  float *state, *y, *inputs, *gates, *squares;  // [1 or 2][group][kPadded]; [group][kPadded]; [kAhead][group][kPadded]
                                                // twice; [2][kSquareSteps][kSquares]
  int column_lane, warp, row, own;  // the row and, of kSequences, the sequence whose sum this lane has after a product
  bool has_out;
  bool counts, unit, second;  // the only lane with it; a unit of the state; the second unit of a pair
  float scale, parameter;
  int64_t stride, moved;  // elements from one step to the next, and from step 0 to the current one
  const int64_t* token;   // the next id that this thread fetches, of sequence threadIdx.x
  int ids_end;            // and the number of its ids
  SequenceSteps only;     // !kMany: the steps of the sequence, none for a lane that has no unit
  Cursor cursor;          // !kMany: of the step that publish() is called for next
  StepRange range;
  float square;
  RunningSum total;

  __device__ __forceinline__ ResidentThread(const ScanArgs& args, int group_size)
      : a(args), group(kMany ? group_size : 1), square(0), total{0, 0} {
    unsigned char* const memory = dynamic_shared<unsigned char>();
    const ResidentMemory<Traits> at(group, a.tokens != nullptr, a.leak != nullptr);
    sequences = reinterpret_cast<SequenceSteps*>(memory + at.sequences);
    ids = reinterpret_cast<int64_t*>(memory + at.ids);
    state = reinterpret_cast<float*>(memory + at.state);
    y = reinterpret_cast<float*>(memory + at.y);
    inputs = reinterpret_cast<float*>(memory + at.inputs);
    gates = reinterpret_cast<float*>(memory + at.gates);
    squares = reinterpret_cast<float*>(memory + at.squares);
    const int thread = threadIdx.x;
    column_lane = thread % 32 / kTiles, warp = thread / 32;
    const int index = scattered_index<Traits::kLanes, kSums>(column_lane, counts);
    row = row_of(kSequences == 1 ? index : index % kRows), own = kSequences == 1 ? 0 : index / kRows;
    unit = counts && row < a.N, second = row % 2;
    has_out = a.out != nullptr;
    scale = kFactored && row < a.K ? a.scale[row] : 0.f;
    parameter = row < a.N ? parameter_of(a, row) : 0.f;
    stride = step_stride<kBackward>(a), moved = 0;
    range = steps_to_run<kBackward>(a, q0(), group);
  }
  // Backward with a leak: [group][kPadded] after the squares. Not a separate pointer, since registers are few.
  __device__ __forceinline__ float* carried() const { return squares + 2 * kSquareSteps * Traits::kSquares; }
  // The first sequence of the block; the others follow, below a.sequences.
  __device__ __forceinline__ int64_t q0() const { return static_cast<int64_t>(blockIdx.x) * group; }
  __device__ __forceinline__ Sequence sequence_of(int64_t g) const { return sequence<kBackward>(a, q0() + g); }
  // The rows of a warp alternate between its tiles, so that the other unit of a pair is in the next lane.
  __device__ __forceinline__ int row_of(int i) const {
    return kTiles * (kRows * (threadIdx.x / 32) + i) + threadIdx.x % kTiles;
  }

  __device__ __forceinline__ void load_maps(Tile& map1, Tile& map2) const {
    const int N = static_cast<int>(a.N), K = static_cast<int>(a.K);
    if constexpr (kFactored)
      map1.fill([&](int i, int j) {
        const int r = row_of(i), c = Tile::Columns::column(j, column_lane);
        return r < K && c < N ? a.first[c * K + r] : 0.f;
      });
    map2.fill([&](int i, int j) {
      const int r = row_of(i), c = Tile::Columns::column(j, column_lane);
      if constexpr (kFactored) return r < N && c < K ? a.second[r * K + c] : 0.f;
      return r < N && c < N ? a.second[(kBackward ? c : r) * N + (kBackward ? r : c)] : 0.f;
    });
  }

  // Shared memory, and the inputs of the first steps. Step i of the loop is step range.begin + i of a sequence.
  __device__ __forceinline__ void start() {
    const int thread = threadIdx.x;
    for (int g = thread; g < group; g += kThreads) {
      const Sequence s = sequence_of(g);
      sequences[g] = {s.first + range.begin * stride, s.begin - range.begin, s.end - s.begin};
    }
    token = a.tokens, ids_end = 0;
    if (Traits::tokens(a) && thread < group) {
      const Sequence s = sequence_of(thread);
      token += s.first / a.N + range.begin * a.B, ids_end = s.end - range.begin;
      for (int i = 0; i < 2 * kAhead; i++, token += a.B)
        if (i < ids_end) ids[thread * kIdRing + i] = *token;
    }
    for (int i = thread; i < group * kPadded; i += kThreads) {
      const int64_t q = q0() + i / kPadded;
      const int n = i % kPadded;
      const bool unit_of_q = n < a.N && q < a.sequences;
      state[i] = a.start && unit_of_q ? a.start[q * a.N + n] : 0.f;
      if (Traits::kCuts && kBackward && a.leak) carried()[i] = unit_of_q ? a.carried[q * a.N + n] : 0.f;
      if (!kFactored) state[group * kPadded + i] = 0;
      if (kFactored) y[i] = 0;
    }
    if (Traits::kSums && a.sums && unit) total = {a.sums[sums_index(row)], a.sums[sums_size() + sums_index(row)]};
    __syncthreads();
    only = sequences[0];
    only.first += row, only.count = unit ? only.count : 0;
#pragma unroll 1
    for (int i = 0; i < kAhead; i++) {
      // the rest of the last of these steps is fetched by the first publish()
      for (int g = own; g < group; g += kSequences)
        if (i < kAhead - 1 || g + kSequences < group) {
          const SequenceSteps s = steps_of(g);
          fetch(place_of(g, i), i, id_of(g, i), cursor_at(s.first + (i - kAhead) * stride), s);
        }
      if (i < kAhead - 1) cp_async_commit();
    }
    cursor = cursor_at(only.first - stride);
  }

  // The steps of sequence g, none for a lane that has no unit; `first` is of this lane's unit.
  __device__ __forceinline__ SequenceSteps steps_of(int g) const {
    if constexpr (!kMany) return only;
    SequenceSteps s = sequences[g];
    s.first += row, s.count = unit ? s.count : 0;
    return s;
  }
  __device__ __forceinline__ int place_of(int g, int step) const {
    return ((step % kAhead) * group + g) * kPadded + row;
  }
  __device__ __forceinline__ int64_t id_of(int g, int step) const {
    return Traits::tokens(a) ? ids[g * kIdRing + step % kIdRing] : 0;
  }
  // `offset`: of this lane's unit in that step.
  __device__ __forceinline__ Cursor cursor_at(int64_t offset) const {
    const int64_t ahead = offset + kAhead * stride;
    return {a.out + offset, a.pre + offset, a.x + ahead, a.gate + ahead};
  }
  // Fetches the inputs of a step to the place where this thread reads them.
  __device__ __forceinline__ void fetch(int to, int step, int64_t id, const Cursor& from,
                                        const SequenceSteps& s) const {
    const bool wanted = s.has(step);
    float* const place = inputs + to;
    if (Traits::tokens(a)) {
      const bool known = static_cast<uint64_t>(id) < static_cast<uint64_t>(a.D);
      cp_async_if<4>(wanted && known, place, a.table + (known ? id * a.N : 0) + row);
      if (wanted && !known) *place = NAN;
    } else {
      cp_async_if<4>(wanted, place, from.x);
    }
    if constexpr (Traits::kGates) cp_async_if<4>(wanted && (!Traits::kAny || a.gate), gates + to, from.gate);
  }

  // map times the vectors of kSequences sequences, complete in the lane that has the row. between() runs while the
  // first sums are exchanged, when a warp has nothing to issue.
  template <class Between>
  __device__ __forceinline__ float product(const Tile& map, const float* vectors, Between between) const {
    float sums[kSums];
#pragma unroll
    for (int g = 0; g < kSequences; g++) {
      float x[kColumns];
      Tile::Columns::load(x, vectors + g * kPadded, column_lane);
      map.multiply(sums + kRows * g, x);
    }
    reduce_scatter<Traits::kLanes, kSums, kTiles>(sums, column_lane, between);
    return sums[0];
  }

  // The state after this step. Nothing else of it is done here.
  __device__ __forceinline__ float end_step(float& before, float& gate, const Leak<Traits::kCuts>& leak) const {
    constexpr int kActivation = Traits::kActivation;
    const float argument = argument_of<kBackward, kActivation>(a, before, gate, leak, parameter);
    float other = 0, other_gate = 0;
    if (kActivation == kAnyActivation ? on_pairs(a.activation) : on_pairs(kActivation)) {
      other = __shfl_xor_sync(kAllLanes, argument, 1);
      if (kBackward) other_gate = __shfl_xor_sync(kAllLanes, gate, 1);
    }
    return state_after<kBackward, kActivation>(a, argument, gate, other, other_gate, second, parameter, leak);
  }

  // The rest of a step: its results to memory, its share of the gradients, inputs of a later step. `elements`: from
  // step 0 to this one. For a block of one sequence, this is called for consecutive steps, from -1 on.
  __device__ __forceinline__ void publish(const Result& result, int step, int64_t elements) {
    // kCuts: computed twice rather than kept in registers
    const SequenceSteps s = Traits::kCuts ? steps_of(result.g) : kMany ? result.s : only;
    const int64_t id = Traits::kCuts ? id_of(result.g, step + kAhead) : result.id;
    if constexpr (kMany) cursor = cursor_at(s.first + elements);
    const bool live = s.has(step);
    if (live && has_out) *cursor.out = result.after;
    if (Traits::kPre && live && a.pre) *cursor.pre = result.before;
    if (kBackward) square = fmaf(live ? result.before : 0.f, result.before, square);
    if (Traits::kSums && a.sums && live)
      total.add(parameter_grad_as<Traits::kActivation>(a.activation, result.before, result.gate, parameter));
    fetch(result.place, step + kAhead, id, cursor, s);
    if constexpr (!kMany) cursor.advance(stride);
  }

  // Once a step, after its last publish(): squares, token ids, and a wait for the inputs of the step after it.
  __device__ __forceinline__ void close_step(int step) {
    if constexpr (kBackward) {
      if (counts) squares[(step & (2 * kSquareSteps - 1)) * Traits::kSquares + own * kPadded + row] = square;
      square = 0;
    }
    if (Traits::tokens(a)) {
      const int next = step + 2 * kAhead + 1;
      cp_async_if<8>(next < ids_end, ids + threadIdx.x * kIdRing + next % kIdRing, token);
      token += a.B;
    }
    cp_async_commit();
    cp_async_wait<kAhead - 1>();
  }
  __device__ __forceinline__ void norms_of(int begin, int count) const {
    if (a.norms) sum_squares<2 * kSquareSteps>(a, squares, Traits::kSquares, Traits::kWarps, range.begin, begin, count);
  }

  __device__ __forceinline__ int64_t sums_index(int unit_row) const {
    return (static_cast<int64_t>(blockIdx.x) * kSequences + own) * a.N + unit_row;
  }
  __device__ __forceinline__ int64_t sums_size() const { return static_cast<int64_t>(gridDim.x) * kSequences * a.N; }

  // After the loop of `length` steps, whose last state is in `last`.
  __device__ __forceinline__ void finish(int length, const float* last) {
    if (kBackward && a.norms) {
      __syncthreads();
      const int begin = length < 2 ? 0 : (length - 2) / kSquareSteps * kSquareSteps;
      norms_of(begin, length - begin);
    }
    if (Traits::kCuts && kBackward && a.leak)  // in this order, since `row` would take a register during the loop
      for (int i = threadIdx.x; i < group * kPadded; i += kThreads) {
        const int64_t q = q0() + i / kPadded;
        if (i % kPadded < a.N && q < a.sequences) a.carried[q * a.N + i % kPadded] = carried()[i];
      }
    if (a.end && unit)
      for (int g = own; g < group; g += kSequences) {
        const SequenceSteps s = sequences[g];
        if (q0() + g < a.sequences)
          a.end[(q0() + g) * a.N + row] = s.begin + s.count == a.chunk ? last[g * kPadded + row] : 0.f;
      }
    if (Traits::kSums && a.sums) {
      // the row, obtained so that the compiler does not recognize it: the value from above would take registers, or a
      // spill, during the loop
      const int64_t place = sums_index(__shfl_sync(kAllLanes, row, threadIdx.x % 32));
      if (unit) a.sums[place] = total.sum, a.sums[sums_size() + place] = total.error;
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    resident_scan_kernel(const ScanArgs a, const int group_size) {
  constexpr bool kFactored = Traits::kFactored, kGates = Traits::kGates;
  constexpr int kPadded = Traits::kPadded, kSequences = Traits::kSequences, kPart = Traits::kSquareSteps;
  ResidentThread<Traits> self(a, group_size);
  MapTile<Traits> map1, map2;
  self.load_maps(map1, map2);
  self.start();
  const int group = self.group, length = self.range.end - self.range.begin;  // group: at least kSequences
  const float* from = self.state;
  float* to = kFactored ? self.state : self.state + group * kPadded;
  // the last result, which the next product publishes; none before the first step
  typename ResidentThread<Traits>::Result result{group - kSequences + self.own, 0, 0, 0, 0, {}, 0};
  result.s = self.steps_of(result.g);
  result.place = self.place_of(result.g, Traits::kAhead - 1);
  result.id = self.id_of(result.g, Traits::kAhead - 1);

  // Steps run in parts, so that the loop over them has no branch for work done once per part.
  for (int begin = 0, end; begin < length; begin = end) {
    end = !Traits::kBackward || length - begin <= kPart ? length : begin > 0 ? begin + kPart : kPart + 1;
    // the squares of a part are complete after the barrier of the first step of the next part
    if (begin > 0) self.norms_of(begin - 1 - kPart, kPart);
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      auto close_previous = [&] {
        self.publish(result, i - 1, self.moved - self.stride);
        self.close_step(i - 1);
      };
      if constexpr (kFactored) {
#pragma unroll 1
        for (int g0 = 0; g0 < group; g0 += kSequences) {
          const float sum = self.product(map1, from + g0 * kPadded, [&] {
            if (g0 == 0) close_previous();
          });
          if (self.counts) self.y[(g0 + self.own) * kPadded + self.row] = sum * self.scale;
        }
        __syncthreads();
      }
      int g0 = 0;
#pragma unroll 1
      do {
        const int g = g0 + self.own;
        bool live, cut = false;
        SequenceSteps steps;
        float input = 0, gate = 0;
        Leak<Traits::kCuts> leak;
        int64_t id = 0;
        int place = 0;
        const float sum = self.product(map2, (kFactored ? self.y : from) + g0 * kPadded, [&] {
          if (g0 > 0) self.publish(result, i, self.moved);
          else if (!kFactored) close_previous();
          steps = self.steps_of(g);
          live = steps.has(i);
          if constexpr (Traits::kCuts) cut = live && is_cut<Traits::kBackward>(a, self.q0() + g, self.range.begin + i);
          id = self.id_of(g, i + Traits::kAhead);
          place = self.place_of(g, i);
          if (live) input = self.inputs[place];
          if (kGates && live && (!Traits::kAny || a.gate)) gate = self.gates[place];
          if (Traits::kCuts && a.leak && live)
            leak = {leak_of(a, self.row), (Traits::kBackward ? self.carried() : from)[g * kPadded + self.row]};
        });
        float before = sum + input;
        const float after = self.end_step(before, gate, leak);
        // before a sequence begins its state is zero and stays so
        if (live) to[g * kPadded + self.row] = cut ? restart_of(a, self.q0() + g, self.row) : after;
        if (Traits::kCuts && Traits::kBackward && a.leak && live)
          self.carried()[g * kPadded + self.row] = cut ? 0.f : before;
        result = {g, place, after, before, gate, steps, id};
      } while ((g0 += kSequences) < group);
      __syncthreads();
      self.moved += self.stride;
      if (!kFactored) {
        const float* const written = to;
        to = const_cast<float*>(from);
        from = written;
      }
    }
  }
  self.publish(result, length - 1, self.moved - self.stride);
  self.close_step(length - 1);
  self.finish(length, from);
}

}  // namespace orthokern::cuda
