// The table of contents of the CUDA kernels, for csrc/bindings.cpp and for the host harness of the tests (tests/cuda_host/module.cpp).
//
// Every function takes a dict with the tensors' addresses, the sizes, `device` and `stream`. The GIL is released while it launches.
#pragma once

#include <pybind11/pybind11.h>

#include "arguments.h"
#include "cuda/ops.h"
#include "cuda/scan_bindings.h"

namespace orthokern {
namespace cuda {

template <class Args>
void run(void (*launcher)(const Args&), const Args& args) {
  pybind11::gil_scoped_release release;
  launcher(args);
}

inline void bind(pybind11::module_& m) { bind_scans(m); }

}  // namespace cuda
}  // namespace orthokern
