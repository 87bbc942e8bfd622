// The Cayley step, batched over matrices of any shapes. There are two ways, selected by the shape alone (`way_of`):
//
//     one block     K up to 64, with all data in shared memory: one launch, a block for each matrix.
//     tiles         everything else: tiled products, 64 x 64 results per block, so that even a single matrix is spread
//                   over many multiprocessors; the decisions between kernels are made on the device. The matrices of a
//                   launch are along blockIdx.z.
//
// Tiles, square, K = N, with c = lr/2:
//     skew       X = c (G M^T - M G^T), the upper half of the tiles, mirrored
//     begin      Y = X M, D = Y, out = M - 2 D       (a step that rotates all of M: Y = M, Note [Large steps])
//     iterate    Y <- -X Y, D += Y, out = M - 2 D    up to three times, Note [Series]; nothing once it has converged
//     eliminate  D = (I + X)^-1 Y                    Note [Elimination]; nothing if the series has converged
//     finish     out = M - 2 D                       (large: 2 D - M)
//
// Tiles, thin, K < N: nothing of size N x N, and systems of K x K. With H = M^T G, the part G' = G - M H of G that is
// orthogonal to M, and E = G'^T G':
//     A M = M B + G' and A G' = -M E with B = H - H^T, so the ansatz (I + c A)^-1 M = M a - c G' a leads to
//     (I + F) a = I,  F = c B + c^2 E,    hence    M_new = M - 2 (M F + c G') a    (large: 2 (M - c G') a - M).
// This uses M^T M = I, except in H, where the deviation would be amplified: H = (2 I - M^T M) M^T G, exact to second
// order. Elsewhere a step passes a deviation on without enlarging it.
//
// One block, with R = I - (I + X)^-1 = (I + X)^-1 X, or the same of F. Note [Pivots of two] gives it as accurately as X
// itself is:
//     square     M_new = M - 2 R M
//     thin       M_new = M - 2 ((M - c G') R + c G'),  since F a = R and a = I - R
//
// Note [Elimination]
//     Gauss-Jordan in blocks of 64 without pivoting on [I + X | Y]: per block, (1) every block of threads inverts the
//     diagonal block in registers and multiplies its 64 columns of the row by the inverse, (2) the other rows subtract.
//     Both X and F have a symmetric part >= 0, so the pivots of I + X and I + F never vanish. It takes 3 N^3
//     operations, all of them in products, with 2 N/64 launches. LU and two triangular solves take 8/3 N^3, but an LU
//     panel by panel would leave most of the chip idle.
//
// Note [Series]
//     D = X M - X^2 M + X^3 M - ... With M orthogonal, the k-th term has the norm |X^k|_F, and X is skew: |X|_2 <=
//     (|X^k|_F / sqrt 2)^(1/k).
//     A term costs 2 N^3 operations, so the series pays off for few terms: small steps, as in training. It continues
//     until the remainder is below eps / 2048 of M: a symmetric remainder changes |M| in the same direction at every
//     step.
//
// Note [Large steps]
//     If X rotates all of M by about 90 degrees or more, the correction is no smaller than M, and 2 (I + X)^-1 M - M
//     has the smallest rounding error.
//
// Note [Pivots of two]
//     A block of threads inverts matrices of up to 64 x 64 in place, by Gauss-Jordan with pivots of 2 x 2. That has
//     half as many dependent steps, and it suits a skew X: for a large X, a single pivot of I + X is 1, and its
//     products grow to |X|^2, while [1 x; -x 1]^-1 is below 1 / |x|.
//     With the pivot block P, Q = P^-1, and D_pj = I and D_ij = 0 in the pivot's own columns, D becomes
//         Q D_pj in the pivot's rows,  D_ij - D_ip Q D_pj elsewhere.
//     For small steps, the one-block step keeps the diagonal without the I. Then P = I + D_pp, the second line also
//     holds in the pivot block, and D ends as (I + X)^-1 - I = -R, accurate relative to X: numbers near 1 are never
//     subtracted.
//
// Limit: for large N, the rate of the multiply-adds; for smaller N by tiles, the latency of 2 N/64 + 3 kernels and of
// 32 dependent pairs of pivots in every second one; in one block, the latency of N/2 pairs, with a barrier each, and
// the multiply-adds of one multiprocessor.
#include <type_traits>

