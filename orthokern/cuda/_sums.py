"""Gradients that are sums over time, window by window, for all scans on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import ScanArgs


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total [N, D] + left [R, N]^T right [R, D], in place; None: zeros."""
    return left.mT @ right if total is None else total.addmm_(left.mT, right)


class Sums:
    """The gradients that are sums over time of products with delta_t, computed window by window.

    alive: bool [T, B], False on padding, or None for no padding. The other factor is set to 0 on padding, since 0 times
    an infinity or a NaN is NaN.
    """

    def __init__(self, args: ScanArgs, alive: Tensor | None, needs: Any) -> None:
        x, self.h0, self.alive, self.need_m = args.x, args.h0, alive, needs.m
        self.weight, self.bias = args.weight if needs.weight else None, args.bias if needs.bias else None
        self.x, self.resets, self.reset_state = x, args.resets, args.reset_state
        self.m: Tensor | None = None
        self.grad_weight: Tensor | None = None
        self.grad_bias: Tensor | None = None
        self.features = self.weight is not None and x is not None and x.is_floating_point()

    def add(self, start: int, delta: Tensor, before: Tensor) -> None:
        """Add the steps from ``start`` on: delta_t and before, which is h_{t-1}, both [steps, B, N]."""
        steps = delta.shape[0]
        alive = None if self.alive is None else self.alive[start : start + steps].unsqueeze(-1)
        # always the same alignment, since the library's choice of a kernel, and so the bits, may depend on it
        if start and delta[0].numel() % 4:
            delta, before = delta.clone(), before.clone()
        rows = delta.flatten(0, 1)
        if self.need_m:
            if self.resets is not None:
                state = before.new_zeros(()) if self.reset_state is None else self.reset_state
                before = torch.where(self.resets[start : start + steps].unsqueeze(-1), state, before)
            if alive is not None:
                before = torch.where(alive, before, 0.0)
            self.m = add_product(self.m, rows, before.flatten(0, 1))
        if self.bias is not None:
            of_steps = rows.sum(0)
            self.grad_bias = of_steps if self.grad_bias is None else self.grad_bias.add_(of_steps)
        if self.weight is None:
            return
        assert self.x is not None
        x = self.x[start : start + steps]
        if self.features:
            if alive is not None:
                x = torch.where(alive, x, 0.0)
            elif start and x[0].numel() % 4:
                x = x.clone()
            self.grad_weight = add_product(self.grad_weight, rows, x.flatten(0, 1))
            return
        # ids out of range are skipped; all sums have a fixed order
        ids, D = x.flatten(), self.weight.shape[1]
        if alive is not None:
            ids = torch.where(alive.flatten(), ids, -1)
        if D <= 64:
            one_hot = ids.unsqueeze(1) == torch.arange(D, device=ids.device)
            self.grad_weight = add_product(self.grad_weight, rows, one_hot.to(rows.dtype))
        else:
            ids = torch.where((ids >= 0) & (ids < D), ids, D)
            table = torch.ops.aten.embedding_dense_backward(rows, ids, D + 1, -1, False)
            of_ids = table[:D].mT
            self.grad_weight = of_ids.contiguous() if self.grad_weight is None else self.grad_weight.add_(of_ids)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(M, grad_weight, grad_bias), zeros if no step was added; None for what does not apply."""
        m = self.h0.new_zeros(self.h0.shape[1], self.h0.shape[1]) if self.need_m and self.m is None else self.m
        sums = (self.weight, self.grad_weight), (self.bias, self.grad_bias)
        weight, bias = (torch.zeros_like(of) if of is not None and total is None else total for of, total in sums)
        return m, weight, bias
