// The arguments of the modal scan: plain addresses and sizes, without torch and the CUDA headers.
#pragma once

#include <stdint.h>

#include "common/fields.h"

namespace orthokern::cuda {

// B batch, T steps, M modes, chunks = ceil(T / chunk). Rows are contiguous.
struct ModalArgs {
  int dtype, device;
  void* stream;
  int64_t T, B, M, chunk;
  int reverse;       // from the last step to the first, with the conjugate of lambda
  int wide;          // z is double
  const void* x;     // [T, B, 2M], float or double by `dtype`
  const double* re;  // [M]
  const double* im;  // [M]
  const double* z0;  // [B, 2M], the state before the first step, or reverse after the last one
  double* ends;      // [chunks, B, 2M], workspace; null for one chunk
  double* states;    // [chunks, B, 2M], workspace; null for one chunk
  void* z;           // [T, B, 2M], as x, or double

  ORTHOKERN_FIELDS_OF(fields, dtype, device, stream, T, B, M, chunk, reverse, wide, x, re, im, z0, ends, states, z);
};

void modal_scan(const ModalArgs& args);

}  // namespace orthokern::cuda
