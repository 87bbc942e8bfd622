"""gru_scan on the CPU; the kernels: ``csrc/cpu/gru_scan.cpp``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from orthokern._gru_parameters import parameter_gradients
from orthokern._products import ieee_products
from orthokern._scan_contract import GruGradients, GruInputs, GruOptions, GruStates, LastGrad, stored_steps
from orthokern.cpu._call import Prepared, call, new


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


def prepared_gru(inputs: GruInputs, options: GruOptions) -> Prepared:
    """A forward, called with x, h0 and the results hs, gates and pre (any address in "kanai")."""
    assert inputs.x is not None
    sizes, tensors = _arguments(inputs, options, inputs.x.shape[0])
    tensors |= {"x": inputs.x, "bias": inputs.bias, "hs": inputs.h0, "gates": inputs.h0, "pre": None}
    return Prepared("gru_scan_fwd", inputs.h0.dtype, sizes, tensors, ("x", "h0", "hs", "gates", "pre"), [])


def gru_scan_bwd(
    inputs: GruInputs, options: GruOptions, grad_hs: Tensor | LastGrad, states: GruStates, *, need_params: bool = True
) -> GruGradients:
    """See ``orthokern.ops.gru_scan``."""
    return gru_scan_bwd_more(inputs, options, grad_hs, states, need_params=need_params)[0]


def gru_scan_bwd_more(
    inputs: GruInputs, options: GruOptions, grad_hs: Tensor | LastGrad, states: GruStates, *, need_params: bool,
    grad_gates: Tensor | None = None, grad_pre: Tensor | None = None, ghat: Tensor | None = None,
) -> tuple[GruGradients, Tensor]:  # fmt: skip
    """The gradients, and factor [T,B,N]: r h' in variant "kanai", d_q in variant "torch". grad_gates, grad_pre: what a
    second derivative gives gates and pre; ghat [T,B,N], if given, becomes dL/dh_t."""
    (T, B, N), dtype = grad_hs.shape, inputs.h0.dtype
    sizes, tensors = _arguments(inputs, options, T)
    saved = {f"saved_{name}": tensor for name, tensor in states._asdict().items()}
    sizes["grad_steps"], saved["grad_hs"] = stored_steps(grad_hs)
    grad_x, factor = new(T, B, 3 * N, dtype=dtype), new(T, B, N, dtype=dtype)
    grad_h0, grad_norm = torch.empty(B, N, dtype=dtype, device="cpu"), torch.empty(T, dtype=dtype, device="cpu")
    state = inputs.reset_state
    grad_reset_state = None if options.resets is None or state is None else torch.zeros_like(state)
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "grad_norm": grad_norm, "ghat": ghat}
    more = {"grad_reset_state": grad_reset_state, "grad_gates": grad_gates, "grad_pre": grad_pre}
    call("gru_scan_bwd", dtype, sizes, {**tensors, **saved, **results, **more})
    grad_w = grad_bias = None
    if need_params:
        grad_w, grad_bias = parameter_gradients(inputs, options, states.hs, grad_x, factor)
    return GruGradients(grad_x, grad_w, grad_h0, grad_bias, grad_reset_state, grad_norm), factor


class GruKept(NamedTuple):
    """What `gru_second` needs of the backward."""

    grad_x: Tensor  # [T,B,3N]
    factor: Tensor  # [T,B,N]
    ghat: Tensor  # [T,B,N]


def gru_scan_bwd_kept(
    inputs: GruInputs, options: GruOptions, grad_hs: Tensor, states: GruStates, *, need_params: bool
) -> tuple[GruGradients, GruKept]:
    """gru_scan_bwd with what its derivative needs."""
    ghat = new(*grad_hs.shape, dtype=grad_hs.dtype)
    found, factor = gru_scan_bwd_more(inputs, options, grad_hs, states, need_params=need_params, ghat=ghat)
    return found, GruKept(found.x, factor, ghat)


class GruSecond(NamedTuple):
    """Gradients from cotangents of the results of the backward, but for those that pass through the states."""

    grad_hs: Tensor  # [T,B,N]
    hs: Tensor  # [T,B,N]
    gates: Tensor  # [T,B,3N]
    pre: Tensor | None  # [T,B,N]; None in "kanai"
    w: Tensor | None  # [3N,N]
    h0: Tensor  # [B,N]


@ieee_products()
def gru_second(
    inputs: GruInputs, options: GruOptions, states: GruStates, kept: GruKept, *cotangents: Tensor | None, need_w: bool
) -> GruSecond:
    """Note [Second derivative of the GRU] in ``orthokern/ops/_second_gru.py``; cotangents: contiguous, None for zeros.
    Options without resets."""
    of_x, of_w, of_h0, of_bias = cotangents
    (T, B, N), dtype, kanai = kept.ghat.shape, inputs.h0.dtype, options.kanai
    grad_x, rows, factor = kept.grad_x, kept.grad_x.view(T * B, 3 * N), kept.factor.view(T * B, N)
    v0 = torch.zeros_like(inputs.h0) if of_h0 is None else of_h0
    before = new(T + 1, B, N, dtype=dtype)  # of h0 and hs
    v, gates, pre = new(T, B, N, dtype=dtype), new(T, B, 3 * N, dtype=dtype), new(T, B, N, dtype=dtype)
    d_m = torch.mm(rows[:, 2 * N :], inputs.w[2 * N :], out=new(T * B, N, dtype=dtype)) if kanai else None
    sent = None
    if kanai and of_w is not None:
        sent = torch.mm(rows[:, 2 * N :], of_w[2 * N :], out=new(T * B, N, dtype=dtype))
    sizes, tensors = _arguments(inputs, options, T)
    call(
        "gru_second", dtype, sizes,
        {**{name: tensors[name] for name in ("w", "h0", "lengths")},
         **{f"saved_{name}": tensor for name, tensor in states._asdict().items()},
         "ghat": kept.ghat, "d_m": d_m, "x": torch.zeros_like(grad_x) if of_x is None else of_x,
         "added": _added(inputs, states, kept, of_w, of_bias, kanai), "sent": sent, "v0": v0,
         "v": v, "gates": gates, "pre": pre, "before": before[:T]},
    )  # fmt: skip
    before[T].zero_()
    if of_w is not None:
        to = before[:T].view(T * B, N)
        to.addmm_(rows[:, : 2 * N], of_w[: 2 * N])
        if not kanai:
            to.addmm_(factor, of_w[2 * N :])
    w = None
    if need_w:  # as the backward's, with v in place of h, and (r h)' of r h
        there = inputs._replace(h0=v0, bias=None)
        w = parameter_gradients(there, options, v, grad_x, pre if kanai else kept.factor)[0]
    return GruSecond(v, before[1:], gates, None if kanai else pre, w, before[0])


def _added(
    inputs: GruInputs, states: GruStates, kept: GruKept, of_w: Tensor | None, of_bias: Tensor | None, kanai: bool
) -> Tensor | None:
    """What the cotangents of the gradients of w and bias add to W v, [T,B,3N]."""
    (T, B, N), dtype = kept.ghat.shape, inputs.h0.dtype
    if of_w is None:
        return None if of_bias is None else of_bias.expand(T, B, 3 * N).contiguous()
    added = new(T * B, 3 * N, dtype=dtype)
    width = 2 * N if kanai else 3 * N  # of what takes h'
    torch.mm(inputs.h0, of_w[:width].mT, out=added[:B, :width])
    torch.mm(states.hs[:-1].flatten(0, 1), of_w[:width].mT, out=added[B:, :width])
    if kanai:
        torch.mm(kept.factor.view(T * B, N), of_w[width:].mT, out=added[:, width:])
    return added if of_bias is None else added.add_(of_bias)


def _arguments(inputs: GruInputs, options: GruOptions, T: int) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    """Sizes and tensors that forward and backward take: fields of GruArgs in ``csrc/cpu/ops.h``."""
    B, N = inputs.h0.shape
    tensors = {
        "w": inputs.w, "h0": inputs.h0, "lengths": options.lengths, "resets": options.resets,
        "reset_state": inputs.reset_state,
    }  # fmt: skip
    return {"B": B, "T": T, "N": N, "kanai": int(options.kanai)}, tensors
