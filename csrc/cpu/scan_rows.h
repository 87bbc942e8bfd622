// A group of rows of the batch in scan.h: which of them run at which step, their working memory, and one step forward.
#pragma once

#include "cpu/rows.h"
#include "cpu/scan_plan.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T>
struct ScanRows : RowSteps {
  static constexpr int L = kLanes<T>;
  const ScanPlan<T>& plan;
  const ScanArgs& args;
  ptrdiff_t block;               // elements from one block of a blocked matrix of R rows to the next
  Scratch<T> state, next, z, x;  // [N/L][R][L] twice, [K/L][R][L], [X/L][R][L]
  Scratch<T> paired, paired_x;   // with plan.pairs: pairs of the state or of z, [max(N, K)/2L][R][L]; [X/2L][R][L]
  Scratch<const T*> e_rows;      // [R] rows of e_t, or of the table, or null
  Scratch<int> place;            // [longest] first row of step t in the ring, see place_steps

  // activate_blocks of the activation
  void (ScanRows::*epilogue)(int first, int last, int R_t, bool has_e, T* out, T* h_out, T* pre_out, bool stream) const;

  ScanRows(const ScanPlan<T>& plan_, int row0_, int R_)
      : RowSteps(plan_.args, row0_, R_), plan(plan_), args(plan_.args), block(R_ * L) {
    visit_activation(args.activation, [this](auto a) {
      using A = decltype(a);
      epilogue = args.leak ? &ScanRows::activate_blocks<A, true> : &ScanRows::activate_blocks<A, false>;
    });
  }

  bool allocate() {
    // The product writes whole panels: room for two blocks.
    const size_t n = static_cast<size_t>(round_up(plan.N, 2 * L)) * R;
    return state.allocate(n) && next.allocate(n) && z.allocate(static_cast<size_t>(round_up(plan.K, 2 * L)) * R) &&
           x.allocate(static_cast<size_t>(round_up(plan.X, L)) * R) && e_rows.allocate(R) && count_steps() &&
           (!plan.pairs || (paired.allocate(n) && paired_x.allocate(static_cast<size_t>(round_up(plan.X, 2 * L)) * R)));
  }
  // A factor of a product: `columns` columns of a blocked matrix, or with plan.pairs their pairs, which go to `pairs`.
  Segment<T> factor(const T* a, ptrdiff_t a_block, int rows, int columns, T* pairs) const {
    if constexpr (kPairs<T>) {
      if (plan.pairs) {
        pair_columns(a, a_block, rows, columns, pairs, block);
        return {pairs, block, paired_depth(columns, plan.tiles)};
      }
    }
    return {a, a_block, columns};
  }
  // Places the steps in a ring of `capacity` rows, at least 2 R. Consecutive steps are stored one after the other. A
  // step that would not fit starts at row 0 again. At least two steps fit before each restart, and later steps have no
  // more rows than earlier ones. So the first step after a restart never overlaps the step before it, which is still
  // needed.
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
  // Writes reset_state of the rows that reset at step t to a blocked matrix.
  void put_reset_state(const uint8_t* flags, int64_t t, T* rows, ptrdiff_t rows_block) const {
    const T* from = static_cast<const T*>(args.reset_state) + row0 * static_cast<ptrdiff_t>(plan.N);
    for (int r = 0; r < active[t]; r++) {
      if (!resets(flags, r, t)) continue;
      if (args.reset_state) {
        block_rows<T>(from + r * static_cast<ptrdiff_t>(plan.N), plan.N, 1, plan.N, rows + r * L, rows_block);
      } else {
        for (int b = 0; b < plan.blocks(); b++) store(rows + b * rows_block + r * L, V<T>{});
      }
    }
  }
  // Sets rows of a blocked matrix that ended before step t, among the first R_t, to zero.
  void clear_ended(int64_t t, T* rows, ptrdiff_t rows_block, int count) const {
    for (int r = 0; r < active[t]; r++)
      if (ended(r, t))
        for (int b = 0; b < count; b++) store(rows + b * rows_block + r * L, V<T>{});
  }

  // x_t and the one for the bias, blocked.
  void read_features(int64_t t, T* to, ptrdiff_t to_block) const {
    const T* from = static_cast<const T*>(args.x) + (t * args.B + row0) * plan.D;
    block_rows<T>(from, plan.D, active[t], plan.D, to, to_block);
    if (plan.bias_column)
      for (int r = 0; r < active[t]; r++) to[(plan.D / L) * to_block + r * L + plan.D % L] = 1;
  }

  // Prefetches rows of a row-major [T, B, N]. A product first needs the columns of its first panel (two blocks): these
  // are prefetched one product earlier, for step `later` (none if it is outside [0, T)). The columns after them are
  // prefetched for step t.
  void prefetch_rows(Transfers<T>* transfers, const T* from, int64_t t, int64_t later) const {
    const ptrdiff_t step = static_cast<ptrdiff_t>(args.B) * plan.N;
    const T* rows = from + row0 * static_cast<ptrdiff_t>(plan.N);
    if (plan.blocks() > 2) transfers->prefetch(rows + t * step + 2 * L, plan.N, L, active[t], plan.blocks() - 2);
    if (later >= 0 && later < args.T)
      transfers->prefetch(rows + later * step, plan.N, L, active[later], plan.blocks() < 2 ? plan.blocks() : 2);
  }