#include "cuda/cayley_block.h"
#include "cuda/cayley_tiles.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace orthokern::cuda {
namespace {

enum Way { kAlone, kSquareTiles, kThinTiles };

template <class T>
Way way_of(const CayleyMatrices& some) {
  if (some.K <= kTile && shared_bytes<T>(some.N, some.K) <= kMostShared) return kAlone;
  return some.K < some.N ? kThinTiles : kSquareTiles;
}

// `batch` matrices of one shape in one launch, starting at number `skip` of their CayleyMatrices, with the workspace at
// `memory`. Returns the bytes of workspace that they use.
template <class T>
int64_t lay_out(Matrices<T>& w, const CayleyMatrices& some, int64_t skip, int64_t, char*) {
  const int64_t size = some.N * some.K;
  w.N = static_cast<int>(some.N), w.K = static_cast<int>(some.K);
  w.m = static_cast<const T*>(some.m) + skip * size, w.g = static_cast<const T*>(some.g) + skip * size;
  w.out = static_cast<T*>(some.out) + skip * size;
  w.lr = some.lr ? some.lr + skip : nullptr, w.rate = some.rate;
  return 0;
}
template <class T>
int64_t lay_out(Work<T>& w, const CayleyMatrices& some, int64_t skip, int64_t batch, char* memory) {
  lay_out(static_cast<Matrices<T>&>(w), some, skip, batch, memory);
  const bool thin = some.K < some.N;
  w.order = w.K, w.width = 2 * w.K;
  w.tiles = (w.order + kTile - 1) / kTile;
  w.iterations = !thin && some.N >= kSeriesFrom ? kIterations : 0;
  const int64_t size = some.N * some.K, own = some.K * some.K, stages = w.iterations + 2;
  int64_t used = 0;
  auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + used);
    used += (count * batch * static_cast<int64_t>(sizeof(*pointer)) + 255) / 256 * 256;
  };
  take(w.squares, stages * w.tiles * w.tiles);
  take(w.status, stages);
  take(w.system, 2 * own);
  take(w.sum, size);
  take(w.terms, thin ? size : 2 * size);
  take(w.gram, thin ? 2 * own : 0);
  take(w.h, thin ? own : 0);
  return used;
}

unsigned tiles_of(int64_t rows) { return static_cast<unsigned>((rows + kTile - 1) / kTile); }

// f(batch, number of matrices) for each launch of the matrices that are computed this way, which Some describes.
// Launches run in order on the stream, so they share the workspace. Returns the bytes that the largest uses.
template <class T, class Some, class F>
int64_t each_launch(const CayleyArgs& args, Way way, F f) {
  Batch<Some> batch{};
  int64_t matrices = 0, used = 0, most = 0;
  auto finish = [&] {
    if (batch.shapes) f(batch, static_cast<unsigned>(matrices));
    most = used > most ? used : most;
    batch.shapes = 0, matrices = used = 0;
  };
  for (const CayleyMatrices& some : args.matrices) {
    if (way_of<T>(some) != way) continue;
    for (int64_t done = 0; done < some.batch;) {
      if (batch.shapes == kMostShapes || matrices == kLargestBatch) finish();
      const int64_t left = some.batch - done, room = kLargestBatch - matrices, count = left < room ? left : room;
      batch.first[batch.shapes] = static_cast<int>(matrices);
      used += lay_out(batch.of[batch.shapes], some, done, count, static_cast<char*>(args.workspace) + used);
      batch.shapes++, matrices += count, done += count;
    }
  }
  finish();
  return most;
}

