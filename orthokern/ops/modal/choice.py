"""Whether a call uses the modal form of a linear recurrence.

Note [When a basis is accurate enough]
    Let eps be the rounding of the dtype of the call, and c the condition of the basis R. States in modal
    coordinates are up to |R^-1| times as large as h, and R transforms their rounding errors back: their error is c eps.
    In dL/dW = R^-T M R^T, M sums products of such states and of adjoints, and is itself transformed: c^2 eps. The
    eigenvalues are in float64. Their error grows with the number of steps that a state is remembered for, the
    horizon n = min(T, 1 / (1 - r)) with r the largest |lambda|: c n eps64. The part of W outside its diagonal form
    (``Basis.neglected``) counts c times. Near a defective W, c is about 1 / d for a gap d of two eigenvalues.

    The sequential scan of an orthogonal W has an error of about 2 eps sqrt(n): 2e-5 was measured in float32 at
    T = 10 000.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from orthokern import dispatch
from orthokern._memory import kept_states
from orthokern._scan_contract import Readout, ScanArgs, between_steps
from orthokern.dispatch import Support
from orthokern.errors import BackendUnavailable, InputError
from orthokern.ops import _taps, rotation_scan
from orthokern.ops._common import by_reference, needs_grad
from orthokern.ops.modal import cpu, cuda, reference
from orthokern.ops.modal.basis import Basis, NoBasis, diagonalise, size_of
from orthokern.ops.modal.gradient import close_pairs

Matrix = tuple[Tensor, ...]  # (w,) dense [N, N], or (u, s, v) of W = U diag(s) V^T

NEEDS_CUDA = "modal on a GPU needs the CUDA kernels"
SUPPORT = {**rotation_scan.SUPPORT, "triton": Support(missing=NEEDS_CUDA)}
dispatch.register("modal", SUPPORT)

INSTEAD = "; accepted is 'sequential', or 'auto', which falls back to it"
# Errors that a call with an explicit algorithm="modal" may always have.
LEAST_LIMIT = {torch.float32: 4e-6, torch.float64: 3e-11}


@dataclasses.dataclass(frozen=True)
class Modes:
    """W and its eigenbasis for a modal call."""

    w: Tensor  # [N, N], float64, differentiable with respect to the matrix of the call
    basis: Basis
    pairs: Tensor | None  # int64 [P, 2], both orders of every close pair, if there are any and gradients are needed
    backward: bool  # gradients are needed
    backend: Any  # the module with the functions of `reference`


@dataclasses.dataclass(frozen=True)
class Call:
    """The properties that the choice of an algorithm depends on."""

    matrix: Matrix
    T: int
    B: int
    C: int  # classes of the readout, 0 for states
    ids: bool  # the inputs are token ids
    backward: bool = True  # gradients are needed
    start: Tensor | None = None  # R [N, 2M] of an earlier call
    activation: str = "identity"
    backend: str | None = None
    algorithm: str = "auto"
    features: tuple[str, ...] = ()  # of the scan

    @property
    def N(self) -> int:
        return self.matrix[0].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix[0].dtype

    @property
    def device(self) -> torch.device:
        return self.matrix[0].device

    @property
    def name(self) -> str:
        """W in messages."""
        return "W" if len(self.matrix) == 1 else "W = U diag(s) V^T"


def call_of(args: ScanArgs, readout: Readout | None, start: Tensor | None) -> Call:
    """The call of a scan, or of its loss with a readout."""
    x, layer = args.x, (None, None) if readout is None else readout[:2]
    assert x is not None
    tensors = (value for value in args if isinstance(value, Tensor))
    return Call(
        (args.second,) if args.first is None or args.scale is None else (args.second, args.scale, args.first),
        x.shape[0],
        x.shape[1],
        0 if readout is None else len(readout.weight),
        not x.is_floating_point(),
        needs_grad(*layer, *tensors),
        start,
        args.activation,
        args.backend,
        args.algorithm,
        args.features,
    )


def backend_name(call: Call) -> str:
    """The backend that serves a call; BackendUnavailable if there is none."""
    facts = {"N": call.N, "C": call.C}
    return dispatch.choose("modal", call.backend, dispatch.Call(call.device, call.dtype, facts))


def why_never(call: Call) -> str | None:
    """Why the modal form is not possible for any W, or None if it is."""
    device = call.device
    if call.activation != "identity":
        return f"the activation is {call.activation!r}, and modes are for 'identity'"
    if names := between_steps(call.features):
        return f"with {' and '.join(names)} the recurrence runs step by step"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the stream is being captured in a graph, and the host has to read the modes of every call"
    try:
        name = backend_name(call)
    except BackendUnavailable as error:
        return str(error)
    if device.type == "cuda" and name == "reference" and dispatch.requested(call.backend) != "reference":
        return NEEDS_CUDA
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the call, and the host has to read the modes of one W"
    if by_reference("auto"):
        return "forward mode computes a derivative of the call"
    if device.type == "meta" or detect_fake_mode(call.matrix) is not None:
        return "its tensors have no values, and the host has to read the modes of W"
    return None


def multiply_adds(call: Call) -> tuple[float, float]:
    """The time of a loss as (modal, sequential), each in multiply-adds of a product of large matrices.

    Weights, from profiles on a CPU: one step of a mode is 4 multiply-adds in float64, which count twice. They are
    computed four times: forward, again in the backward, for the adjoint and for the diagonal. The readout runs at half
    the rate of a product. The eigensolver takes as long as 250 N^3 multiply-adds, a refinement as long as 40 N^3.
    """
    rows, N, step = float(call.T * call.B), call.N, 2.0 * call.N * call.matrix[-1].shape[1]
    passes, directions = (4, 2) if call.backward else (1, 1)
    readout = float(call.C * N * (3 if call.backward else 1))
    modal = rows * (passes * 4 * N + 2 * readout) + (40 if call.start is not None else 250) * N**3
    sequential = rows * (directions * step + (N * N if call.backward else 0) + readout)
    return modal, sequential


def why_not_now(call: Call) -> str | None:
    """Why "auto" does not use the modal form for a loss, whatever its W; None if it may.

    (It is never used for states: transforming them to modes and back takes products as large as those of the scan.)
    """
    if dispatch.plain_reference(call.backend):
        return "backend 'reference' runs the scan step by step, for second derivatives"
    if backend_name(call) == "reference":
        return f"modal has no kernel for {call.device.type} tensors"
    if any("lengths" in call.features or not sink.sparse for sink in _taps.SINKS):
        return "the norms of every step are being recorded"
    size = 0 if call.ids else call.T * call.B * call.N * call.dtype.itemsize
    if size > kept_states(call.device):
        return f"the inputs in modal coordinates would take {size / 2**30:.3g} GiB"
    modal, sequential = multiply_adds(call)
    if modal >= sequential:
        return f"the modal form would cost {modal / sequential:.2g} times as much"
    return None


def check_accuracy(call: Call, condition: float, radius: float, neglected: float) -> None:
    """Raise NoBasis unless a modal call is about as accurate as the sequential scan: Note [When a basis is accurate
    enough]. neglected: the value of the basis."""
    eps, wide = torch.finfo(call.dtype).eps, torch.finfo(torch.float64).eps
    horizon = call.T if radius * call.T >= call.T - 1 else 1 / (1 - radius)
    error = eps * (condition**2 if call.backward else condition) + condition * (horizon * wide + neglected)
    limit = 2 * eps * horizon**0.5
    if call.algorithm == "modal":
        limit = max(limit, LEAST_LIMIT[call.dtype], 2 * horizon * wide)
    if not error <= limit:
        raise NoBasis(
            f"the condition of its eigenvectors is {condition:.2g}: the rounding error, about {error:.1g}, would be "
            f"above {limit:.1g}"
        )


def find_modes(call: Call) -> Modes:
    """The modes of the matrix of a call; NoBasis if they cannot be used."""
    if len(call.matrix) == 1:
        w, thin = call.matrix[0].double(), None
    else:
        u, s, v = call.matrix[0], call.matrix[1], call.matrix[2].double()
        w = (u.double() * s) @ v.mT
        thin = v.detach() if v.shape[1] < v.shape[0] else None
    with torch.no_grad():
        start = None if call.start is None else call.start.to(w)
        basis = diagonalise(w.detach(), start, v=thin, dtype=call.dtype)
        sizes = size_of(basis.values)
        close = close_pairs(basis, sizes, call.T)
        facts = torch.stack([sizes.max(), basis.neglected(call.T), close.sum(dtype=torch.float64)])
        radius, neglected, count = facts.tolist()  # one synchronisation
        check_accuracy(call, basis.condition, radius, neglected)
        needed = close.nonzero() if call.backward and count else None
    if needed is not None and count > 2 * call.N and call.algorithm != "modal":
        raise NoBasis(f"{count / 2:.0f} pairs of its eigenvalues are closer than 1 / T, which takes a sum for each")
    backend = {"reference": reference, "cpu": cpu, "cuda": cuda}[backend_name(call)]
    return Modes(w, basis, needed, call.backward, backend)


def choose(call: Call) -> tuple[Modes | None, str]:
    """(modes, "") for a call that uses the modal form, else (None, the reason). For the algorithm "modal" the reason is
    an InputError."""
    algorithm = call.algorithm
    if algorithm not in ("auto", "modal"):
        return None, f"algorithm is {algorithm!r}"
    if algorithm == "auto" and torch.compiler.is_compiling():  # before the kernel search, which has no graph either
        return None, "the call is compiled, and an eigensolver has no graph"
    why = why_never(call)
    if why is None and algorithm == "auto":
        why = why_not_now(call)
    if why is None:
        try:
            return find_modes(call), ""
        except NoBasis as error:
            why = f"{call.name} is not safely diagonalisable: {error}"
    if algorithm == "modal":
        raise InputError(f"algorithm is 'modal': {why}{INSTEAD}")
    return None, why
