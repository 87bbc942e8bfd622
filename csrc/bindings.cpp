// orthokern._C: the bindings of the native kernels.
//
// Every function takes addresses as integers and sizes, and no torch type: one build works with every torch version.
// The only caller is orthokern/cpu/_call.py, which has checked dtype, contiguity and device. The GIL is released while
// a kernel runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <string.h>

#include <array>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "buffer.h"
#include "build_info.h"
#include "cpu/select.h"
#ifdef ORTHOKERN_HAVE_CUDA
#include "cuda/bindings.h"
#endif

namespace py = pybind11;
using namespace orthokern;

namespace {

// The function `name` reads its arguments, which `fields` lists, and runs a kernel of the instruction set in use.
template <class Args>
void bind(py::module_& m, const char* name, bool (*CpuKernels::*kernel)(const Args&),
          void (Args::*fields)(Arguments&)) {
  m.def(name, [=](const py::dict& given) {
    const Args args = read_arguments(name, given, fields);
    bool ok;
    {
      py::gil_scoped_release release;
      ok = (cpu_kernels().*kernel)(args);
    }
    if (!ok) throw std::bad_alloc();
  });
}

// A kernel's call whose arguments are read once, but for some addresses. It runs only while the bytes that other
// arguments were made of are what they were.
template <class Args>
class Prepared {
 public:
  using Kernel = bool (*CpuKernels::*)(const Args&);
  Prepared(const char* name, Kernel kernel, void (Args::*fields)(Arguments&), const py::dict& given,
           const std::vector<std::string>& varying, std::vector<std::array<uintptr_t, 3>> sources)
      : kernel_(kernel), sources_(std::move(sources)) {
    Arguments::Places places;
    Arguments arguments(name, given, Arguments::kRefused, &places);
    (args_.*fields)(arguments);
    arguments.done();
    for (const std::string& wanted : varying) {
      size_t i = 0;
      while (i < places.size() && PyUnicode_CompareWithASCIIString(places[i].first, wanted.c_str())) i++;
      if (i == places.size()) throw py::type_error(std::string(name) + ": unknown address '" + wanted + "'");
      varying_.push_back(places[i].second);
    }
  }
  Prepared(const Prepared&) = delete;  // varying_ points into args_

  // Whether it ran.
  bool run(int threads, const py::args& addresses) {
    if (addresses.size() != varying_.size()) throw py::type_error("a prepared call is given other addresses");
    for (size_t i = 0; i < varying_.size(); i++) *varying_[i] = addresses[i].cast<uintptr_t>();
    args_.threads = threads;
    const Args args = args_;  // another thread may come in as soon as the GIL is released
    bool ok, same = true;
    {
      py::gil_scoped_release release;
      for (const auto& [now, before, bytes] : sources_)
        same = same && memcmp(reinterpret_cast<const void*>(now), reinterpret_cast<const void*>(before), bytes) == 0;
      ok = !same || (cpu_kernels().*kernel_)(args);
    }
    if (!ok) throw std::bad_alloc();
    return same;
  }

