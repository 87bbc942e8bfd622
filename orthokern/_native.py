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

from orthokern._products import ieee_products

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


# Of the tensors that a kernel is given, those whose dtype is not that of the call.
_OWN_DTYPE = {
    **dict.fromkeys(("tokens", "lengths", "target", "definite", "hits", "pairs"), torch.int64),
    **dict.fromkeys(("lr", "distance", "image", "v_rows", "re", "im"), torch.float64),
    **dict.fromkeys(("grad_re", "grad_im", "grad_pairs"), torch.float64),
    **dict.fromkeys(("ids", "target_ids"), torch.uint8),
}


def _call(function: Any, dtype: torch.dtype, sizes: Mapping[str, float], tensors: Mapping[str, Tensor | None]) -> None:
    """Call a kernel with the addresses of tensors by their names; those that are None are null pointers there.

    Tensors are on the CPU and of this dtype, or refused. An input that is not contiguous is copied; results must be.
    """
    arguments = {**sizes, "dtype": _DTYPES[dtype], "threads": torch.get_num_threads()}
    kept = []  # copies, until the kernel has read them
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_cpu:
            raise ValueError(f"{name} is on {tensor.device}: the cpu backend takes CPU tensors")
        expected = _OWN_DTYPE.get(name, dtype)
        if tensor.dtype != expected:
            raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            kept.append(tensor)
        arguments[name] = tensor.data_ptr()
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
    b, n = h0.shape
    tokens = x is not None and not x.is_floating_point()
    sizes = {
        "B": b,
        "T": steps,
        "N": n,
        "K": maps["v"].shape[1] if "v" in maps else 0,
        "D": 0 if weight is None else weight.shape[1],
        "activation": _ACTIVATIONS[activation],
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
    inputs = {
        **maps,
        "tokens" if tokens else "x": x,
        "h0": h0,
        "weight": weight,
        "bias": bias,
        "act_param": act_param,
        "lengths": lengths,
    }
    return sizes, inputs


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
    sizes, inputs = _scan_inputs(x, x.shape[0], maps, h0, weight, bias, act_param, activation, lengths)
    t, b, n, dtype = sizes["T"], sizes["B"], sizes["N"], h0.dtype
    hs = _new(t, b, n, dtype=dtype)
    every = checkpoint_every
    ckpt = _new(-(-t // every), b, n, dtype=dtype) if every else None
    pre = _new(t, b, n, dtype=dtype) if activation in _NEEDS_PRE and not every else None
    _call(function, dtype, {**sizes, "checkpoint_every": every}, {**inputs, "hs": hs, "ckpt": ckpt, "pre": pre})
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
) -> tuple[Tensor, ...]:
    """grad_x, M [N, N], grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm.

    x may be None where it was the whole input term.
    """
    sizes, inputs = _scan_inputs(x, grad_hs.shape[0], maps, h0, weight, bias, act_param, activation, lengths)
    n, dtype = sizes["N"], h0.dtype

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return _new(*tensor.shape, dtype=dtype) if tensor is not None and wanted else None

    results: dict[str, Tensor | None] = {
        "grad_x": like(grad_hs if x is None else x, need_x and "tokens" not in inputs),
        "grad_map": _new(n, n, dtype=dtype) if need_params else None,
        "grad_h0": like(h0, True),
        "grad_weight": like(weight, need_params),
        "grad_bias": like(bias, need_params),
        "grad_act_param": like(act_param, need_params),
        "grad_norm": _new(sizes["T"], dtype=dtype),
    }
    needs_pre = activation in _NEEDS_PRE and not checkpoint_every
    saved = {"grad_hs": grad_hs, "states": states, "saved_pre": pre if needs_pre else None}
    options = {"checkpoint_every": checkpoint_every, "message_clip": message_clip}
    _call(function, dtype, {**sizes, **options}, {**inputs, **saved, **results})
    # an empty tensor for each that was not wanted: an op's results may not be one tensor twice
    return tuple(torch.empty(0, dtype=dtype) if found is None else found for found in results.values())


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
    with ieee_products():
        mv, mu = m @ v, m.mT @ u  # [N, K]
    grad_s = (u * mv).sum(0)
    return grad_x, mv * s, grad_s, mu * s, grad_h0, others[0], others[1], others[2], others[3]


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
) -> tuple[Tensor, ...]:
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
    sizes = _gru_sizes(h0, variant, x.shape[0])
    dtype, (t, b, n) = h0.dtype, (sizes["T"], sizes["B"], sizes["N"])
    hs, gates = _new(t, b, n, dtype=dtype), _new(t, b, 3 * n, dtype=dtype)
    pre = None if variant == "kanai" else _new(t, b, n, dtype=dtype)
    inputs = {"x": x, "w": w, "h0": h0, "bias": bias, "lengths": lengths}
    _call(_C.gru_scan_fwd, dtype, sizes, {**inputs, "hs": hs, "gates": gates, "pre": pre})
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
    sizes = _gru_sizes(h0, variant, grad_hs.shape[0])
    dtype, (t, b, n) = h0.dtype, (sizes["T"], sizes["B"], sizes["N"])
    kanai = variant == "kanai"
    inputs = {"w": w, "h0": h0, "lengths": lengths, "grad_hs": grad_hs}
    saved = {"saved_hs": hs, "saved_gates": gates, "saved_pre": None if kanai else pre}
    grad_x, factor = _new(t, b, 3 * n, dtype=dtype), _new(t, b, n, dtype=dtype)
    grad_h0, grad_norm = torch.empty(b, n, dtype=dtype), torch.empty(t, dtype=dtype)
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "grad_norm": grad_norm}
    _call(_C.gru_scan_bwd, dtype, sizes, {**inputs, **saved, **results})
    empty = torch.empty(0, dtype=dtype)
    if not need_params:
        return grad_x, empty, grad_h0, empty, grad_norm
    rows, rows_n = grad_x.view(t * b, 3 * n), factor.view(t * b, n)
    grad_w = torch.empty(3 * n, n, dtype=dtype)

    def product(to: Tensor, left: Tensor) -> None:
        """to = sum over steps of left_t h_{t-1}^T, without a copy of the states that h0 would stand in front of."""
        torch.mm(left[:b].mT, h0, out=to)
        if t > 1:
            to.addmm_(left[b:].mT, hs.view(t * b, n)[:-b])

    with ieee_products():
        product(grad_w[: 2 * n], rows[:, : 2 * n])
        if kanai:
            torch.mm(rows[:, 2 * n :].mT, rows_n, out=grad_w[2 * n :])
        else:
            product(grad_w[2 * n :], rows_n)
    if bias is None:
        return grad_x, grad_w, grad_h0, empty, grad_norm
    grad_bias = rows.sum(0)
    if not kanai:
        grad_bias[2 * n :] = rows_n.sum(0)
    return grad_x, grad_w, grad_h0, grad_bias, grad_norm


