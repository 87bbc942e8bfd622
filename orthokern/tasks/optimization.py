"""The optimizer, its schedule and the penalties that every task can train with, and the options that choose them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, ReduceLROnPlateau

from orthokern.commandline import Needs, Parser, Settings, integer, one_of, real
from orthokern.errors import InputError
from orthokern.nn import FactorizedRNN
from orthokern.optim import CombinedOptimizer, GeodesicRMSprop, GeodesicSGD, optimizer_for
from orthokern.penalties import (
    OrthogonalPenalty,
    composite_weight_decay,
    modulus_penalty,
    spectrum_prior,
    triangular_decay,
)
from orthokern.tasks.network import OF_EXPONENTIALS, OF_FACTORIZED, OF_NNRNN

__all__ = [
    "DESCENT_NEEDS",
    "OPTIMIZER_DEFAULTS",
    "SCHEDULE_DEFAULTS",
    "add_optimizer_options",
    "add_schedule_options",
    "build_optimizer",
    "build_schedules",
    "check_schedule",
    "penalty",
    "plateau",
    "schedule_factor",
]

OPTIMIZERS = ("rmsprop", "adam", "sgd")
GEODESICS = ("sgd", "rmsprop")
NORMS = ("squared", "plain")
MODULUS_NORMS = ("l2", "l1")
SKEW_RATE = 0.1  # of --lr: what the searches of Kerg et al. 2019 and Lezcano-Casado 2019 begin with
CURVES = ("inverse", "exponential", "cosine")  # of the iteration alone
SCHEDULES = ("constant", *CURVES, "plateau")

SCHEDULE_DEFAULTS: Settings = {
    "schedule": "constant",
    "lr_decay": 0.0,
    "plateau_factor": 0.5,
    "patience": 1,
    "warmup": 0,
}

OPTIMIZER_DEFAULTS: Settings = {
    "batch": 50,
    "optimizer": "rmsprop",
    "lr": 1e-3,
    "input_lr": None,
    "spectrum_lr": None,
    "geodesic": "sgd",
    "geodesic_lr": 1e-6,
    "skew_lr": None,
    "alpha": 0.9,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "momentum": 0.9,
    **SCHEDULE_DEFAULTS,
    "clip": None,
    "basis_clip": None,
    "weight_decay": 0.0,
    "soft_orthogonality": 0.0,
    "soft_orthogonality_norm": "squared",
    "spectrum_prior": 0.0,
    "modulus_penalty": 0.0,
    "modulus_norm": "l2",
    "triangle_decay": 0.0,
}


# What an option must come with to play a part, any one of the ways; of optimizer and schedule, which other tasks share.
_RMSPROP, _PLATEAU = Needs("optimizer", ("rmsprop",)), Needs("schedule", ("plateau",))
DESCENT_NEEDS: dict[str, tuple[tuple[Needs, ...], ...]] = {
    "alpha": ((_RMSPROP,),),
    "eps": ((Needs("optimizer", ("rmsprop", "adam")),),),
    "momentum": ((Needs("optimizer", ("sgd",)),),),
    "lr_decay": ((Needs("schedule", CURVES),),),
    "plateau_factor": ((_PLATEAU,),),
    "patience": ((_PLATEAU,),),
}
_GEODESIC_RMSPROP = (Needs("geodesic", ("rmsprop",)), OF_FACTORIZED)
_NEEDS: dict[str, tuple[tuple[Needs, ...], ...]] = {
    **DESCENT_NEEDS,
    "alpha": (*DESCENT_NEEDS["alpha"], _GEODESIC_RMSPROP),
    "eps": (*DESCENT_NEEDS["eps"], _GEODESIC_RMSPROP),
    "beta1": ((Needs("optimizer", ("adam",)),),),
    "beta2": ((Needs("optimizer", ("adam",)),),),
    "spectrum_lr": ((OF_FACTORIZED,),),
    "geodesic": ((OF_FACTORIZED,),),
    "geodesic_lr": ((OF_FACTORIZED,),),
    "basis_clip": ((OF_FACTORIZED,),),
    "skew_lr": ((OF_EXPONENTIALS,),),
    "soft_orthogonality": ((Needs("model", ("factorized", "rnn", "nnrnn")),),),
    "soft_orthogonality_norm": ((Needs("soft_orthogonality", nothing=0.0),),),
    "spectrum_prior": ((OF_FACTORIZED,),),
    "modulus_penalty": ((OF_NNRNN,),),
    "modulus_norm": ((OF_NNRNN, Needs("modulus_penalty", nothing=0.0)),),
    "triangle_decay": ((OF_NNRNN,),),
}


def add_optimizer_options(
    parser: Parser,
    defaults: Mapping[str, Any],
    presets: Mapping[str, object],
    preset_help: Mapping[str, str] | None = None,
) -> None:
    """Adds the options of OPTIMIZER_DEFAULTS and --preset.

    Args:
        parser: a task's parser.
        defaults: the task's own, shown by the help.
        presets: the task's presets by name, each with a line of help where `preset_help` is None.
        preset_help: name, or several names in one, -> a line of help.
    """

    def default(key: str, none: str = "none") -> str:
        value = defaults[key]
        return f"(default {none if value is None else f'{value:g}' if isinstance(value, float) else value})"

    # The one task that has no number for the bases' rate makes both of these smaller for a longer memory.
    as_lr = "as --lr" if defaults["geodesic_lr"] is not None else "by T"
    group = parser.add_argument_group("the optimizer")
    if presets:
        group.add_argument(
            "--preset",
            type=one_of("preset", presets),
            metavar="NAME",
            help="; ".join(f"{name}: {text}" for name, text in (preset_help or presets).items()),
        )
    group.add_argument("--batch", type=integer(1), metavar="N", help=f"sequences per batch {default('batch')}")
    group.add_argument(
        "--optimizer",
        type=one_of("optimizer", OPTIMIZERS),
        metavar="NAME",
        help=f"of all but U and V: {', '.join(OPTIMIZERS)} (with Nesterov's momentum) {default('optimizer')}",
    )
    group.add_argument("--lr", type=real(0.0), metavar="X", help=f"rate of the readout {default('lr')}")
    group.add_argument(
        "--input-lr",
        type=real(0.0),
        metavar="X",
        help="rate of the recurrent network's other weights " + default("input_lr", "as --lr"),
    )
    group.add_argument(
        "--spectrum-lr",
        type=real(0.0),
        metavar="X",
        help="factorized: rate of the spectrum, divided by 2 margin (tanh: 4) " + default("spectrum_lr", as_lr),
    )
    group.add_argument(
        "--geodesic",
        type=one_of("geodesic", GEODESICS),
        metavar="NAME",
        help="factorized: how U and V move: sgd: along their gradients, as the paper; rmsprop: every entry "
        f"of them divided by its running size {default('geodesic')}",
    )
    group.add_argument(
        "--geodesic-lr",
        type=real(0.0),
        metavar="X",
        help="factorized: rate of the geodesic steps on U and V " + default("geodesic_lr", "by T"),
    )
    group.add_argument(
        "--skew-lr",
        type=real(0.0),
        metavar="X",
        help="exprnn, nnrnn: rate of A in the orthogonal exp(A) " + default("skew_lr", "a tenth of --lr"),
    )
    group.add_argument(
        "--alpha",
        type=real(0.0, below=1.0),
        metavar="X",
        help=f"rmsprop: decay of the running mean square {default('alpha')}",
    )
    group.add_argument(
        "--eps",
        type=real(0.0, exclusive=True),
        metavar="X",
        help=f"rmsprop, adam: added to the RMS of the gradient {default('eps')}",
    )
    group.add_argument(
        "--beta1", type=real(0.0, below=1.0), metavar="X", help=f"adam: decay of the running mean {default('beta1')}"
    )
    group.add_argument(
        "--beta2",
        type=real(0.0, below=1.0),
        metavar="X",
        help=f"adam: decay of the running mean square {default('beta2')}",
    )
    group.add_argument("--momentum", type=real(0.0, maximum=1.0), metavar="X", help=f"of sgd {default('momentum')}")
    add_schedule_options(group, defaults)
    group.add_argument(
        "--clip",
        type=real(0.0, exclusive=True, none=True),
        metavar="X",
        help=f"clip the norm of the whole gradient; none {default('clip')}",
    )
    group.add_argument(
        "--basis-clip",
        type=real(0.0, exclusive=True, none=True),
        metavar="X",
        help=f"factorized: clip the joint norm of the gradients of U and V; none {default('basis_clip')}",
    )
    group.add_argument(
        "--weight-decay",
        type=real(0.0),
        metavar="X",
        help=f"add X ||W||^2 of each weight matrix to the loss {default('weight_decay')}",
    )
    group.add_argument(
        "--soft-orthogonality",
        type=real(0.0),
        metavar="X",
        help=f"add X ||W^T W - I||^2 of the recurrent matrix to the loss {default('soft_orthogonality')}",
    )
    group.add_argument(
        "--soft-orthogonality-norm",
        type=one_of("soft-orthogonality-norm", NORMS),
        metavar="NAME",
        help="squared: as above; plain: the norm, not squared " + default("soft_orthogonality_norm"),
    )
    group.add_argument(
        "--spectrum-prior",
        type=real(0.0),
        metavar="X",
        help=f"factorized: add X sum (s - 1)^2 of the singular values to the loss {default('spectrum_prior')}",
    )
    group.add_argument(
        "--modulus-penalty",
        type=real(0.0),
        metavar="X",
        help=f"nnrnn: add X sum (gamma - 1)^2 of the moduli to the loss {default('modulus_penalty')}",
    )
    group.add_argument(
        "--modulus-norm",
        type=one_of("modulus-norm", MODULUS_NORMS),
        metavar="NAME",
        help=f"l2: as above; l1: X sum |gamma - 1| {default('modulus_norm')}",
    )
    group.add_argument(
        "--triangle-decay",
        type=real(0.0),
        metavar="X",
        help="nnrnn: add X / 2 ||T||^2 to the loss, which is weight decay X on T " + default("triangle_decay"),
    )
    parser.needs.update(_NEEDS)


def add_schedule_options(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """Adds the options of SCHEDULE_DEFAULTS; what they need is in DESCENT_NEEDS.

    Args:
        group: of a task's parser.
        defaults: the task's own, shown by the help.
    """
    group.add_argument(
        "--schedule",
        type=one_of("schedule", SCHEDULES),
        metavar="NAME",
        help="factor of all rates in iteration i: constant; inverse: 1 / (1 + D i); exponential: exp(-D i); cosine:"
        " to D at the last iteration; plateau: decrease if held-out evaluations do not improve "
        f"(default {defaults['schedule']})",
    )
    group.add_argument(
        "--lr-decay",
        type=real(0.0),
        metavar="D",
        help=f"D of inverse and exponential, above 0; of cosine, at most 1 (default {defaults['lr_decay']:g})",
    )
    group.add_argument(
        "--plateau-factor",
        type=real(0.0, exclusive=True, below=1.0),
        metavar="X",
        help=f"plateau: factor of all learning rates (default {defaults['plateau_factor']:g})",
    )
    group.add_argument(
        "--patience",
        type=integer(1),
        metavar="N",
        help=f"plateau: after N evaluations in a row without a new best (default {defaults['patience']})",
    )
    group.add_argument(
        "--warmup",
        type=integer(0),
        metavar="N",
        help=f"increase all learning rates linearly over N iterations (default {defaults['warmup']})",
    )


def check_schedule(settings: Settings) -> None:
    """Refuses a schedule of rates that fall, and don't.

    Args:
        settings: SCHEDULE_DEFAULTS' keys, and "eval_every" where the task has it.

    Raises:
        InputError: see above.
    """
    schedule, decay = settings["schedule"], settings["lr_decay"]
    if schedule == "plateau" and settings.get("eval_every") == 0:
        raise InputError("--schedule plateau with --eval-every 0: without evaluations the rates never fall")
    if schedule in ("inverse", "exponential") and decay == 0.0:
        raise InputError(
            f"--schedule {schedule} with --lr-decay 0: the rates never fall; give --lr-decay a number above 0"
        )
    if schedule == "cosine" and decay > 1.0:
        raise InputError(f"--lr-decay {decay:g}: a cosine goes down to a part of the rates; accepted: 0 to 1")


def build_schedules(
    optimizer: torch.optim.Optimizer, settings: Settings
) -> tuple[LRScheduler | None, ReduceLROnPlateau | None]:
    """The schedules of all of an optimizer's rates, for `Task.scheduler` and `Task.plateau`.

    Args:
        optimizer: with its first rates.
        settings: SCHEDULE_DEFAULTS' keys and "iterations".

    Returns:
        A scheduler to be stepped once an iteration, and one to be stepped with the score of every evaluation; None
        where there is nothing to do.
    """
    if settings["schedule"] != "plateau":
        return LambdaLR(optimizer, schedule_factor(settings)), None
    # LambdaLR would put every rate back at the next iteration; LinearLR multiplies what it finds, as the plateau does.
    warmup = settings["warmup"]
    rise = LinearLR(optimizer, start_factor=1.0 / (warmup + 1), total_iters=warmup) if warmup else None
    return rise, plateau(optimizer, settings["plateau_factor"], settings["patience"])


def plateau(optimizer: torch.optim.Optimizer, factor: float, patience: int) -> ReduceLROnPlateau:
    """A schedule for `Task.plateau`: all rates fall when evaluations get no better.

    Args:
        optimizer: whose rates they are, geodesic and spectral ones included.
        factor: what they are multiplied by, in (0, 1).
        patience: evaluations in a row, at least 1, none of which is better than the best before them, until they fall;
            then it counts anew. A score that is no number is not better.
    """
    # torch counts those that are put up with; and its eps would spare rates below 1e-8, which a geodesic one may have.
    return ReduceLROnPlateau(
        optimizer, mode="max", factor=factor, patience=patience - 1, threshold=0.0, threshold_mode="abs", eps=0.0
    )


def schedule_factor(settings: Settings) -> Callable[[int], float]:
    """What all learning rates are multiplied by, as a function of the iteration (0 is the first) alone.

    Args:
        settings: "schedule", not plateau; "lr_decay", "warmup" and "iterations".
    """
    decay, warmup, iterations = settings["lr_decay"], settings["warmup"], settings["iterations"]
    curves: dict[str, Callable[[int], float]] = {
        "constant": lambda i: 1.0,
        "inverse": lambda i: 1.0 / (1.0 + decay * i),
        "exponential": lambda i: math.exp(-decay * i),
        "cosine": lambda i: decay + (1.0 - decay) * 0.5 * (1.0 + math.cos(math.pi * min(i / iterations, 1.0))),
    }
    curve = curves[settings["schedule"]]
    return lambda i: curve(i) * min(1.0, (i + 1) / (warmup + 1))


def build_optimizer(rnn: nn.Module, readout: nn.Module, settings: Settings) -> CombinedOptimizer:
    """One optimizer for a recurrence and its readout, each kind of parameter at its own rate.

    Args:
        rnn: any recurrence; its bases, if it has any, move along geodesics.
        readout: everything else.
        settings: OPTIMIZER_DEFAULTS' keys with "geodesic_lr" a number, "margin" and "backend".

    Returns:
        The optimizer; groups have "role": "readout", "input", "rotation", "skew", "spectrum" or "geodesic".
    """
    lr = settings["lr"]
    euclidean, options = _euclidean(settings)
    rmsprop = settings["geodesic"] == "rmsprop"
    return optimizer_for(
        nn.ModuleDict({"readout": readout, "input": rnn}),
        lr={"readout": lr, "input": lr if settings["input_lr"] is None else settings["input_lr"]},
        geodesic_lr=settings["geodesic_lr"],
        spectrum_lr=lr if settings["spectrum_lr"] is None else settings["spectrum_lr"],
        skew_lr=SKEW_RATE * lr if settings["skew_lr"] is None else settings["skew_lr"],
        euclidean=euclidean,
        max_basis_grad_norm=settings["basis_clip"],
        geodesic=GeodesicRMSprop if rmsprop else GeodesicSGD,
        geodesic_options={
            "backend": settings["backend"],
            **({"alpha": settings["alpha"], "eps": settings["eps"]} if rmsprop else {}),
        },
        **options,
    )


def _euclidean(settings: Settings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of the optimizer of all but the bases, and its arguments besides the rates."""
    if settings["optimizer"] == "adam":
        return torch.optim.Adam, {"betas": (settings["beta1"], settings["beta2"]), "eps": settings["eps"]}
    if settings["optimizer"] == "sgd":
        return torch.optim.SGD, {"momentum": settings["momentum"], "nesterov": settings["momentum"] > 0.0}
    return torch.optim.RMSprop, {"alpha": settings["alpha"], "eps": settings["eps"]}


