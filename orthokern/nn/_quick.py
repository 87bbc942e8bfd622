"""A fast path through the forward of a recurrence, with few and cheap checks.

``Recurrent.forward`` tries it first. A call with plain CPU tensors in the layout [T,B,D] runs the op of each layer
directly. For other arguments, also invalid ones, the fast path returns None, and the full path runs, which handles all
cases and errors. For one step of one sequence the checks of the full path take several times as long as the step.
Calls that repeat the previous one are faster still: ``orthokern/nn/_repeated.py``.

With gradients, a call of a few steps of one layer is a single node of the autograd graph, `_Steps`. Its backward is one
native call that gives every gradient (``orthokern/cpu/_steps.py``). Where the backward itself is recorded
(create_graph), or run for many cotangents at once, the node runs the full path again and derives that; also where hooks
of saved tensors have changed what a repeated call would read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orthokern import dispatch
from orthokern.cpu._steps import MOST_ROWS, Backward
from orthokern.nn._repeated import Known, known_call, remember
from orthokern.ops._alone import quiet, vmapped
from orthokern.ops._engine import again, save_tensors, saved_tensors
from orthokern.ops._taps import SINKS, record

if TYPE_CHECKING:
    from orthokern.nn._recurrent import Recurrent


# a call of a kernel of x [T,B,D], h0 [B,N] and states to write: what else a backward reads if the parameters hold the
# bytes of before and it has written, else None; and what `_quick_states` gives for the backward's plan, or None for a
# call without gradients only
Ready = tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, ...] | None], tuple[Tensor | None, ...] | None]


def held(module: Recurrent) -> tuple[torch.dtype, dict[str, Tensor]] | None:
    """(dtype, parameters) if all are plain CPU tensors of one dtype that the kernels support, and of their shapes; else
    None."""
    shapes = module.__dict__.get("_shapes")
    parameters: dict[str, Any] = module._parameters or module._buffers
    first = parameters.get("weight_ih_l0")
    if not shapes or first is None:
        return None
    dtype = first.dtype
    if dtype is not torch.float32 and dtype is not torch.float64:
        return None
    for name, shape in shapes.items():
        value = parameters.get(name)
        kind = type(value)
        if value is None or (kind is not nn.Parameter and kind is not Tensor):
            return None
        if value.dtype is not dtype or not value.is_cpu or value.shape != shape or value.layout is not torch.strided:
            return None
    return dtype, parameters


def _plain(value: Tensor) -> bool:
    return value.is_cpu and value.layout is torch.strided and not value.is_nested and not value.is_neg()


def _start(module: Recurrent, suffix: str, data: Tensor, given: Tensor | None) -> Tensor:
    """h0 [B,N] of one layer."""
    if given is not None:
        return given
    B, N = data.shape[1], module.hidden_size
    if module.learned_h0:
        return module._tensor(f"h0_{suffix}").expand(B, N)
    return torch.zeros(B, N, dtype=module._tensor("weight_ih_l0").dtype, device="cpu")


def _states(
    module: Recurrent, leaf: Any, data: Tensor, hx: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """(hs, h0, what else a backward reads, what was made of parameters) of a module of one layer, without gradients."""
    h0 = _start(module, "l0", data, hx if hx is None else hx[0])
    hs, more, made = module._quick_states(leaf, "l0", data, h0)
    return hs, h0, more, made


def _last(hs: Tensor) -> Tensor:
    return (hs if len(hs) == 1 else hs[-1:]).clone()


class _Steps(torch.autograd.Function):
    """(hs [T,B,N], h_n [1,B,N]) of a module of one layer. Arguments: the module, its leaf, the prepared call or None,
    x [T,B,D], hx, and the parameters in the order of ``module._shapes``."""

    @staticmethod
    def forward(
        ctx: Any, module: Recurrent, leaf: Any, known: Known | None, x: Tensor, hx: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = None if known is None else known.call(module, x, hx)
        ctx.made = ()
        if found is None or known is None:
            hs, h0, more, made = _states(module, leaf, x, hx)
            ctx.made, ctx.backward_ready = (*made, *module._backward_kept("l0")), None
        else:
            (hs, h0, more), ctx.backward_ready = found, known.backward
            ctx.given = x, hx, *parameters
        ctx.module, ctx.count = module, len(parameters)
        # saved with the parameters: both may be exchanged (torch.func.functional_call) or changed before the backward
        ctx.buffers = module._matrix_buffers("l0")
        ctx.set_materialize_grads(False)
        # the same number and shapes in both cases, which torch.utils.checkpoint requires
        save_tensors(ctx, x, hx, *parameters, h0 if hx is None else None, hs, *more, *map(module._tensor, ctx.buffers))
        return hs, _last(hs)

    @staticmethod
    def backward(ctx: Any, grad_hs: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_tensors(ctx)
        if grad_hs is None and grad_last is None:
            return (None,) * (ctx.count + 5)
        end, kept = ctx.count + 2, len(saved) - len(ctx.buffers)
        buffers, saved = dict(zip(ctx.buffers, saved[kept:], strict=True)), saved[:kept]
        again = torch.is_grad_enabled() or vmapped() or torch.compiler.is_compiling()
        if again or (ctx.backward_ready is not None and not _as_saved(ctx, saved)):
            return None, None, None, *_derived(ctx, saved[:end], buffers, (grad_hs, grad_last))
        return None, None, None, *_gradients(ctx, saved, grad_hs, grad_last)


def _as_saved(ctx: Any, saved: tuple[Any, ...]) -> bool:
    """Whether a backward that is ready may read these tensors, and the parameters in place: hooks of saved tensors may
    return copies, in any layout."""
    if not all(map(operator.is_, saved, ctx.given)):
        return False
    for tensor in saved[ctx.count + 2 :]:
        if tensor is not None and (tensor.dtype is not saved[0].dtype or not tensor.is_contiguous()):
            return False
    return True


def _whole(hs: Tensor, grad_hs: Tensor | None, grad_last: Tensor | None) -> Tensor:
    """The gradient of all states, contiguous."""
    if grad_hs is None:
        grad_hs = torch.zeros_like(hs)
    if grad_last is not None:
        if len(hs) == 1:
            grad_hs = grad_hs + grad_last
        else:
            grad_hs = grad_hs.clone(memory_format=torch.contiguous_format)
            grad_hs[-1] += grad_last[0]
    return grad_hs.resolve_neg().contiguous()


def _gradients(
    ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, grad_last: Tensor | None
) -> list[Tensor | None]:
    module, end = ctx.module, ctx.count + 2
    x, hx, *values = saved[:end]
    start, hs, *more = saved[end:]
    h0, backward = start if hx is None else hx, ctx.backward_ready
    if backward is None:
        x, h0 = x.contiguous(), h0.contiguous()
        plan = module._backward_plan(x, dict(zip(module._shapes, values, strict=True)), ctx.made)
        backward = Backward(plan, len(hs))
    varying = (x, h0, _whole(hs, grad_hs, grad_last), hs, *more)
    needs = ctx.needs_input_grad[3:]
    if hx is not None and module.learned_h0:  # the learned states are not used
        needs = (*needs[:2], *(need and name != "h0_l0" for name, need in zip(module._shapes, needs[2:], strict=True)))
    found, norm = backward(varying, needs, bool(SINKS))
    if norm is not None:
        record(module._op()[0], norm)
    if hx is None and module.learned_h0:
        found = [
            grad.sum((0, 1)) if name == "h0_l0" and grad is not None else grad
            for name, grad in zip((None, None, *module._shapes), found, strict=True)
        ]
    return found


def _holding(module: Recurrent, values: dict[str, Any], buffers: dict[str, Any]) -> Recurrent:
    """A module like this one with other parameters and buffers. torch.func.functional_call exchanges those of the
    module itself, which other threads may be using."""
    found = object.__new__(type(module))
    held = {"_parameters": {**module._parameters, **values}, "_buffers": {**module._buffers, **buffers}}
    vars(found).update(vars(module), **held)
    return found


def _derived(
    ctx: Any, inputs: tuple[Any, ...], buffers: dict[str, Any], grads: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients by the full path, which is differentiable."""
    module = ctx.module

    def function(tensors: list[Any]) -> tuple[Tensor, Tensor]:
        x, hx, *values = tensors
        turned = x.transpose(0, 1) if module.batch_first else x
        holding = _holding(module, dict(zip(module._shapes, values, strict=True)), buffers)
        output, last = holding._full_forward(turned, hx, None, None)
        assert isinstance(output, Tensor)
        return output.transpose(0, 1) if module.batch_first else output, last

    return again(function, list(inputs), ctx.needs_input_grad[3:], grads)


