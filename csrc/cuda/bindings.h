// The table of contents of the CUDA kernels, for csrc/bindings.cpp and for the host harness of the tests (tests/cuda_host/module.cpp).
//
// Every function takes a dict with the tensors' addresses, the sizes, `device` and `stream`. The GIL is released while it launches.
#pragma once

#include <pybind11/pybind11.h>

#include "arguments.h"
#include "cuda/gru_scan.h"
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
  a.dtype = static_cast<int>(number(d, "dtype")), a.activation = activation_number(d);
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
  a.dtype = static_cast<int>(number(d, "dtype"));
  a.device = static_cast<int>(number(d, "device")), a.stream = address<void>(d, "stream");
  a.workspace = address<void>(d, "workspace");
  for (const pybind11::handle& one : d["matrices"]) {
    const pybind11::dict of = pybind11::reinterpret_borrow<pybind11::dict>(one);
    CayleyMatrices some{};
    some.batch = number(of, "batch"), some.N = number(of, "N"), some.K = number(of, "K");
    some.m = address<void>(of, "m"), some.g = address<void>(of, "g"), some.out = address<void>(of, "out");
    some.lr = address<double>(of, "lr"), some.rate = of.contains("rate") ? of["rate"].cast<double>() : 0;
    a.matrices.push_back(some);
  }
  return a;
}

inline GruScanArgs gru_scan_args(const pybind11::dict& d) {
  GruScanArgs a{};
  a.device = static_cast<int>(number(d, "device"));
  a.T = number(d, "T"), a.B = number(d, "B"), a.N = number(d, "N");
  a.kanai = static_cast<int>(number(d, "kanai"));
  a.w = address<float>(d, "w"), a.h0 = address<float>(d, "h0"), a.lengths = address<int64_t>(d, "lengths");
  a.x = address<float>(d, "x"), a.bias = address<float>(d, "bias");
  a.hs = address<float>(d, "hs"), a.gates = address<float>(d, "gates"), a.pre = address<float>(d, "pre");
  a.grad_hs = address<float>(d, "grad_hs"), a.grad_x = address<float>(d, "grad_x"), a.factor = address<float>(d, "factor");
  a.grad_h0 = address<float>(d, "grad_h0"), a.norms = address<float>(d, "norms"), a.work = address<float>(d, "work");
  return a;
}

// `gru_scan_plan` gives the numbers of a GruPlan as a dict; `gru_scan` takes them back among its own.
inline void bind_gru_scan(pybind11::module_& m) {
  m.def("gru_scan_plan", [](const pybind11::dict& d) {
    GruWish wish;
    if (d.contains("wish_path")) wish.path = static_cast<int>(number(d, "wish_path"));
    if (d.contains("wish_graph_steps")) wish.graph_steps = static_cast<int>(number(d, "wish_graph_steps"));
    wish.group = static_cast<int>(number(d, "wish_group"));
    const GruPlan plan = plan_gru_scan(gru_scan_args(d), number(d, "backward"), wish);
    pybind11::dict result;
    result["path"] = plan.path, result["group"] = plan.group, result["blocks"] = plan.blocks, result["norm_columns"] = plan.norm_columns;
    result["work_floats"] = plan.work, result["shared_bytes"] = plan.shared_bytes, result["graph_steps"] = plan.graph_steps;
    return result;
  });
  m.def("gru_scan", [](const pybind11::dict& d) {
    const GruScanArgs args = gru_scan_args(d);
    GruPlan plan{};
    plan.path = static_cast<int>(number(d, "path")), plan.group = static_cast<int>(number(d, "group"));
    plan.blocks = static_cast<int>(number(d, "blocks")), plan.shared_bytes = number(d, "shared_bytes");
    plan.graph_steps = static_cast<int>(number(d, "graph_steps"));
    const bool backward = number(d, "backward");
    void* const stream = address<void>(d, "stream");
    pybind11::gil_scoped_release release;
    run_gru_scan(args, backward, plan, stream);
  });
}

inline void bind(pybind11::module_& m) {
  using Dict = const pybind11::dict&;
  bind_scans(m);
  bind_gru_scan(m);
  m.def("activation_fwd", [](Dict d) { run(activation_fwd, activation_args(d)); });
  m.def("activation_bwd", [](Dict d) { run(activation_bwd, activation_args(d)); });
  m.def("activation_workspace", [](Dict d) { return activation_workspace(activation_args(d)); }, "Bytes.");
  m.def("cayley", [](Dict d) { run(cayley, cayley_args(d)); });
  m.def("cayley_workspace", [](Dict d) { return cayley_workspace(cayley_args(d)); }, "Bytes.");
}

}  // namespace cuda
}  // namespace orthokern
