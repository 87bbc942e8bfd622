"""A mode in which every float32 product of torch must be IEEE float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("_linear_pointwise", "mm", "bmm", "mv", "addmm", "baddbmm", "addmm_", "baddbmm_", "linalg_solve_triangular")


def products_are_ieee() -> bool:
    """Whether torch's float32 products are IEEE float32 now, on a GPU and on a CPU."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # what cuBLAS and oneDNN are told by, since torch 2.9
        return torch.backends.cuda.matmul.fp32_precision == "ieee" == torch.backends.mkldnn.matmul.fp32_precision
    return torch.get_float32_matmul_precision() == "highest"


class FloatProducts(TorchDispatchMode):
    """Within it, torch's float32 products are noted, and that none of them may be of lower precision.

    It is entered with TF32 allowed for the process on a GPU and bfloat16 on a CPU; a product that is not guarded fails,
    before it runs.
    """

    def __enter__(self) -> Any:
        self.before = torch.get_float32_matmul_precision()
        self.seen: set[str] = set()
        torch.set_float32_matmul_precision("medium")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert torch.get_float32_matmul_precision() == "medium", "the setting was not put back"
        torch.set_float32_matmul_precision(self.before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS and any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in args):
            self.seen.add(name)
            assert products_are_ieee(), f"{name} would be TF32 on a GPU"
        return func(*args, **(kwargs or {}))
