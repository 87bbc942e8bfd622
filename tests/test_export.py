"""Modules through torch.export, with any T and B, in a process that knows nothing of how they were trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from module_kinds import D, N, made
from torch import Tensor, nn
from torch.export import Dim, export, save

from orthokern.nn import GRU, LSTM, RNN, FactorizedRNN, RotationRNN

LAYERS = 2
KINDS = ("rnn", "low rank", "exponential", "non-normal", "gru", "rotation")
# torch.export.load of every program in a folder, and a comparison with the results beside it.
CHILD = """
import glob, orthokern, torch
paths = sorted(glob.glob("*.pt2"))
for path in paths:
    program = torch.export.load(path).module()
    for inputs, expected in torch.load(path + ".results"):
        torch.testing.assert_close(program(*inputs), expected, rtol=0, atol=0)
print(len(paths))
"""


class WithReadout(nn.Module):
    def __init__(self, rnn: Any) -> None:
        super().__init__()
        self.rnn, self.readout = rnn, nn.Linear(N, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.rnn(x, h)
        return self.readout(states), last


def trained(kind: str) -> WithReadout:
    """After a few steps of training, with settings that concern training alone."""
    options = {} if kind in ("gru", "rotation") else {"checkpoint_every": 3, "message_clip": 0.5}
    model = WithReadout(made(kind, num_layers=LAYERS, dropout=0.2, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(7, 3, D), torch.randn(LAYERS, 3, N))[0].square().sum().backward()
        optimizer.step()
    return model.eval()


def test_programs_run_in_a_new_process(tmp_path: Path) -> None:
    T, B = Dim("T", min=1, max=10_000), Dim("B", min=1, max=1000)
    for kind in KINDS:
        model = trained(kind)
        still = WithReadout(model.rnn.frozen())
        still.readout.load_state_dict(model.readout.state_dict())
        for name, module in ((kind, model), (f"frozen {kind}", still.eval())):
            example = torch.randn(6, 5, D), torch.randn(LAYERS, 5, N)
            program = export(module, example, dynamic_shapes=({0: T, 1: B}, {1: B}))
            path = tmp_path / f"{name}.pt2"
            save(program, path)
            results = []
            for steps, batch in ((1, 1), (4, 2), (9, 7)):
                inputs = torch.randn(steps, batch, D), torch.randn(LAYERS, batch, N)
                with torch.no_grad():
                    results.append((inputs, module(*inputs)))
            torch.save(results, f"{path}.results")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ORTHOKERN_")}
    run = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.split() == [str(2 * len(KINDS))], run.stderr[-2000:]


@pytest.mark.parametrize("kind", [*KINDS, "peephole"])
def test_lengths_with_any_number_of_steps(kind: str) -> None:
    T, B = Dim("T", min=2, max=10_000), Dim("B", min=2, max=1000)
    model, lengths = made(kind, num_layers=LAYERS, bidirectional=True), {"lengths": torch.tensor([3, 6, 1])}
    shapes = {"input": {0: T, 1: B}, "lengths": {0: B}}
    program = export(model, (torch.randn(6, 3, D),), lengths, dynamic_shapes=shapes).module()
    x, lengths = torch.randn(9, 4, D), {"lengths": torch.tensor([2, 9, 1, 5])}
    torch.testing.assert_close(program(x, **lengths), model(x, **lengths))


class WithLoss(WithReadout):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.rnn.loss(x, self.readout, target)


@pytest.mark.parametrize("make", [RNN, GRU, LSTM, RotationRNN])
def test_token_ids_with_any_number_of_steps(make: Any) -> None:
    """Of a vocabulary with more ids than the example has steps, and fewer than the program then reads."""
    module, ids = make(50, N), torch.randint(0, 50, (40, 4))
    dynamic = ({0: Dim("T", min=2, max=10_000), 1: Dim("B", min=2, max=1000)},)
    program = export(module, (ids[:7, :3].contiguous(),), dynamic_shapes=dynamic).module()
    torch.testing.assert_close(program(ids), module(ids))


@pytest.mark.parametrize("nonlinearity", ["tanh", "identity"])
@pytest.mark.parametrize("kind", [RNN, FactorizedRNN])
def test_a_loss_with_any_number_of_steps(kind: Any, nonlinearity: str) -> None:
    sizes = {0: Dim("T", min=2, max=10_000), 1: Dim("B", min=2, max=1000)}
    model = WithLoss(kind(D, N, nonlinearity=nonlinearity))
    program = export(model, (torch.randn(6, 5, D), torch.randint(2, (6, 5))), dynamic_shapes=(sizes, sizes)).module()
    for steps, batch in ((4, 2), (9, 7)):
        inputs = torch.randn(steps, batch, D), torch.randint(2, (steps, batch))
        torch.testing.assert_close(program(*inputs), model(*inputs))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_program_names_the_backend_of_the_module_and_has_no_checkpoints(backend: str | None) -> None:
    module = RNN(D, N, checkpoint_every=3, backend=backend)
    graph = export(module, (torch.randn(4, 2, D),)).graph
    (node,) = (node for node in graph.nodes if "dense_scan_fwd" in str(node.target))
    given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False))
    assert given.get("backend") == backend and not given.get("checkpoint_every")


def test_an_import_of_the_package_enters_the_ops(tmp_path: Path) -> None:
    """Before or after torch.export; `CHILD` has the other order."""
    save(export(made("rnn").frozen(), (torch.randn(4, 2, D),)), tmp_path / "program.pt2")
    code = "import torch.export; import orthokern; torch.export.load('program.pt2').module()(torch.zeros(4, 2, 3))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
