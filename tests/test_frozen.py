"""Frozen modules: the results of the module that they were made from, step by step too, and nothing that it changes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from module_kinds import KINDS, D, N, made
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_sequence

from orthokern.errors import InputError
from orthokern.nn import RNN, FactorizedRNN, PeepholeLSTM, RotationRNN

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gain": 1.5, "nonlinearity": "prelu", "message_clip": 0.1, "checkpoint_every": 2},
    {"nonlinearity": "leaky_relu", "negative_slope": 0.3, "leak": 0.3, "noise": 0.5},
    {"nonlinearity": "tanh", "leak": 0.3, "learned_leak": True},
    {"num_layers": 2, "batch_first": True, "dropout": 0.9},
    {"bidirectional": True, "learned_h0": True, "dtype": torch.float64},
]


def close(actual: Any, expected: Any) -> None:
    """Composed matrices differ from the module's by rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_results_of_the_module(kind: str, options: dict[str, Any]) -> None:
    if kind in ("gru", "rotation") and "nonlinearity" in options:
        pytest.skip("has no such options")
    module, dtype = made(kind, **options), options.get("dtype", torch.float32)
    frozen = module.frozen().train()
    module.eval()  # dropout is always off in the frozen module
    if kind not in ("gru", "rotation"):
        close(frozen.recurrent_matrix(), module.recurrent_matrix().detach() * module.gain)
    assert not list(frozen.parameters())
    states = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    x, h = torch.randn(4, 5, D, dtype=dtype, requires_grad=True), torch.randn(states, 5, N, dtype=dtype)
    h_first = torch.randn(states, 4, N, dtype=dtype)
    for call in (
        (x, h_first if options.get("batch_first") else h),
        (x, None),
        (x[0], None),
        (torch.randint(D, (4, 5)), None),
    ):
        result = frozen(*call)
        assert not any(t.requires_grad for t in result)
        close(result, tuple(t.detach() for t in module(*call)))
    packed = pack_sequence([torch.randn(n, D, dtype=dtype) for n in (2, 5, 3)], enforce_sorted=False)
    close(frozen(packed)[0].data, module(packed)[0].data.detach())


@pytest.mark.parametrize("changed", ["pruned", "weight norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_computed_from_others(kind: str, changed: str) -> None:
    module, x = made(kind), torch.randn(4, 2, D)
    name = "weight_ih_l0"
    if changed == "pruned":
        prune.random_unstructured(module, name, amount=0.5)
    else:
        weight_norm(module, name)
    for parameter in module.parameters():  # after the hook of the pruning
        parameter.data.mul_(0.5)
    frozen = module.frozen()
    assert name in dict(frozen.named_buffers()) and name not in vars(frozen)
    close(frozen(x), tuple(t.detach() for t in module(x)))
    assert frozen.step(x[0])[0].shape == (2, N)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "batch_first": True, "learned_h0": True}, {"leak": 0.3}])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_make_the_sequence(kind: str, options: dict[str, Any], batch: int | None, ids: bool) -> None:
    """Without resets and with them; also of tensors with gradients."""
    if kind in ("gru", "rotation"):
        options = {name: value for name, value in options.items() if name != "leak"}
    frozen = made(kind, **options).frozen()
    shape = (6,) if batch is None else (6, batch)
    x = torch.randint(D, shape) if ids else torch.randn(*shape, D, requires_grad=True)
    time = 1 if batch and options.get("batch_first") else 0
    for resets in (None, torch.rand(shape) < 0.4):
        output, h_n = frozen(x.transpose(0, time), resets=None if resets is None else resets.transpose(0, time))
        outputs, h = [], None
        for t, one in enumerate(x):
            y, h = frozen.step(one, h, resets=None if resets is None else resets[t])
            assert not y.requires_grad and not h.requires_grad
            outputs.append(y)
            h.requires_grad_()
        close(torch.stack(outputs, time), output)
        close(h, h_n)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_stands_for_itself(kind: str, compiled: bool) -> None:
    """Copies, pickles and state_dicts: what becomes of the module, or of the original, changes nothing, also where
    torch.nn.Module.compile has set what they call."""
    module, x = made(kind), torch.randn(4, 2, D)
    if compiled:
        module.compile(backend="eager")
    frozen, other = module.frozen(), KINDS[kind](D, N).frozen()
    expected = frozen(x)[0]
    assert not expected.requires_grad and not torch.equal(other(x)[0], expected)
    if compiled:
        frozen.compile(backend="eager")
    for parameter in module.parameters():
        parameter.data.zero_()
    assert torch.equal(frozen.frozen()(x)[0], expected)
    other.load_state_dict(frozen.state_dict())
    copies = other, copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))
    for buffer in frozen.buffers():
        buffer.zero_()
    for one in copies:
        assert torch.equal(one(x)[0], expected)
    assert frozen.double()(x.double())[0].dtype == torch.float64
    assert type(frozen).__name__ in repr(nn.Sequential(frozen))


