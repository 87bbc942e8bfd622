"""Initialisations: orthogonality, distributions, and reproducibility with a generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import gram_error
from module_kinds import EVERY

from orthokern import InputError, init
from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, LinearCrossEntropy, ModReLU

IN_PLACE = [init.haar_orthogonal_, init.henaff_, init.cayley_, init.identity_, init.glorot_, init.glorot_uniform_]
IN_PLACE += [init.learned_]


@pytest.mark.parametrize("fill", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reproducible_through_the_generator(fill: Any, dtype: torch.dtype) -> None:
    a, b = torch.empty(7, 7, dtype=dtype), torch.empty(7, 7, dtype=dtype)
    assert fill(a, torch.Generator().manual_seed(3)) is a
    before = torch.random.get_rng_state()
    fill(b, generator=torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(a, b)
    torch.manual_seed(3)
    assert torch.equal(fill(b), a)
    wide = fill(torch.empty(7, 7, dtype=torch.float64), torch.Generator().manual_seed(3))
    assert torch.equal(wide.to(dtype), a)  # the same numbers in every dtype


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (9, 4), (4, 9), (3, 8, 8), (2, 3, 7, 2)])
def test_haar_is_orthonormal(shape: tuple[int, ...]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        q = init.haar_orthogonal_(torch.empty(shape, dtype=dtype))
        assert gram_error(q).max() < tolerance**2


def test_haar_law() -> None:
    q = init.haar_orthogonal_(torch.empty(4000, 3, 3, dtype=torch.float64), torch.Generator().manual_seed(0))
    # mean 0 and variance 1/3; without the sign correction the mean of the diagonal would be far below zero
    assert float(q.mean(0).abs().max()) < 5 * math.sqrt(1 / 3 / 4000)
    assert float((q.square().mean(0) - 1 / 3).abs().max()) < 0.03
    assert abs(float((torch.linalg.det(q) > 0).double().mean()) - 0.5) < 0.04  # both components of O(3)


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_block_rotations(n: int) -> None:
    for fill in (init.henaff_, init.cayley_):
        w = fill(torch.empty(n, n, dtype=torch.float64))
        torch.testing.assert_close(w @ w.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-15)
        blocks = torch.block_diag(*[torch.ones(2, 2)] * (n // 2), *[torch.ones(1, 1)] * (n % 2)).bool()
        assert not w[~blocks].any()
        if n % 2:
            assert w[-1, -1] == 1


@pytest.mark.parametrize(("fill", "low", "high"), [(init.henaff_, -math.pi, math.pi), (init.cayley_, 0, math.pi / 2)])
def test_angles_are_uniform(fill: Any, low: float, high: float) -> None:
    w = fill(torch.empty(2000, 2000, dtype=torch.float64))
    a = torch.atan2(w.diagonal(1)[::2], w.diagonal()[::2])  # signed, of the 2x2 blocks [[cos, sin], [-sin, cos]]
    margin = 0.02 * (high - low)
    assert low <= float(a.min()) < low + margin and high - margin < float(a.max()) <= high
    assert abs(float(a.mean()) - (low + high) / 2) < 0.04 * (high - low)
    assert abs(float(a.var()) * 12 / (high - low) ** 2 - 1) < 0.12
    block, turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64), a[0]
    if fill is init.henaff_:
        expected = torch.matrix_exp(turn * block)
    else:  # the Cayley map of -tan(a / 2)
        eye = torch.eye(2, dtype=torch.float64)
        s = -torch.sqrt((1 - turn.cos()) / (1 + turn.cos()))
        expected = torch.linalg.solve(eye + s * block, eye - s * block)
    torch.testing.assert_close(expected, w[:2, :2])


def test_identity_and_glorot() -> None:
    assert torch.equal(init.identity_(torch.empty(3, 5)), torch.eye(3, 5))
    for fill in (init.glorot_, init.glorot_uniform_):
        w = fill(torch.empty(300, 500, dtype=torch.float64))
        assert abs(float(w.var()) / (2 / 800) - 1) < 0.02 and abs(float(w.mean())) < 1e-3
    assert 0.999 < float(w.abs().max()) / math.sqrt(6 / 800) <= 1


@pytest.mark.parametrize("name", init.INITS)
def test_factors_compose_to_the_named_matrix(name: str) -> None:
    n = 7
    u, v = torch.empty(n, n, dtype=torch.float64), torch.empty(n, n, dtype=torch.float64)
    s = torch.empty(n, dtype=torch.float64)
    init.factorized_(u, s, v, name, torch.Generator().manual_seed(1))
    w = (u * s) @ v.T
    eye = torch.eye(n, dtype=torch.float64)
    for basis in (u, v):
        torch.testing.assert_close(basis.T @ basis, eye, rtol=0, atol=1e-14)
    if name == "identity":
        torch.testing.assert_close(w, eye, rtol=0, atol=1e-14)
    elif name in init.UNCONSTRAINED:
        same = init.INITS[name](torch.empty(n, n, dtype=torch.float64), torch.Generator().manual_seed(1))
        torch.testing.assert_close(w, same, rtol=0, atol=1e-14)
    else:
        assert torch.equal(s, torch.ones_like(s))
        torch.testing.assert_close(w @ w.T, eye, rtol=0, atol=1e-14)
        assert float((v - eye).abs().max()) > 0.1  # not the coordinate axes


def test_thin_factors() -> None:
    u, s, v = (torch.empty(shape, dtype=torch.float64) for shape in ((9, 4), 4, (9, 4)))
    init.factorized_(u, s, v, "glorot", torch.Generator().manual_seed(1))
    w = init.glorot_(torch.empty(9, 9, dtype=torch.float64), torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(w)
    torch.testing.assert_close((u * s) @ v.T, (left[:, :4] * values[:4]) @ right[:4])


@pytest.mark.parametrize("name", [name for name in init.INITS if name not in init.UNCONSTRAINED])
@pytest.mark.parametrize(("n", "k"), [(9, 4), (200, 5)])
def test_orthogonal_starts_of_lower_rank(name: str, n: int, k: int) -> None:
    u, s, v = (torch.empty(*shape, dtype=torch.float64) for shape in ((n, k), (k,), (n, k)))
    init.factorized_(u, s, v, name, torch.Generator().manual_seed(1))
    for basis in (u, v):
        torch.testing.assert_close(basis.T @ basis, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(u @ (u.T @ v), v, rtol=0, atol=1e-14)  # one subspace
    values = torch.linalg.eigvals((u * s) @ v.T)
    modulus, kept = values.abs().sort(descending=True)
    torch.testing.assert_close(modulus, (torch.arange(n) < k).double(), rtol=0, atol=1e-13)
    angles = values[kept[:k]].angle().abs()
    if name == "identity":
        assert float(angles.max()) < 1e-13
    elif name == "cayley":
        assert float(angles.max()) < math.pi / 2 and int((angles < 1e-13).sum()) == k % 2


def test_meta_and_bad_tensors() -> None:
    for fill in IN_PLACE:
        assert fill(torch.empty(4, 4, device="meta")).is_meta
        for bad, message in ((torch.zeros(4), "shape"), (torch.zeros(2, 2, dtype=torch.int64), "int64"), (3, "int")):
            with pytest.raises(InputError, match=message):
                fill(bad)
    for fill in (init.henaff_, init.cayley_):
        with pytest.raises(InputError, match=r"square matrices \[..., N, N\], got shape \[4, 3\]"):
            fill(torch.empty(4, 3))
    with pytest.raises(InputError, match="did you mean 'henaff'"):
        init.initialize_(torch.empty(4, 4), "hennaf")
    for std in ("a", 0.0, float("nan")):
        with pytest.raises(InputError, match="std must be finite and above 0, got"):
            init.normal_(torch.empty(4, 4), std)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown init"):
        init.factorized_(torch.empty(4, 4), torch.empty(4), torch.empty(4, 4), "haar")


@pytest.mark.parametrize("model", [FactorizedRNN, RNN, ExpRNN])
@pytest.mark.parametrize("name", ["henaff", "cayley"])
def test_modules_start_with_no_larger_angle(model: Any, name: str) -> None:
    rnn = model(1, 200, init=name, max_angle=0.3, dtype=torch.float64)
    eigenangles = torch.linalg.eigvals(rnn.recurrent_matrix().detach()).angle().abs()
    assert 0.28 < float(eigenangles.max()) < 0.3 + 1e-12
    assert "max_angle=0.3" in repr(rnn) and "max_angle" not in repr(model(1, 200, init=name))
    for bad in (0.0, 3.2, math.nan, True, "0.3"):
        with pytest.raises(InputError, match="max_angle must be an angle in radians, above 0 and at most pi"):
            model(1, 4, init=name, max_angle=bad)
    with pytest.raises(InputError, match="max_angle=0.3 with init 'orthogonal'; accepted with init 'henaff', 'cayley'"):
        model(1, 4, init="orthogonal", max_angle=0.3)


def test_the_published_angles_are_the_default() -> None:
    published = {"henaff": math.pi, "cayley": math.pi / 2}
    tables = (init.initialize_, published), (init.skew_generator_, init.SKEW_ANGLES)
    for fill, name, angle in ((fill, *row) for fill, table in tables for row in table.items()):
        plain = fill(torch.empty(9, 9), name, torch.Generator().manual_seed(0))
        assert torch.equal(plain, fill(torch.empty(9, 9), name, torch.Generator().manual_seed(0), max_angle=angle))


MODULES: dict[str, Callable[..., Any]] = {
    **EVERY,
    "henaff and modrelu": partial(RNN, nonlinearity="modrelu", init="henaff"),
    "kanai": partial(GRU, init="kanai"),
    "readout": LinearCrossEntropy,
    "activation": lambda _, features, **options: ModReLU(features, **options),
}


@pytest.mark.parametrize("kind", MODULES)
def test_generators_of_modules(kind: str) -> None:
    module, globally = MODULES[kind](3, 4), torch.get_rng_state()
    for wrong in (0, SimpleNamespace(device=torch.device("cuda:0"))):
        with pytest.raises(InputError, match="generator must be a CPU torch.Generator or None, got"):
            module.reset_parameters(wrong)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    MODULES[kind](3, 4, device="meta").reset_parameters(generator)
    assert torch.equal(generator.get_state(), before)
    module.reset_parameters(generator)
    assert not torch.equal(generator.get_state(), before) and torch.equal(torch.get_rng_state(), globally)
