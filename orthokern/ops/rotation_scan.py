"""rotation_scan: a linear recurrence whose matrix is diagonal with complex eigenvalues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import RotationArgs, RotationGradients, join_tensors, schema_of, split_tensors
from orthokern.dispatch import Support
from orthokern.errors import InputError
from orthokern.ops import _checks as check
from orthokern.ops._common import by_reference, no_second_derivative, recording
from orthokern.ops._linear import linear
from orthokern.ops._register import custom_op
from orthokern.reference import rotation_scan as reference

DTYPES = (torch.float64, torch.float32)
SUPPORT = {
    "reference": Support(dtypes=DTYPES),
    "cpu": Support(devices=("cpu",), dtypes=DTYPES),
    "triton": Support(missing="the cuda backend has the kernel"),
    "cuda": Support(devices=("cuda",), dtypes=DTYPES, capability=(8, 0)),
}
dispatch.register("rotation_scan", SUPPORT)


def rotation_scan(
    x: Tensor,
    eigenvalues: Tensor,
    h0: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The states of a linear recurrence with a diagonal matrix of complex eigenvalues, as in linear recurrent units
    (Orvieto et al., "Resurrecting recurrent neural networks for long sequences", 2023) and S5.

    Equation:
        h_t = lambda * h_{t-1} + x_t,  t = 1 ... T,  * elementwise; with a weight, weight x_t + bias instead of x_t.
        A vector of N / 2 complex numbers is stored as N real ones: first the real parts, then the imaginary parts. In
        real numbers, the recurrent matrix consists of N / 2 rotations, each scaled by |lambda|. With resets, h_{t-1} is
        reset_state where resets_t is true.
        In torch: ``h = eigenvalues * h + torch.complex(*x_t.chunk(2, -1))``.
        Backward: Note [Rotation scan backward] in ``orthokern/reference/rotation_scan.py``.

    Args:
        x: [T, B, N], float32 or float64, N even; with a weight features [T, B, D].
        eigenvalues: complex [N / 2], of any complex dtype.
        h0: [B, N], zeros if None.
        weight, bias: [N, D] and [N], or None; a bias needs a weight.
        resets, reset_state: bool [T, B] and [B, N], or None, as in ``factored_scan``.
        backend: see ``orthokern.functional``.

    Returns:
        hs [T, B, N]. Differentiable in x, eigenvalues, h0, weight, bias and reset_state.

    Raises:
        InputError: wrong shapes, dtypes or devices.
        BackendUnavailable: the requested backend does not support the call.

    Saved:
        hs; with a weight, x.

    Cost:
        4 N flops per step and sequence forward, and 8 N backward. Memory traffic limits the speed. Per step and
        sequence it is 2 N values forward and 3 N backward. With a weight, 2 N D more flops forward and 2 or 4 N D
        backward. The CPU kernel then reads or writes D values instead of N of those above, if the batch has a sequence
        for each thread and there is no reset_state.

    Numerics:
        Eigenvalues, states and adjoints are float64, and rounded once, to the dtype of x; so are sums over time. On the
        CPU the same inputs, machine and thread count give bit-identical results. With a weight, products and sums over
        time are those of the dtype of x, and differ in rounding if the batch has fewer sequences than threads.

    Example::

        >>> eigenvalues = torch.polar(torch.full((4,), 0.99), torch.linspace(0, 3, 4))
        >>> rotation_scan(torch.randn(100, 2, 8), eigenvalues).shape
        torch.Size([100, 2, 8])
    """
    check.is_float("x", check.is_tensor("x", x))
    check.is_tensor("eigenvalues", eigenvalues)
    if not eigenvalues.is_complex() or eigenvalues.ndim != 1 or not len(eigenvalues):
        raise InputError(f"eigenvalues is {check.describe(eigenvalues)}: accepted is complex [N / 2], not empty")
    N = 2 * len(eigenvalues)
    check.same_device("eigenvalues", eigenvalues, "x", x)
    if weight is None and bias is not None:
        raise InputError("bias needs a weight: accepted are both, a weight alone, or neither")
    if x.ndim != 3 or 0 in x.shape or (weight is None and x.shape[2] != N):
        sizes = f"[T, B, N] with N = {N}, twice the eigenvalues" if weight is None else "[T, B, D]"
        raise InputError(f"x has shape {list(x.shape)}: accepted is {sizes}, nothing empty")
    for name, tensor, shape, text in (
        ("h0", h0, (x.shape[1], N), "[B, N]"),
        ("weight", weight, (N, x.shape[2]), "[N, D]"),
        ("bias", bias, (N,), "[N]"),
    ):
        if tensor is not None:
            check.fits(name, tensor, shape, text, "x", x)
    reset_state = check.resets_and_state(resets, reset_state, x, h0, N, "x", x)
    values = torch.view_as_real(eigenvalues.resolve_conj()).double()
    return scan(x, values[:, 0], values[:, 1], h0, weight, bias, resets, reset_state, backend)


