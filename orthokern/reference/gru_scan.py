"""gru_scan: a gated recurrent unit over a sequence, with the reset gate before or after the recurrent matrix.

The mathematics is in ``orthokern/ops/gru_scan.py``.

Note [GRU scan backward]
    All vectors are those of one step and one sequence; h' is the previous state, * is elementwise. The derivative of
    the logistic function s is s (1 - s). With ghat_t = dL/dh_t through everything after step t,

        d_z = ghat * (h' - n) * z (1 - z),       d_n = ghat * (1 - z) * (1 - n^2)

    are the gradients of the arguments of the functions of z and n. Then, by variant,

        "kanai"  d_m = W_n^T d_n,  m = r * h':   d_r = d_m * h' * r (1 - r)
        "torch"  d_q = d_n * r,    q = W_n h' + b_n:   d_r = d_n * q * r (1 - r)

    and the gradient of the previous state is

        ghat_{t-1} = g_{t-1} + ghat_t * z + W_r^T d_r + W_z^T d_z + { r * d_m   or   W_n^T d_q }.

    The gradient of x_t is (d_r, d_z, d_n). Those of the recurrent weights are sums over all steps and sequences, so
    they are products after the loop: W_r and W_z get d_r h'^T and d_z h'^T, W_n gets d_n m^T or d_q h'^T; the biases
    get the sums of d_r, d_z, and d_n or d_q.

    With lengths, states, gates and pre are zeros after the end of a sequence, see Note [Sequences of different lengths]
    in ``_scan.py``: ghat and all of the above are zero there, so that the sums over steps do not depend on padding.

    Where resets_t is true, h' is reset_state, here and in the products. All terms of the last equation except g_{t-1}
    are then added to the gradient of reset_state: Note [Resets] in ``_scan.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import GruArgs, GruGradients, GruStates, running, started, without_padding
from orthokern.reference._scan import norm_over_batch


def gru_scan_fwd(args: GruArgs) -> GruStates:
    """See the op. Differentiable by autograd."""
    x, w, h0, bias = args.x, args.w, args.h0, args.bias
    assert x is not None
    N = h0.shape[1]
    w_r, w_z, w_n = w.split(N)
    b_r, b_z, b_n = w.new_zeros(3, N) if bias is None else bias.view(3, N)
    alive = running(x.shape[0], args.lengths)
    h = h0
    states, gates, pre = [], [], []
    for t, x_t in enumerate(without_padding(x, alive).unbind(0)):
        alive_t = None if alive is None else alive[t]
        h = h if args.resets is None else started(h, args.resets[t], args.reset_state)
        x_r, x_z, x_n = x_t.split(N, 1)
        r = torch.sigmoid(h @ w_r.mT + b_r + x_r)
        z = torch.sigmoid(h @ w_z.mT + b_z + x_z)
        if args.kanai:
            n = torch.tanh((r * h) @ w_n.mT + b_n + x_n)
        else:
            q = h @ w_n.mT + b_n
            n = torch.tanh(r * q + x_n)
            pre.append(without_padding(q, alive_t))
        h = without_padding(z * h + (1 - z) * n, alive_t)
        states.append(h)
        gates.append(without_padding(torch.cat([r, z, n], 1), alive_t))
    return GruStates(torch.stack(states), torch.stack(gates), torch.stack(pre) if pre else None)


def gru_scan_bwd(
    args: GruArgs,
    grad_hs: Tensor,
    states: GruStates,
    needs: Any,
    *,
    grad_gates: Tensor | None = None,
    grad_pre: Tensor | None = None,
) -> GruGradients:
    """See Note [GRU scan backward].

    It is differentiable, which double backward uses: then the states are functions of the inputs, and a second backward
    sends a gradient to each of them, grad_gates [T, B, 3N] and grad_pre [T, B, N].
    """
    w, h0, bias, resets, reset_state = args.w, args.h0, args.bias, args.resets, args.reset_state
    hs, gates, pre = states
    T, _, N = grad_hs.shape
    alive = running(T, args.lengths)
    grad_hs = without_padding(grad_hs, alive)
    of_gates = (torch.zeros_like(gates) if grad_gates is None else without_padding(grad_gates, alive)).split(N, 2)
    of_pre = None if grad_pre is None else without_padding(grad_pre, alive)
    w_r, w_z, w_n = w.split(N)
    before = started(torch.cat([h0.unsqueeze(0), hs[:-1]]), resets, reset_state)  # h', [T, B, N]
    carry = torch.zeros_like(h0)
    grad_reset_state = None if resets is None or reset_state is None else torch.zeros_like(reset_state)
    grad_x, to_w_n, norms = [], [], []
    for t in reversed(range(T)):
        h = before[t]
        r, z, n = gates[t].split(N, 1)
        ghat = grad_hs[t] + carry
        if needs.norm:
            norms.append(norm_over_batch(ghat))
        of_r, of_z, of_n = (gradient[t] for gradient in of_gates)
        d_z = (ghat * (h - n) + of_z) * (z * (1 - z))
        d_n = (ghat * (1 - z) + of_n) * (1 - n * n)
        if args.kanai:
            d_m = d_n @ w_n
            d_r = (d_m * h + of_r) * (r * (1 - r))
            through_n = r * d_m
            to_w_n.append(d_n)
        else:
            assert pre is not None
            d_q = d_n * r if of_pre is None else d_n * r + of_pre[t]
            d_r = (d_n * pre[t] + of_r) * (r * (1 - r))
            through_n = d_q @ w_n
            to_w_n.append(d_q)
        carry = ghat * z + d_r @ w_r + d_z @ w_z + through_n
        if resets is not None:
            if grad_reset_state is not None:
                grad_reset_state = grad_reset_state + started(carry, ~resets[t], None)
            carry = started(carry, resets[t], None)
        grad_x.append(torch.cat([d_r, d_z, d_n], 1))
    grads = torch.stack(grad_x[::-1])
    grad_w = grad_bias = None
    if needs.w or needs.bias:
        rows = grads.flatten(0, 1)
        rows_n = torch.stack(to_w_n[::-1]).flatten(0, 1)
        factor = gates[..., :N] * before if args.kanai else before
        grad_w = torch.cat([rows[:, : 2 * N].mT @ before.flatten(0, 1), rows_n.mT @ factor.flatten(0, 1)])
        if bias is not None:
            grad_bias = torch.cat([rows[:, : 2 * N].sum(0), rows_n.sum(0)])
    norm = torch.stack(norms[::-1]) if needs.norm else None
    return GruGradients(grads, grad_w, carry, grad_bias, grad_reset_state, norm)
