"""Matrix products in IEEE float32, and norms, by the libraries of torch, in addition to the kernels of this package."""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_EXACT = ("ieee", "none")  # none: not set
ROWS = 4096  # rows of a product over steps, between two additions in float64
PRODUCTS = 2**26  # elements of the results of such products in one call


class ieee_products(contextlib.ContextDecorator):
    """Context manager and decorator in which float32 products are IEEE float32: on a GPU, where TF32 may be allowed,
    and on a CPU, where oneDNN rounds factors to bfloat16 at "medium" on some machines.

    float32 is IEEE float32 in this package, regardless of torch.backends and torch.set_float32_matmul_precision; a
    lower precision is selected by ``precision=`` only. The setting is global to the process, so that concurrent
    products of other threads are IEEE too. The last thread that leaves restores it as it was: a backend whose
    setting followed a more general one follows it again.
    """

    def _recreate_cm(self) -> ieee_products:
        return ieee_products()

    def __enter__(self) -> None:
        try:
            with _lock:
                _open.add(self)
                for kind, value in _lowered():  # also inside another context: it may have been changed since
                    _changed.append((kind, value))
                    if kind is None:
                        torch.set_float32_matmul_precision("highest")
                    else:
                        kind.fp32_precision = "ieee"
        except BaseException:  # a KeyboardInterrupt
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with _lock:
            _open.discard(self)
            if not _open:
                _restore()


# Only the last thread that leaves restores the setting. A thread that restored the value it found could lower the
# precision of another thread's products, or make another thread's setting permanent.
_lock = threading.RLock()  # a signal handler may have products too
_open: set[ieee_products] = set()  # contexts of all threads
_changed: list[tuple[Any, str]] = []  # the changed settings, and their previous values
# the reader below the attribute fp32_precision, which takes several times as long; since torch 2.9
_precision_of: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_KINDS: Any = [(name, getattr(getattr(torch.backends, name), "matmul", None)) for name in ("cuda", "mkldnn")]


def _lowered() -> list[tuple[Any, str]]:
    """(setting, its value) of each setting that allows products below IEEE float32."""
    if _precision_of is not None:
        return [(kind, value) for name, kind in _KINDS if (value := _precision_of(name, "matmul")) not in _EXACT]
    precision = torch.get_float32_matmul_precision()  # for CPU and GPU; allow_tf32 is the same setting
    return [] if precision == "highest" else [(None, precision)]


def are_ieee() -> bool:
    """Whether torch's float32 products are IEEE float32 now."""
    return not _lowered()


def _restore() -> None:
    while _changed:
        kind, value = _changed.pop()
        if kind is None:
            torch.set_float32_matmul_precision(value)
            continue
        kind.fp32_precision = "none"  # not set; the value may be that of the backend or of all backends
        if kind.fp32_precision != value:
            kind.fp32_precision = value


@functools.cache
def _onednn_is_faster() -> bool:
    """Whether torch's float32 products are MKL's on an AMD CPU with AVX-512.

    MKL does not use AVX-512 there. oneDNN, which is part of torch, does: 230 instead of 110 GFLOP/s for 1024 x 1024
    matrices on one core of an EPYC of 2025. torch uses it for bfloat16 only.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_SMALL = 64**3  # multiply-adds below which the overhead of `product` exceeds what it saves


def is_large_on_cpu(left: Tensor, columns: int) -> bool:
    """Whether `product` of left [..., K] and a right [K, columns] may take less time than torch's. Under the transforms
    of torch.func it is torch's, which has rules for them."""
    return (
        left.device.type == "cpu"
        and left.numel() * columns >= _SMALL
        and left.dtype in (torch.float32, torch.float64)
        and not torch._C._are_functorch_transforms_active()
    )


def onednn_serves(left: Tensor, columns: int) -> bool:
    """Whether `product` of left [..., K] and a right [K, columns] is computed by oneDNN."""
    return left.dtype == torch.float32 and is_large_on_cpu(left, columns) and _onednn_is_faster()


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN reads it as if it were
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.mT, bias, "none", [], "")
    return result


# oneDNN keeps a kernel with its memory for every shape, up to a thousand of them. In training on sequences of different
# lengths every call has another number of rows, so products are computed for only a few numbers of rows.
_ADDED_ROWS = (4096, 2048, 1024, 512, 256)