@keeps_dtype
def scan(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    h0: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`rotation_scan` of checked arguments; re and im are float64 [N / 2], and reset_state None is a state of zeros."""
    h0 = x.new_zeros(x.shape[1], 2 * len(re)) if h0 is None else h0
    reference_serves = by_reference(backend, x, re, im, h0, weight, bias, reset_state)
    if resets is not None and reset_state is not None:
        if weight is not None:
            x, weight, bias = linear(x, weight, bias), None, None
        # in the kernels, the state before a reset is zero
        start = reference.turn(reset_state.to(re.dtype), re, im).to(x.dtype)
        x = torch.where(resets.unsqueeze(2), x + start, x)
    args = RotationArgs(x, re, im, h0, weight, bias, resets, backend)
    result: Tensor = reference.rotation_scan_fwd(args) if reference_serves else _fwd(*args)
    return result


def _kernels(args: RotationArgs) -> Any:
    return dispatch.resolve("rotation_scan", args.backend, device=args.h0.device, dtype=args.h0.dtype)


@custom_op("rotation_scan_fwd", f"({schema_of(RotationArgs).replace('Tensor? x', 'Tensor x')}) -> Tensor")
def _fwd(*fields: Any) -> Tensor:
    args = RotationArgs(*fields)
    result: Tensor = _kernels(args).rotation_scan_fwd(args)
    return result


@_fwd.register_fake
def _fwd_fake(x: Tensor, re: Tensor, im: Tensor, h0: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], *h0.shape)


@custom_op(
    "rotation_scan_bwd",
    f"(Tensor grad_hs, Tensor hs, bool need_x, {schema_of(RotationArgs)}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(grad_hs: Tensor, hs: Tensor, need_x: bool, *fields: Any) -> RotationGradients:
    args = RotationArgs(*fields)
    result: RotationGradients = _kernels(args).rotation_scan_bwd(args, grad_hs, hs, need_x=need_x)
    return result


@_bwd.register_fake
def _bwd_fake(grad_hs: Tensor, hs: Tensor, need_x: bool, *fields: Any) -> tuple[Tensor | None, ...]:
    x, re, im, h0, weight, bias, *_ = RotationArgs(*fields)
    of_x = hs if weight is None else x if need_x else None
    return tuple(None if t is None else t.new_empty(t.shape) for t in (of_x, re, im, h0, weight, bias))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    args = RotationArgs(*inputs)
    args, tensors = split_tensors(args._replace(x=None) if args.weight is None else args)
    ctx.args = args
    ctx.save_for_backward(output, *tensors)


def _backward(ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor) -> Any:
    hs, *tensors = saved
    args, need_x = join_tensors(ctx.args, tensors), ctx.needs_input_grad[0]
    # a second derivative goes through the reference, and through hs by the derivative of the forward op
    if recording():
        return reference.rotation_scan_bwd(args, grad_hs, hs, need_x=need_x)
    return _bwd(grad_hs, hs, need_x, *args)


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("rotation_scan"))
