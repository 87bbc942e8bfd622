// The arguments of the CPU kernels: addresses and sizes, no torch types. Contiguous, row-major; the element
// type is `dtype`. B batch, T time, N hidden, K rank, D input features or number of token ids, C classes.
#pragma once

#include <stdint.h>

#include "common/activations.h"
#include "common/fields.h"

// Whether the compiler knows the bfloat16 products of AVX-512.
#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>)
#define ORTHOKERN_HAVE_BF16 1
#else
#define ORTHOKERN_HAVE_BF16 0
#endif
// And those of AMX, which Linux grants.
#if ORTHOKERN_HAVE_BF16 && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define ORTHOKERN_HAVE_AMX 1
#else
#define ORTHOKERN_HAVE_AMX 0
#endif

namespace orthokern {

enum Dtype { kFloat32 = 0, kFloat64 = 1 };

// factored_scan, W = second diag(scale) first^T, and dense_scan, W = second alone and K == 0; forward and backward.
struct ScanArgs {
  int64_t B, T, N, K, D;
  int dtype;
  int activation;  // a number of common/activations.h
  int threads;
  int bf16;  // 1: float32 products may round their factors to bfloat16, where cpu_has_bf16(); 2: in AMX's tiles, where
             // cpu_has_amx()
  int64_t checkpoint_every;  // 0: every state is kept
  double clip;               // backward: bound of |delta_t|, infinity: none
  const int64_t* lengths;    // [B] in [1, T], steps of each sequence; null: T for all
  const uint8_t* resets;     // [T, B], 0 or 1: whether the step starts from reset_state; null: none does

  const void* x;            // [T, B, N] if weight is null, else [T, B, D]; null with tokens
  const int64_t* tokens;    // [T, B] in [0, D), or null
  const void* first;        // [N, K], V; null for dense_scan
  const void* scale;        // [K], s; null for dense_scan
  const void* second;       // [N, K], U; W [N, N] for dense_scan
  const void* h0;           // [B, N]
  const void* reset_state;  // [B, N]; null: zeros
  const void* weight;       // [N, D] or null
  const void* bias;         // [N] or null
  const void* act_param;    // [act_param_size] or null
  int64_t act_param_size;   // 1 or N
  const void* leak;         // [leak_size], a_t's share of h_t in (0, 1], or null: h_t is phi(a_t)
  int64_t leak_size;        // 1 or N

  // forward results
  void* hs;    // [T, B, N]
  void* ckpt;  // [ceil(T / checkpoint_every), B, N] or null
  void* pre;   // [T, B, N] or null

  // backward: inputs
  const void* grad_hs;    // [T, B, N]
  const void* states;     // hs [T, B, N], or ckpt
  const void* saved_pre;  // [T, B, N] or null
  // and the results
  void* grad_x;  // like x, or null
  // M = sum_t delta_t h_{t-1}^T, [N, N], or M^T U diag(s), diag(U^T M V) and M V diag(s), like first, scale and second,
  // or null
  void* grad_m;
  void* grad_first;
  void* grad_scale;
  void* grad_second;
  void* grad_h0;           // [B, N] or null
  void* grad_reset_state;  // [B, N] or null
  void* grad_weight;       // [N, D] or null
  void* grad_bias;         // [N] or null
  void* grad_act_param;    // [act_param_size] or null
  void* grad_leak;         // [leak_size] or null
  void* grad_norm;         // [T]: |dL/dh_t| over batch and units

  ORTHOKERN_FIELDS_OF(common, B, T, N, K, D, dtype, activation, threads, bf16, checkpoint_every, clip, lengths, resets,
                      x, tokens, first, scale, second, h0, reset_state, weight, bias, act_param, act_param_size, leak,
                      leak_size);
  template <class Visit>
  void forward(Visit& visit) {
    common(visit);
    ORTHOKERN_FIELDS(visit, hs, ckpt, pre);
  }
  template <class Visit>
  void backward(Visit& visit) {
    common(visit);
    ORTHOKERN_FIELDS(visit, grad_hs, states, saved_pre, grad_x, grad_m, grad_first, grad_scale, grad_second, grad_h0,
                     grad_reset_state, grad_weight, grad_bias, grad_act_param, grad_leak, grad_norm);
  }
};

// gru_scan, forward and backward. Blocks of 3N in the order reset gate r, update gate z, candidate n.
struct GruArgs {
  int64_t B, T, N;
  int dtype, threads;
  int kanai;                // 1: the reset gate before W_n; 0: after, as torch has it
  const void* w;            // [3N, N]
  const void* h0;           // [B, N]
  const void* x;            // [T, B, 3N]       (forward)
  const void* bias;         // [3N] or null     (forward)
  const int64_t* lengths;   // [B] in [1, T], steps of each sequence; null: T for all. Results are zero after them.
  const uint8_t* resets;    // [T, B] or null: where not 0, the step starts from reset_state in place of h_{t-1}
  const void* reset_state;  // [B, N], null: zeros

