"""Resets in the modules, in their loss, and with TorchRL's conventions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import some_lengths
from module_kinds import KINDS, D, N, made
from torch import Tensor, nn

from orthokern.errors import InputError
from orthokern.nn import GRU, RNN, EpisodeRNN, ExpRNN, FactorizedRNN, NonNormalRNN, PeepholeLSTM
from orthokern.ops.modal import loss as scan_loss


def some_resets(T: int, B: int, seed: int = 0) -> Tensor:
    resets = torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < 0.2
    resets[T // 2, 0] = True
    return resets


def cut_by_hand(rnn: nn.Module, x: Tensor, resets: Tensor, hx: Tensor, reset_state: Tensor) -> tuple[Tensor, Tensor]:
    """The module called on every part between resets: (output [T, B, N], h_n)."""
    outputs, ends = [], []
    for b in range(x.shape[1]):
        borders = [t for t in range(len(x)) if resets[t, b]]
        pieces, h = [], hx[:, b : b + 1]
        for start, stop in zip([0, *borders], [*borders, len(x)], strict=True):
            if start in borders:
                h = reset_state[:, b : b + 1]
            if stop > start:
                out, h = rnn(x[start:stop, b : b + 1], h.contiguous())
                pieces.append(out)
        outputs.append(torch.cat(pieces))
        ends.append(h)
    return torch.cat(outputs, 1), torch.cat(ends, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_cut_every_layer(kind: str) -> None:
    T, B, rnn = 11, 4, made(kind, num_layers=2, dtype=torch.float64)
    x, hx, state = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((T, B, D), (2, B, N), (2, B, N)))
    resets, grad = some_resets(T, B), torch.randn(T, B, N, dtype=torch.float64)
    leaves = [x, hx, state, *rnn.parameters()]
    results = []
    for out, h_n in (rnn(x, hx, resets=resets, reset_state=state), cut_by_hand(rnn, x, resets, hx, state)):
        results.append([out, h_n, *torch.autograd.grad([out, h_n], leaves, [grad, torch.ones_like(h_n)])])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)

    one, last = rnn(x[:, 0], hx[:, 0], resets=resets[:, 0], reset_state=state[:, 0])
    torch.testing.assert_close(one, results[0][0][:, 0], rtol=1e-12, atol=1e-13)
    assert last.shape == (2, N)
    rnn.batch_first = True
    out, h_n = rnn(x.transpose(0, 1), hx, resets=resets.mT, reset_state=state)
    assert torch.equal(out.transpose(0, 1), results[0][0]) and torch.equal(h_n, results[0][1])


def test_resets_start_from_given_learned_or_zero_states() -> None:
    rnn, plain = RNN(2, 5, learned_h0=True, dtype=torch.float64), RNN(2, 5, dtype=torch.float64)
    nn.init.normal_(rnn.h0_l0)
    plain.load_state_dict(rnn.state_dict(), strict=False)
    x, resets = torch.randn(9, 3, 2, dtype=torch.float64), some_resets(9, 3)
    hx, zeros = torch.randn(1, 3, 5, dtype=torch.float64), torch.zeros(1, 3, 5, dtype=torch.float64)
    learned = rnn.h0_l0.expand(1, 3, 5)
    torch.testing.assert_close(rnn(x, resets=resets)[0], cut_by_hand(plain, x, resets, learned, learned)[0])
    torch.testing.assert_close(rnn(x, hx, resets=resets)[0], cut_by_hand(plain, x, resets, hx, hx)[0])
    torch.testing.assert_close(plain(x, resets=resets)[0], cut_by_hand(plain, x, resets, zeros, zeros)[0])
    rnn(x, resets=resets)[0].square().sum().backward()
    assert rnn.h0_l0.grad is not None and rnn.h0_l0.grad.abs().min() > 0


@pytest.mark.parametrize("nonlinearity", ["tanh", "identity"])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_the_loss_takes_resets(nonlinearity: str, with_lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece, and in chunks whose entering state is not the one that resets start from."""
    T, B, N = 13, 3, 5
    rnn = FactorizedRNN(4, N, nonlinearity=nonlinearity, dtype=torch.float64)
    readout = nn.Linear(N, 3, dtype=torch.float64)
    x, target = torch.randint(4, (T, B)), torch.randint(3, (T, B))
    resets, lengths = some_resets(T, B), some_lengths(B, T, "any") if with_lengths else None
    hx, state = (torch.randn(1, B, N, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = [hx, state, *rnn.parameters(), *readout.parameters()]
    more = {"resets": resets, "reset_state": state}
    states, _ = rnn(x, hx, **more)
    counts = torch.ones(T, B, dtype=torch.bool) if lengths is None else torch.arange(T)[:, None] < lengths
    expected = nn.functional.cross_entropy(readout(states)[counts], target[counts])
    wanted = torch.autograd.grad(expected, leaves)
    for chunk in (None, 4):
        if chunk:
            monkeypatch.setattr(scan_loss, "_is_kept_whole", lambda *_: False)
            monkeypatch.setattr(scan_loss, "_chunk_steps", lambda _: 4)
        loss, hits = rnn.loss(x, readout, target, hx, lengths=lengths, **more)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
        right = (readout(states).argmax(-1) == target) & counts
        assert torch.equal(hits, right.sum(1))
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), wanted, rtol=1e-10, atol=1e-12)


