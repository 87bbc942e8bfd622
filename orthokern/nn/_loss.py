"""A recurrent module's loss behind a linear readout, without the states of its last layer; and the bases it keeps.

Note [The basis that a module keeps]
    In a call by modes the eigenvectors of W are refined from those of an earlier call, and rounding depends on where
    the refinement begins. So what a module keeps is part of its state: it changes in a forward that training
    differentiates through and in no other, stands in the state_dict as modal_basis_l0 once there is one, and loading a
    state_dict puts it back, or takes it away where that has none. The same parameters, basis and inputs give the same
    bits, after a resume too, and however often the module was evaluated in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orthokern import functional
from orthokern.errors import InputError

if TYPE_CHECKING:
    from orthokern.nn._recurrent import Recurrent

KEY = "modal_basis_"


def weights_of(readout: Any, hidden: int) -> tuple[Tensor, Tensor | None]:
    """weight [C, N] and bias [C] or None of a linear layer, checked as far as the functional does not."""
    weight, bias = getattr(readout, "weight", None), getattr(readout, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != hidden:
        got = type(readout).__name__ if not isinstance(weight, Tensor) else f"a weight of shape {list(weight.shape)}"
        raise InputError(
            f"readout is {got}; accepted: a torch.nn.Linear or orthokern.nn.LinearCrossEntropy of {hidden} inputs"
        )
    return weight, bias


def loss(
    module: Recurrent,
    data: Tensor,
    h0: Tensor | None,
    suffix: str,
    readout: nn.Module,
    target: Tensor,
    lengths: Tensor | None,
    reduction: str,
    algorithm: str,
) -> functional.ScanLoss:
    """What the last layer, whose inputs are ``data`` [T, B, ...], makes of the loss; ``module.loss`` has the rest."""
    weight, bias = weights_of(readout, module.hidden_size)
    matrix, added = module._factors(suffix)
    options = module._scan_options(suffix, lengths)
    del options["checkpoint_every"]
    found = functional.scan_cross_entropy(
        data, matrix, weight, target, h0,
        bias=added, readout_bias=bias, reduction=reduction, algorithm=algorithm, basis=module._bases.get(suffix),
        **options,
    )  # fmt: skip
    if module.training and torch.is_grad_enabled() and found.basis is not None:
        module._bases[suffix] = found.basis
    return found


def explain(
    module: Recurrent, T: int, B: int, classes: int, *, ids: bool, lengths: bool, algorithm: str
) -> tuple[str, str]:
    """(algorithm, why) of ``module.loss`` for one call; see ``Recurrent.explain_loss``."""
    suffix = module._suffix(-1, False)
    with torch.no_grad():
        matrix = module._factors(suffix)[0]
    return functional.explain_scan_cross_entropy(
        matrix, T, B, classes,
        ids=ids and module.num_layers == 1, lengths=lengths, activation=module.nonlinearity,
        message_clip=module.message_clip, backend=module.backend, algorithm=algorithm,
        basis=module._bases.get(suffix),
    )  # fmt: skip


def save(module: Recurrent, destination: dict[str, Any], prefix: str) -> None:
    """Writes the bases into a state_dict."""
    for suffix, basis in module._bases.items():
        destination[f"{prefix}{KEY}{suffix}"] = basis


def load(module: Recurrent, state_dict: dict[str, Any], prefix: str, unexpected: list[str], errors: list[str]) -> None:
    """Takes the bases of a state_dict, and their keys out of those that nobody expected."""
    module._bases = {}
    N = module.hidden_size
    for suffix in module._suffixes():
        key = f"{prefix}{KEY}{suffix}"
        basis = state_dict.get(key)
        if basis is None:
            continue
        if key in unexpected:
            unexpected.remove(key)
        if not isinstance(basis, Tensor) or basis.dim() != 2 or basis.shape[0] != N or not N <= basis.shape[1] <= 2 * N:
            errors.append(f"{key} is no basis of {N} units")
            continue
        module._bases[suffix] = basis.detach().to(torch.float64, copy=True)
