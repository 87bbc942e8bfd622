// The backward pass of scan.h for a group of rows of the batch.
//
// delta_t and [h_{t-1}, x_t, 1] of the last few steps are kept in two rings of blocked rows. A ring holds about
// ring_rows() rows. Once it is full, one product (outer.h) adds it to this thread's sums, which gives the gradients of
// the map, of W_in and of b without a second pass over memory. With plan.thin, the sum for the map is not M = sum_t
// delta_t h_{t-1}^T [N, N], but M V and M^T U diag(s) [N, K]: products with V^T h_{t-1}, which is computed for a full
// ring, and with s U^T delta_t, the first half of map^T(delta_t). Which steps share a ring depends only on t and the
// lengths, so the sums are bit-identical when states are recomputed from checkpoints.
#pragma once

#include "cpu/scan_rows.h"
#include "cpu/scan_sums.h"

namespace orthokern::ORTHOKERN_ISA {

// The inputs and outputs of one step: rows N apart, or blocked rows of a ring.
template <class T>
struct BackwardStep {
  int64_t t;
  int rows;               // R_t
  int unmasked;           // the first rows that need no test of their length
  const T* grad_h;        // g_t
  const T* pre;           // a_t, or null
  const T* h;             // h_t in the ring, blocked, of the rows that have a step t + 1
  const T* ending;        // h_t of all rows
  T* delta;               // delta_t, blocked
  T* delta_out;           // destination of delta_t as rows, or null
  const int64_t* ids;     // of the tokens whose gradients are wanted, or null
  const uint8_t* resets;  // flags of the rows at step t + 1, or null if none resets
};

template <class T>
struct BackwardRows {
  static constexpr int L = kLanes<T>;
  const ScanPlan<T>& plan;
  const ScanArgs& args;
  ScanSums<T>* sums;
  ScanRows<T> rows;
  const int row0 = rows.row0, R = rows.R;
  const int64_t N = plan.N, B = plan.B;
  const int64_t every = args.checkpoint_every;                           // steps of a segment between checkpoints, or 0
  const int blocks = plan.blocks(), x_blocks = round_up(plan.X, L) / L;  // of N columns, and of X
  // the derivative of the activation or of the leak reads a_t
  const bool needs_input = reads_of(args.activation) == act::kInput || args.leak;
  T* const delta_out = static_cast<T*>(delta_result(args));  // grad_x if that is delta, or null
  const bool dx_out = args.grad_x && plan.X != 0;            // grad_x is the gradient of the features
  // steps of R rows that fit into a ring: at least two, because a dense map still reads delta_{t+1} while the first
  // columns of delta_t are written
  const int slots = plan.params && plan.ring_rows() > 2 * R ? plan.ring_rows() / R : 2;
  const ptrdiff_t ring_block = static_cast<ptrdiff_t>(slots) * R * L;  // elements from one block of a ring to the next
  const ptrdiff_t ldc = plan.summed_columns();
  int64_t token_steps = 0;  // of a part of the sums of tokens, see RowSums; 0 without tokens
  int used = 0;             // rows of the ring in use
  // finish_blocks of the activation
  void (BackwardRows::*finish)(const BackwardStep<T>& step, int first, int last, SquareSum<T>* square);

  Scratch<T> delta, inputs, dx;  // rings [N/L][slots * R][L] and [(N + X)/L][slots * R][L]; [D/L][R][L]
  // factored: s U^T delta_t of the last step, [K/L][R][L]; thin: rings [K/L][slots * R][L] of it and of V^T h_{t-1}
  Scratch<T> of_u, of_v;
  Scratch<T> ghat;                         // with a leak: ghat_{t+1} [N/L][R][L], zeros for rows that have not begun
  Scratch<T> paired_delta, paired_inputs;  // with plan.pairs: pairs of rows of the rings
  Scratch<T> segment, segment_pre;  // with checkpoints: states (and pre-activations) of one segment, [every][R][N]

  BackwardRows(const ScanPlan<T>& plan_, ScanSums<T>* sums_, int row0_, int R_)
      : plan(plan_), args(plan_.args), sums(sums_), rows(plan_, row0_, R_) {
    visit_activation(args.activation, [this](auto a) {
      using A = decltype(a);
      finish = args.leak ? &BackwardRows::finish_blocks<A, true> : &BackwardRows::finish_blocks<A, false>;
    });
    const int64_t ring_rows = static_cast<int64_t>(slots) * R;
    if (args.tokens && plan.params) token_steps = slots * ((plan.D + ring_rows - 1) / ring_rows);
  }

