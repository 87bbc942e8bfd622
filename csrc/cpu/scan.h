// The recurrent scan on a CPU, for the factored map U diag(s) V^T and for a dense map, forward and backward.
//
//   forward    h_t = phi(a_t),  a_t = map(h_{t-1}) + e_t
//   backward   ghat_t = g_t + map^T(delta_{t+1}),  delta_t = clip(phi'(a_t) * ghat_t)
//
// Sequences do not depend on each other: a thread owns rows of the batch for the whole sequence, and threads meet only
// at the end, to add up the parameter gradients. Per step and row group of R rows (registers < L1 < L2 < memory):
//
//   registers  one tile of 13 rows x 2 vectors of a product (gemm.h)
//   L1         the state, blocked [N/L][R][L]; one panel of weights
//   L2         all panels (packed once per call, s folded into those of V, or of U in backward); the ring of the last
//              steps
//   memory     e_t or x_t or token ids in, h_t out (past the caches, when there is much of it); in backward g_t, h_t
//              in, grad_x out
//
// The input projection W_in x_t + b is part of the product: x_t and a one stand after the state as further columns,
// W_in and b below the map's rows in the panels. Token ids instead pick a row of a table W_in^T + b.
//
// Backward keeps delta_t and [h_{t-1}, x_t, 1] of the last few steps in a ring of blocked rows. A full ring (about 128
// rows) is one product (outer.h) into this thread's sums: the gradients of the map, of W_in and of b without a second
// pass over memory. Which steps share a ring depends on t and the lengths alone, so the sums do not change when states
// are recomputed from checkpoints.
//
// Sequences of different lengths: step t works on the first R_t rows of a group, those up to the last one that still
// runs, and the ring holds just these. In a batch sorted by falling length no step touches a row that has ended; in any
// other order such rows between the running ones are computed along and cleared. Padding in the results is zeros.
//
// Cost per step and sequence: 4 N K (factored) or 2 N^2 (dense) flops and 2 N D for the projection each way, and 2 N (N
// + D + 1) for the gradients; memory traffic: forward 4 N bytes (8 N with a dense e), backward 8 N (12 N).
#pragma once

#include "cpu/activate.h"
#include "cpu/gemm.h"
#include "cpu/ops.h"
#include "cpu/outer.h"
#include "cpu/parallel.h"

namespace orthokern {
namespace ORTHOKERN_ISA {

constexpr int kGroupRows = 104;  // rows of a group: the state stays in L2 whatever the batch
constexpr int kRingRows = 128;
constexpr int64_t kStreamBytes = 8 << 20;  // results larger than this go past the caches

// What all threads of a call share.
template <class T>
struct ScanPlan {
  const ScanArgs* args;
  int B, N, K, D;
  int X;  // extra columns of the product: D and the one for the bias, 0 without features
  bool bias_column;
  bool factored;
  bool stream;  // write results past the caches
  int threads;
  T clip;              // of delta, infinite without one
  Scratch<int> begin;  // [threads + 1]: rows [begin[i], begin[i + 1]) of the batch are task i's
  Packed<T> first;     // forward, factored: [N, K] V diag(s)
  Packed<T> second;    // forward: [K or N (+ X), N] U^T or W^T, W_in^T, b
  Packed<T> first_t;   // backward, factored: [N, K] U diag(s)
  Packed<T> second_t;  // backward: [K, N] V^T, or [N, N] W
  Packed<T> input_t;   // backward with features whose gradient is wanted: [N, D] W_in
  Scratch<T> table;    // [D, round_up(N)]: W_in^T + b, for token ids
  Scratch<T> param;    // [round_up(N)]

  int padded() const { return round_up(N, kLanes<T>); }
  int blocks() const { return padded() / kLanes<T>; }
  int length(int b) const { return static_cast<int>(args->lengths ? args->lengths[b] : args->T); }
};

// A partial result of one thread, added up at the end in the order of the threads.
template <class T>
struct ScanSums {
  Scratch<T> gradients;    // [round_up(N)][ldc]: columns of h, then of x, then the one
  Scratch<T> table_part;   // [D][round_up(N)] of the last few steps
  Scratch<T> table_total;  // [D][round_up(N)]
  Scratch<double> param;   // [round_up(N)]
  Scratch<double> norm;    // [T]
};

template <class T>
struct ScanCall {
  ScanPlan<T> plan;
  ScanSums<T>* sums;  // [threads], backward only
  bool backward;
  bool failed;
};

// The rows of one group: its position in the batch, which of them run at which step, and its working memory.
template <class T>
struct ScanRows {
  static constexpr int L = kLanes<T>;
  const ScanPlan<T>& plan;
  const ScanArgs& args;
  int row0, R;                   // rows [row0, row0 + R) of the batch
  ptrdiff_t block;               // elements from one block of a blocked matrix of R rows to the next
  Scratch<T> state, next, z, x;  // [N/L][R][L] twice, [K/L][R][L], [X/L][R][L]
  Scratch<const T*> e_rows;      // [R] rows of e_t, or of the table, or null
  int longest;                   // steps of the longest row
  Scratch<int> length;           // [R]
  Scratch<int> active;           // [T + 1] R_t: one more than the last row that runs at step t, 0 after the longest
  Scratch<int> running;          // [T + 1] how many run; fewer than R_t where a row in between has ended
  Scratch<int> place;            // [longest] first row of step t in the ring, see place_steps

