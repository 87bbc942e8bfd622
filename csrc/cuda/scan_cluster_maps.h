// How a block of a cluster holds its rows of the maps, and how it multiplies them (scan_cluster.h).
//
// A block has 64 rows. 128 neighbouring columns of them are a chunk. A lane has the same number of 16-byte vectors of
// every chunk, whichever products are used:
//
//   FMA units      8 vectors: 4 neighbouring columns of each of the 8 rows of its warp, so that a load of the state
//                  serves 8 rows. The sums of a row are spread over the lanes of one warp.
//   tensor cores   8 vectors (float32 words) or 4 (pairs of bfloat16): its operands of the products of all 64 rows with
//                  16 of the columns. The sums of a row are spread over the warps, and meet in shared memory. A group
//                  of 8 sequences fills the columns of a product.
//
// Locations of the chunks:
//
//   registers       the first kRegisters1 chunks of the first map, and kRegisters2 of the second
//   shared memory   of the others, as many as fit
//   L2 cache        the rest is read again in every step, by cp.async into a ring of the size of a chunk. Each lane
//                   fetches only what it multiplies, so no barrier is needed. The slot of a vector is refilled as soon
//                   as the vector has been read, so that nearly a whole chunk is in flight at any time. Chunks of the
//                   two kinds alternate, so that fetching never pauses
#pragma once

#include <type_traits>

#include "cuda/scan_units.h"