template <class T>
void step_alone(const Batch<Matrices<T>>& all, unsigned batch, cudaStream_t stream) {
  int64_t bytes = 0;
  for (int s = 0; s < all.shapes; s++) {
    const int64_t needed = shared_bytes<T>(all.of[s].N, all.of[s].K);
    bytes = needed > bytes ? needed : bytes;
  }
  launch(cayley_block_kernel<T>, {dim3(batch), dim3(kThreads), stream, static_cast<size_t>(bytes)}, all);
}

template <class T>
void eliminate(const Batch<Work<T>>& all, int order, unsigned batch, cudaStream_t stream) {
  for (int first = 0; first < order; first += kTile) {
    const unsigned across = tiles_of(2 * order - (first + kTile < order ? first + kTile : order));
    launch(cayley_rows_kernel<T>, {dim3(across, 1, batch), dim3(kThreads), stream, sizeof(RowsShared<T>)}, all, first,
           first == 0);
    launch(cayley_update_kernel<T>, {dim3(across, tiles_of(order) - 1, batch), dim3(kThreads), stream}, all, first);
  }
}

template <class T>
void step_by_tiles(const Batch<Work<T>>& all, unsigned batch, bool thin, cudaStream_t stream) {
  int N = 0, K = 0, iterations = 0;
  for (int s = 0; s < all.shapes; s++) {
    const Work<T>& w = all.of[s];
    N = w.N > N ? w.N : N, K = w.K > K ? w.K : K, iterations = w.iterations > iterations ? w.iterations : iterations;
  }
  const unsigned tiles = tiles_of(K), tall = tiles_of(N);
  const auto grid = [&](unsigned x, unsigned y) { return Launch{dim3(x, y, batch), dim3(kThreads), stream}; };
  if (!thin) {
    launch(cayley_skew_kernel<T>, grid(tiles * (tiles + 1) / 2, 1), all);
    launch(cayley_begin_kernel<T>, grid(tiles, tiles), all);
    for (int done = 0; done < iterations; done++) launch(cayley_iterate_kernel<T>, grid(tiles, tiles), all, done);
    eliminate(all, K, batch, stream);
    launch(cayley_finish_kernel<T>, grid(tiles * tiles, 1), all);
  } else {
    launch(cayley_gram_kernel<T>, grid(tiles_of(2 * K), tiles), all);
    launch(cayley_coefficients_kernel<T>, grid(tiles, tiles), all);
    launch(cayley_project_kernel<T>, grid(tiles, tall), all);
    launch(cayley_system_kernel<T>, grid(tiles, tiles), all);
    launch(cayley_turn_kernel<T>, grid(tiles, tall), all);
    eliminate(all, K, batch, stream);
    launch(cayley_thin_finish_kernel<T>, grid(tiles, tall), all);
  }
}

template <class T>
void run(const CayleyArgs& args) {
  const DeviceGuard guard(args.device);
  const cudaStream_t stream = static_cast<cudaStream_t>(args.stream);
  each_launch<T, Matrices<T>>(args, kAlone, [&](const auto& all, unsigned batch) { step_alone(all, batch, stream); });
  for (const Way way : {kSquareTiles, kThinTiles})
    each_launch<T, Work<T>>(
        args, way, [&](const auto& all, unsigned batch) { step_by_tiles(all, batch, way == kThinTiles, stream); });
}

template <class T>
int64_t workspace(const CayleyArgs& args) {
  const auto nothing = [](const auto&, unsigned) {};
  const int64_t square = each_launch<T, Work<T>>(args, kSquareTiles, nothing),
                thin = each_launch<T, Work<T>>(args, kThinTiles, nothing);
  return square > thin ? square : thin;
}

}  // namespace

void cayley(const CayleyArgs& args) { args.dtype == kFloat64 ? run<double>(args) : run<float>(args); }

int64_t cayley_workspace(const CayleyArgs& args) {
  return args.dtype == kFloat64 ? workspace<double>(args) : workspace<float>(args);
}

}  // namespace orthokern::cuda
