"""Derivatives of the GRU beyond the first reverse one: double backward, forward mode, and torch.func.

Note [Derivatives of the GRU]
    Notation of Note [GRU scan backward]. The linearised step is v -> A_t v, with P = W v, one block for each gate, and

        A v = z v + cz P_z + cn y,     cz = (h' - n) z (1 - z),   cn = (1 - z) (1 - n^2),
        "torch"  y = k P_r + r P_n,         k = q r (1 - r)
        "kanai"  y = W_n (k P_r + r v),     k = h' r (1 - r)

    and its transpose, with d = cn ghat,

        A^T ghat = z ghat + W_z^T (cz ghat) + y^,
        "torch"  y^ = W_r^T (k d) + W_n^T (r d)
        "kanai"  y^ = W_r^T (k d_m) + r d_m,        d_m = W_n^T d.

    ``LinearGru`` computes the tangent out_t = g_t + A_t out_{t-1} and the adjoint out_t = g_t + A_{t+1}^T out_{t+1}. On
    padding z = k = r = 0 and W v = P enters nowhere: A = 0 where g is zero, too. Where a step starts from reset_state,
    h' is that state, and the recurrence gets A = 0 from coefficients that are zero: A_t^T ghat goes to the gradient of
    reset_state, and the tangent of reset_state adds A_t v to g_t.

    First derivatives. Reverse: ghat is the adjoint of dL/dh, and the rest of Note [GRU scan backward] follows from it
    without a recurrence. In a double backward the gates and q have cotangents of their own: they join d_r, d_z, d_n and
    d_q, and what these send to the state before is added to g. Forward: h' is the tangent of what x', W' and b' add to
    a step, cz a_z' + cn y' with the coefficients above.

    Derivatives of the recurrence. With mu the cotangent of an adjoint's out, gam = tangent(mu) is the gradient of g,
    and those of the coefficients and of W are the ones of sum_t <A_t gam_{t-1}, out_t>; its tangent is
    adjoint(g'_t + A'_{t+1}^T out_{t+1}). Those of a tangent are the same with the roles exchanged.

Note [Second derivative of the GRU]
    ``First`` is the same second derivative on the CPU, of the backward as one function of (g, hs, gates, pre, W, h_0).
    Let X, D, e, c be the cotangents of the gradients of x, W, h_0 and the bias. What they are paired with is
    sum_t <g_t, v_t>, with v the tangent of h in the direction x' = X, W' = D, h_0' = e, b' = c: so v is the gradient
    of g. The others are the derivatives of that sum with ghat as the cotangent of every v_t. With v', h' the tangent
    and state before the step, and the tangents

        a_r' = X_r + W_r v' + D_r h' + c_r,  r' = r (1 - r) a_r',  and z' and a_z' likewise,
        "torch"  q' = W_n v' + D_n h' + c_n,         a_n' = X_n + r' q + r q'
        "kanai"  m' = r' h' + r v' (m = r h'),       a_n' = X_n + W_n m' + D_n m + c_n
        n' = (1 - n^2) a_n',                         v = z' (h' - n) + z v' + (1 - z) n',

    and d_r, d_z, d_n, d_q, d_m of Note [GRU scan backward],

        of z    ghat (v' - n' + (h' - n) (1 - 2z) a_z')
        of n    -ghat z' - 2n (1 - z) ghat a_n'
        of r    "torch"  d_n (q' + q (1 - 2r) a_r')      "kanai"  d_m (v' + h' (1 - 2r) a_r') + (D_n^T d_n) h'
        of q    "torch"  d_n r'
        of h'   ghat z' + D_r^T d_r + D_z^T d_z + { D_n^T d_q   or   d_m r' + (D_n^T d_n) r }
        of W    d_r v'^T, d_z v'^T, and d_q v'^T or d_n m'^T.

    The backward of the GRU gets those of hs, gates and pre.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import GruInputs, GruOptions, GruStates
from orthokern.ops import _route, _taps
from orthokern.ops._alone import alone
from orthokern.ops._common import contiguous, total
from orthokern.ops._engine import again, one_cotangent_at_a_time, save_tensors, saved_tensors
from orthokern.ops._second import in_the_batch
from orthokern.reference._scan import running, started, without_padding


def neighbours(values: Tensor, first: Tensor | None, *, before: bool) -> Tensor:
    """values [T, B, N] of the step before, or after, each step; `first`, or zeros, where there is none."""
    edge = torch.zeros_like(values[:1]) if first is None else first.unsqueeze(0)
    return torch.cat([edge, values[:-1]] if before else [values[1:], edge])


COEFFICIENTS = ("z", "cz", "cn", "k", "r")


def _applied(variant: str, v: Tensor, w: Tensor, coefficients: tuple[Tensor, ...]) -> Tensor:
    """A v, of one step or of all."""
    z, cz, cn, k, r = coefficients
    w_r, w_z, w_n = w.chunk(3)
    p_r = v @ w_r.mT
    y = k * p_r + r * (v @ w_n.mT) if variant == "torch" else (k * p_r + r * v) @ w_n.mT
    return z * v + cz * (v @ w_z.mT) + cn * y


def _steps(
    variant: str,
    forwards: bool,
    g: Tensor,
    w: Tensor,
    coefficients: tuple[Tensor, ...],
    products: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """out of LinearGru, in few calls for each step.

    products, of a tangent: zeros [T, B, 3N] (2N, and [T, B, N], in "kanai") that take P (P_r and P_z, and y).
    """
    z, cz, cn, k, r = coefficients
    T, B, N = g.shape
    torch_variant = variant == "torch"
    w_rz, w_n = w[: 2 * N], w[2 * N :]
    gates = torch.stack([cn * k, cz, cn * r], 2) if torch_variant else torch.stack([k, cz], 2)  # [T, B, 2 or 3, N]
    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    order = range(T) if forwards else range(T - 1, -1, -1)
    last = None
    for t in order:
        if last is None:
            out[t] = g[t]
        elif forwards and torch_variant:
            p = torch.mm(last, w.mT, out=None if products is None else products[0][t])
            torch.add(torch.addcmul(g[t], z[t], last), (p.view(B, 3, N) * gates[t]).sum(1), out=out[t])
        elif forwards:
            p = torch.mm(last, w_rz.mT, out=None if products is None else products[0][t])
            p_r, p_z = (p.view(B, 2, N) * gates[t]).unbind(1)
            inner = torch.addcmul(p_r, r[t], last)
            y = torch.mm(inner, w_n.mT, out=None if products is None else products[1][t])
            torch.addcmul(g[t] + p_z, z[t], last, out=out[t]).addcmul_(cn[t], y)
        elif torch_variant:
            d = (gates[t + 1] * last.unsqueeze(1)).view(B, 3 * N)
            torch.addmm(torch.addcmul(g[t], z[t + 1], last), d, w, out=out[t])
        else:
            d_m = (cn[t + 1] * last) @ w_n
            d = (gates[t + 1] * torch.stack([d_m, last], 1)).view(B, 2 * N)
            found = torch.addcmul(g[t], z[t + 1], last).addcmul_(r[t + 1], d_m)
            torch.addmm(found, d, w_rz, out=out[t])
        last = out[t]
    return out


class LinearGru(torch.autograd.Function):
    """out [T, B, N] of Note [Derivatives of the GRU].

    Arguments of apply: variant; forwards, whether time runs forward (the tangent); g [T, B, N]; w [3N, N]; the
    COEFFICIENTS [T, B, N] of every step.
    """

    @staticmethod
    def forward(variant: str, forwards: bool, g: Tensor, w: Tensor, *coefficients: Tensor) -> Tensor:
        return _steps(variant, forwards, g, w, coefficients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.variant, ctx.forwards, *tensors = inputs
        ctx.set_materialize_grads(False)
        save_tensors(ctx, *tensors, output)
        ctx.save_for_forward(*tensors, output)

    @staticmethod
    @one_cotangent_at_a_time
    @keeps_dtype
    def backward(ctx: Any, mu: Tensor | None) -> tuple[Tensor | None, ...]:
        if mu is None:
            return (None,) * 9
        _, w, *coefficients, out = saved_tensors(ctx)
        arguments, pairing, products = (w, tuple(coefficients)), any(ctx.needs_input_grad[3:]), None
        if (
            pairing and not ctx.forwards and not torch.is_grad_enabled()
        ):  # the last derivative: keep what the steps have
            shapes = [3 * out.shape[-1]] if ctx.variant == "torch" else [2 * out.shape[-1], out.shape[-1]]
            products = tuple(out.new_zeros(*out.shape[:2], width) for width in shapes)
            gam = _steps(ctx.variant, True, mu, *arguments, products)
        else:
            gam = LinearGru.apply(ctx.variant, not ctx.forwards, mu, w, *coefficients)
        if not pairing:
            return None, None, gam, *(None,) * 6
        v, ghat = (out, gam) if ctx.forwards else (gam, out)
        v = neighbours(v, None, before=True)
        return None, None, gam, *_pairing_gradients(ctx.variant, v, ghat, *arguments, products)

    @staticmethod
    @one_cotangent_at_a_time
    @keeps_dtype
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        g, w, *coefficients, out = saved_tensors(ctx)
        _, _, dg, *changes = tangents
        if ctx.forwards:
            v = neighbours(out, None, before=True)
            added = _changed(ctx.variant, v, w, tuple(coefficients), *changes)
        else:
            added = _changed_back(ctx.variant, out, w, tuple(coefficients), *changes)
            added = None if added is None else neighbours(added, None, before=False)
        dg = total(dg, added)
        dg = torch.zeros_like(g) if dg is None else dg
        found: Tensor = LinearGru.apply(ctx.variant, ctx.forwards, dg, w, *coefficients)
        return found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        places = dict.fromkeys((2, *range(4, len(arguments))), 1)  # of g and the coefficients
        return in_the_batch(LinearGru.apply, info.batch_size, in_dims, arguments, places)


def _pairing_gradients(
    variant: str,
    v: Tensor,
    ghat: Tensor,
    w: Tensor,
    coefficients: tuple[Tensor, ...],
    products: tuple[Tensor, ...] | None,
) -> tuple[Tensor, ...]:
    """The gradients of w and the coefficients of sum_t <A_t v_t, ghat_t>; products of v as in ``_steps``, or None."""
    _, cz, cn, k, r = coefficients
    w_n = w.chunk(3)[2]
    N, d = v.shape[-1], cn * ghat
    p = v @ (w if variant == "torch" else w[: 2 * N]).mT if products is None else products[0]
    p_r, p_z = p[..., :N], p[..., N : 2 * N]

    def outer(left: Tensor, right: Tensor) -> Tensor:
        return left.flatten(0, 1).mT @ right.flatten(0, 1)

    if variant == "torch":
        p_n = p[..., 2 * N :]
        y = k * p_r + r * p_n
        grad_w = outer(torch.cat([k * d, cz * ghat, r * d], -1), v)
        return grad_w, v * ghat, p_z * ghat, y * ghat, d * p_r, d * p_n
    inner, d_m = k * p_r + r * v, d @ w_n
    y = inner @ w_n.mT if products is None else products[1]
    grad_w = torch.cat([outer(torch.cat([k * d_m, cz * ghat], -1), v), outer(d, inner)])
    return grad_w, v * ghat, p_z * ghat, y * ghat, d_m * p_r, d_m * v


def _products(*pairs: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """The sum of the products of those pairs that have no None."""
    return total(*(None if a is None or b is None else a * b for a, b in pairs))


def _through(rows: Tensor | None, matrix: Tensor | None) -> Tensor | None:
    return None if rows is None or matrix is None else rows @ matrix


def _changed(
    variant: str, v: Tensor, w: Tensor, coefficients: tuple[Tensor, ...], dw: Tensor | None, *changes: Tensor | None
) -> Tensor | None:
    """A' v, where dw and changes are the tangents of w and the coefficients, None for zeros."""
    _, cz, cn, k, r = coefficients
    dz, dcz, dcn, dk, dr = changes
    w_r, w_z, w_n = w.mT.chunk(3, 1)
    dw_r, dw_z, dw_n = (None,) * 3 if dw is None else dw.mT.chunk(3, 1)
    p_r, dp_r = v @ w_r, _through(v, dw_r)
    if variant == "torch":
        p_n = v @ w_n
        y = k * p_r + r * p_n
        dy = _products((dk, p_r), (k, dp_r), (dr, p_n), (r, _through(v, dw_n)))
    else:
        inner = k * p_r + r * v
        y = inner @ w_n
        dy = total(_through(inner, dw_n), _through(_products((dk, p_r), (k, dp_r), (dr, v)), w_n))
    return _products((dz, v), (dcz, v @ w_z), (cz, _through(v, dw_z)), (dcn, y), (cn, dy))