  ScanRows(const ScanPlan<T>& plan_, int row0_, int R_)
      : plan(plan_), args(*plan_.args), row0(row0_), R(R_), block(R_ * L) {}

  bool allocate() {
    // The product writes whole panels: room for two blocks.
    const size_t n = static_cast<size_t>(round_up(plan.N, 2 * L)) * R;
    return state.allocate(n) && next.allocate(n) && z.allocate(static_cast<size_t>(round_up(plan.K, 2 * L)) * R) &&
           x.allocate(static_cast<size_t>(round_up(plan.X, L)) * R) && e_rows.allocate(R) && count_steps();
  }
  bool count_steps() {
    if (!length.allocate(R) || !active.allocate(args.T + 1) || !running.allocate(args.T + 1)) return false;
    longest = 0;
    for (int r = 0; r < R; r++) {
      const int last = (length[r] = plan.length(row0 + r)) - 1;
      active[last] = r + 1;
      running[last]++;
      if (last >= longest) longest = last + 1;
    }
    for (int t = longest - 2; t >= 0; t--) {
      if (active[t] < active[t + 1]) active[t] = active[t + 1];
      running[t] += running[t + 1];
    }
    return true;
  }
  // Steps share a ring of `capacity` rows, at least 2 R, in groups from the first step on, each as long as its rows
  // fit, one step's after the other's. A group has two steps or more, and later steps no more rows: so the last step of
  // one group never lies where the first step of the next does, which it still needs.
  bool place_steps(int capacity) {
    if (!place.allocate(longest)) return false;
    int next_place = 0;
    for (int t = 0; t < longest; t++) {
      if (next_place + active[t] > capacity) next_place = 0;
      place[t] = next_place;
      next_place += active[t];
    }
    return true;
  }
  bool ended(int r, int64_t t) const { return length[r] <= t; }
  bool gapless(int64_t t) const { return running[t] == active[t]; }
  // Rows that have ended before step t, among the first R_t, become zeros: blocked, and row-major.
  void clear_ended(int64_t t, T* rows, ptrdiff_t rows_block, int count) const {
    for (int r = 0; r < active[t]; r++)
      if (ended(r, t))
        for (int b = 0; b < count; b++) store(rows + b * rows_block + r * L, V<T>{});
  }
  void clear_ended(int64_t t, T* rows) const {
    for (int r = 0; r < active[t]; r++)
      if (ended(r, t)) memset(rows + static_cast<ptrdiff_t>(r) * plan.N, 0, plan.N * sizeof(T));
  }
  // Rows [from, R) of the batch at one step of a row-major [.., B, columns].
  void clear_rest(int64_t step, int from, T* rows, int columns) const {
    memset(rows + (step * plan.B + row0 + from) * columns, 0, static_cast<size_t>(R - from) * columns * sizeof(T));
  }

  int lanes(int b) const { return plan.N - b * L < L ? plan.N - b * L : L; }

  // Blocked <- row-major [rows][columns], rows `stride` elements apart; and back.
  void read_rows(const T* from, ptrdiff_t stride, int rows, int columns, T* to, ptrdiff_t to_block) const {
    const int whole = columns / L;
    for (int r = 0; r < rows; r++) {
      const T* row = from + r * stride;
      for (int b = 0; b < whole; b++) store(to + b * to_block + r * L, load(row + b * L));
      if (whole * L < columns) store(to + whole * to_block + r * L, load_part(row + whole * L, columns - whole * L));
    }
  }
  void write_rows(const T* from, ptrdiff_t from_block, int rows, int columns, T* to, ptrdiff_t stride) const {
    const int whole = columns / L;
    for (int r = 0; r < rows; r++) {
      T* row = to + r * stride;
      for (int b = 0; b < whole; b++) store(row + b * L, load(from + b * from_block + r * L));
      if (whole * L < columns)
        store_part(row + whole * L, load(from + whole * from_block + r * L), columns - whole * L);
    }
  }
  // x_t and the one, blocked.
  void read_features(int64_t t, T* to, ptrdiff_t to_block) const {
    const T* from = static_cast<const T*>(args.x) + (t * plan.B + row0) * plan.D;
    read_rows(from, plan.D, active[t], plan.D, to, to_block);
    if (plan.bias_column)
      for (int r = 0; r < active[t]; r++) to[(plan.D / L) * to_block + r * L + plan.D % L] = 1;
  }

