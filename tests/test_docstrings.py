"""The examples in the docstrings of the public modules give what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

MODULES = [
    "diagnostics.fisher", "diagnostics.spectrum", "functional", "init", "nn.activations", "nn.exprnn", "nn.factorized",
    "nn.gru", "nn.linear_cross_entropy", "nn.nonnormal", "nn.rnn", "optim.geodesic", "optim.groups", "optim.projection",
    "parametrize", "penalties",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(f"orthokern.{name}")
    found = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 and found.failed == 0