 private:
  Args args_{};
  Kernel kernel_;
  std::vector<uintptr_t*> varying_;
  std::vector<std::array<uintptr_t, 3>> sources_;  // where the bytes are, where a copy is, how many
};

// The function `prepare_<name>` makes such a call of the kernel `name`.
template <class Args>
void bind_prepared(py::module_& m, const char* name, typename Prepared<Args>::Kernel kernel,
                   void (Args::*fields)(Arguments&)) {
  m.def((std::string("prepare_") + name).c_str(), [=](const py::dict& given, const std::vector<std::string>& varying,
                                                      std::vector<std::array<uintptr_t, 3>> sources) {
    return std::make_unique<Prepared<Args>>(name, kernel, fields, given, varying, std::move(sources));
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native kernels of orthokern. Called through orthokern.cpu._call only.";

  m.def("build_info", [] { return std::string(ORTHOKERN_BUILD_INFO); }, "How this module was built, as JSON.");
  m.def("isa", [] { return std::string(cpu_kernels().isa); }, "The instruction set whose kernels run.");
  m.def(
      "isas",
      [] {
        py::list names;
        for (const char* name : cpu_isas()) names.append(name);
        return names;
      },
      "The instruction sets that were built and that this machine can run, best first.");
  m.def(
      "select_isa", [](const std::string& name) { return cpu_select(name.empty() ? nullptr : name.c_str()); },
      "Select one of isas() (\"\": the best). False if it is not available.");
  m.def("has_bf16", cpu_has_bf16, "Whether those kernels have products with bfloat16 factors here.");
  m.def("has_amx", cpu_has_amx, "Whether those products run in the tile registers of AMX.");
  m.def("thread_pool", [] { return std::string(parallel_pool()); }, "Where the threads come from.");

  m.def(
      "activations",
      [] {
        const char* const reads[] = {"nothing", "output", "input"};  // in the order of act::Reads
        py::dict rows;
#define ORTHOKERN_ROW(A)                \
  rows[py::int_(int{act::A::number})] = \
      py::make_tuple(reads[act::A::reads], bool{act::A::has_parameter}, bool{act::A::pairs});
        ORTHOKERN_ACTIVATIONS(ORTHOKERN_ROW)
#undef ORTHOKERN_ROW
        return rows;
      },
      "The activations of the kernels: number -> (what backward reads, whether it has a parameter, whether it works on "
      "pairs).");

  py::class_<Buffer>(m, "Buffer", py::buffer_protocol(), "Uninitialized memory from the pool of large results.")
      .def(py::init<size_t>(), py::arg("bytes"))
      .def_buffer([](Buffer& b) {
        return py::buffer_info(static_cast<uint8_t*>(b.memory()), static_cast<py::ssize_t>(b.bytes()));
      });
  m.def(
      "empty_cache",
      [] {
        BufferPool::results().release();
        BufferPool::scratch().release();
      },
      "Return unused memory to the system.");
  m.def(
      "cache_bytes",
      [] { return py::make_tuple(BufferPool::results().live_bytes(), BufferPool::results().waiting_bytes()); },
      "Bytes of results in use and waiting.");

  m.def(
      "same_bytes",
      [](uintptr_t a, uintptr_t b, size_t bytes) {
        return memcmp(reinterpret_cast<const void*>(a), reinterpret_cast<const void*>(b), bytes) == 0;
      },
      "Whether the bytes at two addresses are the same.");

  py::class_<Prepared<ScanArgs>>(m, "PreparedScan").def("run", &Prepared<ScanArgs>::run);
  py::class_<Prepared<GruArgs>>(m, "PreparedGru").def("run", &Prepared<GruArgs>::run);
  py::class_<Prepared<ExponentialArgs>>(m, "PreparedExponential").def("run", &Prepared<ExponentialArgs>::run);
  bind_prepared(m, "factored_scan_fwd", &CpuKernels::factored_scan_fwd, &ScanArgs::forward<Arguments>);
  bind_prepared(m, "dense_scan_fwd", &CpuKernels::dense_scan_fwd, &ScanArgs::forward<Arguments>);
  bind_prepared(m, "gru_scan_fwd", &CpuKernels::gru_scan_fwd, &GruArgs::forward<Arguments>);
  bind_prepared(m, "scan_steps_bwd", &CpuKernels::scan_steps_bwd, &ScanArgs::steps<Arguments>);
  bind_prepared(m, "gru_steps_bwd", &CpuKernels::gru_steps_bwd, &GruArgs::steps<Arguments>);
  bind_prepared(m, "exponential_steps_bwd", &CpuKernels::exponential_steps_bwd, &ExponentialArgs::fields<Arguments>);

#define ORTHOKERN_BIND(name, Args, fields) bind(m, #name, &CpuKernels::name, &Args::fields<Arguments>);
  ORTHOKERN_CPU_KERNELS(ORTHOKERN_BIND)
#undef ORTHOKERN_BIND
#ifdef ORTHOKERN_HAVE_CUDA
  py::module_ cuda = m.def_submodule("cuda", "The CUDA kernels. Called through orthokern.cuda._call only.");
  cuda::bind(cuda);
#endif
}
