"""``python -m orthokern.compare``: the command line."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import dispatch
from orthokern.commandline import Parser, Settings, command, device, integer, one_of, say
from orthokern.compare import __doc__ as DESCRIPTION
from orthokern.compare.measure import compare, first_line, mapped, user_errors
from orthokern.compare.result import Comparison
from orthokern.errors import InputError

EXIT_DISAGREE = 1


def _load(text: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Calls the factory "package.module:factory". Returns a model, and the inputs of its forward if there are any."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    with user_errors(f"--module {text}: importing it"):
        factory: Any = pkgutil.resolve_name(text)
    if not callable(factory) or isinstance(factory, nn.Module):
        kind = type(factory).__name__
        raise InputError(f"--module {text}: it is a {kind}; accepted is a function that returns a model")
    with user_errors(f"--module {text}: the factory"):
        result = factory()
    model, *inputs = result if isinstance(result, tuple) else (result,)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--module {text}: the factory returned {type(model).__name__}; accepted is a torch.nn.Module, or a tuple "
            "of one and the inputs of its forward"
        )
    return model, tuple(inputs)


def _new_input(model: nn.Module, batch: int, steps: int, seed: int) -> Tensor:
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


def _new_model(options: Settings) -> nn.Module:
    """One module of the sizes of the command line."""
    kind = nn.GRU if options.get("cell") == "gru" else nn.RNN
    return kind(options.get("input", 64), options.get("hidden", 128), options.get("layers", 1))


_ONLY_SIZES = ("cell", "input", "hidden", "layers")


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.compare", description=DESCRIPTION.strip())
    what = parser.add_argument_group("model and inputs")
    text = "a function that returns the model, see above; without it, one module of the sizes below"
    what.add_argument("--module", metavar="PACKAGE.MODULE:FACTORY", type=str, help=text)
    what.add_argument("--cell", type=one_of("cell", ("rnn", "gru")), help="rnn or gru (default rnn)")
    what.add_argument("--input", type=integer(1), metavar="D", help="features of the input (default 64)")
    what.add_argument("--hidden", type=integer(1), metavar="N", help="hidden units (default 128)")
    what.add_argument("--layers", type=integer(1, 1000), metavar="N", help="stacked layers (default 1)")
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
    return parser


def _check_effect(options: Settings, names: Iterable[str], reason: str) -> None:
    """InputError for the first of some options that is set."""
    for name in names:
        if name in options:
            raise InputError(f"--{name.replace('_', '-')} has no effect {reason}")


def _compare(options: Settings) -> Comparison:
    seed, place = options.get("seed", 0), options.get("device")
    torch.manual_seed(seed)
    dtype = getattr(torch, options["dtype"]) if "dtype" in options else None
    if "module" in options:
        _check_effect(options, _ONLY_SIZES, "with --module")
        model, inputs = _load(options["module"])
    else:
        model, inputs = _new_model(options), ()
    with user_errors(f"moving {type(model).__name__}"):
        model = model.to(device=place, dtype=dtype)
    if inputs:
        _check_effect(options, ["batch", "time"], "where the factory returns inputs too")
        inputs = mapped(inputs, lambda t: t.to(device=place, dtype=dtype if t.is_floating_point() else None))
    else:
        inputs = (_new_input(model, options.get("batch", 32), options.get("time", 200), seed),)
    return compare(model, *inputs, rounds=options.get("rounds", 11), backend=options.get("backend"), seed=seed)


def main(argv: list[str] | None = None) -> int:
    """Print the comparison. Returns the exit code: 0, 1 if the results disagree, 2 for bad input."""

    def body() -> int:
        options = _parser().parse(argv)
        if "threads" in options:
            torch.set_num_threads(options["threads"])
        try:
            result = _compare(options)
        except (RuntimeError, MemoryError) as error:
            too_large = any(word in str(error) for word in ("memory", "overflowed", "allocate"))
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not too_large:
                raise
            raise InputError(f"there is not enough memory ({first_line(error)}); accepted: smaller sizes") from error
        say(str(result))
        return 0 if result.agree else EXIT_DISAGREE

    return command(body)


if __name__ == "__main__":
    sys.exit(main())
