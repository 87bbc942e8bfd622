"""torch's matrix products in IEEE float32, for the leaves that use them beside their own kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """Within it, or in a function that it decorates, float32 products on a GPU are IEEE float32.

    Whatever the process allows elsewhere (torch.backends.cuda.matmul, torch.set_float32_matmul_precision): float32 is
    IEEE float32 in this package, and a lower precision is asked for by ``precision=`` alone. The setting is the
    process's, so products that another thread starts in the meantime are IEEE too; it is put back at the end.
    """
    settings = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(settings, "fp32_precision") else ("allow_tf32", False)
    before = getattr(settings, name)
    if before == exact:
        yield
        return
    setattr(settings, name, exact)
    try:
        yield
    finally:
        setattr(settings, name, before)
