"""Low-level hook for the gradient norms that the scans' backward computes on the way.

``orthokern.diagnostics`` is the public place of ``tap``. The hook sits in the implementation of the backward ops, where
tensors are real: it works the same under torch.compile.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

SINKS: list[tap] = []


class tap:
    """Collect the gradient norms of every scan whose backward runs inside the ``with`` block.

    Example::

        with orthokern.diagnostics.tap() as t:
            loss.backward()
        t.grad_norms  # one tensor [T] per scan, in the order in which the backwards ran (last layer first)

    Attributes:
        grad_norms: tensors [T]; element t is the Frobenius norm over [B, N] of dL/dh_t, in the units of the loss.
        ops: the op of each, "factored_scan" or "dense_scan".

    Not collected: scans on an explicit ``backend="reference"``, which are plain differentiable torch code.
    """

    def __init__(self) -> None:
        self.grad_norms: list[Tensor] = []
        self.ops: list[str] = []

    def __enter__(self) -> tap:
        SINKS.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        SINKS.remove(self)


def record(op: str, grad_norm: Tensor) -> None:
    """Hand the norms [T] of one backward to every open tap."""
    for sink in SINKS:
        # a copy: under torch.compile the buffer of an unused output may be given to something else
        sink.grad_norms.append(grad_norm.detach().clone())
        sink.ops.append(op)
