// The common part of the kernels of rotation_scan.cu and modal.cu.
#pragma once

#include "cuda/launch.h"
#include "cuda/modal.h"
#include "cuda/ops.h"

namespace orthokern::cuda {

constexpr int kModalThreads = 128;

// Steps of a span that are not padding.
__device__ __forceinline__ int64_t living(const int64_t* lengths, int64_t T, int64_t start, int64_t b) {
  if (!lengths || lengths[b] - start > T) return T;
  return lengths[b] > start ? lengths[b] - start : 0;
}

inline Launch over(int64_t blocks, void* stream) {
  if (blocks > 0x7fffffff) throw Error("modal: more rows, modes and chunks of time than one launch of cuda holds");
  return {dim3(static_cast<unsigned>(blocks)), dim3(kModalThreads), static_cast<cudaStream_t>(stream)};
}

}  // namespace orthokern::cuda
