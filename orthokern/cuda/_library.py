"""Products of cuBLAS in a precision of their own."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern.cuda import _call as native

Product = Callable[[Tensor, Tensor, Tensor], Any]

# cudaDataType_t, cublasComputeType_t, cublasOperation_t, cublasGemmAlgo_t
_FLOAT32, _FAST_TF32, _PLAIN, _TRANSPOSED, _DEFAULT_ALGORITHM = 0, 77, 0, 1, -1


def _ieee_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    torch.mm(left, right, out=out)


def product(device: torch.device, *, tf32: bool) -> Product:
    """A function that sets ``out`` [R, C] to left [R, K] @ right [K, C] on the current stream of the current device.

    In IEEE float32, to be called in `ieee_products`, or, where the library can be called, in TF32. torch has one
    precision for the process, and to lower it would lower that of other threads.
    """
    function = _gemm() if tf32 and device.type == "cuda" else None
    return _ieee_product if function is None else functools.partial(_tf32_product, function)


def _tf32_product(function: Any, left: Tensor, right: Tensor, out: Tensor) -> None:
    """The library has columns side by side where these have rows: out^T = right^T left^T."""
    (R, K), C = left.shape, right.shape[1]
    contiguous = right.stride(1) == 1 and right.stride(0) >= C
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    of_right = native.address(right), _FLOAT32, right.stride(0 if contiguous else 1)
    of_left, of_out = ((native.address(rows), _FLOAT32, rows.stride(0)) for rows in (left, out))
    asked = _PLAIN if contiguous else _TRANSPOSED, _PLAIN, C, R, K, ctypes.byref(one), *of_right, *of_left
    asked_of_out = ctypes.byref(zero), *of_out, _FAST_TF32, _DEFAULT_ALGORITHM
    status = function(torch.cuda.current_blas_handle(), *asked, *asked_of_out)
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
