"""The definition of every op: mathematics, shapes, cost, SUPPORT table, torch.library op with fake and autograd.

The files of an op have one name: ``orthokern/ops/<op>.py``, ``orthokern/reference/<op>.py``, ``csrc/cpu/<op>.cpp`` and
so on; those of ``modal`` are in one folder. The functions of these modules take checked inputs; the public functions of
``orthokern.functional`` check them.
"""

from orthokern.ops import (
    activations,
    cayley,
    dense_scan,
    factored_scan,
    gru_scan,
    linear_cross_entropy,
    modal,
    peephole_scan,
    skew_exp,
)

NAMES = (
    "factored_scan",
    "dense_scan",
    "gru_scan",
    "cayley",
    "activations",
    "linear_cross_entropy",
    "skew_exp",
    "modal",
    "peephole_scan",
)

__all__ = [
    "NAMES",
    "activations",
    "cayley",
    "dense_scan",
    "factored_scan",
    "gru_scan",
    "linear_cross_entropy",
    "modal",
    "peephole_scan",
    "skew_exp",
]
