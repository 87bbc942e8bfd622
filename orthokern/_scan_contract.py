"""Arguments and results of the backend modules of the scans and of the losses, which are the same for every backend.

A backend module of ``factored_scan`` and ``dense_scan`` has two functions, named after the op:

    <op>_fwd(args) -> ScanStates
    <op>_bwd(args, grad_hs, states, pre, needs) -> ScanGradients

Those of the other ops have the functions:

    gru_scan_fwd(args) -> GruStates
    gru_scan_bwd(args, grad_hs, states, needs) -> GruGradients
    peephole_scan_fwd(inputs, *, need_gates=True) -> PeepholeStates
    peephole_scan_bwd(inputs, grad_hs, grad_cs, states) -> PeepholeGradients
    rotation_scan_fwd(args) -> hs
    rotation_scan_bwd(args, grad_hs, hs, *, need_x) -> RotationGradients
    linear_cross_entropy_fwd(hidden, readout, *, need_grad=True) -> LinearLoss

``needs`` has the type of the result, with a bool for each field: whether it is needed; need_grad, need_gates and need_x
are for one result. A function may return more.

Tensors have any strides: a backend copies those that its kernels need contiguous. B batch, T time, N hidden, K rank, D
features or token ids, C classes, M modes, R rows. ``ScanArgs`` in ``csrc/cpu/ops.h`` and ``csrc/cuda/scan.h`` uses the
same names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS

# types of arguments that are not tensors; a look-up takes a fraction of the time of isinstance(value, Tensor)
PLAIN = {type(None), str, int, float, bool}
_SAVED = object()  # instead of a tensor


def split_tensors(args: Any) -> tuple[Any, list[Tensor]]:
    """The arguments of an op, a named tuple, without their tensors, and the tensors, for ``ctx.save_for_backward``."""
    options = [value if type(value) in PLAIN or not isinstance(value, Tensor) else _SAVED for value in args]
    return args._make(options), [value for value, option in zip(args, options, strict=True) if option is _SAVED]


def join_tensors(args: Any, tensors: Iterable[Tensor | None]) -> Any:
    """The arguments from the results of `split_tensors`."""
    saved = iter(tensors)
    return args._make([next(saved) if value is _SAVED else value for value in args])


def types_of(args: Any) -> dict[str, str]:
    """The types of the fields of a named tuple, as they are written there."""
    return {name: getattr(hint, "__forward_arg__", hint) for name, hint in args.__annotations__.items()}


def schema_of(args: Any) -> str:
    """The arguments of an op that are the fields of a named tuple, in the syntax of torch.library."""
    defaults = {name: "None" if value is None else json.dumps(value) for name, value in args._field_defaults.items()}
    fields = {name: hint.replace(" | None", "?") for name, hint in types_of(args).items()}
    return ", ".join(
        f"{hint} {name}{f'={defaults[name]}' if name in defaults else ''}" for name, hint in fields.items()
    )


def split_needs(gradients: Any, fields: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """``needs`` and the other arguments, from the arguments of a backward op."""
    count = len(gradients._fields)
    return gradients(*fields[:count]), fields[count:]


def only_needed(grads: Any, needs: Any) -> tuple[Any, ...]:
    """The results of a backward, None for those that are not needed."""
    return tuple([grad if need else None for grad, need in zip(grads, needs, strict=True)])


# Optional arguments that a backend may lack, see ``dispatch.Support``. All but lengths act between steps.
FEATURES = ("lengths", "message_clip", "resets", "leak")


def between_steps(features: Iterable[str]) -> list[str]:
    """Those that act between steps, on a state or a message: with them, every step waits for the one before."""
    return [name for name in features if name != "lengths"]


def running(T: int, lengths: Tensor | None) -> Tensor | None:
    """Which steps belong to their sequence: bool [T, B], or None for all."""
    if lengths is None:
        return None
    return torch.arange(T, device=lengths.device).unsqueeze(1) < lengths


def without_padding(values: Tensor, alive: Tensor | None) -> Tensor:
    """values [T, B], [T, B, N] or [B, N], with zeros wherever alive ([T, B] or [B]) is False."""
    if alive is None:
        return values
    return torch.where(alive.view(*alive.shape, *(1,) * (values.ndim - alive.ndim)), values, torch.zeros_like(values))


def started(h: Tensor, resets: Tensor | None, reset_state: Tensor | None) -> Tensor:
    """h [..., B, N] with reset_state [B, N], or zeros for None, wherever resets [..., B] is true: Note [Resets] of the
    reference."""
    if resets is None:
        return h
    return torch.where(resets.unsqueeze(-1), h.new_zeros(()) if reset_state is None else reset_state, h)


class ScanOptions(TypedDict, total=False):
    """The optional arguments of the functions of a scan, by name; see ``orthokern.functional.factored_scan``."""

    weight: Tensor | None
    bias: Tensor | None
    act_param: Tensor | None
    activation: str
    checkpoint_every: int
    backend: str | None
    precision: str
    algorithm: str
    lengths: Tensor | None
    message_clip: float
    resets: Tensor | None
    reset_state: Tensor | None
    leak: Tensor | None


class ScanArgs(NamedTuple):
    """The arguments of a scan, in the order of the ops' schemas; see ``orthokern.ops.factored_scan``.

    The recurrent map is W = second diag(scale) first^T, or W = second if first and scale are None.
    """

    x: Tensor | None  # [T, B, N] without weight, else [T, B, D] or int64 [T, B]; None in a backward without x
    first: Tensor | None  # V [N, K], the factor that a forward step applies first
    scale: Tensor | None  # s [K]
    second: Tensor  # U [N, K], or W [N, N]
    h0: Tensor  # [B, N]
    weight: Tensor | None = None  # [N, D]
    bias: Tensor | None = None  # [N]
    act_param: Tensor | None = None  # [1] or [N]
    activation: str = "tanh"
    checkpoint_every: int = 0
    backend: str | None = None
    precision: str = "ieee"
    algorithm: str = "auto"
    lengths: Tensor | None = None  # int64 [B]
    message_clip: float = 0  # not 0.0, of which torch.compile(dynamic=True) makes a symbol
    resets: Tensor | None = None  # bool [T, B]: before these steps the state becomes reset_state
    reset_state: Tensor | None = None  # [B, N]; None: zeros
    leak: Tensor | None = None  # [1] or [N], the share of phi(a_t) in h_t; None: 1

    @property
    def op(self) -> str:
        """The name of the op."""
        return "dense_scan" if self.first is None else "factored_scan"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that a backend may limit."""
        N, K = self.second.shape
        return {"N": N} if self.first is None else {"N": N, "K": K}

    @property
    def time_steps(self) -> int:
        """T, of a call with x."""
        assert self.x is not None
        return self.x.shape[0]

    @property
    def clip(self) -> float:
        """The bound of |delta_t|; infinity without message_clip."""
        return self.message_clip if self.message_clip > 0 else math.inf

    @property
    def features(self) -> tuple[str, ...]:
        """The names of FEATURES that the call uses."""
        if self.lengths is None and self.resets is None and not self.message_clip and self.leak is None:
            return ()
        used = (self.lengths is not None, self.message_clip > 0, self.resets is not None, self.leak is not None)
        return tuple([name for name, is_used in zip(FEATURES, used, strict=True) if is_used])

    @property
    def reads_pre(self) -> bool:
        """Whether the backward reads the pre-activations."""
        return self.leak is not None or ACTIVATIONS[self.activation].reads == "input"

    @property
    def keeps_pre(self) -> bool:
        """Whether the forward saves the pre-activations for the backward."""
        return self.reads_pre and not self.checkpoint_every


