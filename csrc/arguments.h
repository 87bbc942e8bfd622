// How the native module reads what Python hands it: a dict of numbers and addresses. A key that is absent is 0 or null.
#pragma once

#include <pybind11/pybind11.h>

#include <stdint.h>

#include <stdexcept>
#include <string>

#include "common/activations.h"

namespace orthokern {

template <class T>
T* address(const pybind11::dict& d, const char* key) {
  return d.contains(key) ? reinterpret_cast<T*>(d[key].cast<uintptr_t>()) : nullptr;
}
inline int64_t number(const pybind11::dict& d, const char* key) { return d.contains(key) ? d[key].cast<int64_t>() : 0; }
// The number of an activation, which the kernels rely on to be in their list.
inline int activation_number(const pybind11::dict& d) {
  const int activation = static_cast<int>(number(d, "activation"));
  if (!visit_activation(activation, [](auto) {})) throw std::invalid_argument("unknown activation " + std::to_string(activation));
  return activation;
}

}  // namespace orthokern
