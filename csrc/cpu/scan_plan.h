// What all threads of a call of scan.h share: the sizes, the rows of every thread and the packed weights.
#pragma once

#include "cpu/activate.h"
#include "cpu/direct.h"
#include "cpu/gemm.h"
#include "cpu/ops.h"
#include "cpu/tasks.h"

namespace orthokern::ORTHOKERN_ISA {

template <class T>
struct ScanPlan {
  const ScanArgs* args;
  int B, N, K, D;
  int X;  // extra columns of the product: D and the one for the bias, 0 without features
  bool bias_column;
  bool factored;
  bool thin;    // backward: sums of M V and M^T U diag(s) in place of M
  bool params;  // backward: a gradient of the map, of W_in or b is wanted
  bool pairs;   // products have bfloat16 factors, see pairs.h
  bool tiles;   // these products are those of tiles.h
  bool stream;  // write results with streaming stores
  bool to_h0;   // backward: the adjoint of step 0 is passed to h0, to reset_state or through the leak
  int threads;
  T clip;                // of delta, infinite without one
  Scratch<int> begin;    // [threads + 1]: task i has the rows [begin[i], begin[i + 1]) of the batch
  Packed<T> first;       // forward, factored: [N, K] V diag(s)
  Packed<T> second;      // forward: [K or N (+ X), N] U^T or W^T, W_in^T, b
  Packed<T> first_t;     // backward, factored: [N, K] U diag(s)
  Packed<T> second_t;    // backward: [K, N] V^T, or [N, N] W
  Packed<T> projection;  // backward, thin: [N, K] V
  Packed<T> input_t;     // backward with features whose gradient is wanted: [N, D] W_in
  Scratch<T> table;      // [D, round_up(N)]: W_in^T + b, for token ids
  Scratch<T> param;      // [round_up(N)]
  Scratch<T> leak;       // [round_up(N)], zeros without one

  int padded() const { return round_up(N, kLanes<T>); }
  int blocks() const { return padded() / kLanes<T>; }
  // Backward without M, of a low rank: the weights are small, and groups of few rows keep the rings in the nearest
  // caches.
  bool low_rank() const { return factored && 8 * K <= N && !args->grad_m; }
  int ring_rows() const { return low_rank() ? 4 * kMaxRows : 128; }
  // Columns of the sums over rows of delta [h, x, 1]^T, or without M of delta [x, 1]^T.
  int state_columns() const { return args->grad_m ? padded() : 0; }
  int summed_columns() const { return state_columns() + round_up(X, kLanes<T>); }
  // Rows of a packed matrix that `n` rows take, such that others can follow.
  int depth(int n) const { return pairs ? 2 * paired_depth(n, tiles) : n; }
};

// Where delta_t of all steps goes: grad_x, if that is not the gradient of features or tokens; or null.
inline void* delta_result(const ScanArgs& args) { return args.weight ? nullptr : args.grad_x; }

// The sizes, and how the results are written.
template <class T>
void set_sizes(ScanPlan<T>* plan, const ScanArgs& args, bool backward) {
  plan->args = &args;
  plan->B = static_cast<int>(args.B), plan->N = static_cast<int>(args.N), plan->K = static_cast<int>(args.K);
  plan->factored = args.scale != nullptr;
  plan->thin = backward && args.grad_first;
  plan->params = backward && (args.grad_m || plan->thin || args.grad_weight);
  plan->pairs = kPairs<T> && args.bf16;
  plan->tiles = kTiles<T> && args.bf16 == 2;
  plan->D = static_cast<int>(args.D);
  const bool features = args.weight && !args.tokens;
  plan->bias_column = features && args.bias;
  plan->X = features ? plan->D + (plan->bias_column ? 1 : 0) : 0;
  plan->threads = static_cast<int>(args.threads < args.B ? args.threads : args.B);
  plan->clip = static_cast<T>(args.clip);
  plan->to_h0 = args.grad_h0 || args.resets || args.leak;
  plan->stream = streams<T>(backward ? delta_result(args) : args.hs, args.T * args.B, args.N);
}

// W_in^T + b, a row for every token id.
template <class T>
bool make_token_table(ScanPlan<T>* plan) {
  const ScanArgs& args = *plan->args;
  const T *weight = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);
  constexpr int L = kLanes<T>;
  const ptrdiff_t D = plan->D, padded = plan->padded();
  if (!plan->table.allocate(D * padded, false)) return false;
  direct_share(args.threads, D * padded * sizeof(T), plan->N, L, [=](int first, int last) {
    for (int n = first; n < last; n += L) {
      const int count = last - n < L ? last - n : L;
      const V<T> offset = bias ? load_part(bias + n, count) : V<T>{};
      for (int d = 0; d < D; d += L) {
        const int ids = D - d < L ? D - d : L;
        V<T> square[L];
        load_transposed<T>(weight + n * D + d, D, count, ids, square);
        for (int i = 0; i < ids; i++) store(plan->table + (d + i) * padded + n, square[i] + offset);
      }
    }
  });
  return true;
}

