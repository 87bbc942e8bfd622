"""factored_scan and dense_scan on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import Map, ScanGradients, ScanInputs, ScanOptions, ScanStates
from orthokern.cpu._call import call, has_amx, has_bf16, new

# T B up to which the kernels compute exact products, kStepRows of csrc/cpu/direct.h
MOST_ROWS = 16
# the fields of ScanGradients by their names in ScanArgs
_NAMES = ("x", "map", "h0", "weight", "bias", "act_param", "reset_state", "norm")
# the tensors that have T in front, first those that models may share
_TIME_FIRST = ("x", "tokens", "resets", "hs", "ckpt", "pre", "grad_hs", "states", "saved_pre", "grad_x")


def _new(T: int, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[T, ...] of rows [B, N], or [T, R, B, N] with R in front in memory."""
    return new(T, *rows, dtype=dtype) if len(rows) == 2 else new(rows[0], T, *rows[1:], dtype=dtype).transpose(0, 1)


def _bf16() -> int:
    """The form of products with bfloat16 factors, as in ScanArgs of ``csrc/cpu/ops.h``."""
    return has_bf16() + has_amx()


def _call(map_: Map, direction: str, sizes: dict[str, Any], tensors: dict[str, Tensor | None]) -> None:
    """The kernel. It takes R in front, where the ops have T."""
    if map_.second.ndim == 3:
        for key in _TIME_FIRST[2 * sizes["shared_x"] :]:
            if (tensor := tensors.get(key)) is not None:
                tensors[key] = tensor.transpose(0, 1)
    call(map_.op + direction, map_.second.dtype, sizes, tensors)


def _arguments(
    map_: Map, inputs: ScanInputs, options: ScanOptions, steps: int
) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Sizes and tensors that forward and backward take: fields of ScanArgs in ``csrc/cpu/ops.h``."""
    x, h0, weight, bias, act_param, reset_state = inputs
    first, scale, second = map_
    *replicas, B, N = h0.shape
    tokens = x is not None and not x.is_floating_point()
    K, D, size = (0 if tensor is None else tensor.shape[-1] for tensor in (first, weight, act_param))
    sizes = {
        "B": B, "T": steps, "N": N, "K": K, "D": D, "R": replicas[0] if replicas else 1,
        "shared_x": int(bool(replicas) and x is not None and x.ndim == (2 if tokens else 3)),
        "activation": ACTIVATIONS[options.activation].number, "act_param_size": size,
        "checkpoint_every": options.checkpoint_every,
        "bf16": _bf16() if options.precision == "bf16" and steps * B > MOST_ROWS else 0,
    }  # fmt: skip
    tensors = {
        "first": first, "scale": scale, "second": second, "x": None if tokens else x, "tokens": x if tokens else None,
        "h0": h0, "weight": weight, "bias": bias, "act_param": act_param, "reset_state": reset_state,
        "lengths": options.lengths, "resets": options.resets,
    }  # fmt: skip
    return sizes, tensors


def scan_fwd(map_: Map, inputs: ScanInputs, options: ScanOptions) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    assert inputs.x is not None
    T, rows, dtype, every = inputs.x.shape[0], inputs.h0.shape, inputs.h0.dtype, options.checkpoint_every
    sizes, tensors = _arguments(map_, inputs, options, T)
    hs = tensors["hs"] = _new(T, rows, dtype)
    ckpt = tensors["ckpt"] = _new(-(-T // every), rows, dtype) if every else None
    pre = tensors["pre"] = _new(T, rows, dtype) if options.keeps_pre else None
    _call(map_, "_fwd", sizes, tensors)
    return ScanStates(hs, ckpt, pre)


def scan_bwd(
    map_: Map,
    inputs: ScanInputs,
    options: ScanOptions,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    *,
    need_x: bool = True,
    need_params: bool = True,
) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    T, (*replicas, B, N), dtype = grad_hs.shape[0], inputs.h0.shape, inputs.h0.dtype
    sizes, tensors = _arguments(map_, inputs, options, T)

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return new(*tensor.shape, dtype=dtype) if tensor is not None and wanted else None

    grads = ScanGradients(
        x=_new(T, (*replicas, B, sizes["D"] or N), dtype) if need_x and tensors["tokens"] is None else None,
        m=new(*replicas, N, N, dtype=dtype) if need_params else None,
        h0=new(*replicas, B, N, dtype=dtype),
        weight=like(inputs.weight, need_params),
        bias=like(inputs.bias, need_params),
        act_param=like(inputs.act_param, need_params),
        reset_state=like(inputs.reset_state, options.resets is not None),
        norm=new(*replicas, T, dtype=dtype),
    )
    sizes["message_clip"] = options.message_clip
    sizes["grad_steps"] = T
    tensors |= {"grad_hs": grad_hs, "states": states, "saved_pre": pre, "grad_delta": None}
    tensors |= {f"grad_{name}": grad for name, grad in zip(_NAMES, grads, strict=True)}
    _call(map_, "_bwd", sizes, tensors)
    return grads
