"""ExpRNN: the matrix, changes of the base and what is refused there, optimizer state, loading."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from orthokern import InputError
from orthokern.errors import OutOfRange
from orthokern.nn import ExpRNN, NonNormalRNN
from orthokern.nn.exprnn import FLATTEST, skew_from, transported
from orthokern.optim import optimizer_for

F64 = torch.float64
KINDS = [ExpRNN, NonNormalRNN]
Kind = type[ExpRNN] | type[NonNormalRNN]


def make(**options: object) -> ExpRNN:
    torch.manual_seed(3)
    return ExpRNN(3, 6, dtype=F64, **options)  # type: ignore[arg-type]


def loss_of(rnn: nn.Module, x: Tensor) -> Tensor:
    output, h_n = rnn(x)
    return output.square().mean() + h_n.sin().sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.randn(5, 2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x)[0].square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("init", ["henaff", "cayley", "torus", "orthogonal", "identity"])
@pytest.mark.parametrize("rebase_every", [None, 3])
def test_initial_matrix(init: str, rebase_every: int | None) -> None:
    rnn = make(init=init, rebase_every=rebase_every)
    w = rnn.recurrent_matrix().detach()
    assert rnn.orthogonality_error() < 1e-14
    assert float(torch.linalg.det(w)) == pytest.approx(1.0)
    angles = torch.linalg.eigvals(w).angle().abs()
    if init == "cayley":
        assert 0 < float(angles.max()) < 1
    if init == "identity":
        assert torch.equal(w, torch.eye(6, dtype=F64))
    if rebase_every or init in ("orthogonal", "identity"):
        assert not rnn.skew_l0.any()
    else:
        assert torch.allclose(w, torch.matrix_exp(skew_from(rnn.skew_l0.detach())), rtol=0, atol=1e-14)


def test_when_the_base_moves() -> None:
    """After every second step of an optimizer that trains A, never in a forward."""
    rnn = make(rebase_every=2, project_every=2)
    x = torch.randn(3, 2, 3, dtype=F64)
    nn.init.normal_(rnn.skew_l0, std=0.3)
    optimizer = torch.optim.SGD([rnn.skew_l0], lr=1e-2)
    other = torch.optim.SGD([rnn.bias_l0, rnn.weight_ih_l0], lr=1e-2)
    base = rnn.base_l0.clone()
    for step in range(4):
        for _ in range(3):
            loss_of(rnn, x).backward()
        other.step()
        if step == 3:
            rnn.base_l0.mul_(1 + 1e-4)
        before = rnn.base_l0.clone()
        optimizer.step()
        assert torch.equal(rnn.base_l0, before) == (step % 2 == 0)
        assert bool(rnn.skew_l0.any()) == (step % 2 == 0)
        assert rnn.get_extra_state().tolist() == [(step + 1) % 2, (step + 1) // 2]
    assert not torch.equal(rnn.base_l0, base)
    assert float((rnn.base_l0.mT @ rnn.base_l0 - torch.eye(6)).abs().max()) < 1e-14  # projected: the second move


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_how_a_step_is_taken_changes_no_number(kind: Kind, combined: bool) -> None:
    """Gradients summed over parts of a batch, forwards that are run again (both modes of torch.utils.checkpoint), or
    forwards without a backward: the same parameters and bases as with one forward per step."""

    def trained(how: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        rnn = kind(3, 6, dtype=F64, rebase_every=2)
        x, h0 = torch.randn(4, 6, 3, dtype=F64, requires_grad=True), torch.randn(1, 6, 6, dtype=F64)
        options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}
        adam = torch.optim.Adam
        optimizer = optimizer_for(rnn, euclidean=adam, **options) if combined else adam(rnn.parameters(), **options)
        for step in range(5):
            if how == "looked at":
                rnn(x, h0)
            for rows in (slice(0, 2), slice(2, 4), slice(4, 6)) if how == "in parts" else (slice(None),):
                data, state = x[:, rows], h0[:, rows]
                if "recomputed" in how:
                    output = checkpoint(rnn, data, state, use_reentrant="reentrant" in how)[0]
                else:
                    output = rnn(data, state)[0]
                output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert rnn.get_extra_state()[1] == (step + 1) // 2
        return rnn.state_dict()

    expected = trained("at once")
    for how in ("recomputed", "recomputed, reentrant", "in parts", "looked at"):
        torch.testing.assert_close(trained(how), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_all_moves(kind: Kind) -> None:
    """One graph serves all steps, before and after moves."""
    rnn = kind(3, 6, rebase_every=2)
    torch._dynamo.reset()
    graphs = CompileCounter()
    run = torch.compile(rnn, backend=graphs, fullgraph=True)
    taken, x = torch.optim.SGD(rnn.parameters(), lr=1e-2), torch.randn(4, 2, 3)
    for _ in range(8):
        taken.zero_grad()
        run(x)[0].square().sum().backward()
        taken.step()
    assert graphs.frame_count == 1 and rnn.get_extra_state().tolist() == [0, 4]


def test_a_copy_of_a_parametrized_module_moves() -> None:
    """torch copies such a module without __setstate__."""
    rnn = copy.deepcopy(weight_norm(make(rebase_every=1), "weight_ih_l0"))
    train(rnn, torch.optim.SGD(rnn.parameters(), 0.1), 3)
    assert rnn.get_extra_state().tolist() == [0, 3]
    rnn.rebase()


def test_a_computed_generator_is_refused() -> None:
    rnn = prune.l1_unstructured(make(), "skew_l0", 0.3)
    for call in (rnn.rebase, lambda: optimizer_for(rnn)):
        with pytest.raises(InputError, match="skew_l0 of ExpRNN is computed from others"):
            call()


@pytest.mark.parametrize("how", ["copied", "saved"])
def test_copies_move_on_their_own(how: str) -> None:
    """Of module and optimizer together, with their state; and what is gone is forgotten."""
    rnn = make(rebase_every=2)
    taken = optimizer_for(rnn, lr=1e-2, euclidean=torch.optim.Adam)
    train(rnn, taken, 1)
    if how == "copied":
        copied, its = copy.deepcopy((rnn, taken))
    else:
        copied = make(rebase_every=2)
        copied.load_state_dict(copy.deepcopy(rnn.state_dict()))
        its = optimizer_for(copied, lr=1e-2, euclidean=torch.optim.Adam)
        its.load_state_dict(copy.deepcopy(taken.state_dict()))
    train(copied, its, 5)
    assert rnn.get_extra_state().tolist() == [1, 0] and copied.get_extra_state().tolist() == [0, 3]
    train(rnn, taken, 5)
    torch.testing.assert_close(rnn.state_dict(), copied.state_dict(), rtol=0, atol=0)
    gone = weakref.ref(copied)
    del copied, its
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("size", [0.05, 0.5, 2.0])
def test_transport_takes_gradients_from_chart_to_chart(size: float) -> None:
    rnn, x = make(), torch.randn(4, 2, 3, dtype=F64)
    nn.init.normal_(rnn.skew_l0, std=size)
    (old,) = torch.autograd.grad(loss_of(rnn, x), rnn.skew_l0)
    moved = transported(old, rnn.skew_l0.detach())
    angles = torch.linalg.eigvalsh(1j * skew_from(rnn.skew_l0.detach()))
    sinc = torch.sinc((angles.unsqueeze(0) - angles.unsqueeze(1)) / (2 * torch.pi))
    steep = bool((sinc.abs() > FLATTEST).all())
    assert steep or size == 2.0
    rnn.rebase()
    (new,) = torch.autograd.grad(loss_of(rnn, x), rnn.skew_l0)
    assert torch.isfinite(moved).all() and float(moved.norm()) <= 1 / FLATTEST * (1 + 1e-12) * float(old.norm())
    if steep:
        torch.testing.assert_close(moved, new, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["transport", "reset", "keep"])
def test_optimizer_state_at_a_move(mode: str) -> None:
    rnn = make(optimizer_state=mode)
    optimizer = optimizer_for(rnn, lr=1e-2, skew_lr=1e-3, euclidean=torch.optim.Adam)
    x = torch.randn(4, 2, 3, dtype=F64)
    loss_of(rnn, x).backward()
    optimizer.step()
    at, state = rnn.skew_l0.detach().clone(), optimizer.state[rnn.skew_l0]
    momentum, second = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    rnn.rebase()
    if mode == "reset":
        assert rnn.skew_l0 not in optimizer.state and rnn.weight_ih_l0 in optimizer.state
    else:
        expected = transported(momentum, at) if mode == "transport" else momentum
        assert torch.equal(state["exp_avg"], expected)
        assert torch.equal(state["exp_avg_sq"], second)
    optimizer.step()


def test_the_previous_gradient_of_rprop_moves_with_the_base() -> None:
    rnn = make()
    optimizer = torch.optim.Rprop(rnn.parameters(), lr=1e-2)
    rnn.track_optimizer(optimizer)
    loss_of(rnn, torch.randn(4, 2, 3, dtype=F64)).backward()
    optimizer.step()
    at, previous = rnn.skew_l0.detach().clone(), optimizer.state[rnn.skew_l0]["prev"].clone()
    rnn.rebase()
    assert torch.equal(optimizer.state[rnn.skew_l0]["prev"], transported(previous, at))


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_out_of_range(kind: Kind) -> None:
    """Of which the exponential is NaN."""
    x = torch.zeros(2, 1, 3)
    for backend in (None, "reference"):
        rnn = kind(3, 6, backend=backend)
        for value, message in (
            (float("nan"), "skew_l0 holds 1 NaN or infinite values of 36; accepted: finite numbers"),
            (
                -2e3,
                "skew_l0 is too large for an exponential: |A^6|_F^(1/6) is 2119, with |A|_2 = 2000; "
                "accepted: up to 768 in torch.float32",
            ),
        ):
            with torch.no_grad():
                rnn.skew_l0.zero_()[3, 2] = value
            with pytest.raises(OutOfRange) as caught:
                rnn(x)
            assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
        with torch.no_grad():
            rnn.skew_l0[3, 2] = 700.0  # within
        assert bool(rnn(x)[0].isfinite().all()) and rnn.orthogonality_error() < 1e-5


def test_bad_states() -> None:
    rnn = make()
    state = rnn.state_dict()
    with pytest.raises(InputError, match="base_l0 is not orthogonal"):
        rnn.load_state_dict({**state, "base_l0": 2 * state["base_l0"]})
    with pytest.raises(InputError, match="none of this module's skew parameters"):
        rnn.track_optimizer(torch.optim.SGD([rnn.bias_l0], lr=1.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0), None], ids=["rate 0", "a tensor", "no gradients"])
def test_a_step_that_changes_nothing_moves_no_base(kind: Kind, rate: Any) -> None:
    rnn = kind(3, 6, dtype=F64, init="orthogonal", rebase_every=1, project_every=1)
    nn.init.normal_(rnn.skew_l0)
    before = copy.deepcopy(rnn.state_dict())
    optimizer = torch.optim.Adam(rnn.parameters(), lr=0.1 if rate is None else rate)
    if rate is None:
        optimizer.step()
    else:
        train(rnn, optimizer, 2)
    assert all(torch.equal(value, rnn.state_dict()[name]) for name, value in before.items())
    optimizer.param_groups[0]["lr"] = 0.1
    train(rnn, optimizer, 1)
    assert rnn.get_extra_state().tolist() == [0, 1]


def test_a_wrong_extra_state_is_refused() -> None:
    rnn = make(rebase_every=5)
    state = rnn.state_dict()
    for wrong in ({"uses": 1}, torch.tensor([1]), torch.tensor([-1, 2]), None):
        with pytest.raises(InputError, match="extra state is .*; accepted: a tensor of the counts"):
            rnn.load_state_dict({**state, "_extra_state": wrong})
    with torch.device("meta"):
        other = ExpRNN(3, 8)
        assert not other.load_state_dict({**other.state_dict(), "_extra_state": torch.zeros(2)}).missing_keys


def test_tied_parameters_and_bases_train_as_one() -> None:
    first, second = make(rebase_every=1, init="orthogonal"), make(init="orthogonal")
    second.skew_l0, second.base_l0 = first.skew_l0, first.base_l0
    before, x = first.recurrent_matrix().detach().clone(), torch.randn(5, 2, 3, dtype=F64)
    optimizer = torch.optim.SGD([*first.parameters(), second.weight_ih_l0, second.bias_l0], lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        (first(x)[0] + second(x)[0]).square().mean().backward()
        optimizer.step()
    w = first.recurrent_matrix().detach()
    assert torch.equal(w, second.recurrent_matrix()) and first.orthogonality_error() < 1e-13
    assert float((w - before).abs().max()) > 1e-3
