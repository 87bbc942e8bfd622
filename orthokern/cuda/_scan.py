"""factored_scan and dense_scan on CUDA; ``csrc/cuda/scan.h`` describes the kernels."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._gpu_scans import before_resets, composed, power, started, token_table, transposed_product
from orthokern._products import ieee_products, norms_of_steps
from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates
from orthokern.cuda import _call as native
from orthokern.cuda._library import product
from orthokern.cuda._steps import Steps
from orthokern.cuda._steps import run as run_steps
from orthokern.cuda._streams import SideStream
from orthokern.cuda._sums import Sums

# The lowest precision of products that a kernel may use. Three TF32 products are slower than IEEE float32.
_PRECISIONS = {"ieee": 0, "3xtf32": 0, "tf32": 1, "bf16": 2}
# Elements of the adjoints in one product of the gradients, 32 MiB. Sums over all steps are accumulated over such
# windows of steps, the last one first, with and without recomputed states, so that the bits are the same.
_WINDOW_ELEMENTS = 1 << 23
# The fewest steps of a window whose products run concurrently with the scan of the next one, which costs a launch for
# each window.
_OVERLAPPED_STEPS = 256
_CLUSTER, _LIBRARY = 1, 2  # ScanPath of csrc/cuda/scan.h
# Clocks of the GPU between a scan on clusters and the products of its window: otherwise the blocks of a product, which
# become ready at the same moment as the next kernel of the scan, occupy the multiprocessors that its clusters need.
_PRODUCT_DELAY = 10_000
# Below this many steps, or above this many sequences, `auto` uses the sequential scan: if the sequences occupy the GPU,
# chunks of time are not faster.
_CHUNKED_STEPS, _CHUNKED_BATCH = 256, 128
# The longest chunk of time. With longer ones, there would be too few to occupy a GPU.
_LONGEST_CHUNK = 128
# The tensors of a launch, all of which the native function is given.
_NONE = dict.fromkeys(("x", "tokens", "table", "gate", "start", "out", "pre", "end", "sums", "norms"))


class Scan:
    """Launches of one scan kernel, forward or backward, over B rows of the batch or over chunks of them.

    args: as ``native.ready_args`` returns them. chunk, sequences: see csrc/cuda/scan.h; None for no chunks.
    """

    def __init__(
        self, args: ScanArgs, *, backward: bool, chunk: int | None = None, sequences: int | None = None
    ) -> None:
        (B, N), act_param = args.h0.shape, args.act_param
        self.args, self.device, self.chunk = args, args.h0.device, chunk
        self.tensors = {name: getattr(args, name) for name in ("first", "scale", "second", "act_param", "lengths")}
        self.tensors["restart"] = None if backward else args.reset_state
        self.cut = None if args.resets is None else _cuts(args.resets, backward)
        self.clip = args.message_clip if backward and args.message_clip > 0 else math.inf
        tokens = not backward and args.x is not None and not args.x.is_floating_point()
        self.sizes = {
            "B": B,
            "N": N,
            "K": args.sizes.get("K", 0),
            "sequences": B if sequences is None else sequences,
            "precision": _PRECISIONS[args.precision],
            "activation": ACTIVATIONS[args.activation].number,
            "act_param_stride": int(act_param is not None and act_param.numel() > 1),
            "backward": int(backward),
        }
        # the shared memory of a sequence depends on which inputs exist
        asked = {**self.sizes, "T": 1, "chunk": 1, "tokens": int(tokens), "cut": int(self.cut is not None)}
        self.plan = native.plan(f"{args.op}_plan", self.device, asked)
        self.packed = False  # whether a launch has filled the workspace
        for name in ("packed1", "packed2"):
            self.tensors[name] = args.second.new_empty(self.plan[name]) if self.plan[name] else None

    def sums(self) -> Tensor:
        """[2, rows, N]: the running sums of act_param's gradient over all launches."""
        return self.args.second.new_zeros(2, self.plan["sums_rows"], self.sizes["N"])

    def norms(self, steps: int) -> Tensor:
        """[T, columns]: partial sums of squares of every step."""
        return self.args.second.new_zeros(steps, self.plan["norm_columns"])

    def run(self, steps: int, *, time: int = 0, **tensors: Tensor | None) -> None:
        """Launch the scan of ``steps`` steps, from step ``time`` of the op on, on the current stream; tensors of these
        steps by the names in csrc/cuda/scan.h."""
        if not steps or not self.sizes["sequences"]:
            return
        table = tensors.get("table")
        sizes = {
            **self.sizes,
            "T": steps,
            "D": 0 if table is None else table.shape[0],
            "chunk": self.chunk or steps,
            "time": time,
            "clip": self.clip,
            "packed": int(self.packed),
        }
        cut = None if self.cut is None else self.cut[time : time + steps]
        args = {**_NONE, **self.tensors, **tensors, "cut": cut}
        if self.plan["path"] == _LIBRARY:
            self._run_steps(sizes, args)
        else:
            native.call(self.args.op, self.device, {**sizes, "plan": self.plan}, args)
            self.packed = True

    def _run_steps(self, sizes: dict[str, Any], args: dict[str, Tensor | None]) -> None:
        """A library product and one kernel per step."""
        start, backward, tf32 = args["start"], self.sizes["backward"], self.plan["precision"] > 0
        if args["lengths"] is not None:  # the kernel writes no padding
            for result in (args["out"], args["pre"]):
                if result is not None:
                    result.zero_()
        shape = self.sizes["sequences"], self.sizes["N"]
        state = self.args.second.new_zeros(shape) if start is None else start.view(shape).clone()
        factors = self._factors()
        tensors = {"state": state, "product": torch.empty_like(state), "last": factors[-1]}
        if len(factors) > 1:
            tensors |= {"first": factors[0], "inner": state.new_empty(len(state), factors[0].shape[1])}

        def launch(steps: Steps, count: int) -> None:
            own = steps.tensors
            end_step = steps.kernel(backward, own["product"], own["state"])
            multiply, rows = product(steps.device, tf32=tf32), own["inner" if "first" in own else "state"]
            for step in range(count):
                if "first" in own:
                    multiply(own["state"], own["first"], rows)
                multiply(rows, own["last"], own["product"])
                end_step(step=step)

        of_scan = {name: value for name, value in sizes.items() if name != "backward"}
        with ieee_products():
            run_steps("scan", (backward, tf32), of_scan, args, tensors, launch, min(sizes["chunk"], sizes["T"]))

    def _factors(self) -> list[Tensor]:
        """Matrices whose product maps the rows of a state: W^T, backward W, as two factors if that is less work."""
        first, scale, second = self.args.first, self.args.scale, self.args.second
        backward = self.sizes["backward"]
        if first is None or scale is None:
            return [second if backward else second.mT]
        if 2 * self.sizes["K"] > self.sizes["N"]:
            w = composed(self.args).to(second.dtype)
            return [w if backward else w.mT]
        return [second * scale, first.mT] if backward else [first * scale, second.mT]


