"""orthokern.convert: outputs, gradients, parameters and names are unchanged; modules that cannot be converted are
skipped, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import orthokern
from orthokern import conversion
from orthokern.conversion import convert
from orthokern.errors import InputError

KINDS: list[Any] = [nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)]
OPTIONS: list[dict[str, Any]] = [
    {"num_layers": 3, "dropout": 0.4},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "dtype": torch.float64},
    {"bias": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=["gru", "tanh", "relu"])
def test_numbers_stay(kind: Any, options: dict[str, Any]) -> None:
    """Also with dropout between the layers: the same units are dropped."""
    theirs = kind(5, 7, **options)
    ours, report = convert(theirs)
    dtype = options.get("dtype", torch.float32)
    x, results = torch.randn(3, 3, 5, dtype=dtype), []
    for module in (ours, theirs):
        torch.manual_seed(3)
        output, h = module(x)
        grads = torch.autograd.grad(output.sin().sum() + h.sum(), list(module.parameters()))
        results.append([output, h, *grads])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(*results, rtol=64 * eps, atol=64 * eps)
    assert type(ours).__module__.startswith("orthokern.nn") and len(report.replaced) == 1 and not report.skipped
    assert ours.state_dict().keys() == theirs.state_dict().keys()


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.encoders = nn.ModuleList([nn.GRU(5, 6, batch_first=True), nn.RNN(6, 6, nonlinearity="relu")])
        self.decoder = nn.LSTM(6, 4)
        self.twice = self.encoders[0]


def test_a_copy_leaves_the_model_alone() -> None:
    model = Tagger()
    model.eval()
    before = {name: type(each) for name, each in model.named_modules()}
    converted, report = orthokern.convert(model, backend="reference")
    assert {name: type(each) for name, each in model.named_modules()} == before
    assert isinstance(converted, Tagger)
    assert isinstance(converted.encoders[0], orthokern.nn.GRU) and converted.encoders[0].variant == "torch"
    assert isinstance(converted.encoders[1], orthokern.nn.RNN) and converted.encoders[1].nonlinearity == "relu"
    assert not converted.encoders[0].training and converted.encoders[0].backend == "reference"
    old = {id(p) for p in model.parameters()}
    assert not any(id(p) in old for p in converted.parameters())
    assert [each.name for each in report.replaced] == ["encoders.0", "encoders.1", "twice"]
    assert [each.name for each in report.skipped] == ["decoder"]
    assert str(report).splitlines()[0] == (
        "replaced 'encoders.0': torch.nn.GRU(5, 6, batch_first=True) -> "
        "orthokern.nn.GRU(5, 6, batch_first=True, backend='reference')"
    )


def test_in_place_keeps_parameters_sharing_and_optimizer() -> None:
    model = Tagger()
    model.encoders[1].weight_ih_l0 = model.encoders[1].weight_hh_l0  # tied within a module
    model.tied = nn.Linear(6, 18)
    model.tied.weight = model.encoders[0].weight_hh_l0  # type: ignore[union-attr]  # and with another one
    model.encoders[0].weight_ih_l0.requires_grad_(False)
    model.encoders[0].label = "first"
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    converted, _ = convert(model, inplace=True)
    assert converted is model
    now = dict(model.named_parameters(remove_duplicate=False))
    assert now.keys() == parameters.keys() and all(now[name] is parameters[name] for name in now)
    assert model.twice is model.encoders[0] and model.encoders[0].label == "first"
    before = model.encoders[0].weight_hh_l0.clone()
    model.encoders[0](torch.randn(2, 3, 5))[0].sum().backward()
    optimizer.step()
    assert not torch.equal(model.encoders[0].weight_hh_l0, before) and torch.equal(
        model.tied.weight, model.encoders[0].weight_hh_l0
    )


class OwnGRU(nn.GRU):
    pass


def hooked() -> nn.Module:
    module = nn.RNN(2, 3)
    module.register_forward_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    return module


def having(name: str, value: Any) -> nn.Module:
    module = nn.RNN(2, 3)
    setattr(module, name, value)
    return module


def compiled_in_place() -> nn.Module:
    module = nn.GRU(2, 3)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: having("gain", 5 / 3), "its attribute gain would be a setting of the new module"),
        (compiled_in_place, "it is compiled; convert first, then compile"),
        (
            lambda: nn.LSTM(2, 3, proj_size=2),
            "orthokern.nn.LSTM, which has the same results without projections, is not faster",
        ),
        (lambda: nn.RNNCell(2, 3), "a cell runs one step at a time"),
        (lambda: OwnGRU(2, 3), "subclass of torch.nn.GRU"),
        (hooked, "it has backward hooks, forward hooks"),
        (lambda: having("forward", lambda x: x), "its forward was replaced"),
        (lambda: having("head", nn.Linear(3, 1)), "submodules are not those of RNN: head"),
        (lambda: parametrizations.orthogonal(nn.RNN(2, 3), "weight_hh_l0"), "parametrizations (weight_hh_l0)"),
        (lambda: nn.GRU(2, 3, dtype=torch.bfloat16), "its weight_ih_l0 is torch.bfloat16"),
    ],
)
def test_what_is_skipped(make: Any, reason: str) -> None:
    module = nn.ModuleDict({"part": make()})
    part = module["part"]
    converted, report = convert(module, inplace=True)
    assert converted["part"] is part  # type: ignore[index]
    assert not report.replaced and [each.name for each in report.skipped] == ["part"]
    assert reason in report.skipped[0].reason and "\n" not in str(report)


def test_compiled_modules() -> None:
    """torch.compile of a module calls the old one; that of a model around it does not."""
    x = torch.randn(5, 2, 3)
    _, report = convert(torch.compile(nn.GRU(3, 4), backend="eager"))
    assert not report.replaced and "convert first, then compile" in str(report)
    model = torch.compile(nn.Sequential(nn.GRU(3, 4)), backend="eager")
    expected = model(x)[0]
    converted, report = convert(model)
    assert len(report.replaced) == 1
    torch.testing.assert_close(converted(x)[0], expected)


def test_attributes_of_the_user() -> None:
    """Also where no module could be made in the default dtype."""
    conversion._blanks.cache_clear()
    module = nn.GRU(2, 3)
    module.flatten_parameters, module.tag = (lambda: None), "mine"
    torch.set_default_dtype(torch.bfloat16)
    try:
        converted, report = convert(module)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(report.replaced) == 1 and converted.tag == "mine"


def test_attributes_that_other_code_reads() -> None:
    gru, rnn = convert(nn.GRU(2, 3)).module, convert(nn.RNN(2, 3, nonlinearity="relu")).module
    assert (gru.mode, gru.proj_size, rnn.mode) == ("GRU", 0, "RNN_RELU")


def test_bad_arguments() -> None:
    class Stubborn(nn.GRU):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no")

    calls: list[tuple[Any, str]] = [
        (lambda: convert(3), "module must be a torch.nn.Module, got int"),  # type: ignore[arg-type]
        (lambda: convert(nn.GRU(2, 3), inplace=1), "inplace must be True or False"),  # type: ignore[arg-type]
        (lambda: convert(nn.GRU(2, 3), backend="gpu"), "unknown backend 'gpu'"),
        (lambda: convert(Stubborn(2, 3)), r"cannot be copied \(RuntimeError: no\); accepted: inplace=True"),
    ]
    for call, text in calls:
        with pytest.raises(InputError, match=text):
            call()
