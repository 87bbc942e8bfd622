// orthokern._C: the bindings of the native kernels.
//
// Every function takes addresses as integers and sizes, and no torch type: one build works with every torch version.
// The only caller is orthokern/cpu/_call.py, which has checked dtype, contiguity and device. The GIL is released while
// a kernel runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <string.h>

#include <new>
#include <string>

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

// The function `name` reads the arguments that `fields` lists and runs a kernel of the selected instruction set.
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

#define ORTHOKERN_BIND(name, Args, fields) bind(m, #name, &CpuKernels::name, &Args::fields<Arguments>)
  ORTHOKERN_CPU_KERNELS(ORTHOKERN_BIND);
#undef ORTHOKERN_BIND
#ifdef ORTHOKERN_HAVE_CUDA
  py::module_ cuda = m.def_submodule("cuda", "The CUDA kernels. Called through orthokern.cuda._call only.");
  cuda::bind(cuda);
#endif
}
