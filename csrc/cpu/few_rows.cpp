// The gradient of an exponential from few rows: see few_rows.h. The polynomials U_j of all rows, U_0 and U_1 side by side
// as one block of 4 R rows, then U_2 and U_3, and so on: each block is one product of the last with S. The matrices are
// read once for every four rows. Cost: 2 (terms + 1) R N^2 multiply-adds for the products, terms R N^2 for the result.
#include "cpu/few_rows.h"

#include "cpu/direct.h"
#include "cpu/parallel.h"

namespace orthokern {
namespace ORTHOKERN_ISA {
namespace {

constexpr int kPanel = 4;  // vectors of columns that a product computes at a time

template <class T>
struct FewRows {
  static constexpr int L = kLanes<T>;
  const FewRowsArgs& args;
  int N, R, terms;
  ptrdiff_t padded;     // elements from one row to the next
  Scratch<T> both;      // [terms][2 R][padded]: U_j of k and of h
  Scratch<T> weighted;  // [terms][R][padded]: sum_j C_ij U_j h
  // of the product that runs: to = from matrix - minus
  const T *from, *matrix, *minus;
  T* to;
  int rows;

  // MR rows from row0 on, PV vectors of columns from c on, of which the last has `count` lanes.
  template <int MR, int PV>
  ORTHOKERN_INLINE void tile(int row0, int c, int count) const {
    V<T> acc[MR][PV] = {};
    const T* a = from + row0 * padded;
    const T* m = matrix + c;
    for (int k = 0; k < N; k++, m += N) {
      V<T> column[PV];
      ORTHOKERN_UNROLL for (int v = 0; v < PV; v++) column[v] =
          v + 1 < PV || count == L ? load(m + v * L) : load_part(m + v * L, count);
      ORTHOKERN_UNROLL for (int r = 0; r < MR; r++) ORTHOKERN_UNROLL for (int v = 0; v < PV; v++) acc[r][v] +=
          column[v] * a[r * padded + k];
    }
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < PV; v++) {
        const ptrdiff_t at = (row0 + r) * padded + c + v * L;
        store(to + at, minus ? acc[r][v] - load(minus + at) : acc[r][v]);
      }
  }
  template <int PV>
  void columns(int c, int count) const {
    int row = 0;
    for (; row + 4 <= rows; row += 4) tile<4, PV>(row, c, count);
    for (; row < rows; row += 2) tile<2, PV>(row, c, count);
  }
  static void panels(void* context, int first, int last) {
    const FewRows& self = *static_cast<FewRows*>(context);
    for (int p = first; p < last; p++) {
      int c = p * kPanel * L;
      if (c + kPanel * L <= self.N) {
        self.template columns<kPanel>(c, L);
        continue;
      }
      for (; c < self.N; c += L) self.template columns<1>(c, self.N - c < L ? self.N - c : L);
    }
  }
  void multiply(const T* from_, int rows_, const void* matrix_, const T* minus_, T* to_) {
    from = from_, rows = rows_, matrix = static_cast<const T*>(matrix_), minus = minus_, to = to_;
    direct_run(args.threads, static_cast<size_t>(N) * N * sizeof(T), (N + kPanel * L - 1) / (kPanel * L), panels, this);
  }
  T* polynomial(int j) const { return both.get() + j * 2 * R * padded; }

  void weigh() {
    const T* c = static_cast<const T*>(args.weights);
    for (int i = 0; i < terms; i++)
      for (ptrdiff_t at = 0; at < R * padded; at += L) {
        V<T> sum = V<T>{};
        for (int j = 0; j < terms; j++) sum += load(polynomial(j) + R * padded + at) * c[i * terms + j];
        store(weighted + i * R * padded + at, sum);
      }
  }
  // Rows L * [first, last) of the result: Gamma - Gamma^T below the diagonal.
  static void lower(void* context, int first, int last) {
    const FewRows& self = *static_cast<FewRows*>(context);
    const int end = last * L < self.N ? last * L : self.N;
    for (int n = first * L; n < end; n++) {
      T* row = static_cast<T*>(self.args.grad) + static_cast<ptrdiff_t>(n) * self.N;
      for (int m = 0; m < self.N; m += L) {
        const int count = self.N - m < L ? self.N - m : L;
        V<T> sum = V<T>{};
        if (m < n)
          for (int i = 0; i < self.terms; i++)
            for (int r = 0; r < self.R; r++) {
              const T *left = self.polynomial(i) + r * self.padded,
                      *right = self.weighted + (i * self.R + r) * self.padded;
              sum += load(right + m) * left[n];
              sum -= load(left + m) * right[n];
            }
        if (m < n && m + L > n)
          for (int l = n - m; l < L; l++) sum[l] = 0;
        store_part(row + m, sum, count);
      }
    }
  }

  bool run() {
    N = static_cast<int>(args.N), R = static_cast<int>(args.R), terms = static_cast<int>(args.terms);
    padded = (N + L - 1) / L * L;
    if (!both.allocate(terms * 2 * R * padded) || !weighted.allocate(terms * R * padded)) return false;
    const ptrdiff_t block = 2 * R * padded;  // of a polynomial
    for (int r = 0; r < R; r++) {
      memcpy(polynomial(0) + r * padded, static_cast<const T*>(args.k) + r * N, N * sizeof(T));
      memcpy(polynomial(0) + (R + r) * padded, static_cast<const T*>(args.h) + r * N, N * sizeof(T));
    }
    multiply(polynomial(0), 2 * R, args.turn, nullptr, polynomial(1));
    multiply(polynomial(0), 4 * R, args.s, nullptr, polynomial(2));
    for (ptrdiff_t at = 0; at < block; at += L) {  // S U_0 = 2 U_2, S U_1 = U_3 - U_1
      store(polynomial(2) + at, load(polynomial(2) + at) * splat<T>(static_cast<T>(0.5)));
      store(polynomial(3) + at, load(polynomial(3) + at) + load(polynomial(1) + at));
    }
    for (int j = 4; j < terms; j += 2) multiply(polynomial(j - 2), 4 * R, args.s, polynomial(j - 4), polynomial(j));
    weigh();
    direct_run(args.threads, static_cast<size_t>(N) * N * sizeof(T), (N + L - 1) / L, lower, this);
    return true;
  }
};

}  // namespace

bool few_rows(const FewRowsArgs& args) {
  const FlushDenormals flush;
  if (args.dtype == 1) return FewRows<double>{args}.run();
  return FewRows<float>{args}.run();
}

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