  // Rows [R_t] of the batch at step t of a row-major [T, B, N], fetched ahead for the columns after a product's first
  // panel; the first panel's are fetched for step `then` (none if it is outside [0, T)), a product earlier.
  void fetch_rows(Errands<T>* errands, const T* from, int64_t t, int64_t then) const {
    const ptrdiff_t step = static_cast<ptrdiff_t>(plan.B) * plan.N;
    const T* rows = from + row0 * static_cast<ptrdiff_t>(plan.N);
    if (plan.blocks() > 2) errands->fetch(rows + t * step + 2 * L, plan.N, L, active[t], plan.blocks() - 2);
    if (then >= 0 && then < args.T)
      errands->fetch(rows + then * step, plan.N, L, active[then], plan.blocks() < 2 ? plan.blocks() : 2);
  }

  // One step: state <- h_t, written to h_out (and a_t to pre_out) as rows `N` apart; either may be null. With `stream`,
  // h_t itself is left in the state: the errands of the next step's product write it.
  template <class A>
  void step(int64_t t, T* h_out, T* pre_out, bool stream) {
    const int N = plan.N, R_t = active[t];
    const T** e = nullptr;
    Errands<T> early, late;  // of the factored map's first product, and of the last
    if (args.tokens) {
      const int64_t* id = args.tokens + t * plan.B + row0;
      for (int r = 0; r < R_t; r++) e_rows[r] = plan.table + (ended(r, t) ? 0 : id[r]) * plan.padded();
      e = e_rows;
    } else if (plan.X == 0) {
      for (int r = 0; r < R_t; r++) e_rows[r] = static_cast<const T*>(args.x) + (t * plan.B + row0 + r) * N;
      e = e_rows;
      fetch_rows(&late, static_cast<const T*>(args.x), t, t + 1);
    } else {
      read_features(t, x, block);
      const T* x_next = static_cast<const T*>(args.x) + ((t + 1) * plan.B + row0) * plan.D;
      if (t + 1 < args.T) late.fetch(x_next, plan.D, L, active[t + 1], (plan.D + L - 1) / L);
    }
    if (h_out && stream && t > 0) {
      T* h_before = h_out - static_cast<ptrdiff_t>(plan.B) * N;
      (plan.factored ? early : late).copy(state, L, block, h_before, N, L, active[t - 1], plan.blocks());
    }
    if (h_out && !stream) late.fetch(h_out, N, L, R_t, plan.blocks());
    Segment<T> segments[2];
    T* out = next;
    if (plan.factored) {
      const Segment<T> from = {state, block, N};
      multiply<T>(&from, 1, plan.first, R_t, z, block, &early, [](int, int) {});
      segments[0] = {z, block, plan.K};
      out = state;  // the old state has served
    } else {
      segments[0] = {state, block, N};
    }
    segments[1] = {x, block, plan.X};
    multiply<T>(segments, plan.X ? 2 : 1, plan.second, R_t, out, block, &late, [&](int first_block, int last_block) {
      for (int b = first_block; b < last_block && b < plan.blocks(); b++) {
        const int count = lanes(b);
        const V<T> param = load(plan.param + b * L);
        T* at = out + b * block;
        T* h_to = stream ? nullptr : h_out + b * L;
        if (count == L && !pre_out) {  // nearly always: no branch inside the loops
          if (e && stream) finish_rows<A, true, false>(R_t, at, b, param, h_to);
          else if (e) finish_rows<A, true, true>(R_t, at, b, param, h_to);
          else if (stream) finish_rows<A, false, false>(R_t, at, b, param, h_to);
          else finish_rows<A, false, true>(R_t, at, b, param, h_to);
          continue;
        }
        for (int r = 0; r < R_t; r++) {
          V<T> a = load(at + r * L);
          if (e) a += args.tokens || count == L ? load(e[r] + b * L) : load_part(e[r] + b * L, count);
          const V<T> h = activate<T, A>(a, param);
          store(at + r * L, h);
          if (!stream) store_part(h_to + static_cast<ptrdiff_t>(r) * N, h, count);
          if (pre_out) store_part(pre_out + static_cast<ptrdiff_t>(r) * N + b * L, a, count);
        }
      }
    });
    if (!gapless(t)) {
      clear_ended(t, out, block, plan.blocks());
      if (!stream) clear_ended(t, h_out);
      if (pre_out) clear_ended(t, pre_out);
    }
    if (!plan.factored) swap_states();
  }
  // One block of the step's result: a, blocked [rows][L], becomes h there and, with STORE, in rows N apart.
  template <class A, bool INPUT, bool STORE>
  ORTHOKERN_INLINE void finish_rows(int rows, T* a, int b, V<T> param, T* h_out) {
    const T* const* e = e_rows;
    for (int r = 0; r < rows; r++, a += L) {
      V<T> x_t = load(a);
      if (INPUT) x_t += load(e[r] + b * L);
      const V<T> h = activate<T, A>(x_t, param);
      store(a, h);
      if (STORE) {
        store(h_out, h);
        h_out += plan.N;
      }
    }
  }
  // The last state of a streamed sequence, which no further product writes.
  void write_last(T* h_out) const {
    for (int b = 0; b < plan.blocks(); b++)
      for (int r = 0; r < active[longest - 1]; r++)
        store_stream(h_out + static_cast<ptrdiff_t>(r) * plan.N + b * L, load(state + b * block + r * L));
  }
  void swap_states() { state.swap(next); }
};

template <class T, class A>
bool forward_rows(const ScanPlan<T>& plan, int row0, int R) {
  const ScanArgs& args = *plan.args;
  const int64_t N = plan.N, every = args.checkpoint_every;
  ScanRows<T> rows(plan, row0, R);
  if (!rows.allocate()) return false;
  rows.read_rows(static_cast<const T*>(args.h0) + row0 * N, N, R, N, rows.state, rows.block);
  T* hs = static_cast<T*>(args.hs);
  T* pre = static_cast<T*>(args.pre);
  T* ckpt = static_cast<T*>(args.ckpt);
  for (int64_t t = 0; t < args.T; t++) {
    if (ckpt && t % every == 0) {
      const int kept = t > 0 ? rows.active[t - 1] : R;
      rows.write_rows(rows.state, rows.block, kept, N, ckpt + ((t / every) * plan.B + row0) * N, N);
      rows.clear_rest(t / every, kept, ckpt, N);
    }
    const int64_t at = (t * plan.B + row0) * N;
    if (t < rows.longest) rows.template step<A>(t, hs + at, pre ? pre + at : nullptr, plan.stream);
    rows.clear_rest(t, rows.active[t], hs, N);
    if (pre) rows.clear_rest(t, rows.active[t], pre, N);
  }
  if (plan.stream) {
    rows.write_last(hs + ((rows.longest - 1) * plan.B + row0) * N);
    stream_fence();
  }
  return true;
}

template <class T, class A>
bool backward_rows(const ScanPlan<T>& plan, ScanSums<T>* sums, int row0, int R) {
  constexpr int L = kLanes<T>;
  const ScanArgs& args = *plan.args;
  const int64_t N = plan.N, B = plan.B, every = args.checkpoint_every;
  const int blocks = plan.blocks(), padded = plan.padded();
  const int x_blocks = round_up(plan.X, L) / L;
  const bool params = args.grad_map != nullptr;
  // At least two: a dense map still reads delta_{t+1} while the first columns of delta_t are written.
  const int slots = kRingRows / R > 2 ? kRingRows / R : 2;
  const ptrdiff_t ring_block = static_cast<ptrdiff_t>(slots) * R * L;
  const ptrdiff_t ldc = static_cast<ptrdiff_t>(blocks + x_blocks) * L;
  // Token gradients are summed over a few steps before they are added to the total, for the same reason as in outer.h.
  const int64_t token_steps =
      args.tokens && params
          ? slots * ((plan.D + static_cast<int64_t>(slots) * R - 1) / (static_cast<int64_t>(slots) * R))
          : 0;

  ScanRows<T> rows(plan, row0, R);
  if (!rows.allocate()) return false;
  // Rings [N/L][slots * R][L] and [(N + X)/L][slots * R][L]; [D/L][R][L]; h_t [N/L][R][L] of the rows that end with
  // step t.
  Scratch<T> delta, inputs, dx, ending;
  if (!rows.place_steps(slots * R) || !ending.allocate(static_cast<size_t>(padded) * R) ||
      !delta.allocate(static_cast<size_t>(blocks) * ring_block) ||
      !inputs.allocate(static_cast<size_t>(blocks + x_blocks) * ring_block) ||
      !dx.allocate(static_cast<size_t>(round_up(plan.D, 2 * L)) * R))
    return false;
  // With checkpoints: the states (and pre-activations) of one segment, [every][R][N].
  Scratch<T> segment, segment_pre;
  const bool pre_wanted = A::needs_input;
  if (every) {
    const size_t n = static_cast<size_t>(every < args.T ? every : args.T) * R * N;
    if (!segment.allocate(n) || (pre_wanted && !segment_pre.allocate(n))) return false;
  }

  const T* states = static_cast<const T*>(args.states);
  const T* saved_pre = static_cast<const T*>(args.saved_pre);
  const T* grad_hs = static_cast<const T*>(args.grad_hs);
  T* grad_x = static_cast<T*>(args.grad_x);
  const bool delta_out = grad_x && plan.X == 0 && !args.tokens;
  const bool dx_out = grad_x && plan.X != 0;
  T* q = rows.next;  // map^T(delta_{t+1}), blocked

  const V<T> most = splat<T>(plan.clip), least = -most;
  auto clip = [&](V<T> d) {  // a NaN stays a NaN
    d = d > most ? most : d;
    return d < least ? least : d;
  };
  // One time step back through the map: q <- map^T(delta of step t).
  auto back = [&](int64_t t, Errands<T>* early, Errands<T>* late, const auto& after) {
    const Segment<T> from = {delta + static_cast<ptrdiff_t>(rows.place[t]) * L, ring_block, plan.N};
    const int R_t = rows.active[t];
    if (plan.factored) {
      multiply<T>(&from, 1, plan.first_t, R_t, rows.z, rows.block, early, [](int, int) {});
      const Segment<T> middle = {rows.z, rows.block, plan.K};
      multiply<T>(&middle, 1, plan.second_t, R_t, q, rows.block, late, after);
    } else {
      multiply<T>(&from, 1, plan.second_t, R_t, q, rows.block, late, after);
    }
  };
  // delta of step t on its way to grad_x past the caches.
  auto write_delta = [&](Errands<T>* errands, int64_t t) {
    errands->copy(delta + static_cast<ptrdiff_t>(rows.place[t]) * L, L, ring_block, grad_x + (t * B + row0) * N, N, L,
                  rows.active[t], blocks);
  };

  const int64_t last = rows.longest - 1;
  int used = 0;  // rows of the ring that the steps of this group take
  for (int64_t t = last; t >= 0; t--) {
    const int R_t = rows.active[t], going = rows.active[t + 1];  // rows of step t, and of these those of step t + 1
    const ptrdiff_t here_place = static_cast<ptrdiff_t>(rows.place[t]) * L;
    const ptrdiff_t later_place = t < last ? static_cast<ptrdiff_t>(rows.place[t + 1]) * L : 0;
    if (t == last || rows.place[t + 1] == 0) used = rows.place[t] + R_t;
    const int64_t start = every ? t / every * every : 0;  // of the segment that t is in
    if (every && (t == last || (t + 1) % every == 0)) {
      rows.read_rows(states + ((t / every) * B + row0) * N, N, R, N, rows.state, rows.block);
      for (int64_t k = start; k <= t; k++) {
        const ptrdiff_t at = static_cast<ptrdiff_t>(k - start) * R * N;
        rows.template step<A>(k, segment + at, pre_wanted ? segment_pre + at : nullptr, false);
      }
      q = rows.next;  // the recomputation of a dense map exchanges the two
    }
    // h_{t'} as rows N apart.
    auto state_rows = [&](int64_t k) -> const T* {
      if (k < 0) return static_cast<const T*>(args.h0) + row0 * N;
      if (!every) return states + (k * B + row0) * N;
      return k < start ? states + ((k + 1) / every * B + row0) * N
                       : segment + static_cast<ptrdiff_t>(k - start) * R * N;
    };
    const ptrdiff_t here = (t * B + row0) * N;
    const T* g_rows = grad_hs + here;
    const T* a_rows = !pre_wanted ? nullptr
                      : every     ? segment_pre + static_cast<ptrdiff_t>(t - start) * R * N
                                  : saved_pre + here;
    const T* h_now = inputs + later_place;  // h_t waits in the ring, beside delta_{t+1}
    T* d_now = delta + here_place;
    for (int r = 0; r < R_t; r++)
      if (rows.length[r] == t + 1) rows.read_rows(state_rows(t) + r * N, N, 1, N, ending + r * L, rows.block);
    const int64_t* ids = args.tokens ? args.tokens + t * B + row0 : nullptr;
    const T* h_before = state_rows(t - 1);
    V<T> square = V<T>{};
    const int plain = !pre_wanted && rows.gapless(t) && rows.gapless(t + 1) ? going : 0;

    auto finish = [&](int first_block, int last_block) {
      for (int b = first_block; b < last_block && b < blocks; b++) {
        const int count = rows.lanes(b);
        const V<T> param = load(plan.param + b * L);
        V<T> param_grad = V<T>{};
        T* d_to = d_now + b * ring_block;
        const T* h_at = h_now + b * ring_block;
        const T* q_at = q + b * rows.block;
        const T* g_at = g_rows + b * L;
        T* x_to = delta_out && !plan.stream ? grad_x + here + b * L : nullptr;
        int r = 0;
        if (count == L)
          for (; r < plain; r++) {  // nearly all: no branch inside the loop
            const V<T> g = load(g_at + r * N) + load(q_at + r * L);
            square += g * g;
            const V<T> h = load(h_at + r * L);
            store(d_to + r * L, clip(activate_grad<T, A>(h, g, param, &param_grad)));
          }
        for (; r < R_t; r++) {
          if (rows.ended(r, t)) {
            store(d_to + r * L, V<T>{});
            continue;
          }
          const bool ends = rows.length[r] == t + 1;
          V<T> g = load_part(g_at + r * N, count);
          if (!ends) g += load(q_at + r * L);
          square += g * g;
          const V<T> saved = pre_wanted ? load_part(a_rows + r * N + b * L, count)
                                        : load(ends ? ending + b * rows.block + r * L : h_at + r * L);
          store(d_to + r * L, clip(activate_grad<T, A>(saved, g, param, &param_grad)));
        }
        if (x_to)
          for (r = 0; r < R_t; r++) {
            if (count == L) store(x_to + r * N, load(d_to + r * L));
            else store_part(x_to + r * N, load(d_to + r * L), count);
          }
        if (ids && params)
          for (r = 0; r < R_t; r++) {
            if (rows.ended(r, t)) continue;
            T* to = sums->table_part + ids[r] * padded + b * L;
            store(to, load(to) + load(d_to + r * L));
          }
        if (A::has_parameter) {
          double* to = sums->param + b * L;
          for (int i = 0; i < L; i++) to[i] += param_grad[i];
        }
      }
    };
    if (t < last) {
      Errands<T> early, late;
      if (delta_out && plan.stream) write_delta(plan.factored ? &early : &late, t + 1);
      rows.fetch_rows(&late, grad_hs, t, t - 1);
      if (pre_wanted && !every) rows.fetch_rows(&late, saved_pre, t, t - 1);
      late.fetch(h_before, N, L, R_t, blocks);
      if (delta_out && !plan.stream) late.fetch(grad_x + here, N, L, R_t, blocks);
      back(t + 1, &early, &late, finish);
    } else {
      finish(0, blocks);
    }
    sums->norm[t] += sum_lanes<T>(square);

    if (dx_out) {
      const Segment<T> from = {d_now, ring_block, plan.N};
      multiply<T>(&from, 1, plan.input_t, R_t, dx, rows.block);
      rows.write_rows(dx, rows.block, R_t, plan.D, grad_x + (t * B + row0) * plan.D, plan.D);
    }
    rows.read_rows(h_before, N, R_t, N, inputs + here_place, ring_block);
    if (!params) continue;
    if (plan.X) rows.read_features(t, inputs + blocks * ring_block + here_place, ring_block);
    if (!rows.gapless(t))
      rows.clear_ended(t, inputs + here_place, ring_block, blocks + x_blocks);  // what is there may not be finite
    if (rows.place[t] == 0)
      outer_add<T>(delta, blocks, inputs, blocks + x_blocks, ring_block, used, sums->gradients, ldc);
    if (token_steps && t % token_steps == 0) {
      const ptrdiff_t n = static_cast<ptrdiff_t>(plan.D) * padded;
      for (ptrdiff_t i = 0; i < n; i += L) {
        store(sums->table_total + i, load(sums->table_total + i) + load(sums->table_part + i));
        store(sums->table_part + i, V<T>{});
      }
    }
  }
  Errands<T> early, late;
  if (delta_out && plan.stream) write_delta(&late, 0);
  back(0, &early, &late, [](int, int) {});
  rows.write_rows(q, rows.block, R, plan.N, static_cast<T*>(args.grad_h0) + row0 * N, N);
  if (delta_out || dx_out)
    for (int64_t t = 0; t < args.T; t++) rows.clear_rest(t, rows.active[t], grad_x, delta_out ? plan.N : plan.D);
  if (plan.stream && delta_out) stream_fence();
  return true;
}

// Task i of a call: its rows of the batch, in groups.
template <class T>
void scan_task(void* context, int task) {
  ScanCall<T>& call = *static_cast<ScanCall<T>*>(context);
  const ScanPlan<T>& plan = call.plan;
  const FlushDenormals flush;
  const int begin = plan.begin[task], end = plan.begin[task + 1];
  const int groups = (end - begin + kGroupRows - 1) / kGroupRows;
  for (int g = 0; g < groups; g++) {
    const int row0 = begin + (end - begin) * g / groups, R = begin + (end - begin) * (g + 1) / groups - row0;
    bool ok = true;
    visit_activation(plan.args->activation, [&](auto a) {
      using A = decltype(a);
      ok = call.backward ? backward_rows<T, A>(plan, &call.sums[task], row0, R) : forward_rows<T, A>(plan, row0, R);
    });
    if (!ok) call.failed = true;
  }
}

// Packing is a task for each panel-wise part of each matrix: worth sharing at N = 1000.
template <class T>
struct PackJob {
  Packed<T>* to;
  int row0, rows;
  const T* source;
  ptrdiff_t row_stride, col_stride;
  const T* scale;
};
template <class T>
struct PackJobs {
  PackJob<T> job[8];
  int count, parts;
};
template <class T>
void pack_task(void* context, int task) {
  const PackJobs<T>& jobs = *static_cast<PackJobs<T>*>(context);
  for (int i = 0; i < jobs.count; i++) {
    const PackJob<T>& j = jobs.job[i];
    const int panels = j.to->panel_count();
    j.to->fill(panels * task / jobs.parts, panels * (task + 1) / jobs.parts, j.row0, j.rows, j.source, j.row_stride,
               j.col_stride, j.scale);
  }
}

// Each task gets about the same number of steps, summed over its rows. Where neighbours of very different lengths leave
// a task without rows, it has nothing to do.
template <class T>
bool share_rows(ScanPlan<T>* plan) {
  const int64_t tasks = plan->threads;
  if (!plan->begin.allocate(tasks + 1)) return false;
  int64_t total = 0, taken = 0;
  for (int b = 0; b < plan->B; b++) total += plan->length(b);
  int b = 0;
  for (int64_t task = 1; task < tasks; task++) {
    // a row that lies on the border belongs to the side where most of it is
    while (b < plan->B && (2 * taken + plan->length(b)) * tasks < 2 * total * task) taken += plan->length(b++);
    plan->begin[task] = b;
  }
  plan->begin[tasks] = plan->B;
  return true;
}

template <class T>
bool prepare_scan(ScanPlan<T>* plan, const ScanArgs& args, bool backward) {
  plan->args = &args;
  plan->B = static_cast<int>(args.B), plan->N = static_cast<int>(args.N), plan->K = static_cast<int>(args.K);
  plan->factored = args.scale != nullptr;
  plan->D = static_cast<int>(args.D);
  const bool features = args.weight && !args.tokens;
  plan->bias_column = features && args.bias;
  plan->X = features ? plan->D + (plan->bias_column ? 1 : 0) : 0;
  plan->threads = static_cast<int>(args.threads < args.B ? args.threads : args.B);
  plan->clip = static_cast<T>(args.message_clip > 0 ? args.message_clip : __builtin_inf());
  if (!share_rows(plan)) return false;
  const int N = plan->N, K = plan->K, D = plan->D;
  const T *u = static_cast<const T*>(args.second), *s = static_cast<const T*>(args.scale),
          *v = static_cast<const T*>(args.first);
  const T *weight = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);

