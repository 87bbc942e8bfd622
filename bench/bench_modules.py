"""Whole modules, input projection included: torch.nn.RNN over orthokern.nn.RNN and orthokern.nn.FactorizedRNN.

10 input features, tanh, biases, forward and backward to all parameters (not to the input, which needs no gradient in a
first layer), cotangents at every step. All modules hold the same recurrence: torch's and our dense modules are loaded
with the composed matrix of the factorized one, so float64 torch is the reference for all. Also packed sequences; and
one step of one small sequence, which is nearly all overhead: the cost of a call outside the kernels.
"""

from __future__ import annotations

import copy

import pytest
import torch
from harness import BATCH, Bench, Size, check, checked_sequences, module_step, only
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import orthokern.nn

SIZES = [{"N": 128, "T": 1000}, {"N": 128, "T": 10020}, {"N": 500, "T": 120}, {"N": 1000, "T": 120}]
QUICK = [{"N": 33, "T": 20}]
HEADLINE = [size for size in SIZES if size["T"] <= 1000]
FEATURES = 10
MODULES = ("RNN", "FactorizedRNN", "FactorizedRNN, composed")

# Relative RMS of float32 outputs and gradients against float64; measured: at most 3e-6.
TOLERANCE = 2e-5
# torch.nn.RNN's time over ours, by N.
TARGETS = {"RNN": {128: 4.0, 500: 2.5, 1000: 2.5}, "FactorizedRNN": {128: 3.0, 500: 1.6, 1000: 1.4}}


def build(name: str, N: int) -> tuple[nn.Module, nn.RNN]:
    """Ours, and torch's with the same weights, float32."""
    factorized = orthokern.nn.FactorizedRNN(FEATURES, N, apply="composed" if name.endswith("composed") else "factored")
    nn.init.normal_(factorized.get_parameter("spectrum_l0"))
    nn.init.normal_(factorized.get_parameter("bias_l0"), std=0.1)
    theirs = nn.RNN(FEATURES, N)
    copy_weights(factorized, theirs)
    if name != "RNN":
        return factorized, theirs
    ours = orthokern.nn.RNN(FEATURES, N)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@torch.no_grad()
def copy_weights(factorized: orthokern.nn.FactorizedRNN, dense: nn.Module) -> None:
    """Give a dense RNN with torch's parameter names the recurrence of a factorized one."""
    dense.get_parameter("weight_ih_l0").copy_(factorized.get_parameter("weight_ih_l0"))
    dense.get_parameter("weight_hh_l0").copy_(factorized.recurrent_matrix())
    dense.get_parameter("bias_ih_l0").copy_(factorized.get_parameter("bias_l0"))
    dense.get_parameter("bias_hh_l0").zero_()


def gradients(module: nn.Module, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """Output and parameter gradients by name."""
    names = ("output", *(name for name, _ in module.named_parameters()))
    return dict(zip(names, module_step(module, x, cotangent), strict=True))


def expected(ours: nn.Module, theirs: nn.RNN, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """`gradients` of our module by torch.nn.RNN in float64 and the chain rule through W = U diag(s) V^T."""
    double = copy.deepcopy(theirs).double()
    if not isinstance(ours, orthokern.nn.FactorizedRNN):
        return gradients(double, x.double(), cotangent.double())
    exact = copy.deepcopy(ours).double()
    copy_weights(exact, double)  # W composed in float64, not rounded to float32 on the way
    grads = gradients(double, x.double(), cotangent.double())
    names = ("u_l0", "v_l0", "spectrum_l0")
    parameters = [exact.get_parameter(name) for name in names]
    through_w = torch.autograd.grad(exact.recurrent_matrix(), parameters, grads["weight_hh_l0"])
    common = {"weight_ih_l0": grads["weight_ih_l0"], "bias_l0": grads["bias_ih_l0"], "output": grads["output"]}
    return {**common, **dict(zip(names, through_w, strict=True))}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sizes(SIZES, quick=QUICK, headline=HEADLINE)
def test_module(bench: Bench, size: Size, name: str) -> None:
    N, T = size["N"], size["T"]
    ours, theirs = build(name, N)
    x, cotangent = torch.randn(T, BATCH, FEATURES), torch.randn(T, BATCH, N)
    some = checked_sequences(size)
    actual = gradients(ours, x, only(cotangent, some))
    actual["output"] = actual["output"][:, some]
    exact = expected(ours, theirs, x[:, some], cotangent[:, some])
    error = check(name, actual.values(), [exact[key] for key in actual], TOLERANCE)
    del actual, exact

    bench.compare(
        "modules",
        f"torch.nn.RNN over orthokern.nn.{name}",
        {**size, "B": BATCH, "D": FEATURES},
        lambda: module_step(theirs, x, cotangent),
        lambda: module_step(ours, x, cotangent),
        rounds=11 if T < 5000 else 5,
        target=TARGETS[name.split(",")[0]].get(N),
        error=error,
    )


@pytest.mark.headline
@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
@pytest.mark.sizes([{"N": 128, "T": 75}, {"N": 128, "T": 300}, {"N": 512, "T": 75}], quick=[{"N": 24, "T": 9}])
def test_packed(bench: Bench, size: Size, name: str) -> None:
    """Packed sequences whose lengths are uniform from 4 to T."""
    N, T = size["N"], size["T"]
    theirs, ours = getattr(nn, name)(FEATURES, N), getattr(orthokern.nn, name)(FEATURES, N)
    ours.load_state_dict(theirs.state_dict())
    lengths = torch.linspace(4, T, BATCH).round().long()
    x = pack_padded_sequence(torch.randn(T, BATCH, FEATURES), lengths, enforce_sorted=False)
    cotangent = torch.randn(len(x.data), N)
    exact = module_step(copy.deepcopy(theirs).double(), x.double(), cotangent.double())
    bench.compare(
        "packed",
        f"torch.nn.{name} over orthokern.nn.{name}",
        {**size, "B": BATCH, "D": FEATURES},
        lambda: module_step(theirs, x, cotangent),
        lambda: module_step(ours, x, cotangent),
        rounds=11,
        target=1.0,
        error=check(name, module_step(ours, x, cotangent), exact, TOLERANCE),
    )


@pytest.mark.headline
@pytest.mark.parametrize("name", ["RNN", "FactorizedRNN", "GRU"])
@pytest.mark.sizes([{"N": 16, "T": 1, "B": 1}], quick=[{"N": 16, "T": 1, "B": 1}])
def test_overhead(bench: Bench, size: Size, name: str) -> None:
    """One step, forward and backward: torch's module is C++ throughout; ours begins in Python."""
    N, T, B = size["N"], size["T"], size["B"]
    x, cotangent = torch.randn(T, B, FEATURES), torch.randn(T, B, N)
    if name == "GRU":
        theirs: nn.RNNBase = nn.GRU(FEATURES, N)
        ours: nn.Module = orthokern.nn.GRU(FEATURES, N)
        ours.load_state_dict(theirs.state_dict())
        exact = gradients(copy.deepcopy(theirs).double(), x.double(), cotangent.double())
    else:
        ours, theirs = build(name, N)
        exact = expected(ours, theirs, x, cotangent)
    actual = gradients(ours, x, cotangent)
    bench.compare(
        "overhead",
        f"torch.nn.{'GRU' if name == 'GRU' else 'RNN'} over orthokern.nn.{name}",
        {**size, "D": FEATURES},
        lambda: module_step(theirs, x, cotangent),
        lambda: module_step(ours, x, cotangent),
        rounds=501,
        warmup=20,
        error=check(name, actual.values(), [exact[key] for key in actual], TOLERANCE),
    )
