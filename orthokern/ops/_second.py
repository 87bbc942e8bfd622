"""Derivatives of the scans beyond the first reverse one: double backward, forward mode, and torch.func.

Note [Derivatives of a scan]
    Notation of Note [Factored scan backward]: a_t = W h_{t-1} + e_t, h_t = phi(a_t). J_t is the Jacobian of phi at a_t,
    a diagonal, or oplu's exchange of pairs; J_t^T = J_t. Both directions of the scan's linearisation are linear
    recurrences of one form,

        out_t = c_t (J_t ghat_t + r_t),      ghat_t = g_t + W^T out_{t+1}    (the adjoint, runs back in time)
                                          or ghat_t = g_t + W out_{t-1}      (the tangent, runs forward in time),

    where c_t is a mask of zeros and ones. ``LinearScan`` computes them with the backward kernel of the scan:

    - the tangent is an adjoint with time reversed and W^T in place of W (u and v exchanged);
    - r_t is moved into g_t: with out_t = c_t (bar_t + r_t), bar obeys the recurrence with g_t + W^T c_{t+1} r_{t+1}.

    First derivatives of the scan. With q = dphi/dp for the activation's parameter p, and a prime for a tangent:

        reverse   delta = adjoint(g, r), where r is the cotangent of a (only double backward has one);
                  dL/dW = sum_t delta_t h_{t-1}^T,  dL/de = delta,  dL/dp = sum_t q_t ghat_t,  dL/dh_0 = W^T delta_1.
        forward   h' = tangent(g_t = W' h_{t-1} + e'_t, r_t = q_t p').

    Derivatives of out = adjoint(g, r). It is linear in (g, r), so with mu the cotangent of out

        gam = tangent(g = mu, c'),   dL/dg = gam,   kap_t = mu_t + W gam_{t-1},   dL/dr = c kap,
        dL/dW = sum_t out_{t+1} gam_t^T,            dL/dJ_t = diag(c_t kap_t ghat_t^T),

    and its tangent is out' = adjoint(g' + W'^T out_{t+1}, r' + J'_t ghat_t). Those of a tangent are the same with W^T
    in place of W and time reversed. c' is J c J: c itself for a diagonal J, c with its pairs exchanged for oplu. J
    depends on what the backward reads: dJ/dh = -2 h for tanh, -2 (1 - |h|) sign(h) for softsign; for prelu dJ/dp is 1
    where a <= 0. Elsewhere J is constant between its kinks, and the derivative is that of the piece.

    A reset before step t cuts what steps t - 1 and t send each other. The tangent takes reset_state' in its place; the
    gradient of reset_state is the sum of W^T delta_t over resets.

    With a message clip, delta_t = clip(J_t ghat_t + r_t): its derivative has c_t = 1 where |delta_t| < clip. The
    forward's tangent knows nothing of the clip, which is a part of the backward alone. So the tangent of the gradient
    is that of the clipped one. Its reverse derivative is not: what it sends to h goes through the backward of the scan,
    which clips. It cannot be told from the gradient of a loss, with which autograd adds it. With checkpoints, it goes
    through a second scan, which recomputes the states, and is clipped there on its own: of a stack of layers, these
    second derivatives differ from those without checkpoints.

    All rules are made of ``LinearScan`` and of torch's differentiable functions, so they can be derived again, to any
    order and in any mixture of the two modes. ``_second_native`` has a faster way for second derivatives on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import Map
from orthokern.ops import _route, _taps
from orthokern.ops._common import total
from orthokern.ops._engine import one_cotangent_at_a_time, save_tensors, saved_tensors
from orthokern.reference._scan import (
    clip_message,
    product,
    running,
    started,
    transposed_product,
    weight_gradient,
    without_padding,
)
from orthokern.reference.activations import chain, sum_to_param


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the scans of one call have in common."""

    bwd: Callable[..., Any]  # the backward op of the ScanOp
    map_of: Callable[..., Map]  # of the ScanOp, as gradients
    gradients: Callable[[Tensor, Map], tuple[Tensor, ...]]
    activation: str
    choices: tuple[str | None, str, str]  # backend, precision and algorithm
    clip: float = 0.0  # the message clip of an adjoint that has no mask; 0 for none
    records: bool = False  # whether an adjoint is the one whose norms a tap wants


# ------------------------------------------------------------------------------------------------ parts of the formulas