  const bool aligned = N % kLanes<T> == 0;
  const void* result = backward ? args.grad_x : args.hs;
  plan->stream = aligned && args.T * args.B * args.N * static_cast<int64_t>(sizeof(T)) > kStreamBytes &&
                 reinterpret_cast<uintptr_t>(result) % kVectorBytes == 0;

  PackJobs<T> jobs;
  jobs.count = 0;
  jobs.parts = plan->threads;
  auto add = [&jobs](Packed<T>* to, int row0, int rows, const T* source, ptrdiff_t row_stride, ptrdiff_t col_stride,
                     const T* scale) {
    jobs.job[jobs.count++] = {to, row0, rows, source, row_stride, col_stride, scale};
  };
  if (!backward || args.checkpoint_every) {
    const int depth = plan->factored ? K : N;
    if (!plan->second.allocate(depth + plan->X, N)) return false;
    if (plan->factored) {
      if (!plan->first.allocate(N, K)) return false;
      add(&plan->first, 0, N, v, K, 1, s);
    }
    add(&plan->second, 0, depth, u, 1, depth, nullptr);
    if (plan->X) add(&plan->second, depth, D, weight, 1, D, nullptr);
    if (plan->bias_column) add(&plan->second, depth + D, 1, bias, 0, 1, nullptr);
    if (args.tokens) {
      const int padded = plan->padded();
      if (!plan->table.allocate(static_cast<size_t>(D) * padded)) return false;
      for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++)
          plan->table[static_cast<ptrdiff_t>(d) * padded + n] =
              weight[static_cast<ptrdiff_t>(n) * D + d] + (bias ? bias[n] : T(0));
    }
  }
  if (backward) {
    if (plan->factored) {
      if (!plan->first_t.allocate(N, K) || !plan->second_t.allocate(K, N)) return false;
      add(&plan->first_t, 0, N, u, K, 1, s);
      add(&plan->second_t, 0, K, v, 1, K, nullptr);
    } else {
      if (!plan->second_t.allocate(N, N)) return false;
      add(&plan->second_t, 0, N, u, N, 1, nullptr);
    }
    if (plan->X && args.grad_x) {
      if (!plan->input_t.allocate(N, D)) return false;
      add(&plan->input_t, 0, N, weight, D, 1, nullptr);
    }
  }
  parallel_run(jobs.parts, pack_task<T>, &jobs);
  return expand_param(&plan->param, static_cast<const T*>(args.act_param), args.act_param_size, N);
}

