// orthokern._C: the table of contents of the native kernels.
//
// Every function takes addresses as integers and sizes, and no torch type: one build serves every torch version. The only caller is
// orthokern/_native.py, which has checked dtype, shape, contiguity and device. The GIL is released while a kernel runs.
#include <pybind11/pybind11.h>

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

template <class Args>
void run(bool (*kernel)(const Args&), const Args& args) {
  bool ok;
  {
    py::gil_scoped_release release;
    ok = kernel(args);
  }
  if (!ok) throw std::bad_alloc();
}

ScanArgs scan_args(const py::dict& d) {
  ScanArgs a{};
  a.B = number(d, "B"), a.T = number(d, "T"), a.N = number(d, "N"), a.K = number(d, "K"), a.D = number(d, "D");
  a.dtype = static_cast<int>(number(d, "dtype"));
  a.activation = static_cast<int>(number(d, "activation"));
  a.threads = static_cast<int>(number(d, "threads"));
  a.checkpoint_every = number(d, "checkpoint_every");
  a.message_clip = d.contains("message_clip") ? d["message_clip"].cast<double>() : 0.0;
  a.lengths = address<int64_t>(d, "lengths");
  a.x = address<void>(d, "x");
  a.tokens = address<int64_t>(d, "tokens");
  a.u = address<void>(d, "u"), a.s = address<void>(d, "s"), a.v = address<void>(d, "v");
  a.h0 = address<void>(d, "h0");
  a.weight = address<void>(d, "weight"), a.bias = address<void>(d, "bias");
  a.act_param = address<void>(d, "act_param"), a.act_param_size = number(d, "act_param_size");
  a.hs = address<void>(d, "hs"), a.ckpt = address<void>(d, "ckpt"), a.pre = address<void>(d, "pre");
  a.grad_hs = address<void>(d, "grad_hs"), a.states = address<void>(d, "states"), a.saved_pre = address<void>(d, "saved_pre");
  a.grad_x = address<void>(d, "grad_x"), a.grad_map = address<void>(d, "grad_map"), a.grad_h0 = address<void>(d, "grad_h0");
  a.grad_weight = address<void>(d, "grad_weight"), a.grad_bias = address<void>(d, "grad_bias");
  a.grad_act_param = address<void>(d, "grad_act_param"), a.grad_norm = address<void>(d, "grad_norm");
  return a;
}

GruArgs gru_args(const py::dict& d) {
  GruArgs a{};
  a.B = number(d, "B"), a.T = number(d, "T"), a.N = number(d, "N");
  a.dtype = static_cast<int>(number(d, "dtype")), a.threads = static_cast<int>(number(d, "threads"));
  a.kanai = static_cast<int>(number(d, "kanai"));
  a.lengths = address<int64_t>(d, "lengths");
  a.w = address<void>(d, "w"), a.h0 = address<void>(d, "h0"), a.x = address<void>(d, "x"), a.bias = address<void>(d, "bias");
  a.hs = address<void>(d, "hs"), a.gates = address<void>(d, "gates"), a.pre = address<void>(d, "pre");
  a.grad_hs = address<void>(d, "grad_hs"), a.saved_hs = address<void>(d, "saved_hs");
  a.saved_gates = address<void>(d, "saved_gates"), a.saved_pre = address<void>(d, "saved_pre");
  a.grad_x = address<void>(d, "grad_x"), a.factor = address<void>(d, "factor");
  a.grad_h0 = address<void>(d, "grad_h0"), a.grad_norm = address<void>(d, "grad_norm");
  return a;
}

ActivationArgs activation_args(const py::dict& d) {
  ActivationArgs a{};
  a.rows = number(d, "rows"), a.N = number(d, "N");
  a.dtype = static_cast<int>(number(d, "dtype")), a.activation = static_cast<int>(number(d, "activation"));
  a.threads = static_cast<int>(number(d, "threads"));
  a.x = address<void>(d, "x");
  a.act_param = address<void>(d, "act_param"), a.act_param_size = number(d, "act_param_size");
  a.y = address<void>(d, "y"), a.grad_y = address<void>(d, "grad_y");
  a.grad_x = address<void>(d, "grad_x"), a.grad_act_param = address<void>(d, "grad_act_param");
  return a;
}

