"""factored_scan and dense_scan on CUDA; ``csrc/cuda/scan.h`` describes the kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._gpu_scans import Models, before_resets, composed, power, started, token_table, transposed_product
from orthokern._products import ieee_products, norms_of_steps
from orthokern._scan_contract import Map, ScanGradients, ScanInputs, ScanOptions, ScanStates
from orthokern.cuda import _call as native
from orthokern.cuda._sums import Sums

_PRECISIONS = {"ieee": 0, "3xtf32": 1, "tf32": 2, "bf16": 3}
# Elements of the adjoints in one product of the gradients, 32 MiB. Sums over all steps are accumulated over such
# windows of steps, the last one first, with and without recomputed states, so that the bits are the same.
_WINDOW_ELEMENTS = 1 << 23
# The fewest steps of a window whose products run concurrently with the scan of the next one, which costs a launch for
# each window; and two paths of csrc/cuda/scan.h: maps in registers, single steps.
_OVERLAPPED_STEPS, _RESIDENT, _SINGLE_STEPS = 256, 0, 2
# Below this many steps, or above this many sequences, `auto` uses the sequential scan: if the sequences occupy the GPU,
# chunks of time are not faster.
_CHUNKED_STEPS, _CHUNKED_BATCH = 256, 128
# The longest chunk of time. With longer ones, there would be too few to occupy a GPU.
_LONGEST_CHUNK = 128
# The tensors of a launch, all of which the native function is given.
_NONE = dict.fromkeys(("x", "tokens", "table", "gate", "start", "out", "pre", "end", "sums", "norms"))


class Scan:
    """Launches of one scan kernel, forward or backward, over B rows of the batch or over chunks of them.

    map_ and act_param are float32 and contiguous; with several models in the B rows they have these in front.
    options.lengths is in the form that kernels need. tokens: whether the inputs are token ids. chunk, sequences: see
    csrc/cuda/scan.h; None for no chunks. restart: [B, N], the state that a reset sets; None: zeros.
    """

    def __init__(
        self,
        map_: Map,
        options: ScanOptions,
        act_param: Tensor | None,
        *,
        backward: bool,
        B: int,
        tokens: bool = False,
        chunk: int | None = None,
        sequences: int | None = None,
        restart: Tensor | None = None,
        models: int = 1,
    ) -> None:
        N = map_.second.shape[-2]
        self.map, self.device, self.chunk = map_, map_.second.device, chunk
        self.tensors = {**map_._asdict(), "act_param": act_param, "lengths": options.lengths, "restart": restart}
        self.cut = None if options.resets is None else _cuts(options.resets, backward)
        self.clip = options.message_clip if backward and options.message_clip > 0 else math.inf
        self.sizes = {
            "B": B,
            "N": N,
            "K": 0 if map_.first is None else map_.first.shape[-1],
            "sequences": B if sequences is None else sequences,
            "of_model": (B if sequences is None else sequences) // models,
            "precision": _PRECISIONS[options.precision],
            "activation": ACTIVATIONS[options.activation].number,
            "act_param_stride": int(act_param is not None and act_param.numel() > models),
            "backward": int(backward),
        }
        # the shared memory of a sequence depends on which inputs exist
        asked = {**self.sizes, "T": 1, "chunk": 1, "tokens": int(tokens), "cut": int(self.cut is not None)}
        self.plan = native.plan(f"{map_.op}_plan", self.device, asked)
        for name in ("packed1", "packed2", "work"):
            self.tensors[name] = map_.second.new_empty(self.plan[name]) if self.plan[name] else None

    def sums(self) -> Tensor:
        """[2, rows, N]: the running sums of act_param's gradient over all launches."""
        return self.map.second.new_zeros(2, self.plan["sums_rows"], self.sizes["N"])

    def norms(self, steps: int) -> Tensor:
        """[T, columns]: partial sums of squares of every step."""
        return self.map.second.new_zeros(steps, self.plan["norm_columns"])

    def run(self, steps: int, *, time: int = 0, **tensors: Tensor | None) -> None:
        """Launch the scan of ``steps`` steps, from step ``time`` of the op on, on the current stream; tensors of these
        steps by the names in csrc/cuda/scan.h."""
        if not steps or not self.sizes["sequences"]:
            return
        table = tensors.get("table")
        sizes = {
            **self.sizes, "T": steps, "D": 0 if table is None else table.shape[0], "chunk": self.chunk or steps,
            "time": time, "clip": self.clip, "plan": self.plan,
        }  # fmt: skip
        cut = None if self.cut is None else self.cut[time : time + steps]
        native.call(self.map.op, self.device, sizes, {**_NONE, **self.tensors, **tensors, "cut": cut})


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
        if weight.ndim == 3:
            of_models = x.unflatten(1, (len(weight), -1)).unbind(1)
            terms = [_input_of(of_models[r], w, None if bias is None else bias[r])[0] for r, w in enumerate(weight)]
            return torch.cat(terms, 1), None  # type: ignore[arg-type]
        rows = x.flatten(0, 1)
        e = rows @ weight.mT if bias is None else torch.addmm(bias, rows, weight.mT)
    return e.view(*x.shape[:2], weight.shape[0]), None


