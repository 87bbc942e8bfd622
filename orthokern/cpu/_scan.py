"""factored_scan and dense_scan on the CPU."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._map_gradients import map_gradients, without_m
from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates, types_of
from orthokern.cpu._call import Prepared, call, has_amx, has_bf16, new
from orthokern.errors import InputError

# T B up to which products are exact, also with precision bf16
MOST_ROWS = 16
# the tensors of ScanArgs, which have the same names in ScanArgs of csrc/cpu/ops.h
_TENSORS = [name for name, kind in types_of(ScanArgs).items() if kind.startswith("Tensor")]
_tensors_of = itemgetter(*map(ScanArgs._fields.index, _TENSORS))
_GRADIENTS = [f"grad_{name}" for name in ScanGradients._fields]  # there


def _arguments(args: ScanArgs, steps: int) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Sizes and tensors that forward and backward use: fields of ScanArgs in ``csrc/cpu/ops.h``."""
    B, N = args.h0.shape
    x, tensors = args.x, dict(zip(_TENSORS, _tensors_of(args)))  # noqa: B905  # strict takes longer
    tensors["tokens"] = None
    if x is not None and not x.is_floating_point() and args.weight is not None:
        tensors["x"], tensors["tokens"] = None, x
    K, size, leak_size = (0 if t is None else t.shape[-1] for t in (args.first, args.act_param, args.leak))
    D = N
    if args.weight is not None and not (D := args.weight.shape[1]):
        raise InputError(f"{args.op}: weight has shape {list(args.weight.shape)}: accepted is [N, D] with D >= 1")
    sizes = {
        "B": B,
        "T": steps,
        "N": N,
        "K": K,
        "D": D,
        "activation": ACTIVATIONS[args.activation].number,
        "act_param_size": size,
        "leak_size": leak_size,
        "checkpoint_every": args.checkpoint_every,
        "clip": args.clip,
        "bf16": has_bf16() + has_amx() if args.precision == "bf16" and steps * B > MOST_ROWS else 0,
    }
    return sizes, tensors


def scan_fwd(args: ScanArgs) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    (B, N), T, dtype, every = args.h0.shape, args.time_steps, args.h0.dtype, args.checkpoint_every
    sizes, tensors = _arguments(args, T)
    hs = tensors["hs"] = new(T, B, N, dtype=dtype)
    ckpt = tensors["ckpt"] = new(-(-T // every), B, N, dtype=dtype) if every else None
    pre = tensors["pre"] = new(T, B, N, dtype=dtype) if args.keeps_pre else None
    call(f"{args.op}_fwd", dtype, sizes, tensors)
    return ScanStates(hs, ckpt, pre)


def prepared_step(args: ScanArgs) -> Prepared:
    """One step without gradients, for tensors like those of args. The call takes x, h0, hs, resets,
    reset_state, and others that are to replace those of args."""
    sizes, tensors = _arguments(args, 1)
    fixed = {name: t for name, t in tensors.items() if name not in ("x", "h0", "resets", "reset_state")}
    return Prepared(f"{args.op}_fwd", args.h0.dtype, sizes, {**fixed, "ckpt": None, "pre": None})


def scan_bwd(
    args: ScanArgs,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    needs: Any,
) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    (T, B, N), dtype = grad_hs.shape, grad_hs.dtype
    sizes, tensors = _arguments(args, T)

    def like(tensor: Tensor | None, required: bool) -> Tensor | None:
        return new(*tensor.shape, dtype=dtype) if tensor is not None and required else None

    thin = needs.map and args.first is not None and without_m(T * B, N, sizes["K"])
    grads = ScanGradients(
        x=new(T, B, sizes["D"], dtype=dtype) if needs.x and tensors["tokens"] is None else None,
        first=like(args.first, thin),
        scale=like(args.scale, thin),
        second=like(args.second, thin),
        h0=like(args.h0, needs.h0),
        weight=like(args.weight, needs.sums),
        bias=like(args.bias, needs.sums),
        act_param=like(args.act_param, needs.act_param),
        reset_state=like(args.reset_state, args.resets is not None),
        leak=like(args.leak, needs.leak),
        norm=new(T, dtype=dtype),
    )
    tensors |= {"grad_hs": grad_hs, "states": states, "saved_pre": pre}
    m = tensors["grad_m"] = new(N, N, dtype=dtype) if needs.map and not thin else None
    tensors |= zip(_GRADIENTS, grads, strict=True)
    call(f"{args.op}_bwd", dtype, sizes, tensors)
    if m is None:
        return grads
    first, scale, second = map_gradients(args, m)
    return grads._replace(first=first, scale=scale, second=second)