namespace orthokern::cuda {

constexpr int kClusterThreads = 256, kClusterWarps = 8;
constexpr int kClusterRows = 64;  // rows of a block
constexpr int kChunk = 128;       // columns of a chunk

template <bool factored, bool backward, int group, int sets, int precision, int activation>
struct ClusterTraits {
  static constexpr bool kFactored = factored, kBackward = backward, kTensor = precision != kIeee;
  // A kernel of one activation has no resets, leak, tokens, act_param or norms, and stores the states only.
  static constexpr int kActivation = activation;
  static constexpr bool kPlain = activation != kAnyActivation;
  static constexpr int kPrecision = precision;        // of enum ScanPrecision
  static constexpr int kGroup = group, kSets = sets;  // sequences that are multiplied at a time; sets of them
  static constexpr int kSequences = kGroup * kSets;   // of a cluster
  static constexpr int kVectors = precision == kBfloat16 ? 4 : 8;
  static constexpr int kChunkWords = kVectors * 4 * kClusterThreads;  // of 4 bytes, [warp][vector][lane][4]
  // Chunks that fit into 255 registers besides the sums, which are 8 group on the FMA units, 16 or 32 on tensor cores,
  // and the operands. Half of them for each map, so that both products read equally little of shared memory.
  static constexpr int kInRegisters = precision == kBfloat16 ? 8 : group == 4 && sets == 2 ? 3 : 4;
  static constexpr int kRegisters2 = factored ? kInRegisters / 2 : 0, kRegisters1 = kInRegisters - kRegisters2;
  // After a product, a lane has kHeld of its warp's rows, of one sequence, and kCopies lanes have the same ones
  // (LaneRows).
  static constexpr int kHeld = group <= 4 ? 1 : group / 4, kCopies = group <= 4 ? 4 / group : 1;
  // Floats between two sequences of a vector, beyond its columns: the lanes of a tensor core's operand read four
  // columns of every sequence at a time, which would be in the same banks.
  static constexpr int kPadding = kTensor ? 16 : 0;
  static constexpr int kVectorCopies = factored ? 1 : 2;  // of the state (scan_cluster.h)
  // Tensor cores: sums of one warp, [sequence][row]. With this pitch neither the stores nor the loads of two floats
  // have bank conflicts.
  static constexpr int kPartialPitch = kClusterRows + 8, kPartialFloats = kTensor ? group * kPartialPitch : 0;
  static_assert(group == 1 || group == 2 || group == 4 || group == 8, "8 * group rows are spread over 32 lanes");
  static_assert(kTensor == (group == 8),
                "a product of the tensor cores has 8 columns; FMA units have 4 sequences at most");
};

// The rows that a lane has after a product, of its warp's 8 rows of every sequence: kHeld rows from `row` on, of
// sequence `sequence`.
template <class Traits>
struct LaneRows {
  int row, sequence;
  __device__ __forceinline__ explicit LaneRows(int lane) {
    const int held = lane * Traits::kHeld / Traits::kCopies;
    row = held % 8, sequence = held / 8;
  }
  // A lane that has this row of a sequence, as element row % kHeld.
  static __device__ __forceinline__ int lane_of(int sequence, int row) {
    return (8 * sequence + row) * Traits::kCopies / Traits::kHeld;
  }
};

template <class Traits>
struct ClusterMemory {  // the block's shared memory, in bytes
  int pitch1, pitch2;   // floats from one sequence to the next, of the state and of y
  int64_t barriers, state, y, partial, chunks, ring, total;
  __host__ __device__ ClusterMemory(int columns1, int columns2, int shared_chunks, bool streams)
      : pitch1(columns1 + Traits::kPadding), pitch2(columns2 ? columns2 + Traits::kPadding : 0) {
    constexpr int64_t kWord = sizeof(float);
    barriers = 0;
    state = 2 * Traits::kSets * sizeof(Mbarrier);
    y = state + kWord * Traits::kVectorCopies * Traits::kSequences * pitch1;
    partial = y + kWord * Traits::kSequences * pitch2;
    chunks = partial + kWord * kClusterWarps * Traits::kPartialFloats;
    ring = chunks + kWord * shared_chunks * Traits::kChunkWords;
    total = ring + (streams ? kWord * Traits::kChunkWords : 0);
  }
};

// First of the rows of block `rank`, in units of 4 rows.
__host__ __device__ inline int first_quad(int rows, int rank, int size) { return (rows + 3) / 4 * rank / size; }

// ------------------------------------------------------------------------------------------------------ packed maps

// Element (row, column) of a map at from[row * row_stride + column * column_stride], zero beyond its edges.
struct MapSource {
  const float* from;
  int64_t row_stride, column_stride;
  int rows, columns;
  __device__ __forceinline__ float at(int row, int column) const {
    return row < rows && column < columns ? from[row * row_stride + column * column_stride] : 0.f;
  }
};

// Word `e` of vector `vector` of a lane, of the chunk whose first column is `column`. row0 and end: of the block. The
// operands of tensor cores (ptx.h) have rows i and i + 8 in a lane: here they are rows 2 i and 2 i + 1 of 16, so that a
// lane ends up with neighbours. The order of the columns in a product does not matter as long as the vectors agree: it
// is such that a lane loads four neighbouring columns of a vector (TensorProduct::load).
template <int kPrecision>
__device__ __forceinline__ float packed_word(const MapSource& map, int row0, int end, int column, int warp, int vector,
                                             int lane, int e) {
  auto value = [&](int row, int c) { return row < end ? map.at(row, c) : 0.f; };
  if constexpr (kPrecision == kIeee) return value(row0 + 8 * warp + vector, column + 4 * lane + e);
  const int tile = kPrecision == kBfloat16 ? vector : vector / 2;
  const int row = row0 + 16 * tile + 2 * (lane / 4) + e % 2, first = column + 16 * warp + 4 * (lane % 4);
  if constexpr (kPrecision == kBfloat16) {
    const int c = first + 2 * (e / 2);
    return __uint_as_float(to_bf16x2(value(row, c), value(row, c + 1)));
  }
  const float word = value(row, first + 2 * (vector % 2) + e / 2);
  return __uint_as_float(to_tf32(word));
}

// packed [size][chunks][kChunkWords] <- a map. The blocks share `shared_rows` >= map.rows.
template <class Traits>
__global__ void __launch_bounds__(256)
    pack_chunks_kernel(const MapSource map, int shared_rows, int chunks, int size, float* packed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= static_cast<int64_t>(size) * chunks * Traits::kChunkWords) return;
  const int word = static_cast<int>(i % Traits::kChunkWords);
  const int64_t block = i / Traits::kChunkWords;
  const int rank = static_cast<int>(block / chunks), column = static_cast<int>(block % chunks) * kChunk;
  packed[i] = packed_word<Traits::kPrecision>(
      map, 4 * first_quad(shared_rows, rank, size), 4 * first_quad(shared_rows, rank + 1, size), column,
      word / (128 * Traits::kVectors), word / 128 % Traits::kVectors, word / 4 % 32, word % 4);
}

// --------------------------------------------------------------------------------------------------------- products

