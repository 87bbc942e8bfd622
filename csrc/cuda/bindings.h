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

inline ActivationArgs activation_args(const pybind11::dict& d) {
  ActivationArgs a{};
  a.rows = number(d, "rows"), a.N = number(d, "N");
  a.dtype = static_cast<int>(number(d, "dtype")), a.activation = static_cast<int>(number(d, "activation"));
  a.device = static_cast<int>(number(d, "device")), a.stream = address<void>(d, "stream");
  a.x = address<void>(d, "x");
  a.act_param = address<void>(d, "act_param"), a.act_param_size = number(d, "act_param_size");
  a.y = address<void>(d, "y"), a.grad_y = address<void>(d, "grad_y");
  a.grad_x = address<void>(d, "grad_x"), a.grad_act_param = address<void>(d, "grad_act_param");
  a.workspace = address<void>(d, "workspace");
  return a;
}

inline CayleyArgs cayley_args(const pybind11::dict& d) {
  CayleyArgs a{};
  a.batch = number(d, "batch"), a.N = number(d, "N"), a.K = number(d, "K");
  a.dtype = static_cast<int>(number(d, "dtype"));
  a.device = static_cast<int>(number(d, "device")), a.stream = address<void>(d, "stream");
  a.m = address<void>(d, "m"), a.g = address<void>(d, "g");
  a.lr = address<double>(d, "lr"), a.rate = d.contains("rate") ? d["rate"].cast<double>() : 0;
  a.out = address<void>(d, "out"), a.workspace = address<void>(d, "workspace");
  return a;
}

inline void bind(pybind11::module_& m) {
  using Dict = const pybind11::dict&;
  bind_scans(m);
  m.def("activation_fwd", [](Dict d) { run(activation_fwd, activation_args(d)); });
  m.def("activation_bwd", [](Dict d) { run(activation_bwd, activation_args(d)); });
  m.def("activation_workspace", [](Dict d) { return activation_workspace(activation_args(d)); }, "Bytes.");
  m.def("cayley", [](Dict d) { run(cayley, cayley_args(d)); });
  m.def("cayley_workspace", [](Dict d) { return cayley_workspace(cayley_args(d)); }, "Bytes.");
}

}  // namespace cuda
}  // namespace orthokern