def _unit(rows: int) -> int:
    """A number whose multiples next to `rows` have at most four significant bits."""
    return 1 << max(rows.bit_length() - 4, 0)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [R, K] @ right [K, C] + bias [C], by the fastest library for it. To be called in `ieee_products`; autograd
    does not record it."""
    if not onednn_serves(left, right.shape[1]):
        return left @ right if bias is None else torch.addmm(bias, left, right)
    rows, unit = len(left), _unit(len(left))
    odd = rows % unit
    if not odd:
        return _onednn(left, right, bias)
    if left.shape[1] > right.shape[1]:  # a copy of the result is smaller than one of left
        return torch.cat([_onednn(left[:-odd], right, bias), product(left[-odd:], right, bias)])
    return _onednn(torch.nn.functional.pad(left, (0, 0, 0, unit - odd)), right, bias)[:rows]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [N, D] += left [R, N]^T right [R, D], by the library of `product`."""
    start, rows = 0, left.shape[0]
    if onednn_serves(left, right.shape[1]):
        for count in _ADDED_ROWS:
            while rows - start >= count:
                total += _onednn(left[start : start + count].mT, right[start : start + count])
                start += count
    if start < rows:
        total.addmm_(left[start:].mT, right[start:])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., D] weight^T + bias [..., N], by the library of `product`."""
    return product(x.flatten(0, -2), weight.mT, bias).unflatten(0, x.shape[:-1])


def linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias that are needed, from that of the result of `linear`."""
    rows, (to_x, to_weight, to_bias) = grad.flatten(0, -2), needs
    return (
        product(rows, weight).unflatten(0, x.shape[:-1]) if to_x else None,
        _product_over_rows(rows, x.flatten(0, -2)) if to_weight else None,
        rows.sum(0) if to_bias else None,
    )


def _product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of two matrices with many rows. The narrower one comes first in the product: the other order copies
    the wider one."""
    if left.shape[1] > right.shape[1]:
        return _product_over_rows(right, left).mT.contiguous()
    # a product without addition also if torch.func transforms only `right`: vmap cannot add that to a plain tensor
    if len(left) < _ADDED_ROWS[-1] or torch._C._are_functorch_transforms_active():
        return left.mT @ right
    result = left.new_zeros(left.shape[1], right.shape[1])
    add_product(result, left, right)
    return result


def product_with_states(rows: Tensor, h0: Tensor, hs: Tensor) -> Tensor:
    """The gradient of a recurrent map: the sum over steps of rows_t^T h_{t-1} [R, N], of rows [T, B, R], h0 [B, N] and
    hs [T, B, N]. To be called in `ieee_products`."""
    transposed = h0.mT @ rows[0]  # MKL takes two thirds of the time that it takes without the transposition
    if len(rows) > 1:
        add_product(transposed, hs[:-1].flatten(0, 1), rows[1:].flatten(0, 1))
    return transposed.mT.contiguous()


@torch.no_grad()
def sum_over_rows(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """left^T right of `dtype`, for two tensors [..., *]: products of ROWS rows in their dtype, summed in float64."""
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    if left.shape[1] > right.shape[1]:  # the other order is up to 20 times slower in MKL
        return sum_over_rows(right, left, dtype).mT.contiguous()
    on_cpu = left.device.type == "cpu"
    size = left.shape[1] * right.shape[1]
    rows = ROWS if on_cpu else max(1, PRODUCTS // max(1, size)) * ROWS  # one call of all products saves launches
    sums = []
    for a, b in zip(left.split(rows), right.split(rows), strict=True):
        even = 0 if on_cpu else len(a) - len(a) % ROWS
        if even:
            parts = a[:even].reshape(-1, ROWS, a.shape[1]).mT @ b[:even].reshape(-1, ROWS, b.shape[1])
            sums.append(parts.sum(0, dtype=torch.float64))
        if on_cpu:
            sums.append(_product_over_rows(a, b))
        elif even < len(a) or not even:
            sums.append(a[even:].mT @ b[even:])
    if len(sums) > 1:  # one product alone is not converted: the sizes may be those of a large matrix and of one row
        sums[0] = sums[0].double()
    return functools.reduce(Tensor.add_, sums).to(dtype)


def norms_of_steps(values: Tensor) -> Tensor:
    """Frobenius norms [T], in float64 (on MPS, which has none, in float32), of values [T, ...].

    Squares of float32 leave its range below 1e-19 and above 1e19, where gradients through many steps vanish or explode.
    """
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    norms = values.new_empty(len(values), dtype=exact)
    # Converted a part at a time into one tensor: a new one for each part would leave holes of its size in the heap. A
    # part fits into the caches of a CPU, and is 128 MiB on a GPU, where every part costs two launches.
    part_elements = 1 << 18 if values.device.type == "cpu" else 1 << 24
    rows = max(1, part_elements // max(1, values[:1].numel()))
    wide = values.new_empty((min(rows, len(values)), *values.shape[1:]), dtype=exact)
    dims = tuple(range(1, values.ndim))
    for part, norm in zip(values.split(rows), norms.split(rows), strict=True):
        torch.linalg.vector_norm(wide[: len(part)].copy_(part), dim=dims, out=norm)
    return norms
