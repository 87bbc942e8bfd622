"""The split of a model's parameters, and the optimizer that combines a geodesic part with one of torch's."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from test_optim import basis, error
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from orthokern import InputError
from orthokern.nn import RNN, FactorizedRNN, LinearCrossEntropy, NonNormalRNN
from orthokern.optim import CombinedOptimizer, GeodesicRMSprop, GeodesicSGD, optimizer_for, split_parameters


class Model(nn.Module):
    """Two factorized recurrences with different margins, a dense one, a readout, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.near = FactorizedRNN(3, 4, 2, margin=0.01)
        self.free = FactorizedRNN(4, 4, margin=None, rank=2)
        self.fixed = FactorizedRNN(4, 4, margin=0.0)
        self.dense = RNN(4, 4)
        self.readout = LinearCrossEntropy(4, 5)
        self.fixed.weight_ih_l0 = self.dense.weight_ih_l0

    def forward(self, x: Tensor) -> Tensor:
        for rnn in (self.near, self.free, self.fixed, self.dense):
            x = rnn(x)[0]
        return self.readout(x)


def test_split_parameters() -> None:
    model = Model()
    for root in (model, nn.Sequential(model)):
        split = split_parameters(root)
        assert {id(p) for p in split["geodesic"]} == {
            id(p) for n, p in model.named_parameters() if n.split(".")[1].startswith(("u_", "v_"))
        }
        margins = [(id(p), m) for p, m in split["spectrum"]]
        near, free, fixed = model.near, model.free, model.fixed
        assert margins == [
            (id(near.spectrum_l0), 0.01),
            (id(near.spectrum_l1), 0.01),
            (id(free.spectrum_l0), None),
            (id(fixed.spectrum_l0), 0.0),
        ]
        everything = [*split["geodesic"], *(p for p, _ in split["spectrum"]), *split["other"]]
        assert len(everything) == len({id(p) for p in everything}) == len(list(model.parameters()))


def test_a_users_module_can_have_roles() -> None:
    class Mine(nn.Module):
        def __init__(self, role: str) -> None:
            super().__init__()
            self.role, self.q, self.w = role, basis(4, 4), nn.Parameter(torch.ones(3))

        def parameter_roles(self) -> dict[str, str]:
            return {"q": self.role}

    mine = Mine("geodesic")
    split = split_parameters(nn.Sequential(mine))
    assert split["geodesic"] == [mine.q] and [id(p) for p in split["other"]] == [id(mine.w)]
    assert list(optimizer_for(mine).parts) == ["geodesic", "euclidean"]
    with pytest.raises(InputError, match="'geodesik'"):
        split_parameters(Mine("geodesik"))


def test_rates_of_the_groups() -> None:
    optimizer = optimizer_for(Model(), lr=1e-2, geodesic_lr=1e-5, spectrum_lr=1e-3, alpha=0.9, weight_decay=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    groups = optimizer.param_groups
    assert [group["role"] for group in groups] == ["geodesic", "other", "spectrum", "spectrum", "spectrum"]
    assert [group["lr"] for group in groups] == pytest.approx([1e-5, 1e-2, 1e-3 / 0.02, 1e-3, 0.0])
    assert [group.get("margin") for group in groups[2:]] == [0.01, None, 0.0]
    assert [group.get("weight_decay") for group in groups] == [None, 0.1, 0.0, 0.1, 0.0]
    assert all(group["alpha"] == 0.9 for group in groups[1:])
    default = optimizer_for(FactorizedRNN(2, 4, margin=0.5), lr=1e-2)
    wide = optimizer_for(nn.ModuleList([FactorizedRNN(2, 4), FactorizedRNN(2, 4000, rank=2)]))
    assert [each.param_groups[0]["lr"] for each in (default, wide)] == pytest.approx([2e-4, 1e-4])
    assert optimizer_for(FactorizedRNN(1, 4), steps=1000).param_groups[0]["lr"] == pytest.approx(2e-5)
    for steps in (0, "10", math.inf):
        with pytest.raises(InputError, match="steps must be a number of at least 1"):
            optimizer_for(FactorizedRNN(1, 4), steps=steps)  # type: ignore[arg-type]
    assert default.param_groups[2]["lr"] == pytest.approx(1e-2)
    tanh = optimizer_for(FactorizedRNN(2, 4, spectrum_map="tanh"), spectrum_lr=1e-3).param_groups[2]
    assert (tanh["spectrum_map"], tanh["margin"], tanh["lr"]) == ("tanh", 0.1, pytest.approx(1e-3 / 0.4))


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 6, 3, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), (x[..., 0] > 0).long().flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("euclidean", [torch.optim.RMSprop, torch.optim.AdamW])
def test_combined_trains(euclidean: Any) -> None:
    model = Model()
    frozen = model.fixed.spectrum_l0.detach().clone()
    optimizer = optimizer_for(model, lr=0.02, geodesic_lr=1e-2, spectrum_lr=1e-3, euclidean=euclidean, basis_clip=1.0)
    losses = train(model, optimizer, 20)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert all(m.orthogonality_error() < 3e-6 for m in (model.near, model.free, model.fixed))
    assert torch.equal(model.fixed.spectrum_l0.detach(), frozen)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert float((model.near.spectrum().detach() - 1).abs().max()) <= 0.01 + 1e-6


