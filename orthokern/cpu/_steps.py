"""The backward of a few steps on the CPU: one native call that gives every gradient.

The kernels: ``csrc/cpu/scan_direct_backward.h``, ``csrc/cpu/exponential.cpp``, ``csrc/cpu/gru_direct.h``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern.cpu._call import POOLED_BYTES, Prepared, call, new

# T B up to which the kernels take a call, kStepRows of csrc/cpu/direct.h; the scans compute exact products up to there
MOST_ROWS = 16
_SCAN = ("x", "h0", "grad_hs", "states", "saved_pre")
_GRU = ("features", "h0", "grad_hs", "saved_hs", "saved_gates", "saved_pre")


class Plan(NamedTuple):
    """A backward but for the tensors that change from call to call."""

    kernel: str
    dtype: torch.dtype
    sizes: dict[str, float]
    tensors: dict[str, Tensor | None]  # what stays
    varying: tuple[str, ...]  # names of what changes
    results: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of gradients, without grad_norm
    places: tuple[int, ...]  # of the gradient of x, of hx [1,B,N] and of each parameter, among the results


class Backward:
    """A plan that runs. With `ready`, its tensors are read and checked once, for many calls."""

    def __init__(self, plan: Plan, steps: int, *, ready: bool = False) -> None:
        self._plan, self._steps = plan, steps
        self._shapes = [shape for _, shape in plan.results]
        self._pooled = [math.prod(shape) * plan.dtype.itemsize >= POOLED_BYTES for shape in self._shapes]
        self._prepared: Prepared | None = None
        if ready:
            names = (*plan.varying, *(name for name, _ in plan.results), "grad_norm")
            tensors = {**plan.tensors, **dict.fromkeys(names)}
            self._prepared = Prepared(plan.kernel, plan.dtype, plan.sizes, tensors, names, [])
            self._plan = plan._replace(tensors={})  # hooks of a parameter may hold what has this object

    def __call__(
        self, varying: Sequence[Tensor | None], needs: Sequence[bool], norm: bool
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """The gradients that are needed, in the order of places, and |dL/dh_t| [T] if it is wanted.

        varying: contiguous, of the dtype, in the order of the plan."""
        plan, dtype = self._plan, self._plan.dtype
        found: list[Tensor | None] = [None] * len(self._shapes)
        given: list[Tensor | None] = []
        for place, need in zip(plan.places, needs, strict=True):
            grad = found[place] if need else None
            if need and grad is None:
                shape = self._shapes[place]
                grad = found[place] = (
                    new(*shape, dtype=dtype) if self._pooled[place] else torch.empty(shape, dtype=dtype, device="cpu")
                )
            given.append(grad)
        norms = torch.empty(self._steps, dtype=dtype, device="cpu") if norm else None
        if self._prepared is not None:
            self._prepared(*varying, *found, norms)
        else:
            results = {name: grad for (name, _), grad in zip(plan.results, found, strict=True)}
            now = dict(zip(plan.varying, varying, strict=True))
            call(plan.kernel, dtype, plan.sizes, {**plan.tensors, **now, **results, "grad_norm": norms})
        return given, norms


class Parts(NamedTuple):
    """What a plan needs to know of the recurrent matrix of a scan."""

    kernel: str
    sizes: dict[str, float]
    tensors: dict[str, Tensor | None]
    shapes: dict[str, tuple[int, ...]]  # of the gradients of what it is made of
    names: dict[str, str]  # of these gradients, by parameters


_FACTORS = ("first", "scale", "slope", "grad_first", "grad_scale", "grad_second")
_SCHUR = ("basis", "gamma", "theta", "grad_gamma", "grad_theta", "grad_triangle")


def dense_parts(w: Tensor, name: str) -> Parts:
    """The matrix is the parameter `name`."""
    tensors: dict[str, Tensor | None] = {"second": w, "grad_delta": None, **dict.fromkeys(_FACTORS)}
    return Parts("scan_steps_bwd", {"K": 0}, tensors, {"grad_map": tuple(w.shape)}, {name: "grad_map"})


def factored_parts(u: Tensor, s: Tensor, v: Tensor, slope: Tensor | None) -> Parts:
    """U diag(s) V^T, of parameters u_l0, v_l0 and spectrum_l0 with ds/dp = slope, or 1."""
    tensors = {"second": u, "scale": s, "first": v, "slope": slope, "grad_map": None, "grad_delta": None}
    shapes = {"grad_second": tuple(u.shape), "grad_scale": tuple(s.shape), "grad_first": tuple(v.shape)}
    names = {"u_l0": "grad_second", "spectrum_l0": "grad_scale", "v_l0": "grad_first"}
    return Parts("scan_steps_bwd", {"K": len(s)}, tensors, shapes, names)


def exponential_parts(w: Tensor, turn: Tensor, s: Tensor, weights: Tensor) -> Parts:
    """W = B exp(A), A of the parameter skew_l0; the rest: Note [Gradient of an exponential from few rows] in
    ``orthokern/nn/_few_rows.py``."""
    tensors: dict[str, Tensor | None] = {"second": w, "turn": turn, "s": s, "weights": weights}
    sizes: dict[str, float] = {"terms": len(weights), "mask_block": 0}
    return Parts(
        "exponential_steps_bwd", sizes, tensors | dict.fromkeys(_SCHUR), {"grad_skew": tuple(w.shape)},
        {"skew_l0": "grad_skew"},
    )  # fmt: skip


def schur_parts(
    v: Tensor, basis: Tensor, series: tuple[Tensor, Tensor, Tensor], gamma: Tensor, theta: Tensor, mask: str
) -> Parts:
    """V = P Theta P^T of a NonNormalRNN with P = B exp(A)."""
    found = exponential_parts(v, *series)
    found.sizes["mask_block"] = int(mask == "block")
    found.tensors.update(basis=basis, gamma=gamma, theta=theta)
    new = {"gamma": tuple(gamma.shape), "theta": tuple(theta.shape), "triangle": tuple(v.shape)}
    found.shapes.update({f"grad_{name}": shape for name, shape in new.items()})
    found.names.update({f"{name}_l0": f"grad_{name}" for name in new})
    return found


def _plan(
    kernel: str, x: Tensor, sizes: dict[str, float], tensors: dict[str, Tensor | None], varying: tuple[str, ...],
    shapes: dict[str, tuple[int, ...]], names: Sequence[str],
) -> Plan:  # fmt: skip
    """The first two of shapes are those of x and hx; names: of the gradient of each parameter."""
    T, B = x.shape[:2]
    if T * B > MOST_ROWS:
        raise ValueError(f"{T * B} rows, expected at most {MOST_ROWS}")
    asked = {*list(shapes)[:2], *names}
    results = tuple((name, shape) for name, shape in shapes.items() if name in asked)
    at = {name: place for place, (name, _) in enumerate(results)}
    tensors = tensors | {name: None for name in shapes if name not in asked}
    return Plan(kernel, x.dtype, sizes, tensors, varying, results, (0, 1, *(at[name] for name in names)))


def scan_plan(
    parts: Parts, x: Tensor, weight: Tensor, act_param: Tensor | None, activation: str,
    parameters: Sequence[str], learned: str | None,
) -> Plan:  # fmt: skip
    """The plan of a scan with the matrix of ``parts``, x [T,B,D], weight [N,D] and act_param [1] or [N].

    Args:
        parameters: names in the order of the gradients; a name that is not known otherwise is that of a bias.
        learned: the name of the activation's parameter.
    """
    (T, B, D), N, size = x.shape, len(weight), 0 if act_param is None else len(act_param)
    sizes = {
        **parts.sizes, "B": B, "T": T, "N": N, "D": D, "activation": ACTIVATIONS[activation].number,
        "act_param_size": size,
    }  # fmt: skip
    shapes = {
        "grad_x": (T, B, D), "grad_h0": (1, B, N), "grad_weight": (N, D), "grad_bias": (N,),
        "grad_act_param": (size,), **parts.shapes,
    }  # fmt: skip
    names = {"weight_ih_l0": "grad_weight", "h0_l0": "grad_h0", **parts.names}
    if learned is not None:
        names[learned] = "grad_act_param"
    tensors = {**parts.tensors, "weight": weight, "act_param": act_param}
    return _plan(parts.kernel, x, sizes, tensors, _SCAN, shapes, [names.get(name, "grad_bias") for name in parameters])


def gru_plan(x: Tensor, w: Tensor, weight: Tensor, kanai: bool, parameters: Sequence[str]) -> Plan:
    """Of a GRU with x [T,B,D], w [3N,N] and weight [3N,D]; parameters as of `scan_plan`."""
    (T, B, D), N = x.shape, w.shape[1]
    shapes = {
        "grad_features": (T, B, D), "grad_h0": (1, B, N), "grad_weight": (3 * N, D), "grad_w": (3 * N, N),
        "grad_input_bias": (3 * N,), "grad_bias": (3 * N,),
    }  # fmt: skip
    sizes: dict[str, float] = {"B": B, "T": T, "N": N, "D": D, "kanai": int(kanai)}
    names = {
        "weight_ih_l0": "grad_weight", "weight_hh_l0": "grad_w", "bias_ih_l0": "grad_input_bias",
        "bias_hh_l0": "grad_bias", "h0_l0": "grad_h0",
    }  # fmt: skip
    tensors: dict[str, Tensor | None] = {"w": w, "weight": weight}
    return _plan("gru_steps_bwd", x, sizes, tensors, _GRU, shapes, [names[name] for name in parameters])
