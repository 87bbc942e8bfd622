"""SpectralNormProjection: equal to a projection by a full SVD after every step, without work if a bound shows that none
is needed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import refused
from torch import Tensor, nn

from orthokern.errors import InputError
from orthokern.nn import GRU
from orthokern.optim import SpectralNormProjection


def norm(w: Tensor) -> float:
    w = w.detach().double()
    return float(torch.linalg.eigvalsh(w.mT @ w)[-1].sqrt())  # a third of the time of the singular values


def by_svd(w: Tensor, limit: float, trigger: float) -> Tensor:
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    return ((u * torch.where(s > trigger, limit, s)) @ vh).to(w.dtype)


def with_spectrum(s: Tensor, rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, len(s), dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(len(s), len(s), dtype=torch.float64, generator=generator))[0]
    return (u * s) @ v.mT


SPECTRA = {
    "one above": torch.cat([torch.tensor([2.3]), torch.linspace(1.7, 0, 129)]),
    "nothing above": torch.linspace(1.79, 0, 130),
    "a cluster above": torch.cat([torch.full((5,), 1.9), torch.full((20,), 1.8), torch.linspace(1.5, 0, 105)]),
    "just above and just below": torch.cat([torch.tensor([1.8002, 1.8001, 1.7999]), torch.linspace(1.79, 0.1, 127)]),
    "far above": torch.cat([torch.tensor([50.0, 3.0, 1.81]), torch.linspace(1.7, 0, 127)]),
    "ten above": torch.cat([torch.linspace(2.4, 1.81, 10), torch.linspace(1.78, 0, 120)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", ["2-delta", "2"])
@pytest.mark.parametrize("case", SPECTRA)
def test_the_projection_of_the_svd(case: str, threshold: str, dtype: torch.dtype) -> None:
    """From the block of a matrix near by: values in clusters, on both sides of the limit, square, tall and wide."""
    s = SPECTRA[case].double()
    for seed, rows in enumerate((130, 200)):
        w = with_spectrum(s, rows, seed)
        noise = torch.randn(rows, 130, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        near = with_spectrum(s.clamp_max(1.81), rows, seed) + 0.02 * noise / noise.norm()
        for flat in (False, True):
            matrix = (near.mT if flat else near).to(dtype).contiguous()
            projection = SpectralNormProjection([matrix], 0.2, threshold=threshold)
            projection.step()
            matrix.copy_(w.mT if flat else w)
            expected = by_svd(matrix, 1.8, projection.trigger)
            projection.step()
            tolerance = 1e-6 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(matrix, expected, rtol=0, atol=tolerance * float(s[0]))
            assert norm(matrix) <= projection.trigger * (1 + 1e-6)


def adversary(kind: str, w: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """A change of w made to get past the bound."""
    if kind == "random":
        return 0.1 / len(w) * torch.randn(w.shape, generator=generator)
    if kind == "tiny":
        return 1e-5 * torch.randn(w.shape, generator=generator)
    u, _, vh = torch.linalg.svd(w)
    if kind == "top":  # the largest singular value grows
        return 0.05 * torch.outer(u[:, 0], vh[0])
    i = step % len(w)  # "new": another direction in every step grows at once
    return 1.9 * torch.outer(u[:, i], vh[i])


def walk(kind: str, w: Tensor, steps: int) -> dict[str, int]:
    """Projects after every change of w, which is changed. What is within the bound is left alone, and every result is
    that of an SVD."""
    generator = torch.Generator().manual_seed(len(w))
    projection = SpectralNormProjection([w], 0.2)
    for step in range(steps):
        w += adversary(kind, w, step, generator)
        before = w.clone()
        projection.step()
        assert norm(w) <= 1.8 * (1 + 1e-6), step
        torch.testing.assert_close(w, by_svd(before, 1.8, 1.8), rtol=0, atol=5e-7)
        assert torch.equal(w, before) or norm(before) > 1.8
    return projection.counts


@pytest.mark.parametrize("kind", ["random", "tiny", "top", "new"])
def test_bounded_after_every_step(kind: str) -> None:
    """Many steps at a size of its own SVD, and some where the block method works."""
    small = walk(kind, 1.7 * torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))[0], 150)
    counts = walk(kind, with_spectrum(torch.linspace(1.79, 0.1, 100).double(), 100, 100).float(), 20)
    if kind == "tiny":
        assert small["checks"] == counts["checks"] == 0
        return
    assert small["projections"] > 0
    if kind in ("random", "top"):
        assert counts["decompositions"] <= 2


def test_attached_to_an_optimizer() -> None:
    """Training that grows the weights: every constrained block is kept, the others are left alone."""
    rnn = GRU(3, 20, 2, variant="kanai")
    projection = SpectralNormProjection(rnn, 0.5)
    optimizer = torch.optim.Adam(rnn.parameters(), lr=0.1)
    handle = projection.attach(optimizer)
    assert len(projection.matrices) == 3  # W_hn of both layers, W_in of the upper one
    for _ in range(60):
        optimizer.zero_grad()
        loss = -sum(p.square().sum() for p in rnn.parameters())
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        for w in projection.matrices:
            assert norm(w) <= 1.5 * (1 + 1e-5)
    assert norm(rnn.weight_ih_l0[40:]) > 1.6 and norm(rnn.weight_hh_l0[:20]) > 1.6
    assert max(float(torch.linalg.eigvals(rnn.jacobian_at_zero(i).detach()).abs().max()) for i in (0, 1)) < 0.875 + 1e-5
    handle.remove()
    optimizer.step()
    assert projection.counts["steps"] == 60


def test_torchs_gru() -> None:
    rnn = nn.GRU(3, 4, 2, bidirectional=True)
    with torch.no_grad():
        rnn.weight_hh_l1_reverse[8:] *= 100
    SpectralNormProjection(nn.Sequential(rnn)).step()
    assert norm(rnn.weight_hh_l1_reverse[8:]) <= 1.8 * (1 + 1e-6)


@pytest.mark.parametrize("columns", [8, 400])
@pytest.mark.parametrize("failing", ["eigh", "svd", "cholesky_ex"])
def test_a_driver_that_fails_ends_no_training(failing: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = with_spectrum(torch.linspace(2.5, 0.1, columns).double(), columns, 3)
    expected = by_svd(w, 1.8, 1.8)
    true_driver = getattr(torch.linalg, failing)
    calls = []

    def fails_at_first(a: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if failing == "cholesky_ex":
            factor, _ = true_driver(a, *args, **options)
            return factor, torch.ones((), dtype=torch.int32)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("failed to converge")  # type: ignore[attr-defined]
        return true_driver(a, *args, **options)

    monkeypatch.setattr(torch.linalg, failing, fails_at_first)
    SpectralNormProjection([w], 0.2).step()
    assert calls
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-12)


def changed(n: int) -> tuple[Tensor, Tensor, SpectralNormProjection]:
    """A matrix with values at the bound, a change for every step, and a projection with a block."""
    w = with_spectrum(torch.cat([torch.full((3,), 1.9), torch.linspace(1.7, 0.1, n - 3)]).double(), n, 2).float()
    projection = SpectralNormProjection([w], 0.2)
    projection.step()
    u, _, vh = torch.linalg.svd(w)
    noise = torch.randn(n, n, generator=torch.Generator().manual_seed(1))
    return w, 0.01 * torch.outer(u[:, 0], vh[0]) + 0.003 / n * noise, projection


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: "text", "state is 'text'; expected: a dict of blocks and counts"),
        (lambda state: {**state, "blocks": [None, None]}, "blocks is .*; expected: a list of 1"),
        (lambda state: {**state, "blocks": [torch.zeros(2, 3)]}, r"blocks.0 is a tensor \[2, 3\]"),
        (lambda state: {**state, "counts": {}}, "counts is {}; expected: a dict of steps"),
    ],
)
def test_edited_states_are_refused_in_one_line(edit: Any, message: str) -> None:
    w, _, projection = changed(120)
    with pytest.raises(InputError, match=message) as caught:
        SpectralNormProjection([w], 0.2).load_state_dict(edit(projection.state_dict()))
    assert "\n" not in str(caught.value)


def test_resumed_bit_for_bit() -> None:
    w, change, projection = changed(120)
    state, start = projection.state_dict(), w.clone()
    other = SpectralNormProjection([start], 0.2)
    other.load_state_dict(state)
    for matrix, chosen in ((w, projection), (start, other)):
        for _ in range(3):
            matrix += change
            chosen.step()
    assert torch.equal(w, start) and projection.counts == other.counts
    with pytest.raises(InputError, match=r"blocks.0 is a tensor \[120, 17\]"):
        SpectralNormProjection([torch.eye(3)]).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(1, 1), (1, 30), (20, 20), (200, 130)])
def test_any_size_and_scale(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Where squares overflow or vanish, and where the difference of W and what is taken out would be all rounding: from
    the start and, at more columns, from a block."""
    start = with_spectrum(torch.linspace(1.79, 0.1, min(size)).double(), max(size), 5).to(dtype)
    start = start.mT.contiguous() if size[0] < size[1] else start
    more = torch.randn(size, generator=torch.Generator().manual_seed(6)).to(dtype)
    for exponent in (-300, -160, -30, 3, 10, 18, 19, 30, 153, 160, 300):
        scale = torch.tensor(10.0, dtype=torch.float64) ** exponent
        if dtype == torch.float32 and exponent > 38:
            continue
        for w, change in ((start * scale, 0.0), (start.clone(), more * scale)):
            w = w.to(dtype)
            projection = SpectralNormProjection([w])
            projection.step()
            w += change
            projection.step()
            assert norm(w) <= 1.8 * (1 + 1e-6), exponent


