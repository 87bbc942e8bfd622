"""The result of a comparison, and its text."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from orthokern.conversion import Report


@dataclass(frozen=True)
class Times:
    """Times of torch and orthokern in ms, one per round. The rounds alternate between the two."""

    torch: tuple[float, ...]
    orthokern: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median time of torch divided by that of orthokern: above 1, orthokern is faster."""
        return statistics.median(self.torch) / statistics.median(self.orthokern)


@dataclass(frozen=True)
class Errors:
    """Largest differences of one kind of result, each relative to the largest value of its tensor.

    Attributes:
        torch: difference between torch and the same computation in float64.
        orthokern: difference between orthokern and the computation in float64.
        between: difference between torch and orthokern.
        allowed: the largest `orthokern` that counts as agreement.
    """

    torch: float
    orthokern: float
    between: float
    allowed: float

    @property
    def agree(self) -> bool:
        """Whether `orthokern` is at most `allowed`; False for NaN."""
        return self.orthokern <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. str() gives the report of the command line.

    Attributes:
        head: description of the model, the inputs and the versions.
        report: the report of `orthokern.convert`.
        backends: one line per replaced module: the selected backend and its op.
        forward, backward: times in ms; backward is None if no output depends on a parameter.
        kept_mib: MiB that torch and orthokern keep from forward to backward, without parameters and inputs.
        peak_mib: peak MiB allocated on a CUDA device; None on a CPU.
        outputs, gradients: `Errors` of outputs, and of the gradients for parameters and floating-point inputs;
            gradients is None if backward is None.
        notes: remarks about the run.
    """

    head: str
    report: Report
    backends: tuple[str, ...]
    forward: Times
    backward: Times | None
    kept_mib: tuple[float, float]
    peak_mib: tuple[float, float] | None
    outputs: Errors
    gradients: Errors | None
    notes: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """Whether outputs and gradients agree."""
        return self.outputs.agree and (self.gradients is None or self.gradients.agree)

    def __str__(self) -> str:
        rows = [("", "torch", "orthokern", "")]
        for name, times in (("forward, ms", self.forward), ("backward, ms", self.backward)):
            if times is not None:
                rows.append((name, _spread(times.torch), _spread(times.orthokern), _faster(times.ratio)))
        for name, sizes in (("kept for backward, MiB", self.kept_mib), ("peak, MiB", self.peak_mib)):
            if sizes is not None:
                rows.append((name, f"{sizes[0]:.2f}", f"{sizes[1]:.2f}", ""))
        for name, errors in (("error of outputs", self.outputs), ("error of gradients", self.gradients)):
            if errors is not None:
                more = "" if errors.agree else "MORE THAN "
                text = f"{more}allowed {errors.allowed:.1e}; differ by {errors.between:.1e}"
                rows.append((name, f"{errors.torch:.1e}", f"{errors.orthokern:.1e}", text))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [
            "  ".join([row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]]).rstrip()
            for row in rows
        ]
        verdict = "torch and orthokern agree" if self.agree else "torch and orthokern DISAGREE"
        parts = [self.head, str(self.report), *self.backends, "", *table, "", *self.notes, verdict]
        return "\n".join(parts)


def _spread(values: tuple[float, ...]) -> str:
    """Median, and the least and the largest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _faster(ratio: float) -> str:
    return f"{ratio:.2f} times faster" if ratio >= 1.0 else f"{1.0 / ratio:.2f} times SLOWER"
