"""States and loss of a linear recurrence in modal form, from W and the inputs, with the gradient of W."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._products import ieee_products, norms_of_steps, sum_over_rows
from orthokern._scan_contract import Readout, ScanArgs, running, without_padding
from orthokern.ops import _taps
from orthokern.ops._common import check_lengths, check_range, check_tokens, contiguous, differentiable_once
from orthokern.ops._linear import linear
from orthokern.ops.modal.basis import Basis
from orthokern.ops.modal.choice import Modes, call_of, choose
from orthokern.ops.modal.gradient import gradient_of_w
from orthokern.ops.modal.reference import Inputs, entering
from orthokern.reference.rotation_scan import turn

# A span of steps has about SPAN_ROWS rows, which fit into the cache, and a multiple of SPAN_STEPS steps.
SPAN_ROWS, SPAN_STEPS = 16384, 64


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float64."""
    return left.double().mT @ right.double()


def _spread(T: int, steps: Sequence[int], values: Tensor) -> Tensor:
    """The norms of values [K, B, N] over its last dimensions at ``steps`` of [T], NaN elsewhere."""
    norms = values.new_full((T,), torch.nan)
    norms[steps] = torch.linalg.vector_norm(values, dim=(1, 2), dtype=torch.float64).to(norms.dtype)
    return norms


