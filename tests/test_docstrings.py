"""The examples in the docstrings of the public modules give the results that they show."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import orthokern

MODULES = """
    commandline compare.measure conversion data.adding data.copy data.mnist data.ptb data.ptb_stream
    data.random_permutation data.temporal_order data.words diagnostics.fisher diagnostics.gradients
    diagnostics.runs diagnostics.spectrum diagnostics.stability explain functional init nn.activations nn.exprnn
    nn.factorized nn.gru nn.linear_cross_entropy nn.nonnormal nn.rnn optim.geodesic optim.groups
    optim.projection parametrize penalties training.checkpoint training.distributed training.progress
    training.rundir training.signals
""".split()


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(f"orthokern.{name}")
    names = {"torch": torch, "orthokern": orthokern}
    found = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 and found.failed == 0
