"""The loss of the recurrent modules, the norms through time, and the limits of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_scan_cross_entropy import IDS, big, problem
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_sequence

from orthokern import functional
from orthokern.diagnostics import profile_steps, tap
from orthokern.errors import InputError
from orthokern.nn import RNN, ExpRNN, FactorizedRNN, LinearCrossEntropy, NonNormalRNN
from orthokern.ops.modal import choice
from orthokern.ops.modal import loss as scan_loss


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("Module", [RNN, FactorizedRNN, ExpRNN, NonNormalRNN])
@pytest.mark.parametrize("options", [{}, {"gain": 0.9, "learned_h0": True}], ids=["", "gain and h0"])
def test_modules(Module: Any, layers: int, options: dict[str, Any]) -> None:
    rnn = Module(5, 12, layers, nonlinearity="identity", dtype=torch.float64, **options)
    readout = LinearCrossEntropy(12, 4, dtype=torch.float64)
    ids, target = torch.randint(5, (20, 3)), torch.randint(4, (20, 3))
    hs = rnn(ids)[0]
    loss = readout.loss(hs, target)
    parameters = [*rnn.parameters(), *readout.parameters()]
    expected = torch.autograd.grad(loss, parameters)
    for algorithm in ("modal", "sequential"):
        result, hits = rnn.loss(ids.to(torch.uint8), readout, target.to(torch.uint8), algorithm=algorithm)
        assert (result - loss).abs() < 1e-12
        assert torch.equal(hits, (readout(hs).argmax(-1) == target).sum(1))
        for a, b in zip(torch.autograd.grad(result, parameters), expected, strict=True):
            assert (a - b).norm() <= 1e-9 * b.norm()


def test_layouts() -> None:
    rnn, readout = FactorizedRNN(3, 8, nonlinearity="identity", batch_first=True), nn.Linear(8, 4)
    x, target, hx = torch.randn(2, 9, 3), torch.randint(4, (2, 9)), torch.randn(1, 2, 8)
    expected = nn.functional.cross_entropy(readout(rnn(x, hx)[0]).flatten(0, 1), target.flatten())
    loss, hits = rnn.loss(x, readout, target, hx, algorithm="modal")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and hits.shape == (9,)
    one, hits = rnn.loss(x[0], readout, target[0], hx[:, 0], reduction="sum")
    other, _ = rnn.loss(x[:1], readout, target[:1], hx[:, :1], reduction="sum")
    assert one.item() == pytest.approx(other.item()) and hits.shape == (9,)


@pytest.mark.parametrize("nonlinearity", ["identity", "tanh"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("noise", [0.0, 1e-30])
def test_padding_is_not_read(nonlinearity: str, layers: int, ids: bool, noise: float) -> None:
    """By no layer: neither NaN nor ids out of range. The noise is below the precision."""
    options: dict[str, Any] = {"nonlinearity": nonlinearity, "noise": noise, "dtype": torch.float64}
    rnn, readout = FactorizedRNN(3, 8, layers, **options), nn.Linear(8, 4).double()
    lengths, padding = torch.tensor([9, 5]), torch.arange(9)[:, None] >= torch.tensor([9, 5])
    x = torch.randint(3, (9, 2)) if ids else torch.randn(9, 2, 3, dtype=torch.float64)
    target = torch.randint(4, (9, 2))
    parameters = [*rnn.parameters(), *readout.parameters()]
    expected = nn.functional.cross_entropy(readout(rnn(x)[0])[~padding], target[~padding])
    leaves = torch.autograd.grad(expected, parameters)
    x[padding] = -1 if ids else torch.nan
    loss, _ = rnn.loss(x, readout, target, lengths=lengths)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), leaves)


def test_a_module_refuses() -> None:
    rnn, readout = FactorizedRNN(3, 8), nn.Linear(8, 4)
    x, target = torch.randn(9, 2, 3), torch.zeros(9, 2, dtype=torch.int64)
    both, packed = FactorizedRNN(3, 8, bidirectional=True), pack_sequence([x[:, 0]])
    calls: dict[str, Callable[[], Any]] = {
        "target is": lambda: rnn.loss(x, readout, target.mT),
        "readout is": lambda: rnn.loss(x, nn.Linear(7, 4), target),
        "readout is Tanh": lambda: rnn.loss(x, nn.Tanh(), target),
        "one direction": lambda: both.loss(x, readout, target),
        "^lengths ": lambda: FactorizedRNN(3, 8, 2).loss(x, readout, target, lengths=[9, 5]),
        "activation is 'tanh'": lambda: rnn.loss(x, readout, target, algorithm="modal"),
        "input of loss is a PackedSequence; accepted: a Tensor": lambda: rnn.loss(packed, readout, target[:, :1]),
    }
    for message, call in calls.items():
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("activation", ["identity", "tanh"])
def test_the_reduction_is_that_of_the_readout(activation: str) -> None:
    rnn = RNN(5, 8, nonlinearity=activation, dtype=torch.float64)
    ids = torch.randint(5, (40, 3))
    mean, total = (LinearCrossEntropy(8, 4, dtype=torch.float64, reduction=kind) for kind in ("mean", "sum"))
    for readout in (mean, total):
        loss, _ = rnn.loss(ids, readout, ids % 4)
        torch.testing.assert_close(loss, readout.loss(rnn(ids)[0], ids % 4), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        rnn.loss(ids, total, ids % 4, reduction="mean")[0] * ids.numel(), loss, rtol=1e-9, atol=0
    )
    assert torch.equal(rnn.loss(ids, torch.compile(total, backend="eager"), ids % 4)[0], loss)
    linear = nn.Linear(8, 4, dtype=torch.float64)
    assert torch.equal(rnn.loss(ids, linear, ids % 4)[0], rnn.loss(ids, linear, ids % 4, reduction="mean")[0])


def test_pruned_weights_train() -> None:
    """The loss is no forward, before which torch computes them."""
    rnn, readout = RNN(5, 8), LinearCrossEntropy(8, 4)
    for module, name in ((rnn, "weight_hh_l0"), (readout, "weight")):
        prune.l1_unstructured(module, name, 0.3)
    optimizer, ids = torch.optim.SGD([*rnn.parameters(), *readout.parameters()], 0.5), torch.randint(5, (6, 3))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(rnn.loss(ids, readout, ids % 4)[0])
        losses[-1].backward()
        optimizer.step()
    assert torch.equal(readout.loss(rnn(ids)[0], ids % 4), rnn.loss(ids, readout, ids % 4)[0])
    assert losses[0] > losses[1] > losses[2]


def test_the_basis_is_part_of_the_state() -> None:
    """Kept in training alone; with it a run that goes on has the bits of one that never stopped."""
    rnn, readout = FactorizedRNN(5, 24, nonlinearity="identity"), nn.Linear(24, 4)
    optimizer = torch.optim.SGD([*rnn.parameters(), *readout.parameters()], 1e-2)

    def step(rnn: Any, readout: Any, optimizer: Any, seed: int) -> float:
        ids = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss, _ = rnn.loss(ids, readout, ids % 4, algorithm="modal")
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    assert not any("modal" in key for key in rnn.state_dict())
    for seed in range(4):
        step(rnn, readout, optimizer, seed)
    state = copy.deepcopy(rnn.state_dict())
    assert state["modal_basis_l0"].dtype == torch.float64

    other, other_readout = FactorizedRNN(5, 24, nonlinearity="identity"), nn.Linear(24, 4)
    assert not other.load_state_dict(state).unexpected_keys
    other_readout.load_state_dict(readout.state_dict())
    other_optimizer = torch.optim.SGD([*other.parameters(), *other_readout.parameters()], 1e-2)

    ids = torch.randint(5, (40, 3))
    with torch.no_grad():  # looking changes nothing
        rnn.loss(ids, readout, ids % 4, algorithm="modal")
    rnn.eval()
    rnn.loss(ids, readout, ids % 4, algorithm="modal")
    rnn.train()
    assert torch.equal(rnn.state_dict()["modal_basis_l0"], state["modal_basis_l0"])
    for seed in range(4, 8):
        assert step(rnn, readout, optimizer, seed) == step(other, other_readout, other_optimizer, seed)
    torch.testing.assert_close(list(rnn.parameters()), list(other.parameters()), rtol=0, atol=0)

    moved = copy.deepcopy(rnn).to("meta")
    assert moved.loss(ids.to("meta"), copy.deepcopy(readout).to("meta"), ids.to("meta") % 4)[0].is_meta
    empty = FactorizedRNN(5, 24, nonlinearity="identity", device="meta")
    empty.load_state_dict(state)  # which has no values to load
    assert "modal_basis_l0" not in empty.state_dict()
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty.state_dict()["modal_basis_l0"], state["modal_basis_l0"])

    del state["modal_basis_l0"]
    other.load_state_dict(state)
    assert "modal_basis_l0" not in other.state_dict()
    for wrong in (torch.ones(3), torch.ones(24, 25), [1.0]):
        state["modal_basis_l0"] = wrong
        with pytest.raises(RuntimeError, match=r"modal_basis_l0 of shape \[.*\] is no basis of 24 units"):
            other.load_state_dict(state)


def test_norms_through_time() -> None:
    """A sparse tap gets the norms of the sequential scan at the steps that a record keeps; a full one makes it run."""
    rnn = FactorizedRNN(5, 12, nonlinearity="identity", dtype=torch.float64)
    readout = LinearCrossEntropy(12, 4, dtype=torch.float64)
    ids = torch.randint(5, (200, 3))
    taps = {}
    for algorithm in ("modal", "sequential"):
        with tap(sparse=True) as taps[algorithm]:
            rnn.loss(ids, readout, ids % 4, algorithm=algorithm)[0].backward()
    kept = profile_steps(200)
    for name in ("state_norms", "grad_norms"):
        (result,), (expected,) = getattr(taps["modal"], name), getattr(taps["sequential"], name)
        assert torch.allclose(result[kept], expected[kept], rtol=1e-9)
        assert int(result.isnan().sum()) == 200 - len(kept)
    with tap(), torch.no_grad():
        assert functional.explain_scan_cross_entropy(**big())[0] == "sequential"
    with tap(sparse=True), torch.no_grad():
        assert functional.explain_scan_cross_entropy(**big())[0] == "modal"
        assert functional.explain_scan_cross_entropy(**big(), lengths=True)[0] == "sequential"


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize(("activation", "message_clip"), [("identity", 0.0), ("tanh", 0.0), ("tanh", 1e-3)])
def test_norms_of_a_scan_in_chunks(
    activation: str, message_clip: float, lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tap hears one scan of all steps, not one of each chunk."""
    leaves, arguments = problem(IDS, 8, 8, 19, 3, lengths=lengths)
    arguments |= {"activation": activation, "message_clip": message_clip}
    recorded = {}
    for name, kept in (("whole", 10**9), ("chunks", 0)):
        monkeypatch.setattr(scan_loss, "kept_states", lambda device, kept=kept: kept)
        monkeypatch.setattr(scan_loss, "CHUNK", 4 * 3 * 8 * 8)
        with tap() as recorded[name]:
            loss = functional.scan_cross_entropy(**arguments, algorithm="sequential").loss
            torch.autograd.grad(-3.0 * loss, leaves)
    for names in ("state_norms", "grad_norms"):
        (expected,), (result,) = getattr(recorded["whole"], names), getattr(recorded["chunks"], names)
        assert (result - expected).norm() <= 1e-13 * expected.norm()
    assert recorded["chunks"].ops == recorded["chunks"].state_ops == ["factored_scan"]
    with tap() as looked, torch.no_grad():
        functional.scan_cross_entropy(**arguments, algorithm="sequential")
    assert torch.equal(looked.state_norms[0], recorded["chunks"].state_norms[0]) and not looked.grad_norms


def test_features_that_would_fill_the_memory_stay_out_of_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert functional.explain_scan_cross_entropy(**big(), ids=False)[0] == "modal"
    monkeypatch.setattr(choice, "kept_states", lambda device: 4000 * 20 * 64 * 4 - 1)
    name, why = functional.explain_scan_cross_entropy(**big(), ids=False)
    assert name == "sequential" and why == "the inputs in modal coordinates would take 0.0191 GiB"
    assert functional.explain_scan_cross_entropy(**big())[0] == "modal"
