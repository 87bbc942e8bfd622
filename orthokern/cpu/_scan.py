"""factored_scan and dense_scan on the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import Map, ScanGradients, ScanInputs, ScanOptions, ScanStates
from orthokern.cpu._call import call, has_amx, has_bf16, new

# T B up to which products are exact, also with precision bf16
MOST_ROWS = 16
# the fields of ScanGradients by their names in ScanArgs
_NAMES = ("x", "map", "h0", "weight", "bias", "act_param", "reset_state", "norm")


def _bf16() -> int:
    """The form of products with bfloat16 factors, as in ScanArgs of ``csrc/cpu/ops.h``."""
    return has_bf16() + has_amx()


def _arguments(
    map_: Map, inputs: ScanInputs, options: ScanOptions, steps: int
) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Sizes and tensors that forward and backward take: fields of ScanArgs in ``csrc/cpu/ops.h``."""
    x, h0, weight, bias, act_param, reset_state = inputs
    first, scale, second = map_
    B, N = h0.shape
    tokens = x is not None and not x.is_floating_point()
    K, size = (0 if tensor is None else tensor.shape[-1] for tensor in (first, act_param))
    D = N if weight is None else weight.shape[1]
    sizes = {
        "B": B,
        "T": steps,
        "N": N,
        "K": K,
        "D": D,
        "activation": ACTIVATIONS[options.activation].number,
        "act_param_size": size,
        "checkpoint_every": options.checkpoint_every,
        "bf16": _bf16() if options.precision == "bf16" and steps * B > MOST_ROWS else 0,
    }
    tensors = {
        "first": first,
        "scale": scale,
        "second": second,
        "x": None if tokens else x,
        "tokens": x if tokens else None,
        "h0": h0,
        "weight": weight,
        "bias": bias,
        "act_param": act_param,
        "reset_state": reset_state,
        "lengths": options.lengths,
        "resets": options.resets,
    }
    return sizes, tensors


def scan_fwd(map_: Map, inputs: ScanInputs, options: ScanOptions) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    assert inputs.x is not None
    T, (B, N), dtype, every = inputs.x.shape[0], inputs.h0.shape, inputs.h0.dtype, options.checkpoint_every
    sizes, tensors = _arguments(map_, inputs, options, T)
    hs = tensors["hs"] = new(T, B, N, dtype=dtype)
    ckpt = tensors["ckpt"] = new(-(-T // every), B, N, dtype=dtype) if every else None
    pre = tensors["pre"] = new(T, B, N, dtype=dtype) if options.keeps_pre else None
    call(f"{map_.op}_fwd", dtype, sizes, tensors)
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
    T, (B, N), dtype = grad_hs.shape[0], inputs.h0.shape, inputs.h0.dtype
    sizes, tensors = _arguments(map_, inputs, options, T)

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return new(*tensor.shape, dtype=dtype) if tensor is not None and wanted else None

    grads = ScanGradients(
        x=new(T, B, sizes["D"], dtype=dtype) if need_x and tensors["tokens"] is None else None,
        m=new(N, N, dtype=dtype) if need_params else None,
        h0=new(B, N, dtype=dtype),
        weight=like(inputs.weight, need_params),
        bias=like(inputs.bias, need_params),
        act_param=like(inputs.act_param, need_params),
        reset_state=like(inputs.reset_state, options.resets is not None),
        norm=new(T, dtype=dtype),
    )
    sizes["message_clip"] = options.message_clip
    tensors |= {"grad_hs": grad_hs, "states": states, "saved_pre": pre}
    tensors |= {f"grad_{name}": grad for name, grad in zip(_NAMES, grads, strict=True)}
    call(f"{map_.op}_bwd", dtype, sizes, tensors)
    return grads
