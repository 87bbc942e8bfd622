// The bindings of the CUDA kernels, for csrc/bindings.cpp and for the host harness of the tests
// (tests/cuda_host/module.cpp).
//
// Every function takes a dict with the fields of a struct. The GIL is released while it launches.
#pragma once

#include <pybind11/pybind11.h>

#include "arguments.h"
#include "cuda/gru_scan.h"
#include "cuda/modal.h"
#include "cuda/ops.h"
#include "cuda/peephole_scan.h"
#include "cuda/scan.h"

namespace orthokern::cuda {

template <class Args>
void bind(pybind11::module_& m, const char* name, void (*launcher)(const Args&), void (Args::*fields)(Arguments&)) {
  m.def(name, [=](const pybind11::dict& given) {
    const Args args = read_arguments(name, given, fields);
    pybind11::gil_scoped_release release;
    launcher(args);
  });
}

// Writes the visited fields to a dict.
struct Results {
  pybind11::dict dict;
  template <class... T>
  void operator()(const char* names, const T&... fields) {
    ((dict[pybind11::handle(next_name(names))] = fields), ...);
  }
};

// `plan_name` plans a scan from sizes; `run_name` launches it as planned.
template <class Args, class Plan, class Overrides>
void bind_scan(pybind11::module_& m, const char* plan_name, const char* run_name,
               Plan (*plan)(const Args&, bool, const Overrides&), void (*run)(const Args&, bool, const Plan&, void*)) {
  m.def(plan_name, [=](const pybind11::dict& given) {
    Args args{};
    bool backward = false;
    Arguments arguments(plan_name, given);
    args.planned(arguments);
    ORTHOKERN_FIELDS(arguments, backward);
    const Overrides overrides = read_arguments(plan_name, arguments.take("overrides"),
                                               &Overrides::template fields<Arguments>, Arguments::kKeepsItsValue);
    arguments.done();
    Plan made;
    {
      pybind11::gil_scoped_release release;
      made = plan(args, backward, overrides);
    }
    Results results;
    made.fields(results);
    return results.dict;
  });
  m.def(run_name, [=](const pybind11::dict& given) {
    Args args{};
    bool backward = false;
    void* stream = nullptr;
    Arguments arguments(run_name, given);
    args.fields(arguments);
    ORTHOKERN_FIELDS(arguments, backward, stream);
    const Plan made = read_arguments(run_name, arguments.take("plan"), &Plan::template fields<Arguments>);
    arguments.done();
    pybind11::gil_scoped_release release;
    run(args, backward, made, stream);
  });
}

// Writes the arguments of a scan to device memory, for its kernels of single steps.
template <class Args>
void bind_store(pybind11::module_& m, const char* name, void (*store)(const Args&, void*, void*)) {
  m.def(name, [=](const pybind11::dict& given) {
    Args args{};
    void *stored = nullptr, *stream = nullptr;
    Arguments arguments(name, given);
    args.fields(arguments);
    ORTHOKERN_FIELDS(arguments, stored, stream);
    arguments.done();
    pybind11::gil_scoped_release release;
    store(args, stored, stream);
  });
}

inline void bind(pybind11::module_& m) {
  using Dict = const pybind11::dict&;
  bind_scan(m, "factored_scan_plan", "factored_scan", plan_factored_scan, run_factored_scan);
  bind_scan(m, "dense_scan_plan", "dense_scan", plan_dense_scan, run_dense_scan);
  bind_scan(m, "gru_scan_plan", "gru_scan", plan_gru_scan, run_gru_scan);
  bind_store(m, "scan_store", store_scan);
  bind_store(m, "gru_store", store_gru);
  bind_store(m, "peephole_store", store_peephole);
  bind(m, "scan_step", run_scan_step, &StepArgs::fields<Arguments>);
  bind(m, "gru_step", run_gru_step, &StepArgs::fields<Arguments>);
  bind(m, "peephole_step", run_peephole_step, &StepArgs::fields<Arguments>);
  bind(m, "scan_carry", run_scan_carry, &ScanCarryArgs::fields<Arguments>);
  bind(m, "modal_scan", modal_scan, &ModalArgs::fields<Arguments>);
  bind(m, "modal_readout", modal_readout, &ModalReadoutArgs::fields<Arguments>);
  bind(m, "cayley", cayley, &CayleyArgs::fields<Arguments>);
  m.def(
      "cayley_workspace",
      [](Dict given) {
        return cayley_workspace(read_arguments("cayley_workspace", given, &CayleyArgs::fields<Arguments>));
      },
      "Bytes.");
}

}  // namespace orthokern::cuda
