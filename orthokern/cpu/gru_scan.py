"""gru_scan on the CPU; the kernels: ``csrc/cpu/gru_scan.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._gru_parameters import parameter_gradients
from orthokern._scan_contract import GruArgs, GruGradients, GruStates
from orthokern.cpu._call import Prepared, call, new


def gru_scan_fwd(args: GruArgs) -> GruStates:
    """See ``orthokern.ops.gru_scan``."""
    assert args.x is not None
    T, (B, N), dtype = args.x.shape[0], args.h0.shape, args.h0.dtype
    sizes, tensors = _arguments(args, T)
    tensors["x"], tensors["bias"] = args.x, args.bias
    hs = tensors["hs"] = new(T, B, N, dtype=dtype)
    gates = tensors["gates"] = new(T, B, 3 * N, dtype=dtype)
    pre = tensors["pre"] = None if args.kanai else new(T, B, N, dtype=dtype)
    call("gru_scan_fwd", dtype, sizes, tensors)
    return GruStates(hs, gates, pre)


def prepared_step(args: GruArgs) -> Prepared:
    """One step without gradients, for tensors like those of args. The call takes x, h0, hs, gates, pre, resets and
    reset_state."""
    sizes, tensors = _arguments(args, 1)
    fixed = {name: t for name, t in tensors.items() if name not in ("h0", "resets", "reset_state")}
    return Prepared("gru_scan_fwd", args.h0.dtype, sizes, {**fixed, "bias": args.bias})


def gru_scan_bwd(args: GruArgs, grad_hs: Tensor, states: GruStates, needs: Any) -> GruGradients:
    """See ``orthokern.ops.gru_scan``."""
    (T, B, N), dtype = grad_hs.shape, args.h0.dtype
    sizes, tensors = _arguments(args, T)
    saved = {f"saved_{name}": tensor for name, tensor in states._asdict().items()}
    saved["grad_hs"] = grad_hs
    grad_x, factor = new(T, B, 3 * N, dtype=dtype), new(T, B, N, dtype=dtype)
    grad_h0 = torch.empty(B, N, dtype=dtype, device="cpu") if needs.h0 else None
    grad_norm = torch.empty(T, dtype=dtype, device="cpu")
    state = args.reset_state
    grad_reset_state = None if args.resets is None or state is None else torch.zeros(B, N, dtype=dtype, device="cpu")
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "grad_norm": grad_norm}
    call("gru_scan_bwd", dtype, sizes, {**tensors, **saved, **results, "grad_reset_state": grad_reset_state})
    grad_w = grad_bias = None
    if needs.w or needs.bias:
        grad_w, grad_bias = parameter_gradients(args, states.hs, grad_x, factor)
    return GruGradients(grad_x, grad_w, grad_h0, grad_bias, grad_reset_state, grad_norm)


def _arguments(args: GruArgs, T: int) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    """Sizes and tensors that forward and backward use: fields of GruArgs in ``csrc/cpu/ops.h``."""
    B, N = args.h0.shape
    tensors = {
        "w": args.w,
        "h0": args.h0,
        "lengths": args.lengths,
        "resets": args.resets,
        "reset_state": args.reset_state,
    }
    return {"B": B, "T": T, "N": N, "kanai": int(args.kanai)}, tensors
