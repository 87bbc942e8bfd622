"""cayley: the reference against the textbook form, kernels against the reference, the op's registration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks import check_cayley
from helpers import DTYPES, SHORT, bases, compiled, each, served, strided
from torch import Tensor

from orthokern import functional, ops
from orthokern.reference.cayley import cayley

NAMESPACE = torch.ops.orthokern


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 3), (9, 2), (6, 1), (3, 5, 4), (2, 3, 4, 4)], ids=str)
@pytest.mark.parametrize("lr", [1e-3, 1.0, -0.5])
def test_cayley_is_the_textbook_form_and_orthogonal(shape: tuple[int, ...], lr: float) -> None:
    m, g = bases(shape, torch.float64)
    a = g @ m.mT - m @ g.mT
    eye = torch.eye(shape[-2], dtype=torch.float64)
    expected = torch.linalg.inv(eye + lr / 2 * a) @ (eye - lr / 2 * a) @ m
    actual = cayley(m, g, lr)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    gram = torch.eye(shape[-1], dtype=torch.float64).expand(*shape[:-2], -1, -1)
    torch.testing.assert_close(actual.mT @ actual, gram, rtol=0, atol=1e-12)
    torch.testing.assert_close(cayley(m, torch.zeros_like(g), lr), m, rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------------------- kernels

SHAPES = [(1, 1), (5, 3), (33, 33), (64, 64), (65, 64), (130, 7), (17, 1), (2, 3, 12, 5), (2, 130, 130)]


@each("cayley")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_cayley_parity(op: str, backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    m, g = bases(shape, dtype)

    def step(m: Tensor, g: Tensor, lr: Tensor) -> Tensor:
        return NAMESPACE.cayley(m, g, lr, backend)

    for lr in [*map(torch.tensor, (1e-6, 1e-2, 1.0, -0.1)), torch.rand(shape[:-2], dtype=dtype)]:
        assert torch.equal(check_cayley(m, g, lr, step), step(strided(m), strided(g), lr))


@each("cayley")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", [(8, 3), (64, 16), (20, 19)], ids=str)
def test_thin_steps_of_any_size_stay_orthonormal(
    op: str, backend: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Also where the columns of [M, G] are dependent, and where g^T g leaves the range of the dtype."""
    m, random = bases(shape, dtype)
    symmetric = random[: shape[1]] + random[: shape[1]].mT
    limit = 1e-5 if dtype == torch.float32 else 1e-7
    for g in (random, m.clone(), m @ symmetric, random[:, :1] @ random[:1], m @ symmetric + 1e-4 * random):
        for lr in (0.1, 10.0, 1e4, torch.tensor(1e4), 1e38):
            for scale in (1e-30, 1.0, 1e36):
                new = functional.cayley(m, g * scale, lr / scale, backend=backend)
                assert (new.mT @ new - torch.eye(shape[1], dtype=dtype)).abs().max() < limit


# --------------------------------------------------------------------------------------------------------- registration


@pytest.mark.parametrize("backend", served("cayley"))
def test_opcheck_cayley(backend: str) -> None:
    for shape, lr in (((5, 5), torch.tensor(0.1)), ((2, 6, 3), torch.rand(2, dtype=torch.float64))):
        torch.library.opcheck(NAMESPACE.cayley.default, (*bases(shape, torch.float64), lr, backend))


def test_a_rate_of_numpy() -> None:
    m, g = torch.eye(6, 4), torch.randn(6, 4)
    assert torch.equal(functional.cayley(m, g, np.float32(0.5)), functional.cayley(m, g, 0.5))


def test_compiled_cayley() -> None:
    m, g = bases((2, 6, 4), torch.float32)
    for lr in (0.1, torch.rand(2)):
        torch.testing.assert_close(compiled(functional.cayley)(m, g, lr), functional.cayley(m, g, lr))
    torch.testing.assert_close(
        compiled(lambda m, g: ops.cayley.steps([(m, g, 0.1)])[0])(m, g), functional.cayley(m, g, 0.1)
    )


def test_cayley_has_no_derivative_but_the_reference_does() -> None:
    m, g = bases((4, 4), torch.float64)
    m.requires_grad_()
    with pytest.raises(RuntimeError, match="pass backend='reference'"):
        functional.cayley(m, g, 0.1).sum().backward()
    functional.cayley(m, g, 0.1, backend="reference").sum().backward()
    assert m.grad is not None
