"""One run in several processes: `torchrun --nproc-per-node 4 -m orthokern.tasks.copy ...`.

Every process draws the joint batch and computes on its part of the rows; DistributedDataParallel averages the
gradients, and then every process takes the same step. So the order of the data is that of one process, the loss curve
too, to rounding, and the bases stay the same on all ranks, bit for bit. Rank 0 evaluates and writes the files.

Note [How a run in several processes ends]
    Together, or with one line. What every rank decides from the same numbers needs no message: losses, stop signals and
    evaluations are exchanged first. A step that may fail on one rank (reading data, making the run folder) goes through
    `together` or `on_first`: either all go on, or all raise, and only one says why. And where a process disappears, the
    rank before it notices: a thread of each rank waits for a farewell that only comes at the end. It doesn't depend on
    what the main thread is waiting for: a kernel, NCCL, or another rank's evaluation.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orthokern.commandline import one_line, write
from orthokern.errors import BackendUnavailable, InputError
from orthokern.training.progress import Progress

__all__ = [
    "EndedElsewhere",
    "Shard",
    "agree",
    "check_averaged",
    "current_shard",
    "gather",
    "joined",
    "keep_own_gradients",
    "on_first",
    "processes",
    "same_scope",
    "speaks",
    "tell_on_loss",
    "together",
    "use_device",
    "wrap",
]

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

EXIT_LOST = 2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the weaker first


@dataclass(frozen=True)
class Shard:
    """This process's part in the run.

    Attributes:
        rank: its number, from 0.
        world: the number of processes.
    """

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that evaluates, writes and talks."""
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """This process's rows of the joint batch.

        Args:
            batch: sequences of the joint batch, as --batch says.

        Returns:
            A slice; those of all ranks, in order, make up range(batch), and are equally long, so that the mean of the
            ranks' mean losses is the joint mean.

        Raises:
            InputError: the processes can't share the batch evenly.
        """
        if batch % self.world:
            raise InputError(
                f"--batch {batch} cannot be shared evenly by {self.world} processes; "
                f"accepted: a multiple of {self.world}"
            )
        part = batch // self.world
        return slice(self.rank * part, (self.rank + 1) * part)


def current_shard() -> Shard:
    """This process's rank and the number of processes: those of the process group, else torchrun's, else 0 and 1."""
    if dist.is_available() and dist.is_initialized():
        return Shard(dist.get_rank(), dist.get_world_size())
    return Shard(_environment("RANK", 0), _environment("WORLD_SIZE", 1))


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"environment variable {name}={text!r} is not an integer; start with torchrun") from None


def local_rank() -> int:
    """This process's number on its machine."""
    return _environment("LOCAL_RANK", 0)


class EndedElsewhere(Exception):
    """Another rank met an error and says so; this one ends without a word."""


# ---- the process group -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def processes(timeout: float = 600.0) -> Iterator[Shard]:
    """Joins the processes that torchrun started, until the block is left; without torchrun it does nothing.

    CPU tensors travel by gloo, CUDA tensors by NCCL (see `use_device`).

    The block is left by all ranks at the same point, or by none: an exception that doesn't come from `together` or
    `on_first` ends this process at once (os._exit), with one line for an InputError, and the others then notice.

    Args:
        timeout: seconds that a rank waits for another, which may be evaluating or writing. 0 < timeout.

    Raises:
        InputError: torchrun's variables are incomplete, or the others can't be reached.
    """
    shard = current_shard()
    if shard.world == 1 or dist.is_initialized():
        yield shard
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE={shard.world} without {', '.join(missing)}; start with torchrun")
    # NCCL connects when the first CUDA tensor travels: on CPUs it costs nothing.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"rank {shard.rank} found no connection to the other {shard.world - 1} processes: {reason}"
        ) from None
    watch = _Watch(shard)
    watch.start()
    try:
        yield shard
    except BaseException as error:
        if not _agreed(error):
            _leave_alone(shard, watch, error, timeout)
        watch.finish()
        raise
    watch.finish()


