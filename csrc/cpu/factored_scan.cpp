// factored_scan on the CPU: see scan.h.
#include "cpu/scan.h"

namespace orthokern::ORTHOKERN_ISA {

bool factored_scan_fwd(const ScanArgs& args) {
  return args.dtype == kFloat64 ? scan_forward<double>(args) : scan_forward<float>(args);
}
bool factored_scan_bwd(const ScanArgs& args) {
  return args.dtype == kFloat64 ? scan_backward<double>(args) : scan_backward<float>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