template <class T>
bool scan_forward(const ScanArgs& args) {
  ScanCall<T> call;
  call.sums = nullptr;
  call.backward = call.failed = false;
  if (!prepare_scan(&call.plan, args, false)) return false;
  parallel_run(call.plan.threads, scan_task<T>, &call);
  return !call.failed;
}

template <class T>
void collect_scan(const ScanPlan<T>& plan, const ScanSums<T>* sums) {
  const ScanArgs& args = *plan.args;
  const int N = plan.N, D = plan.D, padded = plan.padded();
  const ptrdiff_t ldc = padded + round_up(plan.X, kLanes<T>);
  T* norm = static_cast<T*>(args.grad_norm);
  for (int64_t t = 0; t < args.T; t++) {
    double total = 0;
    for (int i = 0; i < plan.threads; i++) total += sums[i].norm[t];
    norm[t] = static_cast<T>(__builtin_sqrt(total));
  }
  if (args.grad_act_param) {
    T* to = static_cast<T*>(args.grad_act_param);
    double whole = 0;
    for (int n = 0; n < N; n++) {
      double total = 0;
      for (int i = 0; i < plan.threads; i++) total += sums[i].param[n];
      if (args.act_param_size == 1) whole += total;
      else to[n] = static_cast<T>(total);
    }
    if (args.act_param_size == 1) to[0] = static_cast<T>(whole);
  }
  if (!args.grad_map) return;
  auto total = [&](ptrdiff_t at) {
    T sum = sums[0].gradients[at];
    for (int i = 1; i < plan.threads; i++) sum += sums[i].gradients[at];
    return sum;
  };
  T *map = static_cast<T*>(args.grad_map), *weight = static_cast<T*>(args.grad_weight),
    *bias = static_cast<T*>(args.grad_bias);
  for (int n = 0; n < N; n++) {
    for (int m = 0; m < N; m++) map[static_cast<ptrdiff_t>(n) * N + m] = total(n * ldc + m);
    if (plan.X) {
      for (int d = 0; d < D; d++) weight[static_cast<ptrdiff_t>(n) * D + d] = total(n * ldc + padded + d);
      if (plan.bias_column) bias[n] = total(n * ldc + padded + D);
    }
  }
  if (args.tokens) {
    for (int n = 0; n < N; n++) {
      T all = 0;
      for (int d = 0; d < D; d++) {
        T sum = 0;
        for (int i = 0; i < plan.threads; i++) sum += sums[i].table_total[static_cast<ptrdiff_t>(d) * padded + n];
        weight[static_cast<ptrdiff_t>(n) * D + d] = sum;
        all += sum;
      }
      if (bias) bias[n] = all;
    }
  }
}

