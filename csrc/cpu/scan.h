// The recurrent scan on a CPU, for the factored map U diag(s) V^T and for a dense map, forward and backward.
//
//   forward    h_t = phi(a_t),  a_t = map(h_{t-1}) + e_t
//   backward   ghat_t = g_t + map^T(delta_{t+1}),  delta_t = phi'(a_t) * ghat_t
//
// Sequences do not depend on each other: a thread owns rows of the batch for the whole sequence, and threads meet only at the end, to add up
// the parameter gradients. Per step and row group of R rows (registers < L1 < L2 < memory):
//
//   registers  one tile of 13 rows x 2 vectors of a product (gemm.h)
//   L1         the state, blocked [N/L][R][L]; one panel of weights
//   L2         all panels (packed once per call, s folded into those of V, or of U in backward); the ring of the last steps
//   memory     e_t or x_t or token ids in, h_t out (past the caches, when there is much of it); in backward g_t, h_t in, grad_x out
//
// The input projection W_in x_t + b is part of the product: x_t and a one stand after the state as further columns, W_in and b below the
// map's rows in the panels. Token ids instead pick a row of a table W_in^T + b.
//
// Backward keeps delta_t and [h_{t-1}, x_t, 1] of the last few steps in a ring of blocked rows. A full ring (about 128 rows) is one product
// (outer.h) into this thread's sums: the gradients of the map, of W_in and of b without a second pass over memory. Which steps share a ring
// depends on t alone, so the sums do not change when states are recomputed from checkpoints.
//
// Cost per step and sequence: 4 N K (factored) or 2 N^2 (dense) flops and 2 N D for the projection each way, and 2 N (N + D + 1) for the
// gradients; memory traffic: forward 4 N bytes (8 N with a dense e), backward 8 N (12 N).
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
  int X;              // extra columns of the product: D and the one for the bias, 0 without features
  bool bias_column;
  bool factored;
  bool stream;        // write results past the caches
  int threads;
  Packed<T> first;    // forward, factored: [N, K] V diag(s)
  Packed<T> second;   // forward: [K or N (+ X), N] U^T or W^T, W_in^T, b
  Packed<T> first_t;  // backward, factored: [N, K] U diag(s)
  Packed<T> second_t; // backward: [K, N] V^T, or [N, N] W
  Packed<T> input_t;  // backward with features whose gradient is wanted: [N, D] W_in
  Scratch<T> table;   // [D, round_up(N)]: W_in^T + b, for token ids
  Scratch<T> param;   // [round_up(N)]

  int padded() const { return round_up(N, kLanes<T>); }
  int blocks() const { return padded() / kLanes<T>; }
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

// The rows of one group: its position in the batch, and its working memory.
template <class T>
struct ScanRows {
  static constexpr int L = kLanes<T>;
  const ScanPlan<T>& plan;
  const ScanArgs& args;
  int row0, R;       // rows [row0, row0 + R) of the batch
  ptrdiff_t block;   // elements from one block of a blocked matrix of R rows to the next
  Scratch<T> state, next, z, x;  // [N/L][R][L] twice, [K/L][R][L], [X/L][R][L]
  Scratch<const T*> e_rows;      // [R] rows of e_t, or of the table, or null

  ScanRows(const ScanPlan<T>& plan_, int row0_, int R_) : plan(plan_), args(*plan_.args), row0(row0_), R(R_), block(R_ * L) {}

  bool allocate() {
    // The product writes whole panels: room for two blocks.
    const size_t n = static_cast<size_t>(round_up(plan.N, 2 * L)) * R;
    return state.allocate(n) && next.allocate(n) && z.allocate(static_cast<size_t>(round_up(plan.K, 2 * L)) * R) &&
           x.allocate(static_cast<size_t>(round_up(plan.X, L)) * R) && e_rows.allocate(R);
  }

  int lanes(int b) const { return plan.N - b * L < L ? plan.N - b * L : L; }

