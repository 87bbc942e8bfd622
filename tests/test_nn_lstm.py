"""orthokern.nn.LSTM is torch.nn.LSTM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from orthokern import nn
from orthokern.errors import InputError

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
]


def pair(**options: Any) -> tuple[nn.LSTM, torch.nn.LSTM]:
    torch.manual_seed(3)
    ours = nn.LSTM(3, 8, **options)
    torch.manual_seed(3)
    return ours, torch.nn.LSTM(3, 8, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_seed_gives_the_same_parameters_states_and_gradients(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    assert repr(ours) == repr(theirs)
    for (name, own), (other, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(own, expected)
    x, ways = torch.randn(4, 4, 3), 2 if options.get("bidirectional") else 1
    hx = tuple(torch.randn(options.get("num_layers", 1) * ways, 4, 8) for _ in range(2))
    results = []
    for module in (ours, theirs):
        output, (h, c) = module(x, hx)
        (output.square().sum() + (h * c).sum()).backward()
        results.append([output, h, c, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*results)


def test_packed_sequences_and_state_dicts() -> None:
    ours, theirs = pair()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    packed = pack_sequence([torch.randn(n, 3) for n in (5, 2, 4)], enforce_sorted=False)
    (output, states), (expected, others) = ours(packed), theirs(packed)
    torch.testing.assert_close([output.data, *states], [expected.data, *others])


def test_a_projection_is_refused() -> None:
    with pytest.raises(InputError, match=r"proj_size must be 0 .*, got 2"):
        nn.LSTM(3, 8, proj_size=2)