  bool allocate() {
    if (!rows.allocate() || !rows.place_steps(slots * R)) return false;
    if ((args.leak && !ghat.allocate(static_cast<size_t>(blocks) * L * R)) ||
        !delta.allocate(static_cast<size_t>(blocks) * ring_block) ||
        !inputs.allocate(static_cast<size_t>(blocks + x_blocks) * ring_block) ||
        (dx_out && !dx.allocate(static_cast<size_t>(round_up(plan.D, 2 * L)) * R)))
      return false;
    const size_t across = static_cast<size_t>(round_up(plan.K, 2 * L) / L);
    if ((plan.factored && !of_u.allocate(across * of_u_block())) || (plan.thin && !of_v.allocate(across * ring_block)))
      return false;
    if (plan.pairs && plan.params &&
        (!paired_delta.allocate(static_cast<size_t>(blocks) * paired_block()) ||
         !paired_inputs.allocate(static_cast<size_t>(blocks + x_blocks) * paired_block())))
      return false;
    if (!every) return true;
    const size_t n = static_cast<size_t>(every < args.T ? every : args.T) * R * N;
    return segment.allocate(n) && (!needs_input || segment_pre.allocate(n));
  }

  T* grad_x() const { return static_cast<T*>(args.grad_x); }
  T* grad_reset_state() const { return static_cast<T*>(args.grad_reset_state) + row0 * N; }
  ptrdiff_t paired_block() const { return static_cast<ptrdiff_t>(paired_depth(slots * R, plan.tiles)) * L; }
  ptrdiff_t of_u_block() const { return plan.thin ? ring_block : rows.block; }
  T* of_u_rows(int64_t t) { return of_u + (plan.thin ? place(t) : 0); }
  ptrdiff_t place(int64_t t) const { return static_cast<ptrdiff_t>(rows.place[t]) * L; }
  // map^T(delta_{t+1}), blocked.
  T* message() const { return rows.next; }
  // The first step of the segment that t is in.
  int64_t segment_start(int64_t t) const { return every ? t / every * every : 0; }
  // h_k as rows N apart, while step t is computed.
  const T* state_rows(int64_t k, int64_t t) const {
    const T* states = static_cast<const T*>(args.states);
    if (k < 0) return static_cast<const T*>(args.h0) + row0 * N;
    if (!every) return states + (k * B + row0) * N;
    const int64_t start = segment_start(t);
    return k < start ? states + ((k + 1) / every * B + row0) * N : segment + static_cast<ptrdiff_t>(k - start) * R * N;
  }
  // a_t as rows N apart, or null.
  const T* pre_rows(int64_t t) const {
    if (!needs_input) return nullptr;
    if (every) return segment_pre + static_cast<ptrdiff_t>(t - segment_start(t)) * R * N;
    return static_cast<const T*>(args.saved_pre) + (t * B + row0) * N;
  }

  bool run() {
    const TileRelease release(plan.tiles);
    if (!allocate()) return false;
    const int64_t last = rows.longest - 1;
    if (args.grad_reset_state) memset(grad_reset_state(), 0, static_cast<size_t>(R) * N * sizeof(T));
    for (int64_t t = last; t >= 0; t--) {
      if (t == last || rows.place[t + 1] == 0) used = rows.place[t] + rows.active[t];
      if (every && (t == last || (t + 1) % every == 0)) recompute_segment(t);
      SquareSum<T> square;
      const BackwardStep<T> step = step_at(t);
      compute_delta(step, &square);
      sums->norm[t] += square.total();
      if (projects(t)) project(t);
      if (plan.params && step.resets && rows.place[t + 1] != 0)  // h_t of these rows is no longer needed there
        rows.put_reset_state(step.resets, t + 1, inputs + place(t + 1), ring_block);
      if (dx_out) write_feature_gradient(t);
      block_rows<T>(state_rows(t - 1, t), N, rows.active[t], plan.N, inputs + place(t), ring_block);
      if (plan.params) add_gradients(t);
    }
    Transfers<T> transfers;
    if (delta_out && plan.stream && !projects(0)) stream_delta(&transfers, 0);
    if (plan.to_h0) multiply_back(0, &transfers, [](int, int) {});
    else transfers.finish();
    if (const uint8_t* flags = rows.resets_at(0)) take_messages(flags, 0, 0, blocks);
    if (args.leak) pass_leak_to_h0();
    if (args.grad_h0) unblock_rows<T>(message(), rows.block, R, plan.N, static_cast<T*>(args.grad_h0) + row0 * N, N);
    if (plan.stream && delta_out) stream_fence();
    if (delta_out || dx_out) rows.template clear_padding<T>(args.grad_x, plan.D);
    return true;
  }