def _transposed(map_: Map) -> Map:
    """The map of W^T."""
    if map_.first is None:
        return Map(None, None, map_.second.mT)
    return Map(map_.second, map_.scale, map_.first)


def _factors(map_: Map) -> tuple[Tensor, ...]:
    """The tensors of a map in the order of the ops' schemas."""
    return tuple(factor for factor in reversed(map_) if factor is not None)


def _changed(map_: Map, change: Map, rows: Tensor) -> Tensor | None:
    """W' applied to every row, where change holds the tangents of the factors, None for zeros."""
    if map_.first is None or map_.scale is None:
        return None if change.second is None else rows @ change.second.mT
    inner = rows @ map_.first
    middle = total(
        None if change.scale is None else inner * change.scale,
        None if change.first is None else (rows @ change.first) * map_.scale,
    )
    return total(
        None if middle is None else middle @ map_.second.mT,
        None if change.second is None else (inner * map_.scale) @ change.second.mT,
    )


def _times(mask: Tensor | None, values: Tensor) -> Tensor:
    """values where mask is True, else zero; all of them without a mask."""
    return values if mask is None else torch.where(mask, values, torch.zeros_like(values))


def _linked(values: Tensor, resets: Tensor | None, *, before: bool) -> Tensor:
    """values [T, B, N] of the step before, or after, each step: zeros where there is none, or a reset cuts it off."""
    edge = torch.zeros_like(values[:1])
    if before:
        return _times_rows(resets, torch.cat([edge, values[:-1]]))
    return torch.cat([_times_rows(resets, values)[1:], edge])


def _times_rows(resets: Tensor | None, values: Tensor) -> Tensor:
    """values [T, B, N], zeros in the rows that resets [T, B] marks."""
    return values if resets is None else torch.where(resets.unsqueeze(-1), torch.zeros_like(values), values)


def _slope(values: Tensor, source: Tensor, act_param: Tensor | None, activation: str) -> Tensor:
    """J values."""
    return chain(values, source, source, act_param, activation=activation)[0]


def _curvature(source: Tensor, activation: str) -> Tensor | None:
    """dJ/dsource, or None where it is zero almost everywhere."""
    if activation == "tanh":
        return -2 * source
    if activation == "softsign":
        return -2 * (1 - source.abs()) * source.sign()
    return None


def _bent_slope(source: Tensor, activation: str) -> Tensor:
    """J of an activation that has a curvature, in one new tensor that the caller may change."""
    if activation == "tanh":
        return torch.addcmul(source.new_ones(()), source, source, value=-1)
    return source.abs().neg_().add_(1).square_()  # softsign


def _by_parameter(source: Tensor, activation: str) -> Tensor:
    """q = dphi/dp of an activation with a parameter, from what its backward reads."""
    return source.clamp(max=0) if ACTIVATIONS[activation].needs_input else source.sign()


def _slope_has_parameter(activation: str) -> bool:
    """Whether J depends on the activation's parameter: the slope of the part below zero."""
    row = ACTIVATIONS[activation].parameter
    return row is not None and row.name == "slope"


# ------------------------------------------------------------------------------------------------ the linear recurrence


class _Linear(NamedTuple):
    """A recurrence of LinearScan but for g and r, in the order of its arguments."""

    source: Tensor
    mask: Tensor | None
    act_param: Tensor | None
    lengths: Tensor | None
    resets: Tensor | None
    map_: Map


def _with_kernel(plan: Plan, forwards: bool, g: Tensor, linear: _Linear) -> Tensor:
    """out of LinearScan without r, by the scan's backward op."""
    source, mask, act_param, lengths, resets, map_ = linear
    activation, (backend, precision, algorithm) = plan.activation, plan.choices
    if mask is not None:  # put into what J is computed from: J = 0 at these values
        if activation == "identity":
            activation, algorithm, source = "relu", "auto", mask.to(g.dtype)
        else:
            flat = 1.0 if activation in ("tanh", "softsign") else 0.0
            source = torch.where(mask, source, torch.full_like(source, flat))
    alive = running(g.shape[0], lengths)
    if forwards:  # the padding comes first, and must send nothing on
        g, source, map_ = without_padding(g, alive).flip(0), source.flip(0), _transposed(map_)
        if resets is not None:  # what lay between steps t - 1 and t lies between steps T - t - 1 and T - t
            resets = torch.cat([torch.zeros_like(resets[:1]), resets[1:].flip(0)])
    row = ACTIVATIONS[activation]
    with contextlib.nullcontext() if plan.records else _taps.set_aside():
        out: Tensor = plan.bwd(
            g, source, source if row.needs_input else g.new_empty(0), None, *_factors(map_),
            g.new_zeros(g.shape[1:]), None, None, None if row.parameter is None else act_param, activation, 0,
            True, False, backend, precision, algorithm, None if forwards else lengths,
            0.0 if mask is not None else plan.clip, resets, None,
        )[0]  # fmt: skip
    return without_padding(out.flip(0), alive) if forwards else out


