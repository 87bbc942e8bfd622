"""The public functions: all ops, with checks of their arguments.

Letters: B batch, T time, N hidden, K rank of U and V, D input features or number of token ids, C classes.
A wrong argument raises ``InputError`` (one line: argument, value, accepted values). ``backend`` is "reference", "cpu",
"triton", "cuda", "auto" or None, which means the environment variable ORTHOKERN_BACKEND, or "auto" without it. An
explicit backend that does not support the call raises ``BackendUnavailable``.

Dtypes are float32 and float64; on the reference backend, ``factored_scan``, ``dense_scan``, the GRU, the activations
and ``linear_cross_entropy`` also take float16 and bfloat16. Sizes of the scans are at least 1 (orthokern.nn also
accepts a batch of 0). Token ids, lengths and leaks are checked on a CPU; on a GPU a wrong id gives NaN.

All functions have derivatives of any order, in reverse and forward mode and under torch.func. A backend computes the
values and the first derivatives in reverse mode, the reference all others. Exceptions: ``cayley`` is differentiable
with backend="reference" only, in m and g; the modal form, and ``scan_cross_entropy`` if it recomputes states in chunks,
have no second derivative (create_graph=True): the backward then raises a RuntimeError that names the argument to
change; algorithm="modal" raises InputError in forward mode and under torch.func; and with message_clip a second
derivative is that of the clipped gradient, clipped once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from orthokern import dispatch, ops
from orthokern._scan_contract import FEATURES, Readout, ScanOptions
from orthokern.dispatch import dtype_name
from orthokern.errors import InputError, integer, number, one_of, require
from orthokern.ops import _checks as check
from orthokern.ops._checks import PRECISIONS
from orthokern.ops.activations import NAMES as ACTIVATIONS
from orthokern.ops.cayley import cayley
from orthokern.ops.dense_scan import dense_scan
from orthokern.ops.factored_scan import factored_scan
from orthokern.ops.gru_scan import gru_scan
from orthokern.ops.modal import choice
from orthokern.ops.modal.loss import ScanLoss, scan_loss
from orthokern.ops.rotation_scan import rotation_scan
from orthokern.ops.skew_exp import skew_exp

__all__ = [
    "ACTIVATIONS",
    "PRECISIONS",
    "SPECTRUM_MAPS",
    "activation",
    "cayley",
    "dense_scan",
    "explain_scan_cross_entropy",
    "factored_scan",
    "gru_scan",
    "linear_cross_entropy",
    "modrelu",
    "oplu",
    "prelu",
    "rotation_scan",
    "scan_cross_entropy",
    "skew_exp",
    "spectrum",
]

SPECTRUM_MAPS = ("sigmoid", "tanh")


def activation(x: Tensor, name: str, act_param: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Apply an activation to the units in the last dimension.

    Args:
        x: [..., N], floating; N even for oplu.
        name: one of ACTIVATIONS.
        act_param: [1] or [N], dtype and device of x: slope (prelu, leaky_relu) or bias (modrelu); else None.
        backend: see the module's docstring.

    Returns:
        [..., N] (x itself for identity). Differentiable in x and act_param.

    Raises:
        InputError: wrong shapes, dtypes, devices or name.
        BackendUnavailable: the requested backend does not support the call.

    Example::

        >>> activation(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 2.])
    """
    return _activation(x, name, act_param, "act_param", backend)


def _activation(x: Tensor, name: str, param: Tensor | None, param_name: str, backend: str | None) -> Tensor:
    one_of("activation", name, ACTIVATIONS)
    dispatch.requested(backend)
    check.is_float("x", check.is_tensor("x", x))
    if x.ndim < 1 or x.shape[-1] < 1:
        raise InputError(f"x has shape {list(x.shape)}: accepted is [..., N] with N at least 1")
    check.activation_parameter(name, param, x.shape[-1], "x", x, param_name)
    # kernels need elements
    return ops.activations.activation(x, param, activation=name, backend=backend if x.numel() else "reference")


def modrelu(x: Tensor, bias: Tensor, *, backend: str | None = None) -> Tensor:
    """sign(x) max(|x| + bias, 0), the real modReLU (Arjovsky et al. 2016). x [..., N]; bias [1] or [N].

    Example::

        >>> modrelu(torch.tensor([-1.0, 0.25]), torch.tensor([-0.5, -0.5]))
        tensor([-0.5000,  0.0000])
    """
    return _activation(x, "modrelu", bias, "bias", backend)


