// The kernels of one instruction set, and the choice among those built.
#pragma once

#include <vector>

#include "cpu/cayley.h"
#include "cpu/few_rows.h"
#include "cpu/ops.h"

namespace orthokern {

// Each returns false if memory ran out.
struct CpuKernels {
  const char* isa;
  bool (*factored_scan_fwd)(const ScanArgs&);
  bool (*factored_scan_bwd)(const ScanArgs&);
  bool (*dense_scan_fwd)(const ScanArgs&);
  bool (*dense_scan_bwd)(const ScanArgs&);
  bool (*gru_scan_fwd)(const GruArgs&);
  bool (*gru_scan_bwd)(const GruArgs&);
  bool (*gru_second)(const GruSecondArgs&);
  bool (*activation_fwd)(const ActivationArgs&);
  bool (*activation_bwd)(const ActivationArgs&);
  bool (*linear_cross_entropy_fwd)(const LinearCrossEntropyArgs&);
  bool (*modal_scan_fwd)(const ModalArgs&);
  bool (*modal_scan_bwd)(const ModalArgs&);
  bool (*modal_cross_entropy_fwd)(const ModalArgs&);
  bool (*cayley)(const CayleyArgs&);
  bool (*few_rows)(const FewRowsArgs&);
  bool (*gram)(const SpectralArgs&);
  bool (*is_definite)(const SpectralArgs&);
  bool (*distance)(const SpectralArgs&);
  bool (*wide_product)(const SpectralArgs&);
  bool (*subtract_product)(const SpectralArgs&);
};

// The best that this machine can run, or what ORTHOKERN_ISA names.
const CpuKernels& cpu_kernels();
// Choose by name (null: the best); false if it was not built or this machine cannot run it.
bool cpu_select(const char* isa);
// Those that this machine can run, best first.
std::vector<const char*> cpu_isas();
// Where the threads come from.
const char* parallel_pool();

}  // namespace orthokern
