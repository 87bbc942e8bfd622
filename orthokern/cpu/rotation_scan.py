"""rotation_scan on the CPU; the kernel: ``csrc/cpu/rotation_scan.cpp``.

A thread has whole sequences. If there are fewer of them than threads, the map of features is a product of all steps,
which uses all threads; otherwise it is a part of the kernel. (The op computes it before where resets have a state.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._products import ieee_products, linear, linear_gradients
from orthokern._scan_contract import RotationArgs, RotationGradients
from orthokern.cpu._call import call, new


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, resets: Tensor | None = None
) -> Tensor:
    """See ``orthokern.reference.rotation_scan.scan``; x and z0 have one dtype."""
    z = new(*x.shape, dtype=x.dtype)
    _call(x.shape, {"x": x, "re": re, "im": im, "z0": z0, "z": z, "resets": resets}, reverse)
    return z


def _fuses(args: RotationArgs) -> bool:
    return args.weight is not None and len(args.h0) >= torch.get_num_threads()


@ieee_products()
def rotation_scan_fwd(args: RotationArgs) -> Tensor:
    """See ``orthokern.reference.rotation_scan``."""
    x, re, im, h0, weight, bias, resets, _ = args
    assert x is not None
    if not _fuses(args):
        return scan(x if weight is None else linear(x, weight, bias), re, im, h0, resets=resets)
    hs = new(*x.shape[:2], h0.shape[1], dtype=x.dtype)
    tensors = {"features": x, "re": re, "im": im, "z0": h0, "z": hs, "resets": resets, "weight": weight, "bias": bias}
    _call(x.shape, tensors)
    return hs


@ieee_products()
def rotation_scan_bwd(args: RotationArgs, grad_hs: Tensor, hs: Tensor, *, need_x: bool) -> RotationGradients:
    """See ``orthokern.reference.rotation_scan``."""
    x, re, im, h0, weight, bias, resets, _ = args
    fused, dtype = _fuses(args), hs.dtype
    grads = RotationGradients(
        x=None if fused and not need_x else new(*(x if fused and x is not None else hs).shape, dtype=dtype),
        re=torch.empty_like(re),
        im=torch.empty_like(im),
        h0=torch.empty(h0.shape, dtype=dtype, device="cpu"),
    )
    tensors = {"x": grad_hs, "re": re, "im": im, "z0": torch.zeros_like(h0), "resets": resets, "h": hs, "h0": h0}
    tensors |= {"grad_re": grads.re, "grad_im": grads.im, "grad_h0": grads.h0}
    if not fused or x is None or weight is None:
        _call(hs.shape, {**tensors, "z": grads.x}, reverse=True)
        if x is None or weight is None or grads.x is None:
            return grads
        of_x, of_weight, of_bias = linear_gradients(grads.x, x, weight, (need_x, True, bias is not None))
        return grads._replace(x=of_x, weight=of_weight, bias=of_bias)
    grads = grads._replace(weight=new(*weight.shape, dtype=dtype), bias=new(len(weight), dtype=dtype))
    tensors |= {"grad_features": grads.x, "grad_weight": grads.weight, "grad_bias": grads.bias}
    _call(x.shape, {**tensors, "features": x, "weight": weight}, reverse=True)
    return grads if bias is not None else grads._replace(bias=None)


# those that not every call has
_OPTIONAL = (
    *("x", "z", "resets", "features", "weight", "bias", "h", "h0"),
    *("grad_re", "grad_im", "grad_h0", "grad_features", "grad_weight", "grad_bias"),
)


def _call(shape: torch.Size, tensors: dict[str, Any], reverse: bool = False) -> None:
    T, B, D = shape
    sizes = {"T": T, "B": B, "M": len(tensors["re"]), "D": D, "reverse": int(reverse)}
    call("rotation_scan", tensors["z0"].dtype, sizes, dict.fromkeys(_OPTIONAL) | tensors)
