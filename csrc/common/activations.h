// The activations and their derivatives, once for the CPU (V a vector of lanes) and for the GPU (V a scalar).
//
//   name       phi(a)                            phi'(a), as backward sees it          gradient of its parameter p
//   identity   a                                 1
//   tanh       tanh(a)                           1 - h^2
//   relu       max(a, 0)                         1 if h > 0
//   prelu      max(a, 0) + p min(a, 0)           1 if a > 0 else p                     g min(a, 0)
//   modrelu    sign(a) max(|a| + p, 0)           1 if h != 0                           g sign(h)
//   oplu       pairs (a, b) -> (max, min)        the same exchange of the pair
//
// h is the output, a the input: relu, tanh and modrelu need the output alone; prelu and oplu need the input ("pre").
// Every phi maps 0 to 0, which is why padding may be anything's neighbour. OPLU works across lanes and lives with the vectors.
#pragma once

#if defined(__CUDACC__)
#define ORTHOKERN_HD __host__ __device__ __forceinline__
#else
#define ORTHOKERN_HD inline __attribute__((always_inline))
#endif

namespace orthokern {

enum Activation { kIdentity = 0, kTanh = 1, kRelu = 2, kPrelu = 3, kModrelu = 4, kOplu = 5 };

ORTHOKERN_HD constexpr bool needs_pre(int activation) { return activation == kPrelu || activation == kOplu; }

namespace act {

template <class V>
ORTHOKERN_HD V relu(V a, V zero) {
  return a < zero ? zero : a;  // in this order a NaN stays a NaN
}
template <class V>
ORTHOKERN_HD V relu_grad(V h, V g, V zero) {
  return h > zero ? g : zero;
}
template <class V>
ORTHOKERN_HD V prelu(V a, V slope, V zero) {
  return a > zero ? a : slope * a;
}
template <class V>
ORTHOKERN_HD V prelu_grad(V a, V g, V slope, V zero) {
  return a > zero ? g : slope * g;
}
template <class V>
ORTHOKERN_HD V prelu_slope_grad(V a, V g, V zero) {
  return a > zero ? zero : g * a;
}
template <class V>
ORTHOKERN_HD V modrelu(V a, V bias, V zero) {
  const V magnitude = (a < zero ? -a : a) + bias;
  const V h = a < zero ? -magnitude : magnitude;
  return magnitude <= zero ? zero : (a == zero ? zero : h);  // in this order a NaN stays a NaN
}
template <class V>
ORTHOKERN_HD V modrelu_grad(V h, V g, V zero) {
  return h == zero ? zero : g;
}
template <class V>
ORTHOKERN_HD V modrelu_bias_grad(V h, V g, V zero) {
  return h > zero ? g : (h < zero ? -g : zero);
}
template <class V>
ORTHOKERN_HD V tanh_grad(V h, V g, V one) {
  return g * (one - h * h);
}

}  // namespace act
}  // namespace orthokern
