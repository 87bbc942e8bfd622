// The backward of a few steps where the matrix is made of an exponential: delta by scan_direct_backward.h, then the
// gradient of A by Note [Gradient of an exponential from few rows] in orthokern/nn/_few_rows.py. The polynomials U_j of
// all rows, U_0 and U_1 side by side as one block of 4 R rows, then U_2 and U_3, and so on: each block is one product of
// the last with S. The matrices are read once for every four rows. Cost: 2 (terms + 1) R N^2 multiply-adds for the
// products, terms R N^2 for the result.
//
// NonNormalRNN, V = P Theta P^T: with d = P^T delta and e = P^T h, dL/dTheta = d e^T, and P^T dL/dP has the rows
// d (Theta e)^T + e (Theta^T d)^T, where Theta e = P^T V h and Theta^T d = P^T V^T delta.
#include "cpu/exponential.h"

#include <cmath>

#include "cpu/scan.h"

namespace orthokern::ORTHOKERN_ISA {
namespace {

template <class T>
struct ExponentialBackward {
  static constexpr int L = kLanes<T>;
  const ExponentialArgs& args;
  int N, rows, R, terms;  // rows: of the steps; R: of K = sum_r k_r h_r^T, twice as many with a basis
  ptrdiff_t padded;       // elements from one row to the next
  Scratch<T> delta;       // [rows][padded]
  Scratch<T> both;        // [terms][2 R][padded]: U_j of k and of h
  Scratch<T> weighted;    // [terms][R][padded]: sum_j C_ij U_j h

  static const T* at(const void* pointer) { return static_cast<const T*>(pointer); }
  static T* at(void* pointer) { return static_cast<T*>(pointer); }
  const T* before(int row) const {
    const int64_t B = args.B, n = N;
    return row < B ? at(args.h0) + row * n : at(args.states) + (row - B) * n;
  }
  // Work of `count` rows and a matrix, of which four rows take as long as reading it.
  template <class F>
  void share(int count, int size, int unit, const F& fn) const {
    direct_share(args.threads, static_cast<size_t>(N) * N * sizeof(T) * (count > 4 ? count / 4 : 1), size, unit, fn);
  }
  // to = from matrix, of `count` rows.
  void multiply(const T* from, int count, const void* matrix, T* to) const {
    share(count, N, kDirectPanel * L, [=](int first, int last) {
      direct_columns<T, false>(at(matrix), N, first, last, N, from, padded, count, nullptr, to, padded);
    });
  }
  T* polynomial(int j) const { return both.get() + j * 2 * R * padded; }

