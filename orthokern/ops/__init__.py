"""The definition of every op: mathematics, shapes, cost, SUPPORT table, torch.library op with fake and autograd.

The files of an op have one name: ``orthokern/ops/<op>.py``, ``orthokern/reference/<op>.py``, ``csrc/cpu/<op>.cpp`` and
so on; those of ``modal`` are in one folder. ``factored_scan``, ``dense_scan``, ``gru_scan`` and ``rotation_scan`` are
the public functions and check their arguments; the functions of the other modules take inputs that
``orthokern.functional`` has checked.
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
    rotation_scan,
    skew_exp,
)

__all__ = [
    "factored_scan",
    "dense_scan",
    "gru_scan",
    "cayley",
    "activations",
    "linear_cross_entropy",
    "skew_exp",
    "modal",
    "peephole_scan",
    "rotation_scan",
]
NAMES = tuple(__all__)
