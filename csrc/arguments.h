// How the native module reads what Python hands it: a dict with the fields of a struct, numbers and addresses. A null
// pointer is None.
#pragma once

#include <pybind11/pybind11.h>
#include <stdint.h>
#include <string.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common/activations.h"
#include "common/fields.h"

namespace orthokern {

// The first of names that ", " separates; `names` becomes the rest.
inline std::string next_name(const char*& names) {
  const char* const begin = names;
  const size_t length = strcspn(begin, ",");
  names += begin[length] ? length + 2 : length;
  return std::string(begin, length);
}

// Sets each field that it visits to the value under its name. TypeError for a missing field and, from done(), for a key
// that is no field.
class Arguments {
 public:
  enum Missing { kRefused, kKeepsItsValue };
  Arguments(const char* function, const pybind11::dict& given, Missing missing = kRefused)
      : function_(function), given_(given), missing_(missing) {}

  // For ORTHOKERN_FIELDS: the names of the fields, separated by ", ".
  template <class... T>
  void operator()(const char* names, T&... fields) {
    (read(next_name(names), fields), ...);
  }

  // The value under a name; a null object if it is missing and need not be there.
  pybind11::object take(const std::string& name) {
    names_.push_back(name);
    if (PyObject* value = PyDict_GetItemString(given_.ptr(), name.c_str()))
      return pybind11::reinterpret_borrow<pybind11::object>(value);
    if (missing_ == kRefused) refuse("missing argument '" + name + "'");
    names_.pop_back();
    return {};
  }

  void done() const {
    if (names_.size() == given_.size()) return;
    for (const auto& item : given_) {
      const auto key = item.first.cast<std::string>();
      bool known = false;
      for (const std::string& name : names_) known = known || name == key;
      if (!known) refuse("unknown argument '" + key + "'");
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw pybind11::type_error(std::string(function_) + ": " + why);
  }

  template <class T>
  void read(const std::string& name, T& field) {
    const pybind11::object value = take(name);
    if (!value) return;
    if constexpr (std::is_pointer_v<T>) {
      field = value.is_none() ? nullptr : reinterpret_cast<T>(value.cast<uintptr_t>());
    } else {
      field = value.cast<T>();
    }
    if constexpr (std::is_same_v<T, int>)  // the kernels rely on it to be in their list
      if (name == "activation" && !visit_activation(field, [](auto) {}))
        throw std::invalid_argument("unknown activation " + std::to_string(field));
  }
  template <class T>
  void read(const std::string& name, std::vector<T>& structs);

  const char* function_;
  const pybind11::dict given_;
  Missing missing_;
  std::vector<std::string> names_;
};

// A struct read out of a dict; `fields` is the member function that lists what is expected there.
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
void Arguments::read(const std::string& name, std::vector<T>& structs) {
  const pybind11::object values = take(name);
  for (const pybind11::handle& value : values)
    structs.push_back(
        read_arguments(function_, pybind11::reinterpret_borrow<pybind11::dict>(value), &T::template fields<Arguments>));
}

}  // namespace orthokern
