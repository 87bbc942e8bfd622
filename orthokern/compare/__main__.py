"""``python -m orthokern.compare``: the command line."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import dispatch
from orthokern.commandline import Needs, Parser, Settings, command, device, integer, one_of, say
from orthokern.compare import __doc__ as DESCRIPTION
from orthokern.compare.measure import compare, first_line, mapped, refuse_meta
from orthokern.errors import InputError, unknown_name

EXIT_DISAGREE = 1


def _load(text: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Calls the factory "package.module:factory". Returns a model, and the inputs of its forward if there are any."""
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise InputError(f"--module {text!r}: accepted is package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        home = importlib.import_module(name)
    except Exception as error:  # a user's code
        raise InputError(f"--module {text}: importing {name} raised {first_line(error)}") from error
    factory: Any = home
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise unknown_name(f"factory in {name}", attribute, [n for n in vars(home) if not n.startswith("_")][:50])
        factory = getattr(factory, part)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise InputError(
            f"--module {text}: it is a {type(factory).__name__}; accepted is a function that makes a model"
        )
    try:
        made = factory()
    except Exception as error:
        raise InputError(f"--module {text}: the factory raised {first_line(error)}") from error
    model, *inputs = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--module {text}: the factory returned {type(model).__name__}; accepted is a torch.nn.Module, or a tuple "
            "of one and the inputs of its forward"
        )
    return model, tuple(inputs)


def _made_input(model: nn.Module, batch: int, steps: int, seed: int) -> Tensor:
    """Random input for a model: token ids where it begins with an embedding, else features for its first layer.

    The layout is that of the first recurrent module, [T, B, ..] or [B, T, ..].
    """
    recurrent = next((m for m in model.modules() if isinstance(m, nn.RNN | nn.GRU)), None)
    if recurrent is None:
        raise InputError(f"{type(model).__name__} has no torch.nn.RNN or torch.nn.GRU to swap")
    first = next(m for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
    shape = (batch, steps) if recurrent.batch_first else (steps, batch)
    generator = torch.Generator().manual_seed(seed)
    weight = next(first.parameters(recurse=False))
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        return torch.randint(0, first.num_embeddings, shape, generator=generator, device="cpu").to(weight.device)
    features = first.in_features if isinstance(first, nn.Linear) else recurrent.input_size
    return torch.randn(*shape, features, generator=generator, device="cpu").to(weight)


def _moved(t: Tensor, place: str | None, dtype: str | None) -> Tensor:
    t = t if place is None else t.to(place)
    return t.to(getattr(torch, dtype)) if dtype is not None and t.is_floating_point() else t


def _made_model(given: Settings) -> nn.Module:
    cell = given.get("cell", "rnn")
    options: Settings = {
        "num_layers": given.get("layers", 1),
        "bias": not given.get("no_bias", False),
        "batch_first": given.get("batch_first", False),
        "bidirectional": given.get("bidirectional", False),
    }
    sizes = (given.get("input", 64), given.get("hidden", 128))
    try:
        if cell == "gru":
            return nn.GRU(*sizes, **options)
        return nn.RNN(*sizes, nonlinearity=given.get("nonlinearity", "tanh"), **options)
    except (RuntimeError, MemoryError) as error:
        raise InputError(f"torch cannot make the module ({first_line(error)}); accepted: sizes that fit") from error


# options that cannot be combined with --module
_ONLY_SIZES = ("cell", "input", "hidden", "layers", "bidirectional", "batch_first", "no_bias")


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.compare", description=DESCRIPTION.strip())
    what = parser.add_argument_group("model and inputs")
    text = "a function that returns the model, see above; without it, one module of the sizes below"
    what.add_argument("--module", metavar="PACKAGE.MODULE:FACTORY", type=str, help=text)
    what.add_argument("--cell", type=one_of("cell", ("rnn", "gru")), help="rnn or gru (default rnn)")
    what.add_argument("--input", type=integer(1), metavar="D", help="features of the input (default 64)")
    what.add_argument("--hidden", type=integer(1), metavar="N", help="hidden units (default 128)")
    what.add_argument("--layers", type=integer(1, 1000), metavar="N", help="stacked layers (default 1)")
    what.add_argument(
        "--nonlinearity", type=one_of("nonlinearity", ("tanh", "relu")), help="of an rnn: tanh or relu (default tanh)"
    )
    what.add_argument("--bidirectional", action="store_true", help="both directions")
    what.add_argument("--batch-first", action="store_true", help="layout [B, T, D]")
    what.add_argument("--no-bias", action="store_true", help="no biases")
    what.add_argument("--batch", type=integer(1), metavar="B", help="sequences (default 32)")
    what.add_argument("--time", type=integer(1), metavar="T", help="time steps (default 200)")
    how = parser.add_argument_group("execution")
    text = "float32 or float64 (default: dtype of the model)"
    how.add_argument("--dtype", type=one_of("dtype", ("float32", "float64")), help=text)
    how.add_argument("--device", type=device, help="cpu, cuda, cuda:0, ... (default: device of the model)")
    kind = one_of("backend", ("auto", *dispatch.BACKENDS))
    text = "backend of the orthokern modules (default ORTHOKERN_BACKEND, else auto)"
    how.add_argument("--backend", type=kind, help=text)
    how.add_argument("--rounds", type=integer(1, 100_000), help="number of timed rounds of each model (default 11)")
    how.add_argument("--threads", type=integer(1, 1024), help="CPU threads (default: set by torch)")
    how.add_argument("--seed", type=integer(0), help="seed of weights, inputs and cotangents (default 0)")
    parser.needs = {name: ((Needs("module", (None,)),),) for name in _ONLY_SIZES}
    parser.needs["nonlinearity"] = ((Needs("module", (None,)), Needs("cell", ("rnn",))),)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the comparison. Returns the exit code: 0, 1 if the results disagree, 2 for bad input."""

    def body() -> int:
        parser = _parser()
        given = parser.parse(argv)
        parser.check_all_play(given, SimpleNamespace(**({"module": None, "cell": "rnn"} | given)))
        if "threads" in given:
            torch.set_num_threads(given["threads"])
        seed = given.get("seed", 0)
        torch.manual_seed(seed)
        if "module" in given:
            model, inputs = _load(given["module"])
            idle = [f"--{name}" for name in ("batch", "time") if name in given] if inputs else []
            if idle:
                raise InputError(f"{idle[0]}: for a factory that returns the model alone; here it gives the input too")
        else:
            model, inputs = _made_model(given), ()
        refuse_meta(model, inputs)
        place = given.get("device")
        try:
            model = model.to(device=place, dtype=getattr(torch, given["dtype"]) if "dtype" in given else None)
            if not inputs:
                inputs = (_made_input(model, given.get("batch", 32), given.get("time", 200), seed),)
            else:
                inputs = mapped(inputs, lambda t: _moved(t, place, given.get("dtype")))
            found = compare(model, *inputs, rounds=given.get("rounds", 11), backend=given.get("backend"), seed=seed)
        except RuntimeError as error:
            large = any(word in str(error) for word in ("memory", "overflowed"))  # a size in bytes beyond 64 bits
            if not isinstance(error, torch.OutOfMemoryError) and not large:
                raise
            raise InputError(f"there is not enough memory ({first_line(error)}); accepted: smaller sizes") from error
        say(str(found))
        return 0 if found.agree else EXIT_DISAGREE

    return command(body, argv)


if __name__ == "__main__":
    sys.exit(main())
