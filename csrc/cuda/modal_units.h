// The common part of the modal kernels: ids of any width, the end of a sequence, blocks of threads.
#pragma once

#include "cuda/launch.h"
#include "cuda/modal.h"
#include "cuda/ops.h"

namespace orthokern::cuda {

__device__ __forceinline__ int64_t load_id(const void* ids, int bytes, int64_t at) {
  switch (bytes) {
    case 1:
      return static_cast<const uint8_t*>(ids)[at];
    case 2:
      return static_cast<const int16_t*>(ids)[at];
    case 4:
      return static_cast<const int32_t*>(ids)[at];
    default:
      return static_cast<const int64_t*>(ids)[at];
  }
}

// The number of steps of sequence b from step `first` on. The values of lengths are not checked on the host: one out of
// range is clamped.
__device__ __forceinline__ int64_t steps_of(const int64_t* lengths, int64_t b, int64_t first, int64_t T) {
  if (lengths == nullptr) return T;
  const int64_t length = lengths[b];
  return length <= first ? 0 : length - first < T ? length - first : T;
}

__device__ __forceinline__ double not_a_number() { return __builtin_nan(""); }

// A grid of blocks of `threads` for `items`, along x.
inline dim3 blocks_for(int64_t items, int threads) {
  const int64_t blocks = (items + threads - 1) / threads;
  if (blocks > 0x7fffffff)
    throw Error("modal: more lanes and chunks of time than one launch of the cuda backend holds");
  return dim3(static_cast<unsigned>(blocks));
}

}  // namespace orthokern::cuda
