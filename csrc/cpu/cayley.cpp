// The Cayley step, one matrix or a batch:
//
//     A = G M^T - M G^T,    X = lr/2 A (skew),    M_new = M - 2 (I + X)^-1 X M.
//
// Square route, 2 K >= N. All matrices are stored in panels (panels.h):
//     P = G M^T
//     X = lr/2 (P - P^T), in place. Its norms select how (I + X)^-1 X is computed, see Note [Which series].
//     For column panels of M, a few at a time and in the cache:  D = (I + X)^-1 X M,  out = M - 2 D.
//
// Thin route, 2 K < N: no N x N matrix. A = P Q^T with P = [G, M] and Q = [M, -G], both [N, 2K], hence
//     M_new = M - lr P (I + lr/2 Q^T P)^-1 (Q^T M),
// and both Q^T P [2K, 2K] and Q^T M (its last K columns) are blocks of the Gram matrix of [G, M].
//
// Note [Which series]
//     (I + X)^-1 X = X - X^2 + X^3 - ...; with S = X^2 (symmetric: half a product) and Z = X - S = X (I - X):
//
//     form     series         flops    when
//     first    X              4 N^3    The next term, X^2, is symmetric, so it changes |M| at every step. Allowed only
//                                      where 3000 steps of it stay below the rounding error of one step.
//     second   Z              5 N^3    The next term, X^3, is skew, which does not harm orthogonality.
//     fourth   (I + S) Z      7 N^3    The next term is X^5.
//     LU       of I + X       6.7 N^3  At a lower rate.
//     large    LU of I + X    4.7 N^3  At a lower rate. For an X that rotates all of M by about 90 degrees or more. The
//                                      correction is then no smaller than M, and M_new = 2 (I + X)^-1 M - M has the
//                                      smallest rounding error.
//
//     The size of the next term is bounded from the rows and Frobenius norms of X and S, never from M. So the choice is
//     valid for any M, orthogonal or not, and it is deterministic.
//
// Limit: the rate of the multiply-adds. Float32, 2 matrices on 2 cores with AVX-512, form `first`, 4 N^3 operations per
// matrix, as a share of the rate of torch's SGEMM (1536^3), best of many: 77 % at N = 64, 86 at 128, 96 at 256, 95 at
// 512, 91 at 1000. The products alone reach SGEMM's rate while their factors fit into L2. The rest is packing,
// transposes and starting threads at small N, and at N = 1000 reading the left factor from L3 once for each group of
// panels.
//
// Rounding: in every form but `large` the rounding errors are relative to the correction, which is small against M,
// except for the final subtraction.
//
// Threads: with at least one matrix for each thread, every matrix is computed by one thread. Otherwise rows and panels
// of a matrix are divided among threads. Results are bit-identical in both cases and for any number of threads.
#include "cpu/cayley_thin.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T, template <class> class Route>
bool batch(const CayleyArgs& args, int threads, bool cooperate) {
  typedef typename Route<T>::Work Work;
  const Route<T> route(static_cast<int>(args.N), static_cast<int>(args.K), threads);
  // Matrices that divide evenly among the threads are computed by one thread each. The rest use all threads if they
  // are large enough.
  const int64_t alone = cooperate ? args.batch / threads * threads : args.batch;
  TaskSums<Work> works;
  if (!works.allocate(threads)) return false;
  for (int t = 0; t < threads; t++)
    if (!route.allocate(works[t], t == 0 || alone)) return false;
  const ptrdiff_t size = static_cast<ptrdiff_t>(args.N) * args.K;
  const auto step = [&](int64_t i, int t, int team) {
    const T* m = static_cast<const T*>(args.m) + i * size;
    T* out = static_cast<T*>(args.out) + i * size;
    if (args.lr[i] == 0) memcpy(out, m, size * sizeof(T));
    else route.step(works.get() + t, m, static_cast<const T*>(args.g) + i * size, args.lr[i], out, team);
  };
  share(threads, alone ? threads : 0, [&](int t) {
    for (int64_t i = t; i < alone; i += threads) step(i, t, 1);
  });
  for (int64_t i = alone; i < args.batch; i++) step(i, 0, threads);
  return true;
}

}  // namespace

bool cayley(const CayleyArgs& args) {
  if (args.batch <= 0 || args.N <= 0 || args.K <= 0) return true;
  const FlushDenormals flush;
  const bool thin = 2 * args.K < args.N;
  // Another thread must save more than the microseconds that waking it costs: once for a batch of matrices, about ten
  // times for a matrix that is divided among threads.
  const double flops = static_cast<double>(args.N) * args.K * (thin ? 10 * args.K : 4 * args.N);
  const bool cooperate = flops > 1.6e7;
  double useful = cooperate ? flops / 4e6 * args.batch : flops / 2e5 * args.batch;
  if (!cooperate && useful > args.batch) useful = args.batch;
  const int threads = useful < args.threads ? max_of(1, static_cast<int>(useful)) : max_of(1, args.threads);
  if (args.dtype == kFloat64)
    return thin ? batch<double, ThinRoute>(args, threads, cooperate)
                : batch<double, SquareRoute>(args, threads, cooperate);
  return thin ? batch<float, ThinRoute>(args, threads, cooperate) : batch<float, SquareRoute>(args, threads, cooperate);
}

}  // namespace orthokern::ORTHOKERN_ISA
