"""The argument lengths of the modules: a padded batch has the results of the packed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_kinds import EVERY, D, N, made
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from orthokern import InputError
from orthokern.nn import FactorizedRNN

T, B = 9, 4
LENGTHS = torch.tensor([3, T, 1, 5])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", EVERY)
def test_values_and_gradients_are_those_of_the_packed_batch(kind: str, bidirectional: bool, batch_first: bool) -> None:
    options: dict[str, Any] = {"bidirectional": bidirectional, "batch_first": batch_first, "dtype": torch.float64}
    module, generator = made(kind, num_layers=2, **options), torch.Generator().manual_seed(1)
    x = torch.randn(*((B, T) if batch_first else (T, B)), D, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    packed, last = module(pack_padded_sequence(x, LENGTHS, batch_first, enforce_sorted=False))
    expected = pad_packed_sequence(packed, batch_first)[0], last
    results = module(x, lengths=LENGTHS)
    torch.testing.assert_close(results, expected)
    cotangent = torch.randn(results[0].shape, dtype=torch.float64, generator=generator)

    def gradients(states: Tensor, last: Any) -> tuple[Tensor, ...]:
        end = last[0] if isinstance(last, tuple) else last
        return torch.autograd.grad((states * cotangent).sum() + end.sum(), [x, *module.parameters()])

    torch.testing.assert_close(gradients(*results), gradients(*expected))


@pytest.mark.parametrize("kind", ["factorized", "gru"])
def test_ids_states_and_resets_are_those_of_each_sequence(kind: str) -> None:
    """Also where the sequences are packed, in the order of the caller."""
    module, ids, resets = made(kind, num_layers=2), torch.randint(0, D, (T, B)), torch.rand(T, B) < 0.3
    hx, reset_state = torch.randn(2, 2, B, N)
    options = {"resets": resets, "reset_state": reset_state}
    packed, end = module(pack_padded_sequence(ids, LENGTHS, enforce_sorted=False), hx, **options)
    for states, last in (module(ids, hx, lengths=LENGTHS, **options), (pad_packed_sequence(packed)[0], end)):
        for b, length in enumerate(LENGTHS.tolist()):
            own = {"resets": resets[:length, b], "reset_state": reset_state[:, b]}
            torch.testing.assert_close((states[:length, b], last[:, b]), module(ids[:length, b], hx[:, b], **own))
            assert not states[length:, b].any()


@pytest.mark.parametrize("module", [*map(made, EVERY), FactorizedRNN(D, N, noise=0.0, leak=0.5)])
def test_the_padding_may_have_any_ids(module: nn.Module) -> None:
    ids = torch.randint(0, D, (T, B))
    padded = ids.masked_fill(torch.arange(T).unsqueeze(1) >= LENGTHS, -1)
    torch.testing.assert_close(module(padded, lengths=LENGTHS), module(ids, lengths=LENGTHS), rtol=0, atol=0)
    with pytest.raises(InputError, match="-1"):
        module(padded)


@pytest.mark.parametrize("kind", ["rnn", "peephole"])
def test_wrong_lengths_are_refused(kind: str) -> None:
    module, x = made(kind), torch.randn(T, B, D)
    wrong: list[tuple[Any, Any, str]] = [
        (x, [3, 3, 3, 3], "lengths"),
        (x, LENGTHS.int(), "lengths has dtype"),
        (x, LENGTHS[:2], r"\[B\]"),
        (x, LENGTHS + 1, "lengths holds 10"),
        (x, LENGTHS - 1, "lengths holds 0"),
        (x[:, :0], LENGTHS, r"\[B\]"),
        (x[:, 0], LENGTHS[:1], "one sequence without a batch"),
        (pack_padded_sequence(x, LENGTHS, enforce_sorted=False), LENGTHS, "None for a PackedSequence"),
    ]
    for input, lengths, message in wrong:
        with pytest.raises(InputError, match=message):
            module(input, lengths=lengths)