@pytest.mark.parametrize("geodesic", [GeodesicSGD, GeodesicRMSprop])
def test_combined_state_dict_continues_bit_for_bit(geodesic: Any) -> None:
    options: dict[str, Any] = {"correct_every": 3, "drift_tolerance": 0.0}

    def make(model: nn.Module) -> tuple[CombinedOptimizer, ExponentialLR]:
        euclidean, more = torch.optim.Adam, {"geodesic": geodesic, "geodesic_options": options}
        optimizer = optimizer_for(model, lr=0.02, geodesic_lr=1e-2, euclidean=euclidean, **more)
        return optimizer, ExponentialLR(optimizer, 0.9)

    def run(model: nn.Module, optimizer: CombinedOptimizer, schedule: ExponentialLR, seeds: range) -> None:
        for seed in seeds:
            train(model, optimizer, 1, seed=seed)
            schedule.step()

    one = Model()
    two, three, buffer = copy.deepcopy(one), Model(), io.BytesIO()
    straight, first, second = make(one), make(two), make(three)
    run(one, *straight, range(8))
    run(two, *first, range(4))
    torch.save([part.state_dict() for part in (two, *first)], buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    for part, state in zip((three, *second), saved, strict=True):
        part.load_state_dict(state)
    assert [g["steps"] for g in second[0].param_groups if "steps" in g] == [4]
    run(three, *second, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), three.parameters(), strict=True))
    assert [g["lr"] for g in second[0].param_groups] == [g["lr"] for g in straight[0].param_groups]
    with pytest.raises(InputError, match=r"groups \(role, parameters\)"):
        make(FactorizedRNN(3, 4))[0].load_state_dict(saved[1])
    with pytest.raises(InputError):
        second[0].load_state_dict({})


def one_cycle(optimizer: Any, rates: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=9)


def cyclic(optimizer: Any, rates: Any) -> Any:
    lowest = [rate / 9 for rate in rates] if isinstance(rates, list) else rates / 9
    return torch.optim.lr_scheduler.CyclicLR(optimizer, lowest, rates, step_size_up=3)


def averaging(optimizer: Any, rates: Any) -> Any:
    return torch.optim.swa_utils.SWALR(optimizer, rates, anneal_epochs=3)


@pytest.mark.parametrize("make", [one_cycle, cyclic])
@pytest.mark.parametrize("euclidean", [torch.optim.RMSprop, torch.optim.SGD, torch.optim.Adam])
def test_schedulers_that_cycle_the_momentum(euclidean: Any, make: Any) -> None:
    """As they are called by default. The geodesic part has no momentum, so that its steps do not change."""
    model = Model()
    optimizer = optimizer_for(model, lr=1e-3, geodesic_lr=1e-3, euclidean=euclidean)
    schedule = make(optimizer, [g["lr"] for g in optimizer.param_groups])
    first = [group["lr"] or 1.0 for group in optimizer.param_groups]
    momenta = set()
    for i in range(6):
        train(model, optimizer, 1, seed=i)
        schedule.step()
        factors = {group["lr"] / rate for group, rate in zip(optimizer.param_groups, first, strict=True)} - {0.0}
        assert max(factors) == pytest.approx(min(factors))  # the ratios of the rates stay
        group = optimizer.parts["euclidean"].param_groups[0]
        momenta.add(group["betas"][0] if euclidean is torch.optim.Adam else group["momentum"])
    assert len(momenta) >= 4 and all(0.8 <= momentum <= 0.95 for momentum in momenta)