template <class T>
bool scan_backward(const ScanArgs& args) {
  ScanCall<T> call;
  call.backward = true;
  call.failed = false;
  if (!prepare_scan(&call.plan, args, true)) return false;
  const ScanPlan<T>& plan = call.plan;
  Scratch<char> memory(sizeof(ScanSums<T>) * plan.threads);
  if (!memory.get()) return false;
  call.sums = reinterpret_cast<ScanSums<T>*>(memory.get());  // all zero bytes: empty scratch buffers
  const size_t padded = plan.padded(), ldc = padded + round_up(plan.X, kLanes<T>);
  bool ok = true;
  for (int i = 0; i < plan.threads && ok; i++) {
    ScanSums<T>& s = call.sums[i];
    ok = s.param.allocate(padded) && s.norm.allocate(args.T) &&
         (!args.grad_map || s.gradients.allocate(padded * ldc)) &&
         (!args.tokens || (s.table_part.allocate(plan.D * padded) && s.table_total.allocate(plan.D * padded)));
  }
  if (ok) {
    parallel_run(plan.threads, scan_task<T>, &call);
    if (!call.failed) collect_scan(plan, call.sums);
  }
  for (int i = 0; i < plan.threads; i++) call.sums[i].~ScanSums<T>();
  return ok && !call.failed;
}

// Compiled once, in factored_scan.cpp, for both ops.
#ifndef ORTHOKERN_DEFINE_SCAN
extern template bool scan_forward<float>(const ScanArgs&);
extern template bool scan_forward<double>(const ScanArgs&);
extern template bool scan_backward<float>(const ScanArgs&);
extern template bool scan_backward<double>(const ScanArgs&);
#endif

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern
