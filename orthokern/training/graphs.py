"""Whole iterations of the training loop as CUDA graphs.

An iteration of a small recurrent network launches a few hundred kernels, and many of them take less time on the GPU
than on the host. A CUDA graph launches all of them at once: forward, backward, clipping and the optimizer's step. The
host then copies a batch into the graph's inputs, launches it and reads the numbers of the record.

A graph repeats the same kernels on the same addresses with the same arguments. Hence

- the task keeps nothing from one iteration to the next beside its parameters (`Task.capturable`);
- the numbers of the optimizer's groups are those at the time of the capture. If one changes, such as a learning rate,
  the iteration is captured again. Where that happens all the time, capturing ends;
- an iteration that reads numbers in between is not captured: the first `WARM_UP` ones, which allocate and compile,
  diagnosed ones, those in which a geodesic optimizer measures the drift, and batches of other shapes.

The update of an iteration whose loss or gradient is not finite is part of the graph; the run ends there in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from orthokern.optim import CombinedOptimizer, GeodesicSGD
from orthokern.training.iteration import LoopSettings, Step, joint_metrics, numbers_of, step
from orthokern.training.profiling import Profiler
from orthokern.training.signals import StopRequest
from orthokern.training.task import Task

WARM_UP = 3
# A graph that is replayed less often than this before a number of the optimizer changes has not paid; so many of them
# in a row end the capturing.
FEW_REPLAYS, MOST_VAIN = 8, 3


class Device:
    """What is asked of torch.cuda. Tests put one in its place that records operators on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For iterations that are not captured: off the default stream, with which a capture must have no ties."""
        current = torch.cuda.current_stream(self.side.device)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            yield
        current.wait_stream(self.side)

    def capture(self, body: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What runs everything that ``body`` has put on the stream again, and the tensor that it returned. Nothing runs
        yet."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = body()
        return graph.replay, result


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that one consists of."""
    if isinstance(optimizer, CombinedOptimizer):
        return [one for part in optimizer.parts.values() for one in parts(part)]
    return [optimizer]


def obstacle(task: Task, settings: LoopSettings, world: int) -> str | None:
    """Why the iterations of a run cannot be captured, or None."""
    if task.device.type != "cuda":
        return f"the device is {task.device}, not a CUDA device"
    if world > 1:
        return "several processes train together"
    if settings.accumulate > 1:
        return f"an iteration takes {settings.accumulate} batches (--accumulate)"
    if settings.profile is not None:
        return "--profile times the stages of an iteration"
    if not task.capturable:
        return f"the task {task.name} keeps tensors from one iteration to the next, or reads numbers within one"
    for part in [task.optimizer, *parts(task.optimizer)]:
        if part._optimizer_step_pre_hooks or part._optimizer_step_post_hooks:
            return f"hooks of {type(part).__name__} run with every step"
    for part in parts(task.optimizer):
        capturable = all("capturable" in group for group in part.param_groups)
        if not capturable and not isinstance(part, (GeodesicSGD, torch.optim.SGD)):
            return f"a CUDA graph cannot hold a step of {type(part).__name__}"
    return None


