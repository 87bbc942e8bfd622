"""modal_scan on the CPU; the kernel: ``csrc/cpu/modal_scan.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.cpu._call import call, new


def modal_arguments(
    x: Tensor | None,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None,
    pairs: Tensor | None,
    lengths: Tensor | None,
    steps: int,
) -> tuple[dict[str, float], dict[str, Tensor | None]]:
    """Sizes and tensors that all modal kernels take. Ids go as bytes beside their width."""
    ids = x if table is not None else None
    sizes: dict[str, float] = {
        "B": z0.shape[0],
        "T": steps,
        "M": re.shape[0],
        "D": 0 if table is None else table.shape[0],
        "P": 0 if pairs is None else pairs.shape[0],
        "id_bytes": 0 if ids is None else ids.element_size(),
    }
    tensors = {
        "x": x if table is None else None,
        "ids": None if ids is None else ids.view(torch.uint8),
        "re": re,
        "im": im,
        "z0": z0,
        "table": table,
        "pairs": pairs,
        "lengths": lengths,
    }
    return sizes, tensors


def modal_scan_fwd(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, table: Tensor | None, *, lengths: Tensor | None = None
) -> Tensor:
    """See :mod:`orthokern.ops.modal_scan`."""
    sizes, tensors = modal_arguments(x, re, im, z0, table, None, lengths, x.shape[0])
    z = new(x.shape[0], *z0.shape, dtype=z0.dtype)
    call("modal_scan_fwd", z0.dtype, sizes, {**tensors, "z": z})
    return z


def modal_scan_bwd(
    grad_z: Tensor,
    z: Tensor,
    x: Tensor | None,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None,
    pairs: Tensor | None,
    *,
    need_x: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.modal_scan`."""
    dtype, empty = z0.dtype, z0.new_empty(0)
    sizes, tensors = modal_arguments(x, re, im, z0, table, pairs, lengths, z.shape[0])
    results = {
        "grad_x": new(*grad_z.shape, dtype=dtype) if table is None and need_x else None,
        "grad_re": torch.empty_like(re),
        "grad_im": torch.empty_like(im),
        "grad_z0": torch.empty(z0.shape, dtype=dtype),
        "grad_table": None if table is None else torch.empty(table.shape, dtype=dtype),
        "grad_pairs": None if pairs is None else torch.empty(pairs.shape[0], 2, 2, dtype=re.dtype),
    }
    call("modal_scan_bwd", dtype, sizes, {**tensors, "x": None, "grad_z": grad_z, "states": z, **results})
    grad_x, grad_re, grad_im, grad_z0, grad_table, grad_pairs = (
        empty if found is None else found for found in results.values()
    )
    return grad_x, grad_re, grad_im, grad_z0, grad_table, re.new_empty(0) if pairs is None else grad_pairs
