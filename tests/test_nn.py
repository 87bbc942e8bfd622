"""The modules against torch.nn.RNN and against plain loops: values and gradients, layouts, states, copies."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from module_kinds import EVERY, KINDS, D, N, made
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from orthokern import functional
from orthokern.errors import InputError
from orthokern.nn import (
    GRU,
    LSTM,
    RNN,
    ExpRNN,
    FactorizedRNN,
    LinearCrossEntropy,
    NonNormalRNN,
    RotationRNN,
)
from orthokern.nn.rnn import NONLINEARITIES

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def plain(module: Any, x: Tensor, h: Tensor) -> Tensor:
    """One layer, one direction, written down: states [T,B,N]."""
    w, leak = module.recurrent_matrix(), torch.sigmoid(module.leak_logit_l0) if module.learned_leak else module.leak
    bias = module.bias_ih_l0 + module.bias_hh_l0 if isinstance(module, RNN) else module.bias_l0
    param = {"prelu": "slope_l0", "modrelu": "modrelu_bias_l0"}.get(module.nonlinearity)
    slope = x.new_full((1,), 0.01) if module.nonlinearity == "leaky_relu" else None
    act_param = slope if param is None else module.get_parameter(param)
    states = []
    for x_t in x.unbind(0):
        a = module.gain * h @ w.T + x_t @ module.weight_ih_l0.T + bias
        if module.message_clip:
            a.register_hook(lambda g: g.clamp(-module.message_clip, module.message_clip))
        h = (1 - leak) * h + leak * functional.activation(a, module.nonlinearity, act_param, backend="reference")
        states.append(h)
    return torch.stack(states)


def gradients(module: torch.nn.Module, hs: Tensor) -> dict[str, Tensor]:
    cotangent = torch.randn(hs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    names, params = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad((hs * cotangent.to(hs)).sum(), params, allow_unused=True)
    return {"hs": hs.detach()} | {n: g for n, g in zip(names, grads, strict=True) if g is not None}


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize(
    "more", [{}, {"gain": 1.05}, {"gain": 0.7, "message_clip": 0.2}, {"leak": 0.2}, {"leak": 0.3, "learned_leak": True}]
)
def test_values_and_gradients_against_a_plain_loop(nonlinearity: str, more: dict[str, Any]) -> None:
    x, h0 = torch.randn(9, 4, 3, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    options: dict[str, Any] = {"nonlinearity": nonlinearity, "dtype": torch.float64, **more}
    modules = [RNN(3, 6, init="orthogonal", **options), ExpRNN(3, 6, **options), NonNormalRNN(3, 6, **options)]
    for margin, rank in ((0.3, None), (None, 4), (2.0, 1), (0.01, 6)):
        modules += [FactorizedRNN(3, 6, margin=margin, rank=rank, apply=a, **options) for a in ("factored", "composed")]
    for module in modules:
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name.startswith(("bias", "spectrum")):
                    p.add_(torch.randn_like(p))
        if "learned_leak" in more:
            torch.testing.assert_close(torch.sigmoid(module.leak_logit_l0), torch.full((6,), 0.3, dtype=x.dtype))
        close(gradients(module, module(x, h0[None])[0]), gradients(module, plain(module, x, h0)))


@pytest.mark.parametrize("vocabulary", [5, 50])  # fewer and more than ids
@pytest.mark.parametrize("make", [RNN, FactorizedRNN, GRU, LSTM, RotationRNN])
def test_token_ids_are_one_hot_input(make: Any, vocabulary: int) -> None:
    module = make(vocabulary, 4, 2, bidirectional=True, dtype=torch.float64)
    ids, lengths = torch.randint(0, vocabulary, (7, 3)), torch.tensor([3, 7, 1])
    hot = torch.nn.functional.one_hot(ids, vocabulary).double()

    def seen(x: Any) -> list[Tensor]:
        output, last = module(x)
        values = output.data if isinstance(output, PackedSequence) else output
        last = last if isinstance(last, Tensor) else torch.stack(last)
        return [values, last, *torch.autograd.grad(values.sin().sum() + last.cos().sum(), list(module.parameters()))]

    close(seen(ids), seen(hot))
    close(seen(ids.int()), seen(hot))
    close(seen(ids[:, 0]), seen(hot[:, 0]))
    packed = [pack_sequence([d[:n, b] for b, n in enumerate(lengths)], enforce_sorted=False) for d in (ids, hot)]
    close(seen(packed[0]), seen(packed[1]))
    module.batch_first = True
    close(seen(ids), seen(hot))


@pytest.mark.parametrize("kind", KINDS)
def test_learned_initial_states(kind: str) -> None:
    module, x = made(kind, num_layers=2, bidirectional=True, learned_h0=True), torch.randn(5, 3, D)
    states = [getattr(module, f"h0_{suffix}") for suffix in ("l0", "l0_reverse", "l1", "l1_reverse")]
    expected = module(x, torch.stack(states).unsqueeze(1).repeat(1, 3, 1))
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", EVERY)
def test_copies(kind: str) -> None:
    options = {} if kind == "peephole" else {"learned_h0": True}
    options |= {} if kind in ("gru", "peephole", "rotation") else {"nonlinearity": "modrelu"}
    module, x = made(kind, num_layers=2, **options), torch.randn(5, 2, D)
    expected, saved, buffer = module(x)[0], EVERY[kind](D, N, 2, **options), io.BytesIO()
    assert all(type(value) is Tensor for value in module.state_dict().values())  # as safetensors needs it
    torch.save(module.state_dict(), buffer)
    saved.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    for twin in (saved, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x)[0], expected)
    double = copy.deepcopy(module).to(torch.float64)
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    torch.testing.assert_close(double(x.double())[0].float(), expected, rtol=1e-5, atol=1e-6)


def test_repr() -> None:
    assert repr(RNN(3, 4)) == "RNN(3, 4)"
    shown = repr(RNN(3, 4, 2, "relu", batch_first=True, init="henaff", backend="reference"))
    assert shown == "RNN(3, 4, num_layers=2, nonlinearity='relu', batch_first=True, backend='reference', init='henaff')"
    assert repr(RNN(3, 4, gain=1.05, message_clip=100)) == "RNN(3, 4, message_clip=100.0, gain=1.05)"
    shown = repr(FactorizedRNN(3, 4, margin=None, rank=2, apply="composed", init="glorot", nonlinearity="leaky_relu"))
    assert shown == (
        "FactorizedRNN(3, 4, nonlinearity='leaky_relu', margin=None, rank=2, apply='composed', init='glorot')"
    )


@pytest.mark.parametrize("spectrum_map", ["sigmoid", "tanh"])
@pytest.mark.parametrize("margin", [0.0, 0.2, 3.0, None])
def test_factorized_spectrum_and_matrix(margin: float | None, spectrum_map: str) -> None:
    """tanh(p) is the sigmoid map of 2 p; both have the paper's range."""
    options: dict[str, Any] = {"margin": margin, "spectrum_map": spectrum_map, "dtype": torch.float64}
    module = FactorizedRNN(3, 6, 2, bidirectional=True, rank=4, **options)
    assert module.orthogonality_error() < 1e-14
    w = module.recurrent_matrix(1, reverse=True)
    torch.testing.assert_close(w, module.u_l1_reverse @ module.v_l1_reverse.T)  # s = 1 at first
    p = torch.tensor([-50.0, -0.7, 0.4, 50.0], dtype=torch.float64)
    with torch.no_grad():
        module.spectrum_l1.copy_(p)
    squashed = p.tanh() if spectrum_map == "tanh" else 2 * torch.sigmoid(p) - 1
    expected = p if margin is None else 1 + margin * squashed
    torch.testing.assert_close(module.spectrum(1), expected)
    torch.testing.assert_close(module.singular_values(1), expected.abs())
    assert not module.singular_values(1).requires_grad and module.spectrum(1).requires_grad
    values = torch.linalg.svdvals(module.recurrent_matrix(-1))[:4]
    torch.testing.assert_close(values, expected.abs().sort(descending=True).values)
    assert len(module.spectra()) == 4 and torch.equal(module.spectra()[2], module.spectrum(1))
    module(torch.randn(3, 1, 3, dtype=torch.float64))[0].sum().backward()
    assert module.spectrum_l1.grad is not None and bool(module.spectrum_l1.grad.any()) == (margin != 0)
    with torch.no_grad():
        module.v_l0[0, 0] += 0.5
    assert module.orthogonality_error() > 0.2
    assert ("spectrum_map" in repr(module)) == (spectrum_map == "tanh")


