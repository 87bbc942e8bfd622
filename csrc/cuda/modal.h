// The arguments of the modal kernel: plain addresses and sizes, without torch and the CUDA headers.
// orthokern/ops/modal/cuda.py has the sequence of launches of a call.
#pragma once

#include <stdint.h>

#include "common/fields.h"

namespace orthokern::cuda {

// B batch, T steps, M modes, chunks = ceil(T / chunk). Rows are contiguous.
struct ModalArgs {
  int dtype, device;
  void* stream;
  int64_t T, B, M, chunk;
  int reverse;          // from the last step to the first, with the conjugate of lambda
  int wide;             // z is double
  const void* x;        // [T, B, 2M], float or double by `dtype`
  const double* re;     // [M]
  const double* im;     // [M]
  const double* state;  // [chunks, B, 2M], the state before each chunk; null: zeros
  void* z;              // [T, B, 2M], as x, or double; or null
  double* end;          // [chunks, B, 2M], the state after each chunk, or null

  ORTHOKERN_FIELDS_OF(fields, dtype, device, stream, T, B, M, chunk, reverse, wide, x, re, im, state, z, end);
};

void modal_scan(const ModalArgs& args);

}  // namespace orthokern::cuda
