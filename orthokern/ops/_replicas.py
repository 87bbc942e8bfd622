"""Replicas: one call of a scan for R models of equal sizes.

``second`` [R, N, K] of the map, or w [R, 3N, N] of a GRU, makes it such a call. Every other tensor either has R too, in
front (x, states and their gradients behind T: [T, R, B, N]), or lacks it and is shared by all models. Results have R in
the same places, the gradients of what is shared included; grad_norm is [R, T]. In memory, results [T, R, ...] on a CPU
have R in front, where vmap has it too: nothing is copied between layers, and each model is contiguous.

A leaf is given every tensor with R but the x of a scan. One whose row in SUPPORT names the feature "replicas" serves
the call at once; for the others ``function_of`` calls the leaf for each model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._scan_contract import GruInputs, GruOptions, GruStates, Map, ScanInputs, ScanOptions
from orthokern.errors import InputError
from orthokern.ops._second import Taken

# Where R is in a tensor, and how many dimensions the tensor has without it. x: features or states; token ids have one
# dimension less.
_FRONT = {
    **dict.fromkeys(("first", "second", "h0", "w", "weight", "reset_state"), 2),
    **dict.fromkeys(("scale", "bias", "act_param", "lengths"), 1),
}


def count(second: Tensor) -> int | None:
    """R, or None for a call of one model. second: [R, N, K] or [N, K], or w of a GRU."""
    return int(second.shape[0]) if second.ndim == 3 else None


def is_shared(x: Tensor) -> bool:
    """Whether x of a call for replicas has no R: [T, B, D], or token ids [T, B]."""
    return x.ndim == (3 if x.is_floating_point() else 2)


def everywhere(name: str, tensor: Tensor | None, R: int, op: str) -> Tensor | None:
    """The tensor with R in front; what is shared is expanded, without a copy."""
    if tensor is None:
        return None
    dimensions = _FRONT[name]
    if tensor.ndim == dimensions:
        return tensor.expand(R, *tensor.shape)
    if tensor.ndim != dimensions + 1 or tensor.shape[0] != R:
        raise InputError(
            f"{op}: {name} has shape {list(tensor.shape)} in a call for R = {R} replicas: accepted is R in front of "
            f"the {dimensions} dimensions of one model, or these alone, shared by all"
        )
    return tensor


def check_equal(op: str, map_: Map, inputs: ScanInputs, R: int) -> None:
    """Refuse replicas whose x has another R, or whose tensors do not fit together."""
    x, B = inputs.x, inputs.h0.shape[-2]
    if x is not None and not is_shared(x) and (x.ndim != (4 if x.is_floating_point() else 3) or x.shape[1] != R):
        raise InputError(f"{op}: x has shape {list(x.shape)} for R = {R} replicas: accepted is [T, R, B, ...]")
    if x is not None and x.shape[1 if is_shared(x) else 2] != B:
        raise InputError(f"{op}: x has shape {list(x.shape)}, h0 {list(inputs.h0.shape)}: accepted is the same B")
    N = map_.second.shape[-2]
    if inputs.h0.shape[-1] != N:
        raise InputError(f"{op}: h0 has shape {list(inputs.h0.shape)} for N = {N}: accepted is [R, B, N]")


def given_to_all(op: str, map_: Map, inputs: ScanInputs, options: ScanOptions) -> tuple[Map, ScanInputs, ScanOptions]:
    """The arguments of a leaf with R in every tensor but x, checked; those of one model as they are."""
    R = count(map_.second)
    if R is None:
        return map_, inputs, options
    map_ = Map(**{name: everywhere(name, tensor, R, op) for name, tensor in map_._asdict().items()})  # type: ignore[arg-type]
    rest = {name: everywhere(name, t, R, op) for name, t in inputs._asdict().items() if name != "x"}
    inputs = ScanInputs(x=inputs.x, **rest)  # type: ignore[arg-type]
    check_equal(op, map_, inputs, R)
    return map_, inputs, _options_given_to_all(op, options, R)


def _options_given_to_all(op: str, options: Any, R: int) -> Any:
    """The same with R in lengths and resets."""
    resets = options.resets
    if resets is not None and resets.ndim == 2:  # [T, B]
        resets = resets.unsqueeze(1).expand(-1, R, -1)
    if resets is not None and resets.shape[1] != R:
        raise InputError(f"{op}: resets has shape {list(resets.shape)} for R = {R} replicas: accepted is [T, R, B]")
    return dataclasses.replace(options, lengths=everywhere("lengths", options.lengths, R, op), resets=resets)


def gru_given_to_all(inputs: GruInputs, options: GruOptions) -> tuple[GruInputs, GruOptions]:
    """The arguments of a GRU's leaf with R in every tensor, checked; those of one model as they are."""
    R, x = count(inputs.w), inputs.x
    if R is None:
        return inputs, options
    rest = {name: everywhere(name, t, R, "gru_scan") for name, t in inputs._asdict().items() if name != "x"}
    inputs = GruInputs(x=None, **rest)  # type: ignore[arg-type]
    _, B, N = inputs.h0.shape
    if inputs.w.shape[1:] != (3 * N, N):
        raise InputError(f"gru_scan: w has shape {list(inputs.w.shape)} for N = {N}: accepted is [R, 3N, N]")
    if x is not None:
        x = x.unsqueeze(1).expand(-1, R, -1, -1) if x.ndim == 3 else x
        if x.shape[1:] != (R, B, 3 * N):
            raise InputError(f"gru_scan: x has shape {list(x.shape)} for R = {R} replicas: accepted is [T, R, B, 3N]")
    return inputs._replace(x=x), _options_given_to_all("gru_scan", options, R)


