"""Parameters of a GRU: their gradients, by products over all steps after the kernels of a leaf, and the names of those
that a spectral constraint bounds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from orthokern._products import add_product, ieee_products
from orthokern._scan_contract import GruArgs, started
from orthokern.errors import one_of

CONSTRAINED_INPUTS = ("upper", "all", "none")


def constrained_weights(suffixes: Iterable[str], inputs: str) -> list[str]:
    """Names of the weights whose candidate rows Kanai et al. 2017 constrain: all recurrent ones, then input ones.

    Args:
        suffixes: of the layers and directions: "l0", "l0_reverse", "l1", ...
        inputs: the input weights of the layers above the first ("upper"), of all layers ("all"), or "none".

    Raises:
        InputError: an unknown `inputs`.

    Example::

        >>> constrained_weights(("l0", "l1"), "upper")
        ['weight_hh_l0', 'weight_hh_l1', 'weight_ih_l1']
    """
    one_of("inputs", inputs, CONSTRAINED_INPUTS)
    suffixes = list(suffixes)
    bound = [suffix for suffix in suffixes if inputs == "all" or (inputs == "upper" and not suffix.startswith("l0"))]
    return [*(f"weight_hh_{suffix}" for suffix in suffixes), *(f"weight_ih_{suffix}" for suffix in bound)]


@ieee_products()
def parameter_gradients(args: GruArgs, hs: Tensor, grad_x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """(grad_w [3N, N], grad_bias [3N] or None); the equations: Note [GRU scan backward] of the reference.

    Args:
        args: the arguments of the leaf.
        hs: [T, B, N], the states.
        grad_x: [T, B, 3N], the rows d_r, d_z, d_n.
        factor: [T, B, N], r h' in variant "kanai", d_q in variant "torch".
    """
    (B, N), rows, rows_n = args.h0.shape, grad_x.flatten(0, 1), factor.flatten(0, 1)
    grad_w, first, later, resets = args.w.new_empty(3 * N, N), args.h0, hs[:-1], args.resets
    if resets is not None:
        first, later = (started(h, cut, args.reset_state) for h, cut in ((first, resets[0]), (later, resets[1:])))
    later = later.flatten(0, 1)

    def set_to_states(total: Tensor, left: Tensor) -> None:
        """total = sum over steps of left_t h_{t-1}^T, without a copy of [h0, hs]."""
        torch.mm(left[:B].mT, first, out=total)
        if hs.shape[0] > 1:
            add_product(total, left[B:], later)

    set_to_states(grad_w[: 2 * N], rows[:, : 2 * N])
    if args.kanai:
        add_product(grad_w[2 * N :].zero_(), rows[:, 2 * N :], rows_n)
    else:
        set_to_states(grad_w[2 * N :], rows_n)
    if args.bias is None:
        return grad_w, None
    grad_bias = rows.sum(0)
    if not args.kanai:
        torch.sum(rows_n, 0, out=grad_bias[2 * N :])
    return grad_w, grad_bias
