"""The memory that a run needs at least, computed from its sizes before anything is read, drawn or allocated.

Every number here is a lower bound: a run that is refused could not have been trained on this machine. A run that is not
refused may still end with torch's own error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from orthokern._memory import machine_memory
from orthokern.errors import InputError
from orthokern.tasks.network import NetworkOptions
from orthokern.tasks.optimization import OptimizerOptions
from orthokern.training.cli import RunOptions
from orthokern.training.distributed import current_shard

__all__ = ["Part", "check", "check_gru", "check_recurrent", "gru_size", "machine_memory", "model_parts", "network_size"]

# What the states of a batch grow with, where a task has it.
_OF_STATES = ("T", "bptt", "window", "batch", "layers", "hidden")


@dataclass(frozen=True)
class Part:
    """One of the things that are in memory at the same time.

    Attributes:
        what: its name in an error.
        size: bytes.
        options: settings that make it smaller when they are lowered; those that a task has not, or that are None, are
            passed over.
    """

    what: str
    size: int
    options: tuple[str, ...]


def check(settings: RunOptions, parts: Iterable[Part]) -> None:
    """Refuses what the device cannot hold.

    Args:
        settings: with "device".
        parts: all of them in memory at once.

    Raises:
        InputError: names the largest part and the options to lower.
    """
    parts = list(parts)
    needed, there = sum(part.size for part in parts), machine_memory(settings.device)
    if there is None or needed <= there:
        return
    largest = max(parts, key=lambda part: part.size)
    sizes = {name: getattr(settings, name, None) for name in largest.options}
    lower = [f"--{name.replace('_', '-')} ({sizes[name]})" for name in largest.options if sizes[name]]
    raise InputError(
        f"out of memory on {settings.device}: at least {_gib(needed)} would be allocated, there are {_gib(there)}; "
        f"the largest part is {largest.what}, {_gib(largest.size)}: lower {' or '.join(lower)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"


# ---- sizes of networks -----------------------------------------------------------------------------------------------


def network_size(inputs: int, settings: NetworkOptions, *, bias: bool = True) -> tuple[int, int, int]:
    """Numbers of elements of what `orthokern.tasks.network.build_recurrence` makes of the same arguments.

    Returns:
        All parameters; those of them that move along geodesics; buffers.
    """
    n, k, model = settings.hidden, settings.rank or settings.hidden, settings.model
    if model in ("lstm", "peephole-lstm"):
        peepholes = 3 * n if model == "peephole-lstm" else 0
        return 4 * n * (inputs + n + (2 if bias else 0)) + peepholes, 0, 0
    outside = n * inputs + (n if settings.learned_h0 else 0)
    outside += {"modrelu": n, "prelu": 1}.get(settings.nonlinearity, 0)
    if model == "rnn":
        return outside + n * n + (2 * n if bias else 0), 0, 0
    outside += n if bias else 0
    if model == "factorized":
        return outside + 2 * n * k + k, 2 * n * k, 0
    if model == "exprnn":
        return outside + n * n, 0, n * n
    return outside + n * n + n + (n * n if settings.triangle else 0), 0, n * n


def gru_size(settings: Any) -> int:
    """Number of parameters of what `orthokern.tasks.gru.build_gru` makes for as many inputs as hidden units."""
    return int(6 * settings.layers * settings.hidden**2)


def model_parts(
    parameters: int, settings: Any, options: tuple[str, ...], *, bases: int = 0, buffers: int = 0
) -> list[Part]:
    """Parameters, gradients and the optimizer's state, in the default dtype.

    Args:
        parameters: their number of elements, bases included.
        settings: with "optimizer"; "momentum" and, for bases, "geodesic".
        options: as in Part.
        bases: elements that geodesic steps move.
        buffers: elements of the model that are not trained.
    """
    size = torch.get_default_dtype().itemsize
    copies = {"adam": 2, "rmsprop": 1, "sgd": 1 if settings.momentum else 0}[settings.optimizer]
    state = copies * (parameters - bases) + (bases if bases and settings.geodesic == "rmsprop" else 0)
    return [
        Part("the model", size * (parameters + buffers), options),
        Part("the gradients", size * parameters, options),
        Part("the optimizer's state", size * state, options),
    ]


# ---- tasks -----------------------------------------------------------------------------------------------------------


def check_recurrent(
    settings: OptimizerOptions,
    inputs: int,
    outputs: int,
    *,
    bias: bool = True,
    steps: int = 0,
    features: int = 0,
    evaluated: int = 0,
    ids: int = 0,
    states: int | None = None,
) -> None:
    """`check` for a recurrence and a linear readout.

    Args:
        settings: of a task with a network's and an optimizer's options.
        inputs, bias: as in `build_recurrence`.
        outputs: of the readout.
        steps: time steps of a batch; 0 where they are not known yet.
        features: floating-point numbers of a batch's inputs per sequence and step.
        evaluated: sequences of a batch of an evaluation, which keeps no gradients.
        ids: bytes of all batches of token ids and targets that there are at one time.
        states: bytes of states with their gradients, where the loss says what it holds; None: those of all steps.

    Raises:
        InputError: as `check`.
    """
    parameters, bases, buffers = network_size(inputs, settings, bias=bias)
    parameters += (settings.hidden + 1) * outputs
    model = model_parts(parameters, settings, ("rank", "hidden"), bases=bases, buffers=buffers)
    rows, size = settings.batch // current_shard().world, torch.get_default_dtype().itemsize
    model.append(Part("token ids and targets", ids, ("T", "batch")))
    if states is None:
        states = size * steps * rows * (2 * settings.hidden + features)
    check(settings, [*model, Part("the states of a batch with their gradients", states, _OF_STATES)])
    numbers = steps * evaluated * (settings.hidden + features)
    options = ("T", "bptt", "eval_sequences", "hidden")
    check(settings, [*model, Part("the states of an evaluation's batch", size * numbers, options)])


def check_gru(settings: Any, *, steps: int = 0) -> None:
    """`check` for a stack of GRU layers; what stands around it is not counted.

    Args:
        settings: of a task with a GRU's options.
        steps: as in `check_recurrent`.

    Raises:
        InputError: as `check`.
    """
    size = torch.get_default_dtype().itemsize
    numbers = 2 * settings.layers * steps * settings.batch * settings.hidden
    states = Part("the states of a batch with their gradients", size * numbers, _OF_STATES)
    check(settings, [*model_parts(gru_size(settings), settings, ("layers", "hidden")), states])