  // Blocked <- row-major rows [R][columns], `stride` elements apart.
  void read_rows(const T* from, ptrdiff_t stride, int columns, T* to, ptrdiff_t to_block) const {
    const int whole = columns / L;
    for (int r = 0; r < R; r++) {
      const T* row = from + r * stride;
      for (int b = 0; b < whole; b++) store(to + b * to_block + r * L, load(row + b * L));
      if (whole * L < columns) store(to + whole * to_block + r * L, load_part(row + whole * L, columns - whole * L));
    }
  }
  void write_rows(const T* from, ptrdiff_t from_block, int columns, T* to, ptrdiff_t stride) const {
    const int whole = columns / L;
    for (int r = 0; r < R; r++) {
      T* row = to + r * stride;
      for (int b = 0; b < whole; b++) store(row + b * L, load(from + b * from_block + r * L));
      if (whole * L < columns) store_part(row + whole * L, load(from + whole * from_block + r * L), columns - whole * L);
    }
  }
  // x_t and the one, blocked.
  void read_features(int64_t t, T* to, ptrdiff_t to_block) const {
    const T* from = static_cast<const T*>(args.x) + (t * plan.B + row0) * plan.D;
    read_rows(from, plan.D, plan.D, to, to_block);
    if (plan.bias_column)
      for (int r = 0; r < R; r++) to[(plan.D / L) * to_block + r * L + plan.D % L] = 1;
  }

  // Rows [R] of the batch at step t of a row-major [T, B, N], fetched ahead for the columns after a product's first panel; the first panel's are
  // fetched for step `then` (none if it is outside [0, T)), a product earlier.
  void fetch_rows(Errands<T>* errands, const T* from, int64_t t, int64_t then) const {
    const ptrdiff_t step = static_cast<ptrdiff_t>(plan.B) * plan.N;
    const T* rows = from + row0 * static_cast<ptrdiff_t>(plan.N);
    if (plan.blocks() > 2) errands->fetch(rows + t * step + 2 * L, plan.N, L, R, plan.blocks() - 2);
    if (then >= 0 && then < args.T) errands->fetch(rows + then * step, plan.N, L, R, plan.blocks() < 2 ? plan.blocks() : 2);
  }