def test_low_ranks_stay_factored() -> None:
    assert set(FactorizedRNN(3, 8, rank=4).frozen().state_dict()) == {"u_l0", "s_l0", "v_l0", "weight_ih_l0", "bias_l0"}
    assert set(FactorizedRNN(3, 8, rank=5).frozen().state_dict()) == {"weight_hh_l0", "weight_ih_l0", "bias_l0"}


def test_bad_input() -> None:
    both, frozen, x = RNN(D, N, bidirectional=True).frozen(), RNN(D, N).frozen(), torch.zeros(1, D)
    for call, message in (
        (lambda: both.step(x), "step is for one direction"),
        (lambda: PeepholeLSTM(D, N).frozen(), "frozen is not for PeepholeLSTM modules; accepted: eval"),
        (lambda: frozen.step(torch.zeros(1, 1, D)), r"x has shape \(1, 1, 3\); accepted: \[B, 3\]"),
        (lambda: frozen.step(torch.zeros(1, D + 1)), r"x has shape \(1, 4\); accepted: \[B, 3\]"),
        (lambda: frozen.step(x, resets=torch.ones(3, dtype=torch.bool)), r"resets has shape \(3,\); accepted: \[B\]"),
        (lambda: frozen.reset_parameters(), "a frozen module has no parameters"),
        (lambda: frozen.step([0.0]), "x must be a Tensor, got list"),
        (lambda: frozen.step(x, resets=[True]), "resets must be a Tensor or None, got list"),
        (lambda: frozen.step(x, reset_state=torch.zeros(1, 1, N)), "reset_state is given without resets"),
        (lambda: frozen.step(x, torch.zeros(1, 2, N)), "hx has shape"),
        (lambda: frozen.step(torch.tensor([D])), r"\[0, .*= 3\)|\[0, 3\)"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_another_backend() -> None:
    frozen, x = RNN(D, N).frozen(), torch.randn(2, D)
    frozen.step(x)
    frozen.backend = "gpu"
    with pytest.raises(InputError, match="unknown backend 'gpu'"):
        frozen.step(x)


def test_a_rotation_loads() -> None:
    frozen, other = RotationRNN(D, N).frozen(), RotationRNN(D, N, margin=0.1, horizon=5).frozen()
    x, h = torch.randn(2, D), torch.randn(1, 2, N)
    before = frozen.step(x, h)[0]
    frozen.load_state_dict(other.state_dict())
    close(frozen.step(x, h), other.step(x, h))
    assert not torch.equal(before, frozen.step(x, h)[0])
    close(frozen.float().step(x, h), other.step(x, h))
    close(frozen.double().step(x.double(), h.double())[0].float(), other.step(x, h)[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gru", "rotation")])
def test_kept_arguments_follow_the_buffers(kind: str) -> None:
    """step and forward have the same bits after the values, the memory or the dtype of a buffer changed."""
    frozen = made(kind, leak=0.4, learned_leak=True, nonlinearity="leaky_relu").frozen()
    x, h = torch.randn(2, D), torch.randn(1, 2, N)

    def same(x: Tensor, h: Tensor) -> None:
        for _ in range(2):
            output, last = frozen.step(x, h)
            wanted = frozen(x.unsqueeze(0), h)
            torch.testing.assert_close((output.unsqueeze(0), last), wanted, rtol=0, atol=0)
            assert output.data_ptr() != last.data_ptr()

    same(x, h)
    same(x[:1], h[:, :1])
    for buffer in frozen.buffers():
        buffer += 0.1
        same(x, h)
        buffer.data = buffer.data + 0.1
        same(x.T.contiguous().T, h)
    frozen.negative_slope = 0.7
    same(x, h)
    frozen.nonlinearity = "relu"
    same(x, h)
    frozen.load_state_dict({name: tensor + 0.1 for name, tensor in frozen.state_dict().items()})
    same(x, h)
    frozen.double()
    same(x.double(), h.double())
    with pytest.raises(InputError, match="hx is"):
        frozen.step(x.double(), h)
    with pytest.raises(InputError, match=r"x has shape \(2, 4\)"):
        frozen.step(torch.randn(2, D + 1).double(), h.double())
