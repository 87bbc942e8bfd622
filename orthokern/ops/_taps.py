"""Low-level hook for the norms that show how signal and gradient travel through time: ‖h_t‖ and ‖dL/dh_t‖.

``orthokern.diagnostics`` is the public place of ``tap``. The hook sits in the implementation of the ops, where tensors
are real: it works the same under torch.compile. The backward ops compute the gradient's norms on their way; the states'
are one reduction over what the forward has just written, and only while a tap is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor

from orthokern.errors import InputError

SINKS: list[tap] = []


class tap:
    """Collect the norms of every scan whose forward or backward runs inside the ``with`` block.

    Example::

        with orthokern.diagnostics.tap() as t:
            loss = criterion(model(x))
            loss.backward()
        t.state_norms  # one tensor [T] per scan, in the order in which the forwards ran (first layer first)
        t.grad_norms   # one tensor [T] per scan, in the order in which the backwards ran (last layer first)

    Time steps are those of the scan: a bidirectional module's reverse scan sees the sequence from its end, and a packed
    sequence's padding counts (its states are computed and not read; the gradient there is zero).

    Args:
        sparse: only the steps `orthokern.diagnostics.profile_steps(T)` are wanted; the other elements may be NaN. Then
            a loss may use the modal form, which does not pass through the states one by one; else it goes step by step
            while the tap is open.

    Attributes:
        state_norms: tensors [T]; element t is the Frobenius norm over [B, N] of h_t. No unit. In the dtype of the
            states, float32 for 16-bit ones.
        state_ops: the op of each, "factored_scan", "dense_scan", or "modal_cross_entropy".
        grad_norms: tensors [T]; element t is the Frobenius norm over [B, N] of dL/dh_t, in the units of the loss.
        ops: the op of each, as in state_ops.

    Not collected: grad_norms of scans on an explicit ``backend="reference"``, which are plain differentiable torch
    code, and also their state_norms where torch.compile traces them.
    """

    def __init__(self, *, sparse: bool = False) -> None:
        self.sparse = sparse
        self.state_norms: list[Tensor] = []
        self.state_ops: list[str] = []
        self.grad_norms: list[Tensor] = []
        self.ops: list[str] = []

    def __enter__(self) -> tap:
        SINKS.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        SINKS.remove(self)


@contextlib.contextmanager
def set_aside() -> Iterator[tap]:
    """While the block runs, norms go to a tap of its own, and to none of those that are open; nowhere if none is."""
    outer, inner = SINKS[:], tap()
    SINKS[:] = [inner] if outer else []
    try:
        yield inner
    finally:
        SINKS[:] = outer


def record(op: str, grad_norm: Tensor) -> None:
    """Hand the norms [T] of one backward to every open tap; of replicas [R, T], the norms of each model."""
    for sink in SINKS:
        # a copy: under torch.compile the buffer of an unused output may be given to something else
        for norm in grad_norm.detach().reshape(-1, grad_norm.shape[-1]).clone().unbind(0):
            sink.grad_norms.append(norm)
            sink.ops.append(op)


def profile_steps(length: int, points: int = 64) -> list[int]:
    """Time steps, first and last among them, at which a profile through time is kept.

    Args:
        length: number of time steps T, at least 1.
        points: number of steps to choose, at least 2; all of them if there are no more.

    Returns:
        Increasing step numbers in [0, length).

    Raises:
        InputError: length below 1 or points below 2.
    """
    for name, value, low in (("length", length, 1), ("points", points, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InputError(f"{name} is {value!r}; accepted: an integer of at least {low}")
    return torch.linspace(0, length - 1, min(points, length), dtype=torch.float64).round().long().tolist()


def record_states(op: str, hs: Tensor) -> None:
    """Hand the norms of the states hs [T, B, N] of one forward to every open tap; without one, do nothing. Of replicas
    [T, R, B, N], those of each model."""
    if torch.compiler.is_compiling() or not SINKS:
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(hs):  # plain torch code under vmap has no numbers
        return
    dtype = torch.float32 if hs.dtype in (torch.float16, torch.bfloat16) else hs.dtype
    for states in hs.detach().unbind(1) if hs.ndim == 4 else (hs.detach(),):
        record_state_norms(op, torch.linalg.vector_norm(states, dim=(1, 2), dtype=dtype))


def record_state_norms(op: str, norms: Tensor) -> None:
    """Hand the norms [T] of one forward to every open tap."""
    for sink in SINKS:
        sink.state_norms.append(norms.clone())
        sink.state_ops.append(op)
