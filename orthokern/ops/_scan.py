"""The torch ops of ``factored_scan`` and ``dense_scan``. They have the same arguments, the fields of `ScanArgs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._products import ieee_products, product, sum_over_rows
from orthokern._scan_contract import (
    FEATURES,
    ScanArgs,
    ScanGradients,
    join_tensors,
    only_needed,
    split_tensors,
)
from orthokern.dispatch import Support
from orthokern.errors import InputError
from orthokern.ops import _route, _taps
from orthokern.ops._common import check_leak, check_tokens
from orthokern.ops._recurrence import Recurrence

_GPU: dict[str, Any] = {"devices": ("cuda",), "algorithms": ("sequential", "chunked"), "capability": (8, 0)}
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=FEATURES),
    "triton": Support(dtypes=(torch.float64, torch.float32), limits={"N": 128}, features=FEATURES, **_GPU),
    "cuda": Support(dtypes=(torch.float32,), features=FEATURES, **_GPU),
}


class ScanOp(Recurrence):
    """Of the saved states, ``states`` is hs, or ckpt with checkpoints. x may be None in the backward where it is not
    read: without a weight and checkpoints."""

    arguments, gradients, saved = ScanArgs, ScanGradients, ("Tensor states", "Tensor? pre")

    def _by_reference(self, args: ScanArgs) -> Tensor:
        return super()._by_reference(args._replace(checkpoint_every=0))  # which change nothing in plain torch code

    def _check_values(self, args: ScanArgs, T: int) -> None:
        super()._check_values(args, T)
        if args.weight is not None:
            check_tokens(args.x, args.weight, args.lengths)
        check_leak(args.leak)

    def _kernel(self, direction: str, args: ScanArgs, T: int) -> Any:
        if (args.first is None) != (args.scale is None):
            missing = "first" if args.first is None else "scale"
            raise InputError(f"{self.name}: {missing} is None: accepted are both of first and scale, or neither")
        return super()._kernel(direction, args, T)

    def _of_backend(self, args: ScanArgs, saved: tuple[Any, ...]) -> tuple[Any, ...]:
        states, pre = saved
        if args.x is None and (args.weight is not None or args.checkpoint_every):
            raise InputError(f"{self.name}_bwd: x is None: it is needed with a weight or checkpoints")
        if pre is None and args.keeps_pre:
            raise InputError(f"{self.name}_bwd: pre is None: it is needed with a leak or with {args.activation}")
        return states, pre if args.keeps_pre else None

    def _forward_fake(self, *fields: Any) -> tuple[Tensor, ...]:
        args = ScanArgs(*fields)
        (B, N), T, every = args.h0.shape, args.time_steps, args.checkpoint_every
        new = args.second.new_empty
        ckpt = new((T + every - 1) // every, B, N) if every else new(0)
        return new(T, B, N), ckpt, new(T, B, N) if args.keeps_pre else new(0)

    def _shape_of_x(self, args: ScanArgs, grad_hs: Tensor) -> Any:
        x = args.x if args.weight is not None else grad_hs
        return x.shape if x is not None and x.is_floating_point() else None

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        args, (hs, ckpt, pre) = ScanArgs(*inputs), output
        # pre has a gradient in a second derivative
        ctx.mark_non_differentiable(*[t for t in ((ckpt,) if args.keeps_pre else (ckpt, pre)) if t is not None])
        ctx.set_materialize_grads(False)
        # a precomputed input term is only needed to recompute states, and may be as large as all of them
        x = args.x if args.weight is not None or args.checkpoint_every else None
        ctx.options, tensors = split_tensors(args if x is args.x else args._replace(x=x))
        ctx.save_for_backward(ckpt if args.checkpoint_every else hs, pre, *tensors)

    def _derivative(self, ctx: Any, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        grad_hs, _, grad_pre = grads
        if grad_hs is None and grad_pre is None:
            return ()
        states, pre, *tensors = saved
        saved = states, pre
        args: ScanArgs = join_tensors(ctx.options, tensors)
        of: Any = ScanArgs._make(ctx.needs_input_grad[: len(ScanArgs._fields)])
        of_map, norm = of.first or of.scale or of.second, _taps.needed()
        needs = ScanGradients._make(
            (of.x, of_map, of.h0, of.weight, of.bias, of.act_param, of.reset_state, of.leak, norm)
        )
        recorded = grad_pre is not None or _route.recording()
        of_factors: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if of_map and not recorded and without_m(args, grad_hs):
            results, of_factors = self._factor_gradients(args, grad_hs, saved, needs)
        else:
            if recorded:
                results = self._differentiable(args, grad_hs, saved, needs, grad_pre=grad_pre)
            else:
                results = self._by_op(args, grad_hs, saved, needs)
            if of_map:
                of_factors = map_gradients(args, results.m)
        of_reset_state = None if args.resets is None else results.reset_state
        of_tensors = results.x, *of_factors, results.h0, results.weight, results.bias, results.act_param
        return only_needed((*of_tensors, *(None,) * 8, of_reset_state, results.leak), of)

    @ieee_products()
    def _factor_gradients(
        self, args: ScanArgs, grad_hs: Tensor, saved: tuple[Any, ...], needs: Any
    ) -> tuple[ScanGradients, tuple[Tensor, Tensor, Tensor]]:
        """The results of the backward op, and the gradients of first, scale and second, in O(N K) operations per row:
        from delta_t, which is the gradient of an input term, in place of M = sum_t delta_t h_{t-1}^T."""
        v, s, u, x, weight = args.first, args.scale, args.second, args.x, args.weight
        assert v is not None and s is not None
        term = args._replace(x=None, weight=None, bias=None)
        of_term = needs._replace(x=True, m=False, weight=False, bias=False)
        grads = self._by_op(term, grad_hs, saved, of_term)
        delta, states = grads.x.flatten(0, 1), saved[0][:-1].flatten(0, 1)  # rows of delta_t; of h_{t-1}, but for h_0
        from_v, to_u = torch.cat([args.h0 @ v, product(states, v)]), product(delta, u).view(len(grads.x), -1, len(s))
        of_v, h0, start = to_u * s, args.h0, args.reset_state
        if args.resets is not None:
            cut = args.resets.unsqueeze(-1)
            if args.lengths is not None:  # no resets in padding
                cut = cut & (torch.arange(len(cut), device=cut.device).unsqueeze(1) < args.lengths).unsqueeze(-1)
            start = None if start is None else start.masked_fill(~cut.any(0), 0)  # rows of no effect may hold anything
            from_v = torch.where(cut, 0 if start is None else start @ v, from_v.view_as(to_u)).flatten(0, 1)
            of_start, of_v = (of_v * cut).sum(0), of_v.masked_fill(cut, 0)
            # a state that a reset drops may be infinite
            states, h0 = saved[0][:-1].masked_fill(cut[1:], 0).flatten(0, 1), h0.masked_fill(cut[0], 0)
        of_h0, of_v = of_v[0], of_v[1:].flatten(0, 1)
        grad_v = h0.mT @ of_h0
        if len(states):
            grad_v += sum_over_rows(states, of_v, v.dtype)
        if args.resets is not None and start is not None:
            grad_v += start.mT @ of_start
        grad_s, grad_u = (to_u.flatten(0, 1) * from_v).sum(0), sum_over_rows(delta, from_v * s, u.dtype)
        of_factors = grad_v, grad_s, grad_u
        if weight is None or x is None:
            return grads, of_factors
        if x.is_floating_point():
            if args.lengths is not None:  # padding may hold anything, and the rows of delta are zero there
                padding = torch.arange(len(x), device=x.device).unsqueeze(1) >= args.lengths
                x = x.masked_fill(padding.unsqueeze(-1), 0)
            of_weight = sum_over_rows(delta, x.flatten(0, 1), weight.dtype)
            of_x = product(delta, weight).view_as(x) if needs.x else None
        else:  # wrong ids, which a GPU does not check, and those of padding are skipped
            D = weight.shape[1]
            ids = torch.where((x >= 0) & (x < D), x, D).flatten()
            table = torch.ops.aten.embedding_dense_backward(delta, ids, D + 1, -1, False)
            of_weight, of_x = table[:D].mT.contiguous(), None
        return grads._replace(x=of_x, weight=of_weight, bias=delta.sum(0)), of_factors

    def _differentiable(
        self, args: ScanArgs, grad_hs: Tensor | None, saved: tuple[Any, ...], needs: Any, **of_states: Tensor | None
    ) -> Any:
        if args.checkpoint_every:  # recompute the states as a differentiable function of the inputs
            args = args._replace(checkpoint_every=0)
            with _taps.set_aside():
                states, _, pre = self.fwd(*args)
            saved = states, pre
        return super()._differentiable(args, grad_hs, saved, needs, **of_states)


def without_m(args: ScanArgs, grad_hs: Tensor) -> bool:
    """Whether the gradients of the factors take less time without M [N, N]: where N is not small, of few rows or a low
    rank. Without checkpoints, since delta_t of all steps is stored."""
    if args.first is None or args.checkpoint_every or torch.compiler.is_compiling():
        return False
    N, K = args.second.shape[0], args.second.shape[-1]  # whose data may have been exchanged since the checks
    return N >= 256 and min(4 * grad_hs.shape[0] * grad_hs.shape[1], 8 * K) <= N


def map_gradients(args: ScanArgs, m: Any) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The gradients of first, scale and second from M = dL/dW [N, N], where W = U diag(s) V^T or W = second.

    dU = M V diag(s), ds = diag(U^T M V), dV = M^T U diag(s): Note [Factored scan backward] in
    ``orthokern/reference/factored_scan.py``.
    """
    v, s, u = args.first, args.scale, args.second
    if v is None or s is None:
        return None, None, m
    with ieee_products():
        m_v, mt_u = torch.mm(m, v), torch.mm(m.mT, u)  # [N, K]
    return mt_u * s, (u * m_v).sum(0), m_v * s


FACTORED, DENSE = ScanOp("factored_scan", SUPPORT), ScanOp("dense_scan", SUPPORT)


def scan(args: ScanArgs) -> Tensor:
    """hs [T, B, N] of checked arguments."""
    return (DENSE if args.first is None else FACTORED)(args)
