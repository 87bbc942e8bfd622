"""modal_scan: a linear recurrence in modal coordinates, with complex multiply-adds instead of a matrix product.

Modal coordinates: M modes with eigenvalues re[m] + i im[m]; re and im are float64 [M] in every call. A real eigenvalue
is a mode with im = 0, whose imaginary part stays 0 if its inputs' imaginary parts are 0. A vector is a real tensor
[..., 2M]: the real parts of all modes, then their imaginary parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import ModalInputs
from orthokern.dispatch import Support
from orthokern.errors import InputError
from orthokern.ops import _route
from orthokern.ops._checks import ID_DTYPES, at_least_one, positive
from orthokern.ops._common import check_lengths, check_range, contiguous, filled, needed, no_second_derivative
from orthokern.ops._register import custom_op

FEATURES = ("lengths",)  # optional arguments that a backend may lack, see Support.features

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32), features=FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=FEATURES),
    "triton": Support(devices=("cuda",), dtypes=(torch.float64, torch.float32), features=FEATURES, capability=(8, 0)),
    "cuda": Support(devices=("cuda",), dtypes=(torch.float64, torch.float32), features=FEATURES, capability=(8, 0)),
}
dispatch.register("modal_scan", SUPPORT)


@keeps_dtype
def modal_scan(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None = None,
    *,
    backend: str | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The states of a diagonal complex recurrence over a whole sequence. Inputs are taken as checked.

    Equation:
        z_t = lambda * z_{t-1} + x_t mode by mode, lambda = re + i im: for each mode, with [r, s] its real and imaginary
        part, r_t = re r_{t-1} - im s_{t-1} + x_t[r],    s_t = im r_{t-1} + re s_{t-1} + x_t[s].
        Backward: Note [Modal scan backward] in ``orthokern/reference/modal_scan.py``.

    Args:
        x: [T, B, 2M], float; or with a table token ids [T, B] of a dtype of ID_DTYPES.
        re, im: float64 [M], parts of the eigenvalues.
        z0: [B, 2M], the state before the first step.
        table: [D, 2M], what each token id adds, or None.
        backend: a name, "auto" or None. An explicit "reference" runs plain differentiable torch code.
        lengths: int64 [B], in [1, T], the number of steps of each sequence; None: T for all. Padding in x and in the
            cotangent of z is not read.
        x (unless ids), z0 and table share one dtype and device; any strides (what is not contiguous is copied).

    Returns:
        z [T, B, 2M], zeros after lengths[b] steps.

    Saved:
        z, and references to the inputs.

    Cost:
        8 T B M flops in float64 forward; 16 T B M backward. T B 2M elements are read and written forward, three times
        as many backward.

    Numerics:
        Coefficients, states and their adjoints are float64, also for float32 tensors: results are rounded once. The
        gradients of re, im, table and pairs are summed within chunks of time in the dtype of the call, over chunks in
        float64. With fewer sequences than threads, time is split into as many pieces, joined by powers of lambda. The
        same bits for the same inputs, machine and thread count.
    """
    inputs = ModalInputs(x, re, im, z0, table, lengths)
    if not _route.derived() and not _route.by_reference(backend):
        return run_fwd(inputs, backend)
    check_inputs(inputs, x.shape[0])
    z: Tensor = dispatch.leaf("modal_scan", "reference").modal_scan_fwd(inputs)
    return z


def run_fwd(inputs: ModalInputs, backend: str | None) -> Tensor:
    """The op modal_scan_fwd."""
    x, re, im, z0, table, lengths, _ = inputs  # the Dynamo of torch 2.6 cannot slice it
    z: Tensor = torch.ops.orthokern.modal_scan_fwd(x, re, im, z0, table, backend, lengths)
    return z


def run_bwd(inputs: ModalInputs, grad_z: Tensor, z: Tensor, need_x: bool, backend: str | None) -> tuple[Tensor, ...]:
    """The op modal_scan_bwd: the gradients in the order of ModalGradients."""
    *tensors, lengths, pairs = inputs
    grads: tuple[Tensor, ...] = torch.ops.orthokern.modal_scan_bwd(grad_z, z, *tensors, pairs, need_x, backend, lengths)
    return grads


def check_ids(argument: str, ids: Tensor, table: Tensor | None, lengths: Tensor | None) -> None:
    """Raise InputError unless the token ids or targets [T, B] are in [0, rows of table); padding is not checked.

    A None table means that ids are features, which need no check.
    """
    if table is None:
        return
    if ids.dtype not in ID_DTYPES:
        names = ", ".join(map(dispatch.dtype_name, ID_DTYPES))
        raise InputError(f"{argument} has dtype {dispatch.dtype_name(ids.dtype)}: accepted is one of {names}")
    if ids.is_cuda:
        return
    if lengths is not None:
        ids = ids.masked_fill(torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) >= lengths, 0)
    check_range(argument, ids, table.shape[0], "token ids" if argument == "x" else "class ids")


