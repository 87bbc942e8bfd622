"""Record the norms of states and gradients at every time step: ‖h_t‖ and ‖dL/dh_t‖.

``tap`` is public as ``orthokern.diagnostics.tap``. The recording functions are called in the implementations of the
ops, so that they also run under torch.compile. The backward ops compute the norms of the gradient if `needed` returns
True; the norms of the states are one reduction over the result of the forward, while a tap is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor

from orthokern._products import norms_of_steps
from orthokern.errors import integer

SINKS: list[tap] = []


class tap:
    """Collect the norms of the scans and GRUs whose forward or backward runs inside the ``with`` block.

    Example::

        with orthokern.diagnostics.tap() as t:
            loss = criterion(model(x))
            loss.backward()
        t.state_norms  # one tensor [T] per scan, in the order in which the forwards ran (first layer first)
        t.grad_norms   # one tensor [T] per scan, in the order in which the backwards ran (last layer first)

    Time steps are those of the scan: the reverse scan of a bidirectional module processes the sequence from its end,
    and the padding of a packed sequence is included (its states are computed but not used, and its gradient is zero).

    Args:
        sparse: record only the steps `orthokern.diagnostics.profile_steps(T)`; the other elements may be NaN. A loss
            may then use the modal form, which does not compute every state. Without it, a loss uses the sequential scan
            while the tap is open.

    Attributes:
        state_norms: tensors [T]; element t is the Frobenius norm over [B, N] of h_t. No unit. In the dtype of the
            states, float32 for 16-bit ones.
        state_ops: the op of each, "factored_scan", "dense_scan", "gru_scan", "modal_scan" (a scan with
            algorithm="modal") or "modal_cross_entropy".
        grad_norms: tensors [T]; element t is the Frobenius norm over [B, N] of dL/dh_t, in the units of the loss.
        ops: the op of each, as in state_ops.

    Not recorded: grad_norms of scans with an explicit ``backend="reference"``, which are plain differentiable torch
    code, and their state_norms under torch.compile; both norms of a loss with an explicit algorithm="modal" and
    lengths; LSTM, PeepholeLSTM and RotationRNN.

    Range: norms have the range of their dtype. Exceptions are the grad_norms of float32 scans and GRUs on the backends
    "cuda" and "triton", which add float32 squares: there elements of dL/dh_t below 1e-19 count as 0, and norms above
    1e19 are inf.
    """

    def __init__(self, *, sparse: bool = False) -> None:
        self.sparse, self._open = sparse, False
        self.state_norms: list[Tensor] = []
        self.state_ops: list[str] = []
        self.grad_norms: list[Tensor] = []
        self.ops: list[str] = []

    def __enter__(self) -> tap:
        self._open = True
        SINKS.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        if self in SINKS:  # not while another thread is in set_aside
            SINKS.remove(self)


@contextlib.contextmanager
def set_aside() -> Iterator[tap]:
    """While the block runs, norms are recorded in a new tap instead of the open ones; nowhere if none is open."""
    outer, inner = SINKS[:], tap()
    inner._open = True
    SINKS[:] = [inner] if outer else []
    try:
        yield inner
    finally:  # other threads may have closed taps, or opened some
        inner._open = False
        SINKS[:] = [sink for sink in (*outer, *SINKS) if sink._open]


def needed() -> bool:
    """Whether a backward computes norms: a tap is open, or may be open when the graph that is being traced runs."""
    return bool(SINKS) or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def record(op: str, grad_norm: Tensor) -> None:
    """Append the norms [T] of one backward to every open tap."""
    for sink in SINKS:
        sink.grad_norms.append(grad_norm.detach().clone())  # torch.compile may reuse the buffer of an unused output
        sink.ops.append(op)


def profile_steps(length: int, points: int = 64) -> list[int]:
    """The time steps at which a profile through time is recorded, the first and the last included.

    Args:
        length: number of time steps T, at least 1.
        points: number of steps to choose, at least 2; all of them if there are no more.

    Returns:
        Increasing step numbers in [0, length).

    Raises:
        InputError: length below 1 or points below 2.
    """
    length, points = integer("length", length), integer("points", points, 2)
    return torch.linspace(0, length - 1, min(points, length), dtype=torch.float64, device="cpu").round().long().tolist()


def record_states(op: str, hs: Tensor) -> None:
    """Append the norms of the states hs [T, B, N] of one forward to every open tap."""
    if torch.compiler.is_compiling() or not SINKS:
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(hs):  # plain torch code under vmap: values cannot be read
        return
    dtype = torch.float32 if hs.dtype in (torch.float16, torch.bfloat16) else hs.dtype
    record_state_norms(op, norms_of_steps(hs.detach()).to(dtype))


def record_state_norms(op: str, norms: Tensor) -> None:
    """Append the norms [T] of one forward to every open tap."""
    for sink in SINKS:
        sink.state_norms.append(norms.clone())
        sink.state_ops.append(op)
