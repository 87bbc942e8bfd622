// What the bindings hand to the CUDA launchers: plain addresses and sizes, neither torch nor the CUDA headers. Contiguous, row-major, in the
// memory of one device; the element type is `dtype`. B batch, T time, N hidden, K rank, D input features or number of token ids.
//
// A launcher puts its kernels on the stream and returns; it never waits for the device. It throws cuda::Error (launch.h).
#pragma once

#include <stdint.h>

#include "common/activations.h"

namespace orthokern {
namespace cuda {

enum Dtype { kFloat32 = 0, kFloat64 = 1 };

}  // namespace cuda
}  // namespace orthokern
