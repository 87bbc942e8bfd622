"""The modal loss for matrices with all kinds of eigenvalues, without a basis of eigenvectors, and after training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_modal_basis import haar, randn
from test_scan_cross_entropy import IDS, compare, problem
from torch import Tensor

from orthokern import functional
from orthokern.errors import InputError
from orthokern.ops.modal import choice


def rotation(angle: float, size: float = 1.0) -> Tensor:
    a = torch.tensor(angle, dtype=torch.float64)
    return size * torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])])


def jordan(value: Tensor, size: float) -> Tensor:
    """Two equal blocks, and size times the unit matrix beside the diagonal: defective unless size is 0."""
    n = len(value)
    w = torch.block_diag(value, value)
    w[:n, n:] = size * torch.eye(n, dtype=torch.float64)
    return w


ONE = torch.ones(1, 1, dtype=torch.float64)
SPECTRA = {
    "real": torch.diag(torch.tensor([1.0, 0.9, -0.8, 0.3, -1.0, 0.0], dtype=torch.float64)),
    "real, not normal": torch.triu(torch.full((6, 6), 0.3), 1).double() + torch.diag(torch.arange(6.0) / 6).double(),
    "one real among pairs": torch.block_diag(rotation(0.4), 0.95 * ONE, rotation(2.0, 0.98)),
    "repeated, real": torch.block_diag(0.9 * ONE, 0.9 * ONE, 0.9 * ONE, rotation(0.7)),
    "repeated pairs": torch.block_diag(rotation(0.7), rotation(0.7), rotation(1.3), -ONE),
    "a pair and its double": torch.block_diag(rotation(0.7), rotation(0.7), rotation(0.7), ONE, ONE),
    **{
        f"gap {gap:g}": torch.block_diag(rotation(0.7), rotation(0.7 + gap), 0.9 * ONE, (0.9 + gap) * ONE)
        for gap in (1e-2, 1e-4, 1e-7, 1e-10, 1e-13, 1e-15)
    },
    **{f"nearly real, {angle:g}": torch.block_diag(rotation(angle), rotation(1.0)) for angle in (1e-3, 1e-8, 1e-14)},
}
DEFECTIVE = {
    "real": torch.block_diag(jordan(0.9 * ONE, 1.0), rotation(0.5)),
    "real, three": torch.eye(3, dtype=torch.float64) * 0.8 + torch.diag(torch.ones(2, dtype=torch.float64), 1),
    "pairs": jordan(rotation(0.7, 0.9), 0.5),
    "zero": jordan(0.0 * ONE, 1.0),
}


def turned(w: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """A problem with q w q^T for a random orthogonal q."""
    q, N = haar(len(w), 3), len(w)
    required, arguments = problem(IDS, N, N, 40, 3, dense=True)
    arguments["matrix"] = ((q @ w @ q.mT).requires_grad_(),)
    required[0] = arguments["matrix"][0]
    return required, arguments


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvalues that are real, repeated or nearly equal, with good eigenvectors: modal, and as exact as elsewhere."""
    required, arguments = turned(SPECTRA[name])
    compare(required, arguments, 1e-9, algorithm="modal")
    monkeypatch.setattr(choice, "multiply_adds", lambda call: (0.0, 1.0))
    compare(required, arguments, 1e-9)


@pytest.mark.parametrize("name", DEFECTIVE)
def test_defective(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a basis of eigenvectors: modal is refused in one line, auto goes step by step and says why."""
    required, arguments = turned(DEFECTIVE[name])
    line = "algorithm is 'modal': W is not safely diagonalisable: .*accepted is 'sequential'"
    with pytest.raises(InputError, match=line):
        functional.scan_cross_entropy(**arguments, algorithm="modal")
    monkeypatch.setattr(choice, "multiply_adds", lambda call: (0.0, 1.0))
    compare(required, arguments, 1e-10)
    result = functional.scan_cross_entropy(**arguments)
    assert result.basis is None and result.refused.startswith("W is not safely diagonalisable: ")


def near_block(N: int, gap: float, kind: str) -> Tensor:
    """A 2 x 2 block of eigenvectors that are nearly parallel, among orthogonal ones."""
    lower = [0.0, 0.9 + gap] if kind == "real" else [-gap, 0.9]
    block = torch.tensor([[0.9, 0.3], lower], dtype=torch.float64)
    if N == 2:
        return block
    q = haar(N, 3)
    return q @ torch.block_diag(block, 0.95 * haar(N - 2, 4)) @ q.mT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("N", [2, 8, 32])
@pytest.mark.parametrize("kind", ["real", "pair"])
@pytest.mark.parametrize("T", [1, 60])
def test_gaps(T: int, kind: str, N: int, dtype: torch.dtype) -> None:
    """Of two eigenvalues with nearly parallel eigenvectors: states, loss and gradients are right or refused."""
    target, cotangent = torch.arange(3 * T).view(T, 3) % 4, randn(T, 3, N, seed=6)
    bound, accepted = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype], []

    def results(leaves: list[Tensor], algorithm: str, dtype: torch.dtype) -> list[Tensor]:
        w, x, h0, readout = (leaf.to(dtype) for leaf in leaves)
        options = {"activation": "identity", "algorithm": algorithm}
        hs = functional.dense_scan(x, w, h0, **options)
        loss = functional.scan_cross_entropy(x, w, readout, target, h0, **options).loss
        of_states = torch.autograd.grad((hs * cotangent.to(dtype)).sum(), leaves[:3])
        return [hs, loss, *of_states, *torch.autograd.grad(loss, leaves)]

    for gap in (1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3):
        args = [near_block(N, gap, kind), *(randn(*size, seed=5) for size in ((T, 3, N), (3, N), (4, N)))]
        args[-1] /= N**0.5  # a saturated softmax has gradients of rounding errors
        leaves = [tensor.to(dtype).requires_grad_() for tensor in args]
        try:
            result = results(leaves, "modal", dtype)
        except InputError as error:
            assert "W is not safely diagonalisable: " in str(error)
            continue
        accepted.append(gap)
        for one, other in zip(result, results(leaves, "sequential", torch.float64), strict=True):
            assert (one.double() - other).norm() <= bound * other.norm(), gap
    assert 0.3 in accepted and (kind == "pair" or min(accepted) >= 1e-4)
