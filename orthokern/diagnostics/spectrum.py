"""Singular values and eigenvalues of a recurrent matrix W [N, N].

The decompositions run in float64 on the CPU, where they are robust. W is small, and the time of the copy is negligible
in comparison. `diagnose_recurrence(eigenvalues=False)` skips the eigenvalues, which take the most time.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from orthokern._decompositions import LinAlgError, robust_svdvals
from orthokern.errors import InputError, integer
from orthokern.ops._checks import strided

ANGLE_BINS = 36  # of ten degrees each


def summarize_spectrum(singular_values: Tensor) -> dict[str, float]:
    """Mean, population standard deviation and extremes of the absolute values of singular values [K], K at least 1, as
    in Figure 3 of Vorontsov et al. 2017.

    Example::

        >>> summarize_spectrum(torch.tensor([0.5, 1.0, 1.5]))["max"]
        1.5
    """
    s = vector("singular_values", singular_values).abs()
    return {"mean": s.mean().item(), "std": s.std(correction=0).item(), "min": s.min().item(), "max": s.max().item()}


def spectral_radius(w: Tensor) -> float:
    """The largest magnitude of an eigenvalue of w [N, N], the asymptotic growth rate of W^t; NaN if w is not finite.

    Example::

        >>> spectral_radius(torch.diag(torch.tensor([0.5, -2.0])))
        2.0
    """
    return _eigenvalues(w).abs().max().item()


def eigenvalue_angles(w: Tensor) -> Tensor:
    """The angles of the eigenvalues of w [N, N], the rotation per time step: [N] float64 on the CPU, radians in [-pi,
    pi], ascending; 0 for an eigenvalue of zero, NaN if w is not finite.

    Example::

        >>> eigenvalue_angles(torch.eye(2))
        tensor([0., 0.], dtype=torch.float64)
    """
    return _eigenvalues(w).angle().sort().values


def angle_histogram(angles: Tensor, bins: int = ANGLE_BINS) -> list[int] | list[float]:
    """A histogram of angles [N] in [-pi, pi] over `bins` equal half-open intervals of [-pi, pi), with pi counted as
    -pi; NaN if an angle is not finite. Angles outside of [-pi, pi] count as -pi. Records hold angles in this form.

    Example::

        >>> angle_histogram(torch.tensor([-3.0, 0.5, 0.6, 3.1]), bins=4)
        [1, 0, 2, 1]
    """
    integer("bins", bins)
    angles = vector("angles", angles)
    if not bool(angles.isfinite().all()):
        return [math.nan] * bins
    part = ((angles.clamp(-math.pi, math.pi) + math.pi) * (bins / (2 * math.pi))).floor().long() % bins
    return torch.bincount(part, minlength=bins).tolist()


def diagnose_recurrence(module: Any, *, eigenvalues: bool = True) -> dict[str, Any]:
    """The spectral statistics of all recurrent matrices of a module, as a record for metrics.jsonl.

    The cost is one eigenvalue decomposition per recurrence, and for a dense W one singular value decomposition:
    together about 10 ms for N = 128 and 0.3 s for N = 512. A factorized recurrence needs no singular value
    decomposition, and the eigenvalues of a matrix [K, K].

    Args:
        module: a recurrence of orthokern.nn, or an object with their `num_layers`, `bidirectional` and
            `recurrent_matrix(layer, reverse)`; `singular_values(layer, reverse)`, `latent_matrix(layer, reverse)`
            and `orthogonality_error()` are used if it has them.
        eigenvalues: also compute "spectral_radius", "eigenvalue_moduli" and "eigenvalue_angles".

    Returns:
        "spectrum" (as `summarize_spectrum`), "spectral_radius", "eigenvalue_moduli" (of |lambda|, as
        `summarize_spectrum`; for a normal matrix they equal the singular values), "eigenvalue_angles" (as
        `angle_histogram`); for a factorized recurrence of rank K < N, without the N - K zeros. The first recurrence has
        these names. The names of the others end in "_l0_reverse", "_l1", ..., like the names of parameters.
        "orthogonality_error": the largest |M^T M - I| of all bases (of P in an ExpRNN or NonNormalRNN), if the module
        has bases.
        All numbers of a matrix that is not finite are NaN, except the "spectrum" of a factorized recurrence, which is
        that of its parameter.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> "spectral_radius" in str(diagnose_recurrence(FactorizedRNN(3, 8)))
        True
    """
    missing = [name for name in ("num_layers", "bidirectional", "recurrent_matrix") if not hasattr(module, name)]
    if missing:
        kind = type(module).__name__
        raise InputError(f"module must be a recurrence of orthokern.nn, got {kind} without {', '.join(missing)}")
    singular_values, error = (getattr(module, name, None) for name in ("singular_values", "orthogonality_error"))
    record: dict[str, Any] = {}
    places = [(i, r) for i in range(module.num_layers) for r in ((False, True) if module.bidirectional else (False,))]
    with torch.no_grad():
        for index, (layer, reverse) in enumerate(places):
            suffix = f"_l{layer}{'_reverse' if reverse else ''}" if index else ""
            w = None
            if singular_values is None or eigenvalues:
                w = getattr(module, "latent_matrix", module.recurrent_matrix)(layer, reverse)
            s = svdvals(w) if singular_values is None else singular_values(layer, reverse)
            record[f"spectrum{suffix}"] = summarize_spectrum(s)
            if eigenvalues:
                values = _eigenvalues(w)
                record[f"spectral_radius{suffix}"] = values.abs().max().item()
                record[f"eigenvalue_moduli{suffix}"] = summarize_spectrum(values.abs())
                record[f"eigenvalue_angles{suffix}"] = angle_histogram(values.angle())
        if error is not None:
            record["orthogonality_error"] = float(error())
    return record


def exact(name: str, value: Any, accepted: str, fits: bool) -> Tensor:
    """The value in float64 on the CPU, if it is a tensor of real numbers and `fits`; InputError otherwise."""
    if not isinstance(value, Tensor) or value.is_complex() or not fits:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name} must be {accepted} of real numbers, got {got}")
    strided(name, value)
    return value.detach().double().cpu()


def vector(name: str, value: Any) -> Tensor:
    """`exact` of a tensor [N], N at least 1."""
    return exact(name, value, "a tensor [N], N at least 1,", getattr(value, "ndim", 0) == 1 and len(value) > 0)


def square(name: str, value: Any) -> Tensor:
    """`exact` of a square matrix [N, N], N at least 1."""
    shape = tuple(getattr(value, "shape", ()))
    return exact(name, value, "a square matrix [N, N]", len(shape) == 2 and 0 < shape[0] == shape[1])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs LAPACK with one thread. It splits these small matrices into thousands of small pieces: several threads are
    no faster, and many times slower if another process uses a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def svdvals(w: Any) -> Tensor:
    """[N] float64 on the CPU, or NaN if w is not finite, which LAPACK rejects."""
    w = square("w", w)
    if not bool(w.isfinite().all()):
        return w.new_full((len(w),), math.nan)
    with _one_thread():
        return robust_svdvals(w)


def _eigenvalues(w: Any) -> Tensor:
    """[N] complex128 on the CPU, or NaN if w is not finite or LAPACK fails."""
    w = square("w", w)
    if bool(w.isfinite().all()):
        with _one_thread(), suppress(LinAlgError):
            return torch.linalg.eigvals(w) + 0.0  # -0.0 has the angle pi
    return torch.full((len(w),), complex(math.nan, math.nan), dtype=torch.complex128, device="cpu")
