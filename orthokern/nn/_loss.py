"""The loss of a recurrent module with a linear readout, without storing the states of its last layer.

Note [The basis that a module keeps]
    In a modal call the eigenvectors of W are refined from those of an earlier call, and rounding depends on that start.
    So the basis is part of a module's state. It changes only in a forward in training mode with gradients, is in the
    state_dict as modal_basis_l0 once it exists, and loading a state_dict restores or removes it. It is an attribute of
    the module by this name, since torch.distributed.checkpoint resolves the keys of a state_dict, but not a buffer,
    whose absence load_state_dict would report. The same parameters, basis and inputs give the same bits, also after a
    resume, and after any number of evaluations in between. A replica of torch.nn.DataParallel does not return its
    basis; DistributedDataParallel keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import functional
from orthokern._scan_contract import Readout, ScanArgs
from orthokern.errors import InputError
from orthokern.ops.modal import choice
from orthokern.ops.modal.loss import ScanLoss
from orthokern.ops.modal.op import modal_last_step_norms

KEY = "modal_basis_"


def weights_of(readout: Any, hidden: int) -> tuple[Tensor, Tensor | None]:
    """weight [C, N] and bias [C] or None of a linear layer; checks what the functional does not check."""
    weight, bias = getattr(readout, "weight", None), getattr(readout, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != hidden:
        got = type(readout).__name__ if not isinstance(weight, Tensor) else f"a weight of shape {list(weight.shape)}"
        raise InputError(
            f"readout is {got}; accepted: a torch.nn.Linear or orthokern.nn.LinearCrossEntropy of {hidden} inputs"
        )
    return weight, bias


def loss(
    readout: nn.Module,
    target: Tensor,
    x: Tensor,
    matrix: tuple[Tensor, ...],
    h0: Tensor | None,
    *,
    reduction: str | None,
    **options: Any,
) -> ScanLoss:
    """``scan_cross_entropy`` with these arguments and the parameters of a linear layer."""
    weight, bias = weights_of(readout, len(matrix[0]))
    if reduction is None:
        reduction = getattr(readout, "reduction", "mean")
    return functional.scan_cross_entropy(
        x, matrix, weight, target, h0, readout_bias=bias, reduction=reduction, **options
    )


@torch.no_grad()
def last_step_norms(
    readout: nn.Module,
    target: Tensor,
    x: Tensor,
    matrix: tuple[Tensor, ...],
    h0: Tensor | None,
    *,
    algorithm: str,
    basis: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    **options: Any,
) -> Tensor | None:
    """||dL/dh_t|| [T] at the steps ``profile_steps(T)``, NaN at others; L is the mean cross-entropy of the last step
    alone. None if `loss` with the same arguments does not use the modal form."""
    (T, B), layer = x.shape[:2], weights_of(readout, len(matrix[0]))
    own = {name: options[name] for name in ("activation", "message_clip", "backend")}
    ids = not x.is_floating_point()
    call = choice.Call(matrix, T, B, len(layer[0]), ids, start=basis, algorithm=algorithm, **own)
    modes, _ = choice.choose(call)
    if modes is None:
        return None
    h0 = matrix[0].new_zeros(B, len(matrix[0])) if h0 is None else h0
    u, s, v = matrix if len(matrix) == 3 else (matrix[0], None, None)
    args = ScanArgs(x, v, s, u, h0, weight, bias, None, "identity")
    return modal_last_step_norms(args, Readout(*layer, target), modes)


def save(module: nn.Module, suffixes: Iterable[str], destination: dict[str, Any], prefix: str) -> None:
    """Writes the bases into a state_dict."""
    for suffix in suffixes:
        basis = getattr(module, KEY + suffix, None)
        if basis is not None:
            destination[f"{prefix}{KEY}{suffix}"] = basis


def load(
    module: nn.Module,
    suffixes: Iterable[str],
    N: int,
    state_dict: dict[str, Any],
    prefix: str,
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Loads the bases of a state_dict, and removes their keys from the unexpected ones. N: hidden units."""
    for suffix in suffixes:
        vars(module).pop(KEY + suffix, None)
        key = f"{prefix}{KEY}{suffix}"
        basis = state_dict.get(key)
        if basis is None:
            continue
        if key in unexpected:
            unexpected.remove(key)
        shape = list(basis.shape) if isinstance(basis, Tensor) else []
        if len(shape) != 2 or shape[0] != N or shape[1] % 2 or not N <= shape[1] <= 2 * N:
            got = f"has shape {shape}" if isinstance(basis, Tensor) else f"is {type(basis).__name__}"
            errors.append(
                f"{key} {got}, which is no basis of {N} units; accepted: [N, 2M] with N = {N}, 2M from N to 2N"
            )
            continue
        setattr(module, KEY + suffix, basis.detach().to(torch.float64, copy=True))
