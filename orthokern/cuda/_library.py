"""Products of cuBLAS in a precision of their own."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern.cuda import _call as native

Product = Callable[..., None]

# cudaDataType_t, cublasComputeType_t (FAST_TF32, and float32 for other factors), cublasOperation_t, cublasGemmAlgo_t
_TYPES = {torch.float32: 0, torch.bfloat16: 14}
_COMPUTE = {torch.float32: 77, torch.bfloat16: 68}
_PLAIN, _TRANSPOSED, _DEFAULT_ALGORITHM = 0, 1, -1


def product(device: torch.device, *, ieee: bool) -> Product:
    """A function of (left [R, K], right [K, C], out [R, C], add=False) that sets out to left @ right, or adds it, on
    the current stream of the current device. Factors are float32 or bfloat16, sums float32.

    float32 factors are rounded to TF32 unless `ieee` is true, if the library can be called. Otherwise the product is
    IEEE, and is to be called in `ieee_products`. torch has one precision for the process: lowering it would affect
    other threads.
    """
    function = None if ieee or device.type != "cuda" else _gemm()
    return _product_of_torch if function is None else functools.partial(_product_of_library, function)


def _product_of_torch(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    if add:
        out.addmm_(left, right)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def _factor(matrix: Tensor) -> tuple[int, int, int, int]:
    """Whether the library, which reads matrices in column-major order, transposes it; its address, type and stride."""
    rows = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    operation, stride = (_PLAIN, matrix.stride(0)) if rows else (_TRANSPOSED, matrix.stride(1))
    return operation, native.address(matrix), _TYPES[matrix.dtype], stride


def _product_of_library(function: Any, left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """out^T = right^T left^T, see `_factor`."""
    (R, K), C = left.shape, right.shape[1]
    (of_left, *left_matrix), (of_right, *right_matrix) = _factor(left), _factor(right)
    one, old = ctypes.c_float(1), ctypes.c_float(int(add))
    operands = of_right, of_left, C, R, K, ctypes.byref(one), *right_matrix, *left_matrix, ctypes.byref(old)
    of_out = native.address(out), _TYPES[out.dtype], out.stride(0)
    handle = torch.cuda.current_blas_handle()
    status = function(handle, *operands, *of_out, _COMPUTE[right.dtype], _DEFAULT_ALGORITHM)
    if status:
        raise RuntimeError(f"cublasGemmEx returned {status}")


@functools.cache
def _gemm() -> Any:
    """cublasGemmEx of the library that torch has loaded, or None."""
    try:
        function = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').split('.')[0]}").cublasGemmEx
    except (OSError, AttributeError):
        return None
    address, number = ctypes.c_void_p, ctypes.c_int
    matrix: list[Any] = [address, number, number]
    function.argtypes = [address, *[number] * 5, address, *matrix, *matrix, address, *matrix, number, number]
    return function
