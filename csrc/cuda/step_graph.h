// Loops over time whose kernels reach the GPU many steps at a time, as a CUDA graph (docs/cuda-scans.md, "steps").
//
// A loop's body puts the kernels of one step wherever it is told: on the stream, or into a graph of so many steps. In a
// graph, a kernel gets the number of its step from two parts: its own place in the graph, which is one of its
// arguments, and `base`, a word of the call's workspace that the last kernel of the graph moves on. So one graph serves
// a whole sequence, launched once for every `graph_steps` of it.
//
// Note [Whose state]
//     Arguments are parameters of the nodes: the driver takes a copy of them with every launch, and changing them for
//     the next call touches no
//     launch that is under way. What the GPU changes, `base`, belongs to the call. An executable graph runs one launch
//     at a time, whichever
//     stream it is put on, so every stream has its own. A thread takes a graph out of the cache while it works with it:
//     the API does not
//     allow two threads on one graph.
//
// Note [Falling back]
//     Whatever the graph API refuses is launched kernel by kernel, from the first step that is not on the stream yet;
//     so are calls inside a
//     capture of the caller's, whose graph takes the kernels up one by one.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "cuda/launch.h"

namespace orthokern {
namespace cuda {

constexpr int kGraphSteps = 32;     // of one graph: even, as the scans take turns with two states
constexpr int kFewestGraphs = 4;    // launches below which giving a graph its arguments does not pay
constexpr size_t kMostGraphs = 64;  // that the cache keeps

// The number of a kernel's step.
struct StepIndex {
  const int* base;      // null: 0
  int step, direction;  // direction: 1, or -1 where time runs backward
  __device__ __forceinline__ int steps_before() const { return base ? *base : 0; }
  __device__ __forceinline__ int at() const { return step + direction * steps_before(); }
};

static __global__ void advance_steps_kernel(int* base, int steps) { *base += steps; }

// What a loop puts its kernels on: `to(kernel, grid, block, arguments...)`, with `to.base` for their StepIndex.
struct OntoStream {
  cudaStream_t stream;
  const int* base = nullptr;
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments&&... arguments) const {
    launch(kernel, {grid, block, stream}, arguments...);
  }
};

// Which graphs are alike but for their kernels' arguments and sizes of grids.
struct StepGraphKey {
  int device;
  cudaStream_t stream;  // as a hint only: nothing is asked of a stream that may be gone
  int kind;             // of the loop
  int steps;
  bool operator==(const StepGraphKey& o) const {
    return device == o.device && stream == o.stream && kind == o.kind && steps == o.steps;
  }
};

// A chain of kernels, one after the other. Made once, then given other arguments. Every function leaves no error
// behind.
class StepGraph {
 public:
  explicit StepGraph(const StepGraphKey& key) : key(key) {}
  ~StepGraph() {  // one that still runs is freed when it has ended
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
    cudaGetLastError();
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // Let `body` put its kernels into the graph, in place of those it had. False if that cannot be done: the graph is of
  // no use then.
  template <class Body>
  bool fill(const int* base, Body body) {
    IntoGraph to{*this, base};
    next_ = 0;
    if (!graph_) status_ = cudaGraphCreate(&graph_, 0);
    body(to);
    if (status_ == cudaSuccess && next_ != nodes_.size()) status_ = cudaErrorInvalidValue;
    if (status_ == cudaSuccess && !exec_) instantiate();
    return fine();
  }
  bool run(cudaStream_t stream) {
    status_ = cudaGraphLaunch(exec_, stream);
    return fine();
  }

  const StepGraphKey key;

 private:
  struct IntoGraph {
    StepGraph& graph;
    const int* base;
    template <class... Parameters, class... Arguments>
    void operator()(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments&&... arguments) const {
      std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
      std::apply(
          [&](auto&... value) {
            void* addresses[] = {static_cast<void*>(&value)...};
            graph.put(kernel, grid, block, addresses);
          },
          values);
    }
  };

  // The API copies the arguments.
  template <class... Parameters>
  void put(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments) {
    if (status_ != cudaSuccess) return;
    announce_kernel(kernel);
    cudaKernelNodeParams node{};
    node.func = reinterpret_cast<void*>(kernel), node.gridDim = grid, node.blockDim = block,
    node.kernelParams = arguments;
    if (!exec_) {
      nodes_.emplace_back();
      status_ =
          cudaGraphAddKernelNode(&nodes_.back(), graph_, next_ ? &nodes_[next_ - 1] : nullptr, next_ ? 1 : 0, &node);
    } else {
      status_ =
          next_ < nodes_.size() ? cudaGraphExecKernelNodeSetParams(exec_, nodes_[next_], &node) : cudaErrorInvalidValue;
    }
    next_++;
  }
  void instantiate() {
    // It takes memory, which a capture on another thread would not allow, and would be spoiled by: unless this thread
    // says that it knows.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    status_ = cudaThreadExchangeStreamCaptureMode(&mode);
    if (status_ != cudaSuccess) return;
    status_ = cudaGraphInstantiateWithFlags(&exec_, graph_, 0);
    if (status_ != cudaSuccess) exec_ = nullptr;
    const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
    if (status_ == cudaSuccess) status_ = restored;
  }
  bool fine() const {
    if (status_ != cudaSuccess) cudaGetLastError();
    return status_ == cudaSuccess;
  }

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  std::vector<cudaGraphNode_t> nodes_;
  size_t next_ = 0;
  cudaError_t status_ = cudaSuccess;
};

// The graphs that wait for the next call, the latest first.
class StepGraphCache {
 public:
  static StepGraphCache& of_process() {
    static StepGraphCache* const cache =
        new StepGraphCache;  // never destroyed: at the end of the process the driver may be gone already
    return *cache;
  }
  std::unique_ptr<StepGraph> take(const StepGraphKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto i = waiting_.begin(); i != waiting_.end(); ++i) {
      if (!((*i)->key == key)) continue;
      std::unique_ptr<StepGraph> found = std::move(*i);
      waiting_.erase(i);
      return found;
    }
    return std::make_unique<StepGraph>(key);
  }
  void put_back(std::unique_ptr<StepGraph> graph) {
    std::unique_ptr<StepGraph> oldest;  // destroyed when others may go on
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_front(std::move(graph));
    if (waiting_.size() <= kMostGraphs) return;
    oldest = std::move(waiting_.back());
    waiting_.pop_back();
  }
  size_t clear() {
    std::list<std::unique_ptr<StepGraph>> all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all.swap(waiting_);
    }
    return all.size();
  }

