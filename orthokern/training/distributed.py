"""One run in several processes: `torchrun --nproc-per-node 4 -m orthokern.tasks.copy ...`.

Every process generates the joint batch and computes its part of the rows. DistributedDataParallel averages the
gradients, and every process takes the same optimizer step. The order of the data and, up to rounding, the loss curve
are therefore those of a run in one process, and the bases are bitwise equal on all ranks. Rank 0 evaluates and writes
the files.

Note [How a run in several processes ends]
    All ranks end together, or one error line is printed. Losses, stop signals and evaluations are exchanged, so that
    decisions made from them are the same on all ranks without further messages. A step that may fail on one rank
    (reading data, creating the run folder) runs in `together` or `on_first`: it either succeeds on all ranks or raises
    on all, and only one rank prints the error. A process that disappears is detected by the rank before it: on each
    rank a thread waits for a closing message from the next rank, which is sent only at the end of the run. The thread
    works whatever the main thread is waiting for: a kernel, NCCL, or the evaluation of another rank.
"""

from __future__ import annotations

import contextlib
import io
import os
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
from orthokern.training.signals import STOP_SIGNALS

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

EXIT_LOST = 2


@dataclass(frozen=True)
class Shard:
    """The part of this process in the run."""

    rank: int = 0  # number of the process
    world: int = 1  # number of processes

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which evaluates, writes files and prints."""
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """The rows of the joint batch for this process.

        Returns:
            A slice. The slices of all ranks, in order, cover range(batch). They have the same length, so that the mean
            of the mean losses of the ranks is the mean over the joint batch.

        Raises:
            InputError: the batch is not a multiple of the number of processes.

        Example::

            >>> Shard(rank=1, world=4).rows(20)
            slice(5, 10, None)
        """
        if batch % self.world:
            raise InputError(
                f"--batch {batch} cannot be shared evenly by {self.world} processes; "
                f"accepted: a multiple of {self.world}"
            )
        part = batch // self.world
        return slice(self.rank * part, (self.rank + 1) * part)


def current_shard() -> Shard:
    """The rank of this process and the number of processes: from the process group, else from the variables of
    torchrun, else 0 and 1. Without WORLD_SIZE, or if it is 1, RANK is ignored: other programs set it too.

    Raises:
        InputError: WORLD_SIZE is not an integer; or it is not 1, and RANK is not an integer in [0, WORLD_SIZE).

    Example::

        >>> current_shard()  # without torchrun
        Shard(rank=0, world=1)
    """
    if dist.is_available() and dist.is_initialized():
        return Shard(dist.get_rank(), dist.get_world_size())
    world = _environment("WORLD_SIZE", 1)
    if world == 1:
        return Shard()
    rank = _environment("RANK", 0)
    if not 0 <= rank < world:
        raise InputError(
            f"environment variables RANK={rank} and WORLD_SIZE={world}; accepted: 0 <= RANK < WORLD_SIZE, as torchrun "
            "sets them"
        )
    return Shard(rank, world)


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"environment variable {name}={text!r} is not an integer; start with torchrun") from None


def local_rank() -> int:
    """The number of this process on its machine."""
    return _environment("LOCAL_RANK", 0)


class EndedElsewhere(Exception):
    """Another rank has an error and prints it; this rank ends without output."""


# ---- the process group -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def processes(timeout: float = 600.0) -> Iterator[Shard]:
    """Context manager: joins the processes started by torchrun in a process group. Without torchrun it does nothing.

    CPU tensors are sent by gloo, CUDA tensors by NCCL (see `use_device`).

    All ranks must leave the block at the same point. An exception that is not raised by `together` or `on_first` ends
    this process at once (os._exit), with one line for an InputError, and the other ranks detect the lost process.

    Args:
        timeout: seconds that a rank waits for another, which may be evaluating or writing; above 0.

    Raises:
        InputError: variables of torchrun are missing, or the other processes cannot be reached.
    """
    shard = current_shard()
    if shard.world == 1 or dist.is_initialized():
        yield shard
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE={shard.world} without {', '.join(missing)}; start with torchrun")
    # NCCL connects when the first CUDA tensor is sent: on CPUs it costs nothing.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"rank {shard.rank} cannot connect to the other {shard.world - 1} processes: {reason}"
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
    """Sets the current GPU: with several processes, "cuda" is the GPU with the number LOCAL_RANK.

    Raises:
        InputError: too few GPUs, or a device with a number, which all processes would share.
    """
    shard = current_shard()
    if shard.world == 1 or device == "cpu":
        return
    if device != "cuda":
        raise InputError(
            f"--device {device} with {shard.world} processes; accepted: cpu, or cuda, for one GPU per process"
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
    """Ends this process alone. Returns if the error is a bug, so that its traceback is shown."""
    if isinstance(error, KeyboardInterrupt):
        _end(f"rank {shard.rank}: stopped at once, nothing saved since the last checkpoint", 130)
    if isinstance(error, (InputError, BackendUnavailable)):
        _end(f"error: rank {shard.rank}: {one_line(str(error))}", EXIT_LOST)
    if isinstance(error, RuntimeError):
        watch.join(1.0)  # if a process is lost, the watching thread ends this process during the wait
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            watch.lost(f"another process did not respond for {timeout:g} s")
    sys.excepthook(type(error), error, error.__traceback__)
    _end("", 1)


def _end(line: str, code: int) -> NoReturn:
    """Ends the process without clean-up, which would wait for ranks that may be lost."""
    write(line + "\n" if line else "", sys.stderr)
    os._exit(code)


class _Watch(threading.Thread):
    """Waits for the closing message of the next rank. If the connection breaks first, that process is lost."""

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
        """Waits for all ranks, sends the closing message, and closes the process group."""
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
    """Sets the end of the error line for a lost process: the last good checkpoint, and how to resume."""
    if _watch is not None:
        _watch.advice = advice


def joined() -> Shard:
    """`current_shard`, after a check that its processes are joined.

    Raises:
        InputError: torchrun started several processes outside of `processes`: each would train independently.
    """
    shard = current_shard()
    if shard.world > 1 and not _several():
        raise InputError(f"{shard.world} processes that are not joined; train within training.distributed.processes()")
    return shard


# ---- exchange --------------------------------------------------------------------------------------------------------


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(values: Sequence[float], stop: int | None) -> tuple[list[float], int | None]:
    """Averages numbers over the ranks, and combines stop signals, in one all-reduce.

    Args:
        values: numbers; the same count on every rank.
        stop: one of STOP_SIGNALS, or None.

    Returns:
        The means, and the signal if any rank has one; bitwise equal on all ranks.
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
    """The values of all ranks, in order, on every rank. Values are pickled."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and broadcasts its result, which is pickled.

    Raises:
        InputError, BackendUnavailable, OSError: on rank 0, the error raised by `work`.
        EndedElsewhere: in this case, on the other ranks.
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
    """Runs `work` on every rank. If it raises on one rank, all ranks raise.

    Raises:
        InputError, BackendUnavailable, OSError: the error raised by `work`, on the first rank that has one.
        EndedElsewhere: in this case, on the other ranks.
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
    """Returns `error`, which replaces `original`. It counts as raised on all ranks if `original` was."""
    return _marked(error) if _agreed(original) else error


