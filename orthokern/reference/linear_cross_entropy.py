"""Linear layer and cross-entropy in one pass over chunks of rows: the reference.

Note [Linear cross-entropy backward]
    z_r = W h_r + b, p_r = softmax(z_r), loss = c sum_r (logsumexp(z_r) - z_r[target_r]) with c = 1 (sum) or 1/R (mean).
    d loss / d z_r = c (p_r - onehot(target_r)) =: d_r, and so

        grad_hidden_r = W^T d_r,     grad_weight = sum_r d_r h_r^T,     grad_bias = sum_r d_r.

    The gradient of the loss is only a factor, so that all of this can be computed in the forward pass, from one chunk
    of logits at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._scan_contract import LinearLoss, Readout

CHUNK_ROWS = 4096


def linear_cross_entropy_fwd(hidden: Tensor, readout: Readout, *, need_grad: bool = True) -> LinearLoss:
    """See ``orthokern.ops.linear_cross_entropy``. The loss is differentiable by autograd, to any order."""
    weight, bias, target, reduction = readout
    scale = 1.0 / hidden.shape[0] if reduction == "mean" else 1.0
    half = hidden.dtype in (torch.float16, torch.bfloat16)  # then exponentials and sums are float32
    losses, grad_hidden = [], []
    grad_weight = torch.zeros_like(weight, dtype=torch.float32 if half else weight.dtype)
    grad_bias = torch.zeros_like(grad_weight[:, 0])
    for h, t in zip(hidden.split(CHUNK_ROWS), target.split(CHUNK_ROWS), strict=True):
        z = h @ weight.mT if bias is None else torch.addmm(bias, h, weight.mT)
        z = z.float() if half else z
        log_p = torch.log_softmax(z, dim=-1)
        losses.append(-log_p.gather(1, t[:, None]).sum())
        if need_grad:
            with torch.no_grad():
                d = log_p.exp()
                d.scatter_add_(1, t[:, None], d.new_full((len(t), 1), -1.0))
                d.mul_(scale)
                grad_hidden.append(d.to(weight.dtype) @ weight)
                grad_weight += d.mT @ h.to(d.dtype)
                grad_bias += d.sum(0)
    loss = (torch.stack(losses).sum() * scale).to(hidden.dtype)
    if not need_grad:
        return LinearLoss(loss, None, None, None)
    return LinearLoss(
        loss, torch.cat(grad_hidden), grad_weight.to(weight.dtype), None if bias is None else grad_bias.to(bias.dtype)
    )
