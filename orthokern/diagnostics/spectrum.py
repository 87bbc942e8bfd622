"""Singular values and eigenvalues of a recurrent matrix W [N, N].

The decompositions run in float64 on the CPU, where they are robust. W is small, and the time of the copy is negligible
in comparison. `diagnose_recurrence(eigenvalues=False)` skips the eigenvalues, which take the most time.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from orthokern.errors import InputError

ANGLE_BINS = 36  # of ten degrees each


class Recurrence(Protocol):
    """The interface that `diagnose_recurrence` needs. All recurrent modules of orthokern.nn have it.

    `singular_values(layer, reverse)` [K] and `orthogonality_error()` are used if the module has them: a factorized
    recurrence has its singular values as a parameter, without a decomposition.
    """

    num_layers: int
    bidirectional: bool

    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """W [N, N] of one recurrence, applied to column vectors."""
        ...


def _real(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is {type(value).__name__}; accepted: a tensor of real numbers")
    if value.is_complex():
        raise InputError(f"{name} has dtype {value.dtype}; accepted: real numbers")
    return value


def _vector(name: str, value: Any) -> Tensor:
    if _real(name, value).dim() != 1 or not len(value):
        raise InputError(f"{name} has shape {list(value.shape)}; accepted: [N], N at least 1")
    return cast(Tensor, value)


def summarize_spectrum(singular_values: Tensor) -> dict[str, float]:
    """Mean, standard deviation and extremes of singular values, as in Figure 3 of Vorontsov et al. 2017.

    Args:
        singular_values: [K] float, K at least 1. Absolute values are taken, because an unconstrained spectrum
            parameter may be negative.

    Returns:
        "mean", "std" (population standard deviation, divided by K), "min", "max".

    Raises:
        InputError: singular_values is no such tensor.

    Example::

        >>> summarize_spectrum(torch.tensor([0.5, 1.0, 1.5]))["max"]
        1.5
    """
    s = _vector("singular_values", singular_values).detach().abs().double().cpu()
    return {"mean": s.mean().item(), "std": s.std(correction=0).item(), "min": s.min().item(), "max": s.max().item()}


def spectral_radius(w: Tensor) -> float:
    """The largest magnitude of an eigenvalue: the asymptotic growth rate of W^t.

    Args:
        w: [N, N] float, N at least 1, on any device.

    Returns:
        A number without unit; NaN if w holds NaN or infinity.

    Raises:
        InputError: w is not a square matrix of real numbers.

    Example::

        >>> spectral_radius(torch.diag(torch.tensor([0.5, -2.0])))
        2.0
    """
    return _largest(_eigenvalues(w))


def eigenvalue_angles(w: Tensor) -> Tensor:
    """The angles of the eigenvalues: the rotation per time step.

    Args:
        w: [N, N] float, N at least 1, on any device.

    Returns:
        [N] float64 on the CPU, radians in [-pi, pi], ascending; an eigenvalue of zero has the angle 0. [N] NaN if w
        holds NaN or infinity.

    Raises:
        InputError: w is not a square matrix of real numbers.

    Example::

        >>> eigenvalue_angles(torch.eye(2))
        tensor([0., 0.], dtype=torch.float64)
    """
    return _angles(_eigenvalues(w))


def angle_histogram(angles: Tensor, bins: int = ANGLE_BINS) -> list[int] | list[float]:
    """A histogram of angles over `bins` equal intervals of [-pi, pi). Records hold angles in this form.

    The intervals are half open. The angle pi is counted as -pi.

    Args:
        angles: [N] float, radians in [-pi, pi].
        bins: number of intervals, at least 1.

    Returns:
        `bins` counts; `bins` NaN if an angle is not finite.

    Raises:
        InputError: angles is no such tensor, or bins is below 1.

    Example::

        >>> angle_histogram(torch.tensor([-3.0, 0.5, 0.6, 3.1]), bins=4)
        [1, 0, 2, 1]
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise InputError(f"bins is {bins!r}; accepted: an integer of at least 1")
    if not bool(_vector("angles", angles).isfinite().all()):
        return [math.nan] * bins
    part = ((angles.detach().double().cpu() + math.pi) * (bins / (2 * math.pi))).floor().long() % bins
    return torch.bincount(part, minlength=bins).tolist()


