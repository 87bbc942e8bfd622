// factored_scan on the CPU: see scan.h, whose code is compiled here for dense_scan too.
#define ORTHOKERN_DEFINE_SCAN
#include "cpu/scan.h"

namespace orthokern::ORTHOKERN_ISA {

template bool scan_forward<float>(const ScanArgs&);
template bool scan_forward<double>(const ScanArgs&);
template bool scan_backward<float>(const ScanArgs&);
template bool scan_backward<double>(const ScanArgs&);

bool factored_scan_fwd(const ScanArgs& args) {
  return args.dtype == kFloat64 ? scan_forward<double>(args) : scan_forward<float>(args);
}
bool factored_scan_bwd(const ScanArgs& args) {
  return args.dtype == kFloat64 ? scan_backward<double>(args) : scan_backward<float>(args);
}

}  // namespace orthokern::ORTHOKERN_ISA
