"""A lower bound of the memory that a run needs, computed from its sizes before anything is read, drawn or allocated.

Since it is a lower bound, a run that is rejected could not have been trained on this machine. A run that is accepted
may still end with torch's out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from orthokern._memory import machine_memory
from orthokern.errors import InputError
from orthokern.tasks.network import MODELS, NetworkOptions
from orthokern.tasks.optimization import OptimizerOptions
from orthokern.training.cli import RunOptions
from orthokern.training.distributed import current_shard

__all__ = ["Part", "check", "check_gru", "check_recurrent", "gru_size", "machine_memory", "model_parts", "network_size"]

# The settings that determine the size of the states of a batch.
_OF_STATES = ("T", "bptt", "window", "batch", "layers", "hidden")


@dataclass(frozen=True)
class Part:
    """One of the allocations that exist at the same time."""

    what: str  # its name in an error message
    size: int  # bytes
    options: tuple[str, ...]  # settings to lower; those that the task does not have, or that are None, are ignored


def check(settings: RunOptions, parts: Iterable[Part]) -> None:
    """Raises an error if the parts do not fit into the memory of the device.

    Args:
        settings: with "device".
        parts: allocations that exist at the same time.

    Raises:
        InputError: they do not fit. The message has the largest part and the options to lower.
    """
    parts = list(parts)
    needed, there = sum(part.size for part in parts), machine_memory(settings.device)
    if there is None or needed <= there:
        return
    largest = max(parts, key=lambda part: part.size)
    sizes = {name: getattr(settings, name, None) for name in largest.options}
    lower = [f"--{name.replace('_', '-')} ({sizes[name]})" for name in largest.options if sizes[name]]
    raise InputError(
        f"out of memory on {settings.device}: at least {_gib(needed)} are needed, {_gib(there)} are available; "
        f"the largest part is {largest.what}, {_gib(largest.size)}: lower {' or '.join(lower)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"


# ---- sizes of networks -----------------------------------------------------------------------------------------------


def network_size(inputs: int, settings: NetworkOptions, *, bias: bool = True) -> tuple[int, int, int]:
    """Numbers of elements in the module that `orthokern.tasks.network.build_recurrence` builds for these arguments.

    Returns:
        The number in all parameters, in the bases (which move along geodesics), and in buffers.
    """
    n, k, model = settings.hidden, settings.rank or settings.hidden, settings.model
    gates = MODELS[model].gates
    if gates:
        peepholes = 3 * n if model == "peephole-lstm" else 0
        return gates * n * (inputs + n + (2 if bias else 0)) + peepholes, 0, 0
    outside = n * inputs + (n if settings.learned_h0 else 0)
    outside += {"modrelu": n, "prelu": 1}.get(settings.nonlinearity, 0)
    if model == "rnn":
        return outside + n * n + (2 * n if bias else 0), 0, 0
    outside += n if bias else 0
    if model == "factorized":
        return outside + 2 * n * k + k, 2 * n * k, 0
    if model == "exprnn":
        return outside + n * n, 0, n * n
    if model == "nnrnn":
        return outside + n * n + n + (n * n if settings.triangle else 0), 0, n * n
    raise ValueError(f"the size of a network of the model {model!r} is not known")


def gru_size(settings: Any) -> int:
    """Number of parameters of the module that `orthokern.tasks.gru.build_gru` builds for `hidden` input features."""
    return int(6 * settings.layers * settings.hidden**2)


def model_parts(
    parameters: int, settings: Any, options: tuple[str, ...], *, bases: int = 0, buffers: int = 0
) -> list[Part]:
    """Parameters and their moving averages, gradients and the optimizer's state, in the default dtype.

    Args:
        parameters: number of elements of the parameters, including bases.
        settings: with "optimizer"; "momentum" and, for bases, "geodesic"; "average" or not.
        options: as in Part.
        bases: number of elements of the bases.
        buffers: number of elements of the model that are not trained.
    """
    size = torch.get_default_dtype().itemsize
    copies = {"adam": 2, "rmsprop": 1, "sgd": 1 if settings.momentum else 0}[settings.optimizer]
    state = copies * (parameters - bases) + (bases if bases and settings.geodesic == "rmsprop" else 0)
    averages = 0 if getattr(settings, "average", None) is None else parameters
    return [
        Part("the model", size * (parameters + averages + buffers), options),
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
        steps: time steps of a batch; 0 if unknown.
        features: number of floating-point inputs per sequence and step.
        evaluated: number of sequences in an evaluation batch, which has no gradients.
        ids: bytes of all batches of token ids and targets that exist at the same time.
        states: bytes of the states and their gradients if the loss computes this number; None: the states of all steps.

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
    check(settings, [*model, Part("the states of an evaluation batch", size * numbers, options)])


def check_gru(settings: Any, *, steps: int = 0, features: int = 0) -> None:
    """`check` for a stack of GRU layers, without the input layer and the readout.

    Args:
        settings: of a task with a GRU's options.
        steps, features: as in `check_recurrent`.

    Raises:
        InputError: as `check`.
    """
    size = torch.get_default_dtype().itemsize
    numbers = steps * settings.batch * (2 * settings.layers * settings.hidden + features)
    states = Part("the states of a batch with their gradients", size * numbers, _OF_STATES)
    check(settings, [*model_parts(gru_size(settings), settings, ("layers", "hidden")), states])
