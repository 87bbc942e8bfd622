"""Learned orthogonality: the descent step by step, batches, guard, divergence, the published steps, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from checks import gram_error
from helpers import refused
from torch import Tensor

from orthokern import InputError, init
from orthokern.init import learned_orthogonal_


def normal(*shape: int, std: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (std * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


def descend(w: Tensor, lr: float, tol: float, most: int) -> tuple[Tensor, int]:
    """The paper's rule by autograd, one matrix at a time: eq. 16 and 17."""
    w = w.detach().clone().requires_grad_()
    for step in range(most + 1):
        n, m = w.shape
        gram = w @ w.mT if n <= m else w.mT @ w
        error = (gram - torch.eye(min(n, m), dtype=w.dtype)).square().sum()
        if error < tol or step == most:
            return w.detach(), step
        (gradient,) = torch.autograd.grad(error, w)
        w = (w - lr * gradient).detach().requires_grad_()
    raise AssertionError


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("lr", [0.1, 0.03])
def test_every_step_is_the_gradients(shape: tuple[int, int], lr: float) -> None:
    w = normal(*shape, std=0.4)
    for most in (1, 2, 7, 400):
        expected, steps = descend(w, lr, 1e-12, most)
        ours = w.clone()
        result = learned_orthogonal_(ours, lr, 1e-12, most)
        assert result.steps.item() == steps and result.steps.shape == ()
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(result.error, gram_error(ours), rtol=1e-6, atol=1e-20)
        assert result.converged.item() == (gram_error(expected) < 1e-12).item()
        assert result.scale.item() == 1 and not result.diverged
    assert result.converged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_is_its_matrices(dtype: torch.dtype) -> None:
    """Whatever the strides: counts are equal, entries up to rounding."""
    matrices = normal(3, 5, 8, 6, std=0.3, dtype=dtype)
    batch = matrices.mT.contiguous().mT
    result = learned_orthogonal_(batch)
    assert result.steps.shape == result.error.shape == (3, 5) and result.error.dtype == dtype
    assert result.converged.all() and len(result.steps.unique()) > 3
    for index, one in enumerate(matrices.flatten(0, 1)):
        assert learned_orthogonal_(one).steps == result.steps.flatten()[index]
        atol = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(batch.flatten(0, 1)[index], one, rtol=0, atol=atol)
    assert float(gram_error(batch).max()) < 1e-6


def test_the_plain_rule_diverges_and_says_so() -> None:
    """Singular values beyond sqrt(1 + 1 / (2 lr)) grow without end; what converges beside them does."""
    limit = math.sqrt(1 + 1 / 0.2)
    q = init.haar_orthogonal_(torch.empty(4, 5, 5, dtype=torch.float64), torch.Generator().manual_seed(0))
    s = torch.full((4, 5), 0.7, dtype=torch.float64)
    s[:, 2] = torch.tensor([0.999, 1.001, 100.0, 1e200]) * limit
    s[2] = 1e155  # the error itself overflows float64
    s[3, 2] = 100.0
    w = q * s.unsqueeze(-2)
    before = w.clone()
    plain = learned_orthogonal_(w, guard=False)
    assert plain.converged.tolist() == [True, False, False, False]
    assert plain.diverged.tolist() == [False, True, True, True]
    assert torch.equal(w[1:], before[1:])  # as they were, and finite
    torch.testing.assert_close(plain.error[[1, 3]], gram_error(before[[1, 3]]))
    assert int(plain.steps[1]) > int(plain.steps[3])
    guarded = learned_orthogonal_(before)
    assert guarded.converged.all() and float(gram_error(before).max()) < 1e-6
    assert (guarded.scale < 1).all()  # 0.999 is too near the edge for the guard, too


@pytest.mark.parametrize("std", [1e-15, 0.1, 3.0, 1e15])
def test_the_guard_at_any_scale(std: float) -> None:
    w = normal(3, 30, 40, std=std, dtype=torch.float32)
    result = learned_orthogonal_(w)
    assert result.converged.all() and int(result.steps.max()) < 200
    assert float(gram_error(w).max()) < 2e-6
    assert ((result.scale == 1) == (std < 1)).all()


def test_refusals() -> None:
    w = torch.randn(2, 3, 4)
    before = w.clone()
    bad = w.clone()
    bad[1, 2, 3] = math.nan
    for call, message in (
        (lambda: learned_orthogonal_(bad), "W[1] has an entry that is not finite; accepted"),
        (
            lambda: learned_orthogonal_(torch.randn(3)),
            "W must be matrices [..., N, K] with N and K at least 1, got shape [3]",
        ),
        (lambda: learned_orthogonal_(w.half()), "float32 or float64, got torch.float16"),
        (lambda: learned_orthogonal_(w, lr=0.25), "lr must be a number above 0 and below 0.25, got 0.25"),
        (lambda: learned_orthogonal_(w, max_steps=0), "max_steps must be an integer of at least 1, got 0"),
        (lambda: learned_orthogonal_(w, tol=1e-13), "tol must be a finite number above 2.7e-13, the rounding of"),
    ):
        refused(call, message)
    assert torch.equal(w, before)
    assert learned_orthogonal_(torch.empty(2, 3, 3, device="meta")).steps.shape == (2,)


def test_starts_from_normal_numbers() -> None:
    w = init.normal_(torch.empty(400, 300), 0.02, torch.Generator().manual_seed(0))
    assert float(w.std()) == pytest.approx(0.02, rel=0.01) and abs(float(w.mean())) < 2e-4
    again = init.normal_(torch.empty(400, 300, dtype=torch.float64), 0.02, torch.Generator().manual_seed(0))
    assert torch.equal(again.float(), w)
    # learned from them: the polar factor of the very matrix that is drawn, however small it is
    for std in (1e-3, 0.5):
        drawn = init.normal_(torch.empty(40, 60, dtype=torch.float64), std, torch.Generator().manual_seed(1))
        u, _, vh = torch.linalg.svd(drawn, full_matrices=False)
        learned = init.learned_(torch.empty(40, 60), torch.Generator().manual_seed(1), std=std)
        torch.testing.assert_close(learned, (u @ vh).float(), rtol=0, atol=1e-6)
    # a thousand steps do not bring this to 1
    t = torch.zeros(3, 4)
    with pytest.raises(InputError, match="learned_: 1 of 1 matrices did not become orthogonal from std 1e-200;"):
        init.learned_(t, std=1e-200)
    assert not t.any()
