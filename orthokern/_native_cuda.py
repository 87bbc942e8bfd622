"""The CUDA leaf: native kernels behind the signatures of :mod:`orthokern.reference`.

Each function checks what the kernels rely on (dtype, device, contiguity), makes the results, and puts the kernels on
the current stream of the tensors' device. Nothing here waits for the device. Shapes and the meaning of arguments are
documented once, in ``orthokern/ops/<op>.py``; B batch, T time, N hidden, K rank, D input features or token ids.

Importing never fails: :data:`AVAILABLE` says whether the kernels were built and :data:`REASON` why not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._products import ieee_products
from orthokern.errors import InputError

# The native entry points and the device type that they take. The tests put the host harness and "cpu" here.
_native: Any = None
_DEVICE = "cuda"

try:
    from orthokern import _C

    _native = getattr(_C, "cuda", None)
    REASON = "" if _native is not None else f"not in this build: {json.loads(_C.build_info())['cuda_reason']}"
except ImportError as error:
    REASON = f"the native module is not built ({error}): run `pip install -e .` with a C++17 compiler and nvcc at hand"
AVAILABLE = _native is not None

_DTYPES = {torch.float32: 0, torch.float64: 1}
_PRECISIONS = {"ieee": 0, "3xtf32": 1, "tf32": 2, "bf16": 3}


def _ready(tensor: Tensor | None, dtype: torch.dtype, device: torch.device, name: str) -> Tensor | None:
    """`tensor` as the kernels read it: on this device, of this dtype, contiguous."""
    if tensor is None:
        return None
    if tensor.device != device or device.type != _DEVICE:
        raise ValueError(f"{name} is on {tensor.device}: the cuda backend takes tensors of one CUDA device")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
    return tensor.contiguous()


def _call(name: str, device: torch.device, sizes: Mapping[str, Any], tensors: dict[str, Tensor | None]) -> None:
    """Call the native function `name` on the current stream of `device`. Absent tensors are null pointers there.

    The native functions leave the current device as it was (csrc/cuda/launch.h, DeviceGuard).
    """
    arguments: dict[str, Any] = dict(sizes)
    for key, tensor in tensors.items():
        if tensor is not None:
            arguments[key] = tensor.data_ptr()
    if device.type == "cuda":
        arguments["device"] = device.index
        arguments["stream"] = torch.cuda.current_stream(device).cuda_stream
    getattr(_native, name)(arguments)


def _workspace(
    name: str, device: torch.device, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
) -> Tensor:
    """Scratch memory for the kernels of one call, as large as the native function `name` says of its arguments."""
    arguments = {key: tensor.data_ptr() for key, tensor in tensors.items() if tensor is not None}
    size = getattr(_native, name)({**sizes, **arguments, "device": device.index or 0})
    return torch.empty(size, dtype=torch.uint8, device=device)


# ---------------------------------------------------------------------------------------------------------- activations


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See :mod:`orthokern.ops.activations`."""
    x = _ready(x, x.dtype, x.device, "x")  # type: ignore[assignment]
    y = torch.empty_like(x)
    sizes, tensors = _activation_inputs(x, act_param, activation)
    _call("activation_fwd", x.device, sizes, {**tensors, "y": y})
    return y


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See :mod:`orthokern.ops.activations`."""
    x = _ready(x, x.dtype, x.device, "x")  # type: ignore[assignment]
    grad_x = torch.empty_like(x)
    grad_act_param = torch.empty(0 if act_param is None else act_param.shape, dtype=x.dtype, device=x.device)
    sizes, tensors = _activation_inputs(x, act_param, activation)
    tensors |= {"grad_y": _ready(grad_y, x.dtype, x.device, "grad_y"), "grad_x": grad_x}
    if act_param is not None:
        tensors["grad_act_param"] = grad_act_param
        tensors["workspace"] = _workspace("activation_workspace", x.device, sizes, tensors)
    _call("activation_bwd", x.device, sizes, tensors)
    return grad_x, grad_act_param


def _activation_inputs(
    x: Tensor, act_param: Tensor | None, activation: str
) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    n = x.shape[-1]
    sizes = {
        "rows": x.numel() // n if n else 0,
        "N": n,
        "dtype": _DTYPES[x.dtype],
        "activation": ACTIVATIONS[activation].number,
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
    return sizes, {"x": x, "act_param": _ready(act_param, x.dtype, x.device, "act_param")}


# --------------------------------------------------------------------------------------------------------------- cayley


def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See :mod:`orthokern.ops.cayley`."""
    return cayley_of_many([(m, g, lr)])[0]


