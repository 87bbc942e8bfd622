"""rotation_scan: a linear recurrence whose matrix is diagonal with complex eigenvalues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern.dispatch import Support
from orthokern.errors import InputError
from orthokern.ops import _checks as check
from orthokern.ops import _route
from orthokern.ops._common import needed, no_second_derivative
from orthokern.ops._register import custom_op
from orthokern.reference import rotation_scan as reference

DTYPES = (torch.float64, torch.float32)
SUPPORT = {
    "reference": Support(dtypes=DTYPES),
    "cpu": Support(devices=("cpu",), dtypes=DTYPES),
    "triton": Support(missing="the cuda backend has the kernel"),
    "cuda": Support(devices=("cuda",), dtypes=DTYPES, capability=(8, 0)),
}
FUNCTIONS = ("scan", "adjoint")  # of the backends
dispatch.register("rotation_scan", SUPPORT)


def rotation_scan(
    x: Tensor,
    eigenvalues: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The states of a linear recurrence with a diagonal matrix of complex eigenvalues, as in linear recurrent units
    (Orvieto et al., "Resurrecting recurrent neural networks for long sequences", 2023) and S5.

    Equation:
        h_t = lambda * h_{t-1} + x_t,  h_{-1} = h0,  * elementwise.
        A vector of N / 2 complex numbers is stored as N real ones: first the real parts, then the imaginary parts. In
        real numbers, the recurrent matrix consists of N / 2 rotations, each scaled by |lambda|. With resets, h_{t-1} is
        reset_state where resets_t is true.
        In torch: ``h = eigenvalues * h + torch.complex(*x_t.chunk(2, -1))``.
        Backward: Note [Rotation scan backward] in ``orthokern/reference/rotation_scan.py``.

    Args:
        x: [T, B, N], float32 or float64, N even.
        eigenvalues: complex [N / 2], of any complex dtype.
        h0: [B, N], zeros if None.
        resets, reset_state: bool [T, B] and [B, N], or None, as in ``factored_scan``.
        backend: see ``orthokern.functional``.

    Returns:
        hs [T, B, N]. Differentiable in x, eigenvalues, h0 and reset_state.

    Raises:
        InputError: wrong shapes, dtypes or devices.
        BackendUnavailable: the backend asked for cannot serve.

    Saved:
        hs.

    Cost:
        4 N flops per step and sequence forward, and 8 N backward. The limit is memory traffic, per step and sequence
        2 N values forward and 3 N backward.

    Numerics:
        Eigenvalues, states and adjoints are float64, and rounded once, to the dtype of x; so are sums over time. On the
        CPU the same inputs, machine and thread count give the same bits.

    Example::

        >>> eigenvalues = torch.polar(torch.full((4,), 0.99), torch.linspace(0, 3, 4))
        >>> rotation_scan(torch.randn(100, 2, 8), eigenvalues).shape
        torch.Size([100, 2, 8])
    """
    check.is_float("x", check.is_tensor("x", x))
    if x.ndim != 3 or 0 in x.shape or x.shape[-1] % 2:
        raise InputError(f"x has shape {list(x.shape)}: accepted is [T, B, N], N even, nothing empty")
    M = x.shape[-1] // 2
    check.is_tensor("eigenvalues", eigenvalues)
    if not eigenvalues.is_complex() or eigenvalues.shape != (M,):
        raise InputError(f"eigenvalues is {check.describe(eigenvalues)}: accepted is complex [N / 2] = [{M}]")
    check.same_device("eigenvalues", eigenvalues, "x", x)
    if h0 is not None:
        check.fits("h0", h0, (x.shape[1], 2 * M), "[B, N]", "x", x)
    reset_state = check.resets_and_state(resets, reset_state, x, h0, 2 * M, "x", x)
    values = torch.view_as_real(eigenvalues.resolve_conj()).double()
    return scan(x, values[:, 0], values[:, 1], h0, resets, reset_state, backend)


@keeps_dtype
def scan(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    h0: Tensor | None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`rotation_scan` of checked arguments; re and im are float64 [N / 2], and reset_state None is a state of zeros."""
    if resets is not None and reset_state is not None:
        # in the kernels, the state before a reset is zero
        start = reference.turn(reset_state.to(re.dtype), re, im).to(x.dtype)
        x = torch.where(resets.unsqueeze(2), x + start, x)
    h0 = x.new_zeros(x.shape[1:]) if h0 is None else h0
    if _route.by_reference(backend, x, re, im, h0):
        return reference.scan(x, re, im, h0, resets=resets)
    result: Tensor = _fwd(x, re, im, h0, resets, backend)
    return result


def _backend(x: Tensor, backend: str | None) -> Any:
    return dispatch.resolve("rotation_scan", backend, device=x.device, dtype=x.dtype, N=x.shape[-1])


@custom_op(
    "rotation_scan_fwd",
    "(Tensor x, Tensor re, Tensor im, Tensor h0, Tensor? resets=None, str? backend=None) -> Tensor",
)
def _fwd(x: Tensor, re: Tensor, im: Tensor, h0: Tensor, resets: Tensor | None, backend: str | None) -> Tensor:
    result: Tensor = _backend(x, backend).scan(x, re, im, h0, resets=resets)
    return result


@_fwd.register_fake
def _fwd_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(
    "rotation_scan_bwd",
    "(Tensor grad_hs, Tensor hs, Tensor re, Tensor im, Tensor h0, Tensor? resets=None, str? backend=None) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(
    grad_hs: Tensor, hs: Tensor, re: Tensor, im: Tensor, h0: Tensor, resets: Tensor | None, backend: str | None
) -> tuple[Tensor, ...]:
    """Gradients of x, re, im and h0."""
    return _gradients(_backend(hs, backend), grad_hs, hs, re, im, h0, resets)


def _gradients(
    module: Any, grad_hs: Tensor, hs: Tensor, re: Tensor, im: Tensor, h0: Tensor, resets: Tensor | None
) -> tuple[Tensor, ...]:
    grad_x, grad_re, grad_im = module.adjoint(grad_hs, re, im, hs, h0, resets)
    first = grad_x[0] if resets is None else grad_x[0].masked_fill(resets[0].unsqueeze(1), 0)
    return grad_x, grad_re, grad_im, reference.turn(first.to(re.dtype), re, -im).to(h0.dtype)


@_bwd.register_fake
def _bwd_fake(grad_hs: Tensor, hs: Tensor, re: Tensor, im: Tensor, h0: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (hs, re, im, h0))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, re, im, h0, resets, ctx.backend = inputs
    ctx.save_for_backward(output, re, im, h0, resets)


def _backward(ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor) -> Any:
    arguments = (grad_hs, *saved, ctx.backend)
    # a second derivative goes through the reference, and through hs by the derivative of the forward op
    grads = _gradients(reference, *arguments[:-1]) if _route.recording() else _bwd(*arguments)
    return tuple(map(needed, grads, ctx.needs_input_grad))


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("rotation_scan"))
