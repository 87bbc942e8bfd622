"""modal_cross_entropy: a linear recurrence in modal coordinates, its readout and the cross-entropy in one op.

Neither states nor logits are stored. Modal coordinates are those of ``orthokern/ops/modal_scan.py``: M modes, re and im
float64 [M], a vector [..., 2M] holds the real parts of all modes, then their imaginary parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import ModalInputs, Readout
from orthokern.ops._common import contiguous, filled, needs_grad
from orthokern.ops._loss_gradients import register_gradients
from orthokern.ops._register import custom_op
from orthokern.ops.modal_scan import FEATURES, SUPPORT, check_ids, check_inputs

dispatch.register("modal_cross_entropy", SUPPORT)


@keeps_dtype
def modal_cross_entropy(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None,
    readout: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    reduction: str = "mean",
    backend: str | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a linear readout of ``modal_scan``'s states. Inputs are taken as checked.

    Equation:
        z_t as in ``modal_scan``; logits_t = C z_t + bias; loss = c sum (logsumexp(logits_t) - logits_t[target_t]) over
        all steps of all sequences except padding; c = 1 for "sum", 1 / (number of these steps) for "mean".
        Backward: Note [Modal cross-entropy backward] in ``orthokern/reference/modal_cross_entropy.py``.

    Args:
        x: [T, B, 2M], float; or with a table token ids [T, B], int64, int32, int16 or uint8.
        re, im: float64 [M], parts of the eigenvalues.
        z0: [B, 2M], the state before the first step.
        table: [D, 2M], what each token id adds, or None.
        readout: [C, 2M], in modal coordinates; bias: [C] or None.
        target: [T, B], class ids in [0, C), of a dtype of token ids.
        reduction: "mean" or "sum".
        backend: a name, "auto" or None. An explicit "reference" runs plain differentiable torch code.
        lengths: int64 [B], in [1, T], the number of steps of each sequence; None: T for all. Padding of x and target
            is not read.
        x (unless ids), z0, table, readout and bias share one dtype and device; any strides.

    Returns:
        (loss, hits). loss: 0-dim, in nats. hits: int64 [T], the number of sequences whose largest logit (the first of
        equal ones) at step t is that of the target. ``torch.ops.orthokern.modal_cross_entropy_fwd`` returns the
        gradients too.

    Saved:
        The gradients, computed in the forward, and references to the inputs, so that second derivatives raise. Nothing
        if no input requires a gradient.

    Cost:
        Per step and sequence 8 M flops in float64 and 4 M C in the dtype of the call for the loss; 24 M and 12 M C with
        gradients. Memory: the gradients; for each thread the state of one sequence at every 64th step in float64 (very
        long sequences are processed in spans, 64 MiB for all threads), sums [C, 2M] and [D, 2M] in float64, and counts
        [T]. A batch that would leave a third of the threads idle is split into pieces of time, one for each thread,
        where [T, B, C] elements take less than 256 MiB: this costs half as much work again, and that memory.
        On a GPU: 256 MiB for states, gradients and logits of a span of steps, and the state of each sequence between
        chunks of about sqrt(T / 2) steps in float64.

    Numerics:
        Coefficients, states, adjoints and the table's gradient are computed in float64; the readout's products, the
        softmax and its gradient in the dtype of the call; the other gradients in that dtype within at most 256 steps,
        in float64 over these parts. Where logits are NaN, the hits are undefined. The same bits for the same inputs,
        machine and thread count.
    """
    inputs, classes = ModalInputs(x, re, im, z0, table, lengths), Readout(readout, bias, target, reduction)
    if dispatch.plain_reference(backend):
        _check(inputs, classes)
        reference = dispatch.leaf("modal_cross_entropy", "reference")
        loss, hits, *_ = reference.modal_cross_entropy_fwd(inputs, classes, need_grad=False)
    else:
        loss, hits, *_ = run_fwd(inputs, classes, needs_grad(x, re, im, z0, table, readout, bias), backend)
    return loss, hits


def run_fwd(inputs: ModalInputs, readout: Readout, need_grad: bool, backend: str | None) -> tuple[Tensor, ...]:
    """The op modal_cross_entropy_fwd."""
    *tensors, lengths, pairs = inputs
    weight, bias, target, reduction = readout
    found: tuple[Tensor, ...] = torch.ops.orthokern.modal_cross_entropy_fwd(
        *tensors, weight, bias, target, pairs, reduction, need_grad, backend, lengths
    )
    return found


def _check(inputs: ModalInputs, readout: Readout) -> None:
    """Check lengths, ids, classes and pairs, with which kernels index."""
    check_inputs(inputs, readout.target.shape[0])
    check_ids("target", readout.target, readout.weight, inputs.lengths)


@custom_op(
    "modal_cross_entropy_fwd",
    "(Tensor x, Tensor re, Tensor im, Tensor z0, Tensor? table, Tensor readout, Tensor? bias, Tensor target, "
    "Tensor? pairs=None, str reduction='mean', bool need_grad=True, str? backend=None, Tensor? lengths=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _fwd(x: Tensor, re: Tensor, im: Tensor, z0: Tensor, table: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """(loss, hits, grad_x, grad_re, grad_im, grad_z0, grad_table, grad_readout, grad_bias, grad_pairs).

    Gradients that do not apply are empty, and so are all without need_grad. pairs and grad_pairs: as in modal_scan_bwd.
    """
    weight, bias, target, pairs, reduction, need_grad, backend, lengths = rest
    inputs = ModalInputs._make(map(contiguous, (x, re, im, z0, table, lengths, pairs)))
    readout = Readout(weight.contiguous(), contiguous(bias), target.contiguous(), reduction)
    facts = {"features": () if lengths is None else FEATURES, "N": z0.shape[1], "C": weight.shape[0]}
    leaf = dispatch.resolve("modal_cross_entropy", backend, device=z0.device, dtype=z0.dtype, **facts)
    _check(inputs, readout)
    found = leaf.modal_cross_entropy_fwd(inputs, readout, need_grad=need_grad)
    *grads, grad_pairs = found.inputs or (None,) * 6
    return filled((found.loss, found.hits, *grads, found.weight, found.bias, grad_pairs), z0)


@_fwd.register_fake
def _fwd_fake(x: Tensor, re: Tensor, im: Tensor, z0: Tensor, table: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    readout, bias, target, pairs, _, need_grad, *_ = rest

    def like(tensor: Tensor | None, *shape: int) -> Tensor:
        if tensor is None or not need_grad:
            return z0.new_empty(0)
        return tensor.new_empty(shape or tensor.shape)

    return (
        z0.new_empty(()),
        target.new_empty(target.shape[0], dtype=torch.int64),
        like(x if table is None else None),
        *map(like, (re, im, z0, table, readout, bias)),
        z0.new_empty(0) if pairs is None else like(re, pairs.shape[0], 2, 2),
    )


register_gradients(_fwd, first=2)  # after loss and hits
