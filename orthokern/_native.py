"""The CPU leaf: native kernels behind the signatures of :mod:`orthokern.reference`.

The one file that passes an address to a CPU kernel; ``_native_cuda.py`` is its like for CUDA. Each function checks
what the kernels rely on (dtype, device, contiguity), makes the results, and calls ``orthokern._C``. Shapes and the
meaning of arguments are documented once, in ``orthokern/ops/<op>.py``; B batch, T time, N hidden, K rank, D input
features or token ids, C classes.

Importing never fails: :data:`AVAILABLE` says whether the module was built and :data:`REASON` why not.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_C: Any
try:
    from orthokern import _C  # type: ignore[no-redef]

    AVAILABLE = True
    REASON = ""
except ImportError as error:
    _C = None
    AVAILABLE = False
    REASON = f"the native module is not built ({error}): run `pip install -e .` with a C++17 compiler at hand"

_ISA = os.environ.get("ORTHOKERN_ISA")
if AVAILABLE and _ISA and _ISA not in _C.isas():
    AVAILABLE = False
    REASON = f"ORTHOKERN_ISA={_ISA} is not among the instruction sets built and usable here: {', '.join(_C.isas())}"

_DTYPES = {torch.float32: 0, torch.float64: 1}
_ACTIVATIONS = {"identity": 0, "tanh": 1, "relu": 2, "prelu": 3, "leaky_relu": 3, "modrelu": 4, "oplu": 5}
_NEEDS_PRE = ("prelu", "leaky_relu", "oplu")


def build_info() -> dict[str, Any]:
    """How the module was built and what it runs on: version, compiler, isas, isa, cuda, cuda_reason, thread_pool."""
    if not AVAILABLE:
        return {}
    info: dict[str, Any] = json.loads(_C.build_info())
    info["isa"] = _C.isa()
    info["isas_usable"] = list(_C.isas())
    info["thread_pool"] = _C.thread_pool()
    return info


_POOLED_BYTES = 1 << 20


def _new(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor; large ones from memory that is kept between iterations (csrc/buffer.h says why)."""
    if math.prod(shape) * dtype.itemsize < _POOLED_BYTES:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(_C.Buffer(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def empty_cache() -> None:
    """Give the memory that waits for the next large result back to the system."""
    if AVAILABLE:
        _C.empty_cache()


def _ready(tensor: Tensor | None, dtype: torch.dtype, name: str) -> Tensor | None:
    """`tensor` as the kernels read it: on the CPU, of this dtype, contiguous."""
    if tensor is None:
        return None
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: the cpu backend takes CPU tensors")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
    return tensor.contiguous()


def _call(function: Any, sizes: Mapping[str, float], tensors: dict[str, Tensor | None]) -> None:
    arguments = dict(sizes)
    for name, tensor in tensors.items():
        if tensor is not None:
            arguments[name] = tensor.data_ptr()
    arguments["threads"] = torch.get_num_threads()
    function(arguments)


def _scan_inputs(
    x: Tensor | None,
    steps: int,
    maps: dict[str, Tensor],
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    lengths: Tensor | None,
) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    dtype = h0.dtype
    tokens = x is not None and not x.is_floating_point()
    b, n = h0.shape
    ready: dict[str, Tensor | None] = {name: _ready(m, dtype, name) for name, m in maps.items()}
    ready["tokens" if tokens else "x"] = _ready(x, torch.int64 if tokens else dtype, "x")
    ready["h0"] = _ready(h0, dtype, "h0")
    ready["weight"] = _ready(weight, dtype, "weight")
    ready["bias"] = _ready(bias, dtype, "bias")
    ready["act_param"] = _ready(act_param, dtype, "act_param")
    ready["lengths"] = _ready(lengths, torch.int64, "lengths")
    sizes = {
        "B": b,
        "T": steps,
        "N": n,
        "K": maps["v"].shape[1] if "v" in maps else 0,
        "D": 0 if weight is None else weight.shape[1],
        "dtype": _DTYPES[dtype],
        "activation": _ACTIVATIONS[activation],
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
    return sizes, ready


def _scan_fwd(
    function: Any,
    x: Tensor,
    maps: dict[str, Tensor],
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, ready = _scan_inputs(x, x.shape[0], maps, h0, weight, bias, act_param, activation, lengths)
    t, b, n = sizes["T"], sizes["B"], sizes["N"]
    hs = _new(t, b, n, dtype=h0.dtype)
    every = checkpoint_every
    ckpt = _new(-(-t // every), b, n, dtype=h0.dtype) if every else None
    pre = _new(t, b, n, dtype=h0.dtype) if activation in _NEEDS_PRE and not every else None
    _call(function, {**sizes, "checkpoint_every": every}, {**ready, "hs": hs, "ckpt": ckpt, "pre": pre})
    return hs, hs.new_empty(0) if ckpt is None else ckpt, hs.new_empty(0) if pre is None else pre


def _scan_bwd(
    function: Any,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    maps: dict[str, Tensor],
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int,
    need_x: bool,
    need_params: bool,
    lengths: Tensor | None,
    message_clip: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_x, M [N, N], grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm.

    x may be None where it was the whole input term.
    """
    sizes, ready = _scan_inputs(x, grad_hs.shape[0], maps, h0, weight, bias, act_param, activation, lengths)
    n, dtype = sizes["N"], h0.dtype

    def result(wanted: bool, *shape: int) -> Tensor:
        return (
            _new(*shape, dtype=dtype) if wanted else torch.empty(0, dtype=dtype)
        )  # an op's results may not be one tensor twice

    shape = grad_hs.shape if x is None else x.shape
    grad_x = result(need_x and "tokens" not in ready, *shape)
    grad_map = result(need_params, n, n)
    grad_h0 = result(True, *h0.shape)
    grad_weight = result(need_params and weight is not None, n, sizes["D"])
    grad_bias = result(need_params and bias is not None, n)
    grad_act_param = result(need_params and act_param is not None, *(() if act_param is None else act_param.shape))
    grad_norm = result(True, sizes["T"])
    results = {
        "grad_x": grad_x,
        "grad_map": grad_map,
        "grad_h0": grad_h0,
        "grad_weight": grad_weight,
        "grad_bias": grad_bias,
        "grad_act_param": grad_act_param,
        "grad_norm": grad_norm,
    }
    needs_pre = activation in _NEEDS_PRE and not checkpoint_every
    _call(
        function,
        {**sizes, "checkpoint_every": checkpoint_every, "message_clip": message_clip},
        {
            **ready,
            "grad_hs": _ready(grad_hs, dtype, "grad_hs"),
            "states": _ready(states, dtype, "states"),
            "saved_pre": _ready(pre, dtype, "pre") if needs_pre else None,
            **{name: tensor for name, tensor in results.items() if tensor.numel()},
        },
    )
    return grad_x, grad_map, grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm


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
    """See :mod:`orthokern.ops.factored_scan`."""
    maps = {"u": u, "s": s, "v": v}
    return _scan_fwd(_C.factored_scan_fwd, x, maps, h0, weight, bias, act_param, activation, checkpoint_every, lengths)


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
    """See :mod:`orthokern.ops.factored_scan`."""
    maps = {"u": u, "s": s, "v": v}
    grad_x, m, grad_h0, *others = _scan_bwd(
        _C.factored_scan_bwd,
        grad_hs,
        states,
        pre,
        x,
        maps,
        h0,
        weight,
        bias,
        act_param,
        activation,
        checkpoint_every,
        need_x,
        need_params,
        lengths,
        message_clip,
    )
    if not need_params:
        return grad_x, m, torch.empty_like(m), torch.empty_like(m), grad_h0, others[0], others[1], others[2], others[3]
    mv = m @ v  # [N, K]
    grad_s = (u * mv).sum(0)
    return grad_x, mv * s, grad_s, (m.t() @ u) * s, grad_h0, others[0], others[1], others[2], others[3]


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
    """See :mod:`orthokern.ops.dense_scan`."""
    return _scan_fwd(_C.dense_scan_fwd, x, {"u": w}, h0, weight, bias, act_param, activation, checkpoint_every, lengths)


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
    """See :mod:`orthokern.ops.dense_scan`."""
    return _scan_bwd(
        _C.dense_scan_bwd,
        grad_hs,
        states,
        pre,
        x,
        {"u": w},
        h0,
        weight,
        bias,
        act_param,
        activation,
        checkpoint_every,
        need_x,
        need_params,
        lengths,
        message_clip,
    )


def gru_scan_fwd(
    x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *, variant: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.gru_scan`."""
    sizes, ready = _gru_inputs(w, h0, variant, x.shape[0], lengths)
    dtype, (t, b, n) = h0.dtype, (sizes["T"], sizes["B"], sizes["N"])
    hs, gates = _new(t, b, n, dtype=dtype), _new(t, b, 3 * n, dtype=dtype)
    pre = None if variant == "kanai" else _new(t, b, n, dtype=dtype)
    inputs = {**ready, "x": _ready(x, dtype, "x"), "bias": _ready(bias, dtype, "bias")}
    _call(_C.gru_scan_fwd, sizes, {**inputs, "hs": hs, "gates": gates, "pre": pre})
    return hs, gates, hs.new_empty(0) if pre is None else pre


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
    sizes, ready = _gru_inputs(w, h0, variant, grad_hs.shape[0], lengths)
    dtype, (t, b, n) = h0.dtype, (sizes["T"], sizes["B"], sizes["N"])
    kanai = variant == "kanai"
    saved = {"grad_hs": grad_hs, "saved_hs": hs, "saved_gates": gates, "saved_pre": None if kanai else pre}
    grad_x, factor = _new(t, b, 3 * n, dtype=dtype), _new(t, b, n, dtype=dtype)
    grad_h0, grad_norm = torch.empty(b, n, dtype=dtype), torch.empty(t, dtype=dtype)
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "grad_norm": grad_norm}
    tensors = {**ready, **{name: _ready(tensor, dtype, name) for name, tensor in saved.items()}, **results}
    _call(_C.gru_scan_bwd, sizes, tensors)
    empty = torch.empty(0, dtype=dtype)
    if not need_params:
        return grad_x, empty, grad_h0, empty, grad_norm
    rows, rows_n = grad_x.view(t * b, 3 * n), factor.view(t * b, n)
    grad_w = torch.empty(3 * n, n, dtype=dtype)

    def product(to: Tensor, left: Tensor) -> None:
        """to = sum over steps of left_t h_{t-1}^T, without a copy of the states that h0 would stand in front of."""
        torch.mm(left[:b].mT, h0, out=to)
        to.addmm_(left[b:].mT, hs.view(t * b, n)[:-b])

    if kanai:
        product(grad_w[: 2 * n], rows[:, : 2 * n])
        torch.mm(rows[:, 2 * n :].mT, rows_n, out=grad_w[2 * n :])
    else:
        product(grad_w[: 2 * n], rows[:, : 2 * n])
        product(grad_w[2 * n :], rows_n)
    if bias is None:
        return grad_x, grad_w, grad_h0, empty, grad_norm
    grad_bias = rows.sum(0)
    if not kanai:
        grad_bias[2 * n :] = rows_n.sum(0)
    return grad_x, grad_w, grad_h0, grad_bias, grad_norm


def _gru_inputs(
    w: Tensor, h0: Tensor, variant: str, steps: int, lengths: Tensor | None
) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    b, n = h0.shape
    sizes = {"B": b, "T": steps, "N": n, "dtype": _DTYPES[h0.dtype], "kanai": int(variant == "kanai")}
    ready = {"w": _ready(w, h0.dtype, "w"), "h0": _ready(h0, h0.dtype, "h0")}
    return sizes, {**ready, "lengths": _ready(lengths, torch.int64, "lengths")}


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See :mod:`orthokern.ops.activations`."""
    x = _ready(x, x.dtype, "x")  # type: ignore[assignment]
    y = _new(*x.shape, dtype=x.dtype)
    sizes, tensors = _activation_inputs(x, act_param, activation)
    _call(_C.activation_fwd, sizes, {**tensors, "y": y})
    return y


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See :mod:`orthokern.ops.activations`."""
    x = _ready(x, x.dtype, "x")  # type: ignore[assignment]
    grad_x = _new(*x.shape, dtype=x.dtype)
    grad_act_param = x.new_empty(0) if act_param is None else torch.empty(act_param.shape, dtype=x.dtype)
    sizes, tensors = _activation_inputs(x, act_param, activation)
    tensors["grad_act_param"] = None if act_param is None else grad_act_param
    _call(_C.activation_bwd, sizes, {**tensors, "grad_y": _ready(grad_y, x.dtype, "grad_y"), "grad_x": grad_x})
    return grad_x, grad_act_param


def _activation_inputs(
    x: Tensor, act_param: Tensor | None, activation: str
) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    n = x.shape[-1]
    sizes = {
        "rows": x.numel() // n if n else 0,
        "N": n,
        "dtype": _DTYPES[x.dtype],
        "activation": _ACTIVATIONS[activation],
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
    return sizes, {"x": x, "act_param": _ready(act_param, x.dtype, "act_param")}


def linear_cross_entropy_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    reduction: str = "mean",
    need_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.linear_cross_entropy`. A weight that no cache holds goes through torch's products over as
    many rows as there is room for: the kernel would read it anew for every group of its rows."""
    if weight.numel() * weight.element_size() > _LARGE_READOUT:
        return _large_readout(hidden, weight, bias, target, reduction=reduction, need_grad=need_grad)
    dtype = hidden.dtype
    hidden = _ready(hidden, dtype, "hidden")  # type: ignore[assignment]
    loss = torch.empty((), dtype=dtype)
    grad_hidden = _new(*hidden.shape, dtype=dtype) if need_grad else loss.new_empty(0)
    grad_weight = torch.empty(weight.shape, dtype=dtype) if need_grad else loss.new_empty(0)
    grad_bias = torch.empty(bias.shape, dtype=dtype) if need_grad and bias is not None else loss.new_empty(0)
    sizes = {
        "rows": hidden.shape[0],
        "N": hidden.shape[1],
        "C": weight.shape[0],
        "dtype": _DTYPES[dtype],
        "mean": int(reduction == "mean"),
    }
    tensors: dict[str, Tensor | None] = {
        "hidden": hidden,
        "weight": _ready(weight, dtype, "weight"),
        "bias": _ready(bias, dtype, "bias"),
        "target": _ready(target, torch.int64, "target"),
        "loss": loss,
        "grad_hidden": grad_hidden if need_grad else None,
        "grad_weight": grad_weight if need_grad else None,
        "grad_bias": grad_bias if need_grad and bias is not None else None,
    }
    _call(_C.linear_cross_entropy_fwd, sizes, tensors)
    return loss, grad_hidden, grad_weight, grad_bias


_LARGE_READOUT = 6 << 20  # bytes of weight
_LOGITS = 32 << 20  # bytes of a chunk's logits, about


def _large_readout(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, reduction: str, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linear_cross_entropy_fwd` for many classes; every chunk of logits becomes its own gradient, in place."""
    rows, classes = hidden.shape[0], weight.shape[0]
    scale = 1.0 / rows if reduction == "mean" else 1.0
    chunk = max(64, _LOGITS // (classes * weight.element_size()))
    chunk = -(-rows // -(-rows // chunk))  # all about alike
    loss = torch.zeros((), dtype=torch.float64)
    grad_hidden = torch.empty_like(hidden) if need_grad else hidden.new_empty(0)
    grad_weight = torch.empty_like(weight) if need_grad else hidden.new_empty(0)
    grad_bias = torch.zeros_like(bias) if need_grad and bias is not None else hidden.new_empty(0)
    for begin in range(0, rows, chunk):
        h, t = hidden[begin : begin + chunk], target[begin : begin + chunk, None]
        logits = h @ weight.mT if bias is None else torch.addmm(bias, h, weight.mT)
        d = torch.log_softmax(logits, 1, out=logits)
        loss -= d.gather(1, t).sum(dtype=torch.float64)
        if need_grad:
            d.exp_().scatter_add_(1, t, d.new_full((len(t), 1), -1.0))
            if scale != 1.0:
                d.mul_(scale)
            torch.mm(d, weight, out=grad_hidden[begin : begin + chunk])
            torch.addmm(grad_weight, d.mT, h, beta=float(begin > 0), out=grad_weight)
            if bias is not None:
                grad_bias += d.sum(0)
    return (loss * scale).to(hidden.dtype), grad_hidden, grad_weight, grad_bias


def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See :mod:`orthokern.ops.cayley`."""
    m = _ready(m, m.dtype, "m")  # type: ignore[assignment]
    n, k = m.shape[-2:]
    batch = m.numel() // (n * k)
    out = torch.empty_like(m)
    rates = (
        lr.to(torch.float64).expand(m.shape[:-2]).contiguous()
        if isinstance(lr, Tensor)
        else torch.full((batch,), lr, dtype=torch.float64)
    )
    sizes = {"batch": batch, "N": n, "K": k, "dtype": _DTYPES[m.dtype]}
    _call(_C.cayley, sizes, {"m": m, "g": _ready(g, m.dtype, "g"), "lr": rates, "out": out})
    return out
