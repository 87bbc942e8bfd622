"""The recurrent networks that every task can train, and their options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern._activations import ACTIVATIONS
from orthokern.errors import InputError
from orthokern.functional import PRECISIONS
from orthokern.nn import GRU, LSTM, RNN, ExpRNN, FactorizedRNN, NonNormalRNN, PeepholeLSTM, RotationRNN
from orthokern.nn.factorized import APPLY
from orthokern.nn.nonnormal import INITS as SCHUR_INITS
from orthokern.nn.rnn import NONLINEARITIES
from orthokern.training.cli import RunOptions
from orthokern.training.options import changed, check_effect, option


@dataclass(frozen=True)
class Model:
    """A recurrent network by its name on the command line."""

    module: type[Any]
    help: str
    gates: int = 0  # products with a recurrent matrix per step of a gated cell; 0: one matrix, without gates
    exponential: bool = False  # its matrix contains exp(A), around a base that can move


MODELS = {
    "factorized": Model(FactorizedRNN, "W = U S V^T"),
    "rnn": Model(RNN, "a plain matrix W"),
    "lstm": Model(LSTM, "as torch.nn.LSTM", gates=4),
    "peephole-lstm": Model(PeepholeLSTM, "gates read the cell", gates=4),
    "gru": Model(GRU, "as torch.nn.GRU", gates=3),
    "exprnn": Model(ExpRNN, "W = exp(A), orthogonal", exponential=True),
    "nnrnn": Model(NonNormalRNN, "W = P (rotations + T) P^T, with learned moduli of its eigenvalues", exponential=True),
    "rotation": Model(RotationRNN, "linear, W of scaled rotations of pairs of units"),
}
LSTMS = tuple(name for name, model in MODELS.items() if model.gates == 4)
GATED = tuple(name for name, model in MODELS.items() if model.gates)
UNGATED = tuple(name for name in MODELS if name not in (*GATED, "rotation"))  # with a matrix and a non-linearity
EXPONENTIALS = tuple(name for name, model in MODELS.items() if model.exponential)

# activations with a slope, learned or not
SLOPED = tuple(name for name, row in ACTIVATIONS.items() if row.parameter is not None and row.parameter.name == "slope")
WITH_ANGLES = tuple(init.SKEW_ANGLES)

# the models of options, see `Option.only`
FACTORIZED = {"model": ("factorized",)}
_WITHOUT_GATES = {"model": UNGATED}

# settings that fail for models that do not have them, even if a preset sets them
_REQUIRED = ("sigma", "spectrum_prior", "soft_orthogonality", "modulus_penalty", "triangle_decay")


@dataclass(kw_only=True)
class NetworkOptions(RunOptions):
    """The recurrent network."""

    GROUP = "the network"
    last_step_gradient: bool = changed(RunOptions, "last_step_gradient", only={"model": (*UNGATED, "gru")})
    model: str = option(
        "factorized",
        "; ".join(f"{name}: {model.help}" for name, model in MODELS.items()),
        choices=tuple(MODELS),
        basic=True,
    )
    hidden: int = option(128, "hidden units", basic=True)
    nonlinearity: str = option(
        "tanh", ", ".join(NONLINEARITIES), choices=NONLINEARITIES, basic=True, only=_WITHOUT_GATES
    )
    slope: float = option(0.25, "slope for negative values (prelu: the initial slope)", only={"nonlinearity": SLOPED})
    gain: float = option(1.0, "factor of the recurrent matrix", above=0.0, only=_WITHOUT_GATES)
    margin: float | None = option(
        0.1,
        "singular values, in rotation radii, stay in 1 ± X; none: no bound, radii below 1",
        low=0.0,
        basic=True,
        only={"model": ("factorized", "rotation")},
    )
    init: str = option(
        "orthogonal",
        f"initial recurrent matrix: {', '.join(init.INITS)}; initial exp(A) in exprnn and nnrnn: "
        f"{', '.join(SCHUR_INITS)} (the last for nnrnn)",
        choices=tuple(dict.fromkeys((*init.INITS, *SCHUR_INITS))),
        only={"model": tuple(name for name in MODELS if name != "rotation")},
    )
    max_angle: float | None = option(
        None,
        "largest angle of the initial matrix in radians per step, also for rotation; none: that of --init (rotation: "
        "pi)",
        above=0.0,
        high=math.pi,
        only={"init": WITH_ANGLES, "model": ("rotation",)},
    )
    rank: int | None = option(None, "columns of U and V", metavar="K", shown="as many as hidden units", only=FACTORIZED)
    apply: str = option(
        "factored",
        "multiply by V, S and U (factored), or by their product (composed)",
        choices=APPLY,
        only=FACTORIZED,
    )
    learned_h0: bool = option(False, "learn the initial state, initially zero", only={"model": (*UNGATED, "rotation")})
    message_clip: float | None = option(
        None,
        "clip every element of the gradient of every pre-activation; none: no clipping",
        above=0.0,
        only=_WITHOUT_GATES,
    )
    precision: str = option(
        "ieee",
        f"lowest precision of float32 products in the recurrence: {', '.join(PRECISIONS)}; a CPU has ieee and, with "
        "AVX512_BF16, bf16",
        choices=PRECISIONS,
        only=_WITHOUT_GATES,
    )
    rebase_every: int | None = option(
        None,
        "merge the exponential into the base every K optimizer steps",
        metavar="K",
        shown="never",
        only={"model": EXPONENTIALS},
    )

    def complete(self) -> None:
        super().complete()
        check_effect(self, _REQUIRED)
        if self.model in (*GATED, "nnrnn") and self.max_angle not in (None, type(self).max_angle):
            models = " or ".join(name for name in MODELS if name not in (*GATED, "nnrnn"))
            raise InputError(f"--max-angle {self.max_angle:g}: only with --model {models}, not {self.model}")


def build_recurrence(inputs: int, settings: NetworkOptions, *, bias: bool = True) -> nn.Module:
    """Builds the recurrence of the settings."""
    hidden, module = settings.hidden, MODELS[settings.model].module
    rnn: Any
    options: dict[str, Any]
    if settings.model in GATED:
        options = {} if settings.model in LSTMS else {"variant": "torch", "backend": settings.backend}
        rnn = module(inputs, hidden, bias=bias, **options)
        _initialize_gates(rnn, settings)
    elif settings.model == "rotation":
        # a horizon of 1: inputs are not scaled, as in a FactorizedRNN, whose initialisation the tasks choose
        options = {"margin": settings.margin, "horizon": None if settings.margin is None else 1}
        options |= {"learned_h0": settings.learned_h0, "backend": settings.backend}
        options["max_angle"] = math.pi if settings.max_angle is None else settings.max_angle
        rnn = module(inputs, hidden, bias=bias, **options)
    else:
        names = ("nonlinearity", "init", "learned_h0", "gain", "backend", "precision")
        options = {name: getattr(settings, name) for name in names}
        options |= {"bias": bias, "negative_slope": settings.slope, "message_clip": settings.message_clip or 0.0}
        if settings.model in EXPONENTIALS:
            options["rebase_every"] = settings.rebase_every
        if settings.init in init.SKEW_ANGLES and settings.model != "nnrnn":
            options["max_angle"] = settings.max_angle
        if settings.model == "factorized":
            options |= {"margin": settings.margin, "rank": settings.rank, "apply": settings.apply}
        rnn = module(inputs, hidden, **options)
        learned = ACTIVATIONS[settings.nonlinearity].learned
        if settings.nonlinearity in SLOPED and learned is not None:
            with torch.no_grad():
                rnn.get_parameter(f"{learned.stem}_l0").fill_(settings.slope)
    placed: nn.Module = rnn.to(settings.device)
    return placed


@torch.no_grad()
def _initialize_gates(rnn: LSTM | GRU, settings: NetworkOptions) -> None:
    """Initialises the recurrent matrix of every gate by `init`, the biases to 0, and the bias of an LSTM's forget gate
    to 1 (Vorontsov et al. 2017, section 3.1.2)."""
    n = rnn.hidden_size
    for gate in rnn.get_parameter("weight_hh_l0").view(-1, n, n):
        init.initialize_(gate, settings.init)
    for name, parameter in rnn.named_parameters():
        if name.startswith("bias"):
            parameter.zero_()
    if rnn.bias and settings.model in LSTMS:
        rnn.get_parameter("bias_ih_l0")[n : 2 * n] = 1.0


def last_output(recurrence: nn.Module, inputs: Tensor) -> Tensor:
    """inputs [T, B, D] or ids [T, B] -> outputs [B, N] of the last step, from h_n, whose backward is faster."""
    states, last = recurrence(inputs)
    return states[-1] if isinstance(last, tuple) else last[-1]  # an LSTM returns (h_n, c_n)