def speaks(error: Exception) -> bool:
    """Whether this process prints an error. A single process does. Of several it is the rank where `together` or
    `on_first` raised the error. An error before the processes are joined occurs on all of them, and the first process
    of each machine prints it."""
    return _agreed(error) or _environment("WORLD_SIZE", 1) == 1 or local_rank() == 0


# ---- gradients -------------------------------------------------------------------------------------------------------


class _Averaging(nn.parallel.DistributedDataParallel):
    """DistributedDataParallel that records whether it was called."""

    called = False

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self.called = True
        return super().forward(*inputs, **options)


def wrap(model: nn.Module) -> nn.Module:
    """Wraps the model in DistributedDataParallel, which broadcasts the parameters of rank 0 and averages gradients. In
    a single process, returns the model itself.

    Note [Same bits after a resume]
        DDP sends gradients in buckets, which are rebuilt after the first iteration of a process. The order of summation
        in an all-reduce depends on the position in the bucket, so that with more than two ranks the rounding of a
        resumed run would differ from that of an uninterrupted one. Here the gradients of the ranks are gathered and
        added in the order of the ranks. This sends world / 2 times as much data as a ring all-reduce; a recurrent
        network has few parameters.

    Buffers are broadcast from rank 0 before every forward pass, if there are any.
    """
    if not _several():
        return model
    wrapped = _Averaging(model)
    # A lambda: DDP compares a hook's annotations with its own types, and here they are strings.
    wrapped.register_comm_hook(None, lambda state, bucket: _mean_in_rank_order(bucket))
    return wrapped


def keep_own_gradients(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Context manager in which gradients are accumulated on this rank without communication, for all but the last batch
    of an iteration."""
    return module.no_sync() if isinstance(module, _Averaging) else contextlib.nullcontext()


def check_averaged(module: nn.Module, name: str) -> None:
    """Checks, after the first backward of a process, that the gradients were averaged. Otherwise the parameters of the
    ranks would diverge.

    Args:
        module: the module returned by `wrap`.
        name: name of the task.

    Raises:
        RuntimeError: an error in the task: its loss does not call `module`, or does not use a parameter.
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
    """The progress display of all ranks except the first: no output."""

    def __init__(self, total: int) -> None:
        super().__init__(total, io.StringIO())

    def _write(self, text: str) -> None:
        pass
