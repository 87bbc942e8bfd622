"""torch's matrix products in IEEE float32, for code that uses them together with the kernels of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_EXACT = ("ieee", "none")  # none: not set


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """Context manager and decorator in which float32 products are IEEE float32: on a GPU, where TF32 may be allowed,
    and on a CPU, where oneDNN rounds factors to bfloat16 at "medium" on some machines.

    float32 is IEEE float32 in this package, regardless of torch.backends and torch.set_float32_matmul_precision; a
    lower precision is selected by ``precision=`` only. The setting is global to the process, so that concurrent
    products of other threads are IEEE too. It is restored at the end.
    """
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # since torch 2.9
        before = [(kind, kind.fp32_precision) for kind in (backends.cuda.matmul, backends.mkldnn.matmul)]
        lowered = [(kind, value) for kind, value in before if value not in _EXACT]
        try:
            for kind, _ in lowered:
                kind.fp32_precision = "ieee"
            yield
        finally:
            for kind, value in lowered:
                kind.fp32_precision = value
        return
    precision = torch.get_float32_matmul_precision()  # for CPU and GPU; allow_tf32 is the same setting
    if precision == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
