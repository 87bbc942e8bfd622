"""The optimizer, its schedule and the penalties that every task can use, and their options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, ReduceLROnPlateau

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
from orthokern.tasks.network import EXPONENTIALS, FACTORIZED, NetworkOptions
from orthokern.training.cli import RunOptions
from orthokern.training.options import option

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"rmsprop": torch.optim.RMSprop}
OPTIMIZERS |= {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}  # without weight decay, AdamW is Adam
NORMS = ("squared", "plain")
MODULUS_NORMS = ("l2", "l1")
SMALLEST_EPS = 1e-30  # below 1e-38 it is zero in float32, and a gradient of zero is divided by it
SKEW_RATE = 0.1  # times --lr: the first value in the searches of Kerg et al. 2019 and Lezcano-Casado 2019
_DECAYED = ("weight_ih_l0", "parametrizations.weight_ih_l0.original", "weight_hh_l0", "weight")  # by --weight-decay
_RMSPROP = {"optimizer": ("rmsprop",), "geodesic": ("rmsprop",)}
_ADAM = {"optimizer": ("adam",)}
_PLATEAU = {"schedule": ("plateau",)}
_NNRNN = {"model": ("nnrnn",)}
CURVES = ("inverse", "exponential", "cosine")  # schedules that depend on the iteration only
SCHEDULES = ("constant", *CURVES, "plateau")
SCHEDULE_HELP = (
    "factor of all rates in iteration i: constant; inverse: 1 / (1 + D i); exponential: exp(-D i); cosine:"
    " to D at the end; plateau: decrease if held-out evaluations do not improve"
)


@dataclass(kw_only=True)
class DescentOptions(RunOptions):
    """A torch optimizer and its schedule."""

    GROUP = "the optimizer"
    batch: int = option(50, "sequences per batch", basic=True)
    optimizer: str = option(
        "rmsprop",
        f"optimizer of all parameters except U and V: {', '.join(OPTIMIZERS)} (with Nesterov momentum)",
        choices=tuple(OPTIMIZERS),
        basic=True,
    )
    lr: float = option(1e-3, "learning rate; in a recurrent network, of the readout", above=0.0, basic=True)
    alpha: float = option(0.9, "decay of the running mean square", low=0.0, below=1.0, only=_RMSPROP)
    eps: float = option(
        1e-8,
        "added to the RMS of the gradient",
        low=SMALLEST_EPS,
        only={"optimizer": ("rmsprop", "adam"), "geodesic": ("rmsprop",)},
    )
    beta1: float = option(0.9, "decay of the running mean", low=0.0, below=1.0, only=_ADAM)
    beta2: float = option(0.999, "decay of the running mean square", low=0.0, below=1.0, only=_ADAM)
    decoupled_decay: float = option(
        0.0,
        "weight decay of AdamW; not applied to bounded spectra, generators, moduli and angles",
        low=0.0,
        only=_ADAM,
        off=0.0,
    )
    momentum: float = option(0.9, "momentum", low=0.0, high=1.0, only={"optimizer": ("sgd",)})
    schedule: str = option("constant", SCHEDULE_HELP, choices=SCHEDULES)
    lr_decay: float = option(
        0.0, "D: above 0; for cosine, 0 to 1", low=0.0, metavar="D", only={"schedule": CURVES}, off=0.0
    )
    plateau_factor: float = option(0.5, "factor of all learning rates", above=0.0, below=1.0, only=_PLATEAU)
    patience: int = option(1, "reduce the rates after N successive evaluations without a new best", only=_PLATEAU)
    warmup: int = option(0, "increase all learning rates linearly over N iterations", low=0)
    clip: float | None = option(None, "clip the norm of the whole gradient; none: no clipping", above=0.0)
    average: float | None = option(
        None,
        "moving average of the parameters with decay D per iteration, for evaluations and the best state; none: no "
        "average",
        low=0.0,
        below=1.0,
        metavar="D",
    )

    def complete(self) -> None:
        super().complete()
        schedule, decay = self.schedule, self.lr_decay
        if schedule == "plateau" and getattr(self, "eval_every", None) == 0:
            raise InputError("--schedule plateau with --eval-every 0: without evaluations the rates never decrease")
        if schedule in ("inverse", "exponential") and decay == 0.0:
            raise InputError(
                f"--schedule {schedule} with --lr-decay 0: the rates never decrease; accepted: --lr-decay above 0"
            )
        if schedule == "cosine" and decay > 1.0:
            raise InputError(f"--lr-decay {decay:g}: with cosine it is the final factor of the rates; accepted: 0 to 1")


@dataclass(kw_only=True)
class OptimizerOptions(DescentOptions, NetworkOptions):
    """The optimizer of a recurrent network, and the penalties added to its loss."""

    GROUP = "the optimizer"
    input_lr: float | None = option(
        None, "rate of the other weights of the recurrent network", low=0.0, shown="as --lr"
    )
    spectrum_lr: float | None = option(
        None,
        "rate of the spectrum, divided by 2 margin, and of radii and angles",
        low=0.0,
        shown="as --lr",
        only={"model": ("factorized", "rotation")},
    )
    geodesic: str = option(
        "sgd",
        "update of U and V: sgd: along their gradients, as in the paper; rmsprop: every entry of them divided by its "
        "running RMS",
        choices=("sgd", "rmsprop"),
        only=FACTORIZED,
    )
    geodesic_lr: float = option(1e-6, "rate of the geodesic steps on U and V", low=0.0, only=FACTORIZED)
    skew_lr: float | None = option(
        None, "rate of A in the orthogonal exp(A)", low=0.0, shown="a tenth of --lr", only={"model": EXPONENTIALS}
    )
    basis_clip: float | None = option(
        None, "clip the joint norm of the gradients of U and V; none: no clipping", above=0.0, only=FACTORIZED
    )
    weight_decay: float = option(
        0.0,
        "add X ||W||^2 of the input, readout and recurrent matrices (not the recurrent one of exprnn, nnrnn, rotation)",
        low=0.0,
    )
    soft_orthogonality: float = option(
        0.0,
        "add X ||W^T W - I||^2 of the recurrent matrix to the loss",
        low=0.0,
        only={"model": ("factorized", "rnn", "nnrnn")},
        off=0.0,
    )
    soft_orthogonality_norm: str = option("squared", "squared: as above; plain: the norm, not squared", choices=NORMS)
    spectrum_prior: float = option(
        0.0, "add X sum (s - 1)^2 of the singular values to the loss", low=0.0, only=FACTORIZED, off=0.0
    )
    modulus_penalty: float = option(
        0.0, "add X sum (gamma - 1)^2 of the moduli to the loss", low=0.0, only=_NNRNN, off=0.0
    )
    modulus_norm: str = option("l2", "l2: as above; l1: X sum |gamma - 1|", choices=MODULUS_NORMS, only=_NNRNN)
    triangle_decay: float = option(
        0.0, "add X / 2 ||T||^2 to the loss, which is weight decay X on T", low=0.0, only=_NNRNN, off=0.0
    )

    def complete(self) -> None:
        super().complete()
        if self.average is not None and self.rebase_every is not None:
            raise InputError(
                "--average with --rebase-every: A has another meaning after each move of its base; give one"
            )


def build_schedules(
    optimizer: torch.optim.Optimizer, settings: DescentOptions
) -> tuple[LRScheduler | None, ReduceLROnPlateau | None]:
    """The learning-rate schedules of an optimizer, for `Task.scheduler` and `Task.plateau`."""
    if settings.schedule != "plateau":
        return LambdaLR(optimizer, schedule_factor(settings)), None
    # LambdaLR would reset the rates in the next iteration. LinearLR multiplies the current rates, like the plateau.
    warmup = settings.warmup
    rise = LinearLR(optimizer, start_factor=1.0 / (warmup + 1), total_iters=warmup) if warmup else None
    return rise, plateau(optimizer, settings.plateau_factor, settings.patience)


def plateau(optimizer: torch.optim.Optimizer, factor: float, patience: int) -> ReduceLROnPlateau:
    """A schedule for `Task.plateau`: all rates decrease if evaluations do not improve."""
    # torch's patience is one less. Its default eps would keep rates below 1e-8, which a geodesic rate may have.
    return ReduceLROnPlateau(
        optimizer, mode="max", factor=factor, patience=patience - 1, threshold=0.0, threshold_mode="abs", eps=0.0
    )


def schedule_factor(settings: DescentOptions) -> Callable[[int], float]:
    """The factor of all learning rates as a function of the iteration (0 is the first)."""
    decay, warmup, iterations = settings.lr_decay, settings.warmup, settings.iterations
    curves: dict[str, Callable[[int], float]] = {
        "constant": lambda i: 1.0,
        "inverse": lambda i: 1.0 / (1.0 + decay * i),
        "exponential": lambda i: math.exp(-decay * i),
        "cosine": lambda i: decay + (1.0 - decay) * 0.5 * (1.0 + math.cos(math.pi * min(i / iterations, 1.0))),
    }
    curve = curves[settings.schedule]
    return lambda i: curve(i) * min(1.0, (i + 1) / (warmup + 1))


def build_optimizer(rnn: nn.Module, readout: nn.Module, settings: OptimizerOptions) -> CombinedOptimizer:
    """One optimizer for a recurrence and its readout, with one rate per kind of parameter."""
    lr = settings.lr
    spectrum_lr = lr if settings.spectrum_lr is None else settings.spectrum_lr
    rmsprop, moments = settings.geodesic == "rmsprop", {"alpha": settings.alpha, "eps": settings.eps}
    return optimizer_for(
        nn.ModuleDict({"readout": readout, "input": rnn}),
        lr={"readout": lr, "input": lr if settings.input_lr is None else settings.input_lr},
        geodesic_lr=settings.geodesic_lr,
        spectrum_lr=spectrum_lr,
        skew_lr=SKEW_RATE * lr if settings.skew_lr is None else settings.skew_lr,
        rotation_lr=spectrum_lr if settings.model == "rotation" else None,
        basis_clip=settings.basis_clip,
        geodesic=GeodesicRMSprop if rmsprop else GeodesicSGD,
        geodesic_options={"backend": settings.backend, **(moments if rmsprop else {})},
        **euclidean(settings),
    )


def euclidean(settings: DescentOptions) -> dict[str, Any]:
    """The arguments of `optimizer_for` for all parameters except the bases: the optimizer class and its arguments
    except the rates."""
    kind = OPTIMIZERS[settings.optimizer]
    if kind is torch.optim.SGD:
        return {"euclidean": kind, "momentum": settings.momentum, "nesterov": settings.momentum > 0.0}
    if kind is torch.optim.RMSprop:
        return {"euclidean": kind, "alpha": settings.alpha, "eps": settings.eps}
    betas = settings.beta1, settings.beta2
    return {"euclidean": kind, "betas": betas, "eps": settings.eps, "weight_decay": settings.decoupled_decay}


def penalty(rnn: nn.Module, readout: nn.Module, settings: OptimizerOptions) -> Tensor | None:
    """The penalties that are added to the loss: weight decay on the matrices (for a factorized matrix, on the product
    U S V^T); a penalty on the deviation of the recurrent matrix from an orthogonal one (Vorontsov et al. 2017, section
    3.2); and penalties on the moduli and on T of an nnRNN (Kerg et al. 2019). There is no weight decay on the recurrent
    matrices of exprnn and nnrnn."""
    terms: list[Tensor] = []
    if settings.weight_decay:
        matrices = [p for module in (rnn, readout) for name, p in module.named_parameters() if name in _DECAYED]
        squares = torch.stack([matrix.square().sum() for matrix in matrices]).sum()
        if isinstance(rnn, FactorizedRNN):
            squares = squares + composite_weight_decay(rnn)
        terms.append(settings.weight_decay * squares)
    if settings.soft_orthogonality:
        squared = settings.soft_orthogonality_norm == "squared"
        terms.append(OrthogonalPenalty(settings.soft_orthogonality, squared=squared, on="recurrent")(rnn))
    if settings.spectrum_prior:
        terms.append(settings.spectrum_prior * spectrum_prior(rnn))
    if settings.modulus_penalty:
        terms.append(settings.modulus_penalty * modulus_penalty(rnn, settings.modulus_norm))
    if settings.triangle_decay:
        terms.append(settings.triangle_decay / 2 * triangular_decay(rnn))
    return torch.stack(terms).sum() if terms else None
