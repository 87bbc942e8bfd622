"""The operations of the ops, for ``torch.utils.flop_counter.FlopCounterMode``. Imported with torch's counter, which
imports Triton.

As in torch, a multiply-add counts as two operations, and elementwise operations are not counted. The formulas are those
of "Cost" in the docstrings of the ops. Padding counts, since shapes do not distinguish it from other steps.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from orthokern._map_gradients import without_m
from orthokern._scan_contract import GruArgs, GruGradients, RotationArgs, ScanArgs, ScanGradients, split_needs

Shape = tuple[int, ...]


def _map(args: ScanArgs) -> int:
    """The operations of one product of W and a vector; args holds shapes instead of tensors."""
    shape: Any = args.second
    return (2 if args.first is None else 4) * prod(shape)


def _projection(args: ScanArgs) -> int:
    """The operations of one product of the input matrix and a vector of features; token ids have none."""
    weight: Any = args.weight
    x: Any = args.x
    return 2 * prod(weight) if weight is not None and x is not None and len(x) == 3 else 0


def _scan_fwd(*fields: Any, **options: Any) -> int:
    args: Any = ScanArgs(*fields, **options)
    return prod(args.x[:2]) * (_map(args) + _projection(args))


def _map_gradients(rows: int, args: ScanArgs) -> int:
    """The operations of the gradients of W's factors, or of W."""
    N, K = args.second
    if args.first is None or not without_m(rows, N, K):
        return 2 * rows * N * N + (0 if args.first is None else 4 * N * N * K)
    return 6 * rows * N * K


def _scan_bwd(grad_hs: Shape, states: Shape, pre: Shape | None, *fields: Any, **options: Any) -> int:
    needs, fields = split_needs(ScanGradients, fields)
    args: Any = ScanArgs(*fields, **options)
    T, B, N = grad_hs
    passes = _map(args) * (2 if args.checkpoint_every else 1)
    inputs = _projection(args) * (bool(needs.x) + bool(needs.weight) + bool(args.checkpoint_every))
    return T * B * (passes + inputs) + (_map_gradients(T * B, args) if needs.map else 0)


def _gru_fwd(x: Shape, w: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(x[:2]) * prod(w)


def _gru_bwd(grad_hs: Shape, hs: Shape, gates: Shape, pre: Shape | None, *fields: Any, **options: Any) -> int:
    needs, fields = split_needs(GruGradients, fields)
    args: Any = GruArgs(*fields, **options)
    return 2 * prod(grad_hs[:2]) * prod(args.w) * (1 + bool(needs.w))


def _peephole_bwd(
    grad_hs: Shape | None, grad_cs: Shape | None, hs: Shape, cs: Shape, gates: Shape, w: Shape, *_: Any, **__: Any
) -> int:
    return 4 * prod(hs[:2]) * prod(w)


def _linear_cross_entropy(
    hidden: Shape,
    weight: Shape,
    bias: Shape | None,
    target: Shape,
    reduction: str = "mean",
    need_grad: bool = True,
    *_: Any,
    **__: Any,
) -> int:
    return (6 if need_grad else 2) * hidden[0] * prod(weight)


def _cayley(m: Shape, *_: Any, **__: Any) -> int:
    *batch, N, K = m
    return prod(batch) * (20 * N**3 // 3 if K == N else 16 * N * K**2 + 40 * K**3 // 3)


def _skew_exp_fwd(x: Shape, *_: Any, **__: Any) -> int:  # squarings depend on the values of x
    return 7 * 2 * prod(x) * x[-1]


def _skew_exp_bwd(grad_p: Shape, *_: Any, **__: Any) -> int:
    return 8 * 2 * prod(grad_p) * grad_p[-1]


def _rotation_fwd(*fields: Any, **options: Any) -> int:
    args: Any = RotationArgs(*fields, **options)
    return 0 if args.weight is None else 2 * prod(args.x[:2]) * prod(args.weight)


def _rotation_bwd(grad_hs: Shape, hs: Shape, need_x: bool, *fields: Any, **options: Any) -> int:
    return (1 + need_x) * _rotation_fwd(*fields, **options)


_OPS = torch.ops.orthokern
_FORMULAS: dict[Any, Callable[..., int]] = {
    _OPS.factored_scan_fwd: _scan_fwd,
    _OPS.factored_scan_bwd: _scan_bwd,
    _OPS.dense_scan_fwd: _scan_fwd,
    _OPS.dense_scan_bwd: _scan_bwd,
    _OPS.gru_scan_fwd: _gru_fwd,
    _OPS.gru_scan_bwd: _gru_bwd,
    _OPS.peephole_scan_fwd: _gru_fwd,
    _OPS.peephole_scan_bwd: _peephole_bwd,
    _OPS.rotation_scan_fwd: _rotation_fwd,
    _OPS.rotation_scan_bwd: _rotation_bwd,
    _OPS.linear_cross_entropy_fwd: _linear_cross_entropy,
    _OPS.cayley: _cayley,
    _OPS.skew_exp_fwd: _skew_exp_fwd,
    _OPS.skew_exp_bwd: _skew_exp_bwd,
}


def _of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, out_shape=None, **options: formula(*args, **options)


for _op, _formula in _FORMULAS.items():
    register_flop_formula(_op)(_of_shapes(_formula))
