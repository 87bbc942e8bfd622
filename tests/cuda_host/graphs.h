// Streams and CUDA graphs of the host harness: the calls of the CUDA runtime that csrc/cuda/step_graph.h makes, under their names.
//
// As in CUDA, a node takes a copy of its kernel's parameters when it is added or changed, an executable graph takes a copy of its nodes, and a
// launch one of those: what is changed later reaches later launches only. Nodes run in any order that their dependencies allow, the schedule's.
// Work is carried out at once, unless a test holds it back: then each stream keeps its own in order, and streams take turns at random.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorStreamCaptureUnsupported = 900 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };

namespace cuda_host {

// What a stream is given.
struct Work {
  Shape shape;
  std::function<void()> body;  // one thread of a kernel
  int device;
  bool kernel = true;  // false: the body is all of it
};
struct Graph;
struct GraphNode;
struct GraphExec;

// Carry it out, or keep it for later. Throws std::runtime_error for what a kernel did wrong.
void put(void* stream, Work work);

enum Holding {
  kAtOnce,
  kHeld,     // streams work later: run_held
  kCaptured  // the same, and the streams say that they are being captured; no graph can be launched then
};
void hold(Holding how);
// Carry out what was held; the work stays, and can be carried out again, until the next hold().
void run_held(unsigned seed);

// Let the call number `which` (from 1 on) of an API function from now on fail; 0: none.
void fail_call(const std::string& name, int which);
// Another thread captures a stream of its own, and must not be disturbed. True if it was.
bool set_capture_elsewhere(bool on);
// Calls of each API function since the last question, and the number of graphs and executable graphs that there are.
std::map<std::string, int> api_calls();
std::pair<int, int> graphs_alive();
// Kernels that ran since the last question.
int kernels_run();

using Bind = std::function<std::function<void()>(void** parameters)>;  // copies the parameters, gives what calls the kernel with them
void announce(void* function, Bind bind);

template <class... Parameters, size_t... index>
std::tuple<Parameters...> copy_parameters(void** parameters, std::index_sequence<index...>) {
  return {*static_cast<const Parameters*>(parameters[index])...};
}
template <class... Parameters>
void announce(void (*kernel)(Parameters...)) {
  announce(reinterpret_cast<void*>(kernel), [kernel](void** parameters) -> std::function<void()> {
    auto values = copy_parameters<Parameters...>(parameters, std::index_sequence_for<Parameters...>());
    return [kernel, values] { std::apply(kernel, values); };
  });
}

}  // namespace cuda_host

using cudaGraph_t = cuda_host::Graph*;
using cudaGraphNode_t = cuda_host::GraphNode*;
using cudaGraphExec_t = cuda_host::GraphExec*;
struct cudaKernelNodeParams {
  void* func;
  dim3 gridDim, blockDim;
  unsigned sharedMemBytes;
  void** kernelParams;
  void** extra;
};

cudaError_t cudaGetLastError();
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags);
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* dependencies, size_t count,
                                   const cudaKernelNodeParams* parameters);
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
union cudaLaunchAttributeValue {
  dim3 clusterDim;
  cudaLaunchAttributeValue() : clusterDim(1) {}
};
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaLaunchAttributeID attribute, const cudaLaunchAttributeValue* value);
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node, const cudaKernelNodeParams* parameters);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
