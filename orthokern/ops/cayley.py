"""cayley: a descent step that keeps the columns of matrices orthonormal, batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern.dispatch import Support, dtype_name
from orthokern.errors import InputError, number
from orthokern.ops import _checks as check
from orthokern.ops._common import contiguous, values
from orthokern.ops._register import custom_op

SUPPORT = {
    # no half precision: rounding to it makes a basis non-orthogonal, and torch has no LU for it
    "reference": Support(dtypes=(torch.float64, torch.float32)),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    "triton": Support(devices=("cuda",), dtypes=(torch.float64, torch.float32), limits={"K": 1024}, capability=(8, 0)),
    "cuda": Support(devices=("cuda",), dtypes=(torch.float64, torch.float32), capability=(8, 0)),
}
dispatch.register("cayley", SUPPORT)

FUNCTIONS = ("cayley",)  # of a leaf
# lr times the Frobenius norm of g, above which the reference takes the thin steps
LARGE_TURN = 4.0


@keeps_dtype
def cayley(m: Tensor, g: Tensor, lr: float | Tensor, *, backend: str | None = None) -> Tensor:
    """One step of descent that keeps the columns of m orthonormal, for one basis or a batch of them.

    Wisdom et al. 2016; Vorontsov et al. 2017, eq. 9 (there with a misprinted sign).

    Equation:
        A = G M^T - M G^T,    M_new = M - lr (I + lr/2 A)^-1 A M  =  (I + lr/2 A)^-1 (I - lr/2 A) M.
        K < N: M_new = M - lr P (I + lr/2 Q^T P)^-1 (Q^T M) with P = [G, M], Q = [M, -G]: 2K x 2K, never N x N.
        Note [Cayley step] in ``orthokern/reference/cayley.py`` derives both, says why this form drifts least, and has
        the form of large steps of thin bases.

    Args:
        m: [..., N, K], K <= N, orthonormal columns (not checked), float32 or float64.
        g: [..., N, K], the gradient of the loss with respect to m.
        lr: the rate, a number, a float tensor [] (on any device), or a float tensor [...] with one number per matrix,
            on the device of m; negative ascends. A constant for autograd.
        backend: see ``orthokern.functional``.

    Returns:
        The new bases [..., N, K], orthonormal to about eps (1 + lr |g|). On a GPU, for K < N, this requires lr |g|
        (Frobenius norm) of at most 4, which is not checked. They are not differentiable (a backward raises a
        RuntimeError), except with an explicit "reference", which runs plain differentiable torch code.

    Raises:
        InputError: wrong shapes, dtypes, devices; NaN or infinity in m, g or lr (on a CPU; on a GPU they give NaN).
        BackendUnavailable: the requested backend does not support the call.

    Cost:
        Per matrix, K = N: 2 N^3 (A) + 2 N^3 (A M) + 2/3 N^3 (LU) + 2 N^3 (two triangular solves) flops.
        K < N: 8 N K^2 (Q^T P) + 4 N K^2 (Q^T M) + 16/3 K^3 (LU) + 8 K^3 (solves) + 4 N K^2 (P times).
        I + lr/2 A has symmetric part I, so its LU exists without pivoting. Nothing is saved for a backward.

    Numerics:
        In the dtype of m. The correction has size lr |A|, so the columns lose orthogonality by about eps lr |A| per
        step plus one rounding of M.

    Example::

        >>> from orthokern.functional import cayley
        >>> u = torch.eye(8, dtype=torch.float64)
        >>> moved = cayley(u, torch.randn(8, 8, dtype=torch.float64), 1e-2)
        >>> bool(((moved.mT @ moved - u).abs() < 1e-12).all())
        True
    """
    check.is_tensor("m", m)
    if m.ndim < 2 or 0 in m.shape or m.shape[-1] > m.shape[-2]:
        raise InputError(f"m has shape {list(m.shape)}: accepted is [..., N, K] with 1 <= K <= N, nothing empty")
    if m.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"m has dtype {dtype_name(m.dtype)}: accepted are float32 and float64 (orthogonality is lost in others)"
        )
    check.fits("g", g, tuple(m.shape), "[..., N, K], the shape of m,", "m", m)
    if isinstance(lr, Tensor):
        if lr.ndim:  # a 0-dim rate may be on any device
            check.has_shape("lr", lr, tuple(m.shape[:-2]), "a number, or one per matrix: [...]")
            check.same_device("lr", lr, "m", m)
        check.is_float("lr", lr)
        lr = lr.detach()
        # values on a GPU are not read, since that would synchronise
        if not torch.compiler.is_compiling() and not lr.is_cuda and not bool(values(lr).isfinite().all()):
            raise InputError(f"lr is {lr}: accepted are finite numbers")
    elif not (torch.compiler.is_compiling() or type(lr) in torch.types.py_sym_types):
        lr = number("lr", lr, "a finite number, or a tensor with one per matrix")
    if dispatch.plain_reference(backend):
        check_finite("m", m)  # otherwise the op checks them
        check_finite("g", g)
        stepped: Tensor = dispatch.leaf("cayley", "reference").cayley(m, g, lr)
        return stepped
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64, device=m.device)
    stepped = torch.ops.orthokern.cayley(m, g, rate, backend)
    return stepped


def read_waits(device: torch.device) -> bool:
    """Whether reading a number from this device makes the host wait for it."""
    return device.type == "cuda"


def _prepared(m: Tensor, g: Tensor, lr: float | Tensor, backend: str | None) -> tuple[Any, Tensor, float | Tensor]:
    """(the backend's module, g, lr) of a step.

    The thin form of the kernels computes g^T g, whose elements leave the range of float32 below |g| = 1e-19 and above
    1e19: such a g is scaled. Above LARGE_TURN its rounding error is too large: the reference takes these steps. On a
    GPU, where reading |g| would synchronise with the host, every g is scaled, and kernels take steps of every size.
    """
    N, K = m.shape[-2:]
    module = dispatch.resolve("cayley", backend, device=m.device, dtype=m.dtype, N=N, K=K)
    if K == N or dispatch.backend_of(module) == "reference":
        return module, g, lr
    if read_waits(m.device):
        return module, *_scaled(g, lr)
    norm = float(torch.linalg.vector_norm(g))
    if not 2.0**-40 <= norm <= 2.0**40:
        g, lr = _scaled(g, lr)
        norm = float(torch.linalg.vector_norm(g))
    rate = float(lr.abs().max()) if isinstance(lr, Tensor) else abs(lr)
    return module if rate * norm <= LARGE_TURN else dispatch.leaf("cayley", "reference"), g, lr


def _scaled(g: Tensor, lr: float | Tensor) -> tuple[Tensor, Tensor]:
    """(g / k, k lr), the same step: k [...] is max|g| of each matrix if that is outside [2^-40, 2^40], else 1."""
    size = torch.linalg.vector_norm(g, math.inf, dim=(-2, -1)).clamp_min(2.0**-100)  # a gradient may be zero
    k = torch.where(size == size.clamp(2.0**-40, 2.0**40), torch.ones_like(size), size)
    return g / k[..., None, None], k.double() * lr


def steps(batches: Sequence[tuple[Tensor, Tensor, float | Tensor]], backend: str | None = None) -> list[Tensor]:
    """``cayley`` of each (m, g, lr), of any shapes, without checks and without the torch.library op (except under
    torch.compile). A leaf with `cayley_of_many` is called once for each dtype and device.

    m and g are contiguous [..., N, K] of one dtype and device, g is finite, and torch.no_grad() is active. The results
    are bitwise those of separate calls.
    """
    if torch.compiler.is_compiling():
        return [cayley(m, g, lr, backend=backend) for m, g, lr in batches]
    results: dict[int, Tensor] = {}
    together: dict[Any, dict[int, tuple[Tensor, Tensor, float | Tensor]]] = {}
    for index, (m, g, lr) in enumerate(batches):
        leaf, g, lr = _prepared(m, g, lr, backend)
        together.setdefault((leaf, m.dtype, m.device), {})[index] = m, g, lr
    for (leaf, *_), alike in together.items():
        batch = list(alike.values())
        many = getattr(leaf, "cayley_of_many", None)
        stepped = [leaf.cayley(*step) for step in batch] if many is None else many(batch)
        results.update(zip(alike, stepped, strict=True))
    return [results[index] for index in range(len(batches))]


def check_finite(argument: str, tensor: Tensor) -> None:
    """Raise InputError if tensor [..., N, K] holds a NaN or an infinity."""
    # a finite sum proves that all elements are finite, in one pass; a sum of finite elements may overflow
    tensor = values(tensor)
    if not bool(tensor.sum().isfinite()) and not bool(tensor.isfinite().all()):
        bad = int(tensor.numel() - tensor.isfinite().sum())
        raise InputError(
            f"{argument} holds {bad} NaN or infinite values of {tensor.numel()}: the Cayley step needs finite numbers"
        )


@custom_op("cayley", "(Tensor m, Tensor g, Tensor lr, str? backend=None) -> Tensor")
def _cayley(m: Tensor, g: Tensor, lr: Tensor, backend: str | None = None) -> Tensor:
    """lr: [] or m's batch shape."""
    if not m.is_cuda:  # on a GPU this would synchronise with the host
        check_finite("m", m)
        check_finite("g", g)
    rate = float(lr) if lr.ndim == 0 and not (m.is_cuda and lr.is_cuda) else lr
    leaf, scaled, rate = _prepared(m, g, rate, backend)
    stepped: Tensor = leaf.cayley(contiguous(m), contiguous(scaled), rate)
    return stepped


@_cayley.register_fake
def _cayley_fake(m: Tensor, g: Tensor, lr: Tensor, backend: str | None = None) -> Tensor:
    return m.new_empty(m.shape)


def _refuse(ctx: Any, saved: tuple[Any, ...], *grads: Tensor) -> Any:
    raise RuntimeError("cayley is not differentiable through its kernels: pass backend='reference', which supports it")


_cayley.register_autograd(_refuse)