  // One step: state <- h_t, written to h_out (and a_t to pre_out) as rows `N` apart; either may be null. With `stream`, h_t itself is left in the
  // state: the errands of the next step's product write it.
  template <int A>
  void step(int64_t t, T* h_out, T* pre_out, bool stream) {
    const int N = plan.N;
    const T** e = nullptr;
    Errands<T> early, late;  // of the factored map's first product, and of the last
    if (args.tokens) {
      const int64_t* id = args.tokens + t * plan.B + row0;
      for (int r = 0; r < R; r++) e_rows[r] = plan.table + id[r] * plan.padded();
      e = e_rows;
    } else if (plan.X == 0) {
      for (int r = 0; r < R; r++) e_rows[r] = static_cast<const T*>(args.x) + (t * plan.B + row0 + r) * N;
      e = e_rows;
      fetch_rows(&late, static_cast<const T*>(args.x), t, t + 1);
    } else {
      read_features(t, x, block);
      if (t + 1 < args.T) late.fetch(static_cast<const T*>(args.x) + ((t + 1) * plan.B + row0) * plan.D, plan.D, L, R, (plan.D + L - 1) / L);
    }
    if (h_out && stream && t > 0) (plan.factored ? early : late).copy(state, L, block, h_out - static_cast<ptrdiff_t>(plan.B) * N, N, L, R, plan.blocks());
    if (h_out && !stream) late.fetch(h_out, N, L, R, plan.blocks());
    Segment<T> segments[2];
    T* out = next;
    if (plan.factored) {
      const Segment<T> from = {state, block, N};
      multiply<T>(&from, 1, plan.first, R, z, block, &early, [](int, int) {});
      segments[0] = {z, block, plan.K};
      out = state;  // the old state has served
    } else {
      segments[0] = {state, block, N};
    }
    segments[1] = {x, block, plan.X};
    multiply<T>(segments, plan.X ? 2 : 1, plan.second, R, out, block, &late, [&](int first_block, int last_block) {
      for (int b = first_block; b < last_block && b < plan.blocks(); b++) {
        const int count = lanes(b);
        const V<T> param = load(plan.param + b * L);
        T* at = out + b * block;
        T* h_to = stream ? nullptr : h_out + b * L;
        if (count == L && !pre_out) {  // nearly always: no branch inside the loops
          if (e && stream) finish_rows<A, true, false>(at, b, param, h_to);
          else if (e) finish_rows<A, true, true>(at, b, param, h_to);
          else if (stream) finish_rows<A, false, false>(at, b, param, h_to);
          else finish_rows<A, false, true>(at, b, param, h_to);
          continue;
        }
        for (int r = 0; r < R; r++) {
          V<T> a = load(at + r * L);
          if (e) a += args.tokens || count == L ? load(e[r] + b * L) : load_part(e[r] + b * L, count);
          const V<T> h = activate<T, A>(a, param);
          store(at + r * L, h);
          if (!stream) store_part(h_to + static_cast<ptrdiff_t>(r) * N, h, count);
          if (pre_out) store_part(pre_out + static_cast<ptrdiff_t>(r) * N + b * L, a, count);
        }
      }
    });
    if (!plan.factored) swap_states();
  }
  // One block of the step's result: a, blocked [R][L], becomes h there and, with STORE, in rows N apart.
  template <int A, bool INPUT, bool STORE>
  ORTHOKERN_INLINE void finish_rows(T* a, int b, V<T> param, T* h_out) {
    const T* const* e = e_rows;
    for (int r = 0; r < R; r++, a += L) {
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
      for (int r = 0; r < R; r++) store_stream(h_out + static_cast<ptrdiff_t>(r) * plan.N + b * L, load(state + b * block + r * L));
  }
  void swap_states() { state.swap(next); }
};

template <class T, int A>
bool forward_rows(const ScanPlan<T>& plan, int row0, int R) {
  const ScanArgs& args = *plan.args;
  const int64_t N = plan.N, every = args.checkpoint_every;
  ScanRows<T> rows(plan, row0, R);
  if (!rows.allocate()) return false;
  rows.read_rows(static_cast<const T*>(args.h0) + row0 * N, N, N, rows.state, rows.block);
  T* hs = static_cast<T*>(args.hs);
  T* pre = static_cast<T*>(args.pre);
  T* ckpt = static_cast<T*>(args.ckpt);
  for (int64_t t = 0; t < args.T; t++) {
    if (ckpt && t % every == 0) rows.write_rows(rows.state, rows.block, N, ckpt + ((t / every) * plan.B + row0) * N, N);
    const int64_t at = (t * plan.B + row0) * N;
    rows.template step<A>(t, hs + at, pre ? pre + at : nullptr, plan.stream);
  }
  if (plan.stream) {
    rows.write_last(hs + ((args.T - 1) * plan.B + row0) * N);
    stream_fence();
  }
  return true;
}

template <class T, int A>
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
  const int64_t token_steps = args.tokens && params ? slots * ((plan.D + static_cast<int64_t>(slots) * R - 1) / (static_cast<int64_t>(slots) * R)) : 0;

  ScanRows<T> rows(plan, row0, R);
  if (!rows.allocate()) return false;
  Scratch<T> delta, inputs, dx;  // rings [N/L][slots * R][L] and [(N + X)/L][slots * R][L]; [D/L][R][L]
  if (!delta.allocate(static_cast<size_t>(blocks) * ring_block) || !inputs.allocate(static_cast<size_t>(blocks + x_blocks) * ring_block) ||
      !dx.allocate(static_cast<size_t>(round_up(plan.D, 2 * L)) * R))
    return false;
  // With checkpoints: the states (and pre-activations) of one segment, [every][R][N].
  Scratch<T> segment, segment_pre;
  const bool pre_wanted = needs_pre(A);
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

  // One time step back through the map: q <- map^T(delta at `slot`).
  auto back = [&](int slot, Errands<T>* early, Errands<T>* late, const auto& after) {
    const Segment<T> from = {delta + static_cast<ptrdiff_t>(slot) * R * L, ring_block, plan.N};
    if (plan.factored) {
      multiply<T>(&from, 1, plan.first_t, R, rows.z, rows.block, early, [](int, int) {});
      const Segment<T> middle = {rows.z, rows.block, plan.K};
      multiply<T>(&middle, 1, plan.second_t, R, q, rows.block, late, after);
    } else {
      multiply<T>(&from, 1, plan.second_t, R, q, rows.block, late, after);
    }
  };
  // delta at `slot`, of step t, on its way to grad_x past the caches.
  auto write_delta = [&](Errands<T>* errands, int slot, int64_t t) {
    errands->copy(delta + static_cast<ptrdiff_t>(slot) * R * L, L, ring_block, grad_x + (t * B + row0) * N, N, L, R, blocks);
  };

