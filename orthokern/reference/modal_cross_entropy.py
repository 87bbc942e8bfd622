"""modal_cross_entropy: a linear recurrence in modal coordinates, its readout and the cross-entropy.

The mathematics is in ``orthokern/ops/modal_cross_entropy.py``. Here the states of all steps exist; a kernel makes them
chunk by chunk.

Note [Modal cross-entropy backward]
    logits_t = C z_t + bias, p_t = softmax(logits_t), d_t = c (p_t - onehot(target_t)) on the steps that count, c = 1
    (sum) or 1 / their number (mean), and d_t = 0 on padding. Then

        grad_readout = sum d_t z_t^T,     grad_bias = sum d_t,     g_t = C^T d_t,

    and g_t is what Note [Modal scan backward] in ``modal_scan.py`` starts from. The loss enters only as a factor, so
    all of it can be computed in the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.reference._scan import running, without_padding
from orthokern.reference.modal_scan import modal_scan_bwd, modal_scan_fwd


def modal_cross_entropy_fwd(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None,
    readout: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pairs: Tensor | None,
    *,
    reduction: str = "mean",
    need_grad: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See ``orthokern.ops.modal_cross_entropy``. The loss is differentiable by autograd, to any order.

    Returns:
        loss [], hits [T] int64, grad_x, grad_re, grad_im, grad_z0, grad_table, grad_readout, grad_bias, grad_pairs; the
        gradients are empty unless need_grad.
    """
    alive = running(x.shape[0], lengths)
    count = target.numel() if alive is None else int(alive.sum())
    scale = 1.0 / count if reduction == "mean" else 1.0
    z = modal_scan_fwd(x, re, im, z0, table, lengths=lengths)
    logits = z @ readout.mT
    if bias is not None:
        logits = logits + bias
    ids = without_padding(target.long(), alive).unsqueeze(-1)
    log_p = torch.log_softmax(logits, -1)
    loss = -without_padding(log_p.gather(-1, ids).squeeze(-1), alive).sum() * scale
    right = logits.argmax(-1) == ids.squeeze(-1)
    hits = (right if alive is None else right & alive).sum(1)
    if not need_grad:
        return (loss, hits, *(z.new_empty(0) for _ in range(8)))
    with torch.no_grad():
        d = log_p.exp()
        d.scatter_add_(-1, ids, torch.full_like(d[..., :1], -1.0))
        d = without_padding(d * scale, alive)
        grad_x, grad_re, grad_im, grad_z0, grad_table, grad_pairs = modal_scan_bwd(
            d @ readout, z, x, re, im, z0, table, pairs, lengths=lengths
        )
        grad_readout = torch.einsum("tbc,tbn->cn", d, z)
        grad_bias = z.new_empty(0) if bias is None else d.sum((0, 1))
    return loss, hits, grad_x, grad_re, grad_im, grad_z0, grad_table, grad_readout, grad_bias, grad_pairs
