"""Calls of the CPU kernels. This is the only module that passes addresses to them.

It checks what the kernels rely on: device, dtype and contiguity of the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_C: Any
try:
    from orthokern import _C  # type: ignore[no-redef]

    AVAILABLE = True
    REASON = ""
except ImportError as error:
    _C = None
    AVAILABLE = False
    REASON = f"the native module is not built ({error}): install a C++17 compiler and run `pip install -e .`"

_ISA = os.environ.get("ORTHOKERN_ISA")
if AVAILABLE and _ISA and _ISA not in _C.isas():
    AVAILABLE = False
    REASON = f"ORTHOKERN_ISA={_ISA} is not among the instruction sets built and usable here: {', '.join(_C.isas())}"

_DTYPES = {torch.float32: 0, torch.float64: 1}


def build_info() -> dict[str, Any]:
    """Facts about the build and the machine, as `python -m orthokern.explain` prints them."""
    if not AVAILABLE:
        return {}
    info: dict[str, Any] = json.loads(_C.build_info())
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


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two CPU tensors have the same dtype, shape and bits. Without the native module, and for tensors that are
    not contiguous, values are compared instead of bits."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not AVAILABLE or not a.is_contiguous() or not b.is_contiguous():
        return torch.equal(a, b)
    same: bool = _C.same_bytes(a.data_ptr(), b.data_ptr(), a.numel() * a.element_size())
    return same


POOLED_BYTES = 1 << 20


def new(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor. Large ones use memory that is kept between iterations, see csrc/buffer.h."""
    if math.prod(shape) * dtype.itemsize < POOLED_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(_C.Buffer(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def as_bytes(ids: Tensor) -> Tensor:
    """Ids of any integer dtype as the bytes [n] that a kernel reads. A dimension of one may have any stride, also in a
    contiguous tensor, with which `view` refuses another dtype."""
    return ids.contiguous().as_strided((ids.numel(),), (1,)).view(torch.uint8)


def empty_cache() -> None:
    """Free the memory that is kept for large results."""
    if AVAILABLE:
        _C.empty_cache()


# Arguments of kernels whose dtype is not that of the call.
_OWN_DTYPE = {
    **dict.fromkeys(("tokens", "lengths", "target", "definite", "hits", "pairs"), torch.int64),
    "resets": torch.bool,
    **dict.fromkeys(("lr", "distance", "image", "v_rows", "re", "im"), torch.float64),
    **dict.fromkeys(("grad_re", "grad_im", "grad_pairs"), torch.float64),
    **dict.fromkeys(("ids", "target_ids"), torch.uint8),  # any integer dtype: its bytes
}


class Prepared:
    """A kernel call whose tensors are checked once. Those of `varying` are passed in every call; the caller guarantees
    that they are contiguous and of the dtype.

    parts: contiguous tensors from which the other tensors were computed, or which are among them. Those that the kernel
    does not read are compared with a copy before each call.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, sizes: Mapping[str, float], tensors: Mapping[str, Tensor | None],
        varying: tuple[str, ...], parts: Sequence[Tensor],
    ) -> None:  # fmt: skip
        # detached, since hooks of a parameter may have a reference to the owner of this call
        fixed = {key: t.detach().contiguous() for key, t in tensors.items() if t is not None and key not in varying}
        read = {t.data_ptr() for t in fixed.values()}
        made_of = [part.detach() for part in parts if part.data_ptr() not in read]
        copies = [part.clone() for part in made_of]
        compared = [(a.data_ptr(), b.data_ptr(), a.nbytes) for a, b in zip(made_of, copies, strict=True)]
        arguments = _checked(dtype, sizes, {**tensors, **fixed}, [])
        # references to all, so that the addresses stay valid, and are not reused for other tensors
        self._held = *fixed.values(), *made_of, *copies
        self._run = getattr(_C, f"prepare_{name}")(arguments, varying, compared).run

    def __call__(self, *varying: Tensor | None) -> bool:
        """Whether the parts were as before and the kernel ran. None is a null pointer."""
        ran: bool = self._run(torch.get_num_threads(), *[0 if t is None else t.data_ptr() for t in varying])
        return ran


def call(name: str, dtype: torch.dtype, sizes: Mapping[str, float], tensors: Mapping[str, Tensor | None]) -> None:
    """Call the kernel `name` with the addresses of tensors by name; None is a null pointer.

    Tensors must be on the CPU and of this dtype. An input that is not contiguous is copied; results must be contiguous.
    """
    kept: list[Tensor] = []  # copies, until the kernel has read them
    getattr(_C, name)(_checked(dtype, sizes, tensors, kept))


def _checked(
    dtype: torch.dtype, sizes: Mapping[str, float], tensors: Mapping[str, Tensor | None], kept: list[Tensor]
) -> dict[str, Any]:
    """The arguments of a kernel. Copies of inputs are appended to `kept`."""
    arguments: dict[str, Any] = {**sizes, "dtype": _DTYPES[dtype], "threads": torch.get_num_threads()}
    for key, tensor in tensors.items():
        if tensor is None:
            arguments[key] = None
            continue
        if not tensor.is_cpu:
            raise ValueError(f"{key} is on {tensor.device}: the cpu backend takes CPU tensors")
        expected = _OWN_DTYPE[key] if key in _OWN_DTYPE else dtype
        if tensor.dtype is not expected:
            raise ValueError(f"{key} is {tensor.dtype}, expected {expected}")
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            kept.append(tensor)
        arguments[key] = tensor.data_ptr()
    return arguments
