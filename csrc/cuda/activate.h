// The activations on the GPU, one unit at a time: the counterpart of cpu/activate.h.
#pragma once

#include <math.h>

#include "common/activations.h"
#include "cuda/launch.h"

namespace orthokern::cuda {

// The scalar operations that the formulas of common/activations.h need.
struct ScalarMath {
  static ORTHOKERN_HD float tanh(float a) { return ::tanhf(a); }
  // The approximate hardware division followed by one Newton step is bit-identical to an IEEE division for nearly all
  // numbers, without its branch and function call. The hardware division gives 0 for b > 2^126; the result is then 1
  // with the sign of a. a may be infinite or NaN.
  static ORTHOKERN_HD float divide(float a, float b) {
#ifdef __CUDA_ARCH__
    const float quotient = __fdividef(a, b);
    const float corrected = fmaf(fmaf(-quotient, b, a), __fdividef(1.f, b), quotient);
    return b > 0x1p126f ? copysignf(1.f, a) + (a - a) : corrected;
#else
    return a / b;
#endif
  }
};

// 1 / (1 + e^{-x}) with a small relative error; propagates NaN. The hardware reciprocal has no branch and no function
// call. It gives 0 below 2^-126.
__device__ __forceinline__ float sigmoid(float x) {
#ifdef __CUDA_ARCH__
  return __fdividef(1.f, 1.f + expf(-x));
#else
  return 1.f / (1.f + expf(-x));
#endif
}

// phi(a). `other` is the input of the other unit of the pair, read if A works on pairs; `second`: whether this is the
// second unit.
template <class A, class V>
__device__ __forceinline__ V activate(V a, V other, bool second, V parameter) {
  if constexpr (A::pairs) return A::forward(a, other, second);
  else return A::template forward<ScalarMath>(a, parameter);
}

// phi'(.) * g. `saved` is a if A reads its input, else h.
template <class A, class V>
__device__ __forceinline__ V activate_grad(V g, V saved, V other_g, V other_saved, bool second, V parameter) {
  if constexpr (A::pairs) return A::backward(saved, other_saved, g, other_g, second);
  else return A::template backward<ScalarMath>(saved, g, parameter);
}

// The contribution of one element to the gradient of the parameter; 0 without a parameter.
template <class A, class V>
__device__ __forceinline__ V parameter_grad(V g, V saved, V parameter) {
  if constexpr (A::has_parameter) return A::template parameter_grad<ScalarMath>(saved, g, parameter);
  else return V{};
}

}  // namespace orthokern::cuda
