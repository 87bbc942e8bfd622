"""The second derivative of the scans by the kernels of the cpu backend.

Note [Second derivative of a scan]
    Notation of Note [Derivatives of a scan], with W_in the weight of the features. The backward computes from the
    states and the cotangent g of hs

        grad_x = delta W_in,   M = sum_t delta_t h_{t-1}^T,   grad_h0 = W^T delta_1,
        grad_weight = sum_t delta_t x_t^T,   grad_bias = sum_t delta_t,

    and grad_x = delta without a weight. With a bar for the cotangents of these results, that of delta is

        mu_t = W_in bar(grad_x)_t + bar(M) h_{t-1} + bar(grad_weight) x_t + bar(grad_bias),

    and with kap_t = mu_t + W gam_{t-1}, gam_0 = bar(grad_h0), and gam_t = J_t kap_t the gradients are

        of g        gam
        of h_t      bar(M)^T delta_{t+1}, and dJ_t/dh_t kap_t ghat_t, where ghat_t = delta_t / J_t
        of h_0      bar(M)^T delta_1
        of x_t      bar(grad_weight)^T delta_t
        of W        sum_t delta_t gam_{t-1}^T
        of W_in     sum_t delta_t bar(grad_x)_t^T

    Those of the states then go through the backward of the scan, as any. J is rounded as 1 is, which makes an error of
    eps / J in ghat_t; but all that follows takes J_t times that gradient. One kernel computes all of them:
    ``csrc/cpu/scan_second.h``.

    Not served: resets, a message clip, checkpoints, replicas, and a parameter of the activation that is learned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import ScanInputs, ScanOptions
from orthokern.ops import _route, _taps
from orthokern.ops._alone import alone
from orthokern.ops._common import contiguous
from orthokern.ops._engine import again, one_cotangent_at_a_time, save_tensors, saved_tensors
from orthokern.ops._second import Plan, Taken, products
from orthokern.reference._scan import running, without_padding


def products_by(
    op: str, plan: Plan, taken: Taken, grad_hs: Tensor | None, grad_pre: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """``products`` of ``_second``, by the kernels where they serve the call."""
    backend, _, algorithm = plan.choices
    special = taken.resets is not None or plan.clip > 0 or needs[5] or algorithm not in ("auto", "sequential")
    tensors = (grad_hs, taken.hs, taken.pre, taken.x, taken.h0, taken.weight, taken.bias, taken.act_param)
    if special or grad_hs is None or grad_pre is not None or not alone((*tensors, taken.lengths, *taken.factors)):
        return products(plan, taken, grad_hs, grad_pre, needs)
    first = taken.factors[0]
    sizes = dict(zip(("N", "K") if op == "factored_scan" else ("N",), first.shape[-2:], strict=False))
    leaf = dispatch.cpu_leaf(op, backend, first.dtype, **sizes)
    if leaf is None:
        return products(plan, taken, grad_hs, grad_pre, needs)
    found = First.apply(leaf, plan, taken.lengths, needs, *tensors, *taken.factors)
    return *(grad if need else None for grad, need in zip(found, needs, strict=False)), None, None


class First(torch.autograd.Function):
    """The gradients of x, W, h0, weight and bias by the kernels, with a derivative by them: Note [Second derivative of
    a scan]. What asks for more derivatives, or for many at once, gets them from ``products``.

    Arguments of apply: the leaf; plan; lengths; needs, which gradients are wanted; grad_hs, hs, pre, x, h0, weight,
    bias, act_param, the factors.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: Any, plan: Plan, lengths: Tensor | None, needs: tuple[bool, ...], *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        inputs, options, map_, grad_hs, hs, pre = First._contract(plan, lengths, tensors)
        found, delta = leaf.scan_bwd_kept(
            map_, inputs, options, grad_hs, hs, pre, need_x=needs[0], need_params=needs[1] or needs[3] or needs[4]
        )
        if _taps.SINKS:
            _taps.record(map_.op, found.norm)
        ctx.leaf, ctx.plan, ctx.needs = leaf, plan, needs
        ctx.set_materialize_grads(False)
        save_tensors(ctx, lengths, delta, *tensors)
        return found.x, found.m, found.h0, found.weight, found.bias

    @staticmethod
    def _contract(plan: Plan, lengths: Tensor | None, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """What a leaf takes: inputs, options, map, grad_hs, hs and pre."""
        grad_hs, hs, pre, x, h0, weight, bias, act_param, *factors = map(contiguous, tensors)
        assert h0 is not None
        options = ScanOptions(plan.activation, lengths=contiguous(lengths))
        inputs = ScanInputs(x, h0, weight, bias, act_param)
        return inputs, options, plan.map_of(*factors), grad_hs, hs, pre if options.keeps_pre else None

    @staticmethod
    @one_cotangent_at_a_time
    @keeps_dtype
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        lengths, delta, *tensors = saved_tensors(ctx)
        needs = ctx.needs_input_grad[4:]
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * (len(needs) + 4)
        if not _route.last() or forward_ad._current_level >= 0:

            def function(given: list[Any]) -> tuple[Tensor | None, ...]:
                hs, pre, x, h0, weight, bias, act_param, *factors = given[1:]
                taken = Taken(hs, pre, x, h0, weight, bias, act_param, lengths, None, None, tuple(factors))
                return products(ctx.plan, taken, given[0], None, ctx.needs)[:5]

            return None, None, None, None, *again(function, tensors, needs, cotangents)
        inputs, options, map_, _, hs, pre = First._contract(ctx.plan, lengths, tensors)
        if inputs.x is not None and not inputs.x.is_floating_point():  # ids on padding are not checked
            inputs = inputs._replace(x=without_padding(inputs.x, running(hs.shape[0], lengths)))
        found = ctx.leaf.scan_second(
            map_, inputs, options, hs, pre, delta, *map(contiguous, cotangents), need_grad_hs=needs[0],
            need_map=any(needs[8:]),
        )  # fmt: skip
        of_map = (None,) * len(needs[8:]) if found.m is None else ctx.plan.gradients(found.m, map_)
        return (
            None, None, None, None, found.grad_hs, found.hs, None, found.x, found.h0, found.weight, None, None, *of_map
        )  # fmt: skip
