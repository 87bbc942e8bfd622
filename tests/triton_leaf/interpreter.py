"""Triton's interpreter, for the process that imports this before any kernel: kernels then run in NumPy, on CPU tensors.

Whether a kernel is compiled or interpreted is decided when it is decorated, so both cannot happen in one process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

told = os.environ.get("TRITON_INTERPRET") == "1"
assert told or "triton.language" not in sys.modules, "Triton was imported before it was told to interpret"
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402

_patch_tensor = interpreter._patch_lang_tensor
_call = interpreter.InterpretedFunction.__call__
# Triton 3.2 asks `if not mask`, and so stores without one where a mask of one element is false. No kernel here
# branches on a tensor, so there all tensors may be true.
FALSE_IS_NO_MASK = triton.__version__.startswith("3.2.")


def _patch(tensor: Any, *scope: Any) -> None:
    """As Triton does, but a number is one element of an array, which NumPy 2.4 no longer converts to an index."""
    _patch_tensor(tensor, *scope)
    set_attr = scope[0].set_attr if scope else setattr  # a scope undoes patches; Triton up to 3.4 keeps them
    set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    if FALSE_IS_NO_MASK:
        set_attr(tensor, "__bool__", lambda self: True)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function of ours without patching triton.language once more: the kernel's launch has done so.

    Triton patches it at every call, which is a third of the time that these tests take.
    """
    if self.fn.__module__.startswith("triton."):
        return _call(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


def _all_ones(self: Any, type_: Any) -> Any:
    """All bits set, of a mask too: what ~mask is made with."""
    if type_ == tl.int1:
        return interpreter.TensorHandle(np.ones(1, np.bool_), tl.int1)
    return _ones(self, type_)


if not hasattr(interpreter.InterpreterBuilder, "get_int1_ty"):  # Triton 3.2 and 3.3
    _ones = interpreter.InterpreterBuilder.get_all_ones_value
    interpreter.InterpreterBuilder.get_all_ones_value = _all_ones
    interpreter.InterpreterBuilder.get_int1_ty = lambda self: tl.int1
interpreter._patch_lang_tensor = _patch
interpreter.InterpretedFunction.__call__ = _call_device_function


def argmax_as_compiled(values: Any, axis: int) -> Any:
    """tl.argmax of one axis, by the comparison of the compiled reduction: of two values, the right one remains if
    either is a NaN. The interpreter takes NumPy's argmax instead, for which a NaN is the largest."""
    numbers = values.handle.data
    assert numbers.ndim == 1 and axis == 0
    best = 0
    for index in range(1, len(numbers)):
        if not numbers[best] >= numbers[index]:
            best = index
    return tl.tensor(interpreter.TensorHandle(np.array([best], dtype=np.int32), tl.int32), tl.int32)
