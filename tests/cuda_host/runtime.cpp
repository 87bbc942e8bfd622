// The scheduler of the host harness: fibers, barriers, shared memory with red zones. See runtime.h.
#include "runtime.h"

#include <setjmp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>

namespace cuda_host {
namespace {

Order order = kForward;
std::minstd_rand generator;

// -------------------------------------------------------------------------------------------------------------- fibers

// ucontext only gives a fiber its stack; switching with it would make a system call each time, so _setjmp and _longjmp
// do that.
struct Fiber {
  jmp_buf state;
  ucontext_t context;
  bool started = false;  // it waits at a point inside fiber_main
  bool busy = false;     // inside a kernel
};
constexpr size_t kStackBytes = 128 << 10, kPage = 4 << 10;
std::vector<Fiber*> fibers;  // kept between launches
jmp_buf scheduler;
void (*body)(void*);
void* body_argument;
std::string error;
bool in_fiber = false;
struct Failure {};  // thrown where no fiber runs: while the scheduler asks what a fiber waits for

void fiber_main(int index) {
  Fiber& fiber = *fibers[static_cast<size_t>(index)];
  for (;;) {
    body(body_argument);
    current->done = true;
    fiber.busy = false;
    if (!_setjmp(fiber.state)) _longjmp(scheduler, 1);
  }
}

void make_fiber(Fiber& fiber, size_t index) {
  if (!fiber.context.uc_stack.ss_sp) {
    char* stack = static_cast<char*>(
        mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(stack, kPage, PROT_NONE);  // what grows beyond its stack crashes instead of writing to a neighbour's
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack + kPage;
    fiber.context.uc_stack.ss_size = kStackBytes;
  }
  makecontext(&fiber.context, reinterpret_cast<void (*)()>(fiber_main), 1, static_cast<int>(index));
  fiber.started = fiber.busy = false;
}

void resume(size_t index) {
  Fiber& fiber = *fibers[index];
  current = &cluster->threads[index];
  threadIdx = current->index, blockIdx = current->block->index;
  current->ready = nullptr;
  if (!_setjmp(scheduler)) {
    fiber.busy = in_fiber = true;
    if (fiber.started) _longjmp(fiber.state, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
  in_fiber = false;
}

// ------------------------------------------------------------------------------------------------------- shared memory

bool asked_for_shared_memory = false;                // by the launch that runs
constexpr size_t kRedZone = 16 << 10, kAlign = 128;  // how far beyond its memory a kernel's write is noticed

size_t padded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
unsigned char* inside(std::vector<unsigned char>& memory) {
  return reinterpret_cast<unsigned char*>(padded(reinterpret_cast<uintptr_t>(memory.data()) + kRedZone));
}
void make_memory(std::vector<unsigned char>& memory, size_t bytes) {
  memory.resize(bytes + 2 * kRedZone + 2 * kAlign);
  poison(memory.data(), memory.size());
}
bool untouched(const unsigned char* from, const unsigned char* to, const unsigned char* phase) {
  const unsigned char* pattern = reinterpret_cast<const unsigned char*>(&kPoison);
  for (; from < to; from++)
    if (*from != pattern[static_cast<size_t>(from - phase) % 4]) return false;
  return true;
}
// Called when the last thread of a block has ended. From then on nobody may touch its memory, which is made all red
// zone.
void close_memory(std::vector<unsigned char>& memory, size_t bytes, const char* what) {
  const unsigned char *begin = memory.data(), *first = inside(memory);
  if (!untouched(begin, first, begin))
    error = std::string("a write in front of the block's ") + what + " shared memory";
  if (!untouched(first + bytes, begin + memory.size(), begin))
    error = std::string("a write behind the end of the block's ") + what + " shared memory";
  poison(memory.data(), memory.size());
}
void close_block(Block& block, size_t dynamic_bytes) {
  close_memory(block.dynamic_memory, dynamic_bytes, "dynamic");
  for (auto& [site, memory] : block.static_memory)
    close_memory(memory, memory.size() - 2 * kRedZone - 2 * kAlign, "static");
  if (!block.deliveries.empty()) error = "a block ended before an asynchronous copy or store to it was waited for";
}
void check_closed(const std::vector<unsigned char>& memory) {
  if (!untouched(memory.data(), memory.data() + memory.size(), memory.data()))
    error = "a write to the shared memory of a block that has ended";
}

std::string describe(const Site& site) {
  std::ostringstream text;
  const char* name = strrchr(site.file ? site.file : "", '/');
  text << site.what << " at " << (name ? name + 1 : site.file ? site.file : "?") << ":" << site.line;
  return text.str();
}
std::string describe(const Thread& thread) {
  std::ostringstream text;
  text << "thread (" << thread.index.x << ", " << thread.index.y << ", " << thread.index.z << ") of block ("
       << thread.block->index.x << ", " << thread.block->index.y << ", " << thread.block->index.z << ")";
  return text.str();
}
std::string deadlock() {
  size_t left = 0;
  const Thread* first = nullptr;
  for (const Thread& thread : cluster->threads)
    if (!thread.done) {
      left++;
      if (!first) first = &thread;
    }
  std::ostringstream text;
  text << left << " of " << cluster->threads.size() << " threads wait forever; the first, " << describe(*first)
       << ", in " << describe(first->site);
  for (const Thread& thread : cluster->threads)
    if (!thread.done && (thread.site.line != first->site.line || thread.site.what != first->site.what)) {
      text << "; " << describe(thread) << " in " << describe(thread.site);
      break;
    }
  return text.str();
}

// --------------------------------------------------------------------------------------------------------- one cluster

void run_cluster(const Shape& shape, uint3 first_block) {
  const size_t threads = size_t{shape.block.x} * shape.block.y * shape.block.z;
  Cluster work;
  cluster = &work;
  work.blocks.resize(static_cast<size_t>(shape.cluster));
  work.threads.resize(work.blocks.size() * threads);
  for (size_t b = 0; b < work.blocks.size(); b++) {
    Block& block = work.blocks[b];
    block.index = {first_block.x + static_cast<unsigned>(b), first_block.y, first_block.z};
    block.rank = static_cast<int>(b);
    block.threads_left = static_cast<int>(threads);
    make_memory(block.dynamic_memory, shape.shared_bytes);
    for (unsigned t = 0; t < threads; t++) {
      Thread& thread = work.threads[b * threads + t];
      thread.index = {t % shape.block.x, t / shape.block.x % shape.block.y, t / shape.block.x / shape.block.y};
      thread.id = static_cast<int>(t);
      thread.block = &block;
    }
  }
  while (fibers.size() < work.threads.size()) fibers.push_back(new Fiber());
  for (size_t i = 0; i < work.threads.size(); i++)
    if (fibers[i]->busy || !fibers[i]->started) make_fiber(*fibers[i], i);  // busy: left behind by a launch that failed

  std::vector<size_t> sequence(work.threads.size());
  std::iota(sequence.begin(), sequence.end(), size_t{0});
  if (order == kReverse) std::reverse(sequence.begin(), sequence.end());
  for (size_t left = work.threads.size(); left && error.empty();) {
    if (order == kRandom) std::shuffle(sequence.begin(), sequence.end(), generator);
    bool moved = false;
    rounds++, in_flight = false;
    for (size_t index : sequence) {
      Thread& thread = work.threads[index];
      try {
        if (thread.done || (thread.ready && !thread.ready(thread.ready_argument))) continue;
      } catch (const Failure&) {
        break;
      }
      resume(index);
      moved = true;
      if (!error.empty()) break;
      if (!thread.done) continue;
      left--;
      if (!--thread.block->threads_left) close_block(*thread.block, shape.shared_bytes);
    }
    if (!moved && !in_flight && error.empty()) error = deadlock();
  }
  if (error.empty())
    for (const Block& block : work.blocks) {
      check_closed(block.dynamic_memory);
      for (auto& entry : block.static_memory) check_closed(entry.second);
    }
  cluster = nullptr, current = nullptr;
}

std::string refuse(const Shape& s) {
  const size_t threads = size_t{s.block.x} * s.block.y * s.block.z;
  std::ostringstream text;
  if (threads < 1 || threads > 1024 || s.block.z > 64)
    text << "invalid configuration: " << threads << " threads in a block";
  else if (s.grid.y > chip.largest_grid_yz || s.grid.z > chip.largest_grid_yz)
    text << "invalid configuration: more than " << chip.largest_grid_yz << " blocks along y or z";
  else if (s.shared_bytes > chip.shared_per_block)
    text << "invalid value: " << s.shared_bytes << " bytes of shared memory, the device has " << chip.shared_per_block;
  else if (!s.asks_for_shared_memory && s.shared_bytes > chip.shared_by_default)
    text << "invalid value: " << s.shared_bytes << " bytes of shared memory, the launch did not ask for more than "
         << chip.shared_by_default;
  else if (s.cluster > 1 && chip.major < 9) text << "clusters need compute capability 9.0";
  else if (s.cluster > 1 && compiled_for() < 90) text << "clusters need code for compute capability 9.0";
  else if (s.cluster < 1 || s.cluster > chip.largest_cluster) text << "invalid cluster of " << s.cluster << " blocks";
  else if (s.grid.x % static_cast<unsigned>(s.cluster))
    text << "invalid configuration: " << s.grid.x << " blocks in clusters of " << s.cluster;
  return text.str();
}

}  // namespace

void set_schedule(Order to, unsigned seed) {
  order = to;
  generator.seed(seed + 1);
}

uint64_t travel_rounds() {
  if (order != kRandom || generator() % 16) return 0;
  return generator() % 1024;
}

int max_active_clusters(const Shape& shape) {
  if (shape.cluster > chip.largest_cluster || chip.major < 9 || shape.shared_bytes > chip.shared_per_block) return 0;
  return chip.multiprocessors / shape.cluster *
         static_cast<int>(chip.shared_per_multiprocessor / (shape.shared_bytes + 1024));
}

std::string run(const Shape& shape, void (*kernel)(void*), void* argument) {
  if (cluster) return "a kernel launched a kernel";
  error = refuse(shape);
  asked_for_shared_memory = shape.asks_for_shared_memory;
  body = kernel, body_argument = argument;
  blockDim = shape.block, gridDim = shape.grid;
  const size_t across = shape.grid.x / static_cast<unsigned>(shape.cluster),
               count = across * shape.grid.y * shape.grid.z;
  std::vector<size_t> sequence(count);
  std::iota(sequence.begin(), sequence.end(), size_t{0});
  if (order == kReverse) std::reverse(sequence.begin(), sequence.end());
  if (order == kRandom) std::shuffle(sequence.begin(), sequence.end(), generator);
  for (size_t i = 0; i < count && error.empty(); i++) {
    const size_t c = sequence[i];
    run_cluster(shape,
                {static_cast<unsigned>(c % across) * static_cast<unsigned>(shape.cluster),
                 static_cast<unsigned>(c / across % shape.grid.y), static_cast<unsigned>(c / across / shape.grid.y)});
  }
  return error;
}

void poison(void* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    static_cast<unsigned char*>(memory)[i] = reinterpret_cast<const unsigned char*>(&kPoison)[i % 4];
}

void fail(const std::string& message) {
  error = message + " (" + describe(*current) + ")";
  if (!in_fiber) throw Failure();
  _longjmp(scheduler, 1);  // the fiber stays behind and is made anew when it is next needed
}

void wait_until(bool (*ready)(void*), void* argument, Site site) {
  Fiber& fiber = *fibers[static_cast<size_t>(current - cluster->threads.data())];
  current->ready = ready, current->ready_argument = argument, current->site = site;
  if (!_setjmp(fiber.state)) _longjmp(scheduler, 1);
}

unsigned Barrier::arrive(int threads, Site site, bool same_place) {
  if (!arrived) expected = threads, first = site;
  if (threads != expected)
    fail(describe(site) + " counts " + std::to_string(threads) + " threads, " + describe(first) + " " +
         std::to_string(expected));
  if (same_place && (site.line != first.line || strcmp(site.file, first.file)))
    fail("threads of a block wait at different barriers: " + describe(first) + " and " + describe(site));
  const unsigned since = generation;
  if (++arrived == expected) {
    arrived = 0;
    generation++;
  }
  return since;
}

const unsigned char (&exchange_bytes(unsigned mask, const void* mine, size_t bytes, Site site))[32][64] {
  const int lane = current->lane();
  WarpOp& op = current->block->warp_ops[{current->id / 32, mask}];
  if (!(mask >> lane & 1)) fail(describe(site) + ": the mask leaves out the calling lane");
  if (!op.arrived) op.first = site;
  if (op.first.line != site.line || strcmp(op.first.what, site.what))
    fail("lanes of a warp wait at different places: " + describe(op.first) + " and " + describe(site));
  const unsigned since = op.generation;
  memcpy(op.slots[since & 1][lane], mine, bytes);
  op.arrived |= 1u << lane;
  if (op.arrived == mask) {
    op.arrived = 0;
    op.generation++;
  }
  wait_until([&op, since] { return op.generation != since; }, site);
  return op.slots[since & 1];
}

void* dynamic_shared_memory() { return inside(current->block->dynamic_memory); }

void* static_shared(const void* site, size_t bytes) {
  std::vector<unsigned char>& memory = current->block->static_memory[site];
  if (memory.empty()) {
    Block& block = *current->block;
    block.static_bytes += padded(bytes);
    const size_t limit = asked_for_shared_memory ? chip.shared_per_block : chip.shared_by_default;
    const size_t dynamic_bytes = block.dynamic_memory.size() - 2 * kRedZone - 2 * kAlign;
    if (block.static_bytes + dynamic_bytes > limit)
      fail("invalid value: " + std::to_string(dynamic_bytes) + " bytes of dynamic and " +
           std::to_string(block.static_bytes) + " of static shared memory, the limit of this launch is " +
           std::to_string(limit));
    make_memory(memory, bytes);
  }
  return inside(memory);
}

// The compiler puts a call of this in front of a load or store through a misaligned address (-fsanitize=alignment,
// build.py), which on a GPU is an error that ends the context. `type` begins as the compiler's TypeMismatchData does.
struct Misalignment {
  const char* file;
  uint32_t line, column;
};
void misaligned(const Misalignment& where, const void* address) {
  if (!cluster) return;  // code of the host
  const char* name = strrchr(where.file ? where.file : "", '/');
  std::ostringstream text;
  text << "a misaligned address: " << address << " at " << (name ? name + 1 : "?") << ":" << where.line;
  fail(text.str());
}

namespace {
bool holds(const std::vector<unsigned char>& memory, const void* address) {
  return address >= memory.data() && address < memory.data() + memory.size();
}
}  // namespace

Block& owner(const void* shared, const char* what) {
  for (Block& block : cluster->blocks) {
    bool found = holds(block.dynamic_memory, shared);
    for (auto& entry : block.static_memory) found = found || holds(entry.second, shared);
    if (!found) continue;
    if (!block.threads_left) fail(std::string(what) + " to a block that has ended");
    return block;
  }
  fail(std::string(what) + ": the address is not in shared memory");
}

void* in_block(const void* own, int rank) {
  if (rank < 0 || rank >= static_cast<int>(cluster->blocks.size()))
    fail("rank " + std::to_string(rank) + " is not in the cluster");
  Block &from = *current->block, &to = cluster->blocks[static_cast<size_t>(rank)];
  if (!to.threads_left) fail("shared memory of a block that has ended");
  const unsigned char* address = static_cast<const unsigned char*>(own);
  if (holds(from.dynamic_memory, own)) return inside(to.dynamic_memory) + (address - inside(from.dynamic_memory));
  for (auto& [site, memory] : from.static_memory) {
    if (!holds(memory, own)) continue;
    std::vector<unsigned char>& other = to.static_memory[site];
    if (other.empty()) make_memory(other, memory.size() - 2 * kRedZone - 2 * kAlign);
    return inside(other) + (address - inside(memory));
  }
  fail("an address that is not in the block's own shared memory cannot be mapped to another block");
}

static int kernels = 0;

void put(void*, const Work& work) {
  devices_used.insert(work.device);
  kernels++;
  const std::string failure = run(work.shape, work.body);
  if (!failure.empty()) throw std::runtime_error("CUDA host harness: " + failure);
}
int kernels_run() { return std::exchange(kernels, 0); }

}  // namespace cuda_host

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(
    const cuda_host::Misalignment* where, const void* address) {
  cuda_host::misaligned(*where, address);
}
