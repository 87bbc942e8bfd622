"""rotation_scan on the CPU; the kernel: ``csrc/cpu/rotation_scan.cpp``.

A thread processes whole sequences. If there are fewer sequences than threads, the map of features is a product of all
steps, which uses all threads; otherwise it is a part of the kernel. (If resets have a state, the op computes it
before.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._products import ieee_products, linear, linear_gradients
from orthokern._scan_contract import RotationArgs, RotationGradients
from orthokern.cpu._call import call, new
from orthokern.errors import InputError


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, resets: Tensor | None = None
) -> Tensor:
    """See ``orthokern.reference.rotation_scan.scan``; x and z0 have one dtype."""
    z = new(*x.shape, dtype=x.dtype)
    _call(x.shape, {"x": x, "re": re, "im": im, "z0": z0, "z": z, "resets": resets}, reverse)
    return z


def _features(args: RotationArgs) -> dict[str, Tensor | None] | None:
    """The features and their map for the kernel; None if the kernel does not compute it."""
    if args.weight is None or len(args.h0) < torch.get_num_threads():
        return None
    return {"features": args.x, "weight": args.weight, "bias": args.bias}


@ieee_products()
def rotation_scan_fwd(args: RotationArgs) -> Tensor:
    """See ``orthokern.reference.rotation_scan``."""
    x, re, im, h0, weight, bias, resets, _ = args
    assert x is not None
    features = _features(args)
    if features is None:
        return scan(x if weight is None else linear(x, weight, bias), re, im, h0, resets=resets)
    hs = new(*x.shape[:2], h0.shape[1], dtype=x.dtype)
    _call(x.shape, {"re": re, "im": im, "z0": h0, "z": hs, "resets": resets, **features})
    return hs


@ieee_products()
def rotation_scan_bwd(args: RotationArgs, grad_hs: Tensor, hs: Tensor, *, need_x: bool) -> RotationGradients:
    """See ``orthokern.reference.rotation_scan``."""
    x, re, im, h0, weight, bias, resets, _ = args
    grad_re, grad_im, grad_h0 = torch.empty_like(re), torch.empty_like(im), new(*h0.shape, dtype=hs.dtype)
    tensors = {"x": grad_hs, "re": re, "im": im, "z0": torch.zeros_like(h0), "resets": resets, "h": hs, "h0": h0}
    tensors |= {"grad_re": grad_re, "grad_im": grad_im, "grad_h0": grad_h0}
    features = _features(args)
    if features is None or x is None or weight is None:
        delta = new(*hs.shape, dtype=hs.dtype)
        _call(hs.shape, {**tensors, "z": delta}, reverse=True)
        if x is None or weight is None:
            return RotationGradients(delta, grad_re, grad_im, grad_h0)
        of_x, of_weight, of_bias = linear_gradients(delta, x, weight, (need_x, True, bias is not None))
    else:
        of_x = new(*x.shape, dtype=x.dtype) if need_x else None
        of_weight, of_bias = new(*weight.shape, dtype=x.dtype), new(len(weight), dtype=x.dtype)
        results = {"grad_features": of_x, "grad_weight": of_weight, "grad_bias": of_bias}
        _call(x.shape, {**tensors, **features, **results}, reverse=True)
    return RotationGradients(of_x, grad_re, grad_im, grad_h0, of_weight, None if bias is None else of_bias)


# the ones that only some calls have
_OPTIONAL = (
    *("x", "z", "resets", "features", "weight", "bias", "h", "h0"),
    *("grad_re", "grad_im", "grad_h0", "grad_features", "grad_weight", "grad_bias"),
)


def _call(shape: torch.Size, tensors: dict[str, Any], reverse: bool = False) -> None:
    T, B, D = shape
    if not D:
        raise InputError(f"rotation_scan: the input has shape {list(shape)}: accepted is [T, B, D] with D >= 1")
    sizes = {"T": T, "B": B, "M": len(tensors["re"]), "D": D, "reverse": int(reverse)}
    call("rotation_scan", tensors["z0"].dtype, sizes, dict.fromkeys(_OPTIONAL) | tensors)
