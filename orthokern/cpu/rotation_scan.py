"""rotation_scan on the CPU; the kernel: ``csrc/cpu/rotation_scan.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern.cpu._call import call, new


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, resets: Tensor | None = None
) -> Tensor:
    """See ``orthokern.reference.rotation_scan.scan``; x and z0 have one dtype."""
    return _scan(x, re, im, z0, reverse, resets, dict.fromkeys(("h", "h0", "grad_re", "grad_im")))


def adjoint(
    grad_z: Tensor, re: Tensor, im: Tensor, z: Tensor, z0: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``orthokern.reference.rotation_scan.adjoint``."""
    grad_re, grad_im = torch.empty_like(re), torch.empty_like(im)
    more = {"h": z, "h0": z0, "grad_re": grad_re, "grad_im": grad_im}
    return _scan(grad_z, re, im, torch.zeros_like(z0), True, resets, more), grad_re, grad_im


def _scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, reverse: bool, resets: Tensor | None, more: dict[str, Any]
) -> Tensor:
    (T, B), (M,), z = x.shape[:2], re.shape, new(*x.shape, dtype=x.dtype)
    sizes = {"T": T, "B": B, "M": M, "reverse": int(reverse)}
    call("modal_scan", x.dtype, sizes, {"x": x, "re": re, "im": im, "z0": z0, "z": z, "resets": resets, **more})
    return z
