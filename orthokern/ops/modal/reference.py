"""The recurrence in modal coordinates and its cross-entropy, in torch code: the definition for the kernels.

Note [Modal recurrence]
    M modes have the eigenvalues lambda = re + i im, float64 [M]. A vector of M modes is real, [2M]: the real parts of
    all modes, then their imaginary parts. The states are z_t = lambda z_{t-1} + x_t, mode by mode. A real eigenvalue is
    a mode with im = 0, whose imaginary part stays 0 if its inputs' imaginary parts are 0.

    With g_t = dL/dz_t from outside the recurrence, delta_t, which includes all later steps, is
    delta_t = conj(lambda) delta_{t+1} + g_t with delta_{T+1} = 0: the same recurrence from the last step to the first.

        grad_x_t = delta_t,     grad_z0 = conj(lambda) delta_1,     grad_table[d] = sum of delta_t over steps with id d.

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

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orthokern._products import sum_over_rows
from orthokern._scan_contract import Readout


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


def turn(z: Tensor, re: Tensor, im: Tensor) -> Tensor:
    """Each mode of z [..., 2M] times re + i im."""
    real, imag = z.chunk(2, -1)
    return torch.cat([re * real - im * imag, im * real + re * imag], -1)


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """The states z [T, B, 2M] of x [T, B, 2M] and z0 [B, 2M], in the dtype of x or in ``dtype``.

    reverse: from the last step to the first, with the conjugate eigenvalues; then z0 is the state after the last step.
    """
    steps = x.to(re.dtype).unbind(0)
    z, states = z0.to(re.dtype), []
    for x_t in reversed(steps) if reverse else steps:
        z = turn(z, re, -im if reverse else im) + x_t
        states.append(z)
    return torch.stack(states[::-1] if reverse else states).to(dtype or x.dtype)


def loss(inputs: Inputs, readout: Readout, need_grad: bool, profile: Sequence[int] = ()) -> Loss:
    """The cross-entropy of a linear readout [C, 2M] of the states, and its gradients. profile: increasing steps whose
    states and, with need_grad, adjoints are returned."""
    return loss_in_spans(scan, inputs, readout, need_grad, len(inputs.x), profile)


def entering(x: Tensor, table: Tensor | None, alive: Tensor | None) -> Tensor:
    """The input of every step, [T, B, 2M]: x itself, or rows of the table; zeros on padding, NaN for a wrong id."""
    if table is None:
        return without_padding(x, alive)
    ids = without_padding(x.long(), alive)
    wrong = (ids < 0) | (ids >= len(table))
    rows = torch.nn.functional.embedding(ids.masked_fill(wrong, 0), table)
    return without_padding(rows.masked_fill(wrong[..., None], torch.nan), alive)


def without_padding(values: Tensor, alive: Tensor | None) -> Tensor:
    """values [T, B, ...] with zeros where alive [T, B] is false."""
    if alive is None:
        return values
    return values.masked_fill(~alive.view(*alive.shape, *(1,) * (values.ndim - 2)), 0)


def _rows_of(ids: Tensor, size: int, alive: Tensor | None) -> Tensor:
    """ids [T, B] as rows of a table of ``size`` rows, followed by one for wrong ids and one for padding."""
    rows = torch.where((ids >= 0) & (ids < size), ids.long(), size)
    return rows if alive is None else rows.masked_fill(~alive, size + 1)


class _Sums:
    """The sums over time of a loss, from its last span to its first; all float64."""

    def __init__(self, inputs: Inputs, readout: Readout) -> None:
        self.inputs, (M,) = inputs, inputs.re.shape
        zeros = inputs.re.new_zeros
        self.re, self.im, self.bias = zeros(M), zeros(M), zeros(len(readout.weight))
        self.weight, self.carry = zeros(readout.weight.shape), zeros(inputs.z0.shape)
        self.table = None if inputs.table is None else zeros(inputs.table.shape)
        self.pairs = None if inputs.pairs is None else zeros(len(inputs.pairs), 2, 2)
        self.x = torch.empty_like(inputs.x) if inputs.table is None else None

    def add(self, start: int, x: Tensor, delta: Tensor, before: Tensor) -> None:
        """A span from the step ``start`` on: its inputs, adjoints, and the states before its steps."""
        (d_re, d_im), (z_re, z_im) = delta.chunk(2, -1), before.double().chunk(2, -1)
        self.re += (d_re * z_re + d_im * z_im).sum((0, 1))
        self.im += (d_im * z_re - d_re * z_im).sum((0, 1))
        if self.pairs is not None and self.inputs.pairs is not None:
            j, k = self.inputs.pairs.unbind(1)
            left, right = torch.stack([d_re[..., j], d_im[..., j]], -1), torch.stack([z_re[..., k], z_im[..., k]], -1)
            self.pairs += torch.einsum("tbpi,tbpj->pij", left, right)
        if self.x is not None:
            self.x[start : start + len(x)] = delta
        if self.table is not None:
            D = len(self.table)
            rows = delta.flatten(0, 1)  # in a fixed order, also on a GPU
            self.table += torch.ops.aten.embedding_dense_backward(rows, x.flatten(), D + 2, -1, False)[:D]
        self.carry = delta[0]

    def gradients(self, has_bias: bool) -> Gradients:
        dtype, re, im = self.inputs.z0.dtype, self.inputs.re, self.inputs.im
        return Gradients(
            self.x,
            self.re,
            self.im,
            turn(self.carry, re, -im).to(dtype),
            None if self.table is None else self.table.to(dtype),
            self.pairs,
            self.weight.to(dtype),
            self.bias.to(dtype) if has_bias else None,
        )


@torch.no_grad()
def loss_in_spans(
    scan: Callable[..., Tensor],
    inputs: Inputs,
    readout: Readout,
    need_grad: bool,
    steps: int,
    profile: Sequence[int] = (),
) -> Loss:
    """`loss` by a function as `scan`, for ``steps`` steps at a time.

    Only the states between the spans are kept. The spans are processed from the last to the first, and memory does not
    grow with T. Padding is not read. A wrong id makes its sequence NaN, a wrong target the loss and all gradients.
    """
    x, re, im, z0, table, lengths, _ = inputs
    weight, bias, target, reduction = readout
    T, B = target.shape
    alive = None if lengths is None else torch.arange(T, device=target.device)[:, None] < lengths
    count = T * B if alive is None else alive.sum().double()
    if table is not None:
        x = _rows_of(x, len(table), alive)
        table = torch.cat([table, table.new_full((1, table.shape[1]), torch.nan), torch.zeros_like(table[:1])])
    target = _rows_of(target, len(weight), alive)
    # not NaN, but 1, without a wrong target; padding has any target and does not count
    scale = torch.where((target == len(weight)).any(), torch.nan, 1.0).double() / (
        count if reduction == "mean" else 1.0
    )
    target = target.clamp_(max=len(weight) - 1)
    scaled_weight = (weight * scale).to(weight.dtype)
    spans = [slice(start, min(start + steps, T)) for start in range(0, T, steps)]

    def entries(span: slice) -> Tensor:
        if table is None:
            return without_padding(x[span], None if alive is None else alive[span])
        return torch.nn.functional.embedding(x[span], table)

    starts = [z0.double()]
    for span in spans[:-1]:
        starts.append(scan(entries(span), re, im, starts[-1], dtype=torch.float64)[-1].clone())
    sums = _Sums(inputs, readout)
    states, adjoints = [z0.new_empty(0, *z0.shape)], [z0.new_empty(0, *z0.shape)]  # of the profile, the last span first
    total, hits = re.new_zeros(()), torch.empty(T, dtype=torch.int64, device=target.device)
    for span, start in zip(reversed(spans), reversed(starts), strict=True):
        living = None if alive is None else alive[span]
        z = without_padding(scan(entries(span), re, im, start, dtype=z0.dtype), living)
        ids = target[span, :, None]
        log_p = torch.log_softmax(torch.nn.functional.linear(z, weight, bias), -1)
        total -= without_padding(log_p.gather(-1, ids).squeeze(-1), living).sum(dtype=torch.float64)
        right = log_p.argmax(-1) == ids.squeeze(-1)
        hits[span] = (right if living is None else right & living).sum(1)
        rows = [t - span.start for t in profile if span.start <= t < span.stop]
        states.append(z[rows])
        if not need_grad:
            continue
        d = log_p.exp_()
        d.scatter_add_(-1, ids, torch.full_like(d[..., :1], -1.0))
        d = without_padding(d, living)
        sums.weight += sum_over_rows(d, z)
        sums.bias += d.sum((0, 1), dtype=torch.float64)
        delta = scan(d @ scaled_weight, re, im, sums.carry, reverse=True, dtype=torch.float64)
        first = start if lengths is None else torch.where((lengths > span.start)[:, None], start, 0)
        before = torch.cat([first.to(z.dtype)[None], z[:-1]])
        sums.add(span.start, x[span], delta, before)
        adjoints.append(delta[rows].to(z.dtype))
    sums.weight *= scale
    sums.bias *= scale
    grads = sums.gradients(bias is not None) if need_grad else None
    return Loss((total * scale).to(z0.dtype), hits, grads, torch.cat(states[::-1]), torch.cat(adjoints[::-1]))
