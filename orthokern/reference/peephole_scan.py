"""peephole_scan: an LSTM with peepholes over a sequence.

The mathematics is in ``orthokern/ops/peephole_scan.py``.

Note [Peephole scan backward]
    All vectors are those of one step and one sequence; h' and c' are the previous states, * is elementwise. With dh and
    dc the gradients of h and c through everything after the step, and d_i that of the argument of i's function,

        d_o = dh * tanh(c) * o (1 - o)
        dc += dh * o (1 - tanh(c)^2) + d_o * p_o
        d_i = dc * g * i (1 - i),  d_f = dc * c' * f (1 - f),  d_g = dc * i * (1 - g^2),

    and the gradients of the previous states are, added to their own,

        dc' = dc * f + d_i * p_i + d_f * p_f,   dh' = W^T (d_i, d_f, d_g, d_o).

    The gradient of x is (d_i, d_f, d_g, d_o). Those of W and the peepholes are sums over all steps and sequences, taken
    after the loop: (d_i, d_f, d_g, d_o) h'^T, and d_i * c', d_f * c', d_o * c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._scan_contract import PeepholeGradients, PeepholeInputs, PeepholeStates


def peephole_scan_fwd(inputs: PeepholeInputs, *, need_gates: bool = True) -> PeepholeStates:
    """See ``orthokern.ops.peephole_scan``. Every step writes into the results."""
    x, w, p, h0, c0 = inputs
    assert x is not None
    n = w.shape[1]
    p_i, p_f, p_o = p.unbind(0)
    gates = x.new_empty(x.shape)
    hs, cs = (x.new_empty(*x.shape[:2], n) for _ in range(2))
    h, c = h0, c0
    for x_t, a, h_t, c_t in zip(x.unbind(0), gates.unbind(0), hs.unbind(0), cs.unbind(0), strict=True):
        torch.addmm(x_t, h, w.mT, out=a)
        i, f, g, o = a.chunk(4, 1)
        i.addcmul_(p_i, c)
        f.addcmul_(p_f, c)
        a[:, : 2 * n].sigmoid_()
        g.tanh_()
        torch.mul(f, c, out=c_t).addcmul_(i, g)
        o.addcmul_(p_o, c_t).sigmoid_()
        torch.tanh(c_t, out=h_t).mul_(o)
        h, c = h_t, c_t
    return PeepholeStates(hs, cs, gates)


def peephole_scan_bwd(
    inputs: PeepholeInputs, grad_hs: Tensor | None, grad_cs: Tensor | None, states: PeepholeStates
) -> PeepholeGradients:
    """See Note [Peephole scan backward]."""
    (_, w, p, h0, c0), (hs, cs, gates) = inputs, states
    assert gates is not None
    zeros = hs.new_zeros(()).expand(hs.shape)  # [T, B, N] in the memory of one number
    grad_hs, grad_cs = (zeros if grad is None else grad for grad in (grad_hs, grad_cs))
    p_i, p_f, p_o = p.unbind(0)
    i, f, g, o = gates.chunk(4, 2)
    tanh_c = torch.tanh(cs)
    before_h, before_c = (torch.cat([first.unsqueeze(0), rest[:-1]]) for first, rest in ((h0, hs), (c0, cs)))
    by_o, through_h = tanh_c * o * (1 - o), o * (1 - tanh_c * tanh_c)
    by_i, by_f, by_g = g * i * (1 - i), before_c * f * (1 - f), i * (1 - g * g)
    d = gates.new_empty(gates.shape)
    dh, dc = h0.new_zeros(h0.shape), c0.new_zeros(c0.shape)
    for t in reversed(range(len(d))):
        dh = dh + grad_hs[t]
        dc = dc + grad_cs[t]
        d_i, d_f, d_g, d_o = d[t].chunk(4, 1)
        d_o.copy_(dh * by_o[t])
        dc = torch.addcmul(dc, dh, through_h[t]).addcmul_(d_o, p_o)
        d_i.copy_(dc * by_i[t])
        d_f.copy_(dc * by_f[t])
        d_g.copy_(dc * by_g[t])
        dc = torch.mul(dc, f[t]).addcmul_(d_i, p_i).addcmul_(d_f, p_f)
        dh = d[t] @ w
    d_i, d_f, _, d_o = d.chunk(4, 2)
    grad_w = d.flatten(0, 1).mT @ before_h.flatten(0, 1)
    grad_p = torch.stack([(a * b).sum((0, 1)) for a, b in ((d_i, before_c), (d_f, before_c), (d_o, cs))])
    return PeepholeGradients(d, grad_w, grad_p, dh, dc)


def differentiable_scan(x: Tensor, w: Tensor, p: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
    """hs and cs [T, B, N] by operations that autograd can differentiate to any order."""
    h, c, steps = h0, c0, []
    p_i, p_f, p_o = p.unbind(0)
    for x_t in x.unbind(0):
        i, f, g, o = (x_t + h @ w.mT).chunk(4, 1)
        c = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
        h = torch.sigmoid(o + p_o * c) * torch.tanh(c)
        steps.append((h, c))
    hs, cs = (torch.stack(states) for states in zip(*steps, strict=True))
    return hs, cs
