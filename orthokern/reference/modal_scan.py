"""modal_scan: a linear recurrence in modal coordinates, complex multiply-adds instead of a matrix product.

The mathematics is in ``orthokern/ops/modal_scan.py``.

Note [Modal scan backward]
    A vector of M modes is real, [2M]: the real parts of all modes, then their imaginary parts. One mode is the 2 x 2
    block

        L = [[a, -b], [b, a]],   z_t = L z_{t-1} + x_t,   a = re, b = im of its eigenvalue.

    With g_t = dL/dz_t from outside the scan, delta_t, which includes all later steps, is
    delta_t = L^T delta_{t+1} + g_t, with delta = 0 after the last step. L^T is the block of the conjugate eigenvalue.
    Then

        grad_x_t = delta_t,     grad_z0 = L^T delta_1,     grad_table[d] = sum of delta_t over the steps with id d.

    The gradient of a general recurrent matrix in these coordinates is sum_t delta_t z_{t-1}^T. For modes j and k it has
    the 2 x 2 block M_jk = sum_t (delta_re[j], delta_im[j])^T (z_re[k], z_im[k]). The gradients of the eigenvalues are

        grad_re = M_jj[0, 0] + M_jj[1, 1],     grad_im = M_jj[1, 0] - M_jj[0, 1].

    All of this is computed in the dtype of re and im (float64); only results are rounded to the dtype of x.

    With lengths, z and delta are zero on padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._scan_contract import ModalGradients, ModalInputs
from orthokern.reference._scan import running, without_padding


def entering(x: Tensor, table: Tensor | None, alive: Tensor | None) -> Tensor:
    """The input of every step, [T, B, 2M]: x itself, or rows of the table; zeros on padding."""
    if table is None:
        return without_padding(x, alive)
    return without_padding(table[without_padding(x.long(), alive)], alive)


def turn(z: Tensor, re: Tensor, im: Tensor) -> Tensor:
    """Each mode of z [..., 2M] times re + i im."""
    real, imag = z.chunk(2, -1)
    return torch.cat([re * real - im * imag, im * real + re * imag], -1)


def modal_scan_fwd(inputs: ModalInputs) -> Tensor:
    """z [T, B, 2M], see the op. Differentiable by autograd."""
    x, re, im, z0, table, lengths, _ = inputs
    assert x is not None
    alive = running(x.shape[0], lengths)
    z = z0.to(re.dtype)
    states = []
    for t, x_t in enumerate(entering(x, table, alive).to(re.dtype).unbind(0)):
        z = without_padding(turn(z, re, im) + x_t, None if alive is None else alive[t])
        states.append(z)
    return torch.stack(states).to(z0.dtype)


def modal_scan_bwd(inputs: ModalInputs, grad_z: Tensor, z: Tensor, *, need_x: bool = True) -> ModalGradients:
    """See Note [Modal scan backward]."""
    x, re, im, z0, table, lengths, pairs = inputs
    dtype, alive = re.dtype, running(grad_z.shape[0], lengths)
    delta = torch.zeros_like(z0, dtype=dtype)
    found = []
    for g_t in without_padding(grad_z, alive).to(dtype).flip(0).unbind(0):
        delta = turn(delta, re, -im) + g_t
        found.append(delta)
    deltas = torch.stack(found).flip(0)
    before = torch.cat([z0[None], z[:-1]]).to(dtype)
    before = without_padding(before, alive).flatten(0, 1)
    rows = deltas.flatten(0, 1)
    (d_re, d_im), (z_re, z_im) = rows.chunk(2, -1), before.chunk(2, -1)
    grad_table = grad_pairs = None
    if table is not None:
        assert x is not None
        ids = without_padding(x.long(), alive).flatten()
        grad_table = torch.zeros_like(table, dtype=dtype).index_add_(0, ids, rows).to(table.dtype)
    if pairs is not None:
        j, k = pairs.unbind(1)
        left, right = torch.stack([d_re[:, j], d_im[:, j]], -1), torch.stack([z_re[:, k], z_im[:, k]], -1)
        grad_pairs = torch.einsum("rpa,rpb->pab", left, right).to(dtype)
    return ModalGradients(
        deltas.to(z0.dtype) if table is None and need_x else None,
        (d_re * z_re + d_im * z_im).sum(0),
        (d_im * z_re - d_re * z_im).sum(0),
        turn(delta, re, -im).to(z0.dtype),
        grad_table,
        grad_pairs,
    )
