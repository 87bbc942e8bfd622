"""Fisher memory: totals of chains, a truncated sum, normal networks, delay lines, bad input."""

from __future__ import annotations

import pytest
import torch
from helpers import refused
from torch import Tensor

from orthokern.diagnostics import fisher_memory, transient_norms
from orthokern.init import haar_orthogonal_
from orthokern.reproduce.fisher import chain

F64 = torch.float64


def test_totals_where_the_covariance_is_beyond_float64() -> None:
    """Expected: the same sums in arithmetic of 400 bits. What is left of 32 digits is 8 or 7, by the order of sums."""
    assert fisher_memory(*chain(0.95, 0, 0.2)).total == pytest.approx(11.939388931674648, rel=1e-6)
    assert fisher_memory(*chain(1.05, 0.005, 0.2)).total == pytest.approx(20.884657370971432, rel=1e-6)
    assert fisher_memory(*chain(1, 0, 0.2)).total == pytest.approx(16.298225175005534, rel=1e-6)


def test_against_the_truncated_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    v = 0.3 * torch.randn(6, 6, generator=generator, dtype=F64)
    u = torch.randn(6, generator=generator, dtype=F64)
    covariance, power = torch.zeros(6, 6, dtype=F64), torch.eye(6, dtype=F64)
    for _ in range(2000):
        covariance += 0.3 * power @ power.mT
        power = v @ power
    result = fisher_memory(v, u, 0.3, steps=300)
    states = [u]
    for _ in range(299):
        states.append(v @ states[-1])
    h = torch.stack(states, 1)
    expected = h.mT @ torch.linalg.solve(covariance, h)
    assert torch.allclose(result.covariance, covariance, rtol=1e-10)
    assert torch.allclose(result.matrix, expected, rtol=1e-8, atol=1e-12)
    assert result.total == pytest.approx(float(expected.trace()), rel=1e-8)


def test_a_normal_network_has_the_same_total_whatever_it_is() -> None:
    q = haar_orthogonal_(torch.empty(8, 8, dtype=F64), torch.Generator().manual_seed(1))
    u = torch.full((8,), 0.5, dtype=F64)
    for scale in (0.1, 0.9, 0.999):
        assert fisher_memory(scale * q, u, 0.25).total == pytest.approx(2.0 / 0.25, rel=1e-8)
        norms = transient_norms(scale * q, u, steps=20)
        assert torch.allclose(norms, 2**0.5 * scale ** torch.arange(20, dtype=F64))
    several = torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    alone = [transient_norms(q + 0.1, column, steps=5) for column in several.unbind(1)]
    assert torch.allclose(transient_norms(q + 0.1, several, steps=5), torch.stack(alone, 1))
    theta, source = chain(1.05, 0, 0.2)
    grown = transient_norms(theta, source)
    assert float(grown.max()) > 1e6 and float(grown[-1]) < float(grown.max())


@pytest.mark.parametrize(
    ("v", "u", "options", "words"),
    [
        (torch.eye(3), torch.ones(3), {}, ["v is not stable"]),
        (torch.ones(2, 3), torch.ones(2), {}, ["v must be a square matrix", "[2, 3]"]),
        (torch.zeros(2, 2), torch.ones(3), {}, ["u must be a tensor [N] = [2]", "got torch.float32 [3]"]),
        (torch.zeros(2, 2), torch.ones(2), {"noise": 0.0}, ["noise", "above 0"]),
        (torch.zeros(2, 2).to(torch.complex64), torch.ones(2), {}, ["v must be", "complex64"]),
    ],
)
def test_refusals(v: Tensor, u: Tensor, options: dict[str, object], words: list[str]) -> None:
    refused(lambda: fisher_memory(v, u, **options), *words)  # type: ignore[arg-type]
