"""The number of elements of every tensor that a kernel reads or writes, from the sizes of its call, and its check.

One function for each struct of arguments in ``csrc/cpu/ops.h``, whose comments have the same shapes. A gradient
``grad_x`` and a saved tensor ``saved_x`` have the size of ``x``, unless they have their own entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import Readout, ScanArgs
from orthokern.errors import InputError

Sizes = Mapping[str, int]


_SCAN_DTYPES = {"lengths": torch.int64, "resets": torch.bool}  # of a scan; its other tensors have one dtype
_PARAMETRIC = {row.number: name for name, row in ACTIVATIONS.items() if row.parameter is not None}


def _parameter(s: Sizes, size: str) -> int:
    """Elements of a parameter of the units: 1 or N."""
    return 1 if s.get(size) == 1 else s["N"]


def _act_param(s: Sizes) -> int:
    """Elements of the activation's parameter."""
    if s.get("act_param_size") == 0 and (name := _PARAMETRIC.get(s["activation"])):
        raise InputError(f"act_param has no elements: {name} needs 1 or N = {s['N']}")
    return _parameter(s, "act_param_size")


def _scan(s: Sizes) -> dict[str, int]:
    B, T, N, D, K, every = s["B"], s["T"], s["N"], s["D"], s["K"], s["checkpoint_every"]
    if K > N:  # the kernels have no place for it
        raise InputError(f"first and second have {K} columns: accepted are at most {N}, one for each unit")
    rows = T * B
    return {
        **dict.fromkeys(("h0", "reset_state"), B * N),
        **dict.fromkeys(("hs", "pre"), rows * N),
        **dict.fromkeys(("tokens", "resets"), rows),
        **dict.fromkeys(("ckpt", "states"), (-(-T // every) * B if every else rows) * N),
        "first": N * K,
        "scale": K,
        "second": N * (K or N),
        "x": rows * D,
        "weight": N * D,
        "bias": N,
        "act_param": _act_param(s),
        "leak": _parameter(s, "leak_size"),
        "lengths": B,
        "grad_m": N * N,
        "grad_norm": T,
    }


def _gru(s: Sizes) -> dict[str, int]:
    B, T, N = s["B"], s["T"], s["N"]
    return {
        **dict.fromkeys(("h0", "reset_state"), B * N),
        **dict.fromkeys(("hs", "pre", "factor"), T * B * N),
        **dict.fromkeys(("x", "gates"), 3 * T * B * N),
        "w": 3 * N * N,
        "bias": 3 * N,
        "lengths": B,
        "resets": T * B,
        "grad_norm": T,
    }


def _peephole(s: Sizes) -> dict[str, int]:
    B, T, N = s["B"], s["T"], s["N"]
    return {
        **dict.fromkeys(("h0", "c0"), B * N),
        **dict.fromkeys(("hs", "cs"), T * B * N),
        **dict.fromkeys(("x", "gates"), 4 * T * B * N),
        "w": 4 * N * N,
        "peephole": 3 * N,
    }


def _activation(s: Sizes) -> dict[str, int]:
    return {**dict.fromkeys(("x", "y"), s["rows"] * s["N"]), "act_param": _act_param(s)}


def _linear_cross_entropy(s: Sizes) -> dict[str, int]:
    rows, N, C = s["rows"], s["N"], s["C"]
    return {"hidden": rows * N, "weight": C * N, "bias": C, "target": rows, "loss": 1}


def _rotation(s: Sizes) -> dict[str, int]:
    M, rows, D = s["M"], s["T"] * s["B"], s["D"]
    return {
        **dict.fromkeys(("re", "im"), M),
        **dict.fromkeys(("x", "z", "h"), 2 * rows * M),
        **dict.fromkeys(("z0", "h0"), 2 * s["B"] * M),
        "resets": rows,
        "features": rows * D,
        "weight": 2 * M * D,
        "bias": 2 * M,
    }


def _modal(s: Sizes) -> dict[str, int]:
    T, M, rows, D, C, P, K = s["T"], s["M"], s["T"] * s["B"], s["D"], s["C"], s["P"], s["K"]
    state = 2 * s["B"] * M
    return {
        **dict.fromkeys(("re", "im"), M),
        "x": 2 * rows * M,
        "z0": state,
        "tokens": rows,
        **dict.fromkeys(("step_states", "step_adjoints"), K * state),
        "lengths": s["B"],
        "table": D * 2 * M,
        "pairs": 2 * P,
        "grad_pairs": 4 * P,
        "readout": C * 2 * M,
        "bias": C,
        "target": rows,
        "loss": 1,
        "hits": T,
        "steps": K,
    }


def _cayley(s: Sizes) -> dict[str, int]:
    if s["K"] > s["N"]:
        raise InputError(f"cayley: m has shape [..., {s['N']}, {s['K']}]: accepted are at most as many columns as rows")
    return {**dict.fromkeys(("m", "g", "out"), s["batch"] * s["N"] * s["K"]), "lr": s["batch"]}


ELEMENTS: dict[str, Callable[[Sizes], dict[str, int]]] = {
    **dict.fromkeys(("factored_scan_fwd", "factored_scan_bwd", "dense_scan_fwd", "dense_scan_bwd"), _scan),
    **dict.fromkeys(("gru_scan_fwd", "gru_scan_bwd"), _gru),
    **dict.fromkeys(("peephole_scan_fwd", "peephole_scan_bwd"), _peephole),
    **dict.fromkeys(("activation_fwd", "activation_bwd"), _activation),
    "linear_cross_entropy_fwd": _linear_cross_entropy,
    "rotation_scan": _rotation,
    "modal_loss": _modal,
    "cayley": _cayley,
}


def elements_of(kernel: str, sizes: Sizes) -> dict[str, int]:
    """The number of elements of each tensor of a kernel, by its name."""
    return _cached(kernel, tuple(sizes), tuple(sizes.values()))


class _Elements(dict[str, int]):
    def __missing__(self, name: str) -> int:
        kind, _, base = name.partition("_")
        if kind not in ("grad", "saved"):
            raise KeyError(name)
        self[name] = self[base]
        return self[name]


@functools.lru_cache(maxsize=64)
def _cached(kernel: str, names: tuple[str, ...], values: tuple[int, ...]) -> dict[str, int]:
    sizes = dict(zip(names, values, strict=True))
    if sizes.get("T", 1) < 1:
        raise InputError(f"{kernel}: the tensors have no time steps: accepted are T >= 1")
    return _Elements(ELEMENTS[kernel](sizes))


def check_readout(hidden: Tensor, readout: Readout) -> None:
    """`check` of the tensors of a readout of hidden [R, N]."""
    (rows, N), C = hidden.shape, len(readout.weight)
    elements = elements_of("linear_cross_entropy_fwd", {"rows": rows, "N": N, "C": C})
    dtypes = {"weight": hidden.dtype, "bias": hidden.dtype, "target": torch.int64}
    for name, dtype in dtypes.items():
        if (tensor := getattr(readout, name)) is not None:
            check("linear_cross_entropy_fwd", name, tensor, dtype, hidden.device.type, elements[name])


def expected(args: Any, steps: int, saved: Iterable[str], dtype: torch.dtype) -> list[Any]:
    """(name, dtype, number of elements) of each field of the arguments of a scan of ``steps`` steps (``ScanArgs``,
    ``GruArgs`` or ``PeepholeInputs``), and of the tensors ``saved`` of a backward; no dtype for an option. InputError
    if the two factors of W differ in shape."""
    (B, N), ids = args.h0.shape, False
    more: tuple[int, ...] = ()
    if isinstance(args, ScanArgs):
        first, second, weight = args.first, args.second, args.weight
        ids = weight is not None and args.x is not None and not args.x.is_floating_point()
        act_size, leak_size = (-1 if t is None else t.shape[0] for t in (args.act_param, args.leak))
        K, D = 0 if first is None else second.shape[1], N if weight is None else weight.shape[1]
        if first is not None and first.numel() == second.numel() and first.shape != second.shape:
            shapes = f"{list(first.shape)} and {list(second.shape)}"
            raise InputError(f"{args.op}: first and second have shapes {shapes}: accepted is one shape [N, K]")
        more = (K, D, act_size, leak_size, args.checkpoint_every, ACTIVATIONS[args.activation].number)
    return _expected(args.op, args.__class__, tuple(saved), ids, dtype, (B, steps, N, *more))


@functools.lru_cache(maxsize=1024)
def _expected(
    op: str, kind: Any, saved: tuple[str, ...], ids: bool, dtype: torch.dtype, sizes: tuple[int, ...]
) -> list[Any]:
    letters = ("B", "T", "N", "K", "D", "act_param_size", "leak_size", "checkpoint_every", "activation")
    elements = elements_of(f"{op}_bwd", dict(zip(letters, sizes, strict=False)))
    result: list[Any] = []
    for name in (*kind._fields, *saved):
        if name not in saved and "Tensor" not in str(kind.__annotations__[name]):
            result.append((name, None, 0))
        elif name == "x" and ids:
            result.append((name, torch.int64, elements["tokens"]))
        else:
            result.append((name, _SCAN_DTYPES.get(name, dtype), elements[name]))
    return result


def check(kernel: str, name: str, tensor: Tensor, dtype: torch.dtype, device_type: str, elements: int) -> None:
    """Raise an InputError unless the tensor is of this dtype, on such a device, and has this many elements.

    A tensor can differ from those of the call's other tensors if its ``data`` was exchanged after the call was checked,
    for example between forward and backward.
    """
    if tensor.device.type != device_type:
        raise InputError(f"{kernel}: {name} must be on a {device_type} device, got {tensor.device}")
    if tensor.dtype is not dtype:
        raise InputError(f"{kernel}: {name} must be {dtype}, got {tensor.dtype}")
    if tensor.numel() != elements:
        shape = tuple(tensor.shape)
        raise InputError(f"{kernel}: {name} must have {elements} elements, got {tensor.numel()} of shape {shape}")


def contiguous(tensor: Tensor, _dtype: torch.dtype, _name: str) -> Tensor:
    """The form of tensors that kernels without further needs read, for `checked`."""
    return tensor.contiguous()


def checked(
    args: Any,
    steps: int,
    dtype: torch.dtype,
    form: Callable[[Tensor, torch.dtype, str], Tensor] = contiguous,
    **saved: Tensor | None,
) -> tuple[Any, list[Any]]:
    """The arguments of a scan of ``steps`` steps (``ScanArgs``, ``GruArgs`` or ``PeepholeInputs``) and the tensors
    ``saved`` of a backward, in the form that the kernels of a backend need: the result of ``form`` for a tensor, its
    dtype and its name. ``dtype`` is that of the floats. InputError for a tensor whose size, dtype or device is not that
    of the call: its ``data`` was exchanged."""
    op, place = f"{args.op}_bwd" if saved else f"{args.op}_fwd", args.h0.device.type
    values = (*args, *saved.values())
    results = []
    for (name, own, count), value in zip(expected(args, steps, saved, dtype), values, strict=True):
        if value is not None and own is not None:
            value = form(value, own, name)
            check(op, name, value, own, place, count)
        results.append(value)
    return args._make(results[: len(args)]), results[len(args) :]