// The sums of a warp's 8 rows of every sequence over a lane's columns, [sequence][row].
template <class Traits>
struct FmaProduct {
  static constexpr int kGroup = Traits::kGroup;
  struct Operand {
    float4 x[kGroup];
  };
  float sums[8 * kGroup];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < 8 * kGroup; k++) sums[k] = 0;
  }
  // This lane's columns of a chunk; `vector` begins with the first column of the chunk.
  static __device__ __forceinline__ Operand load(const float* vector, int pitch) {
    Operand operand;
#pragma unroll
    for (int s = 0; s < kGroup; s++)
      operand.x[s] = *reinterpret_cast<const float4*>(vector + s * pitch + 4 * (threadIdx.x % 32));
    return operand;
  }
  __device__ __forceinline__ void multiply(int vector, const float4 w, const Operand& operand) {
#pragma unroll
    for (int s = 0; s < kGroup; s++) {
      float& sum = sums[8 * s + vector];
      const float4 x = operand.x[s];
      sum = fmaf(w.x, x.x, sum), sum = fmaf(w.y, x.y, sum), sum = fmaf(w.z, x.z, sum), sum = fmaf(w.w, x.w, sum);
    }
  }
  __device__ __forceinline__ void finish(float (&rows)[Traits::kHeld], float*) {
    reduce_scatter<32>(sums, threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < Traits::kHeld; j++) rows[j] = sums[j];
  }
};

// The sums of 4 tiles of 16 rows by 8 sequences over a warp's columns.
//
// Tensor cores truncate their sums instead of rounding them, which biases a long sum towards zero. Therefore, each 16
// columns have a separate accumulator, and these are added by the FMA units, which round to nearest. The last
// truncation of each remains.
template <class Traits>
struct TensorProduct {
  static constexpr int kPrecision = Traits::kPrecision, kTiles = kClusterRows / 16;
  struct Operand {
    uint32_t words[2][2];
  };
  float sums[kTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[tile][i] = 0;
  }
  static __device__ __forceinline__ Operand load(const float* vector, int pitch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float4 four = *reinterpret_cast<const float4*>(vector + lane / 4 * pitch + 16 * warp + 4 * (lane % 4));
    const float x[4] = {four.x, four.y, four.z, four.w};
    Operand operand;
    if constexpr (kPrecision == kBfloat16) {
      operand.words[0][0] = to_bf16x2(x[0], x[1]), operand.words[0][1] = to_bf16x2(x[2], x[3]);
    } else {
#pragma unroll
      for (int k = 0; k < 4; k++) operand.words[k / 2][k % 2] = to_tf32(x[k]);
    }
    return operand;
  }
  __device__ __forceinline__ void multiply(int vector, const float4 w, const Operand& operand) {
    const int tile = kPrecision == kBfloat16 ? vector : vector / 2, half = kPrecision == kBfloat16 ? 0 : vector % 2;
    const uint32_t a[4] = {__float_as_uint(w.x), __float_as_uint(w.y), __float_as_uint(w.z), __float_as_uint(w.w)};
    add_product(sums[tile], a, operand.words[half]);
  }
  static __device__ __forceinline__ void add_product(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    float product[4] = {};
    if constexpr (kPrecision == kBfloat16) mma_bf16(product, a, b);
    else mma_tf32(product, a, b);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += product[i];
  }
  // A barrier of the block. `partial` is free again when the rows of all warps have been used.
  __device__ __forceinline__ void finish(float (&rows)[Traits::kHeld], float* partial) {
    constexpr int kPitch = Traits::kPartialPitch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4, late = t >= 2;
    float* const own = partial + warp * Traits::kPartialFloats + 2 * (lane / 4);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      // sequences 2 t and 2 t + 1; two of four lanes store them in the other order, into other banks
      const float2 even = make_float2(sums[tile][0], sums[tile][2]), odd = make_float2(sums[tile][1], sums[tile][3]);
      float* const place = own + 16 * tile;
      *reinterpret_cast<float2*>(place + (2 * t + late) * kPitch) = late ? odd : even;
      *reinterpret_cast<float2*>(place + (2 * t + 1 - late) * kPitch) = late ? even : odd;
    }
    __syncthreads();
    const LaneRows<Traits> held(lane);
    const float* const of_rows = partial + held.sequence * kPitch + 8 * warp + held.row;
    rows[0] = rows[1] = 0;
#pragma unroll
    for (int w = 0; w < kClusterWarps; w++) {
      const float2 two = *reinterpret_cast<const float2*>(of_rows + w * Traits::kPartialFloats);
      rows[0] += two.x, rows[1] += two.y;
    }
  }
};

template <class Traits>
using ClusterProduct = std::conditional_t<Traits::kTensor, TensorProduct<Traits>, FmaProduct<Traits>>;

// ------------------------------------------------------------------------------------- chunks outside of registers

