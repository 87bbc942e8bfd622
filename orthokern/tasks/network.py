"""The recurrent networks that every task can train, and the options that choose them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from orthokern import dispatch, init
from orthokern._activations import ACTIVATIONS
from orthokern.commandline import Needs, Parser, Settings, integer, one_of, real
from orthokern.errors import InputError
from orthokern.functional import SPECTRUM_MAPS
from orthokern.nn import RNN, ExpRNN, FactorizedRNN, NonNormalRNN, PeepholeLSTM
from orthokern.nn.exprnn import INITS, OPTIMIZER_STATES
from orthokern.nn.factorized import APPLY
from orthokern.nn.nonnormal import INITS as SCHUR_INITS
from orthokern.nn.nonnormal import MASKS
from orthokern.nn.rnn import NONLINEARITIES

__all__ = ["MODELS", "NETWORK_DEFAULTS", "add_network_options", "build_recurrence", "check_backend", "check_network"]

MODELS = ("factorized", "rnn", "lstm", "peephole-lstm", "exprnn", "nnrnn")
LSTMS = ("lstm", "peephole-lstm")
EXPONENTIALS = ("exprnn", "nnrnn")

NETWORK_DEFAULTS: Settings = {
    "model": "factorized",
    "hidden": 128,
    "nonlinearity": "tanh",
    "slope": 0.25,
    "gain": 1.0,
    "margin": 0.1,
    "spectrum_map": "sigmoid",
    "init": "orthogonal",
    "rank": None,
    "apply": "factored",
    "learned_h0": False,
    "message_clip": None,
    "forget_bias": 1.0,
    "rebase_every": None,
    "project_every": 100,
    "rebase_state": "transport",
    "schur_mask": "block",
    "triangle": True,
}


# Activations with a slope, learned or not, and those that work on pairs of units.
SLOPED = tuple(name for name, row in ACTIVATIONS.items() if row.parameter is not None and row.parameter.name == "slope")
ON_PAIRS = tuple(name for name, row in ACTIVATIONS.items() if row.pairs)

# What an option must come with to play a part.
OF_FACTORIZED, OF_NNRNN = Needs("model", ("factorized",)), Needs("model", ("nnrnn",))
OF_EXPONENTIALS, OF_LSTMS = Needs("model", EXPONENTIALS), Needs("model", LSTMS)
OF_OTHERS = Needs("model", tuple(model for model in MODELS if model not in LSTMS))
_NEEDS: dict[str, tuple[Needs, ...]] = {
    "nonlinearity": (OF_OTHERS,),
    "slope": (Needs("nonlinearity", SLOPED), OF_OTHERS),
    "gain": (OF_OTHERS,),
    "margin": (OF_FACTORIZED,),
    "spectrum_map": (OF_FACTORIZED, Needs("margin")),
    "rank": (OF_FACTORIZED,),
    "apply": (OF_FACTORIZED,),
    "learned_h0": (OF_OTHERS,),
    "message_clip": (OF_OTHERS,),
    "forget_bias": (OF_LSTMS,),
    "rebase_every": (OF_EXPONENTIALS,),
    "project_every": (OF_EXPONENTIALS, Needs("rebase_every")),
    "rebase_state": (OF_EXPONENTIALS, Needs("rebase_every")),
    "schur_mask": (OF_NNRNN,),
    "triangle": (OF_NNRNN,),
}


def add_network_options(parser: Parser, defaults: Mapping[str, Any], *, bias: bool = True) -> None:
    """Adds the options of NETWORK_DEFAULTS.

    Args:
        parser: a task's.
        defaults: the task's own, shown by the help.
        bias: whether its recurrence has a bias, as in `build_recurrence`; an lstm without has no forget bias.
    """

    def default(key: str) -> str:
        value = defaults[key]
        return f"(default {'none' if value is None else f'{value:g}' if isinstance(value, float) else value})"

    group = parser.add_argument_group("the network")
    group.add_argument(
        "--model",
        type=one_of("model", MODELS),
        metavar="NAME",
        help="factorized: W = U S V^T; rnn: a plain matrix W; lstm: torch's; peephole-lstm: gates see the cell; "
        "exprnn: W = exp(A), orthogonal; nnrnn: W = P (rotations + T) P^T, with learned moduli of its eigenvalues "
        + default("model"),
    )
    group.add_argument("--hidden", type=integer(1), metavar="N", help=f"hidden units {default('hidden')}")
    group.add_argument(
        "--nonlinearity",
        type=one_of("nonlinearity", NONLINEARITIES),
        metavar="NAME",
        help=f"{', '.join(NONLINEARITIES)} {default('nonlinearity')}; an lstm has its own",
    )
    group.add_argument(
        "--slope",
        type=real(),
        metavar="X",
        help=f"of leaky_relu, and of prelu at the start, for negative values {default('slope')}",
    )
    group.add_argument(
        "--gain",
        type=real(0.0, exclusive=True),
        metavar="X",
        help=f"factor of the pre-activation (not for an lstm) {default('gain')}",
    )
    group.add_argument(
        "--margin",
        type=real(0.0, none=True),
        metavar="X",
        help=f"factorized: singular values stay in 1 ± X; none for no bound {default('margin')}",
    )
    group.add_argument(
        "--spectrum-map",
        type=one_of("spectrum-map", SPECTRUM_MAPS),
        metavar="NAME",
        help=f"factorized: map of the singular values: {' or '.join(SPECTRUM_MAPS)} {default('spectrum_map')}",
    )
    group.add_argument(
        "--init",
        type=one_of("init", dict.fromkeys((*init.INITS, *SCHUR_INITS))),
        metavar="NAME",
        help=f"initial recurrent matrix: {', '.join(init.INITS)}; of exp(A) in exprnn and nnrnn: "
        f"{', '.join(SCHUR_INITS)} (the last for nnrnn) {default('init')}",
    )
    group.add_argument(
        "--rank",
        type=integer(1),
        metavar="K",
        help="factorized: columns of U and V (default: as many as hidden units)",
    )
    group.add_argument(
        "--apply",
        type=one_of("apply", APPLY),
        metavar="NAME",
        help=f"factorized: multiply by V, S and U (factored), or by their product (composed) {default('apply')}",
    )
    group.add_argument(
        "--learned-h0", action="store_true", help="learn the initial state, initially zero (not for an lstm)"
    )
    group.add_argument(
        "--message-clip",
        type=real(0.0, exclusive=True, none=True),
        metavar="X",
        help="clip every element of the adjoint at every time step; none (not for an lstm) " + default("message_clip"),
    )
    if bias:
        group.add_argument(
            "--forget-bias",
            type=real(),
            metavar="X",
            help=f"both lstms: the forget gate's bias at the start {default('forget_bias')}",
        )
    group.add_argument(
        "--rebase-every",
        type=integer(1),
        metavar="K",
        help="exprnn, nnrnn: merge the exponential into the base every K optimizer steps (default: never)",
    )
    group.add_argument(
        "--project-every",
        type=integer(1),
        metavar="M",
        help=f"with --rebase-every: orthogonalise the base every M times {default('project_every')}",
    )
    group.add_argument(
        "--rebase-state",
        type=one_of("rebase-state", OPTIMIZER_STATES),
        metavar="NAME",
        help=f"with --rebase-every: what happens to the optimizer's state: {', '.join(OPTIMIZER_STATES)} "
        + default("rebase_state"),
    )
    group.add_argument(
        "--schur-mask",
        type=one_of("schur-mask", MASKS),
        metavar="NAME",
        help="nnrnn: block: T is zero inside the rotations, the moduli are gamma; legacy: T also acts inside them, as "
        f"in the released code {default('schur_mask')}",
    )
    group.add_argument(
        "--no-triangle", dest="triangle", action="store_false", help="nnrnn: omit T, for a normal matrix"
    )
    parser.needs.update({name: (needs,) for name, needs in _NEEDS.items()})


def check_network(settings: Settings) -> None:
    """Checks what a single option can't, wherever the settings come from. (Of those that a user gave, the parser also
    refuses what plays no part.)

    Raises:
        InputError: options that don't go together.
    """
    if settings["rank"] is not None and settings["rank"] > settings["hidden"]:
        raise InputError(f"--rank {settings['rank']}: at most --hidden, which is {settings['hidden']}")
    if settings["nonlinearity"] in ON_PAIRS and settings["hidden"] % 2:
        name, hidden = settings["nonlinearity"], settings["hidden"]
        raise InputError(f"--hidden {hidden}: --nonlinearity {name} works on pairs, give an even number")
    if settings["model"] == "factorized" and settings["init"] in init.UNCONSTRAINED and settings["margin"] is not None:
        raise InputError(
            f"--init {settings['init']} with --margin {settings['margin']:g}: a Glorot matrix has singular values "
            "from 0 to 2, give --margin none"
        )
    lstm = settings["model"] in LSTMS
    _check_exponential(settings)
    if settings["model"] != "factorized" and settings.get("spectrum_prior"):
        raise InputError(f"--spectrum-prior: for --model factorized, not {settings['model']}; see --soft-orthogonality")
    if lstm and settings.get("soft_orthogonality"):
        raise InputError("--soft-orthogonality: not for an lstm, which has four recurrent matrices")
    if lstm:
        for key in ("learned_h0", "message_clip", "gain"):
            if settings[key] != NETWORK_DEFAULTS[key]:
                option = "--" + key.replace("_", "-")
                raise InputError(f"{option}: not for an lstm; leave the option out, or choose another --model")


# setting -> (the value that asks for nothing, the models that know it)
_FOR_SOME_MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rebase_every": (None, EXPONENTIALS),
    "skew_lr": (None, EXPONENTIALS),
    "schur_mask": ("block", ("nnrnn",)),
    "modulus_penalty": (0.0, ("nnrnn",)),
    "triangle_decay": (0.0, ("nnrnn",)),
}


def _check_exponential(settings: Settings) -> None:
    """Of check_network, what concerns exprnn and nnrnn."""
    model = settings["model"]
    for key, (nothing, models) in _FOR_SOME_MODELS.items():
        if settings.get(key, nothing) != nothing and model not in models:
            raise InputError(f"--{key.replace('_', '-')}: for --model {' or '.join(models)}, not {model}")
    if not settings["triangle"] and model != "nnrnn":
        raise InputError(f"--no-triangle: for --model nnrnn, not {model}")
    if not settings["triangle"] and settings.get("triangle_decay"):
        raise InputError(f"--triangle-decay {settings['triangle_decay']:g} with --no-triangle: give one of the two")
    accepted = {"exprnn": INITS, "nnrnn": SCHUR_INITS}.get(model, tuple(init.INITS))
    if settings["init"] not in accepted:
        raise InputError(f"--init {settings['init']}: not for --model {model}; accepted: {', '.join(accepted)}")
    if settings["rebase_every"] is None:
        for key in ("project_every", "rebase_state"):
            if settings[key] != NETWORK_DEFAULTS[key]:
                raise InputError(f"--{key.replace('_', '-')} {settings[key]}: give --rebase-every too")
    if settings["schur_mask"] == "legacy" and settings["hidden"] % 2:
        raise InputError(f"--hidden {settings['hidden']}: --schur-mask legacy works on pairs, give an even number")
    if model == "exprnn" and settings.get("soft_orthogonality"):
        raise InputError("--soft-orthogonality: not for --model exprnn, whose matrix is orthogonal")


def build_recurrence(inputs: int, settings: Settings, *, bias: bool = True) -> nn.Module:
    """The recurrence that the settings ask for.

    Args:
        inputs: number of input features, or of token ids.
        settings: NETWORK_DEFAULTS' keys, "device" and "backend".
        bias: whether the pre-activation has a bias.

    Returns:
        A module with torch.nn.RNN's interface, its parameters drawn from torch's global generator on the CPU, so that a
        seed means the same network on every device.
    """
    device = torch.device(settings["device"])
    hidden, backend = settings["hidden"], settings["backend"]
    common: dict[str, Any] = {
        "learned_h0": settings["learned_h0"],
        "gain": settings["gain"],
        "negative_slope": settings["slope"],
        "message_clip": settings["message_clip"] or 0.0,
        "backend": backend,
    }
    rnn: nn.Module
    if settings["model"] == "lstm":
        rnn = nn.LSTM(inputs, hidden, bias=bias)
        _initialize_lstm(rnn, settings)
    elif settings["model"] == "peephole-lstm":
        rnn = PeepholeLSTM(inputs, hidden, bias=bias)
        _initialize_lstm(rnn, settings)
    elif settings["model"] == "rnn":
        rnn = RNN(
            inputs,
            hidden,
            nonlinearity=settings["nonlinearity"],
            bias=bias,
            init=settings["init"],
            **common,
        )
    elif settings["model"] in EXPONENTIALS:
        common |= {
            "nonlinearity": settings["nonlinearity"],
            "bias": bias,
            "init": settings["init"],
            "rebase_every": settings["rebase_every"],
            "project_every": settings["project_every"],
            "optimizer_state": settings["rebase_state"],
        }
        if settings["model"] == "exprnn":
            rnn = ExpRNN(inputs, hidden, **common)
        else:
            rnn = NonNormalRNN(inputs, hidden, mask=settings["schur_mask"], triangular=settings["triangle"], **common)
    else:
        rnn = FactorizedRNN(
            inputs,
            hidden,
            nonlinearity=settings["nonlinearity"],
            bias=bias,
            margin=settings["margin"],
            spectrum_map=settings["spectrum_map"],
            rank=settings["rank"],
            apply=settings["apply"],
            init=settings["init"],
            **common,
        )
    learned = ACTIVATIONS[settings["nonlinearity"]].learned
    if settings["nonlinearity"] in SLOPED and learned is not None and settings["model"] not in LSTMS:
        with torch.no_grad():
            rnn.get_parameter(f"{learned.stem}_l0").fill_(settings["slope"])
    return rnn.to(device)


@torch.no_grad()
def _initialize_lstm(lstm: nn.LSTM | PeepholeLSTM, settings: Settings) -> None:
    """Every gate's recurrent matrix by `init`, the forget gate's bias at `forget_bias` (Vorontsov et al. 2017,
    section 3.1.2: orthogonal, and 1)."""
    n = lstm.hidden_size
    for gate in lstm.get_parameter("weight_hh_l0").view(4, n, n):  # input, forget, cell, output
        init.initialize_(gate, settings["init"])
    if lstm.bias:
        for name in ("bias_ih_l0", "bias_hh_l0"):
            lstm.get_parameter(name).zero_()
        lstm.get_parameter("bias_ih_l0")[n : 2 * n] = settings["forget_bias"]


def check_backend(settings: Settings, classes: int) -> None:
    """Raises BackendUnavailable at once, and not in the first iteration, when a run folder is made already.

    Args:
        settings: NETWORK_DEFAULTS' keys, "device" and "backend".
        classes: of the readout; 0 if it is no classification.
    """
    ops = {
        "factorized": ("factored_scan" if settings["apply"] == "factored" else "dense_scan", "cayley"),
        "rnn": ("dense_scan",),
        "exprnn": ("dense_scan",),
        "nnrnn": ("dense_scan",),
        "lstm": (),
        "peephole-lstm": (),
    }[settings["model"]]
    for op in (*ops, "linear_cross_entropy") if classes else ops:
        dispatch.resolve(
            op,
            settings["backend"],
            device=torch.device(settings["device"]),
            dtype=torch.get_default_dtype(),
            N=settings["hidden"],
            K=settings["rank"] or settings["hidden"],
            C=classes,
        )
