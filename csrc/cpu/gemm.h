// The register-blocked product of the scans and of linear_cross_entropy, of blocked rows and panels (packed.h).
//
//            panel  <- 2 L columns ->
//            +---------------------+
//   rows     |  b0  |  b1          |   per step of depth: 2 loads of weights, then for each row one broadcast
//   +----+   |      |              |   and 2 fused multiply-adds
//   | a  | x |      |              | = MR x 2 accumulators, all in registers
//   +----+   +---------------------+
//
// With 32 registers two panels are processed together, 6 rows x 4 vectors: 10 loads for 24 multiply-adds instead of 15
// for 26. A core that runs one thread gains nothing from that. With two hardware threads per core the gain is some 8 %.
//
// On aarch64 a multiply-add takes its element of `a` from a lane (add_lane_products): L steps of depth load a vector of
// each row once. A tile of 10 x 2 needs 92 instructions for 80 multiply-adds, against 47 for 24 in one of 12 x 2 with
// broadcasts, which did not fit into the registers.
//
// Each output element is one chain of multiply-adds in ascending depth, in every tile: results do not depend on how
// rows are grouped. A call with few rows processes several panels together, to have enough independent chains to hide
// the latency. Matrices packed for tiles.h are multiplied there.
//
// A deep product is computed in chunks of its depth. The part of `a` and of a panel that belongs to a chunk then stays
// in the nearest cache for all tiles. The sums are stored in `out` between chunks and loaded again, so each chain is
// continued and the result is bit-identical.
#pragma once

#include "cpu/tiles.h"

namespace orthokern::ORTHOKERN_ISA {

constexpr int kHalfRows = kMaxRows / 2;      // rows of a tile of two panels
constexpr bool kWideTiles = kMaxRows >= 12;  // registers for 6 rows x 4 vectors, the weights and a broadcast
// Bytes of a chunk's depth in a row of `a`: 8 vectors of AVX-512, and 32 KB of two panels.
constexpr int kChunkBytes = 512;
constexpr size_t kNearWeights = 512 << 10;  // bytes of a packed matrix that stays in L2 without prefetching

template <class T>
using TileKernel = void (*)(const Segment<T>* segments, int segment_count, const T* panel, ptrdiff_t panel_stride,
                            T* out, ptrdiff_t out_block, bool add, const T* ahead, Transfers<T>* transfers);

// PANELS panels of two vectors, or (PANELS == 0) one panel of one vector: out = a . panels, or (add) out += a . panels.
// With PREFETCH a vector of every panel row at `ahead` is prefetched into L2. With PAIRS a and panels are of pairs.
template <class T, bool PAIRS, int MR, int PANELS, bool PREFETCH>
void tile_kernel(const Segment<T>* segments, int segment_count, const T* panel, ptrdiff_t panel_stride, T* out,
                 ptrdiff_t out_block, bool add, const T* ahead, Transfers<T>* transfers) {
  constexpr int L = kLanes<T>;
  constexpr int W = PANELS == 0 ? 1 : 2;        // vectors of a panel row
  constexpr int NP = PANELS == 0 ? 1 : PANELS;  // panels
  V<T> acc[MR][NP * W];
  if (add) {
    ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) {
      ORTHOKERN_UNROLL for (int n = 0; n < NP * W; n++) acc[r][n] = load(out + n * out_block + r * L);
    }
  } else {
    ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int n = 0; n < NP * W; n++) acc[r][n] = V<T>{};
  }
  const T* b = panel;
  for (int i = 0; i < segment_count; i++) {
    const T* a = segments[i].a;
    int left = segments[i].depth;
    while (left > 0) {
      const int count = left < L ? left : L;
      int j = 0;
      if constexpr (kLaneProducts) {
        if (count == L) {
          add_lane_products<T>(acc, a, L, b, W * L, panel_stride);
          j = L, b += L * W * L;
          if (PREFETCH) {
            ORTHOKERN_UNROLL for (int i = 0; i < L; i++) __builtin_prefetch(ahead + i * W * L, 0, 2);
            ahead += L * W * L;
          }
        }
      }
      for (; j < count; j++) {
        V<T> w[NP * W];
        ORTHOKERN_UNROLL for (int n = 0; n < NP * W; n++) w[n] = load(b + (n / W) * panel_stride + (n % W) * L);
        if (PREFETCH) {
          __builtin_prefetch(ahead, 0, 2);
          ahead += W * L;
        }
        ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) {
          if constexpr (PAIRS) {
            const V<T> x = splat_pair(a + r * L + j);
            ORTHOKERN_UNROLL for (int n = 0; n < NP * W; n++) add_pairs(&acc[r][n], w[n], x);
          } else {
            const T x = a[r * L + j];
            ORTHOKERN_UNROLL for (int n = 0; n < NP * W; n++) acc[r][n] += w[n] * x;
          }
        }
        b += W * L;
      }
      a += segments[i].block;
      left -= count;
      transfers->advance();
    }
  }
  ORTHOKERN_UNROLL for (int n = 0; n < NP * W; n++) ORTHOKERN_UNROLL for (int r = 0; r < MR; r++)
      store(out + n * out_block + r * L, acc[r][n]);
}

template <class T, bool PAIRS, int PANELS, bool PREFETCH, int MR = kMaxRows / (PANELS == 0 ? 1 : PANELS)>
inline TileKernel<T> tile_kernel_for_rows(int rows) {
  if constexpr (MR > 1)
    if (rows < MR) return tile_kernel_for_rows<T, PAIRS, PANELS, PREFETCH, MR - 1>(rows);
  return tile_kernel<T, PAIRS, MR, PANELS, PREFETCH>;
}

