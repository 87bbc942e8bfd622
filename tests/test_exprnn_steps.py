"""Bases of ExpRNN and NonNormalRNN after steps of optimizers: unfinished modules, nested optimizers, tied weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from orthokern import InputError
from orthokern.nn import ExpRNN, NonNormalRNN

F64 = torch.float64


def make(**options: Any) -> ExpRNN:
    torch.manual_seed(3)
    return ExpRNN(3, 6, dtype=F64, **options)


def inputs() -> Tensor:
    return torch.randn(5, 2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs())[0].square().mean().backward()
        optimizer.step()


def step_of_another_model() -> None:
    layer = nn.Linear(2, 2)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_only_the_optimizer_that_holds_a_module_checks_it() -> None:
    rnn = make(rebase_every=1)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
    rnn.skew_l0 = nn.Parameter(torch.zeros(4, 4, dtype=F64))
    step_of_another_model()
    optimizer.add_param_group({"params": [rnn.skew_l0]})
    rnn.skew_l0.grad = torch.zeros(4, 4, dtype=F64)
    with pytest.raises(InputError, match="skew_l0"):
        optimizer.step()


@pytest.mark.parametrize("kind", [ExpRNN, NonNormalRNN])
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0), None], ids=["rate 0", "a tensor", "no gradients"])
def test_a_step_that_changes_nothing_moves_no_base(kind: type[ExpRNN] | type[NonNormalRNN], rate: Any) -> None:
    rnn = kind(3, 6, dtype=F64, init="orthogonal", rebase_every=1, project_every=1)
    with torch.no_grad():
        rnn.skew_l0.normal_()
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


@pytest.mark.parametrize("kind", [ExpRNN, NonNormalRNN])
def test_a_state_of_the_optimizer_before_the_first_step_changes_nothing(
    kind: type[ExpRNN] | type[NonNormalRNN],
) -> None:
    """get_optimizer_state_dict then takes a step with gradients of zero at a rate of 0."""

    def trained(looks: bool) -> nn.Module:
        torch.manual_seed(0)
        rnn = kind(3, 6, dtype=F64, rebase_every=2)
        optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1, momentum=0.9)
        if looks:
            get_optimizer_state_dict(rnn, optimizer)
        train(rnn, optimizer, 5)
        return rnn

    for one, other in zip(trained(True).state_dict().values(), trained(False).state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_states_of_earlier_versions_are_loaded() -> None:
    rnn = make(rebase_every=5)
    state = {**rnn.state_dict(), "_extra_state": {"uses": 3, "rebases": 2}}
    rnn.load_state_dict(state)
    assert rnn.get_extra_state().tolist() == [3, 2]
    for wrong in ({"uses": 1}, torch.tensor([1]), torch.tensor([-1, 2]), None):
        with pytest.raises(InputError, match="extra state is .*; accepted: a tensor of the counts"):
            rnn.load_state_dict({**state, "_extra_state": wrong})


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_a_zero_redundancy_optimizer_is_refused(one_process: None) -> None:
    rnn = make(rebase_every=2)
    with pytest.raises(InputError, match="the optimizer is a ZeroRedundancyOptimizer; accepted: others"):
        train(rnn, ZeroRedundancyOptimizer(rnn.parameters(), torch.optim.Adam, lr=0.1), 1)


class Pair(nn.Module):
    def __init__(self, first: ExpRNN, second: ExpRNN) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.first(x)[0] + self.second(x)[0],)


@pytest.mark.parametrize("every", [1, None])
def test_a_skew_parameter_shared_without_its_base_is_refused(every: int | None) -> None:
    first, second = make(rebase_every=1, init="orthogonal"), make(rebase_every=every, init="orthogonal")
    second.skew_l0 = first.skew_l0
    with pytest.raises(InputError, match="tie base_l0 too"):
        train(Pair(first, second), torch.optim.SGD(first.parameters(), lr=0.5), 1)
    first.rebase_every = second.rebase_every = None
    train(Pair(first, second), torch.optim.SGD(first.parameters(), lr=0.5), 1)


@pytest.mark.parametrize("every", [(1, 1), (2, 2), (1, None)])
def test_tied_bases_train_as_one(every: tuple[int, int | None]) -> None:
    first, second = make(rebase_every=every[0]), make(rebase_every=every[1])
    second.skew_l0, second.base_l0 = first.skew_l0, first.base_l0
    before = first.recurrent_matrix().detach().clone()
    model = Pair(first, second)
    assert len({id(p) for p in model.parameters()}) == 5
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), 4)
    w = first.recurrent_matrix().detach()
    assert torch.equal(w, second.recurrent_matrix())
    assert float((w - before).abs().max()) > 1e-3
    assert first.orthogonality_error() < 1e-13
