"""List the backends of this machine, and the reason why others are missing: ``python -m orthokern.explain``.

With ``--op``, it says which backend "auto" selects for one call of that op, and why: ``python -m orthokern.explain --op
factored_scan --N 600 --dtype float32 --device cuda``. ``orthokern.explain()`` returns the same text; the module is
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
from orthokern import dispatch, errors, ops
from orthokern._scan_contract import FEATURES, between_steps
from orthokern.commandline import Parser, command, integer, names, say
from orthokern.dispatch import Call
from orthokern.errors import InputError, require
from orthokern.ops import _checks as check

# Sizes of a call by their letters. A SUPPORT table may limit some of them; none limits D, which is not in the help.
LETTERS = {
    "B": "sequences in the batch",
    "T": "time steps",
    "N": "hidden units",
    "K": "rank of U and V (default N)",
    "D": "",
    "C": "classes of the readout",
}
DESCRIPTION = """\
List the backends of this machine, and the reasons why others are missing. With --op, print which backend
serves one call of that op, and why. Sizes that are not given are not checked against the limits of the
backends."""
EXAMPLES = """\
examples:
  python -m orthokern.explain                                          the backends of this machine
  python -m orthokern.explain --op factored_scan --N 600 --device cuda"""


def explain(
    op: str | None = None,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
    backend: str | None = None,
    algorithm: str = "auto",
    features: tuple[str, ...] = (),
    **sizes: int,
) -> str:
    """Describe the backends of this machine, or the backend that runs one call.

    The algorithm of ``functional.scan_cross_entropy`` depends on the recurrent matrix:
    ``functional.explain_scan_cross_entropy`` and the method ``explain_loss`` of the modules report it.

    Args:
        op: the name of an op, e.g. "factored_scan", or None for a description of this machine: versions, the native
            module and its instruction sets, devices, the backends of every op, and the reasons why others are missing.
            With None, all other arguments are ignored.
        dtype: dtype of the floating-point tensors of the call, or its name.
        device: device of the tensors; None: a CUDA device if there is one, else the CPU.
        backend: the ``backend`` argument of the call; None for the default of the process.
        algorithm: the ``algorithm`` argument of the call.
        features: optional arguments that the call uses, e.g. ("lengths", "resets").
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
    if op is None:
        head = f"orthokern {orthokern.__version__}, Python {platform.python_version()}, {platform.machine()}"
        return f"{head}\n{dispatch.explain()}"
    require(isinstance(features, (tuple, list)), "features", "a tuple of names", repr(features))
    kinds = [("op", [op], ops.NAMES), ("size", sizes, LETTERS), ("algorithm", [algorithm], check.ALGORITHMS)]
    for kind, values, accepted in [*kinds, ("feature", features, FEATURES)]:
        for name in values:
            errors.one_of(kind, name, accepted)
    sizes = {letter: errors.integer(letter, size, 0) for letter, size in sizes.items()}
    if "N" in sizes:
        sizes.setdefault("K", sizes["N"])
        if op in ("factored_scan", "cayley") and sizes["K"] > sizes["N"]:
            raise InputError(f"{op}: N={sizes['N']}, K={sizes['K']}; accepted: K of at most N")
    if algorithm == "modal" and op in ("factored_scan", "dense_scan", "modal"):  # the scans run this op then
        op, algorithm, features = "modal", "auto", tuple(between_steps(features))
    place = _device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    return dispatch.explain_call(op, backend, Call(place, _dtype(dtype), sizes, algorithm, features))


def _dtype(name: torch.dtype | str) -> torch.dtype:
    result = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(result, torch.dtype):
        raise InputError(f"unknown dtype {name!r}; accepted: float64, float32, bfloat16, float16")
    return result


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"unknown device {str(name)!r}; accepted: cpu, cuda, cuda:0 and so on")
    if device.index and torch.cuda.is_available() and device.index >= torch.cuda.device_count():
        raise InputError(f"no device {str(name)!r}; accepted: cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


class _CallableModule(types.ModuleType):
    """Makes this module callable: after it has been imported, `orthokern.explain` is the module."""

    def __call__(self, op: str | None = None, **call: Any) -> str:
        return explain(op, **call)


sys.modules[__name__].__class__ = _CallableModule


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.explain", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--op", help=f"describe a call of this op, not the machine: {', '.join(ops.NAMES)}")
    for letter, size in LETTERS.items():
        parser.add_argument(f"--{letter}", type=integer(0), metavar="SIZE", help=size or argparse.SUPPRESS)
    parser.add_argument("--dtype", help="dtype of the tensors (default float32)")
    parser.add_argument("--device", help="device of the tensors (default cuda if there is a device, else cpu)")
    parser.add_argument("--backend", help="backend argument of the call (default ORTHOKERN_BACKEND, else auto)")
    parser.add_argument("--algorithm", help="algorithm argument of the call (default auto)")
    parser.add_argument("--features", type=names, help=f"features of the call: {','.join(FEATURES)}")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the text. Returns the exit code: 0, or 2 for a bad argument."""

    def body() -> int:
        arguments = sys.argv[1:] if argv is None else argv
        if arguments and arguments[0] in ops.NAMES:
            raise InputError(f"unknown argument {arguments[0]}: did you mean --op {arguments[0]}?")
        options = _parser().parse(arguments)
        if options and "op" not in options:
            raise InputError(f"--{next(iter(options))} describes a call: give --op too, one of {', '.join(ops.NAMES)}")
        say(explain(options.pop("op", None), **options))
        return 0

    return command(body)


if __name__ == "__main__":
    sys.exit(main())