@pytest.mark.parametrize("make", [one_cycle, cyclic, averaging])
def test_one_number_does_not_become_the_rate_of_the_bases(make: Any) -> None:
    model = Model()
    optimizer = optimizer_for(model, lr=1e-3)
    make(optimizer, [group["lr"] for group in optimizer.param_groups])
    train(model, optimizer, 1)
    optimizer = optimizer_for(model, lr=1e-3)
    make(optimizer, 1e-3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="has set one learning rate for all groups, .* one rate per group, as max_lr="):
        train(model, optimizer, 1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    alike = optimizer_for(RNN(3, 5), lr=1e-3)
    make(alike, 1e-3)
    alike.step()


def test_equal_rates_are_not_those_of_a_scheduler() -> None:
    """Set by hand before a scheduler of factors, or loaded, also with the scheduler of one number."""
    for make in (StepLR, one_cycle):
        one, two = (optimizer_for(FactorizedRNN(3, 4, margin=0.5), lr=lr, geodesic_lr=1e-3) for lr in (1e-3, 2e-3))
        make(one, 1)
        one.step()
        two.load_state_dict(one.state_dict())
        two.step()
    three = optimizer_for(FactorizedRNN(3, 4))
    for group in three.param_groups:
        group["lr"] = 1e-3
    StepLR(three, 1)
    three.step()


def test_combined_behaves_as_an_optimizer() -> None:
    model = Model()
    optimizer = optimizer_for(model, euclidean=torch.optim.Adam)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1, 3)).square().sum()
        loss.backward()
        return loss

    hooks: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("pre"))
    optimizer.register_step_post_hook(lambda *_: hooks.append("post"))
    assert float(optimizer.step(closure).detach()) > 0 and len(calls) == 1 and hooks == ["pre", "post"]
    assert len(optimizer.state) == sum(len(part.state) for part in optimizer.parts.values()) > 0
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.param_groups[1]["lr"] = 0.5
    assert optimizer.parts["euclidean"].param_groups[0]["lr"] == 0.5
    assert "role: geodesic" in repr(optimizer)
    again = pickle.loads(pickle.dumps(optimizer))
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert len(again.state) == len(optimizer.state)


def test_groups_are_added_to_a_part() -> None:
    optimizer = optimizer_for(FactorizedRNN(2, 4))
    q, w = basis(3, 3), nn.Parameter(torch.ones(2))
    with pytest.raises(InputError, match="has no groups of its own; add the group to a part: geodesic, euclidean"):
        optimizer.add_param_group({"params": [w]})
    optimizer.parts["geodesic"].add_param_group({"params": [q], "param_names": ["q"], "lr": 0.1})
    optimizer.parts["euclidean"].add_param_group({"params": [w], "param_names": ["w"], "lr": 0.1})
    assert len(optimizer.param_groups) == 5
    q.grad, w.grad = torch.randn_like(q), torch.ones(2)
    optimizer.step()
    assert error(q) < 1e-13 and float(w[0].detach()) < 1
    one_cycle(optimizer, [group["lr"] for group in optimizer.param_groups])  # it sets the momentum of every group
    with pytest.raises(InputError, match="in parts 'a' and 'b'"):
        CombinedOptimizer({"a": torch.optim.SGD([w], lr=0.1), "b": torch.optim.SGD([w], lr=0.1)})


def test_a_rate_for_each_child() -> None:
    model = nn.ModuleDict({"rnn": NonNormalRNN(3, 4), "readout": nn.Linear(4, 2)})
    optimizer = optimizer_for(model, lr={"readout": 0.1, "rnn": 0.2}, skew_lr=0.4)
    told = [(group["role"], group["lr"]) for group in optimizer.param_groups]
    assert told == [("readout", 0.1), ("rnn", 0.2), ("rotation", 0.2), ("skew", 0.4)]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    for rates, message in (
        ({"rnn": 0.2}, "lr has no rate for 'readout': accepted is one for each child"),
        ({"rnn": -1.0, "readout": 0.1}, "lr of rnn must be a finite number of at least 0, got -1"),
    ):
        with pytest.raises(InputError, match=message):
            optimizer_for(model, lr=rates, skew_lr=0.4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate' .optimizer_for passes on all arguments"):
        optimizer_for(model, skew_lr=0.4, rate=0.1)
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    for module in (wrapped, torch.compile(wrapped, backend="eager")):
        same = optimizer_for(module, lr={"readout": 0.1, "rnn": 0.2}, skew_lr=0.4)
        assert [group["param_names"] for group in same.param_groups] == [
            group["param_names"] for group in optimizer.param_groups
        ]
    for lacking, rnn in (("skew", NonNormalRNN(3, 4)), ("spectrum", FactorizedRNN(3, 4))):
        with pytest.raises(InputError, match=f"{lacking}_lr must be a number, since lr is a dict, got None"):
            optimizer_for(nn.ModuleDict({"rnn": rnn}), lr={"rnn": 0.2})


@pytest.mark.parametrize("wrong", [{"basis_clip": 0}, {"basis_clip": "1"}, {"geodesic_options": 3}])
def test_wrong_options_of_the_bases_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be a"):
        optimizer_for(nn.Linear(3, 4), **wrong)


def test_states_and_rates_of_another_kind_are_refused() -> None:
    model = Model()
    optimizer, other = optimizer_for(model), optimizer_for(model, geodesic=GeodesicRMSprop)
    with pytest.raises(InputError, match="group 0 of the state_dict must be that of a GeodesicRMSprop.*alpha"):
        other.load_state_dict(optimizer.state_dict())
    (u,) = [basis(4, 2).requires_grad_()]
    with pytest.raises(InputError, match="group 0 of the state_dict.*correct_every"):
        GeodesicSGD([u], 0.1).load_state_dict(torch.optim.SGD([u], 0.1).state_dict())
    with pytest.raises(InputError, match="state_dict"):
        optimizer.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown child in lr 'typo'"):
        optimizer_for(RNN(3, 4), lr={"typo": 1.0})
