// Reads the arguments that Python passes to the native module: a dict with the fields of a struct, numbers and
// addresses. None is a null pointer.
#pragma once

#include <pybind11/pybind11.h>
#include <stdint.h>
#include <string.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/activations.h"
#include "common/fields.h"

namespace orthokern {

// Returns the first of the names in a literal, separated by ", ", as a Python string; `names` becomes the rest. The
// strings are cached by the address of the literal: creating all of them takes longer than a call of a few steps.
inline PyObject* next_name(const char*& names) {
  static auto& kept = *new std::unordered_map<const char*, std::pair<PyObject*, size_t>>;  // guarded by the GIL
  auto& [name, length] = kept[names];
  if (!name) {
    length = strcspn(names, ",");
    name = PyUnicode_InternFromString(std::string(names, length).c_str());
    if (!name) throw pybind11::error_already_set();
  }
  names += names[length] ? length + 2 : length;
  return name;
}

// Sets each visited field to the value of its name. Throws TypeError for a missing field and, in done(), for a key that
// is not a field.
class Arguments {
 public:
  enum Missing { kRefused, kKeepsItsValue };
  Arguments(const char* function, const pybind11::dict& given, Missing missing = kRefused)
      : function_(function), given_(given), missing_(missing) {
    names_.reserve(given.size());
  }

  // For ORTHOKERN_FIELDS: the names of the fields, separated by ", ".
  template <class... T>
  void operator()(const char* names, T&... fields) {
    (read(next_name(names), fields), ...);
  }

  // The value of a name; a null object if it is missing and not required.
  pybind11::object take(const char* name) { return take(next_name(name)); }
  pybind11::object take(PyObject* name) {
    if (PyObject* value = PyDict_GetItemWithError(given_.ptr(), name)) {
      names_.push_back(name);
      return pybind11::reinterpret_borrow<pybind11::object>(value);
    }
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    if (missing_ == kRefused) refuse("missing argument '" + text(name) + "'");
    return {};
  }

  void done() const {
    if (names_.size() == given_.size()) return;
    for (const auto& item : given_) {
      bool known = false;
      for (PyObject* name : names_) known = known || text(name) == text(item.first.ptr());
      if (!known) refuse("unknown argument '" + text(item.first.ptr()) + "'");
    }
  }

 private:
  static std::string text(PyObject* name) { return pybind11::str(name); }
  [[noreturn]] void refuse(const std::string& why) const {
    throw pybind11::type_error(std::string(function_) + ": " + why);
  }

  template <class T>
  void read(PyObject* name, T& field) {
    const pybind11::object value = take(name);
    if (!value) return;
    if constexpr (std::is_pointer_v<T>) {
      field = value.is_none() ? nullptr : reinterpret_cast<T>(value.cast<uintptr_t>());
    } else {
      field = value.cast<T>();
    }
    if constexpr (std::is_same_v<T, int>)  // the kernels rely on it being in their list
      if (!PyUnicode_CompareWithASCIIString(name, "activation") && !visit_activation(field, [](auto) {}))
        throw std::invalid_argument("unknown activation " + std::to_string(field));
  }
  template <class T>
  void read(PyObject* name, std::vector<T>& structs);

  const char* function_;
  const pybind11::dict given_;
  Missing missing_;
  std::vector<PyObject*> names_;
};

// Reads a struct from a dict; `fields` is the member function that lists the expected keys.
template <class Struct>
Struct read_arguments(const char* function, const pybind11::dict& given, void (Struct::*fields)(Arguments&),
                      Arguments::Missing missing = Arguments::kRefused) {
  Struct result{};
  Arguments arguments(function, given, missing);
  (result.*fields)(arguments);
  arguments.done();
  return result;
}

template <class T>
void Arguments::read(PyObject* name, std::vector<T>& structs) {
  const pybind11::object values = take(name);
  for (const pybind11::handle& value : values)
    structs.push_back(
        read_arguments(function_, pybind11::reinterpret_borrow<pybind11::dict>(value), &T::template fields<Arguments>));
}

}  // namespace orthokern