@pytest.mark.parametrize("kind", EVERY)
def test_shapes_on_the_meta_device(kind: str) -> None:
    module = EVERY[kind](D, N, 2, bidirectional=True, device="meta")
    for x in (torch.zeros(5, 2, D, device="meta"), torch.zeros(5, 2, dtype=torch.int64, device="meta")):
        output, last = module(x)
        assert output.is_meta and output.shape == (5, 2, 2 * N)
        assert all(state.shape == (4, 2, N) for state in ([last] if isinstance(last, Tensor) else last))


@pytest.mark.parametrize("kind", [RNN, GRU])
def test_token_ids_in_a_compiled_module(kind: Any) -> None:
    module, ids = kind(3, 4), torch.tensor([[0, 2], [1, 1]])
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ids)[0], module(ids)[0])
    for wrong in (-1, 3):
        with pytest.raises((InputError, RuntimeError, IndexError), match="token ids|index out of range"):
            compiled(torch.tensor([[0, 2], [wrong, 1]]))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", EVERY)
def test_made_on_the_meta_device_and_loaded(kind: str, assign: bool) -> None:
    """All that a module computes with is in its constructor's arguments or in its state_dict."""
    options = {} if kind in ("gru", "peephole", "rotation") else {"nonlinearity": "leaky_relu", "negative_slope": 0.2}
    module, x = made(kind, **options), torch.randn(5, 2, D)
    with torch.device("meta"):
        other = EVERY[kind](D, N, **options)
    if not assign:
        other.to_empty(device="cpu")
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.detach().fill_(7)
    other.load_state_dict(module.state_dict(), assign=assign)
    assert torch.equal(other(x)[0], module(x)[0])