def cayley_of_many(steps: Sequence[tuple[Tensor, Tensor, float | Tensor]]) -> list[Tensor]:
    """`cayley` of several (m [..., N, K], g, lr), of one dtype and device and of any shapes, by the same kernels.

    Bit for bit the same as one at a time. One launch takes all that fit a block each; of the others, square and thin
    ones take as many as the largest of them does.
    """
    first = steps[0][0]
    alive: list[Tensor | None] = []  # until the kernels are on the stream
    outs, matrices = [], []
    for m, g, lr in steps:
        m = _ready(m, first.dtype, first.device, "m")  # type: ignore[assignment]
        g = _ready(g, first.dtype, first.device, "g")  # type: ignore[assignment]
        outs.append(torch.empty_like(m))
        if not m.numel():
            continue
        n, k = m.shape[-2:]
        tensors = {"m": m, "g": g, "out": outs[-1]}
        one: dict[str, float] = {"batch": m.numel() // (n * k), "N": n, "K": k}
        if isinstance(lr, Tensor):
            tensors["lr"] = lr.to(m.device, torch.float64).expand(m.shape[:-2]).contiguous()
        else:
            one["rate"] = float(lr)
        alive += tensors.values()
        matrices.append({**one, **{name: tensor.data_ptr() for name, tensor in tensors.items()}})
    if matrices:
        given = {"dtype": _DTYPES[first.dtype], "matrices": matrices}
        workspace = _workspace("cayley_workspace", first.device, given, {})
        _call("cayley", first.device, given, {"workspace": workspace})
    return outs


# ---------------------------------------------------------------------------------------------------------------- scans

# Elements of the adjoints in one product of the gradients, 32 MiB. A sum over all steps is one of such windows of
# steps, last one first, however the states came about: so recomputing them changes no bit.
_WINDOW_ELEMENTS = 1 << 23
# Below this many steps, or above this many sequences, `auto` scans one step after the other: chunks of time have
# nothing to gain when the sequences fill the GPU already.
_CHUNKED_STEPS, _CHUNKED_BATCH = 256, 128
# Chunked: the longest chunk. Longer ones leave fewer of them than fill a GPU.
_LONGEST_CHUNK = 128
# Steers the native planners: path, cluster, group, shared_chunks, graph_steps (ScanWish and GruWish), for the tests.
_wishes: dict[str, int] = {}


def _asked_of_planner() -> dict[str, int]:
    """The wishes as the native planners take them. ORTHOKERN_CUDA_GRAPHS=0 is the one that a user may have."""
    setting = os.environ.get("ORTHOKERN_CUDA_GRAPHS", "").strip()
    if setting not in ("", "0", "1"):
        raise InputError(
            f"the environment variable ORTHOKERN_CUDA_GRAPHS is {setting!r}; accepted: 1 (the default: steps go to the "
            "GPU in CUDA graphs) or 0 (kernel by kernel)"
        )
    wishes = {"graph_steps": 0, **_wishes} if setting == "0" else _wishes
    return {f"wish_{key}": value for key, value in wishes.items()}


@dataclasses.dataclass
class _Map:
    """W = U diag(s) V^T by u, v [N, K] and s [K], or W [N, N] itself in u's place without s and v; and the least
    precision that its products in the recurrence may have."""

    u: Tensor
    s: Tensor | None = None
    v: Tensor | None = None
    precision: str = "ieee"

    @property
    def op(self) -> str:
        return "dense_scan" if self.s is None else "factored_scan"

    def dense(self) -> Tensor:
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
            return {"map2": self.u}
        return {"map1": self.u if backward else self.v, "scale": self.s, "map2": self.v if backward else self.u}


class _Scan:
    """Launches of one scan kernel, forward or backward, over rows of the batch or over chunks of them.

    Args:
        map: the recurrent map, float32 and contiguous.
        backward: which of the two recurrences.
        batch: B.
        activation, act_param: of the op; act_param [1] or [N] or None.
        tokens: whether the inputs are token ids.
        chunk, sequences: see csrc/cuda/scan.h; None for no chunks.
        lengths, message_clip: of the op.
    """

    def __init__(
        self,
        map: _Map,
        *,
        backward: bool,
        batch: int,
        activation: str,
        act_param: Tensor | None,
        tokens: bool = False,
        chunk: int | None = None,
        sequences: int | None = None,
        lengths: Tensor | None = None,
        message_clip: float = 0.0,
    ) -> None:
        n = map.u.shape[0]
        self.map, self.backward, self.device = map, backward, map.u.device
        self.chunk, self.act_param, self.lengths = chunk, act_param, lengths
        self.options: dict[str, float] = {"message_clip": message_clip} if message_clip > 0 else {}
        self.sizes = {
            "B": batch,
            "N": n,
            "K": 0 if map.s is None else map.s.shape[0],
            "sequences": batch if sequences is None else sequences,
            "precision": _PRECISIONS[map.precision],
            "activation": ACTIVATIONS[activation].number,
            "act_param_stride": int(act_param is not None and act_param.numel() > 1),
            "backward": int(backward),
        }
        # which inputs there are decides how much shared memory a sequence takes
        asked: dict[str, int] = {**self.sizes, **_asked_of_planner()}
        asked |= {"T": 1, "chunk": 1, "tokens": int(tokens)}
        if self.device.type == "cuda":
            asked["device"] = self.device.index
        self.plan: dict[str, int] = getattr(_native, f"{map.op}_plan")(asked)
        floats = {name: self.plan[f"{name}_floats"] for name in ("packed1", "packed2", "work")}
        self.workspace = {name: map.u.new_empty(count) for name, count in floats.items() if count}

    def sums(self) -> Tensor:
        """[2, rows, N]: the running sums of act_param's gradient, which later launches continue."""
        return self.map.u.new_zeros(2, self.plan["sums_rows"], self.sizes["N"])

    def norms(self, steps: int) -> Tensor:
        """[T, columns]: partial sums of squares of every step."""
        return self.map.u.new_zeros(steps, self.plan["norm_columns"])

    def run(self, steps: int, tensors: dict[str, Tensor | None], table: Tensor | None = None, *, time: int = 0) -> None:
        """Put the scan of ``steps`` steps, from step ``time`` of the op on, on the stream.

        tensors: of these steps, by the names of csrc/cuda/scan.h.
        """
        if not steps or not self.sizes["sequences"]:
            return
        sizes = {**self.sizes, **self.plan, **self.options, "T": steps, "chunk": self.chunk or steps, "time": time}
        if table is not None:
            sizes["D"] = table.shape[0]
        everything = {
            **self.map.native(self.backward), **self.workspace, **tensors, "table": table, "act_param": self.act_param,
            "lengths": self.lengths,
        }  # fmt: skip
        _call(self.map.op, self.device, sizes, everything)


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


def _chunk_length(map: _Map, steps: int, batch: int, activation: str, algorithm: str, message_clip: float = 0.0) -> int:
    """Steps of a chunk, from sizes alone; 0 for the sequential scan, which a clip needs: chunks add up linear maps.

    Two scans of C steps over all chunks, and one over the T / C carries: least for C near sqrt(T), and short enough
    to leave many chunks.
    """
    if activation != "identity" or message_clip > 0 or algorithm == "sequential" or steps < 2:
        return 0
    if algorithm == "auto" and (steps < _CHUNKED_STEPS or batch > _CHUNKED_BATCH or map.u.shape[0] > 128):
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
    map: _Map, chunk: int, steps: int, batch: int, inputs: dict[str, Tensor | None], start: Tensor | None, out: Tensor,
    *, backward: bool, table: Tensor | None = None, lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """The recurrence without activation over chunks of time at once; out [T, B, N].

    (a) every chunk but the last from a zero state, of which only the end is kept; (b) the states at the chunks'
    borders, one after the other: each is W^chunk times the one before, plus that end; (c) every chunk again, from its
    border. W is composed for (b) alone. Backward is the same with W^T, from the last step to the first. Chunks behind
    the end of a sequence give zeros whatever enters them: forward nothing of theirs is kept, backward they come first.
    """
    n = map.u.shape[0]
    count = -(-steps // chunk)
    new = map.u.new_empty
    starts = new(count, batch, n)
    starts[0].copy_(start) if start is not None else starts[0].zero_()
    common: dict[str, Any] = {
        "backward": backward, "batch": batch, "activation": "identity", "act_param": None, "lengths": lengths
    }  # fmt: skip
    if count > 1:
        ends = new(count - 1, batch, n)
        local = _Scan(map, **common, tokens=table is not None, chunk=chunk, sequences=(count - 1) * batch)
        local.run(steps, {**inputs, "end": ends}, table)
        power = _power(map.dense() if backward else map.dense().mT, chunk).contiguous()
        sizes = {"count": count - 1, "B": batch, "N": n}
        _call("scan_carry", map.u.device, sizes, {"power": power, "ends": ends, "starts": starts})
    whole = _Scan(map, **common, tokens=table is not None, chunk=chunk, sequences=count * batch)
    whole.run(steps, {**inputs, "start": starts, "out": out}, table)


def _scan_inputs(
    map: _Map, h0: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, act_param: Tensor | None
) -> tuple[_Map, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The same, checked and contiguous."""
    dtype, device = torch.float32, map.u.device

    def ready(tensor: Tensor | None, name: str, dtype: torch.dtype = dtype) -> Any:
        return _ready(tensor, dtype, device, name)

    factored = map.s is not None
    ready_map = _Map(ready(map.u, "u" if factored else "w"), ready(map.s, "s"), ready(map.v, "v"), map.precision)
    ids = x is not None and not x.is_floating_point()
    x = ready(x, "x", torch.int64 if ids else dtype)
    return ready_map, ready(h0, "h0"), x, ready(weight, "weight"), ready(bias, "bias"), ready(act_param, "act_param")


def _scan_fwd(
    map: _Map,
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
    lengths = _ready(lengths, torch.int64, map.u.device, "lengths")
    map, h0, ready_x, weight, bias, act_param = _scan_inputs(map, h0, x, weight, bias, act_param)
    assert ready_x is not None
    steps, (batch, n) = x.shape[0], h0.shape
    e, table = _input_of(ready_x, weight, bias)
    hs, empty = h0.new_empty(steps, batch, n), h0.new_empty(0)
    pre = h0.new_empty(steps, batch, n) if ACTIVATIONS[activation].needs_input and not checkpoint_every else empty
    inputs: dict[str, Tensor | None] = {"x": e} if table is None else {"tokens": ready_x}
    chunk = _chunk_length(map, steps, batch, activation, algorithm, message_clip)
    if chunk:
        _chunked(map, chunk, steps, batch, inputs, h0, hs, backward=False, table=table, lengths=lengths)
    else:
        scan = _Scan(
            map, backward=False, batch=batch, activation=activation, act_param=act_param, tokens=table is not None,
            lengths=lengths,
        )  # fmt: skip
        scan.run(steps, {**inputs, "start": h0, "out": hs, "pre": pre if pre.numel() else None}, table)
    ckpt = empty
    if checkpoint_every:
        ckpt = torch.cat([h0.unsqueeze(0), hs[checkpoint_every - 1 : steps - 1 : checkpoint_every]])
    return hs, ckpt, pre


class _Sums:
    """The gradients that are sums over time of products with delta_t, taken window by window.

    alive: bool [T, B], or None for no padding. There delta is 0, which times an infinity or a NaN would be NaN.
    """

    def __init__(
        self,
        n: int,
        like: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        alive: Tensor | None,
    ) -> None:
        self.m = like.new_zeros(n, n)
        self.x, self.weight, self.alive = x, weight, alive
        self.features = weight is not None and x is not None and x.is_floating_point()
        empty = like.new_empty(0)
        self.grad_weight = empty if weight is None else torch.zeros_like(weight)
        self.grad_bias = empty if bias is None else torch.zeros_like(bias)

    @staticmethod
    def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
        """total [N, D] += left [R, N]^T right [R, D], in as many partial sums as keep the GPU busy."""
        tiles = -(-total.shape[0] // 64) * -(-total.shape[1] // 64)
        parts = 1
        while parts * tiles < 256 and left.shape[0] % (2 * parts) == 0 and left.shape[0] >= 256 * parts:
            parts *= 2
        if parts == 1:
            total.addmm_(left.mT, right)
        else:
            left, right = left.unflatten(0, (parts, -1)), right.unflatten(0, (parts, -1))
            total.add_(torch.bmm(left.mT, right).sum(0))

    def add(self, start: int, delta: Tensor, before: Tensor) -> None:
        """The steps from ``start`` on: delta and before, h_{t-1}, both [steps, B, N]."""
        steps = delta.shape[0]
        alive = None if self.alive is None else self.alive[start : start + steps].unsqueeze(-1)
        # the same alignment wherever the rows lie, which the choice of a product may depend on
        if delta[0].numel() % 4:
            delta, before = delta.clone(), before.clone()
        if alive is not None:
            before = torch.where(alive, before, 0.0)
        rows = delta.flatten(0, 1)
        self._add_product(self.m, rows, before.flatten(0, 1))
        if self.grad_bias.numel():
            self.grad_bias.add_(rows.sum(0))
        if self.weight is None:
            return
        assert self.x is not None
        x = self.x[start : start + steps]
        if self.features:
            if alive is not None:
                x = torch.where(alive, x, 0.0)
            elif x[0].numel() % 4:
                x = x.clone()
            self._add_product(self.grad_weight, rows, x.flatten(0, 1))
            return
        # an id that is out of range belongs to no row of the table; nothing here adds in an order that may vary
        ids, d = x.flatten(), self.weight.shape[1]
        if alive is not None:
            ids = torch.where(alive.flatten(), ids, -1)
        if d <= 64:
            one_hot = ids.unsqueeze(1) == torch.arange(d, device=ids.device)
            self._add_product(self.grad_weight, rows, one_hot.to(rows.dtype))
        else:
            ids = torch.where((ids >= 0) & (ids < d), ids, d)
            table = torch.ops.aten.embedding_dense_backward(rows, ids, d + 1, -1, False)
            self.grad_weight.add_(table[:d].mT)


def _scan_bwd(
    map: _Map,
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
    lengths = _ready(lengths, torch.int64, map.u.device, "lengths")
    map, h0, x, weight, bias, act_param = _scan_inputs(map, h0, x, weight, bias, act_param)
    for name, tensor in (("grad_hs", grad_hs), ("states", states)):
        _ready(tensor, torch.float32, map.u.device, name)
    grad_hs, states = grad_hs.contiguous(), states.contiguous()
    steps, batch, n = grad_hs.shape
    new, empty = h0.new_empty, h0.new_empty(0)
    chunk = _chunk_length(map, steps, batch, activation, algorithm, message_clip)
    alive = None if lengths is None else torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths
    e = table = None
    if checkpoint_every:
        assert x is not None
        if weight is not None and not x.is_floating_point():
            e, table = _input_of(x, weight, bias)
        if chunk:  # the chunks do not end where the segments do: all states at once, as the forward gave them
            states = _scan_fwd(map, x, h0, weight, bias, act_param, activation, 0, algorithm, lengths, 0.0)[0]
            checkpoint_every = 0

    every = checkpoint_every or max(steps, 1)
    window = max(1, _WINDOW_ELEMENTS // max(batch * n, 1))
    window -= window % 16 if window > 16 else 0  # rows that divide into partial sums
    sums = _Sums(n, h0, x, weight, bias, alive) if need_params else None
    keep_delta = not checkpoint_every or (need_x and weight is None)
    features = need_x and weight is not None and x is not None and x.is_floating_point()
    grad_x = new(x.shape) if features and x is not None else empty
    common: dict[str, Any] = {"batch": batch, "activation": activation, "act_param": act_param, "lengths": lengths}
    scan = _Scan(map, backward=True, **common, message_clip=message_clip)
    forward = _Scan(map, backward=False, **common, tokens=table is not None) if checkpoint_every else None
    running = scan.sums() if act_param is not None and need_params else None
    norms = scan.norms(steps)

    # Rows of time t lie at t - low of `delta` and, h_{t-1}, of `before`; low is 0 where all of them are kept, else the
    # start of the segment, and behind it lie those later steps that do not fill a window yet.
    room = steps if keep_delta else min(every + window, steps)
    delta = new(room, batch, n)
    before = new(min(every + window, steps) + 1, batch, n) if checkpoint_every else empty
    pre_segment = new(every, batch, n) if checkpoint_every and ACTIVATIONS[activation].needs_input else empty
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
            inputs = {"x": e} if table is None else {"tokens": part}
            # not `segment`'s last row where a waiting step has it already: the same state, the same bits
            forward.run(length, {**inputs, "start": before[0], "out": segment, "pre": gate}, table, time=start)
        else:
            segment, gate = states, pre if ACTIVATIONS[activation].needs_input else None
        if gate is None and activation != "identity":
            gate = segment
        place = delta[start - low : stop - low]
        g = grad_hs[start:stop]
        if chunk:
            _chunked(map, chunk, steps, batch, {"x": g}, None, place, backward=True, lengths=lengths)
        else:
            scan.run(
                length,
                {"x": g, "gate": gate, "start": carry, "out": place, "norms": norms[start:stop], "sums": running},
                time=start,
            )
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
            grad_h0 = map.transposed_product(carry)
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


def factored_scan_fwd(
    x: Tensor,
    u: Tensor,
    s: Tensor,
    v: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.factored_scan`. A precision below "ieee" shows where single steps are launched."""
    map = _Map(u, s, v, precision)
    return _scan_fwd(
        map, x, h0, weight, bias, act_param, activation, checkpoint_every, algorithm, lengths, message_clip
    )


def factored_scan_bwd(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    u: Tensor,
    s: Tensor,
    v: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    need_x: bool = True,
    need_params: bool = True,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.factored_scan`. A precision below "ieee" shows where single steps are launched."""
    map = _Map(u, s, v, precision)
    grad_x, m, grad_h0, *others = _scan_bwd(
        map, grad_hs, states, pre, x, h0, weight, bias, act_param, activation, checkpoint_every, need_x, need_params,
        algorithm, lengths, message_clip,
    )  # fmt: skip
    if not need_params:
        return grad_x, m, m, m, grad_h0, others[0], others[1], others[2], others[3]
    with ieee_products():
        m_v = m @ v  # [N, K]
        grad_v = (m.mT @ u) * s
    return grad_x, m_v * s, (u * m_v).sum(0), grad_v, grad_h0, others[0], others[1], others[2], others[3]


def dense_scan_fwd(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.dense_scan`. A precision below "ieee" shows where single steps are launched."""
    map = _Map(w, precision=precision)
    return _scan_fwd(
        map, x, h0, weight, bias, act_param, activation, checkpoint_every, algorithm, lengths, message_clip
    )


def dense_scan_bwd(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    need_x: bool = True,
    need_params: bool = True,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.dense_scan`. A precision below "ieee" shows where single steps are launched."""
    map = _Map(w, precision=precision)
    return _scan_bwd(
        map, grad_hs, states, pre, x, h0, weight, bias, act_param, activation, checkpoint_every, need_x, need_params,
        algorithm, lengths, message_clip,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ GRU


def _gru_plan(h0: Tensor, variant: str, steps: int, *, backward: bool) -> dict[str, int]:
    """The sizes of a GRU scan in one direction, and how the native planner would run it (csrc/cuda/gru_scan.h)."""
    b, n = h0.shape
    sizes = {"T": steps, "B": b, "N": n, "kanai": int(variant == "kanai"), "backward": int(backward)}
    asked = {**sizes, **_asked_of_planner(), "device": h0.device.index or 0}
    return {**sizes, **_native.gru_scan_plan(asked)}


def _gru_run(plan: dict[str, int], h0: Tensor, tensors: dict[str, Tensor | None]) -> None:
    """Put the scan of a plan on the stream; tensors by the names of csrc/cuda/gru_scan.h."""
    work = h0.new_empty(plan["work_floats"]) if plan["work_floats"] else None
    _call("gru_scan", h0.device, plan, {**tensors, "h0": h0, "work": work})


def gru_scan_fwd(
    x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *, variant: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.gru_scan`."""
    ready = _gru_ready(h0.device, {"x": x, "w": w, "h0": h0, "bias": bias})
    steps, (b, n) = x.shape[0], h0.shape
    hs, gates = h0.new_empty(steps, b, n), h0.new_empty(steps, b, 3 * n)
    pre = None if variant == "kanai" else h0.new_empty(steps, b, n)
    lengths = _ready(lengths, torch.int64, h0.device, "lengths")
    plan = _gru_plan(h0, variant, steps, backward=False)
    _gru_run(plan, ready.pop("h0"), {**ready, "lengths": lengths, "hs": hs, "gates": gates, "pre": pre})
    return hs, gates, h0.new_empty(0) if pre is None else pre


def gru_scan_bwd(
    grad_hs: Tensor,
    hs: Tensor,
    gates: Tensor,
    pre: Tensor,
    w: Tensor,
    h0: Tensor,
    bias: Tensor | None,
    *,
    variant: str,
    need_params: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.gru_scan`."""
    kanai = variant == "kanai"
    given = {"grad_hs": grad_hs, "hs": hs, "gates": gates, "pre": None if kanai else pre, "w": w, "h0": h0}
    ready = _gru_ready(h0.device, given)
    w, h0, hs = ready.pop("w"), ready.pop("h0"), ready["hs"]
    lengths = _ready(lengths, torch.int64, h0.device, "lengths")
    steps, b, n = grad_hs.shape
    grad_x, factor, grad_h0 = torch.empty_like(ready["gates"]), torch.empty_like(hs), torch.empty_like(h0)
    plan = _gru_plan(h0, variant, steps, backward=True)
    norms = h0.new_zeros(steps, plan["norm_columns"])
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "norms": norms}
    _gru_run(plan, h0, {**ready, **results, "w": w, "lengths": lengths})
    norm, empty = norms.sum(1).sqrt(), h0.new_empty(0)
    if not need_params:
        return grad_x, empty, grad_h0, empty, norm
    rows, rows_n = grad_x.view(steps * b, 3 * n), factor.view(steps * b, n)
    grad_w = torch.zeros_like(w)

    def add(to: Tensor, left: Tensor) -> None:
        """to += sum over steps of left_t h_{t-1}^T, without a copy of the states that h0 would stand in front of."""
        to.addmm_(left[:b].mT, h0)
        if steps > 1:
            _Sums._add_product(to, left[b:], hs.view(steps * b, n)[:-b])

    with ieee_products():
        add(grad_w[: 2 * n], rows[:, : 2 * n])
        if kanai:
            _Sums._add_product(grad_w[2 * n :], rows[:, 2 * n :], rows_n)
        else:
            add(grad_w[2 * n :], rows_n)
    if bias is None:
        return grad_x, grad_w, grad_h0, empty, norm
    grad_bias = rows.sum(0)
    if not kanai:
        grad_bias[2 * n :] = rows_n.sum(0)
    return grad_x, grad_w, grad_h0, grad_bias, norm


def _gru_ready(device: torch.device, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The same, checked and contiguous."""
    return {name: _ready(tensor, torch.float32, device, name) for name, tensor in tensors.items()}
