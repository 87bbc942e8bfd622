"""gru_scan on the CPU; the kernels: ``csrc/cpu/gru_scan.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._gru_parameters import parameter_gradients
from orthokern._scan_contract import GruGradients, GruInputs, GruOptions, GruStates
from orthokern.cpu._call import call, new


def gru_scan_fwd(inputs: GruInputs, options: GruOptions) -> GruStates:
    """See ``orthokern.ops.gru_scan``."""
    assert inputs.x is not None
    T, (B, N), dtype = inputs.x.shape[0], inputs.h0.shape, inputs.h0.dtype
    sizes, tensors = _arguments(inputs, options, T)
    tensors["x"], tensors["bias"] = inputs.x, inputs.bias
    hs = tensors["hs"] = new(T, B, N, dtype=dtype)
    gates = tensors["gates"] = new(T, B, 3 * N, dtype=dtype)
    pre = tensors["pre"] = None if options.kanai else new(T, B, N, dtype=dtype)
    call("gru_scan_fwd", dtype, sizes, tensors)
    return GruStates(hs, gates, pre)


def gru_scan_bwd(
    inputs: GruInputs, options: GruOptions, grad_hs: Tensor, states: GruStates, *, need_params: bool = True
) -> GruGradients:
    """See ``orthokern.ops.gru_scan``."""
    (T, B, N), dtype = grad_hs.shape, inputs.h0.dtype
    sizes, tensors = _arguments(inputs, options, T)
    saved = {f"saved_{name}": tensor for name, tensor in states._asdict().items()}
    sizes["grad_steps"], saved["grad_hs"] = T, grad_hs
    grad_x, factor = new(T, B, 3 * N, dtype=dtype), new(T, B, N, dtype=dtype)
    grad_h0, grad_norm = torch.empty(B, N, dtype=dtype, device="cpu"), torch.empty(T, dtype=dtype, device="cpu")
    state = inputs.reset_state
    grad_reset_state = None if options.resets is None or state is None else torch.zeros_like(state)
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "grad_norm": grad_norm}
    more = {"grad_reset_state": grad_reset_state, "ghat": None, "grad_gates": None, "grad_pre": None}
    call("gru_scan_bwd", dtype, sizes, {**tensors, **saved, **results, **more})
    grad_w = grad_bias = None
    if need_params:
        grad_w, grad_bias = parameter_gradients(inputs, options, states.hs, grad_x, factor)
    return GruGradients(grad_x, grad_w, grad_h0, grad_bias, grad_reset_state, grad_norm)


def _arguments(inputs: GruInputs, options: GruOptions, T: int) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    """Sizes and tensors that forward and backward take: fields of GruArgs in ``csrc/cpu/ops.h``."""
    B, N = inputs.h0.shape
    tensors = {
        "w": inputs.w, "h0": inputs.h0, "lengths": options.lengths, "resets": options.resets,
        "reset_state": inputs.reset_state,
    }  # fmt: skip
    return {"B": B, "T": T, "N": N, "kanai": int(options.kanai)}, tensors
