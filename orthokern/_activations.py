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
    """The parameter ``act_param`` of an activation."""

    name: str  # in messages
    stem: str | None = None  # of a module's names <stem>_l0, ...; None: not learned, the module's ``negative_slope``
    per_unit: bool = False  # whether a module has one for each unit, [N], or one for all, [1]
    start: float | tuple[float, float] = 0.0  # initial value if learned, or the bounds of its uniform distribution


@dataclass(frozen=True)
class Activation:
    """One activation phi, a -> h."""

    name: str
    number: int  # of the formula in ``csrc/common/activations.h``
    # the argument of phi' in the backward: none (phi' = 1), h, or a, of which the scans then store every a_t
    reads: Literal["nothing", "output", "input"]
    parameter: Parameter | None = None
    pairs: bool = False  # whether phi works on adjacent pairs of units, so that N must be even

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