// A tile of `rows` rows and `panels` panels (1, 2 or 4), or of one narrow panel.
template <class T, bool PAIRS>
inline TileKernel<T> tile_kernel_for(int rows, int panels, bool narrow, bool fetch) {
  if (narrow) return tile_kernel_for_rows<T, PAIRS, 0, false>(rows);
  if (panels == 4) return tile_kernel_for_rows<T, PAIRS, 4, false>(rows);
  if (panels == 2)
    return fetch ? tile_kernel_for_rows<T, PAIRS, 2, true>(rows) : tile_kernel_for_rows<T, PAIRS, 2, false>(rows);
  return fetch ? tile_kernel_for_rows<T, PAIRS, 1, true>(rows) : tile_kernel_for_rows<T, PAIRS, 1, false>(rows);
}

// out = a . w for blocked a (given by its segments, of pairs if w has pairs) and blocked out, R rows. In the last
// chunk, panels are computed one after another, and `after(first_block, last_block)`, the epilogue, runs while those
// columns are in the nearest cache. out must overlap neither a nor the sources of the transfers.
template <class T>
__attribute__((noinline)) void multiply(const Segment<T>* segments, int segment_count, const Packed<T>& w, int rows,
                                        T* out, ptrdiff_t out_block, Transfers<T>* transfers, const Epilogue& after) {
  constexpr int L = kLanes<T>;
  constexpr int kChunk = kChunkBytes / sizeof(T);
  const int panels = w.panel_count();
  if constexpr (kTiles<T>) {
    if (w.tiles) {
      multiply_tiles(segments, segment_count, w, rows, out, out_block, transfers, after);
      return;
    }
  }
  const auto find_tile = w.pairs ? tile_kernel_for<T, kPairs<T>> : tile_kernel_for<T, false>;
  const int wide = panels - (w.narrow(panels - 1) ? 1 : 0);
  const bool far = static_cast<size_t>(w.depth) * w.cols * sizeof(T) > kNearWeights;
  const ptrdiff_t stride = static_cast<ptrdiff_t>(Packed<T>::kWidth) * w.depth;
  const int half_tiles = (rows + kHalfRows - 1) / kHalfRows, full_tiles = (rows + kMaxRows - 1) / kMaxRows;
  const bool by_two = kWideTiles || rows <= kHalfRows;
  const int quads = rows <= kMaxRows / 4 ? wide / 4 : 0, pairs = by_two ? (wide - 4 * quads) / 2 : 0;
  const int tile_count = quads + half_tiles * pairs + full_tiles * (panels - 4 * quads - 2 * pairs);
  transfers->set_rate((w.depth + L - 1) / L * tile_count);
  for (int s = 0, from = 0, k = 0; s < segment_count;) {  // a chunk: from `from` of segment s and row k of the panels
    Segment<T> part[kMaxSegments];
    int parts = 1, k_end = k;
    int take_depth = segments[s].depth - from;
    if (segments[s].depth >= kChunk + kChunk / 2) {  // in pieces of about equal length
      const int pieces = (segments[s].depth + kChunk - 1) / kChunk,
                piece = round_up((segments[s].depth + pieces - 1) / pieces, L);
      if (take_depth > piece) take_depth = piece;
    }
    part[0] = {segments[s].a + from / L * segments[s].block, segments[s].block, take_depth};
    k_end += part[0].depth;
    from += part[0].depth;
    if (from == segments[s].depth) {
      from = 0;
      for (s++; s < segment_count && segments[s].depth < kChunk / 2; s++) {  // short segments join the chunk
        k_end += segments[s].depth;
        part[parts++] = segments[s];
      }
    }
    const bool last = s == segment_count;
    for (int p = 0, take; p < panels; p += take) {
      const bool narrow = w.narrow(p);
      take = p < 4 * quads ? 4 : p < 4 * quads + 2 * pairs ? 2 : 1;
      const int tiles = take == 4 ? 1 : take == 2 ? half_tiles : full_tiles;
      const T* panel = w.row(p, k);
      const T* next = p + take < panels ? w.row(p + take, k) : w.row(0, last ? 0 : k_end);
      for (int i = 0, row = 0; i < tiles; i++) {
        const int count = rows / tiles + (i < rows % tiles ? 1 : 0);
        Segment<T> at[kMaxSegments];
        for (int j = 0; j < parts; j++) at[j] = {part[j].a + row * L, part[j].block, part[j].depth};
        // Each tile prefetches one vector of every row of the next panels.
        const bool fetch = far && tiles > 1 && i < 2 * take;
        find_tile(count, take, narrow, fetch)(at, parts, panel, stride, out + 2 * p * out_block + row * L, out_block,
                                              k > 0, next + i / 2 * stride + i % 2 * L, transfers);
        row += count;
      }
      if (last) after(2 * p, narrow ? 2 * p + 1 : 2 * (p + take));
    }
    k = k_end;
  }
  transfers->finish();
}
template <class T>
inline void multiply(const Segment<T>* segments, int segment_count, const Packed<T>& w, int rows, T* out,
                     ptrdiff_t out_block) {
  Transfers<T> none;
  multiply<T>(segments, segment_count, w, rows, out, out_block, &none, [](int, int) {});
}

}  // namespace orthokern::ORTHOKERN_ISA