def _changed_back(
    variant: str, ghat: Tensor, w: Tensor, coefficients: tuple[Tensor, ...], dw: Tensor | None, *changes: Tensor | None
) -> Tensor | None:
    """A'^T ghat; arguments as those of ``_changed``."""
    _, cz, cn, k, r = coefficients
    dz, dcz, dcn, dk, dr = changes
    w_r, w_z, w_n = w.chunk(3)
    dw_r, dw_z, dw_n = (None,) * 3 if dw is None else dw.chunk(3)
    d, dd = cn * ghat, _products((dcn, ghat))
    found = [_products((dz, ghat)), _through(_products((dcz, ghat)), w_z), _through(cz * ghat, dw_z)]
    if variant == "torch":
        found += [_through(r * d, dw_n), _through(_products((dr, d), (r, dd)), w_n)]
        d_m, dd_m = d, dd
    else:
        d_m, dd_m = d @ w_n, total(_through(d, dw_n), _through(dd, w_n))
        found.append(_products((dr, d_m), (r, dd_m)))
    return total(*found, _through(k * d_m, dw_r), _through(_products((dk, d_m), (k, dd_m)), w_r))


# ----------------------------------------------------------------------------------------------- derivatives of the GRU


@dataclasses.dataclass
class Taken:
    """The tensors of a GRU that its derivatives are computed from, and its variant. pre is empty in "kanai"."""

    variant: str
    hs: Tensor
    gates: Tensor
    pre: Tensor
    w: Tensor
    h0: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    resets: Tensor | None = None
    reset_state: Tensor | None = None

    def __post_init__(self) -> None:
        self.before = started(neighbours(self.hs, self.h0, before=True), self.resets, self.reset_state)
        self.r, self.z, self.n = self.gates.chunk(3, -1)
        self.alive = running(self.hs.shape[0], self.lengths)
        self.torch_variant = self.variant == "torch"
        # derivatives of the gates' functions
        self.by_r, self.by_z, self.by_n = self.r * (1 - self.r), self.z * (1 - self.z), 1 - self.n * self.n

    def coefficients(self) -> tuple[Tensor, ...]:
        cz, cn = (self.before - self.n) * self.by_z, (1 - self.z) * self.by_n
        return self.z, cz, cn, (self.pre if self.torch_variant else self.before) * self.by_r, self.r

    def recurrent(self, coefficients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The coefficients of A for LinearGru: zeros at resets."""
        return tuple(started(coefficient, self.resets, None) for coefficient in coefficients)


@keeps_dtype
def gradients(
    taken: Taken, grad_hs: Tensor | None, grad_gates: Tensor | None, grad_pre: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, w, h0, bias and reset_state, as functions that can be differentiated again. needs: which of
    them are computed."""
    w, coefficients = taken.w, taken.coefficients()
    _, cz, cn, k, r = coefficients
    w_n = w.chunk(3)[2]
    g = torch.zeros_like(taken.hs) if grad_hs is None else without_padding(grad_hs, taken.alive)
    of_gates: tuple[Tensor | None, ...] = (None,) * 3
    if grad_gates is not None:
        of_gates = without_padding(grad_gates, taken.alive).chunk(3, -1)
    if grad_pre is not None:
        grad_pre = without_padding(grad_pre, taken.alive) if taken.torch_variant else None
    extra_r, extra_z, extra_n = (
        _products((of_gate, by)) for of_gate, by in zip(of_gates, (taken.by_r, taken.by_z, taken.by_n), strict=True)
    )

    def plus(term: Tensor, extra: Tensor | None) -> Tensor:
        return term if extra is None else term + extra

    def parts(ghat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """d_r, d_z, d_n, and d_q or, in "kanai", d_m."""
        d_n, d_z = plus(cn * ghat, extra_n), plus(cz * ghat, extra_z)
        if taken.torch_variant:
            return plus(k * d_n, extra_r), d_z, d_n, plus(r * d_n, grad_pre)
        d_m = d_n @ w_n
        return plus(k * d_m, extra_r), d_z, d_n, d_m

    def sent(ghat: Tensor, d_r: Tensor, d_z: Tensor, _: Tensor, d_m: Tensor) -> Tensor:
        """What the states before get, from the first of these steps on."""
        steps = slice(len(ghat))
        if taken.torch_variant:
            return taken.z[steps] * ghat + torch.cat([d_r, d_z, d_m], -1) @ w
        return taken.z[steps] * ghat + torch.cat([d_r, d_z], -1) @ w[: 2 * g.shape[-1]] + r[steps] * d_m

    if grad_gates is not None or grad_pre is not None:
        zero = torch.zeros_like(g)
        g = g + neighbours(started(sent(zero, *parts(zero)), taken.resets, None), None, before=False)
    ghat = LinearGru.apply(taken.variant, False, g, w, *taken.recurrent(coefficients))
    d_r, d_z, d_n, d_m = parts(ghat)
    rows = torch.cat([d_r, d_z, d_m if taken.torch_variant else d_n], -1).flatten(0, 1)
    found: list[Tensor | None] = [torch.cat([d_r, d_z, d_n], -1) if needs[0] else None, *(None,) * 4]
    if needs[1]:
        before, split = taken.before.flatten(0, 1), 2 * g.shape[-1]
        with_n = before if taken.torch_variant else (r * taken.before).flatten(0, 1)
        found[1] = torch.cat([rows[:, :split].mT @ before, rows[:, split:].mT @ with_n])
    if needs[2]:
        first = sent(*(part[:1] for part in (ghat, d_r, d_z, d_n, d_m)))[0]
        found[2] = started(first, None if taken.resets is None else taken.resets[0], None)
    if needs[3] and taken.bias is not None:
        found[3] = rows.sum(0)
    if needs[4] and taken.resets is not None:
        found[4] = started(sent(ghat, d_r, d_z, d_n, d_m), ~taken.resets, None).sum(0)
    return tuple(found)


@keeps_dtype
def tangent(
    taken: Taken,
    dx: Tensor | None,
    dw: Tensor | None,
    dh0: Tensor | None,
    dbias: Tensor | None,
    dstate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tangents of hs, gates and pre, from those of the inputs; None for zeros."""
    w, coefficients = taken.w, taken.coefficients()
    _, cz, cn, k, r = coefficients
    w_n = w.chunk(3)[2]
    zero = torch.zeros_like(taken.gates)
    dx = zero if dx is None else without_padding(dx, taken.alive)
    added = zero if dbias is None else dbias.expand_as(zero)  # to W h' without the change of h'
    if dw is not None:
        if taken.torch_variant:
            added = added + taken.before @ dw.mT
        else:
            dw_r, dw_z, dw_n = dw.chunk(3)
            rows = [taken.before @ dw_r.mT, taken.before @ dw_z.mT, (r * taken.before) @ dw_n.mT]
            added = added + torch.cat(rows, -1)
    (x_r, x_z, x_n), (b_r, b_z, b_n) = dx.chunk(3, -1), added.chunk(3, -1)

    def step(through: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tangents of a_r, a_z, of the argument of n's tanh, and of q."""
        a_r, a_z, q = x_r + b_r, x_z + b_z, b_n
        if through is not None:
            a_r, a_z = a_r + through[0], a_z + through[1]
            q = q + through[2]
        if taken.torch_variant:
            return a_r, a_z, x_n + k * a_r + r * q, q
        return a_r, a_z, x_n + q + (k * a_r) @ w_n.mT, q

    _, a_z, a_n, _ = step(None)
    g = without_padding(cz * a_z + cn * a_n, taken.alive)
    if dstate is not None and taken.resets is not None:
        entering = started(neighbours(torch.zeros_like(g), dh0, before=True), taken.resets, dstate)
        g = g + _applied(taken.variant, entering, w, coefficients)
    elif dh0 is not None:
        first = _applied(taken.variant, dh0, w, tuple(c[0] for c in taken.recurrent(coefficients)))
        g = torch.cat([(g[0] + first).unsqueeze(0), g[1:]])
    dhs = LinearGru.apply(taken.variant, True, g, w, *taken.recurrent(coefficients))
    before = started(neighbours(dhs, dh0, before=True), taken.resets, dstate)
    w_r, w_z, _ = w.chunk(3)
    to_n = before if taken.torch_variant else r * before
    a_r, a_z, a_n, q = step((before @ w_r.mT, before @ w_z.mT, to_n @ w_n.mT))
    dgates = torch.cat([taken.by_r * a_r, taken.by_z * a_z, taken.by_n * a_n], -1)
    dpre = without_padding(q, taken.alive) if taken.torch_variant else None
    return dhs, without_padding(dgates, taken.alive), dpre


def cpu_leaf(backend: str | None, saved: tuple[Any, ...], *grads: Tensor | None) -> Any:
    """The leaf whose kernels serve first and second derivatives with these tensors, or None. saved: as the forward op
    saves them."""
    hs, _, _, w, _, _, _, resets, _ = saved
    if resets is not None or not alone((*saved, *grads)):
        return None
    return dispatch.cpu_leaf("gru_scan", backend, w.dtype, N=hs.shape[2])


def _contract(options: GruOptions, *tensors: Tensor | None) -> tuple[GruInputs, GruStates]:
    """What a leaf takes, from hs, gates, pre, w, h0 and bias."""
    hs, gates, pre, w, h0, bias = map(contiguous, tensors)
    assert hs is not None and gates is not None and w is not None and h0 is not None
    return GruInputs(None, w, h0, bias), GruStates(hs, gates, None if options.kanai else pre)


def of_saved(
    leaf: Any, options: GruOptions, saved: tuple[Any, ...], cotangents: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, w, h0 and bias by the kernel, from those of hs, gates and pre; nothing is recorded."""
    inputs, states = _contract(options, *saved[:6])
    grad_hs, grad_gates, grad_pre = map(contiguous, cotangents)
    found, _ = leaf.gru_scan_bwd_more(
        inputs, options, torch.zeros_like(states.hs) if grad_hs is None else grad_hs, states, grad_gates=grad_gates,
        grad_pre=grad_pre, need_params=needs[1] or needs[3],
    )  # fmt: skip
    return found.x, found.w, found.h0, found.bias


class First(torch.autograd.Function):
    """The first gradients of x, w, h0 and bias by the kernels of the cpu backend, with a derivative by them: Note
    [Second derivative of the GRU]. What asks for more derivatives, or for many at once, gets them from `gradients`.

    Arguments of apply: the leaf; options, without resets; which gradients are wanted; grad_hs, hs, gates, pre, w, h0,
    bias.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Any, options: GruOptions, needs: tuple[bool, ...], *tensors: Any) -> tuple[Any, ...]:
        inputs, states = _contract(options, *tensors[1:])
        grad_hs = tensors[0].contiguous()
        found, kept = leaf.gru_scan_bwd_kept(inputs, options, grad_hs, states, need_params=needs[1] or needs[3])
        if _taps.SINKS:
            _taps.record("gru_scan", found.norm)
        ctx.leaf, ctx.options, ctx.needs = leaf, options, needs
        ctx.set_materialize_grads(False)
        save_tensors(ctx, *tensors, *kept)
        return found.x, found.w, found.h0, found.bias

    @staticmethod
    @one_cotangent_at_a_time
    @keeps_dtype
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * 10
        *tensors, grad_x, factor, ghat = saved_tensors(ctx)
        if not _route.last() or forward_ad._current_level >= 0:
            return None, None, None, *First._again(ctx, tensors, cotangents)
        inputs, states = _contract(ctx.options, *tensors[1:])
        kept = ctx.leaf.GruKept(grad_x, factor, ghat)
        found = ctx.leaf.gru_second(
            inputs, ctx.options, states, kept, *map(contiguous, cotangents), need_w=ctx.needs_input_grad[7]
        )
        return None, None, None, *found, None

    @staticmethod
    def _again(ctx: Any, tensors: list[Any], cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The gradients as functions that can be derived again, by those of `gradients`."""

        def function(given: list[Any]) -> tuple[Tensor | None, ...]:
            grad_hs, hs, gates, pre, w, h0, bias = given
            taken = Taken(ctx.options.variant, hs, gates, pre, w, h0, bias, ctx.options.lengths)
            return gradients(taken, grad_hs, None, None, (*ctx.needs, False))[:4]

        return again(function, tensors, ctx.needs_input_grad[3:], cotangents)


class Gru(torch.autograd.Function):
    """(hs, gates, pre) of a GRU under forward mode and torch.func; arguments of apply: those of the forward op."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, variant: str, backend: str | None, *cuts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.orthokern.gru_scan_fwd(x, w, h0, bias, variant, backend, *cuts)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, w, h0, bias, ctx.variant, _, *cuts = inputs
        if ctx.variant != "torch":
            ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        save_tensors(ctx, *output, w, h0, bias, *cuts)
        ctx.save_for_forward(*output, w, h0, bias, *cuts)

    @staticmethod
    @one_cotangent_at_a_time
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_hs, grad_gates, grad_pre = grads
        if all(grad is None for grad in grads):
            return (None,) * 9
        taken, needs = Taken(ctx.variant, *saved_tensors(ctx)), ctx.needs_input_grad
        *found, of_state = gradients(taken, grad_hs, grad_gates, grad_pre, (*needs[:4], needs[8]))
        return *found, *(None,) * 4, of_state

    @staticmethod
    @one_cotangent_at_a_time
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        dx, dw, dh0, dbias, *_, dstate = tangents
        return tangent(Taken(ctx.variant, *saved_tensors(ctx)), dx, dw, dh0, dbias, dstate)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        places = {0: 1, 2: 0, 6: 0, 7: 1, 8: 0}  # of x, h0, lengths, resets, reset_state
        return in_the_batch(Gru.apply, info.batch_size, in_dims, arguments, places)