class CapturedIterations:
    """Takes the place of `orthokern.training.iteration.step`.

    Args:
        task: whose iterations are captured. Its optimizer's groups are made capturable, which has to happen before the
            first step and before a state is loaded.
        say: shows a line to the user: once, when iterations are not captured, or no longer.
        reason: why nothing is captured, from `obstacle`.
        device: None: the task's.
    """

    def __init__(
        self, task: Task, say: Callable[[str], None], reason: str | None = None, device: Device | None = None
    ) -> None:
        self.task, self.say, self.device = task, say, device
        self.off = False
        self.seen = 0  # iterations, up to WARM_UP
        self.vain = 0  # graphs in a row that were replayed a few times only
        self.replays = 0  # of the current graph
        self.told_shapes = False
        self.replay: Callable[[], None] | None = None
        self.key: Any = None  # the numbers of the optimizer that the graph holds
        self.inputs: list[Any] = []  # leaves of the graph's batch
        self.names: list[str] = []
        self.norms: list[Any] = []  # last_grad_norm of each of the optimizer's groups
        self.numbers: Tensor | None = None
        if reason is not None:
            self._end(reason)
            return
        for part in parts(task.optimizer):
            for group in part.param_groups:
                if "capturable" in group and task.device.type == "cuda":
                    group["capturable"] = True

    def step(self, task: Task, settings: LoopSettings, diagnose: bool, stop: StopRequest, profiler: Profiler) -> Step:
        """As `orthokern.training.iteration.step`."""
        if self.off:
            return step(task, settings, diagnose, stop, profiler)
        if self.device is None:
            self.device = Device(task.device)
        self.seen += 1
        batch = task.next_batch()
        measures = any(part.measures_next() for part in parts(task.optimizer) if isinstance(part, GeodesicSGD))
        if self.seen <= WARM_UP or diagnose or measures or not self._ready(batch):
            with self.device.aside():
                return step(task, settings, diagnose, stop, profiler, batch=batch)
        return self._replay(batch, stop)

    def _end(self, reason: str) -> None:
        self.off, self.replay, self.numbers, self.inputs = True, None, None, []
        self.say(f"iterations are launched kernel by kernel: {reason}")

    def _ready(self, batch: Any) -> bool:
        """Whether there is a graph for this batch; captures one if that is all it takes."""
        try:
            leaves = _leaves(batch)
        except TypeError as error:
            self._end(str(error))
            return False
        if self.replay is not None and not _alike(leaves, self.inputs):
            if not self.told_shapes:
                self.say("batches of other shapes than the first one are launched kernel by kernel")
                self.told_shapes = True
            return False
        key = _numbers_of_groups(self.task.optimizer)
        if self.replay is not None and key == self.key:
            return True
        if self.replay is not None:
            self.vain = self.vain + 1 if self.replays < FEW_REPLAYS else 0
            if self.vain == MOST_VAIN:
                self._end("the learning rates change in nearly every iteration, and a graph holds them as numbers")
                return False
        return self._capture(batch, leaves, key)

    def _capture(self, batch: Any, leaves: list[Any], key: Any) -> bool:
        """Capture the iteration with these numbers. False, and no more attempts, where something prevents it."""
        task, device = self.task, self.device
        assert device is not None
        self.replay, self.numbers, self.replays = None, None, 0  # the memory of the last graph
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = _with_leaves(batch, iter(self.inputs))
        counted = [dict(group) for group in task.optimizer.param_groups]  # the step below is not taken

        def body() -> Tensor:
            task.optimizer.zero_grad(set_to_none=True)
            loss, extra = task.loss(inputs)
            loss.backward()
            self.names = list(extra)
            numbers = numbers_of(task, [torch.stack([n.double() for n in (loss.detach(), *extra.values())])])
            task.clip_gradients()
            task.optimizer.step()
            return numbers

        try:
            self.replay, self.numbers = device.capture(body)
        except (RuntimeError, TypeError, ValueError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            task.optimizer.zero_grad(set_to_none=True)
            self._end(f"the iteration could not be captured ({first})")
            return False
        finally:
            groups = task.optimizer.param_groups
            self.norms = [group.get("last_grad_norm") for group in groups]  # which the replays fill
            for group, before in zip(groups, counted, strict=True):
                group.update({name: before[name] for name in GeodesicSGD.COUNTERS & before.keys()})
        self.key = key
        return True

    def _replay(self, batch: Any, stop: StopRequest) -> Step:
        task = self.task
        assert self.replay is not None and self.numbers is not None
        for to, leaf in zip(self.inputs, _leaves(batch), strict=True):
            if isinstance(to, Tensor):
                to.copy_(leaf)
        self.replay()
        self.replays += 1
        for part in parts(task.optimizer):
            if isinstance(part, GeodesicSGD):
                part.count_replay()
        for group, norm in zip(task.optimizer.param_groups, self.norms, strict=True):
            if isinstance(norm, Tensor):
                group["last_grad_norm"] = norm
        metrics, finite, signal = joint_metrics(self.names, self.numbers, stop)
        if finite and task.scheduler is not None:
            task.scheduler.step()
        return Step(metrics, finite, signal, [])


def _leaves(batch: Any) -> list[Any]:
    """The tensors, numbers and Nones of a batch of tuples and lists."""
    if isinstance(batch, (tuple, list)) and type(batch) in (tuple, list):
        return [leaf for one in batch for leaf in _leaves(one)]
    if batch is None or isinstance(batch, (Tensor, bool, int, float, str)):
        return [batch]
    raise TypeError(f"a batch holds a {type(batch).__name__}")


def _with_leaves(batch: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(batch, (tuple, list)):
        return type(batch)([_with_leaves(one, leaves) for one in batch])
    return next(leaves)


def _alike(one: list[Any], other: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)

    return len(one) == len(other) and all(map(same, one, other))


def _numbers_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a step takes from the groups beside parameters and counters."""
    kept = {"params", "param_names", "initial_lr"} | GeodesicSGD.COUNTERS
    return [
        {name: value for name, value in group.items() if name not in kept and not isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]
