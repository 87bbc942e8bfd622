"""Errors in the use of modules: one line that names the argument, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helpers
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from orthokern.nn import (
    GRU,
    LSTM,
    OPLU,
    RNN,
    ExpRNN,
    FactorizedRNN,
    LinearCrossEntropy,
    ModReLU,
    NonNormalRNN,
    PeepholeLSTM,
    RotationRNN,
)

NAN, INF = float("nan"), float("inf")


def refused(call: Callable[[], Any], *parts: str) -> None:
    message = helpers.refused(call, *parts)
    assert len(message) < 250, message


KINDS: list[Any] = [RNN, FactorizedRNN, ExpRNN, NonNormalRNN, GRU, PeepholeLSTM]
SCANS = KINDS[:4]  # with the options of orthokern.nn.RNN
BASED: list[Any] = [ExpRNN, NonNormalRNN]
ARGUMENTS: list[tuple[list[Any], dict[str, Any], list[str]]] = [
    (KINDS, {"input_size": 0}, ["input_size", "0", "at least 1"]),
    (KINDS, {"hidden_size": 0}, ["hidden_size", "0", "at least 1"]),
    (KINDS, {"hidden_size": 4.0}, ["hidden_size", "4.0", "integer"]),
    (KINDS, {"hidden_size": "4"}, ["hidden_size", "'4'"]),
    (KINDS, {"num_layers": 0}, ["num_layers", "0"]),
    (KINDS, {"bias": 1}, ["bias", "1", "True or False"]),
    (KINDS, {"bidirectional": 2}, ["bidirectional", "2", "True or False"]),
    (KINDS, {"dropout": 1.1, "num_layers": 2}, ["dropout", "1.1", "[0, 1]"]),
    (KINDS, {"device": "foo"}, ["device", "'foo'", "accepted: cpu, or a cuda"]),
    (KINDS, {"device": "cuda:99"}, ["device", "'cuda:99' cannot hold "]),
    (KINDS, {"dtype": torch.int32}, ["dtype", "torch.int32", "torch.float32"]),
    (KINDS[1:], {"dtype": torch.bfloat16}, ["torch.bfloat16", "RNN accepts 16 bits", "torch.float32"]),
    (KINDS[:5], {"learned_h0": 1}, ["learned_h0", "1"]),
    (KINDS[:5], {"backend": "tritn"}, ["backend", "'tritn'", "did you mean 'triton'"]),
    (SCANS, {"nonlinearity": "tahn"}, ["nonlinearity", "'tahn'", "did you mean 'tanh'"]),
    (SCANS, {"nonlinearity": "oplu", "hidden_size": 5}, ["hidden_size", "even", "5"]),
    (SCANS, {"negative_slope": INF}, ["negative_slope", "inf"]),
    (SCANS, {"checkpoint_every": -1}, ["checkpoint_every", "-1"]),
    (SCANS, {"checkpoint_every": 1 << 63}, ["checkpoint_every", "9223372036854775808", "at most 9223372036854775807"]),
    (SCANS, {"precision": "iee"}, ["precision", "'iee'", "did you mean 'ieee'"]),
    (SCANS, {"message_clip": -1.0}, ["message_clip", "-1.0", "0 or more"]),
    (SCANS, {"gain": 0.0}, ["gain", "0.0", "above 0"]),
    (SCANS, {"leak": 0.0}, ["leak must be a number in (0, 1], got 0.0"]),
    (SCANS, {"learned_leak": True}, ["leak is 1.0 with learned_leak"]),
    (SCANS, {"noise": -1.0}, ["noise must be a finite number, 0 or more, got -1.0"]),
    (SCANS[:2], {"init": "orthogonl"}, ["init", "'orthogonl'", "did you mean 'orthogonal'"]),
    ([FactorizedRNN], {"margin": -0.1}, ["margin", "-0.1", "0 or more"]),
    ([FactorizedRNN], {"margin": NAN}, ["margin", "nan"]),
    ([FactorizedRNN], {"rank": 0}, ["rank", "0"]),
    ([FactorizedRNN], {"rank": 7}, ["rank", "7", "hidden_size = 6"]),
    ([FactorizedRNN], {"apply": "compose"}, ["apply", "'compose'", "did you mean 'composed'"]),
    ([FactorizedRNN], {"spectrum_map": "tahn"}, ["spectrum_map", "did you mean 'tanh'"]),
    ([FactorizedRNN], {"init": None}, ["init", "None"]),
    ([FactorizedRNN], {"init": "glorot"}, ["glorot", "margin=None", "0.1"]),
    (BASED, {"init": "henaf"}, ["'henaf'", "'henaff'"]),
    (BASED, {"rebase_every": 0}, ["rebase_every", "at least 1", "0"]),
    (BASED, {"project_every": 0}, ["project_every", "at least 1"]),
    (BASED, {"optimizer_state": "drop"}, ["optimizer_state", "'drop'", "transport"]),
    ([GRU], {"variant": "cudnn"}, ["unknown variant 'cudnn': accepted: kanai, torch"]),
    ([GRU], {"init": "orthogonal"}, ["unknown init 'orthogonal'"]),
    ([GRU], {"init": "torch", "init_std": 0.1}, ["init_std is 0.1, but init is 'torch'"]),
    ([GRU], {"variant": "kanai", "init_std": 0}, ["init_std must be a finite number above 0, got 0"]),
    ([LSTM], {"proj_size": 2}, ["proj_size must be 0", "got 2"]),
    ([PeepholeLSTM], {"forget_bias": NAN}, ["forget_bias must be a finite number, got nan"]),
]


@pytest.mark.parametrize(("kinds", "kwargs", "parts"), ARGUMENTS)
def test_arguments(kinds: list[Any], kwargs: dict[str, Any], parts: list[str]) -> None:
    for kind in kinds:
        refused(lambda kind=kind: kind(**{"input_size": 3, "hidden_size": 6} | kwargs), *parts)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_arguments(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__}.__init__\(\) got an unexpected keyword argument 'gian'"):
        kind(3, 6, gian=1.0)


INPUTS: list[tuple[Any, list[str]]] = [
    (torch.zeros(4), ["(4,)", "[T, B, D]", "[T, D]"]),
    (torch.zeros(2, 2, 2, 3), ["(2, 2, 2, 3)"]),
    (torch.zeros(5, 2, 4), ["(5, 2, 4)", "input_size = 3"]),
    (torch.zeros(0, 2, 3), ["T=0"]),
    (torch.zeros(5, 2, 3, dtype=torch.float64), ["torch.float64", "torch.float32"]),
    (torch.zeros(5, 2, dtype=torch.bool), ["torch.bool", "torch.int64"]),
    (torch.zeros(5, 2, 3, dtype=torch.int64), ["token ids", "(5, 2, 3)", "[T, B]"]),
    (torch.full((5, 2), 3), ["the input holds 3: token ids must be in [0, 3)"]),
    (torch.zeros(5, 2, 3).to_mkldnn(), ["mkldnn tensor", "strided"]),
    (torch.full((5, 2), -1), ["the input holds -1: token ids must be in [0, 3)"]),
    (torch.zeros(5, 2, 3, device="meta"), ["meta", "cpu"]),
    (torch.zeros(5, 2, 3).to_sparse(), ["sparse_coo", "strided"]),
    (torch.nested.nested_tensor([torch.zeros(5, 3), torch.zeros(4, 3)]), ["nested", "strided"]),
    ([[1.0, 2.0, 3.0]], ["input", "list"]),
    (pack_sequence([torch.zeros(4, 2)]), ["(4, 2)", "input_size = 3"]),
    (pack_sequence([torch.zeros(4, 3, 2)]), ["(4, 3, 2)", "[rows, D]"]),
    (pack_sequence([torch.zeros(4, 3, dtype=torch.int64)]), ["token ids", "(4, 3)", "[rows]"]),
    (pack_sequence([torch.full((4,), 3)]), ["the input holds 3: token ids must be in [0, 3)"]),
]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(("x", "parts"), INPUTS)
def test_input(make: Any, x: Any, parts: list[str]) -> None:
    module = make(3, 6)
    refused(lambda: module(x), *parts)


@pytest.mark.parametrize("make", [*KINDS, RotationRNN])
def test_parameters_of_another_dtype(make: Any) -> None:
    for dtype in (torch.complex64, *([] if make is RNN else [torch.bfloat16, torch.float16])):
        module = make(3, 6).to(dtype)
        refused(lambda m=module, d=dtype: m(torch.zeros(5, 2, 3, dtype=d)), "parameters", str(dtype), "torch.float32")


@pytest.mark.parametrize("make", KINDS)
def test_initial_state(make: Any) -> None:
    module, x = make(3, 6, 2, bidirectional=True), torch.zeros(5, 2, 3)

    def states(*shape: int, **options: Any) -> Any:
        state = torch.zeros(*shape, **options)
        return (torch.zeros(shape[0], *((2,) if len(shape) == 3 else ()), 6), state) if make is PeepholeLSTM else state

    refused(lambda: module(x, states(4, 2, 5)), "hx", "(4, 2, 5)", "(4, 2, 6)")
    refused(lambda: module(x, states(4, 2, 6, dtype=torch.float64)), "hx", "torch.float64", "torch.float32")
    refused(lambda: module(x, states(4, 2, 6, device="meta")), "hx", "meta")
    refused(lambda: module(x, 0), "hx", "int")
    sparse = torch.zeros(4, 2, 6).to_sparse()
    refused(lambda: module(x, (sparse, sparse) if make is PeepholeLSTM else sparse), "hx", "sparse_coo", "strided")


def test_where_torch_has_no_such_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA does not raise a RuntimeError, it asserts."""

    def empty(*sizes: Any, **options: Any) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", empty)
    refused(lambda: RNN(3, 6, device="cuda"), "device", "'cuda'", "Torch not compiled with CUDA enabled")