LinearCrossEntropyArgs linear_cross_entropy_args(const py::dict& d) {
  LinearCrossEntropyArgs a{};
  a.rows = number(d, "rows"), a.N = number(d, "N"), a.C = number(d, "C");
  a.dtype = static_cast<int>(number(d, "dtype")), a.threads = static_cast<int>(number(d, "threads"));
  a.mean = static_cast<int>(number(d, "mean"));
  a.hidden = address<void>(d, "hidden"), a.weight = address<void>(d, "weight"), a.bias = address<void>(d, "bias");
  a.target = address<int64_t>(d, "target");
  a.loss = address<void>(d, "loss");
  a.grad_hidden = address<void>(d, "grad_hidden"), a.grad_weight = address<void>(d, "grad_weight");
  a.grad_bias = address<void>(d, "grad_bias");
  return a;
}

ModalArgs modal_args(const py::dict& d) {
  ModalArgs a{};
  a.B = number(d, "B"), a.T = number(d, "T"), a.M = number(d, "M"), a.D = number(d, "D"), a.C = number(d, "C"), a.P = number(d, "P");
  a.dtype = static_cast<int>(number(d, "dtype")), a.threads = static_cast<int>(number(d, "threads"));
  a.need_grad = static_cast<int>(number(d, "need_grad"));
  a.scale = d.contains("scale") ? d["scale"].cast<double>() : 1.0;
  a.re = address<double>(d, "re"), a.im = address<double>(d, "im"), a.lengths = address<int64_t>(d, "lengths");
  a.x = address<void>(d, "x"), a.ids = address<void>(d, "ids"), a.id_bytes = number(d, "id_bytes");
  a.table = address<void>(d, "table"), a.z0 = address<void>(d, "z0"), a.pairs = address<int64_t>(d, "pairs");
  a.readout = address<void>(d, "readout"), a.bias = address<void>(d, "bias");
  a.target = address<void>(d, "target_ids"), a.target_bytes = number(d, "target_bytes");
  a.loss = address<void>(d, "loss"), a.hits = address<int64_t>(d, "hits");
  a.z = address<void>(d, "z"), a.grad_z = address<void>(d, "grad_z"), a.states = address<void>(d, "states");
  a.grad_x = address<void>(d, "grad_x"), a.grad_z0 = address<void>(d, "grad_z0"), a.grad_table = address<void>(d, "grad_table");
  a.grad_readout = address<void>(d, "grad_readout"), a.grad_bias = address<void>(d, "grad_bias");
  a.grad_re = address<double>(d, "grad_re"), a.grad_im = address<double>(d, "grad_im"), a.grad_pairs = address<double>(d, "grad_pairs");
  return a;
}

CayleyArgs cayley_args(const py::dict& d) {
  CayleyArgs a{};
  a.batch = number(d, "batch"), a.N = number(d, "N"), a.K = number(d, "K");
  a.dtype = static_cast<int>(number(d, "dtype")), a.threads = static_cast<int>(number(d, "threads"));
  a.m = address<void>(d, "m"), a.g = address<void>(d, "g"), a.lr = address<double>(d, "lr"), a.out = address<void>(d, "out");
  return a;
}

