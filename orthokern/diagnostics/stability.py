"""Stability of a GRU: the spectral radius of its Jacobian at h = 0 (Kanai et al. 2017, Figure 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orthokern.diagnostics.spectrum import spectral_radius, svdvals
from orthokern.errors import require


@torch.no_grad()
def diagnose_stability(module: nn.Module) -> dict[str, float]:
    """Stability statistics of all recurrent matrices of a GRU, as a record for metrics.jsonl.

    Without input and biases, h_t = J h_{t-1} near h = 0 with J = W_hn / 4 + I / 2, whether the reset gate is applied
    before or after the product with W_hn (lemma 2 of the paper). The state decays if the spectral radius of J is below
    1; a spectral norm of W_hn below 2 is sufficient for that (lemma 3).

    The cost is one eigenvalue decomposition per recurrence, in float64 on the CPU: about 20 ms for N = 200 and 0.5 s
    for N = 650.

    Args:
        module: an orthokern.nn.GRU or a torch.nn.GRU.

    Returns:
        "jacobian_radius", the largest |eigenvalue| of J, and "recurrent_norm", the largest singular value of W_hn. The
        first recurrence has these names. The names of the others end in "_l0_reverse", "_l1", ...
        NaN for a matrix that is not finite.

    Example::

        >>> gru = torch.nn.GRU(3, 4)
        >>> _ = torch.nn.init.zeros_(gru.weight_hh_l0)
        >>> diagnose_stability(gru)
        {'jacobian_radius': 0.5, 'recurrent_norm': 0.0}
    """
    ways = ("", "_reverse") if getattr(module, "bidirectional", False) else ("",)
    layers = getattr(module, "num_layers", 0) if isinstance(module, nn.Module) else 0
    names = [f"weight_hh_l{layer}{way}" for layer in range(layers) for way in ways]
    weights = [(name, w) for name in names if isinstance(w := getattr(module, name, None), Tensor)]
    fits = weights and all(p.dim() == 2 and p.shape[0] == 3 * p.shape[1] for _, p in weights)
    require(fits, "module", "a GRU of orthokern.nn or torch.nn", type(module).__name__)
    record: dict[str, float] = {}
    for index, (name, parameter) in enumerate(weights):
        suffix = f"_{name.removeprefix('weight_hh_')}" if index else ""
        w = parameter[2 * parameter.shape[1] :].detach().double().cpu()
        record[f"jacobian_radius{suffix}"] = spectral_radius(w / 4 + torch.eye(len(w), dtype=w.dtype, device="cpu") / 2)
        record[f"recurrent_norm{suffix}"] = svdvals(w)[0].item()
    return record
