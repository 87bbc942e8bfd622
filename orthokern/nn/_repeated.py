"""Repeated calls of a module with a few rows: one native call checks the parameters and runs the scan.

For one step of one sequence, the Python code around the kernel takes longer than the kernel. If two consecutive calls
of one layer agree, the kernel's arguments are kept for the next call: addresses of parameters, and tensors computed
from parameters (a sum of biases, the exponential of a matrix). A later call uses them if module, input and parameters
have the same types, addresses and sizes. The native call compares the bytes of the parameters from which tensors were
computed with copies, because a change through ``Tensor.data`` does not increase the version counter; if they differ, it
computes nothing. In every other case the ordinary path runs, which alone raises errors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern.cpu._steps import MOST_ROWS, Backward
from orthokern.ops._alone import quiet
from orthokern.ops._taps import SINKS

if TYPE_CHECKING:
    from orthokern.nn._recurrent import Recurrent

MOST_PATIENCE = 64  # the most calls between two attempts if the parameters change at every call, as in training
_SETTINGS = (bool, int, float, str, type(None))  # types of attributes that are settings


class _Part(NamedTuple):
    """A parameter or buffer at the time of the call.

    There is no reference to it: hooks of a parameter may hold the module, and torch.utils.swap_tensors refuses what has
    a weak one."""

    kind: type
    address: int  # of memory that the prepared call holds
    shape: torch.Size
    dtype: torch.dtype


class Known(NamedTuple):
    """A call; after the second such call, also the arguments of the kernel."""

    key: tuple[Any, ...]  # of the input and hx
    names: tuple[str, ...]  # settings in vars(module)
    values: tuple[Any, ...]  # their values at the call
    parts: list[_Part]
    leaf: tuple[Any, ...]  # the arguments of dispatch.cpu_leaf, and its result
    states: tuple[int, ...]  # shape of the states
    patience: int = 1  # agreeing calls before the arguments are prepared
    wait: int = 1  # how many of them are left
    # of (x, h0, states): what else a backward reads, or None if the parameters have changed
    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, ...] | None] | None = None
    backward: Backward | None = None  # None: not for gradients
    zeros: Tensor | None = None  # h0 if there is no hx

    def call(
        self, module: Recurrent, x: Tensor, hx: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]] | None:
        """The states, h0 and what else a backward reads; or None if the parameters' bytes have changed; the next
        attempt to prepare a call is then made later."""
        hs = torch.empty(self.states, dtype=x.dtype, device="cpu")
        h0 = self.zeros if hx is None else hx
        if self.run is not None and h0 is not None and (more := self.run(x, h0, hs)) is not None:
            if self.patience > 1:
                _known[module] = self._replace(patience=1)
            return hs, h0, more
        patience = min(2 * self.patience, MOST_PATIENCE)
        _known[module] = self._replace(run=None, backward=None, patience=patience, wait=patience)
        return None


# outside the module so that it can be copied and pickled
_known: weakref.WeakKeyDictionary[Recurrent, Known] = weakref.WeakKeyDictionary()


def _plain(value: Tensor) -> bool:
    return (
        value.is_cpu
        and value.layout is torch.strided
        and value.is_contiguous()
        and not value.is_neg()
        and not value.is_nested
    )


def _key(input: Tensor, hx: Any, one_step: bool) -> tuple[Any, ...]:
    return input.shape, input.dtype, None if hx is None else hx.shape, one_step


def _parts(module: Recurrent) -> list[Tensor]:
    return [*module._parameters.values(), *module._buffers.values()]  # type: ignore[list-item]


def _as_then(module: Recurrent, known: Known) -> bool:
    """Whether settings and parameters, except for their bytes, are those of the recorded call."""
    parts = _parts(module)
    if tuple(map(vars(module).get, known.names)) != known.values or len(parts) != len(known.parts):
        return False
    try:
        for tensor, (kind, address, shape, dtype) in zip(parts, known.parts, strict=True):
            if type(tensor) is not kind or tensor.data_ptr() != address or tensor.dtype is not dtype:
                return False
            if tensor.shape != shape or not tensor.is_contiguous():
                return False
    except RuntimeError:  # a layout without an address
        return False
    op, backend, dtype, sizes, leaf = known.leaf
    return dispatch.cpu_leaf(op, backend, dtype, **sizes) is leaf


def known_call(module: Recurrent, input: Any, hx: Any, one_step: bool) -> Known | None:
    """The prepared call if it fits this one, except for the parameters' bytes, which are not compared here; else None.
    one_step: input and output have no dimension of time."""
    if torch.compiler.is_compiling():  # a guard on a key of _known would depend on the modules that exist
        return None
    known = _known.get(module)
    if known is None or known.run is None or type(input) is not Tensor or SINKS or not quiet():
        return None
    if hx is not None and (type(hx) is not Tensor or hx.dtype is not input.dtype or not _plain(hx)):
        return None
    if _key(input, hx, one_step) != known.key or not _plain(input) or not _as_then(module, known):
        return None
    return known


def remember(
    module: Recurrent, input: Tensor, hx: Tensor | None, one_step: bool, data: Tensor, leaf: tuple[Any, ...]
) -> None:
    """Record a call, or prepare the next one if this is the second that agrees. data: input as [T,B,D]; the call is
    checked, of one layer and of floats."""
    T, B = data.shape[:2]
    parts = _parts(module)
    if T * B > MOST_ROWS or (hx is None and module.learned_h0) or not all(map(_plain, (input, data, *parts))):
        return
    if hx is not None and not _plain(hx):
        return
    key, seen = _key(input, hx, one_step), _known.get(module)
    if seen is None or seen.key != key or seen.run is not None or not _as_then(module, seen):
        names = tuple(name for name, value in vars(module).items() if type(value) in _SETTINGS)
        shape = (B, module.hidden_size) if one_step else (T, B, module.hidden_size)
        kept = [_Part(type(part), part.data_ptr(), part.shape, part.dtype) for part in parts]
        _known[module] = Known(key, names, tuple(map(vars(module).get, names)), kept, leaf, shape)
        return
    if seen.wait > 1:
        _known[module] = seen._replace(wait=seen.wait - 1)
        return
    with torch.inference_mode(False), torch.no_grad():
        zeros = torch.zeros(B, module.hidden_size, dtype=data.dtype, device="cpu") if hx is None else None
        start: Any = zeros if hx is None else hx[0]
        run, made = module._prepared(data, start, parts)
        backward = None
        if made is not None:
            made = (*made, *module._backward_kept("l0"))
            plan = module._backward_plan(data, {name: module._tensor(name) for name in module._shapes}, made)
            backward = Backward(plan, T, ready=True)
    _known[module] = seen._replace(run=run, backward=backward, zeros=zeros)
