"""Which backend serves what on this machine, and why another does not: ``python -m orthokern.explain``.

With an op, which backend "auto" takes for one call of it, and why: ``python -m orthokern.explain --op factored_scan --N
600 --dtype float32 --device cuda``. With ``--op scan_cross_entropy --N 128 --T 10000 --B 50 --C 9``, the algorithm of
that function too. ``orthokern.explain()`` returns the same texts: the module itself can be called.
"""

from __future__ import annotations

import argparse
import platform
import sys
import types
from typing import Any

import torch

import orthokern
from orthokern import dispatch, functional, init, ops
from orthokern._activations import ACTIVATIONS
from orthokern.commandline import Parser, command, integer, say
from orthokern.errors import InputError, unknown_name
from orthokern.ops import _checks as check

# Sizes of a call, of which a SUPPORT table may limit some: batch, time, hidden units, rank, features or ids, classes.
LETTERS = ("B", "T", "N", "K", "D", "C")
LOSS = "scan_cross_entropy"  # the function, which chooses between ops
OF_LOSS = ("N", "T", "B", "C")  # sizes that its choice depends on
LARGEST = 2048  # N of the matrix that it is made for


def explain(
    op: str | None = None,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
    backend: str | None = None,
    algorithm: str = "auto",
    features: tuple[str, ...] = (),
    activation: str | None = None,
    **sizes: int,
) -> str:
    """Say which backends serve what, or which one serves a call.

    Args:
        op: the stem of an op, e.g. "factored_scan"; "scan_cross_entropy" for the algorithm of that function; or None
            for everything there is to say of this machine: versions, the native module and its instruction sets,
            devices, op by backend, reasons. Then no other argument counts.
        dtype: of the call's floating tensors, or its name.
        device: of its tensors; None: a CUDA device where there is one, else the CPU.
        backend: what the call asks for; None for the process's default.
        algorithm: as in the call.
        features: optional arguments that the call uses, e.g. ("lengths", "message_clip").
        activation: of "scan_cross_entropy", which needs N, T, B and C too; None: "identity".
        sizes: by their letters, e.g. N=600, K=600. K = N unless given.

    Returns:
        The text, made with what the dispatcher itself chooses by.

    Raises:
        InputError: for an unknown op, backend, dtype, device or letter.
    """
    assert ops.NAMES  # importing the ops registers their SUPPORT tables
    if op is not None:
        for letter, size in sizes.items():
            if letter not in LETTERS:
                raise unknown_name("size", letter, LETTERS)
            if not isinstance(size, int) or size < 0:
                raise InputError(f"{letter} must be an integer, 0 or more, got {size!r}")
        if "N" in sizes:
            sizes.setdefault("K", sizes["N"])
        place = _device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        if op == LOSS:
            return _explain_loss(place, _dtype(dtype), backend, algorithm, features, activation or "identity", sizes)
        if activation is not None:
            raise InputError(f"activation is {activation!r}: only the op {LOSS} has one here")
        return dispatch.explain_call(
            op, backend, device=place, dtype=_dtype(dtype), algorithm=algorithm, features=features, **sizes
        )
    head = f"orthokern {orthokern.__version__}, Python {platform.python_version()}, {platform.machine()}"
    return f"{head}\n{dispatch.explain()}"


def _explain_loss(
    device: torch.device,
    dtype: torch.dtype,
    backend: str | None,
    algorithm: str,
    features: tuple[str, ...],
    activation: str,
    sizes: dict[str, int],
) -> str:
    """The algorithm of ``functional.scan_cross_entropy`` for token ids and a random orthogonal matrix; and, as
    ``dispatch.explain_call`` tells it, the backend of the op that it runs."""
    for letter in OF_LOSS:
        if not sizes.get(letter):
            raise InputError(f"{LOSS} needs the sizes {', '.join(OF_LOSS)}, each at least 1; {letter} is missing")
    N, T, B, C = (sizes[letter] for letter in OF_LOSS)
    K = sizes["K"]
    if not 1 <= K <= N <= LARGEST:
        raise InputError(f"{LOSS}: N={N}, K={K}; accepted: K of at least 1, N of at least K and at most {LARGEST}")
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    check.scan_choices("ieee", algorithm, activation, 0)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device is {device}: {dispatch.no_device()}")
    generator = torch.Generator().manual_seed(0)
    u, v = (init.haar_orthogonal_(torch.empty(N, K), generator).to(device, dtype) for _ in range(2))
    clip = float("message_clip" in features)
    call = f"{LOSS} ({dispatch.dtype_name(dtype)} on {device}, N={N}, K={K}, T={T}, B={B}, C={C}, {activation})"
    try:
        name, why = functional.explain_scan_cross_entropy(
            (u, u.new_ones(K), v), T, B, C, lengths="lengths" in features, activation=activation, message_clip=clip,
            resets="resets" in features,
            backend=backend, algorithm=algorithm,
        )  # fmt: skip
    except InputError as error:
        return f"{call}: {error}"
    if name == "modal":
        op, facts = "modal_cross_entropy", {"N": N, "C": C}
    else:
        op, facts, why = "factored_scan", {"N": N, "K": K}, f"not modal: {why}"
    scan = dispatch.explain_call(
        op, backend, device=device, dtype=dtype, algorithm="auto" if name == "modal" else name, features=features,
        **facts,
    )  # fmt: skip
    note = "For random orthogonal U and V; a module tells of its own matrix by explain_loss."
    return f"{call}: algorithm {algorithm!r} takes {name} ({why})\n{scan}\n{note}"


def _dtype(given: torch.dtype | str) -> torch.dtype:
    found = given if isinstance(given, torch.dtype) else getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"unknown dtype {given!r}; accepted: float64, float32, bfloat16, float16")
    return found


def _device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except RuntimeError:
        raise InputError(f"unknown device {given!r}; accepted: cpu, cuda, cuda:0 and so on") from None


def _names(text: str) -> tuple[str, ...]:
    """An argparse type: names separated by commas."""
    return tuple(name for name in text.split(",") if name)


class _CallableModule(types.ModuleType):
    """`orthokern.explain` is this module once anything has imported it; calling it must work either way."""

    def __call__(self, op: str | None = None, **call: Any) -> str:
        return explain(op, **call)


sys.modules[__name__].__class__ = _CallableModule


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.explain", description=__doc__.split("\n")[0])
    parser.add_argument("--op", help=f"tell which backend serves a call of this op, or the algorithm of {LOSS}")
    for letter in LETTERS:
        parser.add_argument(
            f"--{letter}", type=integer(0), help=argparse.SUPPRESS if letter == "D" else "a size of the call"
        )
    parser.add_argument("--dtype", help="of its tensors (float32)")
    parser.add_argument("--device", help="of its tensors (cuda where there is one, else cpu)")
    parser.add_argument("--backend", help="what it asks for (auto)")
    parser.add_argument("--algorithm", help="what it asks for (auto)")
    parser.add_argument("--activation", help=f"of {LOSS} (identity)")
    parser.add_argument("--features", type=_names, help="optional arguments that it uses: lengths,message_clip,resets")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the text; returns the exit status, 0, or 2 for an argument that means nothing."""

    def body() -> int:
        given = _parser().parse(argv)
        if given and "op" not in given:
            raise InputError(
                f"--{next(iter(given))} tells of a call: give --op too, one of {', '.join((*ops.NAMES, LOSS))}"
            )
        say(explain(given.pop("op", None), **given))
        return 0

    return command(body, argv)


if __name__ == "__main__":
    sys.exit(main())