class ScanStates(NamedTuple):
    """Results of a forward."""

    hs: Tensor  # [T, B, N]
    ckpt: Tensor | None  # [ceil(T / checkpoint_every), B, N], the states that enter segments; None without checkpoints
    pre: Tensor | None  # [T, B, N] if args.keeps_pre, else None


class ScanGradients(NamedTuple):
    """Results of a backward; None for a result that does not apply or is not needed."""

    x: Tensor | None
    first: Tensor | None
    scale: Tensor | None
    second: Tensor | None
    h0: Tensor | None  # [B, N]
    weight: Tensor | None
    bias: Tensor | None
    act_param: Tensor | None
    reset_state: Tensor | None  # [B, N]
    leak: Tensor | None
    norm: Tensor | None  # [T], the Frobenius norm over [B, N] of dL/dh_t

    @property
    def map(self) -> bool:
        """Of needs: whether any result is a gradient of W's factors, or of W."""
        return bool(self.first or self.scale or self.second)

    @property
    def sums(self) -> bool:
        """Of needs: whether any result is a sum over time of products with delta_t."""
        return bool(self.map or self.weight or self.bias)


GRU_VARIANTS = ("kanai", "torch")
GRU_FEATURES = ("lengths", "resets")


class GruArgs(NamedTuple):
    """The arguments of a GRU scan, in the order of the op's schema; see ``orthokern.ops.gru_scan``."""

    x: Tensor | None  # [T, B, 3N]; None in a backward
    w: Tensor  # [3N, N]
    h0: Tensor  # [B, N]
    bias: Tensor | None  # [3N]
    variant: str
    backend: str | None = None
    lengths: Tensor | None = None  # int64 [B]
    resets: Tensor | None = None  # bool [T, B]: before these steps the state becomes reset_state
    reset_state: Tensor | None = None  # [B, N]; None: zeros

    @property
    def op(self) -> str:
        """The name of the op."""
        return "gru_scan"

    @property
    def features(self) -> tuple[str, ...]:
        """The names of FEATURES that the call uses."""
        return tuple([name for name in GRU_FEATURES if getattr(self, name) is not None])

    @property
    def algorithm(self) -> str:
        """The only algorithm."""
        return "auto"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that a backend may limit."""
        return {"N": self.w.shape[1]}

    @property
    def kanai(self) -> bool:
        """Whether the variant is "kanai", which saves no ``pre``."""
        return self.variant == "kanai"


class GruStates(NamedTuple):
    """Results of a forward."""

    hs: Tensor  # [T, B, N]
    gates: Tensor  # [T, B, 3N]
    pre: Tensor | None  # [T, B, N], or None in variant "kanai"


class GruGradients(NamedTuple):
    """Results of a backward; None for a result that does not apply or is not needed."""

    x: Tensor | None  # [T, B, 3N]
    w: Tensor | None
    h0: Tensor | None
    bias: Tensor | None
    reset_state: Tensor | None  # [B, N]
    norm: Tensor | None  # [T], the Frobenius norm over [B, N] of dL/dh_t


class PeepholeInputs(NamedTuple):
    """The tensors of an LSTM scan with peepholes; see ``orthokern.ops.peephole_scan``."""

    x: Tensor | None  # [T, B, 4N]; a backward has None
    w: Tensor  # [4N, N]
    peephole: Tensor  # [3, N], of the gates i, f, o
    h0: Tensor  # [B, N]
    c0: Tensor  # [B, N]

    @property
    def op(self) -> str:
        """The name of the op."""
        return "peephole_scan"


class PeepholeStates(NamedTuple):
    """Results of a forward."""

    hs: Tensor  # [T, B, N]
    cs: Tensor  # [T, B, N]
    gates: Tensor | None  # [T, B, 4N]: i, f, g, o; for a backward


class PeepholeGradients(NamedTuple):
    """Results of a backward."""

    x: Tensor  # [T, B, 4N]
    w: Tensor
    peephole: Tensor
    h0: Tensor
    c0: Tensor


class RotationArgs(NamedTuple):
    """The arguments of a rotation_scan, in the order of the op's schema; see ``orthokern.ops.rotation_scan``."""

    x: Tensor | None  # [T, B, 2M], or [T, B, D] with a weight; a backward without a weight has None
    re: Tensor  # float64 [M], of the eigenvalues
    im: Tensor
    h0: Tensor  # [B, 2M]
    weight: Tensor | None = None  # [2M, D]
    bias: Tensor | None = None  # [2M], with a weight
    resets: Tensor | None = None  # bool [T, B]: before these steps the state becomes zero
    backend: str | None = None


class RotationGradients(NamedTuple):
    """Results of a backward; None for a result that does not apply or is not needed."""

    x: Tensor | None
    re: Tensor
    im: Tensor
    h0: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


class Readout(NamedTuple):
    """A linear readout, and the targets and reduction of its cross-entropy."""

    weight: Tensor  # [C, N], or [C, 2M] in modal coordinates
    bias: Tensor | None  # [C]
    target: Tensor  # class ids, [R] or [T, B]
    reduction: str = "mean"


class LinearLoss(NamedTuple):
    """Results of ``linear_cross_entropy``; the gradients are None if they are not needed or do not apply."""

    loss: Tensor  # 0-dim
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
