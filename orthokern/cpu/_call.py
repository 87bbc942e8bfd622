"""Calls into the CPU kernels: the only module that passes addresses to them.

Tensors are checked for what the kernels rely on: device, dtype, contiguity.
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
    REASON = f"the native module is not built ({error}): run `pip install -e .` with a C++17 compiler at hand"

_ISA = os.environ.get("ORTHOKERN_ISA")
if AVAILABLE and _ISA and _ISA not in _C.isas():
    AVAILABLE = False
    REASON = f"ORTHOKERN_ISA={_ISA} is not among the instruction sets built and usable here: {', '.join(_C.isas())}"

_DTYPES = {torch.float32: 0, torch.float64: 1}


def build_info() -> dict[str, Any]:
    """How the module was built and what it runs on: version, compiler, isas, isa, cuda, cuda_reason, thread_pool."""
    if not AVAILABLE:
        return {}
    info: dict[str, Any] = json.loads(_C.build_info())
    info["isa"] = _C.isa()
    info["isas_usable"] = list(_C.isas())
    info["thread_pool"] = _C.thread_pool()
    return info


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two CPU tensors have one dtype and shape and the same bits (their values, where a copy would be needed to
    tell, or without the native module)."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not AVAILABLE or not a.is_contiguous() or not b.is_contiguous():
        return torch.equal(a, b)
    same: bool = _C.same_bytes(a.data_ptr(), b.data_ptr(), a.numel() * a.element_size())
    return same


POOLED_BYTES = 1 << 20


def new(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor; large ones from memory that is kept between iterations (csrc/buffer.h says why)."""
    if math.prod(shape) * dtype.itemsize < POOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_C.Buffer(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def empty_cache() -> None:
    """Give the memory that waits for the next large result back to the system."""
    if AVAILABLE:
        _C.empty_cache()


# Of the tensors that a kernel is given, those whose dtype is not that of the call.
_OWN_DTYPE = {
    **dict.fromkeys(("tokens", "lengths", "target", "definite", "hits", "pairs"), torch.int64),
    "resets": torch.bool,
    **dict.fromkeys(("lr", "distance", "image", "v_rows", "re", "im"), torch.float64),
    **dict.fromkeys(("grad_re", "grad_im", "grad_pairs"), torch.float64),
    **dict.fromkeys(("ids", "target_ids"), torch.uint8),  # any integer dtype: its bytes
}


class Prepared:
    """A kernel call whose tensors are checked once, but for those of `varying`, which are given at every call: of the
    dtype and contiguous, as the caller has made sure.

    parts: what the other tensors are, or were made of, contiguous. What the kernel does not read itself is compared
    with a copy before it runs.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, sizes: Mapping[str, float], tensors: Mapping[str, Tensor | None],
        varying: tuple[str, ...], parts: Sequence[Tensor],
    ) -> None:  # fmt: skip
        # not the parameters themselves: their hooks may hold what has this call
        fixed = {
            key: t.detach().contiguous() for key, t in tensors.items() if t is not None and key not in varying
        }  # fmt: skip
        read = {t.data_ptr() for t in fixed.values()}
        made_of = [part.detach() for part in parts if part.data_ptr() not in read]
        copies = [part.clone() for part in made_of]
        compared = [(a.data_ptr(), b.data_ptr(), a.nbytes) for a, b in zip(made_of, copies, strict=True)]
        arguments = _checked(dtype, sizes, {**tensors, **fixed}, [])
        # also so that no other tensor gets the memory: callers tell by addresses whether a tensor is still the same
        self._held = *fixed.values(), *made_of, *copies
        self._run = getattr(_C, f"prepare_{name}")(arguments, varying, compared).run

    def __call__(self, *varying: Tensor | None) -> bool:
        """Whether the parts were as before and the kernel ran. None is a null pointer."""
        ran: bool = self._run(torch.get_num_threads(), *[0 if t is None else t.data_ptr() for t in varying])
        return ran


def call(name: str, dtype: torch.dtype, sizes: Mapping[str, float], tensors: Mapping[str, Tensor | None]) -> None:
    """Call the kernel `name` with the addresses of tensors by their names; those that are None are null pointers there.

    Tensors are on the CPU and of this dtype, or refused. An input that is not contiguous is copied; results must be.
    """
    kept: list[Tensor] = []  # copies, until the kernel has read them
    getattr(_C, name)(_checked(dtype, sizes, tensors, kept))


def _checked(
    dtype: torch.dtype, sizes: Mapping[str, float], tensors: Mapping[str, Tensor | None], kept: list[Tensor]
) -> dict[str, Any]:
    """What a kernel is given; copies that it reads join `kept`."""
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