SpectralArgs spectral_args(const py::dict& d) {
  SpectralArgs a{};
  a.M = number(d, "M"), a.K = number(d, "K"), a.S = number(d, "S");
  a.dtype = static_cast<int>(number(d, "dtype")), a.threads = static_cast<int>(number(d, "threads"));
  a.w = address<void>(d, "w"), a.other = address<void>(d, "other"), a.out = address<void>(d, "out");
  a.a = address<void>(d, "a"), a.diagonal = address<void>(d, "diagonal"), a.definite = address<int64_t>(d, "definite");
  a.distance = address<double>(d, "distance"), a.v = address<double>(d, "v_rows"), a.image = address<double>(d, "image");
  return a;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native kernels of orthokern. Called through orthokern._native only.";

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
  m.def("select_isa", [](const std::string& name) { return cpu_select(name.empty() ? nullptr : name.c_str()); },
        "Choose among isas() (\"\": the best). False if it is not there.");
  m.def("thread_pool", [] { return std::string(parallel_pool()); }, "Where the threads come from.");

  py::class_<Buffer>(m, "Buffer", py::buffer_protocol(), "Uninitialised memory from the pool of large results.")
      .def(py::init<size_t>(), py::arg("bytes"))
      .def_buffer([](Buffer& b) { return py::buffer_info(static_cast<uint8_t*>(b.memory()), static_cast<py::ssize_t>(b.bytes())); });
  m.def(
      "empty_cache",
      [] {
        BufferPool::results().release();
        BufferPool::scratch().release();
      },
      "Give waiting memory back to the system.");
  m.def("cache_bytes", [] { return py::make_tuple(BufferPool::results().live_bytes(), BufferPool::results().waiting_bytes()); },
        "Bytes of results in use and waiting.");

  // One op, one stem: csrc/cpu/<op>.cpp.
  m.def("factored_scan_fwd", [](const py::dict& d) { run(cpu_kernels().factored_scan_fwd, scan_args(d)); });
  m.def("factored_scan_bwd", [](const py::dict& d) { run(cpu_kernels().factored_scan_bwd, scan_args(d)); });
  m.def("dense_scan_fwd", [](const py::dict& d) { run(cpu_kernels().dense_scan_fwd, scan_args(d)); });
  m.def("dense_scan_bwd", [](const py::dict& d) { run(cpu_kernels().dense_scan_bwd, scan_args(d)); });
  m.def("gru_scan_fwd", [](const py::dict& d) { run(cpu_kernels().gru_scan_fwd, gru_args(d)); });
  m.def("gru_scan_bwd", [](const py::dict& d) { run(cpu_kernels().gru_scan_bwd, gru_args(d)); });
  m.def("activation_fwd", [](const py::dict& d) { run(cpu_kernels().activation_fwd, activation_args(d)); });
  m.def("activation_bwd", [](const py::dict& d) { run(cpu_kernels().activation_bwd, activation_args(d)); });
  m.def("linear_cross_entropy_fwd", [](const py::dict& d) { run(cpu_kernels().linear_cross_entropy_fwd, linear_cross_entropy_args(d)); });
  m.def("modal_scan_fwd", [](const py::dict& d) { run(cpu_kernels().modal_scan_fwd, modal_args(d)); });
  m.def("modal_scan_bwd", [](const py::dict& d) { run(cpu_kernels().modal_scan_bwd, modal_args(d)); });
  m.def("modal_cross_entropy_fwd", [](const py::dict& d) { run(cpu_kernels().modal_cross_entropy_fwd, modal_args(d)); });
  m.def("cayley", [](const py::dict& d) { run(cpu_kernels().cayley, cayley_args(d)); });
  // What the spectral-norm projection is made of: csrc/cpu/spectral.cpp.
  m.def("gram", [](const py::dict& d) { run(cpu_kernels().gram, spectral_args(d)); });
  m.def("is_definite", [](const py::dict& d) { run(cpu_kernels().is_definite, spectral_args(d)); });
  m.def("distance", [](const py::dict& d) { run(cpu_kernels().distance, spectral_args(d)); });
  m.def("wide_product", [](const py::dict& d) { run(cpu_kernels().wide_product, spectral_args(d)); });
  m.def("subtract_product", [](const py::dict& d) { run(cpu_kernels().subtract_product, spectral_args(d)); });
#ifdef ORTHOKERN_HAVE_CUDA
  py::module_ cuda = m.def_submodule("cuda", "The CUDA kernels. Called through orthokern._native_cuda only.");
  cuda::bind(cuda);
#endif
}