  // The states of the segment that ends with step t, from its checkpoint.
  void recompute_segment(int64_t t) {
    const int64_t start = segment_start(t);
    const T* checkpoint = static_cast<const T*>(args.states) + ((t / every) * B + row0) * N;
    block_rows<T>(checkpoint, N, R, N, rows.state, rows.block);
    for (int64_t k = start; k <= t; k++) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(k - start) * R * N;
      rows.step(k, segment + at, needs_input ? segment_pre + at : nullptr, false);
    }
  }

  BackwardStep<T> step_at(int64_t t) const {
    const ptrdiff_t here = (t * B + row0) * N;
    const bool unmasked = !needs_input && rows.gapless(t) && rows.gapless(t + 1);
    const bool last = t == rows.longest - 1;
    return {t,
            rows.active[t],
            unmasked ? rows.active[t + 1] : 0,
            static_cast<const T*>(args.grad_hs) + here,
            pre_rows(t),
            inputs + (last ? 0 : place(t + 1)),
            state_rows(t, t),
            delta + place(t),
            delta_out && !plan.stream ? delta_out + here : nullptr,
            args.tokens && plan.params ? args.tokens + t * B + row0 : nullptr,
            last ? nullptr : rows.resets_at(t + 1)};
  }

  // delta_t in the ring, as the epilogue of map^T(delta_{t+1}), and |dL/dh_t|^2.
  void compute_delta(const BackwardStep<T>& step, SquareSum<T>* square) {
    const int64_t t = step.t;
    if (t == rows.longest - 1) {
      (this->*finish)(step, 0, blocks, square);
      return;
    }
    Transfers<T> transfers;
    if (delta_out && plan.stream && !plan.factored) stream_delta(&transfers, t + 1);
    rows.prefetch_rows(&transfers, static_cast<const T*>(args.grad_hs), t, t - 1);
    if (needs_input && !every) rows.prefetch_rows(&transfers, static_cast<const T*>(args.saved_pre), t, t - 1);
    transfers.prefetch(state_rows(t - 1, t), N, L, step.rows, blocks);
    if (step.delta_out) transfers.prefetch(step.delta_out, N, L, step.rows, blocks);
    multiply_back(t + 1, &transfers, [&](int first, int last) { (this->*finish)(step, first, last, square); });
  }

  // Whether s U^T delta_t is needed, for the step before or for a sum.
  bool projects(int64_t t) const { return plan.factored && (t > 0 || plan.to_h0 || plan.thin); }
  // of_u <- s U^T delta_t.
  void project(int64_t t) {
    Transfers<T> transfers;
    if (delta_out && plan.stream) stream_delta(&transfers, t);
    const Segment<T> from = rows.factor(delta + place(t), ring_block, rows.active[t], plan.N, rows.paired);
    multiply<T>(&from, 1, plan.first_t, rows.active[t], of_u_rows(t), of_u_block(), &transfers, [](int, int) {});
  }
  // message <- map^T(delta of step t), for a factored map from of_u.
  void multiply_back(int64_t t, Transfers<T>* transfers, const Epilogue& after) {
    const int R_t = rows.active[t];
    const Segment<T> from = plan.factored ? rows.factor(of_u_rows(t), of_u_block(), R_t, plan.K, rows.paired)
                                          : rows.factor(delta + place(t), ring_block, R_t, plan.N, rows.paired);
    multiply<T>(&from, 1, plan.second_t, R_t, message(), rows.block, transfers, after);
  }

  // Writes delta of step t to its result with streaming stores.
  void stream_delta(Transfers<T>* transfers, int64_t t) {
    transfers->stream(delta + place(t), L, ring_block, delta_out + (t * B + row0) * N, N, L, rows.active[t], blocks);
  }

  // The messages of the rows that reset at step t go to the gradient of reset_state instead of step t - 1.
  void take_messages(const uint8_t* flags, int64_t t, int first, int last) const {
    for (int r = 0; r < rows.active[t]; r++) {
      if (!rows.resets(flags, r, t)) continue;
      for (int b = first; b < last && b < blocks; b++) {
        T* from = message() + b * rows.block + r * L;
        const int count = lanes_of<T>(N, b);
        V<T> of_state = load(from);
        if (args.leak) {
          const T* state = static_cast<const T*>(args.reset_state) + (row0 + r) * N + b * L;
          V<T> leak_grad = V<T>{};
          of_state += take_leak(b, r, args.reset_state ? load_part(state, count) : V<T>{}, &leak_grad);
          add_units(sums->leak + b * L, leak_grad);
        }
        if (args.grad_reset_state) {
          T* to = grad_reset_state() + r * N + b * L;
          store_part(to, load_part(to, count) + of_state, count);
        }
        store(from, V<T>{});
      }
    }
  }

