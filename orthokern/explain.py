"""List the backends of this machine, and the reason why others are missing: ``python -m orthokern.explain``.

With ``--op``, it says which backend "auto" selects for one call of that op, and why: ``python -m orthokern.explain --op
factored_scan --N 600 --dtype float32 --device cuda``. With ``--op scan_cross_entropy --N 128 --T 10000 --B 50 --C 9``
it also says which algorithm that function selects. ``orthokern.explain()`` returns the same text; the module is
callable.
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
from orthokern.dispatch import Call
from orthokern.errors import InputError, unknown_name
from orthokern.ops import _checks as check
from orthokern.ops._scan import FEATURES as SCAN_FEATURES

LOSS = "scan_cross_entropy"  # a function that selects one of several ops
# Sizes of a call by their letters. A SUPPORT table may limit some of them; D limits none, and is not in the help.
LETTERS = {
    "B": "sequences in the batch",
    "T": "time steps",
    "N": "hidden units",
    "K": "rank of U and V (default N)",
    "D": "",
    "C": "classes of the readout",
}
DESCRIPTION = f"""\
List the backends of this machine, and the reasons why others are missing. With --op, print which backend
serves one call of that op, and why; for {LOSS} also the algorithm. Sizes that are not given
are not checked against the limits of the backends."""
EXAMPLES = f"""\
examples:
  python -m orthokern.explain                                          the backends of this machine
  python -m orthokern.explain --op factored_scan --N 600 --device cuda
  python -m orthokern.explain --op {LOSS} --N 128 --T 10000 --B 50 --C 9"""
OF_LOSS = ("N", "T", "B", "C")  # sizes that its selection depends on
LARGEST = 2048  # the largest N for which an example matrix is drawn


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
    """Describe the backends of this machine, or the backend that runs one call.

    Args:
        op: the name of an op, e.g. "factored_scan"; "scan_cross_entropy" for the algorithm of that function; or None
            for a description of this machine: versions, the native module and its instruction sets, devices, the
            backends of every op, and the reasons why others are missing. With None, all other arguments are ignored.
        dtype: dtype of the floating-point tensors of the call, or its name.
        device: device of the tensors; None: a CUDA device if there is one, else the CPU.
        backend: the ``backend`` argument of the call; None for the default of the process.
        algorithm: the ``algorithm`` argument of the call.
        features: optional arguments that the call uses, e.g. ("lengths", "message_clip").
        activation: the activation of "scan_cross_entropy", which also needs N, T, B and C; None: "identity".
        sizes: sizes of the call by their letters, e.g. N=600, K=600. K = N by default.

    Returns:
        The text. It comes from the same tables as the selection itself.

    Raises:
        InputError: an op, backend, dtype, device, algorithm, feature or letter is unknown.

    Example::

        >>> print(explain("cayley", backend="reference", device="cpu", N=8).splitlines()[0])
        cayley (float32 on cpu, N=8, K=8): backend 'reference' takes reference
    """
    assert ops.NAMES  # importing the ops registers their SUPPORT tables
    if op is not None:
        if op not in (*ops.NAMES, LOSS):
            raise unknown_name("op", op, (*ops.NAMES, LOSS))
        for letter, size in sizes.items():
            if letter not in LETTERS:
                raise unknown_name("size", letter, LETTERS)
            if not isinstance(size, int) or size < 0:
                raise InputError(f"{letter} must be an integer, 0 or more, got {size!r}")
        if "N" in sizes:
            sizes.setdefault("K", sizes["N"])
            if op in ("factored_scan", "cayley") and sizes["K"] > sizes["N"]:
                raise InputError(f"{op}: N={sizes['N']}, K={sizes['K']}; accepted: K of at most N")
        if algorithm not in check.ALGORITHMS:
            raise unknown_name("algorithm", algorithm, check.ALGORITHMS)
        known = SCAN_FEATURES if op == LOSS else dispatch.feature_names()
        for feature in features:
            if feature not in known:
                raise unknown_name("feature", feature, known)
        place = _device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        if op == LOSS:
            return _explain_loss(place, _dtype(dtype), backend, algorithm, features, activation or "identity", sizes)
        if activation is not None:
            raise InputError(f"activation is {activation!r}; accepted: no activation, except for {LOSS}")
        return dispatch.explain_call(op, backend, Call(place, _dtype(dtype), sizes, algorithm, features))
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
    """The algorithm of ``functional.scan_cross_entropy`` for token ids and a random orthogonal matrix, and the backend
    of the op that it runs, as described by ``dispatch.explain_call``."""
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
    u, v = (init.haar_orthogonal_(torch.empty(N, K, device="cpu"), generator).to(device, dtype) for _ in range(2))
    clip = float("message_clip" in features)
    call = f"{LOSS} ({dispatch.dtype_name(dtype)} on {device}, N={N}, K={K}, T={T}, B={B}, C={C}, {activation})"
    try:
        name, why = functional.explain_scan_cross_entropy(
            (u, u.new_ones(K), v),
            T,
            B,
            C,
            lengths="lengths" in features,
            resets="resets" in features,
            leak="leak" in features,
            activation=activation,
            message_clip=clip,
            backend=backend,
            algorithm=algorithm,
        )
    except InputError as error:
        return f"{call}: {error}"
    if name == "modal":
        scan = dispatch.explain_call("modal", backend, Call(device, dtype, {"N": N, "C": C}))
    else:
        scan = dispatch.explain_call("factored_scan", backend, Call(device, dtype, {"N": N, "K": K}, name, features))
        why = f"not modal: {why}"
    note = "This holds for random orthogonal U and V. For the matrix of a module, call its explain_loss."
    return f"{call}: algorithm {algorithm!r} takes {name} ({why})\n{scan}\n{note}"


def _dtype(given: torch.dtype | str) -> torch.dtype:
    result = given if isinstance(given, torch.dtype) else getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(result, torch.dtype):
        raise InputError(f"unknown dtype {given!r}; accepted: float64, float32, bfloat16, float16")
    return result


def _device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
    except RuntimeError:
        device = None
    if device is None or device.type not in dispatch.device_types():
        raise InputError(f"unknown device {str(given)!r}; accepted: cpu, cuda, cuda:0 and so on")
    return device


def _names(text: str) -> tuple[str, ...]:
    """An argparse type: names separated by commas."""
    return tuple(name for name in text.split(",") if name)


class _CallableModule(types.ModuleType):
    """Makes this module callable: after it has been imported, `orthokern.explain` is the module."""

    def __call__(self, op: str | None = None, **call: Any) -> str:
        return explain(op, **call)


sys.modules[__name__].__class__ = _CallableModule


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.explain", description=DESCRIPTION, epilog=EXAMPLES)
    names = ", ".join((*ops.NAMES, LOSS))
    parser.add_argument("--op", help=f"describe a call of this op, not the machine: {names}")
    for letter, size in LETTERS.items():
        parser.add_argument(f"--{letter}", type=integer(0), metavar="SIZE", help=size or argparse.SUPPRESS)
    parser.add_argument("--dtype", help="dtype of the tensors (default float32)")
    parser.add_argument("--device", help="device of the tensors (default cuda if there is a device, else cpu)")
    parser.add_argument("--backend", help="backend argument of the call (default ORTHOKERN_BACKEND, else auto)")
    parser.add_argument("--algorithm", help="algorithm argument of the call (default auto)")
    parser.add_argument("--activation", help=f"activation of {LOSS} (default identity)")
    parser.add_argument("--features", type=_names, help="features of the call: lengths,message_clip,resets,leak")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the text. Returns the exit code: 0, or 2 for a bad argument."""

    def body() -> int:
        given = _parser().parse(argv)
        if given and "op" not in given:
            raise InputError(
                f"--{next(iter(given))} describes a call: give --op too, one of {', '.join((*ops.NAMES, LOSS))}"
            )
        say(explain(given.pop("op", None), **given))
        return 0

    return command(body)


if __name__ == "__main__":
    sys.exit(main())