  // forward results
  void* hs;     // [T, B, N]
  void* gates;  // [T, B, 3N]
  void* pre;    // [T, B, N]: W_n h_{t-1} + b_n; null for kanai

  // backward: inputs
  const void* grad_hs;      // [T, B, N]
  const void* saved_hs;     // [T, B, N]
  const void* saved_gates;  // [T, B, 3N]
  const void* saved_pre;    // [T, B, N] or null
  // and the results
  void* grad_x;            // [T, B, 3N]
  void* factor;            // [T, B, N]: one factor of the gradient of W_n: r h_{t-1}, or (not kanai) d_q
  void* grad_h0;           // [B, N] or null
  void* grad_reset_state;  // [B, N] or null; zeros before the call
  void* grad_norm;         // [T]: |dL/dh_t| over batch and units

  ORTHOKERN_FIELDS_OF(forward, B, T, N, dtype, threads, kanai, w, h0, lengths, resets, reset_state, x, bias, hs, gates,
                      pre);
  ORTHOKERN_FIELDS_OF(backward, B, T, N, dtype, threads, kanai, w, h0, lengths, resets, reset_state, grad_hs, saved_hs,
                      saved_gates, saved_pre, grad_x, factor, grad_h0, grad_reset_state, grad_norm);
};

// peephole_scan, forward and backward. Blocks of 4N in the order input gate i, forget gate f, cell candidate g, output
// gate o; of 3N in the order i, f, o.
struct PeepholeArgs {
  int64_t B, T, N;
  int dtype, threads;
  const void* w;         // [4N, N]
  const void* peephole;  // [3, N]
  const void* h0;        // [B, N]
  const void* c0;        // [B, N]
  const void* x;         // [T, B, 4N]  (forward)
  // always null: every sequence has T steps, and none resets
  const int64_t* lengths;
  const uint8_t* resets;
  const void* reset_state;

  // forward results
  void* hs;     // [T, B, N]
  void* cs;     // [T, B, N]
  void* gates;  // [T, B, 4N] or null

  // backward: inputs
  const void* grad_hs;      // [T, B, N], null: zeros
  const void* grad_cs;      // [T, B, N], null: zeros
  const void* saved_cs;     // [T, B, N]
  const void* saved_gates;  // [T, B, 4N]
  // and the results
  void* grad_x;         // [T, B, 4N]
  void* grad_peephole;  // [3, N]
  void* grad_h0;        // [B, N]
  void* grad_c0;        // [B, N]

  ORTHOKERN_FIELDS_OF(forward, B, T, N, dtype, threads, w, peephole, h0, c0, x, hs, cs, gates);
  ORTHOKERN_FIELDS_OF(backward, B, T, N, dtype, threads, w, peephole, c0, grad_hs, grad_cs, saved_cs, saved_gates,
                      grad_x, grad_peephole, grad_h0, grad_c0);
};

struct ActivationArgs {
  int64_t rows, N;
  int dtype, activation, threads;
  const void* x;          // [rows, N]
  const void* act_param;  // [act_param_size] or null
  int64_t act_param_size;
  void* y;               // [rows, N]           (forward)
  const void* grad_y;    // [rows, N]           (backward)
  void* grad_x;          // [rows, N]
  void* grad_act_param;  // [act_param_size] or null

  ORTHOKERN_FIELDS_OF(forward, rows, N, dtype, activation, threads, x, act_param, act_param_size, y);
  ORTHOKERN_FIELDS_OF(backward, rows, N, dtype, activation, threads, x, act_param, act_param_size, grad_y, grad_x,
                      grad_act_param);
};

struct LinearCrossEntropyArgs {
  int64_t rows, N, C;
  int dtype, threads;
  int mean;               // 1: the gradients and the loss are divided by rows
  const void* hidden;     // [rows, N]
  const void* weight;     // [C, N]
  const void* bias;       // [C] or null
  const int64_t* target;  // [rows] in [0, C)
  void* loss;             // []
  void* grad_hidden;      // [rows, N] or null
  void* grad_weight;      // [C, N] or null
  void* grad_bias;        // [C] or null

