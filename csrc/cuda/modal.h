// The arguments of the modal kernels: plain addresses and sizes, without torch and the CUDA headers.
// orthokern/_modal_chunks.py has the sequence of launches of a call.
//
// B batch, T steps of this launch, M modes, D token ids, P pairs, C classes. A lane is mode m of sequence b, n = b M +
// m of R = B M; a chunk is `chunk` steps, and there are ceil(T / chunk). Rows are contiguous; T below is float or
// double, by `dtype`. Ids and targets are unsigned or signed integers of `id_bytes` (1: unsigned) and `target_bytes`.
#pragma once

#include <stdint.h>

#include "common/fields.h"

namespace orthokern::cuda {

struct ModalArgs {
  int dtype, device;
  void* stream;
  int64_t T, B, M, D, P, chunk;
  int64_t first;  // the step of t = 0, for comparison with `lengths`
  int id_bytes;

  const void* x;           // T [T, B, 2M], or null with ids
  const void* ids;         // [T, B], or null
  const void* table;       // T [D, 2M], or null
  const double* re;        // [M]
  const double* im;        // [M]
  const double* state;     // [chunks, 2, R], initial state of each chunk; null: zeros
  const int64_t* lengths;  // [B], or null: T for all
  const void* g;           // T [T, B, 2M], dL/dz
  const void* states;      // T [T, B, 2M], z; null: no sums
  const void* before;      // T [B, 2M], the state before step 0
  const int64_t* pairs;    // [P, 2]

  void* z;             // T [T, B, 2M], or null
  double* end;         // [chunks, 2, R]: the state after each chunk, or the adjoint of its first step; or null
  void* delta;         // T [T, B, 2M], or null
  double* wide;        // [T, B, 2M], delta in float64, or null
  double* table_sums;  // [chunks, D, 2, R], or null; must be zero on entry
  double* sums;        // [chunks, 2, R], or, of pairs, [chunks, 4, B, P]

  ORTHOKERN_FIELDS_OF(sizes, dtype, device, stream, T, B, M, chunk, first, re, im, lengths);
  template <class Visit>
  void forward(Visit& visit) {
    sizes(visit);
    ORTHOKERN_FIELDS(visit, D, id_bytes, x, ids, table, state, z, end);
  }
  template <class Visit>
  void backward(Visit& visit) {
    sizes(visit);
    ORTHOKERN_FIELDS(visit, D, id_bytes, ids, state, g, states, before, delta, wide, table_sums, sums, end);
  }
  template <class Visit>
  void pairwise(Visit& visit) {
    sizes(visit);
    ORTHOKERN_FIELDS(visit, P, state, g, states, before, pairs, sums);
  }
};

struct ModalJoinArgs {
  int device;
  void* stream;
  int64_t lanes, M, chunks;
  int squarings,
      backward;      // log2 of the steps of a chunk; whether to run from the last chunk to the first, with conj(lambda)
  const double* re;  // [M]
  const double* im;  // [M]
  const double* entering;  // [2, lanes], initial state of the first chunk
  const double* end;       // [chunks, 2, lanes]
  double* state;           // [chunks, 2, lanes]

  ORTHOKERN_FIELDS_OF(fields, device, stream, lanes, M, chunks, squarings, backward, re, im, entering, end, state);
};

struct ModalLossArgs {
  int dtype, device;
  void* stream;
  int64_t T, B, C;
  int64_t first;
  int target_bytes, grad;
  void* logits;            // T [T * B, C] without the bias; with grad, overwritten by dL/dlogits
  const void* bias;        // T [C], or null
  const void* target;      // [T, B]
  const double* scale;     // [1]
  const int64_t* lengths;  // [B], or null
  double* loss;            // [T * B], zeros on padding
  int32_t* right;          // [T * B]

  ORTHOKERN_FIELDS_OF(fields, dtype, device, stream, T, B, C, first, target_bytes, grad, logits, bias, target, scale,
                      lengths, loss, right);
};

void modal_forward(const ModalArgs& args);
void modal_backward(const ModalArgs& args);
void modal_pairs(const ModalArgs& args);
void modal_join(const ModalJoinArgs& args);
void modal_loss(const ModalLossArgs& args);

}  // namespace orthokern::cuda