def _leaf(inputs: ModalInputs, backend: str | None, T: int) -> tuple[Any, ModalInputs]:
    """The leaf that serves a call of T steps, and its arguments, whose values are checked."""
    z0, features = inputs.z0, () if inputs.lengths is None else FEATURES
    leaf = dispatch.resolve("modal_scan", backend, device=z0.device, dtype=z0.dtype, features=features, N=z0.shape[1])
    check_inputs(inputs, T)
    return leaf, ModalInputs._make(map(contiguous, inputs))


def check_inputs(inputs: ModalInputs, T: int) -> None:
    """Check sizes, lengths, token ids and pairs, with which kernels index."""
    at_least_one("z0", inputs.z0, "[B, 2M]")
    positive("T", T)
    check_lengths(inputs.lengths, T)
    pairs = inputs.pairs
    if pairs is not None and pairs.numel() and not pairs.is_cuda:
        check_range("pairs", pairs, inputs.re.shape[0], "modes")
    if inputs.x is not None:
        check_ids("x", inputs.x, inputs.table, inputs.lengths)


@custom_op(
    "modal_scan_fwd",
    "(Tensor x, Tensor re, Tensor im, Tensor z0, Tensor? table=None, str? backend=None, Tensor? lengths=None) "
    "-> Tensor",
)
def _fwd(x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *rest: Any) -> Tensor:
    """z [T, B, 2M]."""
    table, backend, lengths = rest
    leaf, inputs = _leaf(ModalInputs(x, re, im, z0, table, lengths), backend, x.shape[0])
    z: Tensor = leaf.modal_scan_fwd(inputs)
    return z


@_fwd.register_fake
def _fwd_fake(x: Tensor, _: Tensor, __: Tensor, z0: Tensor, *rest: Any) -> Tensor:
    return z0.new_empty(x.shape[0], *z0.shape)


@custom_op(
    "modal_scan_bwd",
    "(Tensor grad_z, Tensor z, Tensor? x, Tensor re, Tensor im, Tensor z0, Tensor? table=None, Tensor? pairs=None, "
    "bool need_x=True, str? backend=None, Tensor? lengths=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(
    grad_z: Tensor, z: Tensor, x: Tensor | None, re: Tensor, im: Tensor, z0: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """(grad_x, grad_re, grad_im, grad_z0, grad_table, grad_pairs); what does not apply is empty.

    x may be None without a table. pairs: int64 [P, 2], modes (j, k), whose sums M_jk are returned as grad_pairs
    [P, 2, 2], float64 as grad_re and grad_im [M]; see Note [Modal scan backward].
    """
    table, pairs, need_x, backend, lengths = rest
    leaf, inputs = _leaf(ModalInputs(x, re, im, z0, table, lengths, pairs), backend, grad_z.shape[0])
    grads = leaf.modal_scan_bwd(inputs, grad_z.contiguous(), z.contiguous(), need_x=need_x)
    return filled(grads, inputs.z0)


@_bwd.register_fake
def _bwd_fake(grad_z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _, _, re, im, z0, table, pairs, need_x, *_ = arguments
    return (
        z0.new_empty(grad_z.shape if table is None and need_x else 0),
        *(tensor.new_empty(tensor.shape) for tensor in (re, im, z0)),
        z0.new_empty(0 if table is None else table.shape),
        z0.new_empty(0) if pairs is None else re.new_empty(pairs.shape[0], 2, 2),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, re, im, z0, table, ctx.backend, lengths = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output, None if table is None else x, re, im, z0, table, lengths)


def _backward(ctx: Any, saved: tuple[Any, ...], grad_z: Tensor | None) -> tuple[Any, ...]:
    if grad_z is None:
        return ()
    z, x, re, im, z0, table, lengths = saved
    needs = ctx.needs_input_grad
    inputs = ModalInputs(x, re, im, z0, table, lengths)
    if _route.recording():
        grads = dispatch.leaf("modal_scan", "reference").modal_scan_bwd(inputs, grad_z, z, need_x=needs[0])
    else:
        grads = run_bwd(inputs, grad_z, z, needs[0], ctx.backend)
    return tuple(map(needed, grads[:5], needs[:5]))


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("modal_scan"))
