// Data shared by all threads of a call of scan.h: the sizes, the rows of every thread and the packed weights.
#pragma once

#include "cpu/activate.h"
#include "cpu/direct.h"
#include "cpu/gemm.h"
#include "cpu/ops.h"
#include "cpu/tasks.h"

namespace orthokern::ORTHOKERN_ISA {

// Destination of delta_t of all steps: grad_x, if that is not the gradient of features or tokens; or null.
inline void* delta_result(const ScanArgs& args) { return args.weight ? nullptr : args.grad_x; }

template <class T>
struct ScanPlan {
  static constexpr int L = kLanes<T>;
  const ScanArgs& args;
  const bool backward;
  const int B = static_cast<int>(args.B), N = static_cast<int>(args.N), K = static_cast<int>(args.K),
            D = static_cast<int>(args.D);
  const bool features = args.weight && !args.tokens, bias_column = features && args.bias;
  const int X = features ? D + bias_column : 0;  // extra columns of the product: D and the one for the bias
  const bool factored = args.scale != nullptr;
  const bool thin = backward && args.grad_first;  // sums of M V and M^T U diag(s) instead of M
  const bool params = backward && (args.grad_m || thin || args.grad_weight);  // a gradient of the map, W_in or b
  const bool pairs = kPairs<T> && args.bf16;       // products have bfloat16 factors, see pairs.h
  const bool tiles = kTiles<T> && args.bf16 == 2;  // these products are those of tiles.h
  // write results with streaming stores
  const bool stream = streams<T>(backward ? delta_result(args) : args.hs, args.T* args.B, args.N);
  // backward: the adjoint of step 0 is passed to h0, to reset_state or through the leak
  const bool to_h0 = args.grad_h0 || args.resets || args.leak;
  const int threads = args.threads < B ? args.threads : B;
  const T clip = static_cast<T>(args.clip);  // of delta, infinite without one
  Scratch<int> begin = {};                   // [threads + 1]: task i has the rows [begin[i], begin[i + 1]) of the batch
  Packed<T> first = {};                      // forward, factored: [N, K] V diag(s)
  Packed<T> second = {};                     // forward: [K or N (+ X), N] U^T or W^T, W_in^T, b
  Packed<T> first_t = {};                    // backward, factored: [N, K] U diag(s)
  Packed<T> second_t = {};                   // backward: [K, N] V^T, or [N, N] W
  Packed<T> projection = {};                 // backward, thin: [N, K] V
  Packed<T> input_t = {};                    // backward with features whose gradient is wanted: [N, D] W_in
  Scratch<T> table = {};                     // [D, round_up(N)]: W_in^T + b, for token ids
  Scratch<T> param = {};                     // [round_up(N)]
  Scratch<T> leak = {};                      // [round_up(N)], zeros without one

  static const T* at(const void* pointer) { return static_cast<const T*>(pointer); }
  int padded() const { return round_up(N, L); }
  int blocks() const { return padded() / L; }
  // Backward without M at low rank: the weights are small, and groups of few rows keep the rings in the nearest caches.
  bool low_rank() const { return factored && 8 * K <= N && !args.grad_m; }
  int ring_rows() const { return low_rank() ? 4 * kMaxRows : 128; }
  // Columns of the sums over rows of delta [h, x, 1]^T, or without M of delta [x, 1]^T.
  int state_columns() const { return args.grad_m ? padded() : 0; }
  int summed_columns() const { return state_columns() + round_up(X, L); }
  // Rows of a packed matrix used by `n` rows, such that others can follow.
  int depth(int n) const { return pairs ? 2 * paired_depth(n, tiles) : n; }

  bool prepare() {
    if (!share_rows(threads, B, args.lengths, args.T, &begin)) return false;
    PackJobs<T> jobs;
    const bool runs_forward = !backward || args.checkpoint_every;  // backward recomputes states from checkpoints
    if ((runs_forward && !forward_weights(&jobs)) || (backward && !backward_weights(&jobs))) return false;
    // large weights are packed by all threads, even if the batch has fewer rows
    jobs.run(N >= 256 ? args.threads : threads);
    return expand_param(&param, at(args.act_param), args.act_param_size, N) &&
           expand_param(&leak, at(args.leak), args.leak_size, N);
  }

 private:
  // W_in^T + b, a row for every token id.
  bool make_token_table() {
    const T *weight = at(args.weight), *bias = at(args.bias);
    const ptrdiff_t ids_in_all = D, padded_N = padded();
    if (!table.allocate(ids_in_all * padded_N, false)) return false;
    direct_share(args.threads, ids_in_all * padded_N * sizeof(T), N, L, [=](int first, int last) {
      for (int n = first; n < last; n += L) {
        const int count = last - n < L ? last - n : L;
        const V<T> offset = bias ? load_part(bias + n, count) : V<T>{};
        for (int d = 0; d < D; d += L) {
          const int ids = D - d < L ? D - d : L;
          V<T> square[L];
          load_transposed<T>(weight + n * ids_in_all + d, D, count, ids, square);
          for (int i = 0; i < ids; i++) store(table + (d + i) * padded_N + n, square[i] + offset);
        }
      }
    });
    return true;
  }

  // The weights of a step forward: the map, and below it W_in and the bias.
  bool forward_weights(PackJobs<T>* jobs) {
    const int map = factored ? K : N, below = depth(map);
    if (!second.allocate(below + X, N, pairs, tiles)) return false;
    if (factored) {
      if (!first.allocate(N, K, pairs, tiles)) return false;
      jobs->add(&first, 0, N, at(args.first), K, 1, at(args.scale));
    }
    jobs->add(&second, 0, map, at(args.second), 1, map);
    if (X) jobs->add(&second, below, D, at(args.weight), 1, D);
    if (bias_column) jobs->add(&second, below + D, 1, at(args.bias), 0, 1);
    return !args.tokens || make_token_table();
  }

  // The weights of a step back: the transposed map, and W_in for the gradient of the features.
  bool backward_weights(PackJobs<T>* jobs) {
    const bool applied = args.T > 1 || to_h0;
    if (factored && (applied || thin)) {
      if (!first_t.allocate(N, K, pairs, tiles)) return false;
      jobs->add(&first_t, 0, N, at(args.second), K, 1, at(args.scale));
    }
    if (applied) {
      if (!second_t.allocate(factored ? K : N, N, pairs, tiles)) return false;
      if (factored) jobs->add(&second_t, 0, K, at(args.first), 1, K);
      else jobs->add(&second_t, 0, N, at(args.second), N, 1);
    }
    if (thin) {
      if (!projection.allocate(N, K)) return false;
      jobs->add(&projection, 0, N, at(args.first), K, 1);
    }
    if (X && args.grad_x) {
      if (!input_t.allocate(N, D, pairs, tiles)) return false;
      jobs->add(&input_t, 0, N, at(args.weight), D, 1);
    }
    return true;
  }
};

}  // namespace orthokern::ORTHOKERN_ISA
