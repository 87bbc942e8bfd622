// dense_scan on the CPU: as in factored_scan.cpp, with K == 0.
#include "cpu/ops.h"

namespace orthokern::ORTHOKERN_ISA {

bool factored_scan_fwd(const ScanArgs& args);
bool factored_scan_bwd(const ScanArgs& args);

bool dense_scan_fwd(const ScanArgs& args) { return factored_scan_fwd(args); }
bool dense_scan_bwd(const ScanArgs& args) { return factored_scan_bwd(args); }

}  // namespace orthokern::ORTHOKERN_ISA
