"""Edge cases of optimizers: large steps keep bases orthonormal, a learning rate out of range changes nothing, and bad
arguments of constructors are rejected."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_optim import basis as float64_basis
from test_optim import error
from torch import nn

from orthokern import functional, ops
from orthokern.errors import InputError
from orthokern.nn import FactorizedRNN
from orthokern.optim import GeodesicRMSprop, GeodesicSGD, optimizer_for

PROMISE = 1e-5  # largest max|M^T M - I| after any step, float32


basis = partial(float64_basis, dtype=torch.float32)
KINDS = [GeodesicSGD, GeodesicRMSprop]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 64), (64, 20), (200, 3), (5, 1), (16, 16)])
def test_steps_of_any_size(kind: type[GeodesicSGD], shape: tuple[int, int]) -> None:
    """From nothing to what no number in float32 is left of, in random order; also right after a resumption."""
    generator = torch.Generator().manual_seed(sum(shape))
    torch.manual_seed(1)
    m = basis(*shape)
    optimizer = kind([m], lr=1.0)
    for step in range(120):
        exponent = float(torch.randint(-6, 8, (), generator=generator))
        g = torch.randn(*shape, generator=generator)
        m.grad = g / g.norm()
        optimizer.param_groups[0]["lr"] = 10.0**exponent
        optimizer.step()
        assert error(m) < PROMISE, (step, exponent)
        if step % 20 == 0:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("shape", [(32, 4), (5, 1), (2, 24, 20), (6, 6)])
def test_gradients_of_any_size(
    shape: tuple[int, ...], backend: str | None, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step depends on lr G alone, and thin bases do not overflow at G^T G; also where the norm is not read."""
    monkeypatch.setattr(ops.cayley, "read_waits", lambda device: reads)
    start = torch.linalg.qr(torch.randn(shape, dtype=torch.float64))[0].float()
    g = torch.randn(shape, dtype=torch.float64)
    g /= g.abs().max()
    expected = functional.cayley(start.double(), g, 0.1)
    for size in (0.0, 1e-30, 1e-15, 1e6, 1e15, 1e19, 1e36):
        m = nn.Parameter(start.clone())
        m.grad = (g * size).float()
        GeodesicSGD([m], lr=0.1 / (size or 1.0), backend=backend, correct_every=0).step()
        torch.testing.assert_close(m.double(), expected if size else start.double(), rtol=0, atol=3e-6)


BAD_RATES = [math.nan, math.inf, -math.inf, -1e-9, None, "0.1", True, torch.tensor(math.nan), torch.tensor([1.0, 2.0])]


@pytest.mark.parametrize("rate", BAD_RATES, ids=repr)
def test_a_learning_rate_out_of_range_changes_nothing(rate: Any) -> None:
    """In any group; the message names it, and training goes on with a good one."""
    model = nn.ModuleList([FactorizedRNN(3, 6), FactorizedRNN(3, 6, margin=None), nn.Linear(6, 2)])
    optimizer = optimizer_for(model, euclidean=torch.optim.Adam)
    for index, group in enumerate(optimizer.param_groups):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        good, group["lr"] = group["lr"], rate
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
        with pytest.raises(InputError, match=rf"^lr of group {index}\b.* got .*no parameter was changed$"):
            optimizer.step()
        torch.testing.assert_close([model.state_dict(), optimizer.state_dict()["state"]], before, rtol=0, atol=0)
        group["lr"] = good
    optimizer.step()


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_accepted() -> None:
    GeodesicSGD([basis(3, 3)], lr=np.float32(1e-3), max_grad_norm=np.float16(1.0))
    for value in (np.float32(math.inf), np.float32(math.nan), 10**400, torch.tensor(1j)):
        with pytest.raises(InputError, match="lr must be a finite number of at least 0"):
            GeodesicSGD([basis(3, 3)], lr=value)