def _laid_out(module: Recurrent, hs: Tensor, one_step: bool) -> Tensor:
    if one_step:
        return hs.squeeze(0)
    return hs.transpose(0, 1) if module.batch_first else hs


def forward(
    module: Recurrent, given: Any, hx: Any, recorded: bool, one_step: bool = False
) -> tuple[Tensor, Tensor] | None:
    """The result of ``Recurrent.forward``, or None if the full path has to run. recorded: whether gradients are
    recorded. one_step: input and output have no dimension of time."""
    known = known_call(module, given, hx, one_step)
    if known is not None and not recorded and (ran := known.call(module, given, hx)) is not None:
        if one_step:
            return ran[0], ran[0].clone().unsqueeze_(0)
        return _laid_out(module, ran[0], False), _last(ran[0])
    if known is not None and recorded and known.backward is not None:
        data = given.transpose(0, 1) if module.batch_first else given
        parameters: Any = module._parameters or module._buffers
        hs, last = _Steps.apply(module, known.leaf[-1], known, data, hx, *[parameters[name] for name in module._shapes])
        return _laid_out(module, hs, False), last
    if type(given) is not Tensor:
        return None
    input = given.unsqueeze(int(module.batch_first)) if one_step else given
    if module.bidirectional or not quiet():
        return None
    parts = held(module)
    if parts is None or not _plain(input):
        return None
    dtype, parameters = parts
    shape, layers, N = input.shape, module.num_layers, module.hidden_size
    ids = input.dtype is not dtype
    if ids:
        if input.dtype is not torch.int64 or len(shape) != 2:
            return None
    elif len(shape) != 3 or shape[2] != module.input_size:
        return None
    data = input.transpose(0, 1) if module.batch_first else input
    T, B = data.shape[:2]
    if T < 1 or B < 1 or (module.training and module.dropout > 0.0):
        return None
    if hx is not None and (type(hx) is not Tensor or hx.dtype is not dtype or not _plain(hx)):
        return None
    if hx is not None and hx.shape != (layers, B, N):
        return None
    op, sizes = module._op()
    leaf = dispatch.cpu_leaf(op, module.backend, dtype, **sizes)
    if leaf is None:
        return None
    if layers == 1 and not SINKS:
        found = None
        if not recorded:
            hs = _states(module, leaf, data, hx)[0]
            found = hs, _last(hs)
            if T * B <= MOST_ROWS and not ids:
                remember(module, given, hx, one_step, data, (op, module.backend, dtype, sizes, leaf))
        elif T * B <= MOST_ROWS and not ids and module._one_node():
            found = _Steps.apply(module, leaf, None, data, hx, *[parameters[name] for name in module._shapes])
            if known is None:
                remember(module, given, hx, one_step, data, (op, module.backend, dtype, sizes, leaf))
        if found is not None:
            return _laid_out(module, found[0], one_step), found[1]
    recorded = recorded or bool(SINKS)
    ends = []
    for layer in range(layers):
        suffix = f"l{layer}"
        h0 = _start(module, suffix, data, hx if hx is None else hx[layer])
        if recorded:
            data, last = module._quick_scan(suffix, data, h0)
        else:
            data = module._quick_states(leaf, suffix, data, h0)[0]
            last = data[-1]
        ends.append(last)
    return _laid_out(module, data, one_step), torch.stack(ends)
