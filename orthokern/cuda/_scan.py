"""What factored_scan and dense_scan share on CUDA; how their kernels run: ``csrc/cuda/scan.h``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._products import ieee_products
from orthokern.cuda import _call as native
from orthokern.cuda._sums import Sums

_PRECISIONS = {"ieee": 0, "3xtf32": 1, "tf32": 2, "bf16": 3}
# Elements of the adjoints in one product of the gradients, 32 MiB. A sum over all steps is one of such windows of
# steps, last one first, however the states came about: so recomputing them changes no bit.
_WINDOW_ELEMENTS = 1 << 23
# Below this many steps, or above this many sequences, `auto` scans one step after the other: chunks of time have
# nothing to gain when the sequences fill the GPU already.
_CHUNKED_STEPS, _CHUNKED_BATCH = 256, 128
# Chunked: the longest chunk. Longer ones leave fewer of them than fill a GPU.
_LONGEST_CHUNK = 128


@dataclasses.dataclass
class Map:
    """W = U diag(s) V^T by u, v [N, K] and s [K], or W [N, N] itself in u's place without s and v; and the least
    precision that its products in the recurrence may have."""

    u: Tensor
    s: Tensor | None = None
    v: Tensor | None = None
    precision: str = "ieee"

    @property
    def op(self) -> str:
        return "dense_scan" if self.s is None else "factored_scan"

    def composed(self) -> Tensor:
        """W [N, N], composed, in float64."""
        if self.s is None or self.v is None:
            return self.u.double()
        return (self.u.double() * self.s) @ self.v.double().mT

    def transposed_product(self, rows: Tensor) -> Tensor:
        """W^T applied to rows [B, N]."""
        return rows @ self.u if self.s is None or self.v is None else ((rows @ self.u) * self.s) @ self.v.mT

    def native(self, backward: bool) -> dict[str, Tensor | None]:
        """The factors as the kernels take them: in the order of use, which the backward reverses."""
        if self.s is None or self.v is None:
            return {"first": None, "scale": None, "second": self.u}
        first, second = (self.u, self.v) if backward else (self.v, self.u)
        return {"first": first, "scale": self.s, "second": second}


class Scan:
    """Launches of one scan kernel, forward or backward, over rows of the batch or over chunks of them.

    Args:
        map_: the recurrent map, float32 and contiguous.
        backward: which of the two recurrences.
        B: rows of the batch.
        activation, act_param: of the op; act_param [1] or [N] or None.
        tokens: whether the inputs are token ids.
        chunk, sequences: see csrc/cuda/scan.h; None for no chunks.
        lengths, message_clip: of the op.
    """

    def __init__(
        self,
        map_: Map,
        *,
        backward: bool,
        B: int,
        activation: str,
        act_param: Tensor | None,
        tokens: bool = False,
        chunk: int | None = None,
        sequences: int | None = None,
        lengths: Tensor | None = None,
        message_clip: float = 0.0,
    ) -> None:
        N = map_.u.shape[0]
        self.map, self.backward, self.device = map_, backward, map_.u.device
        self.chunk, self.act_param, self.lengths = chunk, act_param, lengths
        self.clip = message_clip if message_clip > 0 else math.inf
        self.sizes = {
            "B": B,
            "N": N,
            "K": 0 if map_.s is None else map_.s.shape[0],
            "sequences": B if sequences is None else sequences,
            "precision": _PRECISIONS[map_.precision],
            "activation": ACTIVATIONS[activation].number,
            "act_param_stride": int(act_param is not None and act_param.numel() > 1),
            "backward": int(backward),
        }
        # which inputs there are decides how much shared memory a sequence takes
        asked = {**self.sizes, "T": 1, "chunk": 1, "tokens": int(tokens)}
        self.plan = native.plan(f"{map_.op}_plan", self.device, asked)
        floats = {name: self.plan[name] for name in ("packed1", "packed2", "work")}
        self.workspace = {name: map_.u.new_empty(count) if count else None for name, count in floats.items()}

    def sums(self) -> Tensor:
        """[2, rows, N]: the running sums of act_param's gradient, which later launches continue."""
        return self.map.u.new_zeros(2, self.plan["sums_rows"], self.sizes["N"])

    def norms(self, steps: int) -> Tensor:
        """[T, columns]: partial sums of squares of every step."""
        return self.map.u.new_zeros(steps, self.plan["norm_columns"])

    def run(
        self,
        steps: int,
        *,
        x: Tensor | None = None,
        tokens: Tensor | None = None,
        table: Tensor | None = None,
        gate: Tensor | None = None,
        start: Tensor | None = None,
        out: Tensor | None = None,
        pre: Tensor | None = None,
        end: Tensor | None = None,
        sums: Tensor | None = None,
        norms: Tensor | None = None,
        time: int = 0,
    ) -> None:
        """Put the scan of ``steps`` steps, from step ``time`` of the op on, on the stream.

        Tensors of these steps, by the names of csrc/cuda/scan.h.
        """
        if not steps or not self.sizes["sequences"]:
            return
        sizes = {
            **self.sizes, "T": steps, "D": 0 if table is None else table.shape[0], "chunk": self.chunk or steps,
            "time": time, "clip": self.clip, "plan": self.plan,
        }  # fmt: skip
        tensors = {
            **self.map.native(self.backward), **self.workspace, "x": x, "tokens": tokens, "table": table, "gate": gate,
            "start": start, "out": out, "pre": pre, "end": end, "sums": sums, "norms": norms,
            "act_param": self.act_param, "lengths": self.lengths,
        }  # fmt: skip
        native.call(self.map.op, self.device, sizes, tensors)


