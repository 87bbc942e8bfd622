"""The scans of the GPU backends around their kernels: inputs, chunks of time, recomputed states, parameter gradients.

A backend has a subclass of `Scan`, which launches its kernel. Forward and backward are one recurrence with different
ends of a step:

    forward   t = 0, 1, ...      a = map(state) + x_t,  state = h_t = phi(a)              map: W
    backward  t = T - 1, ...     a = map(state) + g_t,  state = delta_t = phi'(.) * a     map: W^T

With a leak l, a forward step adds (1 - l) h_{t-1} to l phi(a). A backward step adds (1 - l) a_{t+1} to its a, which is
ghat_t of Note [Leak] of the reference; phi' then multiplies l a.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from orthokern._map_gradients import gradients_of_products, map_gradients, without_m
from orthokern._products import ieee_products, norms_of_steps, sum_over_rows
from orthokern._scan_contract import GruArgs, ScanArgs, ScanGradients, ScanStates, between_steps, running, started

# Elements of the adjoints in one product of the gradients, 32 MiB in float32. Sums over all steps are accumulated over
# such windows of steps, the last one first, with and without recomputed states, so that the results are bit-identical.
WINDOW_ELEMENTS = 1 << 23
# Below this many steps, or above this many sequences, `auto` uses the sequential scan: if the sequences occupy the GPU,
# chunks of time are not faster.
_CHUNKED_STEPS, _CHUNKED_BATCH = 256, 128
# The longest chunk of time. With longer ones, there would be too few to occupy a GPU.
_LONGEST_CHUNK = 128


def composed(args: ScanArgs) -> Tensor:
    """W [N, N] in float64."""
    first, scale, second = args.first, args.scale, args.second
    if first is None or scale is None:
        return second.double()
    return (second.double() * scale.unsqueeze(-2)) @ first.double().mT


def _of_state(args: ScanArgs, delta: Tensor, ghat: Tensor | None) -> Tensor:
    """The gradient of the state that enters a step [B, N]: W^T delta, and with a leak (1 - l) ghat."""
    first, scale, second = args.first, args.scale, args.second
    rows = delta @ second if first is None or scale is None else ((delta @ second) * scale.unsqueeze(-2)) @ first.mT
    return rows if args.leak is None or ghat is None else rows + (1 - args.leak) * ghat


def of_steps(tensor: Tensor, low: int, high: int) -> Tensor:
    """The steps [low, high) of a tensor [T, ...]; the tensor itself, which takes less time, if these are all."""
    return tensor if high - low == tensor.shape[0] else tensor[low:high]


def new_results(args: ScanArgs | GruArgs) -> Callable[..., Tensor]:
    """A function from a shape to a result of a kernel, which writes no padding: zeros if there may be some."""
    return args.h0.new_empty if args.lengths is None else args.h0.new_zeros


class Scan:
    """Launches of the kernel of one scan, forward or backward, over the B rows of a batch or over chunks of time.

    With ``chunk``, the T steps of a launch are divided into chunks of that many steps, which run in parallel from
    states of their own: sequence c B + b is chunk c of row b, and in the backward chunk 0 is the last one in time.
    ``sequences`` is their number. Without chunks it is B.
    """

    def __init__(
        self, args: ScanArgs, *, backward: bool, chunk: int | None = None, sequences: int | None = None
    ) -> None:
        self.args, self.backward, self.chunk = args, backward, chunk
        self.sequences = args.h0.shape[0] if sequences is None else sequences
        self.sums_rows = self.norm_columns = self.sequences  # of the results of `sums` and `norms`
        self.clip = args.clip if backward else math.inf
        self.restart = None if backward else args.reset_state
        # bool [T, B]: the steps after which the state, or backward the adjoint, becomes ``restart``, or zeros for None.
        # Forward this is the step before a reset; backward the reset itself, which the adjoint does not pass.
        self.cut = args.resets
        if args.resets is not None and not backward:
            self.cut = torch.cat([args.resets[1:], torch.zeros_like(args.resets[:1])])

    def run(self, steps: int, *, time: int = 0, **tensors: Tensor | None) -> None:
        """Launch ``steps`` steps on the current stream, of which the first one in time is step ``time`` of the op.

        tensors, of these steps:
            x: [T, B, N], the input term or the gradient of hs; or tokens [T, B] with table [D, N].
            gate: [T, B, N], backward: hs or pre, from which phi' is computed; None for the identity. With a leak pre.
            start: [sequences, N], the states before the first step; None for zeros.
            out: [T, B, N], receives the states. Padding is not written.
            pre: [T, B, N], forward, and backward with a leak: receives a. Padding is not written.
            end: [sequences, N], receives the states after ``chunk`` steps, zeros for a sequence that ends before.
            sums: backward: of `sums`, updated.
            norms: backward: of `norms`.
            carried: [B, N], backward with a leak: a of the step before, zeros at first; it receives that of the last
                step, zeros after a reset.
        """
        raise NotImplementedError

    def sums(self) -> Tensor:
        """[2, rows, N]: running sums for act_param's gradient over all launches, and their rounding errors. With a leak
        they lack its factor."""
        return self.args.second.new_zeros(2, self.sums_rows, self.args.second.shape[0])

    def norms(self, steps: int) -> Tensor:
        """[T, columns]: partial sums of squares of dL/dh_t, zeros on padding."""
        return self.args.second.new_zeros(steps, self.norm_columns)

    def side_stream(self, window: int) -> Any:
        """A context manager for products that run concurrently with the scan of the next ``window`` steps, or None."""
        return None

    def add_to_map(self, total: Tensor | None, rows: Tensor, states: Tensor) -> Tensor:
        """A sum for the gradient of the map, in place: total [N, N] + rows [R, N]^T states [R, N]; None: zeros."""
        return add_product(total, rows, states)

    def carry(self, power: Tensor, ends: Tensor, starts: Tensor) -> None:
        """starts[c + 1] = starts[c] power + ends[c], from starts[0]: power [N, N] float64, ends [count, B, N], starts
        [count + 1, B, N]. In float64: a power that is rounded to float32 would cost eps |W^chunk| at every chunk, more
        than its steps do."""
        state = starts[0].double()
        for index, end in enumerate(ends):
            state = torch.addmm(end.double(), state, power)
            starts[index + 1].copy_(state)


def _input_of(args: ScanArgs, x: Tensor) -> dict[str, Any]:
    """The inputs of a forward launch for the steps of x, see `Scan.run`."""
    weight, bias = args.weight, args.bias
    if weight is None:
        return {"x": x}
    if not x.is_floating_point():
        if bias is None:
            return {"tokens": x, "table": weight.mT.contiguous()}
        table = weight.new_empty(weight.mT.shape)  # else the sum would have the strides of weight.mT
        return {"tokens": x, "table": torch.add(weight.mT, bias, out=table)}
    with ieee_products():
        return {"x": torch.nn.functional.linear(x, weight, bias)}


def chunk_length(args: ScanArgs, steps: int) -> int:
    """Steps of a chunk, which depend on sizes only; 0 for the sequential scan.

    The cost is two scans of C steps over all chunks, and one over the T / C carries: it is lowest for C near sqrt(T).
    C is limited so that there are many chunks.
    """
    if args.activation != "identity" or args.algorithm == "sequential" or steps < 2 or between_steps(args.features):
        return 0
    B, N = args.h0.shape
    if args.algorithm == "auto" and (steps < _CHUNKED_STEPS or B > _CHUNKED_BATCH or N > 128):
        return 0
    return max(1, min(_LONGEST_CHUNK, math.isqrt(steps)))


def _chunked(
    kind: type[Scan],
    args: ScanArgs,
    inputs: dict[str, Any],
    start: Tensor | None,
    out: Tensor,
    *,
    backward: bool,
) -> None:
    """The recurrence without activation, in parallel over chunks of time; out [T, B, N].

    (a) Every chunk but the last runs from a zero state, and only its end is kept. (b) The states between chunks are
    computed in sequence: each is W^chunk times the previous one, plus that end. (c) Every chunk runs again from its
    initial state. W is composed: for (b) in float64, and for (a) and (c) in the dtype of the call if that takes fewer
    products than the factors. Backward is the same with W^T, from the last step to the first. Chunks after the end of a
    sequence give zeros for any initial state.
    """
    steps, B, N = out.shape
    chunk = chunk_length(args, steps)
    count = -(-steps // chunk)
    w = composed(args)
    if args.first is not None and 2 * args.first.shape[1] > N:
        args = args._replace(first=None, scale=None, second=w.to(out.dtype))
    starts = out.new_empty(count, B, N)
    starts[0].copy_(start) if start is not None else starts[0].zero_()
    if count > 1:
        ends = out.new_empty(count - 1, B, N)
        scan = kind(args, backward=backward, chunk=chunk, sequences=(count - 1) * B)
        scan.run(steps, **inputs, end=ends)
        scan.carry(torch.linalg.matrix_power(w if backward else w.mT, chunk).contiguous(), ends, starts)
    kind(args, backward=backward, chunk=chunk, sequences=count * B).run(steps, **inputs, start=starts, out=out)


def scan_fwd(kind: type[Scan], args: ScanArgs) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    x, h0, resets, every = args.x, args.h0, args.resets, args.checkpoint_every
    assert x is not None
    steps = args.time_steps
    hs = new_results(args)(steps, *args.h0.shape)
    pre = new_results(args)(steps, *args.h0.shape) if args.keeps_pre else None
    inputs = _input_of(args, x)
    if chunk_length(args, steps):
        _chunked(kind, args, inputs, h0, hs, backward=False)
    else:
        start = h0 if resets is None else started(h0, resets[0], args.reset_state)
        kind(args, backward=False).run(steps, **inputs, start=start, out=hs, pre=pre)
    ckpt = torch.cat([h0.unsqueeze(0), hs[every - 1 : steps - 1 : every]]) if every else None
    return ScanStates(hs, ckpt, pre)


class _States:
    """h_{t-1} and the factor of phi' for windows of steps, the last one first: saved by the forward, or recomputed from
    the checkpoint at or before the window."""

    def __init__(self, kind: type[Scan], args: ScanArgs, states: Tensor, pre: Tensor | None) -> None:
        self.args, self.saved, self.pre = args, states, pre
        self.scan = kind(args, backward=False) if args.checkpoint_every else None
        self.low = args.time_steps if args.checkpoint_every else 0  # the first step that is saved or recomputed
        self.entered: Tensor | None = None  # with checkpoints: h_{t-1} of the steps from it on

    def _recompute(self, low: int, high: int) -> None:
        args, resets = self.args, self.args.resets
        assert self.scan is not None and args.x is not None
        segment = low // args.checkpoint_every
        self.low = low = segment * args.checkpoint_every
        self.entered = self.pre = None  # frees their memory
        entered = self.entered = new_results(args)(high - low + 1, *args.h0.shape)
        entered[0] = self.saved[segment]
        if args.reads_pre:
            self.pre = new_results(args)(high - low, *args.h0.shape)
        start = entered[0] if resets is None else started(entered[0], resets[low], args.reset_state)
        inputs = _input_of(args, args.x[low:high])
        self.scan.run(high - low, time=low, **inputs, start=start, out=entered[1:], pre=self.pre)

    def _from(self, low: int, high: int) -> int:
        """The step of the first saved row, or of the first row that is recomputed to include these steps."""
        if low < self.low:
            self._recompute(low, high)
        return self.low

    def gate(self, low: int, high: int) -> Tensor | None:
        """hs or pre of the steps [low, high), whichever phi' reads."""
        if self.args.activation == "identity":
            return None
        first = self._from(low, high)
        if self.pre is not None:
            return of_steps(self.pre, low - first, high - first)
        return self.after(low, high)

    def after(self, low: int, high: int) -> Tensor:
        """h_t of the steps [low, high)."""
        first = self._from(low, high)
        if self.entered is None:
            return of_steps(self.saved, low, high)
        return self.entered[low - first + 1 : high - first + 1]

    def before(self, low: int, high: int) -> Tensor:
        """h_{t-1} of the steps [low, high)."""
        first = self._from(low, high)
        if self.entered is not None:
            return self.entered[low - first : high - first]
        if low > 0:
            return self.saved[low - 1 : high - 1]
        # a copy of at most a window: one product takes less time than two
        return torch.cat([self.args.h0.unsqueeze(0), self.saved[: high - 1]])


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total [N, D] + left [R, N]^T right [R, D], in place; None: zeros."""
    return torch.mm(left.mT, right) if total is None else total.addmm_(left.mT, right)


class _Sums:
    """The gradients that are products with delta_t or sums of them, computed window by window, the last one first. The
    other factor of a product is set to 0 on padding, since 0 times an infinity or a NaN is NaN."""

    def __init__(self, scan: Scan, steps: int, needs: Any) -> None:
        args = scan.args
        x, alive = args.x, running(steps, args.lengths)
        self.scan, self.args, self.steps, self.needs = scan, args, steps, needs
        self.alive = None if alive is None else alive.unsqueeze(-1)  # bool [T, B, 1], False on padding
        K = args.second.shape[1]
        self.thin = args.first is not None and without_m(steps * args.h0.shape[0], args.h0.shape[1], K)
        self.m: Tensor | None = None
        self.m_v: Tensor | None = None  # thin: M V and M^T U [N, K] in float64, instead of M
        self.mt_u: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None  # in float64 if it is the sum of several windows
        self.leak: Tensor | None = None  # [N] float64, the sum of ghat_t (h_t - h_{t-1})
        features = args.weight is not None and x is not None and x.is_floating_point()
        self.x = torch.empty_like(x) if features and needs.x and x is not None else None
        # [B, N], the sums of delta_t and of ghat_t over the resets
        state = args.reset_state
        self.at_resets = torch.zeros_like(state) if state is not None and needs.reset_state else None
        self.ghat_at_resets = None if self.at_resets is None or args.leak is None else torch.zeros_like(self.at_resets)
        self.required = needs.sums or needs.leak or self.x is not None or self.at_resets is not None

    def add(self, low: int, delta: Tensor, ghat: Tensor | None, states: _States) -> None:
        """Add the steps from ``low`` on, delta and ghat [steps, B, N]; ghat if `_Adjoints.ghat` is kept."""
        args, needs, high, N = self.args, self.needs, low + delta.shape[0], delta.shape[2]
        here = slice(low, high)
        alive = None if self.alive is None else self.alive[here]
        if self.at_resets is not None and args.resets is not None:
            self.at_resets += started(delta, ~args.resets[here], None).sum(0)
            if ghat is not None and self.ghat_at_resets is not None:
                self.ghat_at_resets += started(ghat, ~args.resets[here], None).sum(0)
        if self.x is not None and args.weight is not None:
            torch.mm(delta.view(-1, N), args.weight, out=self.x[here].view(-1, args.weight.shape[1]))
        # always the same alignment, since the library's choice of a kernel, and so the rounding, may depend on it
        shifted = low > 0 and delta.shape[1] * N % 4 > 0
        rows = (delta.clone() if shifted else delta).view(-1, N)
        of_leak = ghat is not None and needs.leak
        if needs.map or of_leak:
            before = states.before(low, high)
            before = before.clone() if shifted else before
            if args.resets is not None:
                before = started(before, args.resets[here], args.reset_state)
            if alive is not None:
                before = torch.where(alive, before, 0.0)
            if needs.map:
                self._add_to_map(rows, before.view(-1, N))
            if of_leak and ghat is not None:
                of_units = (ghat * (states.after(low, high) - before)).sum((0, 1), dtype=torch.float64)
                self.leak = of_units if self.leak is None else self.leak.add_(of_units)
        if needs.bias and args.bias is not None:
            windows = high < self.steps or low > 0
            of_rows = rows.sum(0, dtype=torch.float64 if windows else None)
            self.bias = of_rows if self.bias is None else self.bias.add_(of_rows)
        if needs.weight and args.weight is not None and args.x is not None:
            x = of_steps(args.x, low, high)
            if x.is_floating_point():
                x = torch.where(alive, x, 0.0) if alive is not None else x.clone() if shifted else x
                self.weight = add_product(self.weight, rows, x.view(-1, x.shape[2]))
            else:
                self._add_tokens(rows, x if alive is None else torch.where(alive.squeeze(-1), x, -1))

    def _add_to_map(self, rows: Tensor, before: Tensor) -> None:
        first, second = self.args.first, self.args.second
        if not self.thin or first is None:
            self.m = self.scan.add_to_map(self.m, rows, before)
            return
        m_v, mt_u = sum_over_rows(rows, before @ first), sum_over_rows(before, rows @ second)
        self.m_v = m_v if self.m_v is None else self.m_v.add_(m_v)
        self.mt_u = mt_u if self.mt_u is None else self.mt_u.add_(mt_u)

    def grad_map(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of first, scale and second."""
        if self.m_v is None or self.mt_u is None:
            return map_gradients(self.args, self.m)
        return gradients_of_products(self.args, self.m_v, self.mt_u)

    def _add_tokens(self, rows: Tensor, ids: Tensor) -> None:
        """Ids out of range are skipped; all sums have a fixed order."""
        assert self.args.weight is not None
        ids, D = ids.flatten(), self.args.weight.shape[1]
        if D <= 64:
            one_hot = ids.unsqueeze(1) == torch.arange(D, device=ids.device)
            self.weight = add_product(self.weight, rows, one_hot.to(rows.dtype))
            return
        ids = torch.where((ids >= 0) & (ids < D), ids, D)
        table = torch.ops.aten.embedding_dense_backward(rows, ids, D + 1, -1, False)
        of_ids = table[:D].mT
        self.weight = of_ids.contiguous() if self.weight is None else self.weight.add_(of_ids)

    def grad_leak(self) -> Tensor | None:
        """From the sum, since h_t - h_{t-1} is l (phi(a_t) - h_{t-1})."""
        leak, total = self.args.leak, self.leak
        return None if leak is None or total is None else (total / leak).sum_to_size(leak.shape).to(leak.dtype)


