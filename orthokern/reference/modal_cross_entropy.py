"""modal_cross_entropy: a linear recurrence in modal coordinates, its readout and the cross-entropy.

The mathematics is in ``orthokern/ops/modal_cross_entropy.py``. The reference stores the states of all steps; kernels
compute them in chunks.

Note [Modal cross-entropy backward]
    logits_t = C z_t + bias, p_t = softmax(logits_t), d_t = c (p_t - onehot(target_t)), with d_t = 0 on padding; c = 1
    (sum) or 1 / number of steps without padding (mean). Then

        grad_readout = sum d_t z_t^T,     grad_bias = sum d_t,     g_t = C^T d_t,

    with g_t as in Note [Modal scan backward] in ``modal_scan.py``. The gradient of the loss is only a factor, so that
    all of this can be computed in the forward pass.
"""

from __future__ import annotations

import torch

from orthokern._scan_contract import ModalInputs, ModalLoss, Readout
from orthokern.reference._scan import running, without_padding
from orthokern.reference.modal_scan import modal_scan_bwd, modal_scan_fwd


def modal_cross_entropy_fwd(inputs: ModalInputs, readout: Readout, *, need_grad: bool = True) -> ModalLoss:
    """See ``orthokern.ops.modal_cross_entropy``. The loss is differentiable by autograd, to any order."""
    weight, bias, target, reduction = readout
    alive = running(target.shape[0], inputs.lengths)
    count = target.numel() if alive is None else int(alive.sum())
    scale = 1.0 / count if reduction == "mean" else 1.0
    z = modal_scan_fwd(inputs)
    logits = z @ weight.mT
    if bias is not None:
        logits = logits + bias
    ids = without_padding(target.long(), alive).unsqueeze(-1)
    log_p = torch.log_softmax(logits, -1)
    loss = -without_padding(log_p.gather(-1, ids).squeeze(-1), alive).sum() * scale
    right = logits.argmax(-1) == ids.squeeze(-1)
    hits = (right if alive is None else right & alive).sum(1)
    if not need_grad:
        return ModalLoss(loss, hits)
    with torch.no_grad():
        d = log_p.exp()
        d.scatter_add_(-1, ids, torch.full_like(d[..., :1], -1.0))
        d = without_padding(d * scale, alive)
        grads = modal_scan_bwd(inputs, d @ weight, z)
        grad_weight = torch.einsum("tbc,tbn->cn", d, z)
        return ModalLoss(loss, hits, grads, grad_weight, None if bias is None else d.sum((0, 1)))
