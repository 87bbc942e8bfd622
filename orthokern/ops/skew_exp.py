"""skew_exp: the exponential of skew matrices, which is orthogonal, and its adjoint, batched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._products import ieee_products
from orthokern.dispatch import Support, dtype_name
from orthokern.errors import InputError
from orthokern.ops import _checks as check
from orthokern.ops._common import by_reference, contiguous, no_second_derivative, recording
from orthokern.ops._register import custom_op

_SAME = "the reference is as fast: it consists of torch's matrix products, on every device"

SUPPORT = {
    # no half precision: rounding to it makes a matrix non-orthogonal
    "reference": Support(dtypes=(torch.float64, torch.float32)),
    "cpu": Support(missing=_SAME),
    "triton": Support(missing=_SAME),
    "cuda": Support(missing=_SAME),
}
dispatch.register("skew_exp", SUPPORT)


@keeps_dtype
def skew_exp(x: Tensor, *, backend: str | None = None) -> Tensor:
    """exp(A) of the skew part A = (X - X^T) / 2 of every matrix: an orthogonal matrix of determinant 1.

    For a skew x the result is exp(x); a symmetric part of x, for example from rounding, has no effect. There is no
    device synchronisation. Notes [Exponential of a skew matrix] and [Backward of the exponential of a skew matrix] in
    ``orthokern/reference/skew_exp.py`` have the mathematics.

    Args:
        x: [..., N, N], float32 or float64.
        backend: see ``orthokern.functional``. An explicit "reference" runs plain differentiable torch code, with the
            precision of matrix products that is set in torch.

    Returns:
        [..., N, N], orthogonal to rounding. Differentiable in x, with a skew gradient. NaN for a matrix that holds NaN
        or infinity, or that is too large (Numerics).

    Raises:
        InputError: a wrong shape or dtype.
        BackendUnavailable: the requested backend does not support the call.

    Saved:
        8 N^2 numbers per matrix: A, A2, A3, three terms of the polynomial, and two products of them; a reference to x.

    Cost:
        Forward: 7 + s products of 2 N^3 flops per matrix. Backward: 8 + 2 s, and s - 1 that are recomputed.
        s = ceil(log2(r / 3)) (float64: r / 1.09) for an r between 1.06 |A|_2 and 1.7 |A|_2 (N = 512); 0 for small A. On
        a GPU the number is always that for s = 8, which avoids a synchronisation with the host.

    Numerics:
        In the dtype of x. P^T P - I is a few units in the last place whatever the norm; the error of P itself is at
        most about eps |A|_2. A matrix with r = |A^6|_F^(1/6) above 768 (float64: 279) becomes NaN. r is between
        2^(1/12) |A|_2 = 1.06 |A|_2, if one pair of angles dominates, and N^(1/12) |A|_2.

    Example::

        >>> from orthokern.functional import skew_exp
        >>> x = torch.randn(8, 8, dtype=torch.float64)
        >>> w = skew_exp(x - x.mT)
        >>> bool(((w.mT @ w - torch.eye(8)).abs() < 1e-12).all())
        True
    """
    check.is_tensor("x", x)
    if x.ndim < 2 or 0 in x.shape or x.shape[-1] != x.shape[-2]:
        raise InputError(f"x has shape {list(x.shape)}: accepted is [..., N, N], nothing empty")
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"x has dtype {dtype_name(x.dtype)}: accepted are float32 and float64 (orthogonality is lost in others)"
        )
    if by_reference(backend, x):
        result: Tensor = dispatch.leaf("skew_exp", "reference").skew_exp_fwd(x)[0]
        return result
    result = _fwd(x, backend)[0]
    return result


def _leaf(x: Tensor, backend: str | None) -> Any:
    return dispatch.resolve("skew_exp", backend, device=x.device, dtype=x.dtype, N=x.shape[-1])


@custom_op("skew_exp_fwd", "(Tensor x, str? backend=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def _fwd(x: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    """(p, powers, terms, c, root, squarings), as the reference describes them."""
    with ieee_products():
        p, powers, *rest = _leaf(x, backend).skew_exp_fwd(contiguous(x))
    return (p, powers.contiguous(), *rest)


@_fwd.register_fake
def _fwd_fake(x: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    def empty(*first: int) -> Tensor:
        return x.new_empty((*first, *x.shape))

    return empty(), empty(3), empty(3), empty(), empty(), x.new_empty(x.shape[:-2], dtype=torch.int32)


@custom_op(
    "skew_exp_bwd",
    "(Tensor grad_p, Tensor x, Tensor powers, Tensor terms, Tensor c, Tensor root, Tensor squarings, "
    "str? backend=None) -> Tensor",
)
def _bwd(grad_p: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """grad_x [..., N, N]. x is an argument so that a second derivative raises: the saved tensors count as constants."""
    *saved, backend = rest
    with ieee_products():
        grad_x: Tensor = _leaf(grad_p, backend).skew_exp_bwd(contiguous(grad_p), *saved)
    return grad_x


@_bwd.register_fake
def _bwd_fake(grad_p: Tensor, *_: Any) -> Tensor:
    return grad_p.new_empty(grad_p.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.backend = inputs
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *saved)


def _backward(ctx: Any, saved: tuple[Any, ...], grad_p: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_p is None:
        return ()
    x, *rest = saved
    if recording():  # the same formulas, with the saved tensors recomputed from x
        reference = dispatch.leaf("skew_exp", "reference")
        with ieee_products():
            _, *rest = reference.skew_exp_fwd(x)
            return (reference.skew_exp_bwd(grad_p, *rest),)
    return (_bwd(grad_p, x, *rest, ctx.backend),)


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("skew_exp"))
