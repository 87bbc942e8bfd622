"""The recurrence in modal coordinates and its cross-entropy, in torch code: the definition for the kernels.

Note [Modal recurrence]
    M modes have the eigenvalues lambda = re + i im, float64 [M], and the recurrence of ``rotation_scan``: the vectors,
    states z and adjoints delta are those of ``orthokern/reference/rotation_scan.py``. A real eigenvalue is a mode with
    im = 0, whose imaginary part stays 0 if its inputs' imaginary parts are 0.

        grad_table[d] = sum of delta_t over steps with id d.

    For modes j and k the gradient of a general matrix in these coordinates has the 2 x 2 block
    M_jk = sum_t (delta_re[j], delta_im[j])^T (z_re[k], z_im[k]) of z_{t-1}. The gradients of the eigenvalues are
    grad_re = M_jj[0, 0] + M_jj[1, 1] and grad_im = M_jj[1, 0] - M_jj[0, 1].

    With a readout, logits_t = C z_t + bias, p_t = softmax(logits_t), d_t = c (p_t - onehot(target_t)), with d_t = 0 on
    padding; c = 1 (sum) or 1 / number of steps without padding (mean). Then grad_readout = sum d_t z_t^T, grad_bias =
    sum d_t, g_t = C^T d_t. The gradient of the loss is only a factor, so that all of this is computed in the forward.

    Eigenvalues, states, adjoints and sums over time are float64 in every call; only results are rounded to the dtype of
    the call. The readout's products, the softmax and its gradient have the dtype of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orthokern._products import sum_over_rows
from orthokern._scan_contract import Readout, running, without_padding
from orthokern.reference.rotation_scan import eigenvalue_gradients, scan, states_before, turn

ONE_HOT = 256  # token ids up to which sums by id are a product with a matrix of ones and zeros, else over sorted ids


class Inputs(NamedTuple):
    """The tensors of a loss in modal coordinates."""

    x: Tensor  # [T, B, 2M], or token ids [T, B] with a table
    re: Tensor  # float64 [M]
    im: Tensor  # float64 [M]
    z0: Tensor  # [B, 2M]
    table: Tensor | None = None  # [D, 2M]
    lengths: Tensor | None = None  # int64 [B]
    pairs: Tensor | None = None  # int64 [P, 2], modes whose sums M_jk are returned


class Gradients(NamedTuple):
    """The gradients of a loss; None for what does not apply."""

    x: Tensor | None
    re: Tensor
    im: Tensor
    z0: Tensor
    table: Tensor | None
    pairs: Tensor | None  # float64 [P, 2, 2]
    weight: Tensor  # of the readout
    bias: Tensor | None


class Loss(NamedTuple):
    """The result of a loss."""

    loss: Tensor  # 0-dim
    hits: Tensor  # int64 [T]
    grads: Gradients | None = None  # with need_grad
    states: Tensor | None = None  # z_t [K, B, 2M] at the steps of a profile
    adjoints: Tensor | None = None  # delta_t [K, B, 2M] there, with need_grad


def entering(x: Tensor, table: Tensor | None, alive: Tensor | None) -> Tensor:
    """The input of every step, [T, B, 2M]: x itself, or rows of the table; zeros on padding, NaN for a wrong id."""
    if table is None:
        return without_padding(x, alive)
    ids = without_padding(x.long(), alive)
    wrong = (ids < 0) | (ids >= len(table))
    rows = torch.nn.functional.embedding(ids.masked_fill(wrong, 0), table)
    return without_padding(rows.masked_fill(wrong[..., None], torch.nan), alive)


def sum_by_id(ids: Tensor, values: Tensor, size: int) -> Tensor:
    """The sums of float64 values [T, B, 2M] over the steps with each id, [size, 2M], in a fixed order. Wrong ids, and
    those of padding, where values are 0, are left out."""
    if size <= ONE_HOT:
        return sum_over_rows((ids[..., None] == torch.arange(size, device=ids.device)).double(), values)
    rows = torch.where((ids >= 0) & (ids < size), ids.long(), size)
    return torch.ops.aten.embedding_dense_backward(values.flatten(0, 1), rows.flatten(), size + 1, -1, False)[:size]


def pair_sums(delta: Tensor, before: Tensor, pairs: Tensor) -> Tensor:
    """The blocks M_jk of Note [Modal recurrence] of some pairs, float64 [P, 2, 2], from the adjoints and the states
    before the steps."""
    M, (j, k) = delta.shape[-1] // 2, pairs.unbind(1)
    left, right = (values.double().unflatten(-1, (2, M)) for values in (delta, before))
    return torch.einsum("tbip,tbjp->pij", left[..., j], right[..., k])


@torch.no_grad()
def loss(inputs: Inputs, readout: Readout, need_grad: bool, profile: Sequence[int] = ()) -> Loss:
    """The cross-entropy of a linear readout [C, 2M] of the states, and its gradients. profile: increasing steps whose
    states and, with need_grad, adjoints are returned.

    Padding is not read. A wrong id makes its sequence NaN, a wrong target the loss and the sums of all gradients.
    """
    x, re, im, z0, table, lengths, pairs = inputs
    weight, bias, target, reduction = readout
    (T, B), dtype, rows = target.shape, z0.dtype, list(profile)
    alive = running(T, lengths)
    count = T * B if lengths is None else lengths.sum().double()
    ids = without_padding(target.long(), alive)
    wrong = (ids < 0) | (ids >= len(weight))
    scale = torch.where(wrong.any(), torch.nan, 1.0).double() / (count if reduction == "mean" else 1.0)
    ids = ids.masked_fill(wrong, 0)[..., None]
    z = without_padding(scan(entering(x, table, alive), re, im, z0), alive)
    log_p = torch.log_softmax(torch.nn.functional.linear(z, weight, bias), -1)
    total = -without_padding(log_p.gather(-1, ids).squeeze(-1), alive).sum(dtype=torch.float64)
    right = log_p.argmax(-1) == ids.squeeze(-1)
    result = Loss((total * scale).to(dtype), (right if alive is None else right & alive).sum(1), None, z[rows])
    if not need_grad:
        return result._replace(adjoints=z[:0])
    d = without_padding(log_p.exp().scatter_add(-1, ids, torch.full_like(z[..., :1], -1.0)), alive)
    delta = scan((d @ (weight * scale).to(dtype)).double(), re, im, torch.zeros_like(z0), reverse=True)
    before = states_before(z, z0, None)
    grads = Gradients(
        delta.to(dtype) if table is None else None,
        *eigenvalue_gradients(delta, before),
        turn(delta[0], re, -im).to(dtype),
        None if table is None else sum_by_id(x, delta, len(table)).to(dtype),
        None if pairs is None else pair_sums(delta, before, pairs),
        (sum_over_rows(d, z) * scale).to(dtype),
        None if bias is None else (d.sum((0, 1), dtype=torch.float64) * scale).to(dtype),
    )
    return result._replace(grads=grads, adjoints=delta[rows].to(dtype))