def test_a_limit_far_below_the_threshold() -> None:
    """A difference of 150 and what becomes 0.001 would have lost the digits that the bound counts on."""
    w = with_spectrum(torch.tensor([150.0] * 5 + [0.0] * 115).double(), 120, 7)
    projection = SpectralNormProjection([w], 1.999, threshold="2")
    projection.step()
    assert norm(w) == pytest.approx(2 - 1.999, rel=1e-12)


def test_moved_to_another_dtype() -> None:
    """And a state that is loaded into a model of another dtype."""
    rnn, other = GRU(3, 120), GRU(3, 120, dtype=torch.float64)
    projection, loaded = SpectralNormProjection(rnn), SpectralNormProjection(other)
    projection.step()
    loaded.load_state_dict(projection.state_dict())
    rnn.double()
    for chosen in (projection, loaded):
        with torch.no_grad():
            chosen.matrices[0].mul_(3)
        expected = by_svd(chosen.matrices[0], 1.8, 1.8)
        chosen.step()
        torch.testing.assert_close(chosen.matrices[0], expected, rtol=0, atol=1e-12)
    rnn.half()
    with pytest.raises(InputError, match=r"constrained\[0\] must be float32 or float64, got torch.float16"):
        projection.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([torch.eye(2)], 0.0), "delta must be a number in (0, 2), got 0.0"),
        (([torch.eye(2)], "0.2"), "delta must be a number in (0, 2), got '0.2'"),
        (([torch.zeros(3)],), "constrained[0] must be a matrix with elements, got shape [3]"),
        (([torch.eye(2).half()],), "constrained[0] must be float32 or float64, got torch.float16"),
        ((["weight"],), "constrained[0] must be a matrix, got str"),
        ((nn.Linear(2, 2),), "constrained must be a module with a GRU or several matrices, got no matrix"),
        ((3,), "constrained must be a module or a list of matrices, got int"),
        ((torch.eye(2),), "constrained must be a module or a list of matrices, got Tensor"),
        ((GRU(2, 3), 0.2, "2-d"), "unknown threshold '2-d'"),
        ((GRU(2, 3), 0.2, "2", "lower"), "unknown inputs 'lower'"),
        (([torch.full((2, 2), math.nan)],), "constrained matrix 0 (shape [2, 2]) has NaN or infinite entries"),
    ],
)
def test_wrong_arguments_and_values(arguments: tuple[Any, ...], message: str) -> None:
    named = dict(zip(("constrained", "delta", "threshold", "inputs"), arguments, strict=False))
    assert refused(lambda: SpectralNormProjection(**named).step()).startswith(message)
