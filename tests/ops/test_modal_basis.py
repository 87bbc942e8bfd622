"""The eigenbasis of a recurrent matrix, and its refinement."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orthokern import init
from orthokern.ops.modal.basis import Basis, diagonalise, to_real

MARGINS = (0.0, 0.001, 0.1, 0.3, 1.0, None)
EPSILON = torch.finfo(torch.float64).eps
PARTS = ("values", "right", "left")


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def haar(N: int, seed: int) -> Tensor:
    q, r = torch.linalg.qr(randn(N, N, seed=seed))
    return q * r.diagonal().sign()


def factored(N: int, K: int, margin: float | None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """u, s, v with s uniform in 1 +- margin, or N(0, 1) for None."""
    noise = torch.rand(K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    s = randn(K, seed=seed) if margin is None else 1 + margin * (2 * noise - 1)
    return haar(N, 2 * seed + 1)[:, :K].clone(), s, haar(N, 2 * seed + 2)[:, :K].clone()


def dense(N: int, margin: float | None) -> Tensor:
    u, s, v = factored(N, N, margin)
    return (u * s) @ v.mT


def started(name: str, N: int) -> Tensor:
    """A start of orthokern.init as float64."""
    w = torch.empty(N, N)
    init.initialize_(w, name, torch.Generator().manual_seed(0))
    return w.double()


def block(basis: Basis) -> Tensor:
    """L [2M, 2M], the blocks of the eigenvalues."""
    values = torch.diag(basis.values)
    return to_real(torch.stack([values, torch.zeros_like(values)]))


def check(w: Tensor, basis: Basis) -> None:
    N, M = len(w), len(basis.re)
    assert basis.right.shape == (N, 2 * M) and basis.left.shape == (2 * M, N)
    assert (basis.im >= 0).all() and 2 * int((basis.im > 0).sum()) + int((basis.im == 0).sum()) == N
    tolerance = 64 * EPSILON * N * basis.condition + 1e-12
    assert (basis.right @ basis.left - torch.eye(N, dtype=torch.float64)).abs().max() < tolerance
    assert (basis.right @ block(basis) @ basis.left - w).abs().max() < tolerance * max(1.0, float(w.abs().max()))
    real = torch.cat([torch.zeros(M, dtype=torch.bool), basis.im == 0])
    assert not basis.right[:, real].any() and not basis.left[real].any()
    expected = torch.linalg.eigvals(w)
    actual = torch.cat([basis.values, basis.values[basis.im > 0].conj()])
    assert (actual[:, None] - expected).abs().min(0).values.max() < 1e-6  # a double eigenvalue splits by sqrt(epsilon)


STARTS = ("orthogonal", "henaff", "cayley", "identity", "glorot", "glorot-uniform", "learned")


@pytest.mark.parametrize("margin", [*MARGINS, *STARTS])
@pytest.mark.parametrize("N", [1, 2, 17, 128])
def test_basis(N: int, margin: float | str | None) -> None:
    w = started(margin, N + 1) if isinstance(margin, str) else dense(N, margin)
    basis = diagonalise(w)
    check(w, basis)
    if margin == 0.0:
        assert basis.condition == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("N", [2, 17, 128])
@pytest.mark.parametrize("margin", MARGINS)
def test_refinement_agrees_with_a_fresh_solution(N: int, margin: float | None) -> None:
    w = dense(N, margin)
    basis = diagonalise(w)
    moved = w + 1e-6 * randn(N, N, seed=9)
    refined = diagonalise(moved, basis.right)
    assert 1 <= refined.steps <= 3
    check(moved, refined)
    fresh = diagonalise(moved)
    assert len(refined.re) == len(fresh.re)
    assert (refined.values[:, None] - fresh.values).abs().min(1).values.max() < 1e-10
    same = diagonalise(moved, refined.right)  # its own result is a fixed point, bit for bit
    assert same.steps == 0 and all(torch.equal(getattr(refined, name), getattr(same, name)) for name in PARTS)


@pytest.mark.parametrize("start", ["of another matrix", "of another kind", "NaN", "zeros"])
def test_a_wrong_start_is_found_out(start: str) -> None:
    w = dense(24, 0.1)
    right = diagonalise(w).right
    wrong = {
        "of another matrix": diagonalise(haar(24, 77)).right,
        "of another kind": torch.cat([torch.eye(24, dtype=torch.float64), torch.zeros(24, 24, dtype=torch.float64)], 1),
        "NaN": torch.full_like(right, torch.nan),
        "zeros": torch.zeros_like(right),
    }[start]
    basis, fresh = diagonalise(w, wrong), diagonalise(w)
    assert all(torch.equal(getattr(basis, name), getattr(fresh, name)) for name in PARTS)


def test_eigenvalues_that_become_real() -> None:
    """Two conjugate eigenvalues meet on the real axis: the basis of before has another form, and is given up."""

    def w(x: float) -> Tensor:
        return torch.tensor([[1.0, x], [1e-3, 1.0]], dtype=torch.float64)

    before = diagonalise(w(-1e-3))
    assert len(before.re) == 1
    after = diagonalise(w(1e-3), before.right)
    assert len(after.re) == 2 and (after.im == 0).all()
    check(w(1e-3), after)


@pytest.mark.parametrize(("N", "K"), [(2, 1), (17, 5), (40, 39), (33, 16)])
def test_thin_rank(N: int, K: int) -> None:
    u, s, v = factored(N, K, 0.1)
    w = (u * s) @ v.mT
    basis = diagonalise(w, v=v)
    assert basis.nulls == N - K and not basis.values[len(basis.re) - (N - K) :].any()
    check(w, basis)
    turned = torch.linalg.qr(v + 1e-5 * randn(N, K, seed=6))[0]
    moved = (u * s) @ turned.mT
    refined = diagonalise(moved, basis.right, v=turned)
    check(moved, refined)
    assert refined.nulls == N - K
    # the basis of another null space is no basis of this matrix
    far = haar(N, 50)[:, :K]
    check((u * s) @ far.mT, diagonalise((u * s) @ far.mT, basis.right, v=far))