class _ModalLoss(torch.autograd.Function):
    """The cross-entropy with the gradient of W. Returns (loss, hits)."""

    @staticmethod
    @ieee_products()
    def forward(
        ctx: Any,
        modes: Modes,
        readout: Readout,
        lengths: Tensor | None,
        w: Tensor,
        x: Tensor,
        z0: Tensor,
        table: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        basis, rest = modes.basis, map(contiguous, (table, lengths, modes.pairs))
        inputs = Inputs(x.contiguous(), basis.re, basis.im, z0.contiguous(), *rest)
        readout = Readout(weight.contiguous(), contiguous(bias), readout.target.contiguous(), readout.reduction)
        # ctx.needs_input_grad of parameters is true under no_grad too
        tapped = bool(_taps.SINKS) and lengths is None
        steps = _taps.profile_steps(len(x)) if tapped else []
        loss, hits, grads, states, adjoints = modes.backend.loss(inputs, readout, modes.backward or tapped, steps)
        ctx.mark_non_differentiable(hits)
        ctx.set_materialize_grads(False)
        ctx.modes, ctx.has_table, ctx.norms = modes, table is not None, None
        if tapped:  # h = R z and dL/dh = R^-T dL/dz
            norms = _spread(len(x), steps, states @ basis.right.to(states.dtype).mT)
            _taps.record_state_norms("modal_cross_entropy", norms)
            ctx.norms = _spread(len(x), steps, adjoints @ basis.left.to(states.dtype))
        if grads is not None and modes.backward:
            ctx.save_for_backward(x if table is None else table, z0, weight, *grads)
        return loss, hits

    @staticmethod
    @ieee_products()
    @differentiable_once("the modal form", "algorithm='sequential'")
    def backward(ctx: Any, grad_loss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 9
        rows, z0, weight, x, re, im, grad_z0, table, grad_pairs, grad_weight, bias = ctx.saved_tensors
        modes: Modes = ctx.modes
        if ctx.norms is not None:
            _taps.record("modal_cross_entropy", ctx.norms * grad_loss.abs())
        grad_w = None
        if ctx.needs_input_grad[3]:
            # G - X - Z of Note [Divided differences], as one product if X is a sum over a table
            gradients, values = [weight, -grad_z0], [grad_weight, z0]
            if ctx.has_table:
                gradients, values = [*gradients, -table], [*values, rows]
            h = _product(torch.cat(gradients), torch.cat(values))
            if not ctx.has_table:
                h -= sum_over_rows(x, rows)
            grad_w = gradient_of_w(modes.basis, h, re, im, modes.pairs, grad_pairs)
        grads = (grad_w, x, grad_z0, table, grad_weight, bias)
        return (None, None, None, *(None if grad is None else grad * grad_loss for grad in grads))


class _ModalStates(torch.autograd.Function):
    """hs [T, B, N] of the recurrence with the input terms e [T, B, N]; with the gradients of W, e and h0.

    Note [States in spans]
        In modal coordinates, inputs, states and their cotangents are as large as hs. They exist for one span of steps
        at a time, in the cache. A span starts from the last state of the previous one, and its adjoint from the first
        one of the following span. The gradient of W is sum_t d_t h_{t-1}^T with d_t = dL/de_t = R^-T delta_t.
    """

    @staticmethod
    @ieee_products()
    def forward(ctx: Any, modes: Modes, alive: Tensor | None, w: Tensor, e: Tensor, h0: Tensor) -> Tensor:
        basis, backend, dtype = modes.basis, modes.backend, e.dtype
        left, right = basis.left.to(dtype), basis.right.to(dtype)
        steps = len(e) if e.is_cuda else max(SPAN_ROWS // e.shape[1] // SPAN_STEPS, 1) * SPAN_STEPS
        hs, z = e.new_empty(e.shape), (h0.double() @ basis.left.mT).to(dtype)
        for x, out in zip(e.split(steps), hs.split(steps), strict=True):
            states = backend.scan(x @ left.mT, basis.re, basis.im, z)
            torch.matmul(states, right.mT, out=out)
            z = states[-1].clone()
        hs = without_padding(hs, alive)  # a state that grew out of range there would make the zeros of d NaN
        ctx.set_materialize_grads(False)
        ctx.modes, ctx.steps = modes, steps
        ctx.save_for_backward(alive, h0, hs)
        return hs

    @staticmethod
    @ieee_products()
    @differentiable_once("the modal form", "algorithm='sequential'")
    def backward(ctx: Any, grad_hs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_hs is None:
            return (None,) * 5
        alive, h0, hs = ctx.saved_tensors
        basis, backend, dtype = ctx.modes.basis, ctx.modes.backend, hs.dtype
        left, right = basis.left.to(dtype), basis.right.to(dtype)
        d, later = hs.new_empty(hs.shape), h0.new_zeros(len(h0), right.shape[1])
        grad_hs = without_padding(grad_hs, alive)
        for g, out in zip(reversed(grad_hs.split(ctx.steps)), reversed(d.split(ctx.steps)), strict=True):
            delta = backend.scan(g @ right, basis.re, basis.im, later, reverse=True)
            torch.matmul(delta, left, out=out)
            later = delta[0].clone()
        if _taps.SINKS:
            _taps.record("modal_scan", norms_of_steps(d).to(dtype))
        grad_w = None
        if ctx.needs_input_grad[2]:
            grad_w = sum_over_rows(d[1:], hs[:-1]) + _product(d[0], h0)
        return None, None, grad_w, d, (turn(later.double(), basis.re, -basis.im) @ basis.left).to(dtype)


@keeps_dtype
def modal_scan(args: ScanArgs) -> Tensor:
    """hs [T, B, N] of a scan with algorithm="modal"; InputError if the modal form is not possible."""
    x, h0, weight, bias, lengths = args.x, args.h0, args.weight, args.bias, args.lengths
    modes, _ = choose(call_of(args, None, None))
    assert modes is not None
    assert x is not None
    check_lengths(lengths, len(x))
    check_tokens(x, weight, lengths)
    alive = running(x.shape[0], lengths)
    if weight is not None and not x.is_floating_point():
        e = entering(x, weight.mT, alive)
    else:
        e = without_padding(x, alive)  # the gradient of a product reads all of x, and 0 * NaN is NaN
        e = e if weight is None else linear(e, weight)
    hs: Tensor = _ModalStates.apply(modes, alive, modes.w, e if bias is None else e + bias, h0)
    _taps.record_states("modal_scan", hs)
    return hs


def _into_modes(args: ScanArgs, readout: Readout, basis: Basis) -> tuple[Inputs, Readout]:
    """The arguments of a call in modal coordinates. Token ids stay, with a table that includes the bias; features are
    multiplied by the table."""
    x, h0, weight, bias, lengths, left = args.x, args.h0, args.weight, args.bias, args.lengths, basis.left
    assert x is not None
    table = None if weight is None else (left @ weight.double()).mT
    offset = None if weight is None or bias is None else left @ bias.double()
    if x.is_floating_point():
        # the gradient of a product reads all of x, and 0 * NaN is NaN
        x = without_padding(x, running(x.shape[0], lengths))
        x = linear(x, (left if table is None else table.mT).to(x.dtype))
        x, table = x if offset is None else x + offset.to(x.dtype), None
    elif table is not None:
        table = (table if offset is None else table + offset).to(h0.dtype)
    z0 = (h0.double() @ left.mT).to(h0.dtype)
    rows = (readout.weight.double() @ basis.right).to(readout.weight.dtype)
    return Inputs(x, basis.re, basis.im, z0, table, lengths), readout._replace(weight=rows)


@keeps_dtype
def modal_loss(args: ScanArgs, readout: Readout, modes: Modes) -> tuple[Tensor, Tensor]:
    """(loss, hits) of a linear recurrence with W = ``modes.w``; the readout's weight is [C, N]."""
    lengths = args.lengths
    check_lengths(lengths, len(readout.target))
    if not readout.target.is_cuda:  # there the check would wait, and a wrong id gives NaN
        target = without_padding(readout.target, running(len(readout.target), lengths))
        check_range("target", target, len(readout.weight), "class ids")
    check_tokens(args.x, args.weight, lengths)
    modal, readout = _into_modes(args, readout, modes.basis)
    loss, hits = _ModalLoss.apply(
        modes, readout, lengths, modes.w, modal.x, modal.z0, modal.table, readout.weight, readout.bias
    )
    return loss, hits
