// Products of bfloat16 pairs (pairs.h) in the tile registers of AMX, on CPUs that have them.
//
// A tile register holds up to 16 rows of 64 bytes. One instruction adds the product of a tile of A, 16 rows x 16 pairs,
// and a tile of B, 16 pairs x 16 columns, to a tile of C: 8192 multiply-adds, as many as 256 vector instructions.
// Blocked rows and panels of pairs already have the layout of A and B, so tiles are loaded from them in place.
//
// The depth of a product is a multiple of 16 pairs; the missing ones are zero in both factors. Rows are divided into
// tiles of equal height. If they do not divide evenly, the last tile overlaps the one before it: the common rows are
// computed twice, with the same result. So one configuration of the registers serves a product.
//
// One instruction sums its even and its odd terms separately and then adds both to C. The sums differ from those of
// pairs.h in the last bits, and do not depend on how rows and columns are divided.
#pragma once

#include "cpu/packed.h"
#include "cpu/transpose.h"

namespace orthokern::ORTHOKERN_ISA {

// Whether kernels with tiles are built. args.bf16 == 2 says that the CPU supports them.
template <class T>
constexpr bool kTiles = kPairs<T> && ORTHOKERN_HAVE_AMX;

constexpr int kTileRows = 16;

// `rows` rows in tiles of equal height.
struct TileRows {
  int rows, count, height;
  explicit TileRows(int rows_)
      : rows(rows_), count((rows_ + kTileRows - 1) / kTileRows), height((rows_ + count - 1) / count) {}
  int row(int i) const { return i * height < rows - height ? i * height : rows - height; }
};

#if ORTHOKERN_HAVE_AMX && defined(__AVX512BW__)

// Inline assembly for the reason given in pairs.h. No other code uses the tile registers meanwhile.

template <int REG>
ORTHOKERN_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(REG));
}
template <int REG>
ORTHOKERN_INLINE void tile_load(const float* from, ptrdiff_t row) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row * sizeof(float)), "i"(REG) : "memory");
}
template <int REG>
ORTHOKERN_INLINE void tile_store(float* to, ptrdiff_t row) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row * sizeof(float)), "i"(REG) : "memory");
}
// C += A B
template <int C, int A, int B>
ORTHOKERN_INLINE void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Registers 0 to 5 (C and A) have `height` rows, 6 and 7 (B) all 16. Their contents become zero.
inline void configure_tiles(int height) {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? height : kTilePairs);
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// One or two tiles of rows, `second` elements apart, times one, two or (for one tile of rows) four vectors of columns,
// in panels of at most two. depth is in pairs.
template <int ROWS, int COLS>
void tile_product(const Segment<float>* segments, int segment_count, ptrdiff_t second, const float* panel,
                  ptrdiff_t panel_stride, float* out, ptrdiff_t out_block, Transfers<float>* transfers) {
  static_assert(ROWS * COLS <= 4, "C has four registers");
  constexpr int L = kLanes<float>;
  constexpr int W = COLS == 1 ? L : 2 * L;
  constexpr int R1 = COLS;  // the first register of the second tile of rows
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int i = 0; i < segment_count; i++) {
    const float* a = segments[i].a;
    for (int left = segments[i].depth; left > 0; left -= kTilePairs) {
      tile_load<4>(a, L);
      if constexpr (ROWS == 2) tile_load<5>(a + second, L);
      tile_load<6>(panel, W);
      tile_multiply<0, 4, 6>();
      if constexpr (ROWS == 2) tile_multiply<R1, 5, 6>();
      if constexpr (COLS >= 2) {
        tile_load<7>(panel + L, W);
        tile_multiply<1, 4, 7>();
        if constexpr (ROWS == 2) tile_multiply<3, 5, 7>();
      }
      if constexpr (COLS == 4) {
        tile_load<6>(panel + panel_stride, W);
        tile_multiply<2, 4, 6>();
        tile_load<7>(panel + panel_stride + L, W);
        tile_multiply<3, 4, 7>();
      }
      a += segments[i].block;
      panel += kTilePairs * W;
      transfers->advance();
    }
  }
  tile_store<0>(out, L);
  if constexpr (COLS >= 2) tile_store<1>(out + out_block, L);
  if constexpr (COLS == 4) tile_store<2>(out + 2 * out_block, L), tile_store<3>(out + 3 * out_block, L);
  if constexpr (ROWS == 2) {
    tile_store<R1>(out + second, L);
    if constexpr (COLS == 2) tile_store<3>(out + second + out_block, L);
  }
}