def oplu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """(max, min) of each adjacent pair; ties are not swapped (Chernodub and Nowicki 2016). x [..., N], N even.

    Example::

        >>> oplu(torch.tensor([1.0, 2.0, 4.0, 3.0]))
        tensor([2., 1., 4., 3.])
    """
    return activation(x, "oplu", backend=backend)


def prelu(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """max(x, 0) + weight min(x, 0) (He et al. 2015), as torch.nn.functional.prelu: several weights apply along dim 1.

    x [..., N] with weight [1]; [N] or [B, N, ...] with weight [N]. For weights along the last dim of a larger x:
    ``activation(x, "prelu", weight)``.

    Example::

        >>> prelu(torch.tensor([-1.0, 2.0]), torch.tensor([0.25]))
        tensor([-0.2500,  2.0000])
    """
    if check.is_tensor("weight", weight).numel() > 1 and check.is_tensor("x", x).ndim > 2:
        return _activation(x.movedim(1, -1), "prelu", weight, "weight", backend).movedim(-1, 1)
    return _activation(x, "prelu", weight, "weight", backend)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias``, in nats, without storing all logits.

    Mathematics, cost and numerics: ``orthokern.ops.linear_cross_entropy.linear_cross_entropy``.

    Args:
        input: [..., N], floating.
        linear_weight: [C, N]; linear_bias: [C] or None; dtype and device of input.
        target: int64 or int32 [...], input's shape without N, class ids in [0, C). On a GPU they are not checked: a
            wrong one makes the loss NaN.
        reduction: "mean" or "sum" over all rows.
        backend: see the module's docstring.

    Returns:
        The loss, 0-dim. Differentiable in input, linear_weight and linear_bias.

    Raises:
        InputError: wrong shapes, dtypes, devices, reduction or class ids.
        BackendUnavailable: the requested backend does not support the call.

    Example::

        >>> linear_cross_entropy(torch.randn(100, 8), torch.zeros(5, 8), torch.zeros(100, dtype=torch.int64))
        tensor(1.6094)
    """
    dispatch.requested(backend)
    check.is_float("input", check.is_tensor("input", input))
    if input.ndim < 1:
        raise InputError("input has shape []: accepted is [..., N]")
    N = input.shape[-1]
    if N < 1:
        raise InputError(f"input has shape {list(input.shape)}: accepted is [..., N] with N at least 1")
    if not input.numel():
        require(reduction != "mean", "input", "of 1 row or more for reduction='mean'", f"shape {list(input.shape)}")
        backend = "reference"  # kernels need rows
    check.is_tensor("linear_weight", linear_weight)
    if linear_weight.ndim != 2 or linear_weight.shape[1] != N or linear_weight.shape[0] < 1:
        raise InputError(
            f"linear_weight has shape {list(linear_weight.shape)}: accepted is [C, N] with N = {N}, C at least 1"
        )
    check.same_kind("linear_weight", linear_weight, "input", input)
    if linear_bias is not None:
        check.fits("linear_bias", linear_bias, (linear_weight.shape[0],), "[C]", "input", input)
    check.is_tensor("target", target)
    if target.dtype not in check.TOKEN_DTYPES:
        raise InputError(f"target has dtype {dtype_name(target.dtype)}: accepted is int64 or int32")
    check.has_shape("target", target, tuple(input.shape[:-1]), "the shape of input without N,")
    check.same_device("target", target, "input", input)
    one_of("reduction", reduction, ops.linear_cross_entropy.REDUCTIONS)
    return ops.linear_cross_entropy.linear_cross_entropy(
        input.reshape(-1, N),
        linear_weight,
        linear_bias,
        target.reshape(-1).to(torch.int64),
        reduction=reduction,
        backend=backend,
    )


def scan_cross_entropy(
    x: Tensor,
    matrix: Tensor | Sequence[Tensor],
    readout: Tensor,
    target: Tensor,
    h0: Tensor | None = None,
    *,
    readout_bias: Tensor | None = None,
    reduction: str = "mean",
    basis: Tensor | None = None,
    **options: Unpack[ScanOptions],
) -> ScanLoss:
    """Cross-entropy of a linear readout of a recurrence's states, in nats, without storing the states of all steps.

    h_t = phi(W h_{t-1} + e_t) as in ``dense_scan``, or with W = U diag(s) V^T as in ``factored_scan``; the logits of
    step t are ``h_t @ readout.T + readout_bias``. With the identity as activation the recurrence can run in the
    eigenbasis of W, at a cost of O(N) a step: Note [Modes of a recurrent matrix] in ``orthokern/ops/modal/basis.py``
    and Note [Divided differences] in ``gradient.py``. Otherwise it processes chunks of time one after the other:
    Note [Chunks of states] in ``loss.py``.

    Args:
        x, h0, options: as in ``factored_scan``; token ids may also be uint8 or int16. With resets, leak or
            message_clip the sequential scan is used. On a GPU a sequential call with lengths waits for the device,
            since the loss is that of the rows before padding. The algorithm "auto" is modal if that costs less and is
            as accurate as the sequential scan.
        matrix: w [N, N], or the tuple (u [N, K], s [K], v [N, K]).
        readout: [C, N]; readout_bias: [C] or None.
        target: uint8, int16, int32 or int64 [T, B], class ids in [0, C).
        reduction: "mean" over all steps before the end of their sequence, or "sum".
        basis: the ``basis`` of an earlier call with a similar matrix. It is refined to the eigenvectors of W if the
            refinement converges, which costs less than an eigensolver. The result depends on the arguments only, this
            one included: save it for bit-identical results after a resume.

    Returns:
        A named tuple ScanLoss:
            - loss, 0-dim, differentiable in x, matrix, readout, h0, weight, bias, readout_bias, act_param, reset_state,
              leak;
            - hits, int64 [T], the number of sequences whose largest logit at the step is that of the target;
            - basis, float64 [N, 2M], the eigenvectors for the next call; None if the modal form was not used;
            - refused, the reason why the modal form was not used; "" if it was.

    Raises:
        InputError: wrong shapes, dtypes, devices, names, ids, lengths; "modal" if it is not possible.
        BackendUnavailable: the requested backend does not support the call.

    Example::

        >>> tokens, target = torch.randint(0, 4, (100, 3)), torch.zeros(100, 3, dtype=torch.int64)
        >>> w, table = torch.linalg.qr(torch.randn(8, 8))[0], torch.randn(8, 4)
        >>> scan_cross_entropy(tokens, w, torch.zeros(5, 8), target, weight=table, activation="identity").loss
        tensor(1.6094)
    """
    name, like, factors = _checked_matrix(matrix)
    N = like.shape[0]
    args = check.scan_args(name, factors, x, h0, options, small_ids=True)
    check.is_tensor("readout", readout)
    if readout.ndim != 2 or readout.shape[1] != N or readout.shape[0] < 1:
        raise InputError(f"readout has shape {list(readout.shape)}: accepted is [C, N] with N = {N}, C at least 1")
    check.same_kind("readout", readout, name, like)
    if readout_bias is not None:
        check.fits("readout_bias", readout_bias, (readout.shape[0],), "[C]", name, like)
    check.is_tensor("target", target)
    if target.dtype not in check.ID_DTYPES:
        raise InputError(f"target has dtype {dtype_name(target.dtype)}: accepted is uint8, int16, int32 or int64")
    check.has_shape("target", target, tuple(x.shape[:2]), "[T, B]")
    check.same_device("target", target, name, like)
    one_of("reduction", reduction, ops.linear_cross_entropy.REDUCTIONS)
    _check_basis(basis, like)
    outputs = Readout(readout, readout_bias, target, reduction)
    return scan_loss(args, outputs, basis)


def _checked_matrix(matrix: Tensor | Sequence[Tensor]) -> tuple[str, Tensor, tuple[Tensor, ...]]:
    """The name and the first of the factors of a square matrix, and all of them."""
    factors = tuple(matrix) if isinstance(matrix, (tuple, list)) else (matrix,)
    if len(factors) == 3:
        check.factors(*factors)
        return "u", factors[0], factors
    if len(factors) != 1:
        raise InputError(f"matrix has {len(factors)} factors: accepted is w [N, N], or (u, s, v)")
    like = check.is_tensor("matrix", factors[0])
    if like.ndim != 2 or like.shape[0] != like.shape[1] or like.shape[0] < 1:
        raise InputError(f"matrix is {check.describe(like)}: accepted is w [N, N], or (u, s, v)")
    check.is_float("matrix", like)
    return "matrix", like, factors


def _check_basis(basis: Tensor | None, like: Tensor) -> None:
    if basis is None:
        return
    check.is_tensor("basis", basis)
    N = like.shape[0]
    if basis.ndim != 2 or basis.shape[0] != N or basis.shape[1] % 2 or not N <= basis.shape[1] <= 2 * N:
        raise InputError(f"basis has shape {list(basis.shape)}: accepted is that of an earlier call, [N, 2M]")
    if basis.dtype != torch.float64 or basis.device != like.device:
        got = f"{dtype_name(basis.dtype)} on {basis.device}"
        raise InputError(f"basis is {got}: accepted is that of an earlier call, float64 on {like.device}")


def explain_scan_cross_entropy(
    matrix: Tensor | Sequence[Tensor],
    T: int,
    B: int,
    classes: int,
    *,
    ids: bool = True,
    activation: str = "identity",
    backend: str | None = None,
    algorithm: str = "auto",
    basis: Tensor | None = None,
    **others: Any,
) -> tuple[str, str]:
    """Which algorithm ``scan_cross_entropy`` uses for a training step with this matrix, and why.

    Args:
        matrix, backend, algorithm, basis: as in ``scan_cross_entropy``.
        activation: as there, but the identity by default.
        T, B, classes: sizes of the call, each at least 1.
        ids: whether the inputs are token ids.
        others: whether the call has one of the arguments lengths, message_clip, resets and leak, for example
            ``lengths=True``.

    Returns:
        ("modal", a text with the number of modes and the condition of the eigenvectors), or (another algorithm, a text
        with the reason).

    Raises:
        InputError: a size below 1, an unknown name, or an algorithm that is not possible for the call.
        BackendUnavailable: no backend supports the call with this algorithm.

    Example::

        >>> w = torch.linalg.qr(torch.randn(8, 8))[0]
        >>> explain_scan_cross_entropy(w, 100, 3, 5, activation="tanh")[0]
        'sequential'
    """
    _, like, factors = _checked_matrix(matrix)
    _check_basis(basis, like)
    T, B, classes = (integer(name, size) for name, size in (("T", T), ("B", B), ("classes", classes)))
    for name in others:
        one_of("argument", name, FEATURES)
        require(not isinstance(others[name], Tensor), name, "True or False", "a Tensor")
    features = tuple(name for name in FEATURES if others.get(name))
    one_of("activation", activation, ACTIVATIONS)
    one_of("algorithm", algorithm, check.ALGORITHMS)
    if algorithm == "chunked":
        check.in_chunks(activation, features)
    options = (activation, backend, algorithm, features)
    modes, why = choice.choose(choice.Call(factors, T, B, classes, ids, True, basis, *options))
    if modes is not None:
        return "modal", f"{len(modes.basis.re)} modes of W, condition of their basis {modes.basis.condition:.3g}"
    scan = "chunked" if algorithm == "chunked" else "sequential"
    call = dispatch.Call(like.device, like.dtype, dict(zip("NK", like.shape, strict=True)), scan, features)
    dispatch.choose("factored_scan" if len(factors) == 3 else "dense_scan", backend, call)
    return scan, why


def spectrum(p: Tensor, margin: float | None, kind: str = "sigmoid") -> Tensor:
    """s in [1 - m, 1 + m] from an unbounded parameter p (Vorontsov et al. 2017, eq. 10); p itself for margin None.

    "sigmoid": s = 2 m (sigmoid(p) - 1/2) + 1, as in the paper, with ds/dp = m / 2 at p = 0.
    "tanh": s = m tanh(p) + 1, with ds/dp = m at p = 0: the "sigmoid" map of 2 p.

    Args:
        p: [K], floating; p = 0 gives s = 1.
        margin: m, 0 or more; 0 gives s = 1 with zero gradient.
        kind: one of SPECTRUM_MAPS; no effect for margin None.

    Returns:
        s [K], differentiable in p to any order.

    Raises:
        InputError: a margin that is negative or not a finite number, or an unknown kind.

    Example::

        >>> spectrum(torch.zeros(3), 0.1)
        tensor([1., 1., 1.])
    """
    check.is_float("p", check.is_tensor("p", p))
    one_of("kind", kind, SPECTRUM_MAPS)
    if margin is None:
        return p
    margin = number("margin", margin, "a finite number, 0 or more, or None", lambda value: value >= 0)
    # 2 sigmoid(p) - 1 = tanh(p / 2), without the cancellation near p = 0
    if torch.is_grad_enabled():
        return margin * torch.tanh(p / 2 if kind == "sigmoid" else p) + 1
    return torch.mul(p, 0.5 if kind == "sigmoid" else 1.0).tanh_().mul_(margin).add_(1)