  // NV vectors of sum_j C_ij U_j h.
  template <int NV>
  void weigh(const T* c, const T* from, T* to) const {
    V<T> sum[NV] = {};
    for (int j = 0; j < terms; j++, from += 2 * R * padded)
      ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) sum[v] += load(from + v * L) * c[j];
    ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) store(to + v * L, sum[v]);
  }
  void weigh() const {
    const ptrdiff_t size = R * padded;
    share(R * terms / 4, terms, 1, [=](int first, int last) {
      for (int i = first; i < last; i++) {
        const T *c = at(args.weights) + i * terms, *from = polynomial(0) + size;
        ptrdiff_t n = 0;
        for (; n + 4 * L <= size; n += 4 * L) weigh<4>(c, from + n, weighted + i * size + n);
        for (; n < size; n += L) weigh<1>(c, from + n, weighted + i * size + n);
      }
    });
  }
  static V<T> before_lane(V<T> value, int count) {
    typename Vec<T>::I lane;
    for (int l = 0; l < L; l++) lane[l] = l;
    return lane < count ? value : V<T>{};
  }
  // kRows rows from n0 on and NV vectors of columns from m0 on of Gamma - Gamma^T, where it is below the diagonal.
  static constexpr int kRows = L < 4 ? L : 4, kColumns = k32Registers ? 4 : 2;
  template <int NV>
  void lower_tile(int n0, int m0) const {
    V<T> acc[kRows][NV] = {};
    if (m0 < n0 + kRows - 1)
      for (int i = 0; i < terms; i++)
        for (int r = 0; r < R; r++) {
          const T *left = polynomial(i) + r * padded, *right = weighted + (i * R + r) * padded;
          V<T> a[NV], b[NV];
          ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) a[v] = load(left + m0 + v * L), b[v] = load(right + m0 + v * L);
          ORTHOKERN_UNROLL for (int n = 0; n < kRows; n++) ORTHOKERN_UNROLL for (int v = 0; v < NV; v++) {
            acc[n][v] += b[v] * left[n0 + n];
            acc[n][v] -= a[v] * right[n0 + n];
          }
        }
    for (int n = n0; n < n0 + kRows && n < N; n++)
      for (int v = 0; v < NV; v++) {
        const int m = m0 + v * L;
        const V<T> value = n >= m + L ? acc[n - n0][v] : n > m ? before_lane(acc[n - n0][v], n - m) : V<T>{};
        store_part(at(args.grad_skew) + static_cast<ptrdiff_t>(n) * N + m, value, N - m < L ? N - m : L);
      }
  }
  // Rows [first, last) of the result; first is a multiple of kRows.
  void lower(int first, int last) const {
    for (int n = first; n < last; n += kRows) {
      int m = 0;
      for (; m + kColumns * L <= N; m += kColumns * L) lower_tile<kColumns>(n, m);
      for (; m < N; m += L) lower_tile<1>(n, m);
    }
  }
  void skew_gradient() {
    const ptrdiff_t block = 2 * R * padded;  // of a polynomial
    multiply(polynomial(0), 2 * R, args.turn, polynomial(1));
    multiply(polynomial(0), 4 * R, args.s, polynomial(2));
    for (ptrdiff_t i = 0; i < block; i += L) {  // S U_0 = 2 U_2, S U_1 = U_3 - U_1
      store(polynomial(2) + i, load(polynomial(2) + i) * splat<T>(static_cast<T>(0.5)));
      store(polynomial(3) + i, load(polynomial(3) + i) + load(polynomial(1) + i));
    }
    for (int j = 4; j < terms; j += 2) {
      multiply(polynomial(j - 2), 4 * R, args.s, polynomial(j));
      for (ptrdiff_t i = 0; i < 2 * block; i += L)
        store(polynomial(j) + i, load(polynomial(j) + i) - load(polynomial(j - 4) + i));
    }
    weigh();
    const int blocks = static_cast<int>(padded / L);
    share(R * terms, blocks, 1, [=](int first, int last) {
      for (int i = first; i < last; i++) {  // long rows and short ones in turns: threads have as much to do
        const int b = i % 2 ? blocks - 1 - i / 2 : i / 2;
        lower(b * L, b * L + L < N ? b * L + L : N);
      }
    });
  }

  // The rows k = W^T delta and h.
  void plain_rows() {
    multiply(delta, rows, args.second, polynomial(0));
    for (int r = 0; r < rows; r++) memcpy(polynomial(0) + (rows + r) * padded, before(r), N * sizeof(T));
  }
  // The rows k = (d, e) and h = (Theta e, Theta^T d).
  bool turned_rows() {
    Scratch<T> plain;  // delta, h, V h, V^T delta
    const ptrdiff_t part = rows * padded;
    if (!plain.allocate(4 * part)) return false;
    memcpy(plain, delta, part * sizeof(T));
    for (int r = 0; r < rows; r++) memcpy(plain + part + r * padded, before(r), N * sizeof(T));
    share(rows, N, L, [&](int first, int last) {
      for (int n = first; n < last; n += L)
        for (int r = 0; r < rows; r++)
          store(plain + 2 * part + r * padded + n,
                direct_rows<T>(at(args.second) + static_cast<ptrdiff_t>(n) * N, N, last - n < L ? last - n : L, N,
                               plain + part + r * padded, V<T>{}));
    });
    multiply(delta, rows, args.second, plain + 3 * part);
    multiply(plain, 4 * rows, args.basis, polynomial(0));
    return true;
  }
  // Of gamma, theta and the triangle.
  void theta_gradients() const {
    const T *d = polynomial(0), *e = d + rows * padded, *theta = at(args.theta), *gamma = at(args.gamma);
    T *of_gamma = at(args.grad_gamma), *of_theta = at(args.grad_theta);
    for (int i = 0; i < (N + 1) / 2; i++) {
      T along = 0, across = 0;
      const bool pair = 2 * i + 1 < N;
      for (int r = 0; r < rows; r++) {
        const T *left = d + r * padded + 2 * i, *right = e + r * padded + 2 * i;
        along += left[0] * right[0];
        if (!pair) continue;
        along += left[1] * right[1];
        across += left[1] * right[0] - left[0] * right[1];
      }
      const T cosine = pair ? std::cos(theta[i]) : T(1), sine = pair ? std::sin(theta[i]) : T(0);
      if (of_gamma) of_gamma[i] = cosine * along + sine * across;
      if (of_theta && pair) of_theta[i] = gamma[i] * (cosine * across - sine * along);
    }
    T* triangle = at(args.grad_triangle);
    direct_outer<T>(
        args.threads, rows, [&](int r) { return d + r * padded; }, [&](int r) { return e + r * padded; }, triangle, N,
        N);
    for (int n = 0; triangle && n < N; n++) {
      const int end = args.mask_block ? n / 2 * 2 : n;
      memset(triangle + static_cast<ptrdiff_t>(n) * N + end, 0, (N - end) * sizeof(T));
    }
  }

  bool run() {
    N = static_cast<int>(args.N), rows = static_cast<int>(args.T * args.B), terms = static_cast<int>(args.terms);
    R = args.basis ? 2 * rows : rows;
    padded = round_up(N, L);
    if (!delta.allocate(rows * padded) || !both.allocate(terms * 2 * R * padded, false) ||
        !weighted.allocate(terms * R * padded, false))
      return false;
    memset(both, 0, 2 * R * padded * sizeof(T));
    ScanArgs first = args;
    first.grad_delta = both;  // rows N apart, not yet padded
    if (!scan_direct_backward<T>(first)) return false;
    for (int r = 0; r < rows; r++) memcpy(delta + r * padded, both + static_cast<ptrdiff_t>(r) * N, N * sizeof(T));
    const FlushDenormals flush;
    if (!args.basis) plain_rows();
    else if (!turned_rows()) return false;
    if (args.basis) theta_gradients();
    if (args.grad_skew) skew_gradient();
    return true;
  }
};

}  // namespace

bool exponential_steps_bwd(const ExponentialArgs& args) {
  if (args.dtype == kFloat64) return ExponentialBackward<double>{args, 0, 0, 0, 0, 0, {}, {}, {}}.run();
  return ExponentialBackward<float>{args, 0, 0, 0, 0, 0, {}, {}, {}}.run();
}

}  // namespace orthokern::ORTHOKERN_ISA