 private:
  std::mutex mutex_;
  std::list<std::unique_ptr<StepGraph>> waiting_;
};

struct StepLoop {
  int device;  // the current one
  cudaStream_t stream;
  int kind;         // of the body: one number for one sequence of kernels
  int graph_steps;  // 0: no graphs
  int* base;        // a word of workspace
  int64_t first, end;
};

inline bool being_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();
  // the default stream while another one is captured: whatever may be put there, a graph is not worth the risk
  return true;
}

// body(to, i) puts the kernels of step i on `to`, for i from first to end - 1.
template <class Body>
void run_step_loop(const StepLoop& loop, Body body) {
  int64_t i = loop.first;
  const int64_t launches = loop.graph_steps > 0 ? (loop.end - loop.first) / loop.graph_steps : 0;
  if (launches >= kFewestGraphs && !being_captured(loop.stream)) {
    StepGraphCache& cache = StepGraphCache::of_process();
    std::unique_ptr<StepGraph> graph = cache.take({loop.device, loop.stream, loop.kind, loop.graph_steps});
    bool good = graph->fill(loop.base, [&](const auto& to) {
      for (int64_t k = 0; k < loop.graph_steps; k++) body(to, loop.first + k);
      to(advance_steps_kernel, dim3(1), dim3(1), loop.base, loop.graph_steps);
    });
    if (good) fill_zero(loop.base, sizeof(int), loop.stream);
    for (int64_t n = 0; good && n < launches; n++) {
      good = graph->run(loop.stream);
      if (good) i += loop.graph_steps;
    }
    if (good) cache.put_back(std::move(graph));
  }
  for (const OntoStream to{loop.stream}; i < loop.end; i++) body(to, i);
}

}  // namespace cuda
}  // namespace orthokern