// The chunks of the two maps that are not in registers, in the order of their use. Of `count`, `streamed` come from the
// ring, spread evenly among the others: bit r of `ring` says whether the r-th one does. Two maps of 1024 columns have
// 16 chunks.
struct ChunkOrder {
  int count, streamed;
  unsigned first;  // a bit for each chunk of the first map
  unsigned ring;
  __device__ ChunkOrder(int first_count, int count, int streamed)
      : count(count), streamed(streamed), first((1u << first_count) - 1), ring(0) {
    for (int r = 0; r < count; r++)
      if ((r + 1) * streamed / count != r * streamed / count) ring |= 1u << r;
  }
  __device__ __forceinline__ bool streams(int r) const { return ring >> r & 1; }
  // Number of chunks before r that stay in shared memory.
  __device__ __forceinline__ int shared_before(int r) const { return r - __popc(ring & ((1u << r) - 1)); }
  // The next chunk of the ring after r: of the same map, from its beginning again for the next set of sequences, or of
  // the other map.
  __device__ __forceinline__ int streamed_after(int r, bool last_set) const {
    const unsigned same = ring & (first >> r & 1 ? first : ~first), others = ring & ~same,
                   behind = same & ~((2u << r) - 1);
    return __ffs(static_cast<int>(behind ? behind : last_set && others ? others : same)) - 1;
  }
  __device__ __forceinline__ int first_streamed() const { return __ffs(static_cast<int>(ring)) - 1; }
};
static_assert(2 * kClusterRows * 16 / kChunk <= 31, "a bit for every chunk");

// Chunks of a map in registers, of `chunks`.
__host__ __device__ constexpr int in_registers(int chunks, int most) { return chunks < most ? chunks : most; }

template <class Traits>
struct ClusterMaps {
  static constexpr int kVectors = Traits::kVectors;
  using Product = ClusterProduct<Traits>;

  const float *packed1, *packed2;  // this lane's words of the first chunk of each map, vectors 128 words apart
  int registers1, registers2;      // chunks of each map in registers
  int rest1;                       // chunks of the first map elsewhere
  int lane_words;                  // offset of a lane's words in a chunk
  ChunkOrder order;
  float *chunks, *ring;  // [shared chunks][kChunkWords]; [kChunkWords]

