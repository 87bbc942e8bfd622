// Streams and CUDA graphs of the host harness. See graphs.h.
#include <algorithm>
#include <deque>
#include <mutex>
#include <random>
#include <stdexcept>

#include "runtime.h"

namespace cuda_host {

struct GraphNode {
  void* function;
  Work work;
  std::vector<GraphNode*> dependencies;
};
struct Graph {
  std::vector<std::unique_ptr<GraphNode>> nodes;
};
struct GraphExec {
  std::vector<std::pair<GraphNode*, Work>> nodes;  // in an order that the dependencies allow
};

namespace {

std::recursive_mutex everything;  // calls come from several threads, and so do the kernels that some of them run
using Lock = std::lock_guard<std::recursive_mutex>;

struct Held {
  Work work;
  const void* exec;  // of a graph's launch; such launches follow one another, whatever their streams
  int launch;
};
Holding holding = kAtOnce;
std::map<void*, std::vector<Held>> held;
int launches = 0, kernels = 0;

std::map<void*, Bind> announced;
std::map<std::string, int> calls;
std::string failing;
int fails_in = 0;
cudaError_t last_error = cudaSuccess;
bool capture_elsewhere = false, capture_spoiled = false;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::set<const void*> graphs, execs;

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
// Every API function begins with it: counts the call, and fails if a test wants it to.
cudaError_t called(const char* name) {
  calls[name]++;
  if (failing == name && fails_in > 0 && --fails_in == 0) return report(cudaErrorMemoryAllocation);
  return cudaSuccess;
}

void carry_out(const Work& work) {
  devices_used.insert(work.device);
  if (!work.kernel) return work.body();
  kernels++;
  const std::string error = run(work.shape, work.body);
  if (!error.empty()) throw std::runtime_error("CUDA host harness: " + error);
}

bool bind(const cudaKernelNodeParams& p, Work& work) {
  const auto known = announced.find(p.func);
  if (known == announced.end() || !p.kernelParams || p.extra || !p.gridDim.x || !p.gridDim.y || !p.gridDim.z) return false;
  work = {{p.gridDim, p.blockDim, p.sharedMemBytes, work.shape.cluster}, known->second(p.kernelParams), device};
  return true;
}

}  // namespace

void put(void* stream, Work work) {
  const Lock lock(everything);
  if (holding == kAtOnce) carry_out(work);
  else held[stream].push_back({std::move(work), nullptr, 0});
}
void hold(Holding how) {
  const Lock lock(everything);
  holding = how;
  if (how != kAtOnce) held.clear();
}

void run_held(unsigned seed) {
  const Lock lock(everything);
  std::minstd_rand generator(seed + 1);
  std::map<void*, std::deque<const Held*>> queues;
  for (const auto& [stream, all] : held)
    for (const Held& one : all) queues[stream].push_back(&one);
  auto earlier_launch_waits = [&](const Held& one) {
    for (const auto& queue : queues)
      for (const Held* other : queue.second)
        if (one.exec && other->exec == one.exec && other->launch < one.launch) return true;
    return false;
  };
  for (;;) {
    std::vector<std::deque<const Held*>*> ready;
    for (auto& queue : queues)
      if (!queue.second.empty() && !earlier_launch_waits(*queue.second.front())) ready.push_back(&queue.second);
    if (ready.empty()) return;
    std::deque<const Held*>& chosen = *ready[generator() / 7 % ready.size()];
    carry_out(chosen.front()->work);
    chosen.pop_front();
  }
}

void fail_call(const std::string& name, int which) {
  const Lock lock(everything);
  failing = name, fails_in = which;
}
bool set_capture_elsewhere(bool on) {
  const Lock lock(everything);
  capture_elsewhere = on;
  return std::exchange(capture_spoiled, false);
}
std::map<std::string, int> api_calls() {
  const Lock lock(everything);
  return std::exchange(calls, {});
}
int kernels_run() {
  const Lock lock(everything);
  return std::exchange(kernels, 0);
}
std::pair<int, int> graphs_alive() {
  const Lock lock(everything);
  return {static_cast<int>(graphs.size()), static_cast<int>(execs.size())};
}
void announce(void* function, Bind bind) {
  const Lock lock(everything);
  announced[function] = std::move(bind);
}

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaGetLastError() {
  const Lock lock(everything);
  return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  const Lock lock(everything);
  *status = holding == kCaptured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return called("cudaStreamIsCapturing");
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const Lock lock(everything);
  if (const cudaError_t error = called("cudaThreadExchangeStreamCaptureMode")) return error;
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  const Lock lock(everything);
  if (const cudaError_t error = called("cudaGraphCreate")) return error;
  if (flags) return report(cudaErrorInvalidValue);
  *graph = new Graph();
  graphs.insert(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* dependencies, size_t count,
                                   const cudaKernelNodeParams* parameters) {
  const Lock lock(everything);
  if (const cudaError_t error = called("cudaGraphAddKernelNode")) return error;
  auto made = std::make_unique<GraphNode>();
  made->function = parameters->func;
  if (!bind(*parameters, made->work)) return report(cudaErrorInvalidValue);
  made->dependencies.assign(dependencies, dependencies + count);
  *node = made.get();
  graph->nodes.push_back(std::move(made));
  return cudaSuccess;
}

cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaLaunchAttributeID, const cudaLaunchAttributeValue* value) {
  const Lock lock(everything);
  if (const cudaError_t error = called("cudaGraphKernelNodeSetAttribute")) return error;
  node->work.shape.cluster = static_cast<int>(value->clusterDim.x);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  const Lock lock(everything);
  if (const cudaError_t error = called("cudaGraphInstantiateWithFlags")) return error;
  if (capture_elsewhere && capture_mode == cudaStreamCaptureModeGlobal) {
    capture_spoiled = true;
    return report(cudaErrorStreamCaptureUnsupported);
  }
  if (flags) return report(cudaErrorInvalidValue);
  auto made = std::make_unique<GraphExec>();
  std::vector<GraphNode*> waiting;
  for (const auto& node : graph->nodes) waiting.push_back(node.get());
  std::set<const GraphNode*> done;
  while (!waiting.empty()) {  // what has no dependency left, in no particular order: the last one first
    auto next = std::find_if(waiting.rbegin(), waiting.rend(), [&](const GraphNode* node) {
      return std::all_of(node->dependencies.begin(), node->dependencies.end(), [&](const GraphNode* d) { return done.count(d) > 0; });
    });
    if (next == waiting.rend()) return report(cudaErrorInvalidValue);
    done.insert(*next);
    made->nodes.emplace_back(*next, (*next)->work);
    waiting.erase(std::next(next).base());
  }
  *exec = made.release();
  execs.insert(*exec);
  return cudaSuccess;
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node, const cudaKernelNodeParams* parameters) {
  const Lock lock(everything);
  if (const cudaError_t error = called("cudaGraphExecKernelNodeSetParams")) return error;
  for (auto& [own, work] : exec->nodes)
    if (own == node) return report(parameters->func == node->function && bind(*parameters, work) ? cudaSuccess : cudaErrorInvalidValue);
  return report(cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const Lock lock(everything);
  if (const cudaError_t error = called("cudaGraphLaunch")) return error;
  if (holding == kCaptured) return report(cudaErrorStreamCaptureUnsupported);
  launches++;
  for (const auto& [node, work] : exec->nodes) {
    if (holding == kAtOnce) carry_out(work);
    else held[stream].push_back({work, exec, launches});
  }
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  const Lock lock(everything);
  execs.erase(exec);
  delete exec;
  return called("cudaGraphExecDestroy");
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Lock lock(everything);
  graphs.erase(graph);
  delete graph;
  return called("cudaGraphDestroy");
}
