"""The cost of diagnostics: time of a training iteration with all diagnostics divided by that of an iteration without,
and the time that diagnosing every tenth iteration adds to a run.

The size is that of sequential MNIST: 784 steps of one pixel, 128 units, tanh, batches of 50, ten classes at the last
step; geodesic steps and RMSprop. A diagnosed iteration computes the norms of states and gradients at every step,
reduces them for a record, and computes the statistics of the recurrent matrix.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check, interleave, median, ratio, spread_ms
from torch import Tensor, nn

from orthokern import diagnostics
from orthokern.nn import RNN, FactorizedRNN
from orthokern.optim import optimizer_for

SIZES = [{"N": 128, "T": 784}]
QUICK = [{"N": 16, "T": 30}]
EVERY = 10
CLASSES = 10

# Relative RMS in float32; measured: norms of states and gradients 3e-7, singular values 2e-7.
TOLERANCE = 1e-5


class Model(nn.Module):
    """A recurrence over one feature and a readout of its last state."""

    def __init__(self, rnn: RNN | FactorizedRNN) -> None:
        super().__init__()
        self.rnn = rnn
        self.readout = nn.Linear(rnn.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] for x [T, B, 1]."""
        states, _ = self.rnn(x)
        return self.readout(states[-1])


def backward(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """The loss (0-dim), with gradients left in the parameters."""
    model.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    return loss.detach()


def diagnosed(model: Model, x: Tensor, labels: Tensor, eigenvalues: bool) -> dict[str, Any]:
    """`backward`, and the record of a diagnosed iteration."""
    with diagnostics.tap() as taken:
        backward(model, x, labels)
    return {
        **diagnostics.diagnose_recurrence(model.rnn, eigenvalues=eigenvalues),
        "state_norm_through_time": diagnostics.thin_profile(taken.state_norms[0]),
        "grad_norm_through_time": diagnostics.thin_profile(taken.grad_norms[0]),
    }


def checked(model: Model, x: Tensor, labels: Tensor) -> float:
    """The largest relative error of a record against plain torch; gradients must be bitwise equal."""
    backward(model, x, labels)
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    record = diagnosed(model, x, labels, True)
    same = [p.grad for p in model.parameters() if p.grad is not None]
    check("gradients", same, plain, 0.0)
    exact = copy.deepcopy(model)
    states, _ = exact.rnn(x)
    states.retain_grad()
    nn.functional.cross_entropy(exact.readout(states[-1]), labels).backward()
    kept = diagnostics.profile_steps(len(x))
    assert states.grad is not None
    values = torch.linalg.svdvals(exact.rnn.recurrent_matrix().detach().double())
    # only the last step's gradient is the readout's alone: those before it come from the scan's own backward
    return check(
        "record",
        [torch.tensor(record["state_norm_through_time"]), torch.tensor(record["grad_norm_through_time"][-1])]
        + [torch.tensor(record["spectrum"][name]) for name in ("mean", "max")],
        [states.detach().double().flatten(1).norm(dim=1)[kept], states.grad.double()[-1].norm()]
        + [values.mean(), values.max()],
        TOLERANCE,
    )


@pytest.mark.parametrize("name", ["FactorizedRNN", "RNN"])
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_diagnosed_iteration(benchmark: Any, bench: Bench, size: Size, name: str) -> None:
    """Time of a diagnosed iteration divided by that of a plain one."""
    T, N = size["T"], size["N"]
    model = Model(FactorizedRNN(1, N, margin=0.1) if name == "FactorizedRNN" else RNN(1, N, init="orthogonal"))
    x, labels = torch.rand(T, BATCH, 1), torch.randint(0, CLASSES, (BATCH,))
    error = checked(model, x, labels)
    optimizer = optimizer_for(model, lr=1e-6, geodesic_lr=1e-8)

    def step(looking: Any) -> None:
        looking()
        optimizer.step()

    benchmark.group = "one iteration with all diagnostics"
    seconds = interleave(
        benchmark,
        {
            "plain": lambda: step(lambda: backward(model, x, labels)),
            "without eigenvalues": lambda: step(lambda: diagnosed(model, x, labels, False)),
            "diagnosed": lambda: step(lambda: diagnosed(model, x, labels, True)),
        },
        rounds=bench.rounds(40),
    )
    for case in ("without eigenvalues", "diagnosed"):
        over = ratio(seconds[case], seconds["plain"])
        bench.record(
            "diagnostics",
            f"{name}, {'all' if case == 'diagnosed' else case}",
            {**size, "B": BATCH},
            f"share that every {EVERY}th iteration adds",
            100 * (over - 1) / EVERY,
            unit="%",
            better="lower",
            details={
                "ratio": over,
                "ms": spread_ms(seconds[case]),
                "plain_ms": spread_ms(seconds["plain"]),
                "added_ms": 1e3 * (median(seconds[case]) - median(seconds["plain"])),
                "error": error,
            },
        )