def _input_of(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(e [T, B, N], None), or for token ids (None, table [D, N]): what the kernels add in each step."""
    if weight is None:
        return x, None
    if not x.is_floating_point():
        table = weight.mT if bias is None else weight.mT + bias
        return None, table.contiguous()
    with ieee_products():
        rows = x.flatten(0, 1)
        e = rows @ weight.mT if bias is None else torch.addmm(bias, rows, weight.mT)
    return e.view(*x.shape[:2], weight.shape[0]), None


def chunk_length(map_: Map, steps: int, B: int, activation: str, algorithm: str, message_clip: float = 0.0) -> int:
    """Steps of a chunk, from sizes alone; 0 for the sequential scan, which a clip needs: chunks add up linear maps.

    Two scans of C steps over all chunks, and one over the T / C carries: least for C near sqrt(T), and short enough
    to leave many chunks.
    """
    if activation != "identity" or message_clip > 0 or algorithm == "sequential" or steps < 2:
        return 0
    if algorithm == "auto" and (steps < _CHUNKED_STEPS or B > _CHUNKED_BATCH or map_.u.shape[0] > 128):
        return 0
    return max(1, min(_LONGEST_CHUNK, math.isqrt(steps)))


def _power(w: Tensor, exponent: int) -> Tensor:
    """w^exponent [N, N] in float64, by repeated squaring; exponent > 0."""
    square, power = w.double(), None
    while exponent:
        if exponent & 1:
            power = square if power is None else power @ square
        exponent >>= 1
        if exponent:
            square = square @ square
    assert power is not None
    return power


def _chunked(
    map_: Map, chunk: int, steps: int, B: int, inputs: dict[str, Any], start: Tensor | None, out: Tensor,
    *, backward: bool, table: Tensor | None = None, lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """The recurrence without activation over chunks of time at once; out [T, B, N].

    (a) every chunk but the last from a zero state, of which only the end is kept; (b) the states at the chunks'
    borders, one after the other: each is W^chunk times the one before, plus that end; (c) every chunk again, from its
    border. W is composed: for (b) in float64, and for (a) and (c) in float32 where that is fewer products than those of
    the factors. Backward is the same with W^T, from the last step to the first. Chunks behind
    the end of a sequence give zeros whatever enters them: forward nothing of theirs is kept, backward they come first.
    """
    N = map_.u.shape[0]
    count = -(-steps // chunk)
    new = map_.u.new_empty
    w = map_.composed()
    if map_.s is not None and 2 * map_.s.shape[0] > N:
        map_ = Map(w.float(), precision=map_.precision)
    starts = new(count, B, N)
    starts[0].copy_(start) if start is not None else starts[0].zero_()
    common: dict[str, Any] = {
        "backward": backward, "B": B, "activation": "identity", "act_param": None, "lengths": lengths
    }  # fmt: skip
    if count > 1:
        ends = new(count - 1, B, N)
        local = Scan(map_, **common, tokens=table is not None, chunk=chunk, sequences=(count - 1) * B)
        local.run(steps, **inputs, table=table, end=ends)
        power = _power(w if backward else w.mT, chunk).contiguous()
        sizes = {"count": count - 1, "B": B, "N": N}
        native.call("scan_carry", map_.u.device, sizes, {"power": power, "ends": ends, "starts": starts})
    whole = Scan(map_, **common, tokens=table is not None, chunk=chunk, sequences=count * B)
    whole.run(steps, **inputs, table=table, start=starts, out=out)


def _scan_inputs(
    map_: Map, h0: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, act_param: Tensor | None
) -> tuple[Map, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The same, checked and contiguous."""
    dtype, device = torch.float32, map_.u.device

    def ready(tensor: Tensor | None, name: str, dtype: torch.dtype = dtype) -> Any:
        return native.ready(tensor, dtype, device, name)

    factored = map_.s is not None
    ready_map = Map(ready(map_.u, "u" if factored else "w"), ready(map_.s, "s"), ready(map_.v, "v"), map_.precision)
    ids = x is not None and not x.is_floating_point()
    x = ready(x, "x", torch.int64 if ids else dtype)
    return ready_map, ready(h0, "h0"), x, ready(weight, "weight"), ready(bias, "bias"), ready(act_param, "act_param")


def scan_fwd(
    map_: Map,
    x: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int,
    algorithm: str,
    lengths: Tensor | None,
    message_clip: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = native.ready(lengths, torch.int64, map_.u.device, "lengths")
    map_, h0, ready_x, weight, bias, act_param = _scan_inputs(map_, h0, x, weight, bias, act_param)
    assert ready_x is not None
    steps, (B, N) = x.shape[0], h0.shape
    e, table = _input_of(ready_x, weight, bias)
    hs, empty = h0.new_empty(steps, B, N), h0.new_empty(0)
    pre = h0.new_empty(steps, B, N) if ACTIVATIONS[activation].needs_input and not checkpoint_every else empty
    inputs: dict[str, Any] = {"x": e} if table is None else {"tokens": ready_x}
    chunk = chunk_length(map_, steps, B, activation, algorithm, message_clip)
    if chunk:
        _chunked(map_, chunk, steps, B, inputs, h0, hs, backward=False, table=table, lengths=lengths)
    else:
        scan = Scan(
            map_, backward=False, B=B, activation=activation, act_param=act_param, tokens=table is not None,
            lengths=lengths,
        )  # fmt: skip
        scan.run(steps, **inputs, table=table, start=h0, out=hs, pre=pre if pre.numel() else None)
    ckpt = empty
    if checkpoint_every:
        ckpt = torch.cat([h0.unsqueeze(0), hs[checkpoint_every - 1 : steps - 1 : checkpoint_every]])
    return hs, ckpt, pre


def scan_bwd(
    map_: Map,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int,
    need_x: bool,
    need_params: bool,
    algorithm: str,
    lengths: Tensor | None,
    message_clip: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_x, M [N, N], grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm."""
    lengths = native.ready(lengths, torch.int64, map_.u.device, "lengths")
    map_, h0, x, weight, bias, act_param = _scan_inputs(map_, h0, x, weight, bias, act_param)
    for name, tensor in (("grad_hs", grad_hs), ("states", states)):
        native.ready(tensor, torch.float32, map_.u.device, name)
    grad_hs, states = grad_hs.contiguous(), states.contiguous()
    steps, B, N = grad_hs.shape
    new, empty = h0.new_empty, h0.new_empty(0)
    chunk = chunk_length(map_, steps, B, activation, algorithm, message_clip)
    alive = None if lengths is None else torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths
    e = table = None
    if checkpoint_every:
        assert x is not None
        if weight is not None and not x.is_floating_point():
            e, table = _input_of(x, weight, bias)
        if chunk:  # the chunks do not end where the segments do: all states at once, as the forward gave them
            states = scan_fwd(map_, x, h0, weight, bias, act_param, activation, 0, algorithm, lengths, 0.0)[0]
            checkpoint_every = 0

    every = checkpoint_every or max(steps, 1)
    window = max(1, _WINDOW_ELEMENTS // max(B * N, 1))
    window -= window % 16 if window > 16 else 0  # rows that divide into partial sums
    sums = Sums(N, h0, x, weight, bias, alive) if need_params else None
    keep_delta = not checkpoint_every or (need_x and weight is None)
    features = need_x and weight is not None and x is not None and x.is_floating_point()
    grad_x = new(x.shape) if features and x is not None else empty
    common: dict[str, Any] = {"B": B, "activation": activation, "act_param": act_param, "lengths": lengths}
    scan = Scan(map_, backward=True, **common, message_clip=message_clip)
    forward = Scan(map_, backward=False, **common, tokens=table is not None) if checkpoint_every else None
    running = scan.sums() if act_param is not None and need_params else None
    norms = scan.norms(steps)

    # Rows of time t lie at t - low of `delta` and, h_{t-1}, of `before`; low is 0 where all of them are kept, else the
    # start of the segment, and behind it lie those later steps that do not fill a window yet.
    room = steps if keep_delta else min(every + window, steps)
    delta = new(room, B, N)
    before = new(min(every + window, steps) + 1, B, N) if checkpoint_every else empty
    pre_segment = new(every, B, N) if checkpoint_every and ACTIVATIONS[activation].needs_input else empty
    carry = None  # delta of the step after the segment
    high = steps  # steps from here on are in the sums

    for start in reversed(range(0, steps, every)):
        stop = min(start + every, steps)
        length = stop - start
        low = 0 if keep_delta else start
        if forward is not None:
            waiting = high - stop
            if waiting:
                before[length : length + waiting] = before[:waiting].clone()
                if not keep_delta:
                    delta[length : length + waiting] = delta[:waiting].clone()
            before[0].copy_(states[start // every])
            segment = before[1 : length + 1]
            assert x is not None
            part = x[start:stop]
            if table is None:
                e = _input_of(part, weight, bias)[0]
            gate = pre_segment[:length] if ACTIVATIONS[activation].needs_input else None
            inputs: dict[str, Any] = {"x": e} if table is None else {"tokens": part}
            # not `segment`'s last row where a waiting step has it already: the same state, the same bits
            forward.run(length, **inputs, table=table, start=before[0], out=segment, pre=gate, time=start)
        else:
            segment, gate = states, pre if ACTIVATIONS[activation].needs_input else None
        if gate is None and activation != "identity":
            gate = segment
        place = delta[start - low : stop - low]
        g = grad_hs[start:stop]
        if chunk:
            _chunked(map_, chunk, steps, B, {"x": g}, None, place, backward=True, lengths=lengths)
        else:
            scan.run(length, x=g, gate=gate, start=carry, out=place, norms=norms[start:stop], sums=running, time=start)
        # the kernel of the next segment may write where this row lies
        carry = place[0] if keep_delta else place[0].clone()
        with ieee_products():
            for begin in reversed(range(start - start % window, high, window)):
                if begin < start:
                    break
                end = min(begin + window, high)
                rows = delta[begin - low : end - low]
                if sums is not None:
                    if forward is not None:
                        previous = before[begin - start : end - start]
                    else:
                        previous = states[max(begin - 1, 0) : end - 1]
                    if begin == 0:
                        # h0 lies elsewhere where all states are kept
                        first = before[:1] if forward is not None else h0.unsqueeze(0)
                        rest = before[1:end] if forward is not None else previous
                        if end > 1:
                            sums.add(1, rows[1:], rest)
                        sums.add(0, rows[:1], first)
                    else:
                        sums.add(begin, rows, previous)
                if features and weight is not None:
                    torch.mm(rows.flatten(0, 1), weight, out=grad_x[begin:end].flatten(0, 1))
                high = begin

    grad_h0 = torch.zeros_like(h0)
    if carry is not None:
        with ieee_products():
            grad_h0 = map_.transposed_product(carry)
    grad_norm = torch.linalg.vector_norm(delta.flatten(1), dim=1) if chunk else norms.sum(1).sqrt()
    grad_act_param = empty
    if act_param is not None and running is not None:
        exact = (running[0].double() - running[1]).sum(0)
        grad_act_param = (exact.sum() if act_param.numel() == 1 else exact).to(act_param.dtype).view(act_param.shape)
    if need_x and weight is None:
        grad_x = delta
    if sums is None:
        return grad_x, empty, grad_h0, empty, empty, empty, grad_norm
    return grad_x, sums.m, grad_h0, sums.grad_weight, sums.grad_bias, grad_act_param, grad_norm