def test_bad_resets_are_one_line() -> None:
    rnn, x = RNN(3, 5), torch.randn(7, 2, 3)
    good = torch.zeros(7, 2, dtype=torch.bool)
    first, both = RNN(3, 5, batch_first=True), RNN(3, 5, bidirectional=True)
    cases: list[tuple[RNN, Any, dict[str, Any], str]] = [
        (rnn, x, {"resets": good.int()}, r"resets is torch.int32 \(7, 2\).*; accepted: torch.bool \(7, 2\) \(\[T, B\]"),
        (rnn, x, {"resets": good.mT}, r"resets is torch.bool \(2, 7\)"),
        (first, x.transpose(0, 1), {"resets": good}, r"accepted: torch.bool \(2, 7\) \(\[B, T\]\)"),
        (rnn, x[:, 0], {"resets": good}, r"accepted: torch.bool \(7,\) \(\[T\]\)"),
        (rnn, x, {"resets": [True]}, "resets must be a Tensor or None, got list"),
        (both, x, {"resets": good}, "resets are given to a bidirectional module"),
        (rnn, x, {"reset_state": torch.zeros(1, 2, 5)}, "reset_state is given without resets"),
        (rnn, x, {"resets": good, "reset_state": torch.zeros(2, 5)}, r"reset_state has shape \(2, 5\)"),
        (rnn, x, {"resets": good, "reset_state": torch.zeros(1, 2, 5).double()}, "reset_state is torch.float64"),
    ]
    for module, given_, options, message in cases:
        with pytest.raises(InputError, match=message):
            module(given_, **options)


def test_episodes_step_by_step_and_in_sequences() -> None:
    """Steps one at a time and whole sequences give the same states; tensors of any number of dimensions."""
    for rnn in (RNN(3, 5, num_layers=2), FactorizedRNN(3, 5, num_layers=2, batch_first=True)):
        core = EpisodeRNN(rnn)
        value, is_init = torch.randn(4, 9, 3), some_resets(9, 4).mT.unsqueeze(-1)
        start = torch.randn(4, 9, 2, 5)
        states, last = core(value, start, is_init)
        held, stepped = start[:, 0], []
        for t in range(9):
            state, held = core(value[:, t], held, is_init[:, t])
            stepped.append(state)
        torch.testing.assert_close(states, torch.stack(stepped, 1))
        torch.testing.assert_close(last[:, -1], held)
        assert not last[:, :-1].any()
        wide = core(value.view(2, 2, 9, 3), start.view(2, 2, 9, 2, 5), is_init.view(2, 2, 9, 1))
        assert torch.equal(wide[0].flatten(0, 1), states) and torch.equal(wide[1].flatten(0, 1), last)
        alone = EpisodeRNN(rnn, recurrent=True)(value[0], start[0], is_init[0])
        torch.testing.assert_close(alone[0], states[0])
        with pytest.raises(InputError, match=r"is_init is torch.bool \(4, 9\)"):
            core(value, start, is_init.squeeze(-1))
        with pytest.raises(InputError, match="recurrent_state has shape"):
            core(value, start[:, 0], is_init)
    with pytest.raises(InputError, match="and bidirectional"):
        EpisodeRNN(RNN(3, 5, bidirectional=True))


def test_episodes_need_a_module_that_takes_resets() -> None:
    for wrong in (nn.Linear(3, 5), 3):
        with pytest.raises(InputError, match="^rnn is of type .* without num_layers; accepted: a module such as"):
            EpisodeRNN(wrong)  # type: ignore[arg-type]
    for wrong in (nn.RNN(3, 5), PeepholeLSTM(3, 5)):
        with pytest.raises(
            InputError, match="^rnn is .*, whose forward takes no resets; accepted: a module such as orthokern.nn.RNN"
        ):
            EpisodeRNN(wrong)
    for right in (GRU(3, 5), ExpRNN(3, 5), NonNormalRNN(3, 5), RNN(3, 5).frozen(), torch.compile(RNN(3, 5))):
        assert EpisodeRNN(right)  # type: ignore[arg-type]
    value, is_init = torch.randn(2, 4, 3), torch.zeros(2, 4, 1, dtype=torch.bool)
    assert EpisodeRNN(RNN(3, 5).frozen())(value, None, is_init)[0].shape == (2, 4, 5)
