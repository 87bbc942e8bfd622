// The activations on vectors, chosen at compile time: forward, and the product with the derivative.
#pragma once

#include "common/activations.h"
#include "cpu/vmath.h"

namespace orthokern::ORTHOKERN_ISA {

// The vector functions that the formulas of common/activations.h call.
template <class T>
struct VectorMath {
  static ORTHOKERN_INLINE V<T> tanh(V<T> a) { return vtanh<T>(a); }
  static ORTHOKERN_INLINE V<T> divide(V<T> a, V<T> b) { return a / b; }
};

// phi(a); `param` holds the units' parameters.
template <class T, class A>
ORTHOKERN_INLINE V<T> activate(V<T> a, V<T> param) {
  if constexpr (A::pairs) return A::forward(a, swap_pairs<T>(a), ~even_lanes<T>());
  else return A::template forward<VectorMath<T>>(a, param);
}

// phi'(a) * g from `saved`, which is a if A needs its input, else the output. Adds the gradient of the parameter to
// *param_grad.
template <class T, class A>
ORTHOKERN_INLINE V<T> activate_grad(V<T> saved, V<T> g, V<T> param, V<T>* param_grad) {
  if constexpr (A::has_parameter) *param_grad += A::template parameter_grad<VectorMath<T>>(saved, g, param);
  if constexpr (A::pairs) return A::backward(saved, swap_pairs<T>(saved), g, swap_pairs<T>(g), ~even_lanes<T>());
  else return A::template backward<VectorMath<T>>(saved, g, param);
}

// (1 - leak) h + leak phi, exactly phi if leak is 1.
template <class T>
ORTHOKERN_INLINE V<T> leaky(V<T> h, V<T> phi, V<T> leak) {
  return (1 - leak) * h + leak * phi;
}

// The parameter of every unit, padded with zeros to whole vectors: [round_up(N, L)] from [1] or [N] (or zeros without a
// parameter).
template <class T>
inline bool expand_param(Scratch<T>* to, const T* param, int64_t size, int64_t N) {
  const int64_t padded = round_up(N, kLanes<T>);
  if (!to->allocate(padded)) return false;
  if (param)
    for (int64_t n = 0; n < N; n++) to->get()[n] = param[size == 1 ? 0 : n];
  return true;
}

// The gradient of the parameter, [1] or [N], from the gradients of_unit(n) of the units.
template <class T, class F>
inline void write_param_grad(T* to, int64_t size, int64_t N, const F& of_unit) {
  double whole = 0;
  for (int64_t n = 0; n < N; n++) {
    const double total = of_unit(n);
    if (size == 1) whole += total;
    else to[n] = static_cast<T>(total);
  }
  if (size == 1) to[0] = static_cast<T>(whole);
}

}  // namespace orthokern::ORTHOKERN_ISA