def _gru_sizes(h0: Tensor, variant: str, steps: int) -> dict[str, int]:
    b, n = h0.shape
    return {"B": b, "T": steps, "N": n, "kanai": int(variant == "kanai")}


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See :mod:`orthokern.ops.activations`."""
    y = _new(*x.shape, dtype=x.dtype)
    tensors = {"x": x, "act_param": act_param, "y": y}
    _call(_C.activation_fwd, x.dtype, _activation_sizes(x, act_param, activation), tensors)
    return y


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See :mod:`orthokern.ops.activations`."""
    grad_x = _new(*x.shape, dtype=x.dtype)
    grad_act_param = None if act_param is None else torch.empty(act_param.shape, dtype=x.dtype)
    tensors = {"grad_y": grad_y, "x": x, "act_param": act_param, "grad_x": grad_x, "grad_act_param": grad_act_param}
    _call(_C.activation_bwd, x.dtype, _activation_sizes(x, act_param, activation), tensors)
    return grad_x, x.new_empty(0) if grad_act_param is None else grad_act_param


def _activation_sizes(x: Tensor, act_param: Tensor | None, activation: str) -> dict[str, int]:
    n = x.shape[-1]
    return {
        "rows": x.numel() // n if n else 0,
        "N": n,
        "activation": _ACTIVATIONS[activation],
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }


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
    loss = torch.empty((), dtype=dtype)
    grad_hidden = _new(*hidden.shape, dtype=dtype) if need_grad else loss.new_empty(0)
    grad_weight = torch.empty(weight.shape, dtype=dtype) if need_grad else loss.new_empty(0)
    grad_bias = torch.empty(bias.shape, dtype=dtype) if need_grad and bias is not None else loss.new_empty(0)
    sizes = {
        "rows": hidden.shape[0],
        "N": hidden.shape[1],
        "C": weight.shape[0],
        "mean": int(reduction == "mean"),
    }
    tensors: dict[str, Tensor | None] = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "loss": loss,
        "grad_hidden": grad_hidden if need_grad else None,
        "grad_weight": grad_weight if need_grad else None,
        "grad_bias": grad_bias if need_grad and bias is not None else None,
    }
    _call(_C.linear_cross_entropy_fwd, dtype, sizes, tensors)
    return loss, grad_hidden, grad_weight, grad_bias


