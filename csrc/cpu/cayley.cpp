// The Cayley step, one matrix or a batch:
//
//     A = G M^T - M G^T,    X = lr/2 A (skew),    M_new = M - 2 (I + X)^-1 X M.
//
// Square route, 2 K >= N. Everything stays in panels (panels.h):
//     P = G M^T  ->  X = lr/2 (P - P^T), in place  ->  its norms choose how (I + X)^-1 X is taken, Note [Which series]
//                ->
//     column panels of M, a few at a time and in the cache:  D = (I + X)^-1 X M,  out = M - 2 D.
//
// Thin route, 2 K < N: nothing of size N x N. A = P Q^T with P = [G, M] and Q = [M, -G], both [N, 2K], hence
//     M_new = M - lr P (I + lr/2 Q^T P)^-1 (Q^T M) = 2 P (I + lr/2 Q^T P)^-1 [0; I] - M  (the last for large steps),
// and both Q^T P [2K, 2K] and Q^T M (its last K columns) are blocks of the Gram matrix of [G, M].
//
// Note [Which series]
//     (I + X)^-1 X = X - X^2 + X^3 - ...; with S = X^2 (symmetric: half a product) and Z = X - S = X (I - X):
//         first      X               4 N^3 flops in all       next term X^2: symmetric, so it changes |M| at every
//                    step: allowed only
//                                                              where 3000 steps of it stay below one step's rounding
//         second     Z               5 N^3                     next term X^3: skew, harmless for orthogonality
//         fourth     (I + S) Z       7 N^3                     next term X^5
//         LU         of I + X        6.7 N^3, at a lower rate  without pivoting while X is moderate (lu.h), with it
//                    otherwise
//         large                      4.7 N^3, at a lower rate  for an X that turns M as a whole by about 90 degrees or
//                                    more: the correction
//                                                              is no smaller than M then, and M_new = 2 (I + X)^-1 M -
//                                                              M rounds least
//     How large the next term is, is bounded from X's and S's rows and Frobenius norms, never from M: the choice is
//     exact mathematics for any
//     M, orthogonal or not, and depends on nothing but the numbers.
//
// Limit: the rate of the multiply-adds. Float32, 2 matrices on 2 cores with AVX-512, form `first`, 4 N^3 operations a
// matrix; share of torch's SGEMM rate (1536^3) beside it, best of many: 77 % at N = 64, 86 at 128, 96 at 256, 95 at
// 512, 91 at 1000. The products alone reach SGEMM's rate while their factors fit the second cache. What is left: at
// small N packing, transposes and one fork; at N = 1000 the left factor, which is read from the third cache once for
// each group of panels.
//
// Rounding: every form but `large` rounds against the small correction, never against M, but for the one last
// subtraction.
//
// Threads: with at least one matrix for each thread a thread keeps a matrix to itself; otherwise rows and panels of a
// matrix are shared out. The bits are the same either way and for any number of threads.
#include "cpu/cayley.h"

#include "cpu/cayley_square.h"
#include "cpu/cayley_thin.h"

namespace orthokern {
namespace ORTHOKERN_ISA {
namespace {

// Memory of `count` owners, in allocations of their own: the C library keeps what is freed in moderate pieces for the
// next call, and returns larger ones to the system, which then has to clear all of it again at every step.
class MemoryList {
 public:
  MemoryList() : list_(nullptr), count_(0) {}
  ~MemoryList() {
    for (int i = 0; i < count_; i++) free(list_[i]);
    free(list_);
  }
  MemoryList(const MemoryList&) = delete;
  MemoryList& operator=(const MemoryList&) = delete;
  bool start(int count) {
    list_ = static_cast<void**>(calloc(count, sizeof(void*)));
    if (list_) count_ = count;
    return list_ != nullptr;
  }
  char* allocate(int i, size_t bytes) {
    return posix_memalign(&list_[i], 64, bytes) == 0 ? static_cast<char*>(list_[i]) : nullptr;
  }

 private:
  void** list_;
  int count_;
};

template <class T, template <class> class RouteOf>
bool batch(const CayleyArgs& args, int threads, bool cooperate) {
  typedef RouteOf<T> Route;
  typedef Slot<typename Route::Matrix, typename Route::Thread> Work;
  const Route route(static_cast<int>(args.N), static_cast<int>(args.K), threads);
  // As many matrices as fill all threads evenly keep to one thread each; the rest share all of them if that pays.
  const int64_t alone = cooperate ? args.batch / threads * threads : args.batch;
  Scratch<Work> slots;
  MemoryList memory;
  if (!slots.allocate(threads) || !memory.start(threads)) return false;
  for (int t = 0; t < threads; t++) {
    char* base = nullptr;
    for (int pass = 0; pass < 2; pass++) {
      Carver carver(base);
      if (t == 0 || alone) route.take(carver, &slots[t].matrix);
      route.take(carver, &slots[t].thread);
      if (pass == 0 && !(base = memory.allocate(t, carver.used()))) return false;
    }
  }
  const ptrdiff_t size = static_cast<ptrdiff_t>(args.N) * args.K;
  const auto step = [&](int64_t i, int t, int team) {
    const T* m = static_cast<const T*>(args.m) + i * size;
    T* out = static_cast<T*>(args.out) + i * size;
    if (args.lr[i] == 0) memcpy(out, m, size * sizeof(T));
    else route.step(slots[t].matrix, slots + t, m, static_cast<const T*>(args.g) + i * size, args.lr[i], out, team);
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
  FlushDenormals flush;
  const bool thin = 2 * args.K < args.N;
  // A thread more has to save more than the microseconds that waking it takes: once for a batch of matrices, some ten
  // times for a matrix that is shared.
  const double flops = static_cast<double>(args.N) * args.K * (thin ? 10 * args.K : 4 * args.N);
  const bool cooperate = flops > 1.6e7;
  double useful = cooperate ? flops / 4e6 * args.batch : flops / 2e5 * args.batch;
  if (!cooperate && useful > args.batch) useful = args.batch;
  const int threads = useful < args.threads ? max_of(1, static_cast<int>(useful)) : max_of(1, args.threads);
  if (args.dtype == 0)
    return thin ? batch<float, ThinRoute>(args, threads, cooperate)
                : batch<float, SquareRoute>(args, threads, cooperate);
  return thin ? batch<double, ThinRoute>(args, threads, cooperate)
              : batch<double, SquareRoute>(args, threads, cooperate);
}

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