  // One step: state <- h_t, written to h_out (and a_t to pre_out, which may be null) as rows `N` apart. With `stream`,
  // h_t only goes to the state, and the next step's product writes it with streaming stores.
  void step(int64_t t, T* h_out, T* pre_out, bool stream) {
    const int N = plan.N, R_t = active[t];
    // Rows that reset are overwritten before the product. With `stream`, h_{t-1} has not been written yet, and is
    // written here, not by the product's transfers.
    const uint8_t* const flags = resets_at(t);
    const bool behind = stream && t > 0;
    T* const h_before = h_out - static_cast<ptrdiff_t>(args.B) * N;
    if (flags) {
      if (behind) unblock_rows<T>(state, block, active[t - 1], N, h_before, N);
      put_reset_state(flags, t, state, block);
    }
    Transfers<T> during_first, during_last;  // the factored map's first product, and the last product
    const bool has_e = read_input(t, &during_last);
    if (behind && !flags)
      (plan.factored ? during_first : during_last)
          .stream(state, L, block, h_before, N, L, active[t - 1], plan.blocks());
    if (!stream) during_last.prefetch(h_out, N, L, R_t, plan.blocks());
    Segment<T> segments[2];
    const bool in_place = plan.factored && !args.leak;  // the first product is the last to read the old state
    T* out = in_place ? state : next;
    if (plan.factored) {
      const Segment<T> from = factor(state, block, R_t, N, paired);
      multiply<T>(&from, 1, plan.first, R_t, z, block, &during_first, [](int, int) {});
      segments[0] = factor(z, block, R_t, plan.K, paired);
    } else {
      segments[0] = factor(state, block, R_t, N, paired);
    }
    segments[1] = factor(x, block, R_t, plan.X, paired_x);
    multiply<T>(segments, plan.X ? 2 : 1, plan.second, R_t, out, block, &during_last,
                [&](int first, int last) { (this->*epilogue)(first, last, R_t, has_e, out, h_out, pre_out, stream); });
    if (!gapless(t)) clear_ended(t, out, block, plan.blocks());
    if (!in_place) state.swap(next);
  }
  // The input of step t: sets e_rows and returns true, or reads the features into x. Prefetches the next step's.
  bool read_input(int64_t t, Transfers<T>* transfers) {
    const int R_t = active[t];
    if (args.tokens) {
      const int64_t* id = args.tokens + t * args.B + row0;
      for (int r = 0; r < R_t; r++) e_rows[r] = plan.table + (ended(r, t) ? 0 : id[r]) * plan.padded();
      return true;
    }
    if (plan.X == 0) {
      for (int r = 0; r < R_t; r++) e_rows[r] = static_cast<const T*>(args.x) + (t * args.B + row0 + r) * plan.N;
      prefetch_rows(transfers, static_cast<const T*>(args.x), t, t + 1);
      return true;
    }
    read_features(t, x, block);
    const T* x_next = static_cast<const T*>(args.x) + ((t + 1) * args.B + row0) * plan.D;
    if (t + 1 < args.T) transfers->prefetch(x_next, plan.D, L, active[t + 1], (plan.D + L - 1) / L);
    return false;
  }
  // The epilogue of a step's last product, for blocks [first, last): adds e_t if it is not yet included, and
  // turns a_t into h_t.
  template <class A, bool LEAK>
  void activate_blocks(int first, int last, int R_t, bool has_e, T* out, T* h_out, T* pre_out, bool stream) const {
    const T* const* e = has_e ? e_rows.get() : nullptr;
    for (int b = first; b < last && b < plan.blocks(); b++) {
      const int count = lanes_of<T>(plan.N, b);
      const V<T> param = load(plan.param + b * L);
      T* at = out + b * block;
      T* h_to = stream ? nullptr : h_out + b * L;
      if (count == L && !pre_out && !LEAK) {  // the common case: no branch inside the loops
        if (e && stream) activate_rows<A, true, false>(R_t, at, b, param, h_to);
        else if (e) activate_rows<A, true, true>(R_t, at, b, param, h_to);
        else if (stream) activate_rows<A, false, false>(R_t, at, b, param, h_to);
        else activate_rows<A, false, true>(R_t, at, b, param, h_to);
        continue;
      }
      for (int r = 0; r < R_t; r++) {
        V<T> a = load(at + r * L);
        if (e) a += args.tokens || count == L ? load(e[r] + b * L) : load_part(e[r] + b * L, count);
        V<T> h = activate<T, A>(a, param);
        if (LEAK) h = leaky<T>(load(state + b * block + r * L), h, load(plan.leak + b * L));
        store(at + r * L, h);
        if (!stream) store_part(h_to + static_cast<ptrdiff_t>(r) * plan.N, h, count);
        if (pre_out) store_part(pre_out + static_cast<ptrdiff_t>(r) * plan.N + b * L, a, count);
      }
    }
  }
  // One block of the epilogue: a, blocked [rows][L], becomes h there and, with STORE, in rows N apart.
  template <class A, bool INPUT, bool STORE>
  ORTHOKERN_INLINE void activate_rows(int rows, T* a, int b, V<T> param, T* h_out) const {
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
};

}  // namespace orthokern::ORTHOKERN_ISA