_LARGE_READOUT = 6 << 20  # bytes of weight
_LOGITS = 32 << 20  # bytes of a chunk's logits, about


@ieee_products()
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
    n, k = m.shape[-2:]
    batch = m.numel() // (n * k)
    out = torch.empty(m.shape, dtype=m.dtype)
    rates = (
        lr.to(torch.float64).expand(m.shape[:-2]).contiguous()
        if isinstance(lr, Tensor)
        else torch.full((batch,), lr, dtype=torch.float64)
    )
    _call(_C.cayley, m.dtype, {"batch": batch, "N": n, "K": k}, {"m": m, "g": g, "lr": rates, "out": out})
    return out


def gram(w: Tensor) -> Tensor:
    """W^T W [K, K] for w [M, K], float32 or float64, in half of a product's operations. Exactly symmetric."""
    m, k = w.shape
    out = torch.empty(k, k, dtype=w.dtype)
    _call(_C.gram, w.dtype, {"M": m, "K": k}, {"w": w, "out": out})
    return out


def is_definite(a: Tensor, diagonal: Tensor) -> bool:
    """Whether a has a Cholesky factorisation with `diagonal` in place of its own; NaN and infinity have none.

    a: [K, K], float32 or float64, symmetric: only what stands above the diagonal is read. diagonal: [K].
    """
    definite = torch.empty(1, dtype=torch.int64)
    tensors = {"a": a, "diagonal": diagonal, "definite": definite}
    _call(_C.is_definite, a.dtype, {"K": a.shape[0]}, tensors)
    return bool(definite)


def distance(w: Tensor, other: Tensor | None = None) -> float:
    """||w - other||_F, or ||w||_F: rows summed in their dtype, these sums in float64.

    w, other: [M, K], float32 or float64.
    """
    found = torch.empty(1, dtype=torch.float64)
    tensors = {"w": w, "other": other, "distance": found}
    _call(_C.distance, w.dtype, {"M": w.shape[0], "K": w.shape[1]}, tensors)
    return float(found)


def wide_product(w: Tensor, v: Tensor) -> Tensor:
    """W V [M, S], float64, for w [M, K], float32 or float64, and v [K, S], float64, S small."""
    image = torch.empty(w.shape[0], v.shape[1], dtype=torch.float64)
    sizes = {"M": w.shape[0], "K": w.shape[1], "S": v.shape[1]}
    _call(_C.wide_product, w.dtype, sizes, {"w": w, "v_rows": v.mT, "image": image})
    return image


def subtract_product(w: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """W - T V^T [M, K] in w's dtype, rounded once.

    w: [M, K], float32 or float64. t: [M, S] and v: [K, S], float64, S small.
    """
    out = torch.empty_like(w, memory_format=torch.contiguous_format)
    sizes = {"M": w.shape[0], "K": w.shape[1], "S": v.shape[1]}
    _call(_C.subtract_product, w.dtype, sizes, {"w": w, "v_rows": v.mT, "image": t, "out": out})
    return out