def function_of(op: str, leaf: Any, way: str, replicas: bool, *call: Any) -> Callable[..., Any]:
    """The function of a leaf for the way "fwd" or "bwd"; for replicas that it cannot serve in one launch, each model in
    turn. call: what its ``serves_replicas`` takes, which a leaf has that serves some calls only."""
    function: Callable[..., Any] = getattr(leaf, f"{op}_{way}")
    if not replicas:
        return function
    serves = getattr(leaf, "serves_replicas", None)
    if dispatch.has_feature(op, dispatch.backend_of(leaf), "replicas") and (serves is None or serves(*call)):
        return function
    return functools.partial(_forward_one_by_one if way == "fwd" else _backward_one_by_one, function)


def _models(*given: Any) -> Iterable[tuple[int, list[Any]]]:
    """The arguments of the forward of a leaf, of a scan or a GRU, for each model alone."""
    *maps, inputs, options = given
    for r in range(len(maps[0].second if maps else inputs.w)):
        x = inputs.x
        if x is not None and not is_shared(x):
            x = x[:, r].contiguous()
        own = dataclasses.replace(
            options,
            lengths=None if options.lengths is None else options.lengths[r],
            resets=None if options.resets is None else options.resets[:, r].contiguous(),
        )
        tensors = type(inputs)(x, *(None if t is None else t[r] for t in inputs[1:]))
        yield r, [*(Map._make(None if t is None else t[r] for t in map_) for map_ in maps), tensors, own]


def _stacked(results: list[Tensor | None], dim: int) -> Tensor | None:
    if results[0] is None:
        return None
    if dim == 1 and results[0].is_cpu:  # as in `empty`
        return torch.stack(results).transpose(0, 1)  # type: ignore[arg-type]
    return torch.stack(results, dim)  # type: ignore[arg-type]


def empty(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised result [T, B, ...] or [T, R, B, ...], with the strides that results have."""
    if len(shape) == 4 and like.device.type == "cpu":
        return like.new_empty(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return like.new_empty(shape)


def for_leaf(tensor: Tensor | None, second: Tensor) -> Tensor | None:
    """A tensor [T, ...] of a call with this ``second``: contiguous, but for models on a CPU, where the leaf copies what
    it cannot read."""
    return tensor if tensor is None or (second.ndim == 3 and tensor.is_cpu) else tensor.contiguous()


def _forward_one_by_one(function: Callable[..., Any], *given: Any) -> Any:
    """The forward of a leaf, model by model."""
    found = [function(*own) for _, own in _models(*given)]
    return type(found[0])(*(_stacked(list(of_all), 1) for of_all in zip(*found, strict=True)))


def _backward_one_by_one(function: Callable[..., Any], *given: Any, **needs: bool) -> Any:
    """The backward of a leaf, model by model."""
    count = 3 if isinstance(given[0], Map) else 2  # of the arguments that the forward has too

    def of_model(saved: Any, r: int) -> Any:
        if isinstance(saved, GruStates):
            return GruStates(*(of_model(t, r) for t in saved))
        return None if saved is None else saved[:, r].contiguous()

    found = [function(*own, *(of_model(s, r) for s in given[count:]), **needs) for r, own in _models(*given[:count])]
    return type(found[0])(*gradients_of_all(found))


def behind_time(tensor: Tensor | None, r: int) -> Tensor | None:
    """[T, B, ...] of model r from [T, R, B, ...]; an empty tensor stands for none."""
    return tensor if tensor is None or tensor.ndim == 1 else tensor[:, r]


def taken(of_all: Taken, factors: tuple[str, ...], r: int, R: int, op: str) -> Taken:
    """What the derivatives of model r are computed from; factors: the names of the map's tensors in a Map."""

    def front(name: str, tensor: Tensor | None) -> Any:
        whole = everywhere(name, tensor, R, op)
        return None if whole is None else whole[r]

    x, resets = of_all.x, of_all.resets
    return of_all._replace(
        hs=of_all.hs[:, r],
        pre=behind_time(of_all.pre, r),
        x=x if x is None or is_shared(x) else x[:, r],
        resets=resets if resets is None or resets.ndim == 2 else resets[:, r],
        factors=tuple(front(name, factor) for name, factor in zip(factors, of_all.factors, strict=True)),
        **{
            name: front(name, getattr(of_all, name))
            for name in ("h0", "weight", "bias", "act_param", "lengths", "reset_state")
        },
    )


def gradients_of_all(models: Sequence[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    """The gradients of all models from those of each; that of x is first."""
    return [_stacked(list(of_all), 0 if index else 1) for index, of_all in enumerate(zip(*models, strict=True))]


def summed(gradients: list[Tensor | None], dimensions: list[int]) -> list[Tensor | None]:
    """The gradients of what had so many dimensions: over the replicas, where those shared it. That of x is first."""
    return [
        grad if grad is None or grad.ndim <= ndim else grad.sum(1 if index == 0 else 0)
        for index, (grad, ndim) in enumerate(zip(gradients, dimensions, strict=True))
    ]