// multiply() of gemm.h, in tiles and in one chunk.
template <class T>
void multiply_tiles(const Segment<T>* segments, int segment_count, const Packed<T>& w, int rows, T* out,
                    ptrdiff_t out_block, Transfers<T>* transfers, const Epilogue& after) {
  constexpr int L = kLanes<T>;
  const TileRows tiles(rows);
  const int panels = w.panel_count();
  const ptrdiff_t stride = static_cast<ptrdiff_t>(Packed<T>::kWidth) * w.depth;
  transfers->set_rate(w.depth / kTilePairs * ((tiles.count + 1) / 2) * (tiles.count == 1 ? (panels + 1) / 2 : panels));
  configure_tiles(tiles.height);
  for (int p = 0, take; p < panels; p += take) {
    const bool narrow = w.narrow(p);
    take = tiles.count == 1 && p + 1 < panels && !w.narrow(p + 1) ? 2 : 1;
    for (int i = 0; i < tiles.count; i += 2) {
      const bool both = i + 1 < tiles.count;
      const int row = tiles.row(i);
      Segment<T> at[kMaxSegments];
      for (int j = 0; j < segment_count; j++) at[j] = {segments[j].a + row * L, segments[j].block, segments[j].depth};
      const auto product = take == 2 ? tile_product<1, 4>
                           : narrow  ? (both ? tile_product<2, 1> : tile_product<1, 1>)
                           : both    ? tile_product<2, 2>
                                     : tile_product<1, 2>;
      product(at, segment_count, both ? (tiles.row(i + 1) - row) * L : 0, w.panel(p), stride,
              out + 2 * p * out_block + row * L, out_block, transfers);
    }
    after(2 * p, narrow ? 2 * p + 1 : 2 * (p + take));
  }
  transfers->finish();
}

// pair_rows of pairs.h, transposed: [blocks][rows][L] to [blocks][L][depth], where depth is a multiple of 16.
__attribute__((noinline)) inline void pair_rows_transposed(const float* from, ptrdiff_t block, int rows, int blocks,
                                                           float* to, int depth) {
  constexpr int L = kLanes<float>;
  for (int b = 0; b < blocks; b++, from += block, to += L * depth) {
    for (int k = 0; k < depth; k += L) {
      alignas(64) float pairs[L * L];
      ORTHOKERN_UNROLL for (int i = 0; i < L; i++) store(pairs + i * L, pair_of_rows(from, k + i, rows));
      V<float> square[L];
      load_transposed<float>(pairs, L, square);
      ORTHOKERN_UNROLL for (int i = 0; i < L; i++) store(to + i * depth + k, square[i]);
    }
  }
}

// A tile of C, or two next to or below each other, or four.
template <int ROWS, int COLS>
void outer_tiles(const float* d, int depth, const float* h, ptrdiff_t h_block, float* c, ptrdiff_t ldc) {
  constexpr int L = kLanes<float>;
  constexpr int R1 = COLS;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int k = 0; k < depth; k += kTilePairs) {
    tile_load<4>(d + k, depth);
    if constexpr (ROWS == 2) tile_load<5>(d + L * depth + k, depth);
    tile_load<6>(h + k * L, L);
    tile_multiply<0, 4, 6>();
    if constexpr (ROWS == 2) tile_multiply<R1, 5, 6>();
    if constexpr (COLS == 2) {
      tile_load<7>(h + h_block + k * L, L);
      tile_multiply<1, 4, 7>();
      if constexpr (ROWS == 2) tile_multiply<3, 5, 7>();
    }
  }
  alignas(64) float sums[4][L * L];
  tile_store<0>(sums[0], L), tile_store<1>(sums[1], L), tile_store<2>(sums[2], L), tile_store<3>(sums[3], L);
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLS; j++)
      for (int r = 0; r < L; r++) {
        float* to = c + (i * L + r) * ldc + j * L;
        store(to, load(to) + load(sums[i * COLS + j] + r * L));
      }
}

// outer_add of outer.h: d from pair_rows_transposed, h from pair_rows.
inline void outer_add_tiles(const float* d, int d_blocks, const float* h, int h_blocks, ptrdiff_t h_block, int depth,
                            float* c, ptrdiff_t ldc) {
  constexpr int L = kLanes<float>;
  configure_tiles(kTileRows);
  for (int i = 0; i < d_blocks; i += 2)
    for (int j = 0; j < h_blocks; j += 2) {
      const bool tall = i + 1 < d_blocks, wide = j + 1 < h_blocks;
      const auto tiles =
          tall ? (wide ? outer_tiles<2, 2> : outer_tiles<2, 1>) : (wide ? outer_tiles<1, 2> : outer_tiles<1, 1>);
      tiles(d + i * L * depth, depth, h + j * h_block, h_block, c + i * L * ldc + j * L, ldc);
    }
}

#endif

// Releases the registers at the end of a thread's products: a thread that holds them is slower to switch.
struct TileRelease {
  const bool used;
  explicit TileRelease(bool used_) : used(used_) {}
  ~TileRelease() {
#if ORTHOKERN_HAVE_AMX && defined(__AVX512BW__)
    if (used) __asm__ volatile("tilerelease");
#endif
  }
};

}  // namespace orthokern::ORTHOKERN_ISA