// The weights of a step forward: the map, and below it W_in and the bias.
template <class T>
bool plan_forward_weights(ScanPlan<T>* plan, PackJobs<T>* jobs) {
  const ScanArgs& args = *plan->args;
  const int N = plan->N, K = plan->K, D = plan->D;
  const int depth = plan->factored ? K : N, below = plan->depth(depth);
  if (!plan->second.allocate(below + plan->X, N, plan->pairs, plan->tiles)) return false;
  if (plan->factored) {
    if (!plan->first.allocate(N, K, plan->pairs, plan->tiles)) return false;
    jobs->add(&plan->first, 0, N, static_cast<const T*>(args.first), K, 1, static_cast<const T*>(args.scale));
  }
  jobs->add(&plan->second, 0, depth, static_cast<const T*>(args.second), 1, depth);
  if (plan->X) jobs->add(&plan->second, below, D, static_cast<const T*>(args.weight), 1, D);
  if (plan->bias_column) jobs->add(&plan->second, below + D, 1, static_cast<const T*>(args.bias), 0, 1);
  return !args.tokens || make_token_table(plan);
}

// The weights of a step back: the transposed map, and W_in for the gradient of the features.
template <class T>
bool plan_backward_weights(ScanPlan<T>* plan, PackJobs<T>* jobs) {
  const ScanArgs& args = *plan->args;
  const int N = plan->N, K = plan->K, D = plan->D;
  const T* second = static_cast<const T*>(args.second);
  const bool applied = args.T > 1 || plan->to_h0;
  if (plan->factored && (applied || plan->thin)) {
    if (!plan->first_t.allocate(N, K, plan->pairs, plan->tiles)) return false;
    jobs->add(&plan->first_t, 0, N, second, K, 1, static_cast<const T*>(args.scale));
  }
  if (applied) {
    const int depth = plan->factored ? K : N;
    if (!plan->second_t.allocate(depth, N, plan->pairs, plan->tiles)) return false;
    jobs->add(&plan->second_t, 0, depth, plan->factored ? static_cast<const T*>(args.first) : second,
              plan->factored ? 1 : N, plan->factored ? K : 1);
  }
  if (plan->thin) {
    if (!plan->projection.allocate(N, K)) return false;
    jobs->add(&plan->projection, 0, N, static_cast<const T*>(args.first), K, 1);
  }
  if (plan->X && args.grad_x) {
    if (!plan->input_t.allocate(N, D, plan->pairs, plan->tiles)) return false;
    jobs->add(&plan->input_t, 0, N, static_cast<const T*>(args.weight), D, 1);
  }
  return true;
}

template <class T>
bool prepare_scan(ScanPlan<T>* plan, const ScanArgs& args, bool backward) {
  set_sizes(plan, args, backward);
  if (!share_rows(plan->threads, plan->B, args.lengths, args.T, &plan->begin)) return false;
  PackJobs<T> jobs;
  const bool runs_forward = !backward || args.checkpoint_every;  // backward recomputes states from checkpoints
  if (runs_forward && !plan_forward_weights(plan, &jobs)) return false;
  if (backward && !plan_backward_weights(plan, &jobs)) return false;
  // large weights are packed by all threads, also where the batch has fewer rows
  jobs.run(args.N >= 256 ? args.threads : plan->threads);
  return expand_param(&plan->param, static_cast<const T*>(args.act_param), args.act_param_size, plan->N) &&
         expand_param(&plan->leak, static_cast<const T*>(args.leak), args.leak_size, plan->N);
}

}  // namespace orthokern::ORTHOKERN_ISA