  // The part of dL/dh of the state h before the leak, in block b and row r: (1 - l) ghat of the step after it. Reads
  // ghat there, sets it to zero, and adds -ghat h to the gradient of the leak. Before a reset ghat is zero, and h may
  // be anything.
  ORTHOKERN_INLINE V<T> take_leak(int b, int r, V<T> h, V<T>* leak_grad) const {
    T* from = ghat + b * rows.block + r * L;
    const V<T> g = load(from);
    store(from, V<T>{});
    *leak_grad -= g == 0 ? V<T>{} : g * h;
    return (1 - load(plan.leak + b * L)) * g;
  }
  static void add_units(double* sum, V<T> part) {
    for (int i = 0; i < L; i++) sum[i] += part[i];
  }
  void pass_leak_to_h0() const {
    const T* h0 = static_cast<const T*>(args.h0) + row0 * N;
    for (int b = 0; b < blocks; b++) {
      V<T> leak_grad = V<T>{};
      for (int r = 0; r < R; r++) {
        T* to = message() + b * rows.block + r * L;
        store(to, load(to) + take_leak(b, r, load_part(h0 + r * N + b * L, lanes_of<T>(N, b)), &leak_grad));
      }
      add_units(sums->leak + b * L, leak_grad);
    }
  }

  static ORTHOKERN_INLINE V<T> clip(V<T> d, V<T> bound) {  // propagates NaN
    d = d > bound ? bound : d;
    return d < -bound ? -bound : d;
  }

  // delta_t for blocks [first, last), whose message is ready.
  template <class A, bool LEAK>
  void finish_blocks(const BackwardStep<T>& step, int first, int last, SquareSum<T>* square) {
    if (step.resets) take_messages(step.resets, step.t + 1, first, last);
    for (int b = first; b < last && b < blocks; b++) {
      V<T> param_grad = V<T>{}, leak_grad = V<T>{};
      const int r = lanes_of<T>(N, b) == L ? step.unmasked : 0;
      finish_rows<A, false, true>(step, 0, r, b, square, &param_grad, nullptr);
      finish_rows<A, LEAK, false>(step, r, step.rows, b, square, &param_grad, &leak_grad);
      if (step.delta_out) write_block(step, b);
      if (step.ids) add_to_table(step, b);
      if (A::has_parameter) add_units(sums->param + b * L, param_grad);
      if (LEAK) add_units(sums->leak + b * L, leak_grad);
    }
  }
  // Rows [from, to) of a block. UNMASKED: nearly all rows, with no branch inside the loop. The other rows may have
  // ended before step t, may end with it, or read a_t.
  template <class A, bool LEAK, bool UNMASKED>
  ORTHOKERN_INLINE void finish_rows(const BackwardStep<T>& step, int from, int to, int b, SquareSum<T>* square,
                                    V<T>* param_grad, V<T>* leak_grad) {
    constexpr bool kReadsPre = !UNMASKED && (A::needs_input || LEAK);
    const V<T> param = load(plan.param + b * L), bound = splat<T>(plan.clip);
    const int count = UNMASKED ? L : lanes_of<T>(N, b);
    T* d_to = step.delta + b * ring_block;
    const T *h_at = step.h + b * ring_block, *q_at = message() + b * rows.block, *g_at = step.grad_h + b * L;
    const int64_t stride = N;
    SquareSum<T> total = *square;
    V<T> param_total = *param_grad;
    for (int r = from; r < to; r++) {
      if (!UNMASKED && rows.ended(r, step.t)) {
        store(d_to + r * L, V<T>{});
        continue;
      }
      const bool ends = !UNMASKED && rows.length[r] == step.t + 1;
      V<T> g = read(g_at + r * stride, count);
      if (!ends) g += load(q_at + r * L);
      const V<T> h = ends ? read(step.ending + r * stride + b * L, count) : load(h_at + r * L);
      V<T> saved = kReadsPre ? read(step.pre + r * stride + b * L, count) : h;
      if (LEAK) g += take_leak(b, r, h, leak_grad);
      total.add(g);
      if (LEAK) {
        store(ghat + b * rows.block + r * L, g);
        const V<T> phi = activate<T, A>(saved, param);
        *leak_grad += g * phi;
        g *= load(plan.leak + b * L);
        if (!A::needs_input) saved = phi;
      }
      store(d_to + r * L, clip(activate_grad<T, A>(saved, g, param, &param_total), bound));
    }
    *square = total, *param_grad = param_total;
  }
  // delta_t of one block to its result.
  ORTHOKERN_INLINE void write_block(const BackwardStep<T>& step, int b) const {
    const int count = lanes_of<T>(N, b);
    const T* from = step.delta + b * ring_block;
    T* to = step.delta_out + b * L;
    for (int r = 0; r < step.rows; r++) write(to + r * N, load(from + r * L), count);
  }
  // delta_t of one block to the rows of the table selected by the tokens.
  ORTHOKERN_INLINE void add_to_table(const BackwardStep<T>& step, int b) const {
    const T* from = step.delta + b * ring_block;
    const int padded = blocks * L;
    for (int r = 0; r < step.rows; r++) {
      if (rows.ended(r, step.t)) continue;
      T* to = sums->table.part + step.ids[r] * padded + b * L;
      store(to, load(to) + load(from + r * L));
    }
  }