def diagnose_recurrence(module: nn.Module | Recurrence, *, eigenvalues: bool = True) -> dict[str, Any]:
    """The spectral statistics of all recurrent matrices of a module, as a record for metrics.jsonl.

    The cost is one eigenvalue decomposition per recurrence, and for a dense W one singular value decomposition:
    together about 10 ms for N = 128 and 0.3 s for N = 512. A factorized recurrence needs no singular value
    decomposition.

    Args:
        module: a recurrence of orthokern.nn; see `Recurrence`.
        eigenvalues: also compute "spectral_radius", "eigenvalue_moduli" and "eigenvalue_angles".

    Returns:
        "spectrum" (as `summarize_spectrum`; for a factorized recurrence of rank K < N, of the K values without the
        N - K zeros), "spectral_radius", "eigenvalue_moduli" (of |lambda|, as `summarize_spectrum`; for a normal matrix
        they equal the singular values), "eigenvalue_angles" (as `angle_histogram`). The first recurrence has these
        names. The names of the others end in "_l0_reverse", "_l1", ..., as those of parameters.
        "orthogonality_error": the largest |M^T M - I| of all bases, if the module has bases.
        All numbers of a matrix that is not finite are NaN.

    Raises:
        InputError: the module is not a recurrence.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> "spectral_radius" in str(diagnose_recurrence(FactorizedRNN(3, 8)))
        True
    """
    missing = [name for name in ("num_layers", "bidirectional", "recurrent_matrix") if not hasattr(module, name)]
    if missing:
        raise InputError(
            f"module is a {type(module).__name__} without {', '.join(missing)}; accepted: a recurrence of orthokern.nn"
        )
    recurrence = cast(Recurrence, module)
    singular_values, error = (getattr(module, name, None) for name in ("singular_values", "orthogonality_error"))
    found: dict[str, Any] = {}
    with torch.no_grad():
        for index, (name, layer, reverse) in enumerate(_recurrences(recurrence)):
            suffix = f"_{name}" if index else ""
            w = None
            if eigenvalues or singular_values is None:
                w = recurrence.recurrent_matrix(layer, reverse).detach().double().cpu()
            if singular_values is not None:
                found[f"spectrum{suffix}"] = summarize_spectrum(singular_values(layer, reverse))
            elif w is not None:
                found[f"spectrum{suffix}"] = summarize_spectrum(_singular_values(w))
            if eigenvalues and w is not None:
                values = _eigenvalues(w)
                found[f"spectral_radius{suffix}"] = _largest(values)
                found[f"eigenvalue_moduli{suffix}"] = summarize_spectrum(values.abs())
                found[f"eigenvalue_angles{suffix}"] = angle_histogram(_angles(values))
        if error is not None:
            found["orthogonality_error"] = float(error())
    return found


def _recurrences(module: Recurrence) -> Iterator[tuple[str, int, bool]]:
    """(name, layer, reverse) in torch's order: l0, l0_reverse, l1, ..."""
    for layer in range(module.num_layers):
        for reverse in (False, True) if module.bidirectional else (False,):
            yield f"l{layer}{'_reverse' if reverse else ''}", layer, reverse


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs LAPACK with one thread. It splits these small matrices into thousands of small pieces: several threads are
    no faster, and many times slower if another process uses a core."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _singular_values(w: Tensor) -> Tensor:
    """[N] float64, or NaN if w is not finite, which LAPACK rejects."""
    if not bool(w.isfinite().all()):
        return w.new_full((len(w),), math.nan)
    with _one_thread():
        return torch.linalg.svdvals(w)


def _eigenvalues(w: Tensor) -> Tensor:
    """[N] complex128 on the CPU, or NaN if w is not finite, which LAPACK rejects."""
    if _real("w", w).dim() != 2 or w.shape[0] != w.shape[1] or not len(w):
        raise InputError(f"w has shape {list(w.shape)}; accepted: a square matrix [N, N]")
    exact = w.detach().double().cpu()
    if not bool(exact.isfinite().all()):
        return torch.full((len(w),), complex(math.nan, math.nan), dtype=torch.complex128, device="cpu")
    with _one_thread():
        return torch.linalg.eigvals(exact)


def _largest(eigenvalues: Tensor) -> float:
    return eigenvalues.abs().max().item()


def _angles(eigenvalues: Tensor) -> Tensor:
    return eigenvalues.angle().sort().values
