"""robust_svd: every method is accurate, and one that fails is replaced by the next one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orthokern import _decompositions
from orthokern._decompositions import LinAlgError, robust_eigh, robust_svd, robust_svdvals


def matrix(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    a = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    if kind == "equal values":  # as a clip leaves them
        a = (u * s.clamp_max(float(s.median())).unsqueeze(-2)) @ vh
    elif kind == "low rank":
        a = (u * torch.where(s >= s.amax(-1, keepdim=True), s, 0.0).unsqueeze(-2)) @ vh
    elif kind == "large":
        a = a * (1e30 if dtype == torch.float32 else 1e200)
    return a.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 40), (2, 3, 20, 10)], ids=str)
@pytest.mark.parametrize("kind", ["random", "equal values", "low rank", "large"])
@pytest.mark.parametrize("method", _decompositions._METHODS, ids=lambda method: method.__name__)
def test_every_method(method: Any, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = matrix(kind, shape, dtype)
    u, s, vh = method(a)
    assert _decompositions._is_accurate(a, u, s, vh)
    largest = float(s.max()) or 1.0
    expected = torch.linalg.svdvals(a.double() / largest)
    torch.testing.assert_close(s.double() / largest, expected, rtol=0, atol=200 * torch.finfo(dtype).eps)
    assert u.dtype == s.dtype == vh.dtype == dtype


@pytest.mark.parametrize("result", ["raises", "NaN", "inaccurate"])
def test_a_method_that_fails_is_replaced(result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = matrix("equal values", (12, 12), torch.float64)

    def failing(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if result == "raises":
            raise LinAlgError("failed to converge")
        u, s, vh = torch.linalg.svd(a)
        return (u * torch.nan, s, vh) if result == "NaN" else (u, s, vh + 1e-9)

    methods = _decompositions._METHODS
    monkeypatch.setattr(_decompositions, "_METHODS", (failing, *methods[1:]))
    u, s, vh = robust_svd(a)
    torch.testing.assert_close((u * s) @ vh, a, rtol=0, atol=1e-13)
    monkeypatch.setattr(_decompositions, "_METHODS", (failing,))
    with pytest.raises(LinAlgError, match=r"matrix of shape \[12, 12\]"):
        robust_svd(a)


def test_values_and_eigenvectors_where_the_driver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.linalg.svdvals(a)
    (gradient,) = torch.autograd.grad((expected - 1).square().sum(), a)
    true_eigh = torch.linalg.eigh

    def failing(a: Tensor, UPLO: str = "L") -> Any:
        if UPLO == "L":
            raise LinAlgError("failed to converge")
        return true_eigh(a, UPLO=UPLO)

    monkeypatch.setattr(torch.linalg, "svdvals", failing)
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    values = robust_svdvals(a)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(torch.autograd.grad((values - 1).square().sum(), a)[0], gradient)
    h = torch.randn(5, 5, dtype=torch.complex128)
    h = h + h.mH
    values, vectors = robust_eigh(h)
    torch.testing.assert_close(vectors @ torch.diag(values.to(h.dtype)) @ vectors.mH, h)
