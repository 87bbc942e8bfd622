"""orthokern.compare: agreement, disagreement that must be detected, and one line for each mistake."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from orthokern import InputError
from orthokern import compare as room
from orthokern.compare import Errors, compare


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Classifier(nn.Module):
    """Tokens in, a dictionary with logits and states out; an initial state of the default dtype."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.first = nn.GRU(6, 5, batch_first=True, **options)
        self.second = nn.RNN(5, 4, nonlinearity="relu", batch_first=True)
        self.third = nn.LSTM(4, 3, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        h0 = torch.zeros(self.first.num_layers, len(ids), 5)
        states, last = self.first(self.embedding(ids), h0)
        states = self.drop(self.second(states)[0])
        return {"logits": self.head(self.third(states)[0]), "last": (last, None)}


def test_a_model_agrees_with_its_conversion() -> None:
    model = Classifier(num_layers=2, dropout=0.3)
    before = copy.deepcopy(model.state_dict())
    result = compare(model, torch.randint(0, 9, (3, 7)), rounds=2)
    assert result.agree and result.outputs.torch > 0 and result.gradients is not None and result.gradients.torch > 0
    assert len(result.forward.torch) == len(result.forward.orthokern) == 2 and result.backward is not None
    assert [each.name for each in result.report.replaced] == ["first", "second"]
    assert [each.name for each in result.report.skipped] == ["third"] and result.peak_mib is None
    assert isinstance(model.first, nn.GRU) and model.first.dropout == 0.3 and model.drop.p == 0.5
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    text = str(result)
    for part in ("input [3, 7] int64", "backend of first: ", "forward, ms", "error of gradients", "is switched off"):
        assert part in text, text
    assert text.endswith("torch and orthokern agree")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_input_and_asked_backend(dtype: torch.dtype) -> None:
    x = pack_sequence([torch.randn(n, 3, dtype=dtype) for n in (2, 5, 1)], enforce_sorted=False)
    result = compare(nn.GRU(3, 4, bidirectional=True, dtype=dtype), x, rounds=1, backend="reference")
    assert result.agree and result.backends == ("backend of the module itself: reference (gru_scan)",)


def test_what_is_frozen_runs_forward_only() -> None:
    module = nn.RNN(3, 4).requires_grad_(False)
    result = compare(module, torch.randn(5, 2, 3), rounds=1)
    assert result.agree and result.backward is None and result.gradients is None and "forward only" in str(result)


@pytest.mark.parametrize(("part", "change"), [(0, 1e-4), (1, 1e-3)], ids=["outputs", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_kernel_is_seen(part: int, change: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    true_convert = room.convert

    def wrong(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hs = output[0]
        return hs * (1 + change) if part == 0 else hs + change * (hs - hs.detach()), output[1]

    def convert(module: nn.Module, **options: Any) -> Any:
        conversion = true_convert(module, **options)
        conversion.module.register_forward_hook(wrong)
        return conversion

    monkeypatch.setattr(room, "convert", convert)
    result = compare(nn.RNN(3, 5, dtype=dtype), torch.randn(4, 2, 3, dtype=dtype), rounds=1)
    text = str(result)
    assert not result.agree and text.endswith("torch and orthokern DISAGREE")
    lines = [line for line in text.splitlines() if "MORE THAN" in line]
    assert any(line.startswith(("error of outputs", "error of gradients")[part]) for line in lines)


@pytest.mark.parametrize("bad", [1, 3])
def test_one_disagreement_is_drawn_again(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit on the kink of relu is no disagreement; what disagrees at every draw is. The weights come back."""
    true_errors, seen = room._errors, []

    def errors(theirs: nn.Module, ours: nn.Module, *rest: Any) -> Any:
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a, b)
        seen.append(next(theirs.parameters()).clone())
        outputs, gradients = true_errors(theirs, ours, *rest)
        return (Errors(0.0, 1.0, 1.0, 0.1), gradients) if len(seen) <= bad else (outputs, gradients)

    monkeypatch.setattr(room, "_errors", errors)
    module = nn.RNN(2, 3, nonlinearity="relu")
    result = compare(module, torch.randn(4, 2, 2), rounds=1)
    assert result.agree == (bad == 1) and ("agreed at draw 2" in str(result)) == (bad == 1)
    assert len(seen) == min(bad + 1, 3) and not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], module.weight_ih_l0)


count = itertools.count()


def test_the_random_numbers_of_the_process_stay() -> None:
    module = nn.GRU(3, 4)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    compare(module, torch.ones(6, 2, 3), rounds=1)
    assert torch.equal(torch.rand(2), expected)


class Model(nn.Module):
    def __init__(self, run: Callable[[nn.RNN, Tensor], Tensor]) -> None:
        super().__init__()
        self.rnn, self.run = nn.RNN(3, 4), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.rnn, x)


@pytest.mark.parametrize(
    ("module", "options", "text"),
    [
        (nn.Sequential(nn.LSTM(3, 2)), {}, r"to replace; 0 \(torch.nn.LSTM\(3, 2\)\): orthokern.nn.LSTM"),
        (Model(lambda rnn, x: rnn(x)[0] + torch.rand(())), {}, "forward of Model draws random numbers"),
        (Model(lambda rnn, x: rnn(x)[0] + next(count)), {}, "forward of Model keeps a state from call to call"),
        (nn.GRU(3, 4), {"seed": -1}, "seed must be an integer of at least 0 and at most 9223372036854775806, got -1"),
        (nn.GRU(3, 4, device="meta"), {}, "GRU or an input is on the device meta; accepted: tensors with values"),
        (nn.GRU(3, 4), {"rounds": 0}, "rounds must be"),
        (3, {}, "module must be"),
    ],
)
def test_mistakes(module: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        compare(module, torch.randn(6, 2, 3), **options)


def test_numbers_that_do_not_exist_or_are_not_finite_do_not_agree() -> None:
    assert not Errors(0.0, float("nan"), 0.0, 1.0).agree
    model = nn.GRU(3, 4)
    nn.init.constant_(model.weight_hh_l0, torch.nan)  # it would agree with anything that is NaN as well
    with pytest.raises(InputError, match="no output of the model is a finite number, also in float64"):
        compare(model, torch.randn(5, 2, 3))
    with pytest.raises(InputError, match="the outputs of the model are empty, as for a batch of no sequences"):
        compare(nn.GRU(3, 4), torch.randn(5, 0, 3))