@pytest.mark.parametrize("reads", [False, True])
def test_a_basis_that_became_nan_is_an_error_where_the_drift_is_measured(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a batch with others, and with finite gradients; the other bases of the group do not change."""
    monkeypatch.setattr(ops.cayley, "read_waits", lambda device: reads)
    bases = [basis(6, 6), basis(5, 2), basis(5, 2)]
    optimizer = GeodesicSGD(bases, lr=0.1, correct_every=2)
    for p in bases:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with torch.no_grad():
        bases[1][0, 0] = math.nan
    before = bases[0].detach().clone()
    with pytest.raises(InputError, match=r"^a basis of shape \[5, 2\] has NaN or infinite entries"):
        optimizer.step()
    assert torch.equal(bases[0], before)


@pytest.mark.parametrize("reads", [False, True])
def test_a_rate_in_a_tensor(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read where reading waits, and a scheduler reduces that of each group once."""
    monkeypatch.setattr(ops.cayley, "read_waits", lambda device: reads)
    results = []
    for rate in (0.1, torch.tensor([0.1])):
        torch.manual_seed(0)
        bases = [basis(6, 6), basis(5, 2), basis(5, 2)]
        optimizer = GeodesicSGD(bases, lr=rate, max_grad_norm=1.0, maximize=True)
        for p in bases:
            p.grad = torch.ones_like(p).triu()
        optimizer.step()
        results.append(bases)
    torch.testing.assert_close(*results, rtol=0, atol=1e-7)
    combined = optimizer_for(nn.Sequential(FactorizedRNN(2, 4, margin=None)), lr=torch.tensor(0.5), geodesic_lr=0.5)
    for group in combined.param_groups:
        group["lr"] *= 0.5
    assert [float(group["lr"]) for group in combined.param_groups] == [0.25] * len(combined.param_groups)


@pytest.mark.parametrize("start", [1 / 3, 0.1, 1.0])
def test_a_schedule_that_rounds_to_less_than_zero(start: float) -> None:
    m = basis(6, 6)
    for optimizer in (GeodesicSGD([m], lr=1e-6), GeodesicSGD([m], lr=1e3)):
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=start, end_factor=0.0, total_iters=7)
        for _ in range(9):
            m.grad = torch.randn_like(m)
            optimizer.step()
            schedule.step()
        optimizer.param_groups[0]["lr"] = -1e-20 * optimizer.param_groups[0]["initial_lr"]
        before = m.detach().clone()
        optimizer.step()
        assert torch.equal(m, before)


def test_a_model_that_ascends_does_so_in_all_parts() -> None:
    rnn = FactorizedRNN(3, 8)
    optimizer = optimizer_for(rnn, maximize=True)
    assert all(group["maximize"] for group in optimizer.param_groups)
    optimizer = optimizer_for(rnn, maximize=True, geodesic_options={"maximize": False})
    assert [group["maximize"] for group in optimizer.param_groups if group["role"] == "geodesic"] == [False]
    assert not any(group["maximize"] for group in optimizer_for(rnn).param_groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 6), (6, 3)])
def test_gradients_whose_squares_overflow_are_clipped(kind: type[GeodesicSGD], shape: tuple[int, int]) -> None:
    start, g, ends = basis(*shape).detach(), torch.randn(*shape).clamp(-3.0, 3.0), []
    for scale in (1e3, 1e30, 1e38):
        m = nn.Parameter(start.clone())
        m.grad = g * scale
        optimizer = kind([m], lr=0.1, max_grad_norm=1.0)
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(scale * float(g.norm()), rel=1e-5)
        ends.append(m.detach())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-5)
    assert not torch.allclose(ends[1], start, atol=1e-3)
    m = nn.Parameter(torch.eye(4, dtype=torch.float64))
    m.grad = torch.full((4, 4), 1.7e308, dtype=torch.float64)
    with pytest.raises(InputError, match="norm of all gradients overflows float64"):
        kind([m], lr=0.1, max_grad_norm=1.0).step()