def _step_by_step(plan: Plan, forwards: bool, g: Tensor, r: Tensor | None, linear: _Linear) -> Tensor:
    """out of LinearScan in plain torch code, for what the kernels have no argument for."""
    source, mask, act_param, lengths, resets, map_ = linear
    T = g.shape[0]
    alive = running(T, lengths)
    g, r = without_padding(g, alive), None if r is None else without_padding(r, alive)
    through = product if forwards else transposed_product
    steps: list[Tensor] = []
    for t in range(T) if forwards else reversed(range(T)):
        ghat = g[t]
        if steps:
            sent = through(map_, steps[-1])
            cut = None if resets is None else resets[t if forwards else t + 1]
            ghat = ghat + (sent if cut is None else without_padding(sent, ~cut))
        out = _slope(ghat, source[t], act_param, plan.activation)
        if r is not None:
            out = out + r[t]
        if mask is not None:
            out = _times(mask[t], out)
        elif plan.clip > 0:
            out = clip_message(out, plan.clip)
        steps.append(without_padding(out, None if alive is None else alive[t]))
    return torch.stack(steps if forwards else steps[::-1])


class LinearScan(torch.autograd.Function):
    """out [T, B, N] of Note [Derivatives of a scan].

    Arguments of apply: plan; forwards, whether time runs forward (the tangent); g [T, B, N]; r [T, B, N] or None;
    source [T, B, N], what J is computed from: a for activations that need their input, else h; mask, bool [T, B, N] or
    None; act_param; lengths; resets; the factors of W. With lengths, out is zero on padding and g and r are not read
    there. No step sends anything across a reset.
    """

    @staticmethod
    def forward(plan: Plan, forwards: bool, g: Tensor, r: Tensor | None, *rest: Any) -> Tensor:
        linear = _Linear._make((*rest[:5], plan.map_of(*rest[5:])))
        mask, clipped = linear.mask, plan.clip > 0 and linear.mask is None
        pairs_or_slope = ACTIVATIONS[plan.activation].needs_input
        if (mask is not None and pairs_or_slope) or (clipped and r is not None):
            return _step_by_step(plan, forwards, g, r, linear)
        if r is None:
            return _with_kernel(plan, forwards, g, linear)
        r = without_padding(_times(mask, r), running(g.shape[0], linear.lengths))
        through = product if forwards else transposed_product
        g = g + through(linear.map_, _linked(r, linear.resets, before=forwards))
        return _with_kernel(plan, forwards, g, linear) + r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan, ctx.forwards, *tensors = inputs
        ctx.set_materialize_grads(False)
        save_tensors(ctx, *tensors, output)
        ctx.save_for_forward(*tensors, output)

    @staticmethod
    def _again(
        ctx: Any, forwards: bool, g: Tensor, r: Tensor | None, saved: tuple[Any, ...], mask: Tensor | None
    ) -> Tensor:
        """The recurrence with other g, r and mask."""
        _, _, source, _, act_param, lengths, resets, *factors, _ = saved
        plan = dataclasses.replace(ctx.plan, records=False)
        out: Tensor = LinearScan.apply(plan, forwards, g, r, source, mask, act_param, lengths, resets, *factors)
        return out

    @staticmethod
    def _parts(ctx: Any, saved: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(alive, mask c, the neighbours of out that ghat takes W^T or W of)."""
        g, _, _, mask, _, lengths, resets = saved[:7]
        out = saved[-1]
        if mask is None and ctx.plan.clip > 0:
            mask = out.detach().abs() < ctx.plan.clip
        return running(g.shape[0], lengths), mask, _linked(out, resets, before=ctx.forwards)

    @staticmethod
    @one_cotangent_at_a_time
    @keeps_dtype
    def backward(ctx: Any, mu: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_tensors(ctx)
        if mu is None:
            return (None,) * (len(saved) + 1)
        g, r, source, _, act_param, _, resets, *factors, out = saved
        needs, activation, forwards = ctx.needs_input_grad, ctx.plan.activation, ctx.forwards
        map_ = ctx.plan.map_of(*factors)
        alive, mask, neighbours = LinearScan._parts(ctx, saved)
        mu = without_padding(mu, alive)
        other_mask = mask
        if mask is not None and ACTIVATIONS[activation].pairs:
            other_mask = _slope(mask.to(g.dtype), source, None, activation) > 0
        gam = LinearScan._again(ctx, not forwards, mu, None, saved, other_mask)
        through, back = (product, transposed_product) if forwards else (transposed_product, product)
        curvature = _curvature(source, activation) if needs[4] else None
        by_parameter = needs[6] and _slope_has_parameter(activation)
        grad_r = grad_source = grad_param = None
        if curvature is not None and not needs[3] and r is None and _route.last():
            # kap and ghat are there without a product: gam = J c kap, and out = J ghat where c = 1. J is rounded as 1
            # is, which makes an error of eps / J here; but all that follows takes J times this gradient.
            slope = _bent_slope(source, activation)
            # where J = 0, so are gam and out: all that counts there is that the quotient is a number
            least = torch.finfo(g.dtype).tiny ** 0.4
            grad_source = curvature.mul_(gam).mul_(out).div_(slope.clamp_min_(least).square_())
        elif needs[3] or curvature is not None or by_parameter:
            kap = _times(mask, without_padding(mu + back(map_, _linked(gam, resets, before=not forwards)), alive))
            grad_r = kap if needs[3] else None
            if curvature is not None or by_parameter:
                bent = kap * without_padding(g + through(map_, neighbours), alive)
                grad_source = None if curvature is None else bent * curvature
                if by_parameter:
                    grad_param = sum_to_param(_times(source <= 0, bent), act_param)
        grads: tuple[Tensor | None, ...] = (None,) * len(factors)
        if any(needs[9:]):
            left, right = (gam, neighbours) if forwards else (neighbours, gam)
            grads = ctx.plan.gradients(left.flatten(0, 1).mT @ right.flatten(0, 1), map_)
        return None, None, gam, grad_r, grad_source, None, grad_param, None, None, *grads

    @staticmethod
    @one_cotangent_at_a_time
    @keeps_dtype
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        saved = saved_tensors(ctx)
        g, _, source, _, _, _, _, *factors, _ = saved
        _, _, dg, dr, d_source, _, d_param, _, _, *d_factors = tangents
        activation, forwards = ctx.plan.activation, ctx.forwards
        map_, d_map = ctx.plan.map_of(*factors), ctx.plan.map_of(*d_factors)
        alive, mask, neighbours = LinearScan._parts(ctx, saved)
        if not forwards:
            map_, d_map = _transposed_pair(map_, d_map)
        curvature = None if d_source is None else _curvature(source, activation)
        bend = None if curvature is None or d_source is None else curvature * d_source
        if d_param is not None and _slope_has_parameter(activation):
            bend = total(bend, _times(source <= 0, d_param.expand_as(source)))
        if bend is not None:
            dr = total(dr, bend * without_padding(g + product(map_, neighbours), alive))
        dg = total(dg, _changed(map_, d_map, neighbours))
        return LinearScan._again(ctx, forwards, torch.zeros_like(g) if dg is None else dg, dr, saved, mask)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        places = {2: 1, 3: 1, 4: 1, 5: 1, 7: 0, 8: 1}  # of g, r, source, mask, lengths, resets
        return in_the_batch(LinearScan.apply, info.batch_size, in_dims, arguments, places)


def _transposed_pair(map_: Map, change: Map) -> tuple[Map, Map]:
    """Both for W^T; change may hold None."""
    if map_.first is None:
        return _transposed(map_), change if change.second is None else _transposed(change)
    return _transposed(map_), Map(change.second, change.scale, change.first)  # type: ignore[arg-type]


def in_the_batch(
    function: Callable[..., Any], size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...],
    places: dict[int, int],
) -> tuple[Any, Any]:  # fmt: skip
    """A function of sequences under vmap: all models in one batch, or one after the other where they do not share what
    has no sequences. places: the dimension of the batch in the arguments that have one."""
    if any(dim is not None and i not in places for i, dim in enumerate(in_dims)):
        found = _looped(function, size, in_dims, arguments)
        return found, (0,) * len(found) if isinstance(found, tuple) else 0
    given = [
        _joined(a, in_dims[i], size, places[i]) if i in places and a is not None else a for i, a in enumerate(arguments)
    ]
    found = function(*given)
    if isinstance(found, Tensor):
        return found.unflatten(1, (size, -1)), 1
    apart = tuple(t.unflatten(1, (size, -1)) if t.ndim > 1 else t for t in found)  # an empty pre has no sequences
    return apart, tuple(1 if t.ndim > 1 else None for t in found)


def _joined(tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """A tensor with its vmapped dimension joined to the dimension `batch`; repeated where it has none."""
    if dim is None:
        wide = tensor.unsqueeze(batch).expand(*tensor.shape[:batch], size, *tensor.shape[batch:])
    else:
        wide = tensor.movedim(dim, batch)
    return wide.flatten(batch, batch + 1)


def _looped(
    function: Callable[..., Any], size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> Any:
    """The results of a function of each slice of the vmapped arguments, stacked in front."""
    results = [
        function(*(a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims, strict=True)))
        for i in range(size)
    ]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(several) for several in zip(*results, strict=True))
    return torch.stack(results)


# ---------------------------------------------------------------------------------------------- derivatives of the scan


class Taken(NamedTuple):
    """The tensors of a scan that its derivatives are computed from. x may be None where nothing asks for it."""

    hs: Tensor
    pre: Tensor | None
    x: Tensor | None
    h0: Tensor
    weight: Tensor | None
    bias: Tensor | None
    act_param: Tensor | None
    lengths: Tensor | None
    resets: Tensor | None
    reset_state: Tensor | None
    factors: tuple[Tensor, ...]

    def starts(self) -> Tensor:
        """What every step starts from, [T, B, N]."""
        return started(torch.cat([self.h0.unsqueeze(0), self.hs[:-1]]), self.resets, self.reset_state)

    def source(self, plan: Plan) -> Tensor:
        if ACTIVATIONS[plan.activation].needs_input:
            assert self.pre is not None
            return self.pre
        return self.hs


def products(
    plan: Plan, taken: Taken, grad_hs: Tensor | None, grad_pre: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of x, W, h0, weight, bias, act_param and reset_state, of those that are needed, as functions that can
    be differentiated again."""
    hs, x, weight, bias, act_param = taken.hs, taken.x, taken.weight, taken.bias, taken.act_param
    lengths, resets = taken.lengths, taken.resets
    source, map_, alive = taken.source(plan), plan.map_of(*taken.factors), running(len(hs), lengths)
    g = torch.zeros_like(hs) if grad_hs is None else without_padding(grad_hs, alive)
    delta = LinearScan.apply(plan, False, g, grad_pre, source, None, act_param, lengths, resets, *taken.factors)
    found: list[Tensor | None] = [None] * 7
    if needs[0] and weight is None:
        found[0] = delta
    elif needs[0] and (x is None or x.is_floating_point()):
        found[0] = delta @ weight
    if needs[1]:
        found[1] = delta.flatten(0, 1).mT @ taken.starts().flatten(0, 1)
    if needs[2]:
        found[2] = transposed_product(map_, _times_rows(resets, delta)[0])
    if weight is not None and needs[3]:
        assert x is not None
        found[3] = weight_gradient(delta, without_padding(x, alive), weight)
    if bias is not None and needs[4]:
        found[4] = delta.sum((0, 1))
    if act_param is not None and needs[5]:
        ghat = g + transposed_product(map_, _linked(delta, resets, before=False))
        elementwise = without_padding(ghat, alive) * _by_parameter(source, plan.activation)
        found[5] = sum_to_param(elementwise, act_param)
    if resets is not None and needs[6]:
        found[6] = transposed_product(map_, _times_rows(~resets, delta).sum(0))
    return tuple(found)


@keeps_dtype
def gradients(
    plan: Plan,
    taken: Taken,
    grad_hs: Tensor | None,
    grad_pre: Tensor | None,
    needs: tuple[bool, ...],
    by: Callable[..., tuple[Tensor | None, ...]] = products,
) -> tuple[Tensor | None, ...]:
    """The same with the factors in place of W; by: what computes those."""
    count = len(taken.factors)
    wanted = (needs[0], any(needs[1 : count + 1]), *needs[count + 1 :])
    of_x, m, *others = by(plan, taken, grad_hs, grad_pre, wanted)
    return of_x, *((None,) * count if m is None else plan.gradients(m, plan.map_of(*taken.factors))), *others


@keeps_dtype
def tangent(plan: Plan, taken: Taken, change: Any) -> tuple[Tensor, Tensor | None]:
    """The tangents of hs, and of pre for activations that need it; change is a Taken of tangents, None for zeros."""
    hs, x, weight, lengths, resets = taken.hs, taken.x, taken.weight, taken.lengths, taken.resets
    map_, d_map = plan.map_of(*taken.factors), plan.map_of(*change.factors)
    alive = running(hs.shape[0], lengths)

    def clean(t: Tensor | None) -> Tensor | None:
        return None if t is None else without_padding(t, alive)

    terms = [_changed(map_, d_map, taken.starts())]
    if weight is None:
        terms.append(clean(change.x))
    else:
        assert x is not None
        if change.x is not None:
            terms.append(without_padding(change.x, alive) @ weight.mT)
        if change.weight is not None:
            rows = without_padding(x, alive)
            by_ids = torch.nn.functional.embedding
            terms.append(
                rows @ change.weight.mT if x.is_floating_point() else by_ids(rows, change.weight.mT.contiguous())
            )
        terms.append(None if change.bias is None else change.bias.expand_as(hs))
    e = total(*terms)
    g = torch.zeros_like(hs) if e is None else without_padding(e, alive)
    if change.h0 is not None or change.reset_state is not None:
        first = torch.zeros_like(hs[0]) if change.h0 is None else change.h0
        given = torch.cat([first.unsqueeze(0), torch.zeros_like(hs[1:])])
        g = g + without_padding(product(map_, started(given, resets, change.reset_state)), alive)
    source, r = taken.source(plan), None
    if change.act_param is not None:
        r = _by_parameter(source, plan.activation) * change.act_param
    plan = dataclasses.replace(plan, clip=0.0, records=False)
    d_hs = LinearScan.apply(plan, True, g, r, source, None, taken.act_param, lengths, resets, *taken.factors)
    if not ACTIVATIONS[plan.activation].needs_input:
        return d_hs, None
    return d_hs, without_padding(g + product(map_, _linked(d_hs, resets, before=True)), alive)


class Scan(torch.autograd.Function):
    """(hs, pre) of a scan under forward mode and torch.func; pre is empty unless the activation needs its input.

    Arguments of apply: the forward op, plan, x, h0, weight, bias, act_param, lengths, resets, reset_state, the factors.
    """

    @staticmethod
    def forward(fwd: Callable[..., Any], plan: Plan, x: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        h0, weight, bias, act_param, lengths, resets, reset_state, *factors = tensors
        hs, _, pre = fwd(
            x, *factors, h0, weight, bias, act_param, plan.activation, 0, *plan.choices, lengths, plan.clip, resets,
            reset_state,
        )  # fmt: skip
        return hs, pre

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.plan, *tensors = inputs
        hs, pre = output
        if not ACTIVATIONS[ctx.plan.activation].needs_input:
            ctx.mark_non_differentiable(pre)
        ctx.set_materialize_grads(False)
        save_tensors(ctx, hs, pre, *tensors)
        ctx.save_for_forward(hs, pre, *tensors)

    @staticmethod
    def _taken(saved: tuple[Any, ...]) -> Taken:
        return Taken._make((*saved[:10], tuple(saved[10:])))

    @staticmethod
    @one_cotangent_at_a_time
    def backward(ctx: Any, grad_hs: Tensor | None, grad_pre: Tensor | None) -> tuple[Tensor | None, ...]:
        taken = Scan._taken(saved_tensors(ctx))
        count = len(taken.factors)
        if grad_hs is None and grad_pre is None:
            return (None,) * (count + 10)
        needs = ctx.needs_input_grad
        in_order = (needs[2], *needs[10:], *needs[3:7], needs[9])
        of_x, *found = gradients(ctx.plan, taken, grad_hs, grad_pre, in_order)
        of_factors, of_tensors, of_reset_state = found[:count], found[count:-1], found[-1]
        return None, None, of_x, *of_tensors, None, None, of_reset_state, *of_factors

    @staticmethod
    @one_cotangent_at_a_time
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor | None]:
        taken = Scan._taken(saved_tensors(ctx))
        change = Scan._taken((None, None, *tangents[2:]))
        return tangent(ctx.plan, taken, change)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        places = {2: 1, 3: 0, 7: 0, 8: 1, 9: 0}  # of x, h0, lengths, resets, reset_state
        return in_the_batch(Scan.apply, info.batch_size, in_dims, arguments, places)