def use_device(device: str) -> None:
    """In several processes "cuda" means the GPU of the process's LOCAL_RANK: makes it the current one.

    Raises:
        InputError: too few GPUs, or a device of a number, which all processes would share.
    """
    shard = current_shard()
    if shard.world == 1 or device == "cpu":
        return
    if device != "cuda":
        raise InputError(
            f"--device {device} with {shard.world} processes; accepted: cpu, or cuda: each process takes a GPU"
        )
    if local_rank() >= torch.cuda.device_count():
        raise InputError(
            f"--device cuda: process {local_rank()} of this machine finds {torch.cuda.device_count()} GPUs; "
            "give torchrun as many processes as there are GPUs, or --device cpu"
        )
    torch.cuda.set_device(local_rank())


def _agreed(error: BaseException) -> bool:
    return isinstance(error, EndedElsewhere) or getattr(error, "on_all_ranks", False)


def _leave_alone(shard: Shard, watch: _Watch, error: BaseException, timeout: float) -> None:
    """Ends this process without the others, or returns if the error is a bug, whose traceback should be seen."""
    if isinstance(error, KeyboardInterrupt):
        _end(f"rank {shard.rank}: stopped at once, nothing saved since the last checkpoint", 130)
    if isinstance(error, (InputError, BackendUnavailable)):
        _end(f"error: rank {shard.rank}: {one_line(str(error))}", EXIT_LOST)
    if isinstance(error, RuntimeError):
        watch.join(1.0)  # if the reason is a lost process, the thread ends this one before the wait is over
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            watch.lost(f"another process gave no answer for {timeout:g} s")
    sys.excepthook(type(error), error, error.__traceback__)
    _end("", 1)


def _end(line: str, code: int) -> NoReturn:
    """Ends the process without clean-up, which would wait for ranks that may be gone."""
    write(line + "\n" if line else "", sys.stderr)
    os._exit(code)


