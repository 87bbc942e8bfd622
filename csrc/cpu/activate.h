// The activations on vectors, chosen at compile time: forward, and the product with the derivative.
#pragma once

#include "common/activations.h"
#include "cpu/vmath.h"

namespace orthokern {
namespace ORTHOKERN_ISA {

// Lanes of a whose pair OPLU exchanges, b being the other of each pair: the first (even lane) is the smaller. A tie stays in place.
template <class T>
ORTHOKERN_INLINE typename Vec<T>::I oplu_exchanges(V<T> a, V<T> b) {
  return even_lanes<T>() ? (a < b) : (b < a);
}

// phi(a); `param` holds the units' slopes or biases.
template <class T, int A>
ORTHOKERN_INLINE V<T> activate(V<T> a, V<T> param) {
  const V<T> zero = V<T>{};
  if (A == kTanh) return vtanh<T>(a);
  if (A == kRelu) return act::relu(a, zero);
  if (A == kPrelu) return act::prelu(a, param, zero);
  if (A == kModrelu) return act::modrelu(a, param, zero);
  if (A == kOplu) {
    const V<T> b = swap_pairs<T>(a);
    return oplu_exchanges<T>(a, b) ? b : a;
  }
  (void)param;
  return a;
}

// phi'(a) * g from the output h and, for prelu and oplu, the input a; adds to *param_grad what the parameter gets.
template <class T, int A>
ORTHOKERN_INLINE V<T> activate_grad(V<T> h, V<T> a, V<T> g, V<T> param, V<T>* param_grad) {
  const V<T> zero = V<T>{};
  if (A == kTanh) return act::tanh_grad(h, g, splat<T>(1));
  if (A == kRelu) return act::relu_grad(h, g, zero);
  if (A == kPrelu) {
    *param_grad += act::prelu_slope_grad(a, g, zero);
    return act::prelu_grad(a, g, param, zero);
  }
  if (A == kModrelu) {
    *param_grad += act::modrelu_bias_grad(h, g, zero);
    return act::modrelu_grad(h, g, zero);
  }
  if (A == kOplu) {
    return oplu_exchanges<T>(a, swap_pairs<T>(a)) ? swap_pairs<T>(g) : g;
  }
  (void)h, (void)a, (void)param, (void)param_grad;
  return g;
}

// The parameter of every unit, padded with zeros to whole vectors: [round_up(N, L)] from [1] or [N] (or zeros without a parameter).
template <class T>
inline bool expand_param(Scratch<T>* to, const T* param, int64_t size, int64_t N) {
  const int64_t padded = (N + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  if (!to->allocate(padded)) return false;
  if (param)
    for (int64_t n = 0; n < N; n++) to->get()[n] = param[size == 1 ? 0 : n];
  return true;
}

}  // namespace ORTHOKERN_ISA
}  // namespace orthokern

// Calls f<A>() for the activation of this number.
#define ORTHOKERN_DISPATCH_ACTIVATION(activation, call) \
  switch (activation) {                                 \
    case kTanh:                                         \
      call(kTanh);                                      \
      break;                                            \
    case kRelu:                                         \
      call(kRelu);                                      \
      break;                                            \
    case kPrelu:                                        \
      call(kPrelu);                                     \
      break;                                            \
    case kModrelu:                                      \
      call(kModrelu);                                   \
      break;                                            \
    case kOplu:                                         \
      call(kOplu);                                      \
      break;                                            \
    default:                                            \
      call(kIdentity);                                  \
  }