def window_steps(B: int, N: int) -> int:
    """Steps of a window of the gradients' products, which depend on sizes only."""
    window = max(1, WINDOW_ELEMENTS // max(B * N, 1))
    return window - (window % 16 if window > 16 else 0)


class _Adjoints:
    """The adjoint recurrence and its results: delta_t, and partial sums of the norms and of act_param's gradient."""

    def __init__(self, kind: type[Scan], args: ScanArgs, grad_hs: Tensor, states: _States, needs: Any) -> None:
        self.kind, self.args, self.grad_hs, self.states = kind, args, grad_hs, states
        self.scan = kind(args, backward=True)
        (self.steps, B, N), self.needs_h0 = grad_hs.shape, needs.h0
        # all of delta is kept if it is grad_x (x is the input term), or if there are no checkpoints; else a window
        self.keep = not args.checkpoint_every or (needs.x and args.weight is None)
        self.delta = new_results(args)(self.steps if self.keep else min(window_steps(B, N), self.steps), *args.h0.shape)
        self.carry: Tensor | None = None  # delta of the first step so far
        self.chunked = chunk_length(args, self.steps) > 0
        # with a leak: a of the step that the next launch begins with, and of all steps if a gradient reads it
        self.carried = None if args.leak is None else torch.zeros_like(args.h0)
        keeps_ghat = args.leak is not None and (needs.leak or (needs.reset_state and args.reset_state is not None))
        self.ghat = new_results(args)(*self.delta.shape) if keeps_ghat else None
        needs_sums = args.act_param is not None and needs.act_param
        self.running = self.scan.sums() if needs_sums else None
        self.norms = self.scan.norms(self.steps) if needs.norm and not self.chunked else None

    def parts(self, low: int, high: int) -> tuple[Tensor, Tensor | None]:
        """delta and ghat of the steps [low, high)."""
        rows = (low, high) if self.keep else (0, high - low)
        return of_steps(self.delta, *rows), None if self.ghat is None else of_steps(self.ghat, *rows)

    def run(self, low: int, high: int) -> None:
        """The steps [low, high), which end where the steps before them in the backward began."""
        (out, ghat), g, args = self.parts(low, high), of_steps(self.grad_hs, low, high), self.args
        if args.lengths is not None and not self.keep:
            out.zero_()
            if ghat is not None:
                ghat.zero_()
        if self.chunked:
            _chunked(self.kind, args, {"x": g}, None, out, backward=True)
        else:
            norms = None if self.norms is None else of_steps(self.norms, low, high)
            read = {"x": g, "gate": self.states.gate(low, high), "start": self.carry}
            changed = {"pre": ghat, "carried": self.carried, "norms": norms, "sums": self.running}
            self.scan.run(high - low, time=low, **read, out=out, **changed)
        if low == 0 and not self.needs_h0:
            return
        # without all of delta, the kernel of the next window overwrites this row
        self.carry = out[0] if self.keep else out[0].clone()
        if args.resets is not None:
            self.carry = started(self.carry, args.resets[low], None)

    def norm(self) -> Tensor:
        """[T], of dL/dh_t; in chunks, phi' is 1, and it is that of delta_t."""
        if self.norms is None:
            return norms_of_steps(self.delta).to(self.delta.dtype)
        return self.norms.sum(1).sqrt()

    def grad_act_param(self) -> Tensor | None:
        """From the running sums of the kernels and their rounding errors."""
        act_param = self.args.act_param
        if self.running is None or act_param is None:
            return None
        exact = (self.running[0].double() - self.running[1]).sum(0)
        exact = exact if self.args.leak is None else exact * self.args.leak
        return (exact.sum() if act_param.numel() == 1 else exact).to(act_param.dtype).view(act_param.shape)


@ieee_products()
def scan_bwd(
    kind: type[Scan], args: ScanArgs, grad_hs: Tensor, saved: Tensor, pre: Tensor | None, needs: Any
) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    steps, B, N = grad_hs.shape
    if args.checkpoint_every and chunk_length(args, steps):
        # chunks and segments have different borders: recompute all states as in the forward
        args = args._replace(checkpoint_every=0)
        saved = scan_fwd(kind, args).hs
    states, window = _States(kind, args, saved, pre), window_steps(B, N)
    adjoints = _Adjoints(kind, args, grad_hs, states, needs)
    sums = _Sums(adjoints.scan, steps, needs)
    side = None
    if not args.checkpoint_every and not adjoints.chunked and sums.required and window < steps:
        side = adjoints.scan.side_stream(window)
    by_window = side is not None or args.checkpoint_every > 0
    stream: AbstractContextManager[Any] = nullcontext() if side is None else side
    if steps and not by_window:
        adjoints.run(0, steps)
    try:
        for low in reversed(range(0, steps, window)) if by_window or sums.required else ():
            high = min(low + window, steps)
            if by_window:
                adjoints.run(low, high)
            with stream:
                sums.add(low, *adjoints.parts(low, high), states)
    finally:
        if side is not None:  # also after an exception: memory that the second stream uses is freed to the main one
            side.join()
    first, scale, second = sums.grad_map()
    return ScanGradients(
        x=adjoints.delta if needs.x and args.weight is None else sums.x,
        first=first,
        scale=scale,
        second=second,
        h0=None if adjoints.carry is None or not needs.h0 else _of_state(args, adjoints.carry, adjoints.carried),
        weight=sums.weight,
        bias=None if sums.bias is None else sums.bias.to(args.h0.dtype),
        act_param=adjoints.grad_act_param(),
        reset_state=None if sums.at_resets is None else _of_state(args, sums.at_resets, sums.ghat_at_resets),
        leak=sums.grad_leak(),
        norm=adjoints.norm() if needs.norm else None,
    )
