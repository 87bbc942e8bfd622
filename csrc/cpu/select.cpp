// Selects once the instruction set whose kernels run on this machine, and the threads that they run on.
#include "cpu/select.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#if ORTHOKERN_HAVE_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "buffer.h"
#include "cpu/parallel.h"

namespace orthokern {

#define ORTHOKERN_DECLARE_KERNEL(name, Args, fields) bool name(const Args&)
#define ORTHOKERN_DECLARE(isa)                     \
  namespace isa {                                  \
  ORTHOKERN_CPU_KERNELS(ORTHOKERN_DECLARE_KERNEL); \
  }
#define ORTHOKERN_KERNEL(name, Args, fields) table.name = name
// The names are looked up in the namespace of the instruction set.
#define ORTHOKERN_TABLE(set)                 \
  [] {                                       \
    using namespace set;                     \
    CpuKernels table{};                      \
    table.isa = #set;                        \
    ORTHOKERN_CPU_KERNELS(ORTHOKERN_KERNEL); \
    return table;                            \
  }()

ORTHOKERN_DECLARE(baseline)
#if ORTHOKERN_HAVE_AVX2
ORTHOKERN_DECLARE(avx2)
#endif
#if ORTHOKERN_HAVE_AVX512
ORTHOKERN_DECLARE(avx512)
#endif

// Best first.
static const CpuKernels kTables[] = {
#if ORTHOKERN_HAVE_AVX512
    ORTHOKERN_TABLE(avx512),
#endif
#if ORTHOKERN_HAVE_AVX2
    ORTHOKERN_TABLE(avx2),
#endif
    ORTHOKERN_TABLE(baseline),
};

static bool machine_has(const char* isa) {
  if (strcmp(isa, "baseline") == 0) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (strcmp(isa, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (strcmp(isa, "avx512") == 0)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#endif
  return false;
}

static std::atomic<const CpuKernels*> current{nullptr};

const CpuKernels& cpu_kernels() {
  if (!current) {
    const char* wanted = getenv("ORTHOKERN_ISA");
    if (!wanted || !cpu_select(wanted)) cpu_select(nullptr);
  }
  return *current;
}

bool cpu_select(const char* isa) {
  for (const CpuKernels& table : kTables) {
    if ((isa && strcmp(isa, table.isa) != 0) || !machine_has(table.isa)) continue;
    current = &table;
    return true;
  }
  return false;
}

std::vector<const char*> cpu_isas() {
  std::vector<const char*> names;
  for (const CpuKernels& table : kTables)
    if (machine_has(table.isa)) names.push_back(table.isa);
  return names;
}

bool cpu_has_bf16() {
#if ORTHOKERN_HAVE_BF16
  return strcmp(cpu_kernels().isa, "avx512") == 0 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// The processor has AMX with bfloat16, and Linux grants its registers: their state is large, so a process asks first.
static bool grants_amx() {
#if ORTHOKERN_HAVE_AMX
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // of EDX in leaf 7
  constexpr long kRequest = 0x1023, kTileData = 18;       // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool cpu_has_amx() {
  static const bool granted = grants_amx();
  return granted && cpu_has_bf16();
}

namespace {

struct Run {
  void (*fn)(void*, int);
  void* context;
  int tasks;
  std::atomic<int> next{0};
};

void work(void* data) {
  Run& run = *static_cast<Run*>(data);
  for (int task; (task = run.next.fetch_add(1)) < run.tasks;) run.fn(run.context, task);
}

}  // namespace

void* large_scratch(size_t* bytes) {
  try {
    const BufferPool::Block block = BufferPool::scratch().take(*bytes);
    *bytes = block.bytes;
    return block.memory;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void free_large_scratch(void* memory, size_t bytes) { BufferPool::scratch().give({memory, bytes}); }

// torch has a pool of OpenMP threads that spin for a while after each of its operators. Other threads would compete
// with them for the cores. GOMP_parallel is the entry point of the same pool: the runtimes of GNU, LLVM and Intel all
// export it. It is looked up in the libraries that torch has loaded. Without it, plain threads are started.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
static Parallel find_parallel() {
  void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#if defined(__linux__)
  // torch's wheels for aarch64 do not make their runtime visible to other libraries.
  if (void* torch = found ? nullptr : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD))
    found = dlsym(torch, "GOMP_parallel");
#endif
  return reinterpret_cast<Parallel>(found);
}

void parallel_run(int tasks, void (*fn)(void* context, int task), void* context) {
  if (tasks <= 1) {
    if (tasks == 1) fn(context, 0);
    return;
  }
  static const Parallel parallel = find_parallel();
  Run run{fn, context, tasks};
  if (parallel) {
    parallel(work, &run, static_cast<unsigned>(tasks), 0);
    return;
  }
  std::vector<std::thread> threads;
  threads.reserve(tasks);
  try {
    for (int i = 1; i < tasks; i++) threads.emplace_back(work, &run);
  } catch (const std::system_error&) {  // no more threads: those that started, and this one, do all tasks
  }
  work(&run);
  for (std::thread& t : threads) t.join();
}

const char* parallel_pool() { return find_parallel() ? "openmp (shared with torch)" : "own threads"; }

}  // namespace orthokern
