"""RNN, GRU and the LSTMs against the modules of torch: outputs, last states and every gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import batch_in
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from orthokern.nn import GRU, LSTM, RNN, PeepholeLSTM

F64 = torch.float64
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "rnn": (nn.RNN, RNN, {}),
    "relu": (partial(nn.RNN, nonlinearity="relu"), partial(RNN, nonlinearity="relu"), {}),
    "gru": (nn.GRU, GRU, {"variant": "torch"}),
    "lstm": (nn.LSTM, LSTM, {}),
    "peephole": (nn.LSTM, PeepholeLSTM, {}),
}
OPTIONS: list[dict[str, Any]] = [
    {"bias": True},
    {"bias": True, "num_layers": 2, "bidirectional": True},
    {"bias": False},
]
LAYOUTS = ["time first", "batch first", "one sequence", "packed", "packed, not sorted"]


def pair(kind: str, *args: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """torch's module and ours with the same parameters; peepholes of zero."""
    their_class, our_class, more = KINDS[kind]
    theirs, ours = their_class(*args, dtype=F64, **options), our_class(*args, dtype=F64, **more, **options)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=kind != "peephole")
    assert not unexpected and all("peephole" in name for name in missing)
    return theirs, ours


def results(module: nn.Module, x: Any, hx: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Output, last states, and the gradients of inputs and parameters."""
    output, last = module(x, hx)
    outputs = [output.data if isinstance(output, PackedSequence) else output, *(last if len(last) == 2 else [last])]
    generator = torch.Generator().manual_seed(1)
    loss = torch.stack([(t * torch.randn(t.shape, dtype=F64, generator=generator)).sum() for t in outputs]).sum()
    named = {name: p for name, p in module.named_parameters() if "peephole" not in name}
    grads = torch.autograd.grad(loss, [*inputs, *named.values()], retain_graph=True)
    names = [*(f"input {i}" for i in range(len(inputs))), *named]
    return {**{f"result {i}": t for i, t in enumerate(outputs)}, **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize("with_hx", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_torchs(kind: str, options: dict[str, Any], layout: str, with_hx: bool) -> None:
    theirs, ours = pair(kind, 3, 5, batch_first=layout == "batch first", **options)
    x, inputs = batch_in(layout)
    hx: Any = None
    if with_hx:
        rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        shape = (rows, 5) if layout == "one sequence" else (rows, 4, 5)
        states = [
            torch.randn(shape, dtype=F64, requires_grad=True) for _ in range(2 if KINDS[kind][0] is nn.LSTM else 1)
        ]
        hx, inputs = tuple(states) if len(states) == 2 else states[0], [*inputs, *states]
    torch.testing.assert_close(results(ours, x, hx, inputs), results(theirs, x, hx, inputs), rtol=1e-12, atol=1e-12)
    if layout.startswith("packed"):
        for one, other in zip(ours(x)[0], theirs(x)[0], strict=True):
            assert one is other is None or torch.allclose(one, other)


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_same_seed_same_parameters(kind: str) -> None:
    their_class, our_class, more = KINDS[kind]
    for options in OPTIONS:
        torch.manual_seed(5)
        theirs = their_class(3, 4, **options)
        torch.manual_seed(5)
        ours = our_class(3, 4, **more, **options)
        assert repr(ours) == repr(theirs)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        ours.flatten_parameters()
        torch.testing.assert_close(ours.all_weights, theirs.all_weights, rtol=0, atol=0)


@pytest.mark.parametrize("dropout", [0.4, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_what_torch_drops(kind: str, dropout: float) -> None:
    theirs, ours = pair(kind, 3, 8, 3, dropout=dropout, bias=True)
    x = torch.randn(5, 4, 3, dtype=F64)
    for training in (True, False):
        for data in (x, pack_padded_sequence(x, torch.tensor([5, 3, 3, 2]))):
            outcomes = []
            for module in (theirs.train(training), ours.train(training)):
                torch.manual_seed(9)
                outcomes.append(results(module, data, None, []))
            torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-12, atol=1e-12)
