"""peephole_scan on the CPU; the kernels: ``csrc/cpu/peephole_scan.cpp``."""

from __future__ import annotations

from torch import Tensor

from orthokern._products import ieee_products, product_with_states
from orthokern._scan_contract import PeepholeGradients, PeepholeInputs, PeepholeStates
from orthokern.cpu._call import call, new


def peephole_scan_fwd(inputs: PeepholeInputs, *, need_gates: bool = True) -> PeepholeStates:
    """See ``orthokern.ops.peephole_scan``."""
    assert inputs.x is not None
    T, (B, N), dtype = inputs.x.shape[0], inputs.h0.shape, inputs.h0.dtype
    hs, cs = (new(T, B, N, dtype=dtype) for _ in range(2))
    states = PeepholeStates(hs, cs, new(T, B, 4 * N, dtype=dtype) if need_gates else None)
    call("peephole_scan_fwd", dtype, {"B": B, "T": T, "N": N}, {**inputs._asdict(), **states._asdict()})
    return states


@ieee_products()
def peephole_scan_bwd(
    inputs: PeepholeInputs, grad_hs: Tensor | None, grad_cs: Tensor | None, states: PeepholeStates
) -> PeepholeGradients:
    """See ``orthokern.ops.peephole_scan``."""
    (_, w, peephole, h0, c0), (T, B, N) = inputs, states.hs.shape
    grad_x = new(T, B, 4 * N, dtype=h0.dtype)
    grad_peephole, grad_h0, grad_c0 = (new(*t.shape, dtype=t.dtype) for t in (peephole, h0, c0))
    tensors = {"w": w, "peephole": peephole, "c0": c0, "grad_hs": grad_hs, "grad_cs": grad_cs}
    saved = {"saved_cs": states.cs, "saved_gates": states.gates}
    results = {"grad_x": grad_x, "grad_peephole": grad_peephole, "grad_h0": grad_h0, "grad_c0": grad_c0}
    call("peephole_scan_bwd", h0.dtype, {"B": B, "T": T, "N": N}, {**tensors, **saved, **results})
    grad_w = product_with_states(grad_x, h0, states.hs)
    return PeepholeGradients(grad_x, grad_w, grad_peephole, grad_h0, grad_c0)