def _cuts(resets: Tensor, backward: bool) -> Tensor:
    """ScanArgs::cut, bool [T, B]: the steps after which the state, or backward the adjoint, is replaced. Forward this
    is the step before a reset; backward the reset itself, which the adjoint does not pass."""
    return resets if backward else before_resets(resets)


def _input_of(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The input term of each step: (e [T, B, N], None), or for token ids (None, table [D, N])."""
    if weight is None:
        return x, None
    if not x.is_floating_point():
        return None, token_table(weight, bias)
    with ieee_products():
        rows = x.flatten(0, 1)
        e = rows @ weight.mT if bias is None else torch.addmm(bias, rows, weight.mT)
    return e.view(*x.shape[:2], weight.shape[0]), None


def chunk_length(args: ScanArgs, steps: int) -> int:
    """Steps of a chunk, which depend on sizes only; 0 for the sequential scan, which clipping and resets require.

    The cost is two scans of C steps over all chunks, and one over the T / C carries: it is lowest for C near sqrt(T).
    C is limited so that there are many chunks.
    """
    if args.activation != "identity" or args.message_clip > 0 or args.algorithm == "sequential" or steps < 2:
        return 0
    if args.resets is not None:
        return 0
    B, N = args.h0.shape
    if args.algorithm == "auto" and (steps < _CHUNKED_STEPS or B > _CHUNKED_BATCH or N > 128):
        return 0
    return max(1, min(_LONGEST_CHUNK, math.isqrt(steps)))


def _chunked(
    args: ScanArgs,
    chunk: int,
    inputs: dict[str, Any],
    start: Tensor | None,
    out: Tensor,
    *,
    backward: bool,
    table: Tensor | None = None,
) -> None:
    """The recurrence without activation, in parallel over chunks of time; out [T, B, N].

    (a) Every chunk but the last runs from a zero state, and only its end is kept. (b) The states between chunks are
    computed in sequence: each is W^chunk times the previous one, plus that end. (c) Every chunk runs again from its
    initial state. W is composed: for (b) in float64, and for (a) and (c) in float32 if that takes fewer products than
    the factors. Backward is the same with W^T, from the last step to the first. Chunks after the end of a sequence give
    zeros for any initial state.
    """
    steps, B, N = out.shape
    count = -(-steps // chunk)
    w = composed(args)
    if args.first is not None and 2 * args.first.shape[1] > N:
        args = args._replace(first=None, scale=None, second=w.float())
    starts = out.new_empty(count, B, N)
    starts[0].copy_(start) if start is not None else starts[0].zero_()

    def scan(chunks: int) -> Scan:
        return Scan(args, backward=backward, chunk=chunk, sequences=chunks * B)

    if count > 1:
        ends = out.new_empty(count - 1, B, N)
        scan(count - 1).run(steps, **inputs, table=table, end=ends)
        of_chunk = power(w if backward else w.mT, chunk).contiguous()
        sizes = {"count": count - 1, "B": B, "N": N}
        native.call("scan_carry", out.device, sizes, {"power": of_chunk, "ends": ends, "starts": starts})
    scan(count).run(steps, **inputs, table=table, start=starts, out=out)


def scan_fwd(args: ScanArgs) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``.

    ``precision`` has an effect above N = 160 (factored) or 192: on the kernels of clusters, and on library products,
    which are TF32 for "tf32" and "bf16".
    """
    assert args.x is not None
    args, _ = native.ready_args(args, len(args.x))
    x, h0, resets, checkpoint_every = args.x, args.h0, args.resets, args.checkpoint_every
    assert x is not None
    steps = args.time_steps
    e, table = _input_of(x, args.weight, args.bias)
    hs = h0.new_empty(steps, *h0.shape)
    pre = torch.empty_like(hs) if args.keeps_pre else None
    terms: dict[str, Any] = {"x": e} if table is None else {"tokens": x}
    chunk = chunk_length(args, steps)
    if chunk:
        _chunked(args, chunk, terms, h0, hs, backward=False, table=table)
    else:
        scan = Scan(args, backward=False)
        start = h0 if resets is None else started(h0, resets[0], args.reset_state)
        scan.run(steps, **terms, table=table, start=start, out=hs, pre=pre)
    ckpt = None
    if checkpoint_every:
        ckpt = torch.cat([h0.unsqueeze(0), hs[checkpoint_every - 1 : steps - 1 : checkpoint_every]])
    return ScanStates(hs, ckpt, pre)


class _Recomputed:
    """The recomputed states of a backward with checkpoints, segment by segment, the last one first.

    Row t - start of ``before`` is h_{t-1}, where start is the first step of the segment. The rows of the segment are
    followed by those of later steps that do not fill a window yet.
    """

    def __init__(self, args: ScanArgs, ckpt: Tensor, steps: int, window: int) -> None:
        assert args.x is not None
        B, N = args.h0.shape
        self.args, self.ckpt, self.every, self.x = args, ckpt, args.checkpoint_every, args.x
        self.table = None if args.x.is_floating_point() else _input_of(args.x, args.weight, args.bias)[1]
        self.scan = Scan(args, backward=False)
        self.before = ckpt.new_empty(min(self.every + window, steps) + 1, B, N)
        self.pre = ckpt.new_empty(self.every, B, N) if ACTIVATIONS[args.activation].needs_input else None

    def run(self, start: int, stop: int, waiting: int) -> tuple[Tensor, Tensor | None]:
        """States and, if the activation needs them, pre-activations of the steps [start, stop). ``waiting`` rows of
        later steps are kept after them."""
        length = stop - start
        if waiting:
            self.before[length : length + waiting] = self.before[:waiting].clone()
        self.before[0].copy_(self.ckpt[start // self.every])
        segment, part = self.before[1 : length + 1], self.x[start:stop]
        pre = None if self.pre is None else self.pre[:length]
        if self.table is None:
            term = {"x": _input_of(part, self.args.weight, self.args.bias)[0]}
        else:
            term = {"tokens": part}
        first = self.before[0]
        if self.args.resets is not None:
            first = started(first, self.args.resets[start], self.args.reset_state)
        # the last row may also belong to a waiting step: it has the same bits
        self.scan.run(length, **term, table=self.table, start=first, out=segment, pre=pre, time=start)
        return segment, pre


def window_steps(B: int, N: int) -> int:
    """Steps of a window of the gradients' products, which depend on sizes only."""
    window = max(1, _WINDOW_ELEMENTS // max(B * N, 1))
    return window - (window % 16 if window > 16 else 0)


class _Products:
    """The products with the adjoints of whole windows, the last window first."""

    def __init__(self, args: ScanArgs, steps: int, window: int, needs: Any) -> None:
        x, lengths, reset_state = args.x, args.lengths, args.reset_state
        self.h0, self.weight, self.resets = args.h0, args.weight, args.resets
        alive = None if lengths is None else torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths
        self.sums = Sums(args, alive, needs) if needs.sums else None
        # [B, N], the sum of delta_t over the resets
        self.cut_sum = torch.zeros_like(reset_state) if reset_state is not None and needs.reset_state else None
        features = needs.x and self.weight is not None and x is not None and x.is_floating_point()
        # [T, B, D]
        self.grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if features and x is not None else None
        self.window, self.high = window, steps  # high: the first step that has been processed
        self.required = self.sums is not None or self.grad_x is not None

    def add(self, start: int, low: int, delta: Tensor, before: Tensor | None, states: Tensor) -> None:
        """Process the windows that begin at ``start``, the first step whose adjoint is known, or later.

        low: the step of delta's first row. before: h_{t-1} from step ``start`` on, or None if ``states`` has all
        states.
        """
        for begin in reversed(range(start - start % self.window, self.high, self.window)):
            if begin < start:
                break
            end = min(begin + self.window, self.high)
            rows = delta[begin - low : end - low]
            if self.resets is not None and self.cut_sum is not None:
                self.cut_sum += started(rows, ~self.resets[begin:end], None).sum(0)
            if self.sums is not None:
                if before is not None:
                    entering = before[begin - start : end - start]
                elif begin > 0:
                    entering = states[begin - 1 : end - 1]
                else:  # a copy of at most a window: one product takes less time than two
                    entering = torch.cat([self.h0.unsqueeze(0), states[: end - 1]])
                self.sums.add(begin, rows, entering)
            if self.grad_x is not None and self.weight is not None:
                torch.mm(rows.flatten(0, 1), self.weight, out=self.grad_x[begin:end].flatten(0, 1))
            self.high = begin


def _parameter_gradient(running: Tensor, act_param: Tensor) -> Tensor:
    """grad_act_param from the running sums of the kernels and their rounding errors, [2, rows, N]."""
    exact = (running[0].double() - running[1]).sum(0)
    return (exact.sum() if act_param.numel() == 1 else exact).to(act_param.dtype).view(act_param.shape)


class _Adjoints(NamedTuple):
    """Results of the adjoint scan."""

    delta: Tensor  # [T, B, N]; with checkpoints, part of it
    carry: Tensor | None  # [B, N], delta_1
    running: Tensor | None  # sums for the gradient of act_param
    norms: Tensor | None  # [T, columns], partial sums of squares


def _adjoint_scan(
    args: ScanArgs,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    products: _Products,
    needs: Any,
    *,
    keep_delta: bool,
) -> _Adjoints:
    """The adjoint recurrence, segment by segment, and the products with its results."""
    h0, resets = args.h0, args.resets
    steps, B, N = grad_hs.shape
    chunk, window = chunk_length(args, steps), products.window
    every = args.checkpoint_every or max(steps, 1)
    scan = Scan(args, backward=True)
    again = _Recomputed(args, states, steps, window) if args.checkpoint_every else None
    side = None
    # a batch with so short a window occupies the GPU, and products of a library alternate with other kernels
    room = scan.plan["path"] != _LIBRARY and window >= _OVERLAPPED_STEPS
    if again is None and not chunk and products.required and room and window < steps:
        delay = _PRODUCT_DELAY if scan.plan["path"] == _CLUSTER else 0
        every, side = window, SideStream(h0.device, delay)  # products of a window run during the scan of the next one

    # Row t - low of delta is delta_t. low is 0 if all are kept, else the start of the segment; then the rows of waiting
    # steps follow, as in _Recomputed.
    delta = h0.new_empty(steps if keep_delta else min(every + window, steps), B, N)
    carry = None  # delta of the step after the segment
    running = scan.sums() if args.act_param is not None and needs.act_param else None
    norms = scan.norms(steps) if needs.norm and not chunk else None
    try:
        for start in reversed(range(0, steps, every)):
            stop = min(start + every, steps)
            low = 0 if keep_delta else start
            if again is None:
                segment, gate = states[start:stop], None if pre is None else pre[start:stop]
            else:
                waiting = products.high - stop
                if waiting and not keep_delta:
                    delta[stop - start : products.high - start] = delta[:waiting].clone()
                segment, gate = again.run(start, stop, waiting)
            if gate is None and args.activation != "identity":
                gate = segment
            place, g = delta[start - low : stop - low], grad_hs[start:stop]
            if chunk:
                _chunked(args, chunk, {"x": g}, None, place, backward=True)
            else:
                of_steps = None if norms is None else norms[start:stop]
                results = {"out": place, "norms": of_steps, "sums": running}
                scan.run(stop - start, time=start, x=g, gate=gate, start=carry, **results)
            # the kernel of the next segment may overwrite this row
            carry = place[0] if keep_delta else place[0].clone()
            if resets is not None:
                carry = started(carry, resets[start], None)
            with side or nullcontext():
                products.add(start, low, delta, None if again is None else again.before, states)
    finally:
        if side is not None:  # also after an exception: memory that the second stream uses is freed to the main one
            side.join()
    return _Adjoints(delta, carry, running, norms)


@ieee_products()
def scan_bwd(args: ScanArgs, grad_hs: Tensor, states: Tensor, pre: Tensor | None, needs: Any) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    args, (grad_hs, states, pre) = native.ready_args(args, len(grad_hs), grad_hs=grad_hs, states=states, pre=pre)
    h0, act_param = args.h0, args.act_param
    steps, B, N = grad_hs.shape
    if args.checkpoint_every and chunk_length(args, steps):
        # chunks and segments have different borders: recompute all states as in the forward
        args = args._replace(checkpoint_every=0)
        states = scan_fwd(args).hs

    window, of_input = window_steps(B, N), needs.x and args.weight is None
    products = _Products(args, steps, window, needs)
    keep_delta = not args.checkpoint_every or of_input
    delta, carry, running, norms = _adjoint_scan(args, grad_hs, states, pre, products, needs, keep_delta=keep_delta)
    grad_h0 = norm = None
    if needs.h0:
        grad_h0 = torch.zeros_like(h0) if carry is None else transposed_product(args, carry)
    if needs.norm:
        norm = norms_of_steps(delta).to(delta.dtype) if norms is None else norms.sum(1).sqrt()
    grad_state = None if products.cut_sum is None else transposed_product(args, products.cut_sum)
    grad_act_param = None if running is None or act_param is None else _parameter_gradient(running, act_param)
    m, grad_weight, grad_bias = (None, None, None) if products.sums is None else products.sums.results()
    return ScanGradients(
        x=delta if of_input else products.grad_x,
        m=m,
        h0=grad_h0,
        weight=grad_weight,
        bias=grad_bias,
        act_param=grad_act_param,
        reset_state=grad_state,
        leak=None,
        norm=norm,
    )
