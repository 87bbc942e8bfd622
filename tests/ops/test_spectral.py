"""The kernels of the spectral-norm projection, on the CPU and in the reference, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orthokern import dispatch, ops

assert ops.NAMES  # importing the ops registers their SUPPORT tables
DTYPES = (torch.float32, torch.float64)
# Around the widths of vectors, panels (32 or fewer) and chunks (256, 512), and the smallest.
SHAPES = ((1, 1), (1, 5), (7, 3), (16, 16), (33, 31), (64, 65), (300, 97), (97, 130), (513, 260), (20, 600))


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


@pytest.fixture(params=["cpu", "reference"])
def spectral(request: pytest.FixtureRequest) -> Any:
    why = dispatch.absence("spectral", request.param)
    if why is not None:
        pytest.skip(why)
    return dispatch.leaf("spectral", request.param)


def assert_near(actual: Tensor, exact: Tensor, dtype: torch.dtype, scale: float) -> None:
    assert actual.shape == exact.shape
    worst = float((actual.double() - exact).abs().max())
    assert worst <= 4 * torch.finfo(dtype).eps * scale, worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram(spectral: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = torch.randn(shape, dtype=dtype)
    gram, exact = spectral.gram(w), w.double().mT @ w.double()
    assert_near(gram, exact, dtype, scale=shape[0] ** 0.5 * float(exact.abs().max()))
    again = spectral.gram(w.mT.contiguous().mT)  # of a transposed view
    assert_near(again, exact, dtype, scale=shape[0] ** 0.5 * float(exact.abs().max()))
    if spectral.__name__ == "orthokern.cpu.spectral":
        assert torch.equal(gram, gram.mT) and torch.equal(again, gram)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 15, 16, 31, 32, 33, 64, 95, 130, 257, 600])
def test_is_definite(spectral: Any, size: int, dtype: torch.dtype) -> None:
    """l I - A on both sides of A's largest eigenvalue, which lies anywhere in the spectrum's directions."""
    w = torch.randn(size, size, dtype=torch.float64)
    exact = w.mT @ w / size
    largest = float(torch.linalg.eigvalsh(exact)[-1])
    a = -exact.to(dtype)
    upper = torch.where(torch.ones(size, size).triu(1).bool(), a, torch.nan)  # nothing else is to be read
    for part, expected in ((1.001, True), (0.999, False)):
        diagonal = (largest * part - exact.diagonal()).to(dtype)
        assert spectral.is_definite(a, diagonal) is expected
        assert spectral.is_definite(upper, diagonal) is expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_bad_pivot_is_seen_wherever_it_stands(spectral: Any, dtype: torch.dtype) -> None:
    size = 70
    a, ones = torch.zeros(size, size, dtype=dtype), torch.ones(size, dtype=dtype)
    assert spectral.is_definite(a, ones)
    for at in (0, 1, 15, 31, 32, 63, 64, 69):
        for value in (0.0, -1e-30, torch.nan, torch.inf):
            diagonal = ones.clone()
            diagonal[at] = value
            assert not spectral.is_definite(a, diagonal), (at, value)
    for row, column in ((0, 1), (3, 40), (33, 69)):  # its determinant is negative
        b = a.clone()
        b[row, column] = b[column, row] = 1.001
        assert not spectral.is_definite(b, ones)
        b[row, column] = b[column, row] = torch.nan
        assert not spectral.is_definite(b, ones)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_passes(spectral: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    w, other = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    for b in (None, other):
        exact = float(torch.linalg.matrix_norm(w.double() - (0 if b is None else b.double())))
        assert spectral.distance(w, b) == pytest.approx(exact, rel=shape[1] * torch.finfo(dtype).eps)
    for columns in (1, 4, 9):
        v = torch.randn(shape[1], columns, dtype=torch.float64)
        image = spectral.wide_product(w, v)
        assert_near(image, w.double() @ v, torch.float64, scale=shape[1] * float(v.abs().max()))
        before = w.clone()
        rest = spectral.subtract_product(w, image, v)
        assert rest.dtype == dtype and torch.equal(w, before)
        exact = w.double() - image @ v.mT
        assert_near(rest, exact, dtype, scale=float(exact.abs().max()))


@pytest.mark.parametrize("spectral", ["cpu"], indirect=True)
def test_the_bits_depend_on_no_number_of_threads(spectral: Any) -> None:
    w = torch.randn(400, 390)
    a = torch.eye(390) * 5e3 - w.mT @ w
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append((spectral.gram(w), spectral.distance(w), spectral.is_definite(a, a.diagonal())))
    for gram, distance, definite in found[1:]:
        assert torch.equal(gram, found[0][0]) and (distance, definite) == found[0][1:]
