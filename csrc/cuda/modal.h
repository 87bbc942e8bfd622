// The arguments of the modal kernels: plain addresses and sizes, without torch and the CUDA headers.
#pragma once

#include <stdint.h>

#include "common/fields.h"

namespace orthokern::cuda {

// A span of T steps that begins with step `start` of a call. B batch, M modes, D token ids, chunks = ceil(T / chunk).
// Rows are contiguous. The element type X is float or double by `dtype`. Steps at or after lengths[b] are padding: they
// are not read, their input is zero, and z is zero there.
struct ModalArgs {
  int dtype, device;
  void* stream;
  int64_t T, B, M, D, chunk, start;
  int reverse;             // from the last step to the first, with the conjugate of lambda
  int wide;                // z is double
  const void* x;           // X [T, B, 2M]; null: rows of the table
  const int64_t* tokens;   // [T, B]; a wrong id gives NaN
  const void* table;       // X [D, 2M]
  const int64_t* lengths;  // [B], or null: no padding
  const uint8_t* resets;   // [T, B], steps whose previous state counts as zero, or null; not with tokens or lengths
  const uint8_t* chunk_resets;  // [chunks, B], with resets: chunks whose end does not depend on the chunk before
  const double* re;             // [M]
  const double* im;             // [M]
  const double* z0;             // [B, 2M], the state before the first step, or with reverse after the last one
  double* ends;                 // [chunks, B, 2M]: the last states of chunks; of several, from z0 or from zero
  double* states;               // [chunks, B, 2M]: the state after each chunk; null for one chunk
  void* z;                      // [T, B, 2M], as x, or double; null: only `ends` and `states`
  const void* h;                // X [T, B, 2M]: states of the forward scan, for `sums`; or null
  const double* h0;             // [B, 2M], the state before h
  double* sums;                 // [2, chunks, B, M]: conj(h_{t-1}) z_t, the sums over the steps of each chunk; with h

  ORTHOKERN_FIELDS_OF(fields, dtype, device, stream, T, B, M, D, chunk, start, reverse, wide, x, tokens, table, lengths,
                      resets, chunk_resets, re, im, z0, ends, states, z, h, h0, sums);
};

void modal_scan(const ModalArgs& args);

// The cross-entropy of logits times a factor, and its gradient; padding as above. A wrong target gives NaN.
struct ModalReadoutArgs {
  int dtype, device;
  void* stream;
  int64_t T, B, C, start;
  double scale;
  const double* count;     // [1], the factor is scale / count; null: scale
  void* logits;            // X [T, B, C]; becomes the gradient of the sum of the losses
  const int64_t* target;   // [T, B]
  const int64_t* lengths;  // [B], or null
  double* losses;          // [T, B]
  uint8_t* right;          // [T, B], whether the first of the largest logits is that of the target

  ORTHOKERN_FIELDS_OF(fields, dtype, device, stream, T, B, C, start, scale, count, logits, target, lengths, losses,
                      right);
};

void modal_readout(const ModalReadoutArgs& args);

}  // namespace orthokern::cuda
