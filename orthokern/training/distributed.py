"""One run in several processes: `torchrun --nproc-per-node 4 -m orthokern.tasks.copy ...`.

Every process generates the joint batch and computes its part of the rows. The gradients are averaged, and every
process takes the same optimizer step. The order of the data and, up to rounding, the loss curve are therefore those of
a run in one process, and the bases are bitwise equal on all ranks. Rank 0 evaluates and writes the files.

Losses and stop signals are averaged over the ranks, so that all ranks make the same decisions. Steps that can fail on
one rank (reading data, creating the run folder) run in `on_first` or `on_all`, which raise on all ranks or on none.
If a process is lost, torchrun ends the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from orthokern.errors import BackendUnavailable, InputError, require
from orthokern.training.signals import STOP_SIGNALS

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)  # that a rank waits for another, which may be evaluating


class EndedElsewhere(Exception):
    """Another rank raises and prints the error; this rank ends without output."""


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
        """The rows of the joint batch for this process. All ranks have equally many, so that the mean of the mean
        losses of the ranks is the mean over the joint batch."""
        if batch % self.world:
            raise InputError(f"--batch must be a multiple of the {self.world} processes, got {batch}")
        part = batch // self.world
        return slice(self.rank * part, (self.rank + 1) * part)


def current_shard() -> Shard:
    """The rank of this process and the number of processes: from the process group, else from the variables of
    torchrun, else 0 and 1. RANK is ignored unless WORLD_SIZE is above 1: other programs set it too."""
    if _several():
        return Shard(dist.get_rank(), dist.get_world_size())
    world = _variable("WORLD_SIZE", 1)
    return Shard() if world <= 1 else Shard(_variable("RANK", 0), world)


def _variable(name: str, default: int) -> int:
    """An environment variable of torchrun."""
    text = os.environ.get(name) or str(default)
    require(text.isdecimal(), f"the environment variable {name}", "a number, as torchrun sets it", repr(text))
    return int(text)


@contextlib.contextmanager
def processes() -> Iterator[Shard]:
    """Context manager: joins the processes started by torchrun in a process group. Without torchrun it does nothing.
    CPU tensors are sent by gloo, CUDA tensors by NCCL (see `use_device`)."""
    shard = current_shard()
    if shard.world == 1 or dist.is_initialized():
        yield shard
        return
    # NCCL connects when the first CUDA tensor is sent: on CPUs it costs nothing.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"rank {shard.rank} cannot join {shard.world} processes: {reason}; use torchrun") from None
    try:
        yield shard
    finally:
        dist.destroy_process_group()


def use_device(device: str) -> None:
    """Sets the current GPU: with several processes, "cuda" is the GPU with the number LOCAL_RANK."""
    if current_shard().world == 1 or device == "cpu":
        return
    if device != "cuda":
        raise InputError(f"--device must be cpu or cuda under torchrun (one GPU for each process), got {device}")
    local = _variable("LOCAL_RANK", 0)
    if local >= torch.cuda.device_count():
        raise InputError(f"--device cuda: process {local} of this machine has no GPU of its own")
    torch.cuda.set_device(local)


# ---- exchange --------------------------------------------------------------------------------------------------------


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(values: Sequence[float], stop: int | None) -> tuple[list[float], int | None]:
    """Averages numbers over the ranks, and combines stop signals, in one all-reduce."""
    if not _several():
        return list(values), stop
    flags = [float(stop == number) for number in STOP_SIGNALS]
    joint = torch.tensor([*values, *flags], dtype=torch.float64)
    dist.all_reduce(joint)
    means = (joint[: len(values)] / dist.get_world_size()).tolist()
    received = [number for number, count in zip(STOP_SIGNALS, joint[len(values) :].tolist(), strict=True) if count]
    return means, int(received[-1]) if received else None


def gather(value: T) -> list[T]:
    """The values of all ranks, in order, on every rank. Values are pickled."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all(work: Callable[[], T]) -> T:
    """Runs `work` on every rank. If it raises on any rank, the first error is raised on rank 0."""
    result, error = None, None
    try:
        result = work()
    except (InputError, BackendUnavailable, OSError) as caught:
        error = caught
    errors = [each for each in gather(error) if each is not None]
    if errors:
        raise errors[0] if current_shard().first else EndedElsewhere
    return result  # type: ignore[return-value]


def on_first(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and sends its result, which is pickled, to all ranks."""
    own = on_all(lambda: work() if current_shard().first else None)
    first = gather(own)[0]
    return own if current_shard().first else first  # type: ignore[return-value]


# ---- parameters and gradients ---------------------------------------------------------------------------------------


@torch.no_grad()
def share_parameters(model: nn.Module) -> None:
    """Gives all ranks the parameters and buffers of rank 0."""
    if _several():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, 0)


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Replaces the gradients by their means over the ranks, of which all have the same bits. A parameter has a gradient
    on all ranks or on none.

    The gradients of the ranks are gathered and added in the order of the ranks: the order of summation in an all-reduce
    depends on sizes and positions, and another process could round differently after a resume.
    """
    if not _several():
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    total = parts[0]
    for part in parts[1:]:
        total += part
    total /= len(parts)
    for gradient, mean in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
