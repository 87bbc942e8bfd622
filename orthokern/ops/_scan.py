"""The torch ops of ``factored_scan`` and ``dense_scan``. They have the same arguments, the fields of `ScanArgs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import FEATURES, ScanArgs, ScanGradients, split_tensors
from orthokern.dispatch import Support
from orthokern.errors import InputError
from orthokern.ops import _taps
from orthokern.ops._common import check_leak, check_tokens
from orthokern.ops._recurrence import Recurrence

_GPU: dict[str, Any] = {"devices": ("cuda",), "algorithms": ("sequential", "chunked"), "capability": (8, 0)}
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=FEATURES),
    "triton": Support(dtypes=(torch.float64, torch.float32), limits={"N": 128}, features=FEATURES, **_GPU),
    "cuda": Support(dtypes=(torch.float32,), features=FEATURES, **_GPU),
}


class ScanOp(Recurrence):
    """Of the saved states, ``states`` is hs, or ckpt with checkpoints. x may be None in the backward if it is not read:
    without a weight and checkpoints."""

    arguments, gradients, others = ScanArgs, ScanGradients, ("ckpt", "pre")
    saved = "Tensor states", "Tensor? pre"

    def _by_reference(self, args: ScanArgs) -> Tensor:
        # torch's autograd saves what it needs: states for a backward of this package would be memory for nothing
        return super()._by_reference(args._replace(checkpoint_every=0))

    def _check_values(self, args: ScanArgs, T: int) -> None:
        super()._check_values(args, T)
        if args.weight is not None:
            check_tokens(args.x, args.weight, args.lengths)
        check_leak(args.leak)

    def _kernel(self, direction: str, args: ScanArgs, T: int) -> Any:
        if (args.first is None) != (args.scale is None):
            missing = "first" if args.first is None else "scale"
            raise InputError(f"{self.name}: {missing} is None: accepted are both of first and scale, or neither")
        return super()._kernel(direction, args, T)

    def _of_backend(self, args: ScanArgs, saved: tuple[Any, ...]) -> tuple[Any, ...]:
        states, pre = saved
        if args.x is None and (args.weight is not None or args.checkpoint_every):
            raise InputError(f"{self.name}_bwd: x is None: it is needed with a weight or checkpoints")
        if pre is None and args.keeps_pre:
            raise InputError(f"{self.name}_bwd: pre is None: it is needed with a leak or with {args.activation}")
        return states, pre if args.keeps_pre else None

    def _forward_fake(self, *fields: Any) -> tuple[Tensor, ...]:
        args = ScanArgs(*fields)
        (B, N), T, every = args.h0.shape, args.time_steps, args.checkpoint_every
        new = args.second.new_empty
        ckpt = new((T + every - 1) // every, B, N) if every else new(0)
        return new(T, B, N), ckpt, new(T, B, N) if args.keeps_pre else new(0)

    def _shape_of_x(self, args: ScanArgs, grad_hs: Tensor) -> Any:
        x = args.x if args.weight is not None else grad_hs
        return x.shape if x is not None and x.is_floating_point() else None

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        args, (hs, ckpt, pre) = ScanArgs(*inputs), output
        # pre has a gradient in a second derivative
        ctx.mark_non_differentiable(*[t for t in ((ckpt,) if args.keeps_pre else (ckpt, pre)) if t is not None])
        ctx.set_materialize_grads(False)
        # a precomputed input term is only needed to recompute states, and may be as large as all of them
        x = args.x if args.weight is not None or args.checkpoint_every else None
        ctx.options, tensors = split_tensors(args if x is args.x else args._replace(x=x))
        ctx.save_for_backward(ckpt if args.checkpoint_every else hs, pre, *tensors)

    def _differentiable(
        self, args: ScanArgs, grad_hs: Tensor | None, saved: tuple[Any, ...], needs: Any, **of_states: Tensor | None
    ) -> Any:
        if args.checkpoint_every:  # recompute the states as a differentiable function of the inputs
            args = args._replace(checkpoint_every=0)
            with _taps.set_aside():
                states, _, pre = self.fwd(*args)
            saved = states, pre
        return super()._differentiable(args, grad_hs, saved, needs, **of_states)


FACTORED, DENSE = ScanOp("factored_scan", SUPPORT), ScanOp("dense_scan", SUPPORT)


def scan(args: ScanArgs) -> Tensor:
    """hs [T, B, N] of checked arguments."""
    return (DENSE if args.first is None else FACTORED)(args)
