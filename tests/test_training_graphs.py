"""Iterations as CUDA graphs, with a device that records operators on a CPU in the place of torch.cuda.

The recorder has the properties of a graph that matter here: a capture changes no tensor, a replay runs the same
operators on the same tensors with the same numbers, and reading a number of a tensor during a capture is an error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import records
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orthokern.ops import cayley
from orthokern.optim import CombinedOptimizer, GeodesicSGD, geodesic
from orthokern.training import LoopSettings, RunFolder, Task, graphs, loop, train
from orthokern.training.progress import Progress


class Recorder(TorchDispatchMode):
    """What runs inside, as a list of operators with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that were written, and their contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given):
                    base = tensor if tensor._base is None else tensor._base
                    self.before.setdefault(id(base), (base, base.detach().clone()))
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class FakeDevice:
    """Stands for `graphs.Device`."""

    made: list[FakeDevice] = []
    capturing = False

    def __init__(self, device: torch.device) -> None:
        self.captures = self.replays = self.eager = 0
        self.made.append(self)

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.eager += 1
        yield

    def capture(self, body: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captures += 1
        recorder, state = Recorder(), torch.get_rng_state()
        FakeDevice.capturing = True
        try:
            with recorder:
                result = body()
        finally:
            FakeDevice.capturing = False
            torch.set_rng_state(state)
            with torch.no_grad():
                for tensor, content in recorder.before.values():
                    tensor.copy_(content)

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, out in recorder.calls:
                new = func(*args, **kwargs)
                if any(declared.alias_info is not None for declared in func._schema.returns):
                    continue  # in place, or a view
                for to, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(to, Tensor):
                        to.copy_(value)

        return replay, result


class Rotations(Task):
    """A basis and a readout, with dropout; draws from a generator of its own."""

    name = "rotations"
    time_steps = 4
    device = torch.device("cpu")
    capturable = True

    def __init__(self, schedule: str = "constant", *, reads: bool = False, shapes: bool = False) -> None:
        torch.manual_seed(0)
        model = nn.ParameterDict({"basis": torch.eye(6), "readout": torch.randn(6, 3)})
        self.basis, self.readout = basis, readout = tuple(model.values())
        self.model = model
        self.optimizer = CombinedOptimizer(
            {
                "geodesic": GeodesicSGD([basis], lr=0.05, max_grad_norm=1.0, correct_every=7, backend="reference"),
                "euclidean": torch.optim.SGD([readout], lr=0.05, momentum=0.9),
            }
        )
        rates = {"constant": lambda i: 1.0, "falls once": lambda i: 0.5 ** (i // 12), "curve": lambda i: 1 / (1 + i)}
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates[schedule])
        self.generator = torch.Generator().manual_seed(1)
        self.reads, self.shapes, self.drawn = reads, shapes, 0

    def next_batch(self) -> tuple[Tensor, list[Any]]:
        self.drawn += 1
        rows = 5 if self.shapes and self.drawn % 6 == 0 else 8
        return torch.randn(rows, 6, generator=self.generator), [torch.randint(3, (rows,), generator=self.generator)]

    def loss(self, batch: tuple[Tensor, list[Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        x, (targets,) = batch
        states = nn.functional.dropout(torch.tanh(x @ self.basis), 0.1)
        loss = nn.functional.cross_entropy(states @ self.readout, targets)
        if self.reads and loss.item() < 0:
            raise AssertionError
        return loss, {"doubled": 2 * loss.detach()}

    def clip_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.7)

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        return False

    def evaluate(self, iteration: int) -> dict[str, float]:
        return {"loss": 1.0}

    def score(self, evaluation: dict[str, float]) -> float:
        return -evaluation["loss"]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.drawn = state["drawn"]

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        return "done"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeDevice]:
    monkeypatch.setattr(FakeDevice, "made", [])
    monkeypatch.setattr(graphs, "Device", FakeDevice)
    monkeypatch.setattr(loop, "obstacle", lambda *_: None)
    # as if the bases were on a GPU
    monkeypatch.setattr(cayley, "read_waits", lambda device: True)
    monkeypatch.setattr(geodesic, "_capturing", lambda: FakeDevice.capturing)
    return FakeDevice


def go(folder: Path, task: Task, cuda_graph: bool, *, iterations: int = 30, resume: bool = False) -> tuple[Any, str]:
    """What a run leaves (records and parameters), and what it shows."""
    torch.manual_seed(0)
    run = RunFolder.open(folder, task.name) if resume else RunFolder.create(folder, task.name, {"seed": 0})
    stream = io.StringIO()
    progress = Progress(iterations, stream, every=1e9)
    settings = LoopSettings(iterations, 10, diagnose_every=8, plots=False, cuda_graph=cuda_graph)
    train(task, run, settings, progress=progress, resume=resume)
    parameters = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    return (records(folder), parameters), stream.getvalue()


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize(("schedule", "captures"), [("constant", 1), ("falls once", 3)])
def test_graphs_change_no_bit(schedule: str, captures: int, tmp_path: Path, fake: type[FakeDevice]) -> None:
    plain, captured = Rotations(schedule), Rotations(schedule)
    expected, _ = go(tmp_path / "plain", plain, False)
    assert not fake.made
    found, shown = go(tmp_path / "captured", captured, True)
    assert_same(expected, found)
    (device,) = fake.made
    # not captured: 1, 2, 3 to warm up; 9, 17, 25, diagnosed; 7, 14, 21, 28, which measure the drift
    assert (device.captures, device.replays, device.eager) == (captures, 30 - 10, 10)
    assert "kernel by kernel" not in shown
    for one, other in zip(plain.optimizer.param_groups, captured.optimizer.param_groups, strict=True):
        for name in one.keys() & GeodesicSGD.COUNTERS:
            torch.testing.assert_close(float(one[name]), float(other[name]), rtol=0, atol=0, equal_nan=True)


def test_a_resumed_run_captures_anew(tmp_path: Path, fake: type[FakeDevice]) -> None:
    expected, _ = go(tmp_path / "whole", Rotations(), True)
    go(tmp_path / "run", Rotations(), True, iterations=14)
    found, _ = go(tmp_path / "run", Rotations(), True, resume=True)
    found[0][13].pop("held_out_loss")  # the shorter run ended there
    assert_same(expected, found)


def test_rates_that_always_change(tmp_path: Path, fake: type[FakeDevice]) -> None:
    expected, _ = go(tmp_path / "plain", Rotations("curve"), False)
    found, shown = go(tmp_path / "captured", Rotations("curve"), True)
    assert_same(expected, found)
    assert fake.made[0].captures == graphs.MOST_VAIN
    assert shown.count("launched kernel by kernel: the learning rates change in nearly every iteration") == 1


def test_a_loss_that_reads_a_number(tmp_path: Path, fake: type[FakeDevice]) -> None:
    """It cannot be captured. Nothing of the attempt is left."""
    expected, _ = go(tmp_path / "plain", Rotations(reads=True), False)
    found, shown = go(tmp_path / "captured", Rotations(reads=True), True)
    assert_same(expected, found)
    assert fake.made[0].captures == 1
    assert "kernel by kernel: the iteration could not be captured (operation not permitted when stream" in shown
    assert "more lines" not in shown


def test_batches_of_other_shapes(tmp_path: Path, fake: type[FakeDevice]) -> None:
    expected, _ = go(tmp_path / "plain", Rotations(shapes=True), False)
    found, shown = go(tmp_path / "captured", Rotations(shapes=True), True)
    assert_same(expected, found)
    assert fake.made[0].captures == 1 and fake.made[0].replays > 10
    assert shown.count("batches of other shapes than the first one") == 1


def test_obstacles() -> None:
    task, settings = Rotations(), LoopSettings(1)
    task.device = torch.device("cuda")
    assert graphs.obstacle(task, settings, 1) is None
    assert "processes" in str(graphs.obstacle(task, settings, 2))
    assert "3 batches" in str(graphs.obstacle(task, LoopSettings(1, accumulate=3), 1))
    assert "--profile" in str(graphs.obstacle(task, LoopSettings(1, profile=4), 1))
    with_hook = torch.optim.SGD(task.model.parameters(), lr=0.1)
    with_hook.register_step_post_hook(lambda *_: None)
    task.optimizer = with_hook
    assert graphs.obstacle(task, settings, 1) == "hooks of SGD run with every step"
    task.optimizer = torch.optim.Adam(task.model.parameters())
    assert graphs.obstacle(task, settings, 1) is None
    task.optimizer = torch.optim.Adagrad(task.model.parameters())
    assert graphs.obstacle(task, settings, 1) == "a CUDA graph cannot hold a step of Adagrad"
    task.capturable = False
    assert "the task rotations keeps tensors" in str(graphs.obstacle(task, settings, 1))