class _Watch(threading.Thread):
    """Waits for the next rank's farewell; a connection that breaks before is a lost process."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(name="orthokern-watch", daemon=True)
        self.shard = shard
        self.advice = "nothing is saved yet; start again"
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._one_line = threading.Lock()
        global _watch
        _watch = self

    def run(self) -> None:
        try:
            dist.recv(torch.zeros(1), src=(self.shard.rank + 1) % self.shard.world, group=self._group)
        except RuntimeError:
            self.lost("another process of this run was killed or lost")

    def lost(self, what: str) -> NoReturn:
        self._one_line.acquire()  # never released: this process is about to end
        _end(f"error: rank {self.shard.rank}: {what}; {self.advice}", EXIT_LOST)

    def finish(self) -> None:
        """Waits until all ranks are here, says farewell, and closes the process group."""
        try:
            dist.all_reduce(torch.zeros(1))
            dist.send(torch.zeros(1), dst=(self.shard.rank - 1) % self.shard.world, group=self._group)
        except RuntimeError:
            self.lost("another process of this run was lost at its end")
        self.join()
        dist.destroy_process_group()
        global _watch
        _watch = None


_watch: _Watch | None = None


def tell_on_loss(advice: str) -> None:
    """What the line about a lost process ends with: the last good checkpoint, and how to go on."""
    if _watch is not None:
        _watch.advice = advice


def joined() -> Shard:
    """`current_shard`, once its processes are joined.

    Raises:
        InputError: torchrun started several processes, and nobody has opened `processes`: each would train on its own.
    """
    shard = current_shard()
    if shard.world > 1 and not _several():
        raise InputError(f"{shard.world} processes that are not joined; train within training.distributed.processes()")
    return shard


# ---- exchange --------------------------------------------------------------------------------------------------------


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(values: Sequence[float], stop: int | None) -> tuple[list[float], int | None]:
    """The means over the ranks, and a signal that came on any of them, in one all-reduce.

    Args:
        values: numbers, as many on every rank.
        stop: SIGINT, SIGTERM, or None.

    Returns:
        The same on every rank, bit for bit.
    """
    if not _several():
        return list(values), stop
    flags = [float(stop == number) for number in STOP_SIGNALS]
    joint = torch.tensor([*values, *flags], dtype=torch.float64)
    dist.all_reduce(joint)
    means = (joint[: len(values)] / dist.get_world_size()).tolist()
    came = [number for number, count in zip(STOP_SIGNALS, joint[len(values) :].tolist(), strict=True) if count]
    return means, int(came[-1]) if came else None


def gather(value: T) -> list[T]:
    """Every rank's value, in order, on every rank; pickled."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 alone and hands its result, pickled, to all.

    Raises:
        InputError, BackendUnavailable, OSError: on rank 0, what `work` raised.
        EndedElsewhere: on the others, then.
    """
    if not _several():
        return work()
    outcome: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [(True, work())]
        except (InputError, BackendUnavailable, OSError) as caught:
            outcome, error = [(False, None)], caught
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise _marked(error)
    done, result = outcome[0]
    if not done:
        raise EndedElsewhere
    return result


def together(work: Callable[[], T]) -> T:
    """Runs `work` on every rank; it succeeds on all, or raises on all.

    Raises:
        InputError, BackendUnavailable, OSError: what `work` raised, on the first rank where it did.
        EndedElsewhere: on the others, then.
    """
    if not _several():
        return work()
    result, error = None, None
    try:
        result = work()
    except (InputError, BackendUnavailable, OSError) as caught:
        error = caught
    failed = [rank for rank, bad in enumerate(gather(error is not None)) if bad]
    if not failed:
        return result  # type: ignore[return-value]
    if error is not None and failed[0] == dist.get_rank():
        raise _marked(error)
    raise EndedElsewhere


def _marked(error: E) -> E:
    error.on_all_ranks = True  # type: ignore[attr-defined]
    return error


def same_scope(error: E, original: Exception) -> E:
    """`error`, which is about to be raised in the place of `original`, on all ranks if that was."""
    return _marked(error) if _agreed(original) else error


def speaks(error: Exception) -> bool:
    """Whether this process is the one that tells of an error: where `together` or `on_first` raised it, and else, of an
    error that came before the processes were joined and so on each of them, the first one of each machine."""
    return _agreed(error) or local_rank() == 0


# ---- gradients -------------------------------------------------------------------------------------------------------


class _Averaging(nn.parallel.DistributedDataParallel):
    """DistributedDataParallel that knows whether it was called."""

    called = False

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self.called = True
        return super().forward(*inputs, **options)


def wrap(model: nn.Module) -> nn.Module:
    """The model as DistributedDataParallel, which hands rank 0's parameters to all and from then on averages gradients;
    the model itself in a single process.

    Note [Same bits after a resume]
        DDP sends gradients in buckets, arranged anew after a process's first iteration, and an all-reduce's order of
        summation follows from the place in the bucket: with more than two ranks a resumed run would round otherwise
        than one never stopped. Here the ranks' gradients are gathered and added in the order of the ranks. That sends
        world / 2 times as much as a ring would, and a recurrent network has few parameters.

    Buffers are those of rank 0, sent before every forward pass if there are any.
    """
    if not _several():
        return model
    wrapped = _Averaging(model)
    # A lambda: DDP compares a hook's annotations with its own types, and here they are strings.
    wrapped.register_comm_hook(None, lambda state, bucket: _mean_in_rank_order(bucket))
    return wrapped


def keep_own_gradients(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Within it, forward and backward add to this rank's gradients and send nothing: for all but the last batch of an
    iteration."""
    return module.no_sync() if isinstance(module, _Averaging) else contextlib.nullcontext()


def check_averaged(module: nn.Module, name: str) -> None:
    """Called after a process's first backward: gradients that were not averaged would let the ranks drift apart.

    Args:
        module: what `wrap` returned.
        name: of the task.

    Raises:
        RuntimeError: a mistake in the task: its loss goes past `module`, or leaves out a parameter.
    """
    if not isinstance(module, _Averaging):
        return
    if not module.called:
        raise RuntimeError(f"task {name!r}: loss() calls self.model; in several processes it must call self.module")
    idle = [key for key, p in module.module.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise RuntimeError(
            f"task {name!r}: no gradient for {', '.join(idle)}; in several processes every parameter needs one in "
            "every iteration, or requires_grad=False"
        )


def _mean_in_rank_order(bucket: Any) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]

    def mean(_: Any) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total.div_(len(parts))

    return dist.all_gather(parts, buffer, async_op=True).get_future().then(mean)


class Silent(Progress):
    """The progress of every rank but the first."""

    def __init__(self, total: int) -> None:
        super().__init__(total, io.StringIO())

    def _write(self, text: str) -> None:
        pass
