"""factored_scan and dense_scan on the CPU."""

from __future__ import annotations

from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import Map, ScanGradients, ScanInputs, ScanOptions, ScanStates
from orthokern.cpu._call import call, new

# ScanGradients, as ScanArgs names them
_RESULTS = (
    "grad_x",
    "grad_map",
    "grad_h0",
    "grad_weight",
    "grad_bias",
    "grad_act_param",
    "grad_reset_state",
    "grad_norm",
)


def _arguments(
    map_: Map, inputs: ScanInputs, options: ScanOptions, steps: int
) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    """Sizes and tensors that forward and backward take: fields of ScanArgs in ``csrc/cpu/ops.h``."""
    x, weight, act_param = inputs.x, inputs.weight, inputs.act_param
    *replicas, B, N = inputs.h0.shape
    tokens = x is not None and not x.is_floating_point()
    sizes = {
        "B": B,
        "T": steps,
        "N": N,
        "K": 0 if map_.first is None else map_.first.shape[-1],
        "D": 0 if weight is None else weight.shape[-1],
        "R": replicas[0] if replicas else 1,
        "shared_x": int(bool(replicas) and x is not None and x.ndim == (2 if tokens else 3)),
        "activation": ACTIVATIONS[options.activation].number,
        "act_param_size": 0 if act_param is None else act_param.shape[-1],
        "checkpoint_every": options.checkpoint_every,
    }
    tensors = {
        **map_._asdict(),
        **inputs._asdict(),
        "x": None if tokens else x,
        "tokens": x if tokens else None,
        "lengths": options.lengths,
        "resets": options.resets,
    }
    return sizes, tensors


def scan_fwd(map_: Map, inputs: ScanInputs, options: ScanOptions) -> ScanStates:
    """See :mod:`orthokern.ops.factored_scan` and :mod:`orthokern.ops.dense_scan`."""
    assert inputs.x is not None
    T, rows, dtype, every = inputs.x.shape[0], inputs.h0.shape, inputs.h0.dtype, options.checkpoint_every
    sizes, tensors = _arguments(map_, inputs, options, T)
    states = ScanStates(
        hs=new(T, *rows, dtype=dtype),
        ckpt=new(-(-T // every), *rows, dtype=dtype) if every else None,
        pre=new(T, *rows, dtype=dtype) if options.keeps_pre else None,
    )
    call(f"{map_.op}_fwd", dtype, sizes, {**tensors, **states._asdict()})
    return states


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
    """See :mod:`orthokern.ops.factored_scan` and :mod:`orthokern.ops.dense_scan`."""
    T, (*replicas, B, N), dtype = grad_hs.shape[0], inputs.h0.shape, inputs.h0.dtype
    sizes, tensors = _arguments(map_, inputs, options, T)

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return new(*tensor.shape, dtype=dtype) if tensor is not None and wanted else None

    grads = ScanGradients(
        x=new(T, *replicas, B, sizes["D"] or N, dtype=dtype) if need_x and tensors["tokens"] is None else None,
        m=new(*replicas, N, N, dtype=dtype) if need_params else None,
        h0=new(*replicas, B, N, dtype=dtype),
        weight=like(inputs.weight, need_params),
        bias=like(inputs.bias, need_params),
        act_param=like(inputs.act_param, need_params),
        reset_state=like(inputs.reset_state, options.resets is not None),
        norm=new(*replicas, T, dtype=dtype),
    )
    saved = {"grad_hs": grad_hs, "states": states, "saved_pre": pre}
    results = dict(zip(_RESULTS, grads, strict=True))
    call(f"{map_.op}_bwd", dtype, {**sizes, "message_clip": options.message_clip}, {**tensors, **saved, **results})
    return grads
