"""factored_scan and dense_scan on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import LastGrad, Map, ScanGradients, ScanInputs, ScanOptions, ScanStates, stored_steps
from orthokern.cpu._call import Prepared, call, has_amx, has_bf16, new
from orthokern.cpu._steps import MOST_ROWS

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


def prepared_scan(map_: Map, inputs: ScanInputs, activation: str, parts: Sequence[Tensor]) -> Prepared:
    """A forward for inference, called with x, h0 and hs; parts: see `Prepared`."""
    assert inputs.x is not None
    sizes, tensors = _arguments(map_, inputs, ScanOptions(activation), inputs.x.shape[0])
    tensors |= {"hs": inputs.h0, "ckpt": None, "pre": None}
    return Prepared(f"{map_.op}_fwd", inputs.h0.dtype, sizes, tensors, ("x", "h0", "hs"), parts)


def scan_bwd(
    map_: Map,
    inputs: ScanInputs,
    options: ScanOptions,
    grad_hs: Tensor | LastGrad,
    states: Tensor,
    pre: Tensor | None,
    *,
    need_x: bool = True,
    need_params: bool = True,
) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    return _backward(map_, inputs, options, (grad_hs, states, pre), need_x, need_params, None)


def _backward(
    map_: Map, inputs: ScanInputs, options: ScanOptions, saved: tuple[Any, ...], need_x: bool, need_params: bool,
    delta: Tensor | None,
) -> ScanGradients:  # fmt: skip
    """The gradients from (grad_hs, states, pre); delta [T,B,N], if given, becomes that of the pre-activations."""
    grad_hs, states, pre = saved
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
    sizes["grad_steps"], tensors["grad_hs"] = stored_steps(grad_hs)
    tensors |= {"states": states, "saved_pre": pre, "grad_delta": delta}
    tensors |= {f"grad_{name}": grad for name, grad in zip(_NAMES, grads, strict=True)}
    _call(map_, "_bwd", sizes, tensors)
    return grads


def scan_bwd_kept(
    map_: Map, inputs: ScanInputs, options: ScanOptions, *saved: Any, need_x: bool, need_params: bool
) -> tuple[ScanGradients, Tensor]:
    """The backward with delta [T,B,N], the gradient of the pre-activations, which its derivative needs."""
    delta = None if inputs.weight is None else new(*saved[0].shape, dtype=saved[0].dtype)
    found = _backward(map_, inputs, options, saved, need_x or delta is None, need_params, delta)
    if delta is None:
        assert found.x is not None
        delta = found.x
    return found, delta


class ScanSecond(NamedTuple):
    """Gradients from cotangents of the results of the backward, but for those that pass through the states; None for
    what does not apply or is not needed."""

    grad_hs: Tensor | None  # [T,B,N]
    hs: Tensor | None  # [T,B,N]
    x: Tensor | None  # [T,B,D]
    m: Tensor | None  # [N,N], of W
    h0: Tensor | None  # [B,N]
    weight: Tensor | None  # [N,D]


def scan_second(
    map_: Map, inputs: ScanInputs, options: ScanOptions, states: Tensor, pre: Tensor | None, delta: Tensor,
    *cotangents: Tensor | None, need_grad_hs: bool, need_map: bool,
) -> ScanSecond:  # fmt: skip
    """Note [Second derivative of a scan] in ``orthokern/ops/_second_native.py``; delta: of the backward; cotangents:
    contiguous, None for zeros. Options without resets, clip and checkpoints; ids on padding are valid."""
    of_x, of_map, of_h0, of_weight, of_bias = cotangents
    (T, B, N), dtype, x, weight = delta.shape, delta.dtype, inputs.x, inputs.weight
    sizes, tensors = _arguments(map_, inputs, options, T)
    e = of_x if weight is None else None
    if x is not None and tensors["tokens"] is not None and of_weight is not None:
        e = torch.index_select(of_weight.mT, 0, x.flatten())
    features = weight is not None and tensors["tokens"] is None
    of_x, of_weight = (of_x, of_weight) if features else (None, None)
    bends = options.activation in ("tanh", "softsign")
    before = new(T + 1, B, N, dtype=dtype) if bends or of_map is not None else None
    found = ScanSecond(
        grad_hs=new(T, B, N, dtype=dtype) if need_grad_hs else None,
        hs=None if before is None else before[1:],
        x=new(T, B, sizes["D"], dtype=dtype) if of_weight is not None else None,
        m=new(N, N, dtype=dtype) if need_map or of_x is not None else None,
        h0=None if before is None else before[0],
        weight=new(N, sizes["D"], dtype=dtype) if of_x is not None else None,
    )
    names = ("B", "T", "N", "K", "D", "activation", "act_param_size")
    shared = ("lengths", "first", "scale", "second", "h0", "weight", "x", "act_param")
    call(
        "scan_second", dtype, {name: sizes[name] for name in names},
        {**{name: tensors[name] for name in shared}, "states": states, "saved_pre": pre, "delta": delta,
         "of_x": of_x, "e": e, "of_map": of_map, "of_h0": of_h0, "of_weight": of_weight, "of_bias": of_bias,
         "grad_hs": found.grad_hs, "grad_before": before, "grad_x": found.x, "grad_map": found.m,
         "grad_weight": found.weight},
    )  # fmt: skip
    return found
