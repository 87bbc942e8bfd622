// Argument structs name their fields once: `visit` is called with the names and the fields, see csrc/arguments.h.
#pragma once

#define ORTHOKERN_FIELDS(visit, ...) visit(#__VA_ARGS__, __VA_ARGS__)

// A member function that visits these fields.
#define ORTHOKERN_FIELDS_OF(function, ...) \
  template <class Visit>                   \
  void function(Visit& visit) {            \
    ORTHOKERN_FIELDS(visit, __VA_ARGS__);  \
  }