  ORTHOKERN_FIELDS_OF(fields, rows, N, C, dtype, threads, mean, hidden, weight, bias, target, loss, grad_hidden,
                      grad_weight, grad_bias);
};

// rotation_scan. M modes; a vector [2M] holds the real parts, then the imaginary ones.
struct RotationArgs {
  int64_t B, T, M, D;
  int dtype, threads;
  int reverse;            // from the last step to the first, with the conjugate eigenvalues
  const double* re;       // [M]
  const double* im;       // [M]
  const void* x;          // [T, B, 2M], what each step adds; null: weight features_t + bias
  const void* z0;         // [B, 2M]
  void* z;                // [T, B, 2M], or null in a backward with features
  const uint8_t* resets;  // [T, B] or null: whether the step's previous state counts as zero
  const void* features;   // [T, B, D] or null
  const void* weight;     // [2M, D] with features
  const void* bias;       // [2M] or null
  // the backward, which has `reverse`, and the gradient of the states as x
  const void* h;        // [T, B, 2M], the states of the forward
  const void* h0;       // [B, 2M]
  double* grad_re;      // [M]; null: not the backward
  double* grad_im;      // [M]
  void* grad_h0;        // [B, 2M]
  void* grad_features;  // [T, B, D] or null
  void* grad_weight;    // [2M, D] with features
  void* grad_bias;      // [2M] with features

  ORTHOKERN_FIELDS_OF(fields, B, T, M, D, dtype, threads, reverse, re, im, x, z0, z, resets, features, weight, bias, h,
                      h0, grad_re, grad_im, grad_h0, grad_features, grad_weight, grad_bias);
};

// modal_loss. M modes as above.
struct ModalArgs {
  int64_t B, T, M, D, C, P, K;
  int dtype, threads;
  const double* re;  // [M]
  const double* im;  // [M]
  const void* x;     // [T, B, 2M], or null with tokens
  const void* z0;    // [B, 2M]
  int need_grad;
  double scale;            // of the loss and its gradients: 1, or 1 / steps
  const int64_t* lengths;  // [B] in [1, T], or null
  const int64_t* tokens;   // [T, B] in [0, D), or null
  const void* table;       // [D, 2M] or null
  const int64_t* pairs;    // [P, 2] in [0, M), or null
  const void* readout;     // [C, 2M]
  const void* bias;        // [C] or null
  const int64_t* target;   // [T, B] in [0, C)
  void* loss;              // []
  int64_t* hits;           // [T]
  // gradients, all or none (but for grad_x)
  void* grad_x;        // [T, B, 2M] or null
  void* grad_z0;       // [B, 2M]
  void* grad_table;    // [D, 2M] or null
  void* grad_readout;  // [C, 2M]
  void* grad_bias;     // [C] or null
  double* grad_re;     // [M]
  double* grad_im;     // [M]
  double* grad_pairs;  // [P, 2, 2] or null
  // states and, with gradients, adjoints of K steps; not written for steps from the length of a sequence on
  const int64_t* steps;  // [K] in [0, T)
  void* step_states;     // [K, B, 2M]
  void* step_adjoints;   // [K, B, 2M] or null

  ORTHOKERN_FIELDS_OF(fields, B, T, M, D, C, P, K, dtype, threads, re, im, x, z0, need_grad, scale, lengths, tokens,
                      table, pairs, readout, bias, target, loss, hits, grad_x, grad_z0, grad_table, grad_readout,
                      grad_bias, grad_re, grad_im, grad_pairs, steps, step_states, step_adjoints);
};

// cayley: N rows, K <= N columns of a matrix.
struct CayleyArgs {
  int64_t batch, N, K;
  int dtype, threads;
  const void* m;     // [batch, N, K]
  const void* g;     // [batch, N, K]: the gradient with respect to m
  const double* lr;  // [batch]
  void* out;         // [batch, N, K]; overlaps neither m nor g

  ORTHOKERN_FIELDS_OF(fields, batch, N, K, dtype, threads, m, g, lr, out);
};

}  // namespace orthokern
