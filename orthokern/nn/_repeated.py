"""Calls without gradients that are like the call before: a single native call checks the parameters and runs.

For one step of one sequence, everything that Python does around the kernel takes longer than the kernel. A call of a
few steps of one layer that comes for the second time has its arguments made ready: addresses of parameters, and tensors
that were made of parameters (a sum of biases, the exponential of a matrix). The next calls check that module, input
and parameters are those of that call, in kind, place and size; that parameters of which something was made hold the
same bytes as then, because a change through ``Tensor.data`` counts no version up, is checked in the native call, which
runs nothing otherwise. Whatever has changed takes the ordinary way, which is the only one that raises errors.

Letters: B batch, T time, N hidden_size, D input_size.
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

MOST_PATIENCE = 64  # where every call finds new parameters, as in training
_SETTINGS = (bool, int, float, str, type(None))  # types of attributes that are settings


class _Part(NamedTuple):
    """A parameter or buffer as it was.

    There is no reference to it: hooks of a parameter may hold the module, and torch.utils.swap_tensors refuses what has
    a weak one."""

    kind: type
    address: int  # of memory that the prepared call holds
    shape: torch.Size
    dtype: torch.dtype


class Known(NamedTuple):
    """A call as it was; after the second such call, with all that the next one needs."""

    key: tuple[Any, ...]  # of the input and hx
    names: tuple[str, ...]  # settings in vars(module)
    values: tuple[Any, ...]  # what they were
    parts: list[_Part]
    leaf: tuple[Any, ...]  # the arguments of dispatch.cpu_leaf, and what it gave
    states: tuple[int, ...]  # shape of the states
    patience: int = 1  # calls to wait for before all is made ready
    wait: int = 1  # of them, what is left
    # of x, h0 and the states; what else a backward reads, or None if it has not run
    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, ...] | None] | None = None
    backward: Backward | None = None  # None: not for gradients
    zeros: Tensor | None = None  # h0 for no hx

    def call(
        self, module: Recurrent, x: Tensor, hx: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]] | None:
        """The states, h0 and what else a backward reads; or None if the parameters hold other bytes: then the next
        calls are not made ready so soon."""
        hs = torch.empty(self.states, dtype=x.dtype)
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
    """Whether settings and parameters are those of the call before, but for the bytes."""
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
    """What is ready for a call that is like the one before but for bytes, else None. one_step: input has no dimension
    of time, nor has output."""
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
    """Make `repeated` ready for the next such call, if this is the second. data: input as [T,B,D]; the call has been
    checked, is of one layer and of floats."""
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
        zeros = torch.zeros(B, module.hidden_size, dtype=data.dtype) if hx is None else None
        start: Any = zeros if hx is None else hx[0]
        run, made = module._prepared(data, start, parts)
        backward = None
        if made is not None:
            made = (*made, *module._backward_kept("l0"))
            plan = module._backward_plan(data, {name: module._tensor(name) for name in module._shapes}, made)
            backward = Backward(plan, T, ready=True)
    _known[module] = seen._replace(run=run, backward=backward, zeros=zeros)
