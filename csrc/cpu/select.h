// The kernels of one instruction set, and the choice among those built.
#pragma once

#include <vector>

#include "cpu/ops.h"

namespace orthokern {

// All kernels: name, argument struct, and its member function that lists the arguments that the kernel reads.
#define ORTHOKERN_CPU_KERNELS(kernel)                               \
  kernel(factored_scan_fwd, ScanArgs, forward);                     \
  kernel(factored_scan_bwd, ScanArgs, backward);                    \
  kernel(dense_scan_fwd, ScanArgs, forward);                        \
  kernel(dense_scan_bwd, ScanArgs, backward);                       \
  kernel(gru_scan_fwd, GruArgs, forward);                           \
  kernel(gru_scan_bwd, GruArgs, backward);                          \
  kernel(peephole_scan_fwd, PeepholeArgs, forward);                 \
  kernel(peephole_scan_bwd, PeepholeArgs, backward);                \
  kernel(activation_fwd, ActivationArgs, forward);                  \
  kernel(activation_bwd, ActivationArgs, backward);                 \
  kernel(linear_cross_entropy_fwd, LinearCrossEntropyArgs, fields); \
  kernel(rotation_scan, RotationArgs, fields);                      \
  kernel(modal_loss, ModalArgs, fields);                            \
  kernel(cayley, CayleyArgs, fields)

// Each returns false if memory ran out.
struct CpuKernels {
  const char* isa;
#define ORTHOKERN_MEMBER(name, Args, fields) bool (*name)(const Args&)
  ORTHOKERN_CPU_KERNELS(ORTHOKERN_MEMBER);
#undef ORTHOKERN_MEMBER
};

// The best set that this machine can run, or the one that ORTHOKERN_ISA names.
const CpuKernels& cpu_kernels();
// Choose by name (null: the best); false if it was not built or this machine cannot run it.
bool cpu_select(const char* isa);
// The sets that this machine can run, best first.
std::vector<const char*> cpu_isas();
// Whether the kernels in use have products with bfloat16 factors, and this machine can run them.
bool cpu_has_bf16();
// Whether they also have those in the tile registers of AMX, which the system then lets this process use.
bool cpu_has_amx();
// The thread pool in use.
const char* parallel_pool();

}  // namespace orthokern
