"""The number of elements of every tensor that a kernel reads or writes, from the sizes of its call, and its check.

One function for each struct of arguments in ``csrc/cpu/ops.h``, whose comments have the same shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from orthokern.errors import InputError

Sizes = Mapping[str, int]


def _parameter(s: Sizes, size: str = "act_param_size") -> int:
    """Elements of a parameter of the units: 1 or N."""
    return 1 if s[size] == 1 else s["N"]


def _scan(s: Sizes) -> dict[str, int]:
    B, T, N, D, every = s["B"], s["T"], s["N"], s["D"], s["checkpoint_every"]
    columns, rows = s["K"] or N, T * B
    state, states = B * N, rows * N
    checkpoints = -(-T // every) * state if every else states
    return {
        "first": N * columns,
        "scale": columns,
        "second": N * columns,
        "x": rows * D,
        "tokens": rows,
        "h0": state,
        "weight": N * D,
        "bias": N,
        "act_param": _parameter(s),
        "leak": _parameter(s, "leak_size"),
        "reset_state": state,
        "lengths": B,
        "resets": rows,
        "hs": states,
        "ckpt": checkpoints,
        "pre": states,
        "grad_hs": states,
        "states": checkpoints,
        "saved_pre": states,
        "grad_x": rows * D,
        "grad_map": N * N,
        "grad_h0": state,
        "grad_reset_state": state,
        "grad_weight": N * D,
        "grad_bias": N,
        "grad_act_param": _parameter(s),
        "grad_leak": _parameter(s, "leak_size"),
        "grad_norm": T,
    }


def _gru(s: Sizes) -> dict[str, int]:
    B, T, N = s["B"], s["T"], s["N"]
    state, states = B * N, T * B * N
    return {
        "w": 3 * N * N,
        "h0": state,
        "x": 3 * states,
        "bias": 3 * N,
        "lengths": B,
        "resets": T * B,
        "reset_state": state,
        "hs": states,
        "gates": 3 * states,
        "pre": states,
        "grad_hs": states,
        "saved_hs": states,
        "saved_gates": 3 * states,
        "saved_pre": states,
        "grad_x": 3 * states,
        "factor": states,
        "grad_h0": state,
        "grad_reset_state": state,
        "grad_norm": T,
    }


def _peephole(s: Sizes) -> dict[str, int]:
    B, T, N = s["B"], s["T"], s["N"]
    state, states = B * N, T * B * N
    return {
        "w": 4 * N * N,
        "peephole": 3 * N,
        "h0": state,
        "c0": state,
        "x": 4 * states,
        "hs": states,
        "cs": states,
        "gates": 4 * states,
        "grad_hs": states,
        "grad_cs": states,
        "saved_cs": states,
        "saved_gates": 4 * states,
        "grad_x": 4 * states,
        "grad_peephole": 3 * N,
        "grad_h0": state,
        "grad_c0": state,
    }


def _activation(s: Sizes) -> dict[str, int]:
    all_units = dict.fromkeys(("x", "y", "grad_y", "grad_x"), s["rows"] * s["N"])
    return {**all_units, **dict.fromkeys(("act_param", "grad_act_param"), _parameter(s))}


def _linear_cross_entropy(s: Sizes) -> dict[str, int]:
    hidden, weight = s["rows"] * s["N"], s["C"] * s["N"]
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": s["C"],
        "target": s["rows"],
        "loss": 1,
        "grad_hidden": hidden,
        "grad_weight": weight,
        "grad_bias": s["C"],
    }


def _modal(s: Sizes) -> dict[str, int]:
    T, M, rows, D, P = s["T"], s["M"], s["T"] * s["B"], s.get("D", 0), s.get("P", 0)
    state, states, C, K = 2 * s["B"] * M, 2 * rows * M, s.get("C", 0), s.get("K", 0)
    return {
        "re": M,
        "im": M,
        "lengths": s["B"],
        "x": states,
        "ids": rows * s.get("id_bytes", 0),
        "table": D * 2 * M,
        "z0": state,
        "pairs": 2 * P,
        "readout": C * 2 * M,
        "bias": C,
        "target_ids": rows * s.get("target_bytes", 0),
        "loss": 1,
        "hits": T,
        "z": states,
        "grad_x": states,
        "grad_z0": state,
        "grad_table": D * 2 * M,
        "grad_readout": C * 2 * M,
        "grad_bias": C,
        "grad_re": M,
        "grad_im": M,
        "grad_pairs": 4 * P,
        "steps": K,
        "step_states": K * state,
        "step_adjoints": K * state,
    }


def _cayley(s: Sizes) -> dict[str, int]:
    matrices = s["batch"] * s["N"] * s["K"]
    return {"m": matrices, "g": matrices, "lr": s["batch"], "out": matrices}


ELEMENTS: dict[str, Callable[[Sizes], dict[str, int]]] = {
    **dict.fromkeys(("factored_scan_fwd", "factored_scan_bwd", "dense_scan_fwd", "dense_scan_bwd"), _scan),
    **dict.fromkeys(("gru_scan_fwd", "gru_scan_bwd"), _gru),
    **dict.fromkeys(("peephole_scan_fwd", "peephole_scan_bwd"), _peephole),
    **dict.fromkeys(("activation_fwd", "activation_bwd"), _activation),
    "linear_cross_entropy_fwd": _linear_cross_entropy,
    **dict.fromkeys(("modal_scan", "modal_loss"), _modal),
    "cayley": _cayley,
}


def elements_of(kernel: str, sizes: Sizes) -> dict[str, int]:
    """The number of elements of each tensor of a kernel, by its name."""
    return _cached(kernel, tuple(sizes), tuple(sizes.values()))


@functools.lru_cache(maxsize=64)
def _cached(kernel: str, names: tuple[str, ...], values: tuple[int, ...]) -> dict[str, int]:
    return ELEMENTS[kernel](dict(zip(names, values, strict=True)))


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