def penalty(rnn: nn.Module, readout: nn.Module, settings: Settings) -> Tensor | None:
    """What the settings add to the loss: weight decay on the matrices, for factorized ones on the composite; what
    draws the recurrent matrix to an orthogonal one (Vorontsov et al. 2017, section 3.2); and an nnRNN's moduli and T
    to those of a rotation (Kerg et al. 2019). An orthogonal matrix, and what nnrnn makes of one, has no weight decay.

    Args:
        rnn: the recurrence.
        readout: a module with a `weight`.
        settings: OPTIMIZER_DEFAULTS' keys.

    Returns:
        A 0-dim tensor, or None if nothing is added.
    """
    terms: list[Tensor] = []
    if settings["weight_decay"]:
        matrices = [
            p
            for module in (rnn, readout)
            for name, p in module.named_parameters()
            if name.split("_l", 1)[0] in ("weight_ih", "weight_hh", "weight")
        ]
        squares = torch.stack([matrix.square().sum() for matrix in matrices]).sum()
        if isinstance(rnn, FactorizedRNN):
            squares = squares + composite_weight_decay(rnn)
        terms.append(settings["weight_decay"] * squares)
    if settings["soft_orthogonality"]:
        squared = settings["soft_orthogonality_norm"] == "squared"
        terms.append(OrthogonalPenalty(settings["soft_orthogonality"], squared=squared, on="recurrent")(rnn))
    if settings["spectrum_prior"]:
        terms.append(settings["spectrum_prior"] * spectrum_prior(rnn))
    if settings["modulus_penalty"]:
        terms.append(settings["modulus_penalty"] * modulus_penalty(rnn, settings["modulus_norm"]))
    if settings["triangle_decay"]:
        terms.append(settings["triangle_decay"] / 2 * triangular_decay(rnn))
    return torch.stack(terms).sum() if terms else None
