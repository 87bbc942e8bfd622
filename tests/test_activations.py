"""The table of activations against the places that have the formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from orthokern import dispatch
from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import Map, ScanInputs, ScanOptions
from orthokern.cpu import _call
from orthokern.nn import RNN
from orthokern.reference import activations as reference


def test_rows_of_one_number_differ_in_their_parameter_alone() -> None:
    rows = {}
    for row in ACTIVATIONS.values():
        traits = (row.reads, row.parameter is not None, row.pairs)
        assert rows.setdefault(row.number, traits) == traits
    assert sorted(rows) == list(range(len(rows)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_reference_reads_what_the_table_says(name: str) -> None:
    row = ACTIVATIONS[name]
    assert (name in reference.NEEDS_INPUT) == row.needs_input
    x, grad_y = torch.randn(2, 50, 6, dtype=torch.float64).unbind(0)
    param = None if row.parameter is None else torch.full((6,), -0.5, dtype=torch.float64)
    y = reference.activation_fwd(x, param, activation=name)
    unread = torch.full_like(x, float("nan"))
    expected = reference.chain(grad_y, y, x, param, activation=name)
    found = reference.chain(
        grad_y,
        y if row.reads == "output" else unread,
        x if row.reads == "input" else None,
        param,
        activation=name,
    )
    for actual, exact in zip(found, expected, strict=True):
        assert actual is exact is None or torch.equal(actual, exact)
    assert (found[1] is not None) == (row.parameter is not None)
    if row.reads != "nothing":
        inputs = (y, unread) if row.reads == "input" else (unread, x)
        assert not torch.equal(reference.chain(grad_y, *inputs, param, activation=name)[0], expected[0])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_padding_stays_zero(name: str) -> None:
    """phi(0) is 0 whatever the parameter: kernels rely on it for the units and rows that fill a tile."""
    for value in (-0.5, 0.0, 0.5):
        param = None if ACTIVATIONS[name].parameter is None else torch.tensor([value])
        assert not reference.activation_fwd(torch.zeros(2), param, activation=name).any()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_module_has_the_parameter_of_the_table(name: str) -> None:
    learned = ACTIVATIONS[name].learned
    module = RNN(3, 4, nonlinearity=name)
    own = {key: value for key, value in module.named_parameters() if not key.startswith(("weight", "bias"))}
    if learned is None:
        assert not own
        return
    assert {key: value.shape for key, value in own.items()} == {f"{learned.stem}_l0": (4 if learned.per_unit else 1,)}
    low, high = learned.start if isinstance(learned.start, tuple) else (learned.start, learned.start)
    (value,) = own.values()
    assert ((value >= low) & (value <= high)).all()


@pytest.mark.skipif(not _call.AVAILABLE, reason=_call.REASON)
def test_the_kernels_have_the_rows_of_the_table() -> None:
    rows = {row.number: (row.reads, row.parameter is not None, row.pairs) for row in ACTIVATIONS.values()}
    assert _call._C.activations() == rows


@pytest.mark.skipif(not _call.AVAILABLE, reason=_call.REASON)
@pytest.mark.parametrize("op", ["activations", "dense_scan"])
def test_a_kernel_refuses_an_unknown_number(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = max(row.number for row in ACTIVATIONS.values()) + 1
    monkeypatch.setitem(ACTIVATIONS, "tanh", dataclasses.replace(ACTIVATIONS["tanh"], number=unknown))
    leaf, x = dispatch.leaf(op, "cpu"), torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=f"unknown activation {unknown}"):
        if op == "activations":
            leaf.activation_fwd(x, None, activation="tanh")
        else:
            leaf.dense_scan_fwd(Map(None, None, torch.eye(4)), ScanInputs(x, x[0]), ScanOptions("tanh"))