def chunk_length(options: ScanOptions, steps: int, B: int, N: int) -> int:
    """Steps of a chunk, which depend on sizes only; 0 for the sequential scan, which clipping and resets require.

    The cost is two scans of C steps over all chunks, and one over the T / C carries: it is lowest for C near sqrt(T).
    C is limited so that there are many chunks.
    """
    if options.activation != "identity" or options.message_clip > 0 or options.algorithm == "sequential" or steps < 2:
        return 0
    if options.resets is not None:
        return 0
    if options.algorithm == "auto" and (steps < _CHUNKED_STEPS or B > _CHUNKED_BATCH or N > 128):
        return 0
    return max(1, min(_LONGEST_CHUNK, math.isqrt(steps)))


def _chunked(
    map_: Map, options: ScanOptions, chunk: int, inputs: dict[str, Any], start: Tensor | None, out: Tensor,
    *, backward: bool, table: Tensor | None = None,
) -> None:  # fmt: skip
    """The recurrence without activation, in parallel over chunks of time; out [T, B, N].

    (a) Every chunk but the last runs from a zero state, and only its end is kept. (b) The states between chunks are
    computed in sequence: each is W^chunk times the previous one, plus that end. (c) Every chunk runs again from its
    initial state. W is composed: for (b) in float64, and for (a) and (c) in float32 if that takes fewer products than
    the factors. Backward is the same with W^T, from the last step to the first. Chunks after the end of a sequence give
    zeros for any initial state.
    """
    steps, B, N = out.shape
    count = -(-steps // chunk)
    w = composed(map_)
    if map_.first is not None and 2 * map_.first.shape[1] > N:
        map_ = Map(None, None, w.float())
    starts = out.new_empty(count, B, N)
    starts[0].copy_(start) if start is not None else starts[0].zero_()

    def scan(chunks: int) -> Scan:
        return Scan(
            map_, options, None, backward=backward, B=B, tokens=table is not None, chunk=chunk, sequences=chunks * B
        )

    if count > 1:
        ends = out.new_empty(count - 1, B, N)
        scan(count - 1).run(steps, **inputs, table=table, end=ends)
        of_chunk = power(w if backward else w.mT, chunk).contiguous()
        sizes = {"count": count - 1, "B": B, "N": N}
        native.call("scan_carry", out.device, sizes, {"power": of_chunk, "ends": ends, "starts": starts})
    scan(count).run(steps, **inputs, table=table, start=starts, out=out)


def _ready(map_: Map, inputs: ScanInputs, options: ScanOptions) -> tuple[Map, ScanInputs, ScanOptions]:
    """The arguments, checked and in the form that kernels need."""
    device = map_.second.device

    def ready(tensor: Tensor | None, name: str) -> Any:
        ids = tensor is not None and not tensor.is_floating_point()
        return native.ready(tensor, torch.int64 if ids else torch.float32, device, name)

    names = ("v", "s", "u") if map_.op == "factored_scan" else ("", "", "w")
    return (
        Map(*[ready(tensor, name) for tensor, name in zip(map_, names, strict=True)]),
        ScanInputs(*[ready(tensor, name) for name, tensor in inputs._asdict().items()]),
        dataclasses.replace(
            options,
            lengths=native.ready(options.lengths, torch.int64, device, "lengths"),
            resets=native.ready(options.resets, torch.bool, device, "resets"),
        ),
    )


def scan_fwd(map_: Map, inputs: ScanInputs, options: ScanOptions) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``.

    A precision below "ieee" has an effect only where single steps are launched.
    """
    map_, inputs, options = _ready(map_, inputs, options)
    models = Models(map_.second)
    inputs, options = models.rows(inputs, options)
    x, h0, weight, bias, act_param, reset_state = inputs
    assert x is not None
    steps, (B, N), checkpoint_every = x.shape[0], h0.shape, options.checkpoint_every
    e, table = _input_of(x, weight, bias)
    hs = h0.new_empty(steps, B, N)
    pre = h0.new_empty(steps, B, N) if options.keeps_pre else None
    terms: dict[str, Any] = {"x": e} if table is None else {"tokens": x}
    chunk = chunk_length(options, steps, B, N)
    if chunk:
        _chunked(map_, options, chunk, terms, h0, hs, backward=False, table=table)
    else:
        scan = Scan(
            map_, options, act_param, backward=False, B=B, tokens=table is not None, restart=reset_state,
            models=models.count,
        )  # fmt: skip
        start = h0 if options.resets is None else started(h0, options.resets[0], reset_state)
        scan.run(steps, **terms, table=table, start=start, out=hs, pre=pre)
    ckpt = None
    if checkpoint_every:
        ckpt = torch.cat([h0.unsqueeze(0), hs[checkpoint_every - 1 : steps - 1 : checkpoint_every]])
    return ScanStates(*(models.apart(tensor) for tensor in (hs, ckpt, pre)))


class _Recomputed:
    """The recomputed states of a backward with checkpoints, segment by segment, the last one first.

    Row t - start of ``before`` is h_{t-1}, where start is the first step of the segment. The rows of the segment are
    followed by those of later steps that do not fill a window yet.
    """

    def __init__(
        self, map_: Map, inputs: ScanInputs, options: ScanOptions, ckpt: Tensor, steps: int, window: int
    ) -> None:
        assert inputs.x is not None
        B, N = inputs.h0.shape
        self.inputs, self.ckpt, self.every, self.x = inputs, ckpt, options.checkpoint_every, inputs.x
        tokens = inputs.weight is not None and not inputs.x.is_floating_point()
        self.table = _input_of(inputs.x, inputs.weight, inputs.bias)[1] if tokens else None
        self.scan = Scan(
            map_, options, inputs.act_param, backward=False, B=B, tokens=tokens, restart=inputs.reset_state,
            models=Models(map_.second).count,
        )  # fmt: skip
        self.resets = options.resets
        self.before = ckpt.new_empty(min(self.every + window, steps) + 1, B, N)
        self.pre = ckpt.new_empty(self.every, B, N) if ACTIVATIONS[options.activation].needs_input else None

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
            term = {"x": _input_of(part, self.inputs.weight, self.inputs.bias)[0]}
        else:
            term = {"tokens": part}
        first = self.before[0]
        if self.resets is not None:
            first = started(first, self.resets[start], self.inputs.reset_state)
        # the last row may also belong to a waiting step: it has the same bits
        self.scan.run(length, **term, table=self.table, start=first, out=segment, pre=pre, time=start)
        return segment, pre


def window_steps(B: int, N: int) -> int:
    """Steps of a window of the gradients' products, which depend on sizes only."""
    window = max(1, _WINDOW_ELEMENTS // max(B * N, 1))
    return window - (window % 16 if window > 16 else 0)


class _Beside:
    """A second stream for work that runs concurrently with the scan: the current stream inside a ``with`` block.

    It first waits for all work of the current stream, which waits for it in ``join`` only. References to tensors of
    both streams must be kept until then. A CUDA graph captures both. Without a CUDA device, in tests, there is one
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.stream = None if self.main is None else _side_stream(device.index or 0, self.main.cuda_stream)
        self.inside: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(self.main)
            self.inside = torch.cuda.stream(self.stream)
            self.inside.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.inside is not None:
            self.inside.__exit__(*error)

    def join(self) -> None:
        if self.main is not None and self.stream is not None:
            self.main.wait_stream(self.stream)


@functools.lru_cache(maxsize=32)
def _side_stream(device: int, main: int) -> Any:
    """The second stream beside the stream with the address ``main``. Each has its own: while a thread captures a graph,
    no work outside of the graph may wait for its streams. Cached: torch has only 32 streams for each device."""
    return torch.cuda.Stream(device)


@dataclasses.dataclass(eq=False)
class _Products:
    """The products with the adjoints of whole windows, the last window first; None for what is not wanted."""

    sums: Sums | None
    weight: Tensor | None  # [N, D]
    grad_x: Tensor | None  # [T, B, D], of features
    window: int  # steps of a window
    high: int  # the first step that has been processed, T at first
    resets: Tensor | None  # bool [T, B]
    cut_sum: Tensor | None  # [B, N], to which delta_t of the resets is added

    def add(self, start: int, low: int, delta: Tensor, before: Tensor | None, states: Tensor, h0: Tensor) -> None:
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
            if self.sums is not None and begin > 0:
                self.sums.add(
                    begin, rows, states[begin - 1 : end - 1] if before is None else before[begin - start : end - start]
                )
            elif self.sums is not None:  # without checkpoints, h0 is not in the same tensor
                if end > 1:
                    self.sums.add(1, rows[1:], states[: end - 1] if before is None else before[1:end])
                self.sums.add(0, rows[:1], h0.unsqueeze(0) if before is None else before[:1])
            if self.grad_x is not None and self.weight is not None:
                torch.mm(rows.flatten(0, 1), self.weight, out=self.grad_x[begin:end].flatten(0, 1))
            self.high = begin


class _ProductsOfModels:
    """`_Products` of each model, from inputs and options with the rows of all."""

    def __init__(
        self, models: Models, inputs: ScanInputs, options: ScanOptions, steps: int, window: int, need_x: bool,
        need_params: bool,
    ) -> None:  # fmt: skip
        lengths, resets = options.lengths, options.resets
        alive = None if lengths is None else torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths
        self.models, self.h0, self.each = models, inputs.h0, []
        for r in range(models.count):
            own_inputs = models.inputs_of(inputs, r)
            x, _, weight, _, _, reset_state = own_inputs
            here, own = (None if t is None else models.of(t, r) for t in (alive, resets))
            sums = Sums(own_inputs, here, own) if need_params else None
            cut_sum = None if resets is None or reset_state is None else torch.zeros_like(reset_state)
            features = need_x and weight is not None and x is not None and x.is_floating_point()
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if features and x is not None else None
            self.each.append(_Products(sums, weight, grad_x, window, steps, own, cut_sum))
        self.wanted = need_params or self.each[0].grad_x is not None

    @property
    def high(self) -> int:
        return self.each[0].high

    def add(self, start: int, low: int, delta: Tensor, before: Tensor | None, states: Tensor) -> None:
        for r, products in enumerate(self.each):
            rows = [None if t is None else self.models.of(t, r) for t in (delta, before, states)]
            products.add(start, low, rows[0], rows[1], rows[2], self.models.of(self.h0, r, 0))  # type: ignore[arg-type]

    def found(self, name: str, dim: int = 0) -> Any:
        """An attribute of the products or of their sums, for all models."""
        of_all: list[Any] = [getattr(one if hasattr(one, name) else one.sums, name, None) for one in self.each]
        if of_all[0] is None:
            return None
        return torch.stack(of_all, dim) if self.models.several else of_all[0]


def _parameter_gradient(running: Tensor, act_param: Tensor | None) -> Tensor:
    """grad_act_param from the running sums of the kernels and their rounding errors, [2, rows, N]."""
    assert act_param is not None
    exact = (running[0].double() - running[1]).sum(0)
    return (exact.sum() if act_param.numel() == 1 else exact).to(act_param.dtype).view(act_param.shape)


def scan_bwd(
    map_: Map,
    inputs: ScanInputs,
    options: ScanOptions,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    *,
    need_x: bool = True,
    need_params: bool = True,
) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    map_, inputs, options = _ready(map_, inputs, options)
    models = Models(map_.second)
    inputs, options = models.rows(inputs, options)
    h0, act_param, weight = inputs.h0, inputs.act_param, inputs.weight
    saved: list[Any] = [
        models.joined(native.ready(tensor, torch.float32, h0.device, name))
        for name, tensor in (("grad_hs", grad_hs), ("states", states), ("pre", pre))
    ]
    grad_hs, states, pre = saved
    steps, B, N = grad_hs.shape
    chunk, resets = chunk_length(options, steps, B, N), options.resets
    if options.checkpoint_every and chunk:
        # chunks and segments have different borders: recompute all states as in the forward
        options = dataclasses.replace(options, checkpoint_every=0)
        states = scan_fwd(map_, inputs, options).hs

    window = window_steps(B, N)
    every = options.checkpoint_every or max(steps, 1)
    keep_delta = not options.checkpoint_every or (need_x and weight is None)
    scan = Scan(map_, options, act_param, backward=True, B=B, models=models.count)
    again = _Recomputed(map_, inputs, options, states, steps, window) if options.checkpoint_every else None
    running = scan.sums() if act_param is not None and need_params else None
    norms = scan.norms(steps)
    products, beside = _ProductsOfModels(models, inputs, options, steps, window, need_x, need_params), None
    # single steps, and batches with so short a window, occupy the GPU, or alternate with other kernels anyway
    room = scan.plan["path"] != _SINGLE_STEPS and window >= _OVERLAPPED_STEPS
    if again is None and not chunk and products.wanted and room:
        every, beside = window, _Beside(h0.device)  # products of a window run during the scan of the next one

    # Row t - low of delta is delta_t. low is 0 if all are kept, else the start of the segment; then the rows of waiting
    # steps follow, as in _Recomputed.
    delta = h0.new_empty(steps if keep_delta else min(every + window, steps), B, N)
    carry = None  # delta of the step after the segment
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
        if gate is None and options.activation != "identity":
            gate = segment
        place, g = delta[start - low : stop - low], grad_hs[start:stop]
        if chunk:
            _chunked(map_, options, chunk, {"x": g}, None, place, backward=True)
        else:
            scan.run(
                stop - start, x=g, gate=gate, start=carry, out=place, norms=norms[start:stop], sums=running, time=start
            )
        # the kernel of the next segment may overwrite this row
        carry = place[0] if keep_delta else place[0].clone()
        if resets is not None:
            carry = started(carry, resets[start], None)
        with ieee_products(), beside or nullcontext():
            products.add(start, low, delta, None if again is None else again.before, states)
    if beside is not None:
        beside.join()

    cut_sum = products.found("cut_sum")
    with ieee_products():
        grad_h0 = transposed_product(map_, models.apart(torch.zeros_like(h0) if carry is None else carry, 0))
        grad_reset_state = None if cut_sum is None else transposed_product(map_, cut_sum)
    if chunk:
        grad_norm = norms_of_steps(delta).to(delta.dtype)
    else:
        grad_norm = models.apart(norms).sum(-1).sqrt().movedim(-1, 0) if models.several else norms.sum(1).sqrt()
    grad_x = products.found("grad_x", 1)
    if need_x and weight is None:
        grad_x = models.apart(delta)
    if not need_params:
        return ScanGradients(grad_x, None, grad_h0, None, None, None, grad_reset_state, grad_norm)
    grad_act_param = None
    if running is not None and act_param is not None:
        params = act_param if models.several else act_param.unsqueeze(0)
        each = [_parameter_gradient(models.of(running, r), param) for r, param in enumerate(params)]
        grad_act_param = torch.stack(each) if models.several else each[0]
    return ScanGradients(
        grad_x, products.found("m"), grad_h0, products.found("grad_weight"), products.found("grad_bias"),
        grad_act_param, grad_reset_state, grad_norm,
    )  # fmt: skip


def serves_replicas(map_: Map, options: ScanOptions, steps: int, B: int) -> bool:
    """Whether a call for R models can be one launch: if the maps fit into registers, without chunks of time."""
    N = map_.second.shape[-2]
    if chunk_length(options, steps, B, N):
        return False
    one = Map._make(None if t is None else t[0] for t in map_)
    return Scan(one, options, None, backward=True, B=B).plan["path"] == _RESIDENT