@pytest.mark.parametrize("bias", [True, False])
def test_linear_cross_entropy_module(bias: bool) -> None:
    torch.manual_seed(1)
    linear = torch.nn.Linear(6, 5, bias=bias, dtype=torch.float64)
    torch.manual_seed(1)
    module = LinearCrossEntropy(6, 5, bias, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(linear.parameters(), module.parameters(), strict=True))
    hidden, target = torch.randn(4, 3, 6, dtype=torch.float64), torch.randint(0, 5, (4, 3))
    torch.testing.assert_close(module(hidden), linear(hidden))
    for reduction in ("mean", "sum"):
        module.reduction = reduction
        logits = linear(hidden).flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, target.flatten(), reduction=reduction)
        torch.testing.assert_close(module.loss(hidden, target), expected)


@pytest.mark.parametrize("kind", EVERY)
def test_a_batch_of_no_sequences(kind: str) -> None:
    module, resets = made(kind), torch.zeros(5, 0, dtype=torch.bool)
    options = {} if kind == "peephole" else {"resets": resets}
    for x in (torch.zeros(5, 0, D), torch.zeros(5, 0, dtype=torch.int64)):
        output, last = module(x, **options)
        last = last if isinstance(last, Tensor) else torch.stack(last).sum(0)
        assert output.shape == (5, 0, N) and last.shape == (1, 0, N)
        for grad in torch.autograd.grad(output.sum() + last.sum(), list(module.parameters())):
            assert not grad.any()
    torch.nn.init.constant_(module.weight_ih_l0, float("inf"))  # nothing is computed
    module(x)[0].sum().backward()
    assert not module.weight_ih_l0.grad.any()
    if kind in KINDS:
        frozen = made(kind).frozen()
        assert frozen(torch.zeros(5, 0, dtype=torch.int64))[0].shape == (5, 0, N)
        assert frozen.step(torch.zeros(0, D))[0].shape == (0, N)