  for (int64_t t = args.T - 1; t >= 0; t--) {
    const int slot = static_cast<int>(t % slots), later = static_cast<int>((t + 1) % slots);
    const int64_t start = every ? t / every * every : 0;  // of the segment that t is in
    if (every && (t == args.T - 1 || (t + 1) % every == 0)) {
      rows.read_rows(states + ((t / every) * B + row0) * N, N, N, rows.state, rows.block);
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
      return k < start ? states + ((k + 1) / every * B + row0) * N : segment + static_cast<ptrdiff_t>(k - start) * R * N;
    };
    const ptrdiff_t here = (t * B + row0) * N;
    const T* g_rows = grad_hs + here;
    const T* a_rows = !pre_wanted ? nullptr : every ? segment_pre + static_cast<ptrdiff_t>(t - start) * R * N : saved_pre + here;
    T* h_now = inputs + static_cast<ptrdiff_t>(later) * R * L;  // h_t waits in the ring, beside delta_{t+1}
    T* d_now = delta + static_cast<ptrdiff_t>(slot) * R * L;
    if (t == args.T - 1) rows.read_rows(state_rows(t), N, N, h_now, ring_block);
    const int64_t* ids = args.tokens ? args.tokens + t * B + row0 : nullptr;
    const T* h_before = state_rows(t - 1);
    V<T> square = V<T>{};

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
        if (count == L && !pre_wanted && t + 1 < args.T) {  // nearly always: no branch inside the loop
          for (int r = 0; r < R; r++) {
            const V<T> g = load(g_at + r * N) + load(q_at + r * L);
            square += g * g;
            const V<T> h = load(h_at + r * L);
            store(d_to + r * L, activate_grad<T, A>(h, h, g, param, &param_grad));
          }
        } else {
          for (int r = 0; r < R; r++) {
            V<T> g = load_part(g_at + r * N, count);
            if (t + 1 < args.T) g += load(q_at + r * L);
            square += g * g;
            const V<T> h = load(h_at + r * L);
            const V<T> a = pre_wanted ? load_part(a_rows + r * N + b * L, count) : h;
            store(d_to + r * L, activate_grad<T, A>(h, a, g, param, &param_grad));
          }
        }
        if (x_to)
          for (int r = 0; r < R; r++) {
            if (count == L) store(x_to + r * N, load(d_to + r * L));
            else store_part(x_to + r * N, load(d_to + r * L), count);
          }
        if (ids && params)
          for (int r = 0; r < R; r++) {
            T* to = sums->table_part + ids[r] * padded + b * L;
            store(to, load(to) + load(d_to + r * L));
          }
        if (A == kPrelu || A == kModrelu) {
          double* to = sums->param + b * L;
          for (int i = 0; i < L; i++) to[i] += param_grad[i];
        }
      }
    };
    if (t + 1 < args.T) {
      Errands<T> early, late;
      if (delta_out && plan.stream) write_delta(plan.factored ? &early : &late, later, t + 1);
      rows.fetch_rows(&late, grad_hs, t, t - 1);
      if (pre_wanted && !every) rows.fetch_rows(&late, saved_pre, t, t - 1);
      late.fetch(h_before, N, L, R, blocks);
      if (delta_out && !plan.stream) late.fetch(grad_x + here, N, L, R, blocks);
      back(later, &early, &late, finish);
    } else {
      finish(0, blocks);
    }
    sums->norm[t] += sum_lanes<T>(square);

    if (dx_out) {
      const Segment<T> from = {d_now, ring_block, plan.N};
      multiply<T>(&from, 1, plan.input_t, R, dx, rows.block);
      rows.write_rows(dx, rows.block, plan.D, grad_x + (t * B + row0) * plan.D, plan.D);
    }
    rows.read_rows(h_before, N, N, inputs + static_cast<ptrdiff_t>(slot) * R * L, ring_block);
    if (!params) continue;
    if (plan.X) rows.read_features(t, inputs + blocks * ring_block + static_cast<ptrdiff_t>(slot) * R * L, ring_block);
    if (slot == 0) {
      const int64_t used = args.T - t < slots ? args.T - t : slots;
      outer_add<T>(delta, blocks, inputs, blocks + x_blocks, ring_block, static_cast<int>(used) * R, sums->gradients, ldc);
    }
    if (token_steps && t % token_steps == 0) {
      const ptrdiff_t n = static_cast<ptrdiff_t>(plan.D) * padded;
      for (ptrdiff_t i = 0; i < n; i += L) {
        store(sums->table_total + i, load(sums->table_total + i) + load(sums->table_part + i));
        store(sums->table_part + i, V<T>{});
      }
    }
  }
  Errands<T> early, late;
  if (delta_out && plan.stream) write_delta(&late, 0, 0);
  back(0, &early, &late, [](int, int) {});
  rows.write_rows(q, rows.block, plan.N, static_cast<T*>(args.grad_h0) + row0 * N, N);
  if (plan.stream && delta_out) stream_fence();
  return true;
}

