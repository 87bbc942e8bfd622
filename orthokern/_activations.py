"""The table of activations, from which all lists of them in Python are derived.

The formulas are in ``csrc/common/activations.h`` (CPU and CUDA), ``triton_kernels/_activation.py`` and
``orthokern/reference/activations.py``. ``tests/ops/test_activations.py`` compares each of them with this table.
CONTRIBUTING.md, "Adding an activation", lists the other changes that a new row needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Parameter:
    """The parameter ``act_param`` of an activation.

    Attributes:
        name: its name in messages.
        stem: the parameters of a recurrent module are named <stem>_l0, ...; None if it is not learned, and is the
            module's ``negative_slope``.
        per_unit: whether a module has one for each unit, [N], or one for all, [1].
        start: initial value of a learned parameter, or the bounds (low, high) of its uniform distribution.
    """

    name: str
    stem: str | None = None
    per_unit: bool = False
    start: float | tuple[float, float] = 0.0


@dataclass(frozen=True)
class Activation:
    """One activation phi, a -> h.

    Attributes:
        name: the public name.
        number: the number of the formula in ``csrc/common/activations.h``.
        reads: the argument of phi' in the backward: "nothing" (phi' = 1), the "output" h, or the "input" a. The scans
            store every a_t for the latter.
        parameter: None for an activation without one.
        pairs: whether phi works on adjacent pairs of units, so that N must be even.
    """

    name: str
    number: int
    reads: Literal["nothing", "output", "input"]
    parameter: Parameter | None = None
    pairs: bool = False

    @property
    def needs_input(self) -> bool:
        return self.reads == "input"

    @property
    def learned(self) -> Parameter | None:
        """The parameter, if a module learns it."""
        return self.parameter if self.parameter is not None and self.parameter.stem is not None else None


_ROWS = (
    Activation("identity", 0, "nothing"),
    Activation("tanh", 1, "output"),
    Activation("relu", 2, "output"),
    Activation("leaky_relu", 3, "input", Parameter("slope")),  # prelu's formula with a slope that is not learned
    Activation("prelu", 3, "input", Parameter("slope", stem="slope", start=0.25)),
    Activation("modrelu", 4, "output", Parameter("bias", stem="modrelu_bias", per_unit=True, start=(-0.01, 0.01))),
    Activation("oplu", 5, "input", pairs=True),
    Activation("softsign", 6, "output"),
)
ACTIVATIONS = {row.name: row for row in _ROWS}
