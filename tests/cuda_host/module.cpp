// The CUDA launchers on the CPU, under the very bindings of orthokern._C, and what a test needs to steer the harness.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/bindings.h"
#include "cuda/launch.h"
#include "runtime.h"

namespace py = pybind11;

// Host threads launch two kernels on two devices with memory of sizes that go up and down. Returns how often a launch
// would have failed, since the limit of its kernel was below its size, and how often a limit was set.
static std::pair<int, int> race_for_shared_memory(int threads, int launches) {
  orthokern::cuda::SharedMemoryLimits limits;
  static const char kernels[2] = {};
  std::atomic<size_t> attribute[2][2] = {};
  std::atomic<int> failed = 0, set = 0;
  std::vector<std::thread> running;
  for (int t = 0; t < threads; t++)
    running.emplace_back([&, t] {
      for (int i = 0; i < launches; i++) {
        const size_t bytes = static_cast<size_t>(1 + (i * 7919 + t * 104729) % 50);
        const int device = i % 2, kernel = i / 2 % 2;
        limits.raise(device, kernels + kernel, bytes, [&](size_t to) { attribute[device][kernel] = to, set++; });
        std::this_thread::yield();
        if (attribute[device][kernel] < bytes) failed++;
      }
    });
  for (std::thread& thread : running) thread.join();
  return {failed, set};
}

void selftest(const std::string& name, uintptr_t in, uintptr_t out, int size, int variant);  // selftest.cu

PYBIND11_MODULE(orthokern_cuda_host, m) {
  orthokern::cuda::bind(m);

  m.def(
      "set_schedule",
      [](int order, unsigned seed) { cuda_host::set_schedule(static_cast<cuda_host::Order>(order), seed); },
      "Order of threads and clusters. 0: forward, 1: reverse, 2: random.");
  m.def(
      "set_chip",
      [](int major, int minor, int multiprocessors, size_t shared_per_block, size_t shared_per_multiprocessor,
         int largest_cluster, unsigned largest_grid_yz, int code) {
        cuda_host::chip = {
            major,           minor, multiprocessors, shared_per_block, shared_per_multiprocessor, largest_cluster,
            largest_grid_yz, code};
      },
      "The GPU that is pretended.", py::arg("major") = 9, py::arg("minor") = 0, py::arg("multiprocessors") = 132,
      py::arg("shared_per_block") = 227 << 10, py::arg("shared_per_multiprocessor") = 228 << 10,
      py::arg("largest_cluster") = 16, py::arg("largest_grid_yz") = 65535, py::arg("code") = 0);
  m.def("current_device", [] { return cuda_host::device; });
  m.def(
      "devices_used", [] { return std::exchange(cuda_host::devices_used, {}); },
      "The devices that calls have used since the last question.");
  m.def("selftest", selftest, "A kernel of selftest.cu.");
  m.def("race_for_shared_memory", race_for_shared_memory,
        "(launches that would have failed, limits that were set) of many host threads.");

  m.def("kernels_run", cuda_host::kernels_run, "Kernels that ran since the last question.");
}
