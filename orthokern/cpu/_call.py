"""Calls of the CPU kernels. This is the only module that passes addresses to them.

It checks what the kernels rely on: device, dtype, contiguity and number of elements of the tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern import _native
from orthokern._elements import check, elements_of
from orthokern.errors import InputError

_C: Any = _native.module
AVAILABLE, REASON = _C is not None, _native.REASON

_ISA = os.environ.get("ORTHOKERN_ISA")
if AVAILABLE and _ISA and _ISA not in _C.isas():
    AVAILABLE = False
    REASON = f"ORTHOKERN_ISA={_ISA} is not among the instruction sets built and usable here: {', '.join(_C.isas())}"

_DTYPES = {torch.float32: 0, torch.float64: 1}


def build_info() -> dict[str, Any]:
    """Facts about the build and the machine, as `python -m orthokern.explain` prints them."""
    if not AVAILABLE:
        return {}
    info = {name: fact for name, fact in _native.build.items() if name != "contract"}
    info["isa"] = _C.isa()
    info["isas_usable"] = list(_C.isas())
    info["bf16"], info["amx"] = has_bf16(), has_amx()
    info["thread_pool"] = _C.thread_pool()
    return info


def has_bf16() -> bool:
    """Whether the kernels in use have products with bfloat16 factors, and this CPU can run them."""
    return bool(AVAILABLE and _C.has_bf16())


def has_amx() -> bool:
    """Whether those products run in the tile registers of AMX."""
    return bool(AVAILABLE and _C.has_amx())


POOLED_BYTES = 1 << 20


def new(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor. Large ones use memory that is kept between iterations, see csrc/buffer.h."""
    size = math.prod(shape) * dtype.itemsize
    if size < POOLED_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(_C.Buffer(size), dtype=dtype).resize_(shape)  # torch refuses in-place operations on a view


def empty_cache() -> None:
    """Free the memory that is kept for large results."""
    if AVAILABLE:
        _C.empty_cache()


# Arguments of kernels whose dtype is not that of the call.
_OWN_DTYPE = {
    **dict.fromkeys(("tokens", "lengths", "target", "hits", "pairs", "steps"), torch.int64),
    "resets": torch.bool,
    **dict.fromkeys(("lr", "re", "im"), torch.float64),
    **dict.fromkeys(("grad_re", "grad_im", "grad_pairs"), torch.float64),
}


def call(name: str, dtype: torch.dtype, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
    """Call the kernel `name` with the addresses of tensors by name; None is a null pointer.

    The kernel reads and writes as many elements as the sizes imply, so every tensor must have that many, on the CPU and
    of this dtype. An input that is not contiguous, or has torch's negative bit, is copied; results must be
    contiguous.
    """
    copies: list[Tensor] = []  # until the kernel has read them
    arguments = {**sizes, "dtype": _DTYPES[dtype], "threads": torch.get_num_threads()}
    _add_addresses(arguments, name, dtype, elements_of(name, sizes), tensors, copies)
    getattr(_C, name)(arguments)


class Prepared:
    """A kernel call whose fixed arguments are checked once, as in `call`.

    Args:
        fixed: tensors whose values may change, but not their memory; this object keeps references to them.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, sizes: Mapping[str, Any], fixed: Mapping[str, Tensor | None]
    ) -> None:
        self._name, self._dtype, self._elements = name, dtype, elements_of(name, sizes)
        # aliases: assigning to a tensor's ``data`` releases its memory
        self._held: list[Tensor] = [tensor.detach() for tensor in fixed.values() if tensor is not None]
        self._fixed = {**sizes, "dtype": _DTYPES[dtype]}
        _add_addresses(self._fixed, name, dtype, self._elements, fixed, self._held)

    def __call__(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Run the kernel with the other tensors."""
        copies: list[Tensor] = []
        arguments = {**self._fixed, "threads": torch.get_num_threads()}
        _add_addresses(arguments, self._name, self._dtype, self._elements, tensors, copies)
        getattr(_C, self._name)(arguments)


def _add_addresses(
    arguments: dict[str, Any],
    name: str,
    dtype: torch.dtype,
    elements: Mapping[str, int],
    tensors: Mapping[str, Tensor | None],
    copies: list[Tensor],
) -> None:
    """Add the addresses of tensors, whose sizes are checked. Copies of inputs are appended to `copies`."""
    for key, tensor in tensors.items():
        if tensor is None:
            arguments[key] = None
            continue
        expected = _OWN_DTYPE.get(key, dtype)
        if tensor.dtype is not expected or tensor.numel() != elements[key] or not tensor.is_cpu:
            check(name, key, tensor, expected, "cpu", elements[key])
        if not tensor.is_contiguous() or tensor.is_neg():
            tensor = tensor.resolve_neg().contiguous()
            copies.append(tensor)
        address = arguments[key] = tensor.data_ptr()
        if not address and elements[key]:  # a null pointer would stand for None
            raise InputError(f"{name}: {key} has no memory: its storage was freed")