@pytest.mark.parametrize("kind", EVERY)
def test_a_dropout_without_effect_warns(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EVERY[kind](D, N, 2, dropout=0.1)
    with pytest.warns(UserWarning, match="num_layers is 1") as caught:
        EVERY[kind](D, N, dropout=0.1)
    assert Path(caught[0].filename).parent == Path(__file__).parent  # the line that calls the constructor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_rnn_runs_in_16_bits(dtype: torch.dtype) -> None:
    module, x = made("rnn"), torch.randn(5, 2, D)
    expected = module(x)[0]
    states = module.to(dtype)(x.to(dtype))[0]
    torch.testing.assert_close(states.float(), expected, rtol=0.05, atol=0.05)
    states.sum().backward()
    assert states.dtype == dtype and all(p.grad.isfinite().all() for p in module.parameters())


def test_noise_is_added_to_the_input_term_in_training() -> None:
    rnn = FactorizedRNN(3, 8, noise=0.5, leak=0.2)
    quiet = FactorizedRNN(8, 8, leak=0.2, bias=False)
    quiet.load_state_dict({**rnn.state_dict(), "weight_ih_l0": torch.eye(8)}, strict=False)
    x = torch.randn(6, 2, 3)
    torch.manual_seed(5)
    states = rnn(x)[0]
    torch.manual_seed(5)
    term = x @ rnn.weight_ih_l0.mT + rnn.bias_l0
    torch.testing.assert_close(states, quiet(term + 0.5 * torch.randn(6, 2, 8))[0])
    rnn.noise_generator = torch.Generator().manual_seed(5)
    globally, copied = torch.get_rng_state(), copy.deepcopy(rnn)
    torch.testing.assert_close(rnn(x)[0], states)
    assert torch.equal(copied(x)[0], states) and torch.equal(torch.get_rng_state(), globally)
    assert torch.equal(rnn.eval()(x)[0], rnn(x)[0])
    rnn.noise_in_eval, rnn.noise_generator = True, torch.Generator().manual_seed(5)
    torch.testing.assert_close(rnn(x)[0], states)
    frozen = rnn.frozen()
    assert torch.equal(frozen(x)[0], frozen(x)[0])


def test_a_learned_leak_stays_above_zero() -> None:
    rnn = RNN(3, 8, leak=0.5, learned_leak=True)
    torch.nn.init.constant_(rnn.leak_logit_l0, -200.0)
    assert torch.equal(rnn(torch.randn(4, 2, 3))[0], torch.zeros(4, 2, 8))


def test_the_loss_has_the_leak_and_the_noise() -> None:
    options: dict[str, Any] = {"leak": 0.4, "learned_leak": True, "noise": 0.1, "dtype": torch.float64}
    rnn = FactorizedRNN(5, 8, nonlinearity="identity", **options)
    readout = torch.nn.Linear(8, 3, dtype=torch.float64)
    tokens, target = torch.randint(0, 5, (9, 4)), torch.randint(0, 3, (9, 4))
    torch.manual_seed(1)
    loss, _ = rnn.loss(tokens, readout, target)
    torch.manual_seed(1)
    expected = torch.nn.functional.cross_entropy(readout(rnn(tokens)[0]).flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected)
    leaves = [*rnn.parameters(), *readout.parameters()]
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))
    assert "leak" in rnn.explain_loss(1000, 4, 3)[1]
