// Loops over time that are launched as CUDA graphs of many steps (docs/cuda-scans.md, "steps").
//
// The body of a loop enqueues the kernels of one step, either on the stream or into a graph. In a graph, a kernel
// computes the number of its step from its position in the graph, which is one of its arguments, and from `base`, a
// word in the workspace of the call that the last kernel of the graph advances. One graph can therefore be used for a
// whole sequence; it is launched once per `graph_steps` steps.
//
// Note [Whose state]
//     Arguments are parameters of the nodes. The driver copies them at every launch, so that updating them for the next
//     call does not affect pending launches. `base`, which the GPU changes, belongs to the call. Launches of one
//     executable graph are serialised, also on different streams, so every stream has its own graphs. A thread removes
//     a graph from the cache while it uses it, because the API does not allow two threads to use a graph.
//
// Note [Falling back]
//     If the graph API returns an error, the remaining steps are launched kernel by kernel. Calls inside a stream
//     capture of the caller are launched in the same way, so that the captured graph contains the individual kernels.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "cuda/launch.h"

namespace orthokern::cuda {

constexpr int kGraphSteps = 32;     // steps of one graph; even, because the scans alternate between two states
constexpr int kFewestGraphs = 4;    // with fewer launches, updating the arguments of a graph takes longer than it saves
constexpr size_t kMostGraphs = 64;  // capacity of the cache

// The number of the step of a kernel.
struct StepIndex {
  const int* base;      // null: 0
  int step, direction;  // direction: 1, or -1 for a loop that runs backward in time
  __device__ __forceinline__ int steps_before() const { return base ? *base : 0; }
  __device__ __forceinline__ int at() const { return step + direction * steps_before(); }
};

static __global__ void advance_steps_kernel(int* base, int steps) { *base += steps; }

// Blocks and threads of a kernel of a loop; its blocks may form clusters.
struct StepShape {
  dim3 grid, block;
  int cluster = 1;
};

// The target of the kernels of a loop: `to(kernel, shape, arguments...)`, with `to.base` for their StepIndex.
struct OntoStream {
  cudaStream_t stream;
  const int* base = nullptr;
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), const StepShape& shape, Arguments&&... arguments) const {
    launch(kernel, {shape.grid, shape.block, stream, 0, shape.cluster}, arguments...);
  }
};

// Graphs with equal keys differ only in the arguments and the grid sizes of their kernels. The size of a cluster is
// part of `kind`: a kernel of an executable graph keeps it.
struct StepGraphKey {
  int device;
  cudaStream_t stream;  // only compared; the stream may have been destroyed
  int kind;             // of the loop
  int steps;
  bool operator==(const StepGraphKey& o) const {
    return device == o.device && stream == o.stream && kind == o.kind && steps == o.steps;
  }
};

// A graph of consecutive kernels. It is created once, then updated with other arguments. No function leaves a CUDA
// error set.
class StepGraph {
 public:
  explicit StepGraph(const StepGraphKey& key) : key(key) {}
  ~StepGraph() {  // a running graph is freed after it has ended
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
    void operator()(void (*kernel)(Parameters...), const StepShape& shape, Arguments&&... arguments) const {
      std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
      std::apply(
          [&](auto&... value) {
            void* addresses[] = {static_cast<void*>(&value)...};
            graph.put(kernel, shape, addresses);
          },
          values);
    }
  };

  // The API copies the arguments.
  template <class... Parameters>
  void put(void (*kernel)(Parameters...), const StepShape& shape, void** arguments) {
    if (status_ != cudaSuccess) return;
    announce_kernel(kernel);
    cudaKernelNodeParams node{};
    node.func = reinterpret_cast<void*>(kernel), node.gridDim = shape.grid, node.blockDim = shape.block,
    node.kernelParams = arguments;
    if (!exec_) {
      nodes_.emplace_back();
      status_ =
          cudaGraphAddKernelNode(&nodes_.back(), graph_, next_ ? &nodes_[next_ - 1] : nullptr, next_ ? 1 : 0, &node);
      if (status_ == cudaSuccess && shape.cluster > 1) {
        cudaLaunchAttributeValue value{};
        value.clusterDim.x = static_cast<unsigned>(shape.cluster), value.clusterDim.y = value.clusterDim.z = 1;
        status_ = cudaGraphKernelNodeSetAttribute(nodes_.back(), cudaLaunchAttributeClusterDimension, &value);
      }
    } else {
      status_ =
          next_ < nodes_.size() ? cudaGraphExecKernelNodeSetParams(exec_, nodes_[next_], &node) : cudaErrorInvalidValue;
    }
    next_++;
  }
  void instantiate() {
    // It allocates memory, which is an error during a capture on another thread and would invalidate that capture,
    // unless this thread uses the relaxed capture mode.
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

// The cached graphs, the most recently used first.
class StepGraphCache {
 public:
  static StepGraphCache& of_process() {
    static StepGraphCache* const cache =
        new StepGraphCache;  // never destroyed: at the end of the process the driver may have been shut down
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
    std::unique_ptr<StepGraph> oldest;  // destroyed after the lock is released
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
  // on the default stream while another one is captured, no graph is created
  return true;
}

// body(to, i) enqueues the kernels of step i on `to`, for i from first to end - 1.
template <class Body>
void run_step_loop(const StepLoop& loop, Body body) {
  int64_t i = loop.first;
  const int64_t launches = loop.graph_steps > 0 ? (loop.end - loop.first) / loop.graph_steps : 0;
  if (launches >= kFewestGraphs && !being_captured(loop.stream)) {
    StepGraphCache& cache = StepGraphCache::of_process();
    std::unique_ptr<StepGraph> graph = cache.take({loop.device, loop.stream, loop.kind, loop.graph_steps});
    bool good = graph->fill(loop.base, [&](const auto& to) {
      for (int64_t k = 0; k < loop.graph_steps; k++) body(to, loop.first + k);
      to(advance_steps_kernel, {dim3(1), dim3(1)}, loop.base, loop.graph_steps);
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

}  // namespace orthokern::cuda
