// Bindings of the scans, a part of bindings.h. `<op>_plan` gives the numbers of a ScanPlan as a dict; `<op>` takes them back among its own.
#pragma once

#include <pybind11/pybind11.h>

#include <limits>

#include "arguments.h"
#include "cuda/scan.h"

namespace orthokern {
namespace cuda {

inline ScanArgs scan_args(const pybind11::dict& d) {
  ScanArgs a{};
  a.device = static_cast<int>(number(d, "device"));
  a.T = number(d, "T"), a.B = number(d, "B"), a.N = number(d, "N"), a.K = number(d, "K"), a.D = number(d, "D");
  a.chunk = number(d, "chunk"), a.sequences = number(d, "sequences"), a.time = number(d, "time");
  a.clip = d.contains("message_clip") ? d["message_clip"].cast<float>() : std::numeric_limits<float>::infinity();
  a.precision = static_cast<int>(number(d, "precision"));
  a.activation = activation_number(d);
  a.act_param_stride = static_cast<int>(number(d, "act_param_stride"));
  a.x = address<float>(d, "x");
  a.tokens = address<int64_t>(d, "tokens"), a.table = address<float>(d, "table");
  a.gate = address<float>(d, "gate");
  a.start = address<float>(d, "start");
  a.map1 = address<float>(d, "map1"), a.scale = address<float>(d, "scale"), a.map2 = address<float>(d, "map2");
  a.act_param = address<float>(d, "act_param"), a.lengths = address<int64_t>(d, "lengths");
  a.out = address<float>(d, "out"), a.pre = address<float>(d, "pre"), a.end = address<float>(d, "end");
  a.sums = address<float>(d, "sums"), a.norms = address<float>(d, "norms");
  a.packed1 = address<float>(d, "packed1"), a.packed2 = address<float>(d, "packed2"), a.work = address<float>(d, "work");
  return a;
}

template <class Visit>
void each_number(ScanPlan& p, Visit visit) {
  visit("path", p.path), visit("group", p.group), visit("blocks", p.blocks), visit("norm_columns", p.norm_columns);
  visit("sums_rows", p.sums_rows), visit("cluster", p.cluster), visit("chunks1", p.chunks1), visit("chunks2", p.chunks2);
  visit("shared_chunks", p.shared_chunks), visit("packed1_floats", p.packed1), visit("packed2_floats", p.packed2);
  visit("work_floats", p.work), visit("graph_steps", p.graph_steps), visit("shared_bytes", p.shared_bytes);
}

inline void bind_scan(pybind11::module_& m, const char* plan_name, const char* run_name,
                      ScanPlan (*plan)(const ScanArgs&, bool, const ScanWish&), void (*run)(const ScanArgs&, bool, const ScanPlan&, void*)) {
  m.def(plan_name, [plan](const pybind11::dict& d) {
    const ScanArgs args = scan_args(d);
    const bool backward = number(d, "backward");
    ScanWish wish;
    if (d.contains("wish_path")) wish.path = static_cast<int>(number(d, "wish_path"));
    if (d.contains("wish_shared_chunks")) wish.shared_chunks = static_cast<int>(number(d, "wish_shared_chunks"));
    if (d.contains("wish_graph_steps")) wish.graph_steps = static_cast<int>(number(d, "wish_graph_steps"));
    wish.cluster = static_cast<int>(number(d, "wish_cluster")), wish.group = static_cast<int>(number(d, "wish_group"));
    ScanPlan made;
    {
      pybind11::gil_scoped_release release;
      made = plan(args, backward, wish);
    }
    pybind11::dict result;
    each_number(made, [&](const char* key, auto value) { result[key] = value; });
    return result;
  });
  m.def(run_name, [run](const pybind11::dict& d) {
    const ScanArgs args = scan_args(d);
    const bool backward = number(d, "backward");
    ScanPlan plan{};
    each_number(plan, [&](const char* key, auto& value) { value = static_cast<std::decay_t<decltype(value)>>(number(d, key)); });
    void* const stream = address<void>(d, "stream");
    pybind11::gil_scoped_release release;
    run(args, backward, plan, stream);
  });
}

inline void bind_scans(pybind11::module_& m) {
  bind_scan(m, "factored_scan_plan", "factored_scan", plan_factored_scan, run_factored_scan);
  bind_scan(m, "dense_scan_plan", "dense_scan", plan_dense_scan, run_dense_scan);
  m.def("scan_carry", [](const pybind11::dict& d) {
    const int device = static_cast<int>(number(d, "device"));
    const double* const power = address<double>(d, "power");
    const float* const ends = address<float>(d, "ends");
    float* const starts = address<float>(d, "starts");
    const int64_t count = number(d, "count"), B = number(d, "B"), N = number(d, "N");
    void* const stream = address<void>(d, "stream");
    pybind11::gil_scoped_release release;
    run_scan_carry(device, power, ends, starts, count, B, N, stream);
  });
}

}  // namespace cuda
}  // namespace orthokern
