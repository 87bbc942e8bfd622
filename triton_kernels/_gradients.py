"""Forward and backward of a scan around the kernels: what is stored or recomputed, and the parameter gradients.

Note [Blocks of the gradient product]
    M = sum_t delta_t h_{t-1}^T is a matrix product over all T B rows. It is computed in blocks of whole steps with
    about BLOCK_ROWS rows, last block first. The first step of each block is a product of its own, because its h_{t-1}
    lies elsewhere in memory. The blocks depend on T and B alone. So a backward that recomputes states from checkpoints,
    one window of time after another, adds the same products in the same order as one that has all states. The gradients
    have the same bits, and the buffers a fixed size. These products are torch's, in IEEE float32, regardless of
    torch.backends.cuda.matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._gpu_scans import before_resets, started, token_table, transposed_product
from orthokern._products import ieee_products
from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates
from orthokern.triton_kernels._chunks import backward_in_chunks, forward_in_chunks, wants_chunks
from orthokern.triton_kernels._inputs import features_term, token_gradient
from orthokern.triton_kernels._launch import TRITON_PRECISION, as_rows, launch_backward, launch_forward

BLOCK_ROWS = 65536


def input_of(args: ScanArgs, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The input of the forward kernel for the steps of x: (the input term [T, B, N], None), or (ids int64 [T, B], a
    table [D, N])."""
    if args.weight is None:
        return x, None
    if x.is_floating_point():
        return features_term(x, args.weight, args.bias, TRITON_PRECISION[args.precision]), None
    return x, token_table(args.weight, args.bias)


