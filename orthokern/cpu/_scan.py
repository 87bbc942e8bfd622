"""What factored_scan and dense_scan share on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern.cpu._call import call, new


def _scan_inputs(
    x: Tensor | None,
    steps: int,
    maps: dict[str, Tensor | None],
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    lengths: Tensor | None,
) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    b, n = h0.shape
    tokens = x is not None and not x.is_floating_point()
    sizes = {
        "B": b,
        "T": steps,
        "N": n,
        "K": 0 if maps["first"] is None else maps["first"].shape[1],
        "D": 0 if weight is None else weight.shape[1],
        "activation": ACTIVATIONS[activation].number,
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
    inputs = {
        **maps,
        "x": None if tokens else x,
        "tokens": x if tokens else None,
        "h0": h0,
        "weight": weight,
        "bias": bias,
        "act_param": act_param,
        "lengths": lengths,
    }
    return sizes, inputs


def scan_fwd(
    name: str,
    x: Tensor,
    maps: dict[str, Tensor | None],
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, inputs = _scan_inputs(x, x.shape[0], maps, h0, weight, bias, act_param, activation, lengths)
    t, b, n, dtype = sizes["T"], sizes["B"], sizes["N"], h0.dtype
    hs = new(t, b, n, dtype=dtype)
    every = checkpoint_every
    ckpt = new(-(-t // every), b, n, dtype=dtype) if every else None
    pre = new(t, b, n, dtype=dtype) if ACTIVATIONS[activation].needs_input and not every else None
    call(name, dtype, {**sizes, "checkpoint_every": every}, {**inputs, "hs": hs, "ckpt": ckpt, "pre": pre})
    return hs, hs.new_empty(0) if ckpt is None else ckpt, hs.new_empty(0) if pre is None else pre


def scan_bwd(
    name: str,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    maps: dict[str, Tensor | None],
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int,
    need_x: bool,
    need_params: bool,
    lengths: Tensor | None,
    message_clip: float,
) -> tuple[Tensor, ...]:
    """grad_x, M [N, N], grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm.

    x may be None where it was the whole input term.
    """
    sizes, inputs = _scan_inputs(x, grad_hs.shape[0], maps, h0, weight, bias, act_param, activation, lengths)
    n, dtype = sizes["N"], h0.dtype

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return new(*tensor.shape, dtype=dtype) if tensor is not None and wanted else None

    results: dict[str, Tensor | None] = {
        "grad_x": like(grad_hs if x is None else x, need_x and inputs["tokens"] is None),
        "grad_map": new(n, n, dtype=dtype) if need_params else None,
        "grad_h0": like(h0, True),
        "grad_weight": like(weight, need_params),
        "grad_bias": like(bias, need_params),
        "grad_act_param": like(act_param, need_params),
        "grad_norm": new(sizes["T"], dtype=dtype),
    }
    needs_pre = ACTIVATIONS[activation].needs_input and not checkpoint_every
    saved = {"grad_hs": grad_hs, "states": states, "saved_pre": pre if needs_pre else None}
    options = {"checkpoint_every": checkpoint_every, "message_clip": message_clip}
    call(name, dtype, {**sizes, **options}, {**inputs, **saved, **results})
    # an empty tensor for each that was not wanted: an op's results may not be one tensor twice
    return tuple(torch.empty(0, dtype=dtype) if found is None else found for found in results.values())