  // grad_x_t = delta_t W_in.
  void write_feature_gradient(int64_t t) {
    const int R_t = rows.active[t];
    const Segment<T> from = rows.factor(delta + place(t), ring_block, R_t, plan.N, rows.paired);
    multiply<T>(&from, 1, plan.input_t, R_t, dx, rows.block);
    unblock_rows<T>(dx, rows.block, R_t, plan.D, grad_x() + (t * B + row0) * plan.D, plan.D);
  }

  // Completes the inputs of step t in the ring. If step t is the last that the ring takes, adds the ring to the sums.
  void add_gradients(int64_t t) {
    T* here = inputs + place(t);
    if (plan.X) rows.read_features(t, here + blocks * ring_block, ring_block);
    if (!rows.gapless(t)) rows.clear_ended(t, here, ring_block, blocks + x_blocks);  // may hold NaN or infinities
    if (rows.place[t] == 0) {
      const uint8_t* flags = rows.resets_at(t);
      if (flags) rows.put_reset_state(flags, t, here, ring_block);
      add_ring();
      if (flags)  // the step before reads h_{t-1} there
        for (int r = 0; r < rows.active[t]; r++)
          if (rows.resets(flags, r, t))
            block_rows<T>(state_rows(t - 1, t) + r * N, N, 1, plan.N, here + r * L, ring_block);
    }
    if (token_steps && t % token_steps == 0) sums->table.end_part();
  }
  // sums += sum over the rows of the ring of delta [h, x, 1]^T, or without M of delta [x, 1]^T; thin: also the products
  // of the factors.
  void add_ring() {
    if (ldc) {
      add_ring_to(sums->gradients.part);
      sums->gradients.added(used);
    }
    if (!plan.thin) return;
    const Segment<T> states = {inputs, ring_block, plan.N};
    multiply<T>(&states, 1, plan.projection, used, of_v, ring_block);
    const int across = round_up(plan.K, L);
    outer_add<T>(delta, blocks, of_v, across / L, ring_block, used, sums->m_v.part, across);
    outer_add<T>(inputs, blocks, of_u, across / L, ring_block, used, sums->mt_u.part, across);
    sums->m_v.added(used), sums->mt_u.added(used);
  }
  void add_ring_to(T* to) {
    const T* from = args.grad_m ? inputs : inputs + blocks * ring_block;
    const int columns = static_cast<int>(ldc / L);
    const int depth = paired_depth(used, plan.tiles);
    if constexpr (kPairs<T>)
      if (plan.pairs) pair_rows(from, ring_block, used, columns, paired_inputs, paired_block(), depth);
    if constexpr (kTiles<T>) {
      if (plan.tiles) {
        pair_rows_transposed(delta, ring_block, used, blocks, paired_delta, depth);
        outer_add_tiles(paired_delta, blocks, paired_inputs, columns, paired_block(), depth, to, ldc);
        return;
      }
    }
    if constexpr (kPairs<T>) {
      if (plan.pairs) {
        pair_rows(delta, ring_block, used, blocks, paired_delta, paired_block(), depth);
        outer_add<T, true>(paired_delta, blocks, paired_inputs, columns, paired_block(), depth, to, ldc);
        return;
      }
    }
    outer_add<T>(delta, blocks, from, columns, ring_block, used, to, ldc);
  }
};

}  // namespace orthokern::ORTHOKERN_ISA