def scan_fwd(args: ScanArgs) -> ScanStates:
    """hs, ckpt and pre; see ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    x, h0, every, resets = args.x, args.h0, args.checkpoint_every, args.resets
    assert x is not None
    T, (B, N) = args.time_steps, h0.shape
    hs = h0.new_empty(T, B, N)
    source, table = input_of(args, x)
    pre = None
    if wants_chunks(args, T):
        forward_in_chunks(args, source, table, h0, hs)
    else:
        pre = torch.empty_like(hs) if args.keeps_pre else None
        start, cut = h0, None
        if resets is not None:
            start, cut = started(h0, resets[0], args.reset_state), before_resets(resets)
        launch_forward(args, as_rows(args), source, table, start, hs=hs, pre=pre, cut=cut)
    # the states before steps 0, k, 2k, ...: h0 and every k-th of hs
    ckpt = torch.cat([h0.unsqueeze(0), hs[every - 1 : T - 1 : every]]) if every else None
    return ScanStates(hs, ckpt, pre)


def without_padding(values: Tensor, alive: Tensor | None, first: int) -> Tensor:
    """values with padding replaced by 0, or by -1 for token ids, since 0 (delta there) times an infinity is NaN.

    values: of the steps from ``first`` on: [B, N] of one step, [steps, B, ...], or ids [steps, B]; alive: bool [T, B].
    """
    if alive is None:
        return values
    if values.ndim == 2 and values.is_floating_point():
        return torch.where(alive[first].unsqueeze(-1), values, 0.0)
    here = alive[first : first + values.shape[0]]
    if not values.is_floating_point():
        return torch.where(here, values, -1)
    return torch.where(here.unsqueeze(-1), values, 0.0)


class States:
    """States and pre-activations of a range of steps, saved by the forward or recomputed from checkpoints by run(start,
    stop, h [B, N], hs [stop - start, B, N], pre or None)."""

    def __init__(
        self, states: Tensor, pre: Tensor | None, h0: Tensor, T: int, checkpoint_every: int, run: Callable[..., None]
    ) -> None:
        self.checkpoint_every, self.saved, self.h0, self.run = checkpoint_every, states, h0, run
        self.start = self.stop = T
        self.keep_pre = False
        # with checkpoints, the current window [1 + steps, B, N]: its initial state, and the states of its steps
        self.entered: Tensor | None = None
        self.pre = pre

    def get(self, low: int, high: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """(hs, pre, h_{low-1}, h_{low} ... h_{high-2}) of steps [low, high)."""
        if not self.checkpoint_every:
            pre = None if self.pre is None else self.pre[low:high]
            before = self.h0 if low == 0 else self.saved[low - 1]
            return self.saved[low:high], pre, before, self.saved[low : high - 1]
        if self.entered is None or low < self.start:
            self.recompute(low, high)
        assert self.entered is not None
        i, j = low - self.start, high - self.start
        pre = None if self.pre is None else self.pre[i:j]
        return self.entered[i + 1 : j + 1], pre, self.entered[i], self.entered[i + 1 : j]

    def recompute(self, low: int, high: int) -> None:
        """Run the forward again from the checkpoint at or before low to high."""
        segment = low // self.checkpoint_every
        self.start, self.stop = segment * self.checkpoint_every, high
        steps = self.stop - self.start
        self.entered = self.saved.new_empty(steps + 1, *self.h0.shape)
        self.entered[0] = self.saved[segment]
        self.pre = self.saved.new_empty(steps, *self.h0.shape) if self.keep_pre else None
        self.run(self.start, self.stop, self.saved[segment], self.entered[1:], self.pre)


class ParameterSums:
    """The gradients of the map (M), the input weight and the bias, added up a block of steps at a time. features:
    whether x is features [T, B, D] rather than token ids."""

    def __init__(self, h0: Tensor, weight: Tensor | None, bias: Tensor | None, features: bool) -> None:
        N, D = h0.shape[1], 0 if weight is None else weight.shape[1]
        self.features, self.D = features, D
        self.m = h0.new_zeros(N, N)
        self.bias = None if bias is None else h0.new_zeros(N, dtype=torch.float64)
        self.weight = None if weight is None else h0.new_zeros((N, D) if features else (D, N))

    def add_states(self, delta: Tensor, before: Tensor, between: Tensor) -> None:
        """Add the products with the states, and the bias: delta [steps, B, N], before and between as `States.get`."""
        self.m.addmm_(delta[1:].flatten(0, 1).mT, between.flatten(0, 1))
        self.m.addmm_(delta[0].mT, before)
        if self.bias is not None:
            self.bias += delta.sum((0, 1), dtype=torch.float64)

    def add_input(self, delta: Tensor, x: Tensor) -> None:
        """Add the products with the input, x [steps, B, D] or ids [steps, B]."""
        assert self.weight is not None
        rows = delta.flatten(0, 1)
        if self.features:
            self.weight.addmm_(rows.mT, x.flatten(0, 1))
        else:
            self.weight += token_gradient(rows, x.reshape(-1), self.D)

    def results(self) -> tuple[Tensor | None, ...]:
        """(M [N, N], grad_weight [N, D], grad_bias [N]); None where there is no weight or bias."""
        weight = self.weight
        if weight is not None and not self.features:
            weight = weight.mT.contiguous()
        return self.m, weight, None if self.bias is None else self.bias.to(self.m.dtype)


@ieee_products()
def scan_bwd(
    args: ScanArgs,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    needs: Any,
) -> ScanGradients:
    """The adjoint scan of Note [Factored scan backward] and the sums over its result."""
    x, h0, weight, act_param, reset_state = args.x, args.h0, args.weight, args.act_param, args.reset_state
    checkpoint_every, lengths, resets = args.checkpoint_every, args.lengths, args.resets
    rows, transposed = as_rows(args), as_rows(args, transposed=True)
    T, B, N = grad_hs.shape
    chunked = wants_chunks(args, T)
    cut = None if resets is None else before_resets(resets)
    cut_sum = None if resets is None or reset_state is None else torch.zeros_like(reset_state)
    alive = None if lengths is None else torch.arange(T, device=lengths.device).unsqueeze(1) < lengths  # [T, B]

    def run(start: int, stop: int, h: Tensor, hs: Tensor, pre: Tensor | None) -> None:
        assert x is not None and (start == 0 or not chunked)  # chunks count lengths from step 0
        inputs = input_of(args, x[start:stop])
        if chunked:
            forward_in_chunks(args, *inputs, h, hs)
            return
        here = None
        if cut is not None and resets is not None:
            h, here = started(h, resets[start], reset_state), cut[start:stop]
        launch_forward(args, rows, *inputs, h, hs=hs, pre=pre, first=start, cut=here)

    features = x is not None and x.is_floating_point() and weight is not None
    # all of delta is kept where it is grad_x (x is the input term) or there are no checkpoints; else one block
    whole = not checkpoint_every or chunked or (weight is None and needs.x)
    one_block = bool(checkpoint_every) and not chunked
    delta_all = h0.new_empty(T, B, N) if whole else None
    square, carry, left = h0.new_empty(T, B), h0.new_zeros(B, N), h0.new_empty(B, N)
    by_row = h0.new_zeros(B, N) if act_param is not None and needs.act_param else None
    # chunks depend on T, so the same bits need all steps again, from the first checkpoint
    source = States(states, pre, h0, T, T if chunked and checkpoint_every else checkpoint_every, run)
    source.keep_pre = ACTIVATIONS[args.activation].needs_input
    sums = ParameterSums(h0, weight, args.bias, features) if needs.sums else None
    grad_x = h0.new_empty(x.shape) if features and needs.x and x is not None else None

    if chunked:
        assert delta_all is not None
        backward_in_chunks(args, grad_hs, delta=delta_all, left=left, square=square)
    elif not checkpoint_every:
        results = {"delta": delta_all, "left": left, "square": square, "by_row": by_row}
        launch_backward(args, transposed, grad_hs, states, pre, carry, cut=resets, **results)

    steps = max(1, BLOCK_ROWS // B)
    for low in reversed(range(0, T, steps)):
        high = min(low + steps, T)
        here = None if resets is None else resets[low:high]
        if sums or one_block:
            hs_block, pre_block, before, between = source.get(low, high)
        delta = delta_all[low:high] if delta_all is not None else h0.new_empty(high - low, B, N)
        if one_block:
            launch_backward(
                args,
                transposed,
                grad_hs[low:high],
                hs_block,
                pre_block,
                carry,
                delta=delta,
                left=left,
                square=square[low:high],
                by_row=by_row,
                first=low,
                cut=here,
            )
            carry, left = left, carry
        if cut_sum is not None and here is not None:
            cut_sum += started(delta, ~here, None).sum(0)
        if sums:
            if here is not None:
                before, between = started(before, here[0], reset_state), started(between, here[1:], reset_state)
            sums.add_states(delta, without_padding(before, alive, low), without_padding(between, alive, low + 1))
            if weight is not None and x is not None:
                sums.add_input(delta, without_padding(x[low:high], alive, low))
        if grad_x is not None and weight is not None:
            torch.mm(delta.view(-1, N), weight, out=grad_x[low:high].view(-1, weight.shape[1]))
    if one_block:
        left = carry  # exchanged after the last block
    if needs.x and weight is None:
        grad_x = delta_all
    grad_act_param = None
    if by_row is not None and act_param is not None:
        by_unit = by_row.sum(0)
        grad_act_param = by_unit if act_param.numel() > 1 else by_unit.sum(0, keepdim=True)
    m, grad_weight, grad_bias = sums.results() if sums else (None, None, None)
    grad_state = None if cut_sum is None else transposed_product(args, cut_sum)
    norm = square.sum(1).sqrt() if needs.norm else None
    return ScanGradients(grad_x, m, left, grad_weight, grad_bias, grad_act_param, grad_state, None, norm)