  __device__ __forceinline__ ClusterMaps(const ScanArgs& a, const ScanPlan& plan, int rank)
      : registers1(in_registers(plan.chunks1, Traits::kRegisters1)),
        registers2(in_registers(plan.chunks2, Traits::kRegisters2)),
        rest1(plan.chunks1 - registers1),
        lane_words(threadIdx.x / 32 * kVectors * 128 + 4 * (threadIdx.x % 32)),
        order(rest1, rest1 + plan.chunks2 - registers2, rest1 + plan.chunks2 - registers2 - plan.shared_chunks) {
    packed1 = a.packed1 + static_cast<int64_t>(rank) * plan.chunks1 * Traits::kChunkWords + lane_words;
    packed2 = a.packed2 + static_cast<int64_t>(rank) * plan.chunks2 * Traits::kChunkWords + lane_words;
  }
  __device__ __forceinline__ const float* source(int r) const {
    return r < rest1 ? packed1 + static_cast<int64_t>(registers1 + r) * Traits::kChunkWords
                     : packed2 + static_cast<int64_t>(registers2 + r - rest1) * Traits::kChunkWords;
  }
  static __device__ __forceinline__ float4 vector_at(const float* words, int v) {
    return *reinterpret_cast<const float4*>(words + 128 * v);
  }
  // The first `count` chunks of a map.
  template <int kMost>
  static __device__ __forceinline__ void load_registers(float4 (&weights)[kMost][kVectors], const float* packed,
                                                        int count) {
#pragma unroll
    for (int c = 0; c < kMost; c++)
#pragma unroll
      for (int v = 0; v < kVectors; v++)
        weights[c][v] = c < count ? vector_at(packed + c * Traits::kChunkWords, v) : make_float4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load_shared() {
    for (int r = 0; r < order.count; r++) {
      if (order.streams(r)) continue;
      float* const to = chunks + order.shared_before(r) * Traits::kChunkWords + lane_words;
#pragma unroll
      for (int v = 0; v < kVectors; v++) *reinterpret_cast<float4*>(to + 128 * v) = vector_at(source(r), v);
    }
  }
  // Starts to fetch a vector of a chunk, one group of cp.async per vector. `from` is source() of the chunk.
  __device__ __forceinline__ void fetch(const float* from, int v) const {
    cp_async<16>(ring + lane_words + 128 * v, from + 128 * v);
    cp_async_commit();
  }
  // Starts to fetch the first chunk of the ring.
  __device__ __forceinline__ void start_ring() const {
    if (!order.streamed) return;
    const float* const from = source(order.first_streamed());
#pragma unroll
    for (int v = 0; v < kVectors; v++) fetch(from, v);
  }
  // product += `count` chunks in registers times `vector`. On the FMA units, here (without branches in between) and in
  // multiply_shared, operands are loaded while those before them are multiplied, since two warps of a scheduler do not
  // hide the latency of shared memory. Tensor cores with 8 sequences have no registers for it.
  template <int kMost>
  static __device__ __forceinline__ void multiply_registers(Product& product, const float4 (&weights)[kMost][kVectors],
                                                            int count, const float* vector, int pitch) {
    if (!Traits::kTensor && __builtin_expect(count == kMost, 1)) {
#pragma unroll
      for (int c = 0; c < kMost; c++) multiply_chunk(product, weights[c], vector + c * kChunk, pitch);
      return;
    }
#pragma unroll
    for (int c = 0; c < kMost; c++)
      if (c < count) multiply_chunk(product, weights[c], vector + c * kChunk, pitch);
  }
  // product += the chunks [r0, r1) outside registers, times `vector` from the first of their columns on
  __device__ __forceinline__ void multiply_rest(Product& product, int r0, int r1, const float* vector, int pitch,
                                                bool last_set) {
    if (__builtin_expect(r0 >= r1, 1)) return;
    if constexpr (!Traits::kTensor) {
      if (!order.streamed) return multiply_shared(product, r0, r1, vector, pitch);
    }
#pragma unroll 1
    for (int r = r0; r < r1; r++, vector += kChunk) {
      if (order.streams(r)) {
        multiply_streamed(product, r, vector, pitch, last_set);
        continue;
      }
      const float* const words = chunks + order.shared_before(r) * Traits::kChunkWords + lane_words;
      multiply_loaded(product, load(words, vector, pitch));
    }
  }

 private:
  static __device__ __forceinline__ void multiply_chunk(Product& product, const float4 (&weights)[kVectors],
                                                        const float* vector, int pitch) {
    const typename Product::Operand x = Product::load(vector, pitch);
#pragma unroll
    for (int v = 0; v < kVectors; v++) product.multiply(v, weights[v], x);
  }
  struct Chunk {
    typename Product::Operand x;
    float4 weights[kVectors];
  };
  static __device__ __forceinline__ Chunk load(const float* words, const float* vector, int pitch) {
    Chunk loaded;
    loaded.x = Product::load(vector, pitch);
#pragma unroll
    for (int v = 0; v < kVectors; v++) loaded.weights[v] = vector_at(words, v);
    return loaded;
  }
  static __device__ __forceinline__ void multiply_loaded(Product& product, const Chunk& loaded) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) product.multiply(v, loaded.weights[v], loaded.x);
  }
  // product += chunk r, which is in the ring; fetches the next one. A vector is read while the one before is
  // multiplied.
  __device__ __forceinline__ void multiply_streamed(Product& product, int r, const float* vector, int pitch,
                                                    bool last_set) const {
    const float* const later = source(order.streamed_after(r, last_set));
    const float* const words = ring + lane_words;
    const typename Product::Operand x = Product::load(vector, pitch);
    cp_async_wait<kVectors - 1>();
    float4 weights = vector_at(words, 0);
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      float4 coming = {};
      if (v + 1 < kVectors) {
        cp_async_wait<kVectors - 2>();
        coming = vector_at(words, v + 1);
      }
      product.multiply(v, weights, x);
      fetch(later, v);
      weights = coming;
    }
  }
  // multiply_rest if all chunks are in shared memory: vectors of weights are read kEarly ahead of their multiplication,
  // and the state of a chunk while the previous chunk is multiplied.
  __device__ __forceinline__ void multiply_shared(Product& product, int r0, int r1, const float* vector, int pitch) {
    constexpr int kEarly = Traits::kGroup > 2 ? 2 : 4;
    const float* words = chunks + r0 * Traits::kChunkWords + lane_words;
    typename Product::Operand x = Product::load(vector, pitch);
    float4 weights[kEarly];
#pragma unroll
    for (int v = 0; v < kEarly; v++) weights[v] = vector_at(words, v);
#pragma unroll 1
    for (int r = r0; r < r1; r++) {
      const bool last = r + 1 == r1;  // loads from its own beginning again, and does not use it
      const float* const later = words + (last ? 0 : Traits::kChunkWords);
      vector += last ? 0 : kChunk;
      const typename Product::Operand coming = Product::load(vector, pitch);
#pragma unroll
      for (int v = 0; v < kVectors; v++) {
        product.multiply(v, weights[v % kEarly], x);
        weights[v % kEarly] = vector_at(v + kEarly < kVectors ? words : later, (v + kEarly) % kVectors);
      }
      x = coming, words = later;
    }
  }
};

}  // namespace orthokern::cuda
