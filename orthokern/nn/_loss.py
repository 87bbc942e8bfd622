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

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orthokern import functional
from orthokern._scan_contract import Readout, ScanInputs
from orthokern.errors import InputError
from orthokern.ops import _modal, _scan_loss

if TYPE_CHECKING:
    from orthokern.nn._layouts import Cuts
    from orthokern.nn._recurrent import Recurrent

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
    module: Recurrent,
    data: Tensor,
    h0: Tensor | None,
    suffix: str,
    readout: nn.Module,
    target: Tensor,
    lengths: Tensor | None,
    reduction: str | None,
    algorithm: str,
    cuts: Cuts | None = None,
) -> _scan_loss.ScanLoss:
    """The loss from the inputs ``data`` [T, B, ...] of the last layer; see ``Recurrent.loss``."""
    weight, bias = weights_of(readout, module.hidden_size)
    if reduction is None:
        reduction = getattr(readout, "reduction", "mean")
    matrix, added = module._factors(suffix)
    options = module._scan_options(suffix, lengths, cuts)
    del options["checkpoint_every"]
    found = functional.scan_cross_entropy(
        data, matrix, weight, target, h0,
        bias=added, readout_bias=bias, reduction=reduction, algorithm=algorithm, basis=_basis(module, suffix),
        **options,
    )  # fmt: skip
    if module.training and torch.is_grad_enabled() and found.basis is not None:
        setattr(module, KEY + suffix, found.basis)
    return found


def _basis(module: Recurrent, suffix: str) -> Tensor | None:
    """The basis that the module keeps for a recurrence."""
    basis: Tensor | None = getattr(module, KEY + suffix, None)
    return basis


def state_bytes(
    module: Recurrent, T: int, B: int, classes: int, *, ids: bool = True, lengths: bool = False, algorithm: str
) -> int:
    """Bytes of states and their gradients that a training step with ``module.loss`` holds at one time: for the last
    layer those that its algorithm needs, for the others those of all steps."""
    matrix, options = described(module, ids, lengths, algorithm)
    call, modes, _ = _scan_loss.choose_for(matrix, T, B, classes, start=options.pop("basis"), **options)
    others = 2 * (module.num_layers - 1) * T * B * module.hidden_size * call.dtype.itemsize
    return others + _scan_loss.state_bytes(call, modes is not None)


@torch.no_grad()
def last_step_norms(
    module: Recurrent, data: Tensor, readout: nn.Module, target: Tensor, algorithm: str
) -> Tensor | None:
    """||dL/dh_t|| [T] at the steps ``profile_steps(T)``, NaN at others; L is the mean cross-entropy of the last step
    alone. None if ``module.loss`` does not use the modal form.

    Args:
        module: of one layer.
        data: [T, B] ids or [T, B, D].
        target: [T, B].
        algorithm: as in ``module.loss``.
    """
    weight, bias = weights_of(readout, module.hidden_size)
    matrix, options = described(module, not data.is_floating_point(), False, algorithm)
    T, B = data.shape[:2]
    _, modes, _ = _scan_loss.choose_for(matrix, T, B, len(weight), start=options.pop("basis"), **options)
    if modes is None or module.num_layers > 1:
        return None
    suffix = module._suffix(-1, False)
    options, added = module._scan_options(suffix, None), module._factors(suffix)[1]
    h0 = module._tensor(f"h0_{suffix}") if module.learned_h0 else weight.new_zeros(module.hidden_size)
    inputs = ScanInputs(data, h0.expand(data.shape[1], -1), options["weight"], added)
    return _modal.modal_last_step_norms(inputs, Readout(weight, bias, target), modes, backend=module.backend)


def described(module: Recurrent, ids: bool, lengths: bool, algorithm: str) -> tuple[_modal.Matrix, dict[str, Any]]:
    """The last layer's matrix, and the options of ``explain_scan_cross_entropy`` for it."""
    suffix = module._suffix(-1, False)
    with torch.no_grad():
        matrix = module._factors(suffix)[0]
    return matrix, {
        "ids": ids and module.num_layers == 1, "lengths": lengths, "activation": module.nonlinearity,
        "message_clip": module.message_clip, "backend": module.backend, "algorithm": algorithm,
        "basis": _basis(module, suffix),
    }  # fmt: skip


def save(module: Recurrent, destination: dict[str, Any], prefix: str) -> None:
    """Writes the bases into a state_dict."""
    for suffix in module._suffixes():
        basis = _basis(module, suffix)
        if basis is not None:
            destination[f"{prefix}{KEY}{suffix}"] = basis


def load(module: Recurrent, state_dict: dict[str, Any], prefix: str, unexpected: list[str], errors: list[str]) -> None:
    """Loads the bases of a state_dict, and removes their keys from the unexpected ones."""
    N = module.hidden_size
    for suffix in module._suffixes():
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