// Task i of a call: its rows of the batch, in groups.
template <class T>
void scan_task(void* context, int task) {
  ScanCall<T>& call = *static_cast<ScanCall<T>*>(context);
  const ScanPlan<T>& plan = call.plan;
  const FlushDenormals flush;
  const int begin = static_cast<int>(static_cast<int64_t>(plan.B) * task / plan.threads);
  const int end = static_cast<int>(static_cast<int64_t>(plan.B) * (task + 1) / plan.threads);
  const int groups = (end - begin + kGroupRows - 1) / kGroupRows;
  for (int g = 0; g < groups; g++) {
    const int row0 = begin + (end - begin) * g / groups, R = begin + (end - begin) * (g + 1) / groups - row0;
    bool ok = true;
#define ORTHOKERN_CALL(A) \
  ok = call.backward ? backward_rows<T, A>(plan, &call.sums[task], row0, R) : forward_rows<T, A>(plan, row0, R)
    ORTHOKERN_DISPATCH_ACTIVATION(plan.args->activation, ORTHOKERN_CALL)
#undef ORTHOKERN_CALL
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
    j.to->fill(panels * task / jobs.parts, panels * (task + 1) / jobs.parts, j.row0, j.rows, j.source, j.row_stride, j.col_stride, j.scale);
  }
}

template <class T>
bool prepare_scan(ScanPlan<T>* plan, const ScanArgs& args, bool backward) {
  plan->args = &args;
  plan->B = static_cast<int>(args.B), plan->N = static_cast<int>(args.N), plan->K = static_cast<int>(args.K);
  plan->factored = args.s != nullptr;
  plan->D = static_cast<int>(args.D);
  const bool features = args.weight && !args.tokens;
  plan->bias_column = features && args.bias;
  plan->X = features ? plan->D + (plan->bias_column ? 1 : 0) : 0;
  plan->threads = static_cast<int>(args.threads < args.B ? args.threads : args.B);
  const int N = plan->N, K = plan->K, D = plan->D;
  const T *u = static_cast<const T*>(args.u), *s = static_cast<const T*>(args.s), *v = static_cast<const T*>(args.v);
  const T *weight = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);

  const bool aligned = N % kLanes<T> == 0;
  const void* result = backward ? args.grad_x : args.hs;
  plan->stream = aligned && args.T * args.B * args.N * static_cast<int64_t>(sizeof(T)) > kStreamBytes &&
                 reinterpret_cast<uintptr_t>(result) % kVectorBytes == 0;

  PackJobs<T> jobs;
  jobs.count = 0;
  jobs.parts = plan->threads;
  auto add = [&jobs](Packed<T>* to, int row0, int rows, const T* source, ptrdiff_t row_stride, ptrdiff_t col_stride, const T* scale) {
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
        for (int d = 0; d < D; d++) plan->table[static_cast<ptrdiff_t>(d) * padded + n] = weight[static_cast<ptrdiff_t>(n) * D + d] + (bias ? bias[n] : T(0));
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
  T *map = static_cast<T*>(args.grad_map), *weight = static_cast<T*>(args.grad_weight), *bias = static_cast<T*>(args.grad_bias);
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
    ok = s.param.allocate(padded) && s.norm.allocate(args.T) && (!args.grad_map || s.gradients.allocate(padded * ldc)) &&
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
