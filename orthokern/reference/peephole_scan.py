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
    """See ``orthokern.ops.peephole_scan``. Autograd can differentiate the states to any order."""
    x, w, p, h, c = inputs
    assert x is not None
    p_i, p_f, p_o = p.unbind(0)
    steps = []
    for x_t in x.unbind(0):
        i, f, g, o = torch.addmm(x_t, h, w.mT).chunk(4, 1)
        i, f, g = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c), torch.tanh(g)
        c = f * c + i * g
        o = torch.sigmoid(o + p_o * c)
        h = o * torch.tanh(c)
        steps.append((h, c, torch.cat([i, f, g, o], 1)) if need_gates else (h, c))
    hs, cs, *gates = (torch.stack(states) for states in zip(*steps, strict=True))
    return PeepholeStates(hs, cs, gates[0] if gates else None)


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
