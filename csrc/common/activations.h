// The activations: one struct each, and the list from which every switch over them is generated.
// orthokern/_activations.py has the same rows.
//
//   name       phi(a)                            phi'(a), as used in the backward      gradient of its parameter p
//   identity   a                                 1
//   tanh       tanh(a)                           1 - h^2
//   relu       max(a, 0)                         0 if h <= 0, else 1
//   prelu      max(a, 0) + p min(a, 0)           1 if a > 0 else p                     g min(a, 0)
//   modrelu    sign(a) max(|a| + p, 0)           1 if h != 0                           g sign(h)
//   oplu       pairs (a, b) -> (max, min)        the same permutation of the pair
//   softsign   a / (1 + |a|)                     (1 - |h|)^2
//
// h is the output, a the input, g the gradient of h. Every phi maps 0 to 0, so that the padding of a vector or a tile
// stays zero. Every comparison is written so that phi(NaN) is NaN, and phi' of a unit that is NaN is not 0, as in torch.
//
// A struct derives from Traits and has
//   forward<M>(a, p)            phi(a)
//   backward<M>(saved, g, p)    phi'(a) g; `saved` is a if the struct reads kInput, else h
//   parameter_grad<M>(saved, g, p)  with a parameter: the contribution of one element to the gradient of p
// or, for pairs of units, forward and backward with both members of the pair as arguments. V is a vector of lanes on
// the CPU and a scalar on the GPU; M::tanh is tanh of a V, and M::divide(a, b) is a / b for |a| < b. An integer literal
// means its value in every lane.
#pragma once

#if defined(__CUDACC__)
#define ORTHOKERN_HD __host__ __device__ __forceinline__
#else
#define ORTHOKERN_HD inline __attribute__((always_inline))
#endif

namespace orthokern {
namespace act {

enum Reads { kNothing, kOutput, kInput };  // the argument from which the backward computes phi'

template <int kNumber, Reads kReads, bool kParameter = false, bool kPairs = false>
struct Traits {
  static constexpr int number = kNumber;
  static constexpr Reads reads = kReads;
  static constexpr bool needs_input = kReads == kInput, has_parameter = kParameter, pairs = kPairs;
};

struct Identity : Traits<0, kNothing> {
  template <class M, class V>
  static ORTHOKERN_HD V forward(V a, V) {
    return a;
  }
  template <class M, class V>
  static ORTHOKERN_HD V backward(V, V g, V) {
    return g;
  }
};

struct Tanh : Traits<1, kOutput> {
  template <class M, class V>
  static ORTHOKERN_HD V forward(V a, V) {
    return M::tanh(a);
  }
  template <class M, class V>
  static ORTHOKERN_HD V backward(V h, V g, V) {
    return g * (1 - h * h);
  }
};

struct Relu : Traits<2, kOutput> {
  template <class M, class V>
  static ORTHOKERN_HD V forward(V a, V) {
    return a < V{} ? V{} : a;  // this order of the operands propagates NaN
  }
  template <class M, class V>
  static ORTHOKERN_HD V backward(V h, V g, V) {
    return h <= V{} ? V{} : g;
  }
};

struct Prelu : Traits<3, kInput, true> {  // also leaky_relu
  template <class M, class V>
  static ORTHOKERN_HD V forward(V a, V slope) {
    return a > V{} ? a : slope * a;
  }
  template <class M, class V>
  static ORTHOKERN_HD V backward(V a, V g, V slope) {
    return a > V{} ? g : slope * g;
  }
  template <class M, class V>
  static ORTHOKERN_HD V parameter_grad(V a, V g, V) {
    return a > V{} ? V{} : g * a;
  }
};

struct Modrelu : Traits<4, kOutput, true> {
  template <class M, class V>
  static ORTHOKERN_HD V forward(V a, V bias) {
    const V zero{}, magnitude = (a < zero ? -a : a) + bias;
    const V h = a < zero ? -magnitude : magnitude;
    return magnitude <= zero ? zero : (a == zero ? zero : h);  // this order of the operands propagates NaN
  }
  template <class M, class V>
  static ORTHOKERN_HD V backward(V h, V g, V) {
    return h == V{} ? V{} : g;
  }
  template <class M, class V>
  static ORTHOKERN_HD V parameter_grad(V h, V g, V) {
    return h < V{} ? -g : (h == V{} ? V{} : g);
  }
};

struct Oplu : Traits<5, kInput, false, true> {
  // `other` is the other member of the pair; `second`: whether this is the second one. A tie is not exchanged.
  template <class V, class Mask>
  static ORTHOKERN_HD V forward(V a, V other, Mask second) {
    return (second ? other < a : a < other) ? other : a;
  }
  template <class V, class Mask>
  static ORTHOKERN_HD V backward(V a, V other_a, V g, V other_g, Mask second) {
    return (second ? other_a < a : a < other_a) ? other_g : g;
  }
};

struct Softsign : Traits<6, kOutput> {
  template <class M, class V>
  static ORTHOKERN_HD V forward(V a, V) {
    return M::divide(a, 1 + (a < V{} ? -a : a));
  }
  template <class M, class V>
  static ORTHOKERN_HD V backward(V h, V g, V) {
    const V left = 1 - (h < V{} ? -h : h);
    return g * left * left;
  }
};

}  // namespace act

#define ORTHOKERN_ACTIVATIONS(X) X(Identity) X(Tanh) X(Relu) X(Prelu) X(Modrelu) X(Oplu) X(Softsign)

// Calls f(A{}) for the activation A with this number. Returns false, without a call, if there is none.
template <class F>
inline bool visit_activation(int number, F&& f) {
  switch (number) {
#define ORTHOKERN_CASE(A) \
  case act::A::number:    \
    f(act::A{});          \
    return true;
    ORTHOKERN_ACTIVATIONS(ORTHOKERN_CASE)
#undef ORTHOKERN_CASE
  }
  return false;
}

// Whether the activation with this number works on pairs of units.
ORTHOKERN_HD constexpr bool on_pairs(int number) {
#define ORTHOKERN_TERM(A) || (act::A::pairs && number == act::A::number)
  return false ORTHOKERN_ACTIVATIONS(ORTHOKERN_TERM);
#undef ORTHOKERN_TERM
}

// Which argument its backward reads, and whether it has a parameter.
ORTHOKERN_HD constexpr act::Reads reads_of(int number) {
#define ORTHOKERN_TERM(A) number == act::A::number ? act::A::reads:
  return ORTHOKERN_ACTIVATIONS(ORTHOKERN_TERM) act::kNothing;
#undef ORTHOKERN_TERM
}
ORTHOKERN_HD constexpr bool has_parameter(int number) {
#define ORTHOKERN_TERM(A) || (act::A::has_parameter && number == act::A::number)
  return false ORTHOKERN_ACTIVATIONS(ORTHOKERN_TERM);
#undef ORTHOKERN_TERM
}

}  // namespace orthokern