def test_layer_and_direction() -> None:
    module = FactorizedRNN(3, 6, 2)
    for layer in (2, -3, 0.0, "0"):
        refused(lambda layer=layer: module.recurrent_matrix(layer), "layer", repr(layer), "[-2, 2)")
    refused(lambda: module.singular_values(0, reverse=True), "reverse", "bidirectional")
    refused(lambda: RNN(3, 6).recurrent_matrix(1), "layer", "1")


def test_other_modules() -> None:
    refused(lambda: ModReLU(0), "features", "0")
    refused(lambda: ModReLU(6)(torch.zeros(2, 5)), "(2, 5)", "6")
    refused(lambda: ModReLU(6, backend="gpu"), "backend", "'gpu'")
    refused(lambda: OPLU()(torch.zeros(2, 5)), "5", "even")
    refused(lambda: ModReLU(6, device="foo"), "device", "'foo'")
    refused(lambda: LinearCrossEntropy(4, 3, device="foo"), "device", "'foo'")
    refused(lambda: LinearCrossEntropy(0, 4), "hidden", "0")
    refused(lambda: LinearCrossEntropy(4, 0), "classes", "0")
    refused(lambda: LinearCrossEntropy(4, 3, reduction="men"), "reduction", "did you mean 'mean'")
    refused(lambda: LinearCrossEntropy(4, 3)(torch.zeros(2, 5)), "(2, 5)", "4")
    refused(lambda: LinearCrossEntropy(4, 3).loss(torch.zeros(2, 4), torch.tensor([0, 3])), "3")
    refused(lambda: LinearCrossEntropy(4, 3).loss(torch.zeros(2, 4), torch.tensor([0])), "target")
