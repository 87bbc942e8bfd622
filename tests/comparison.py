"""The comparison of a result with the reference."""

from __future__ import annotations

import torch
from torch import Tensor

# The part of the error that is always allowed, relative to the largest element of the result: sums of some thousand
# terms, in another order than in torch, differ by this much even if torch happens to have no rounding error. In float64
# torch is the reference, and its own error is not known.
FLOOR = {torch.float32: 32 * torch.finfo(torch.float32).eps, torch.float64: 4096 * torch.finfo(torch.float64).eps}


def assert_matches_reference(
    actual: Tensor,
    ref64: Tensor,
    torch_same_dtype: Tensor,
    *,
    name: str = "result",
    gradient: bool = False,
    scale: float | None = None,
) -> None:
    """The error may be at most twice the error of plain torch in the same dtype, plus a floor.

    Three measures: the largest error of an element, the RMS of the error, and for gradients the angle to the reference.

    Args:
        actual: the tested result.
        ref64: the reference in float64.
        torch_same_dtype: the reference, which is plain torch, in actual's dtype.
        name: its name in a failure message.
        gradient: whether to compare the direction too.
        scale: the size that the floor is relative to, if not the largest element: the size of the terms of a sum that
            cancels, in which the error of plain torch may be small by chance.
    """
    assert actual.shape == ref64.shape, f"{name}: shape {list(actual.shape)}, expected {list(ref64.shape)}"
    assert actual.dtype == torch_same_dtype.dtype, f"{name}: dtype {actual.dtype}, expected {torch_same_dtype.dtype}"
    if not ref64.numel():
        return
    assert ref64.dtype == torch.float64
    assert bool(ref64.isfinite().all()), f"{name}: the reference itself is not finite: choose other inputs"
    wrong = int(actual.numel() - actual.isfinite().sum())
    assert not wrong, f"{name}: {wrong} of {actual.numel()} elements are NaN or infinite (never written?)"

    floor = FLOOR[actual.dtype]
    error, torch_error = actual.double() - ref64, torch_same_dtype.double() - ref64
    largest, torch_largest, ref_largest = (float(t.abs().max()) for t in (error, torch_error, ref64))
    assert largest <= 2 * torch_largest + floor * (scale or ref_largest), (
        f"{name}: largest error {largest:.3e}, plain torch {torch_largest:.3e}, largest element {ref_largest:.3e}"
    )
    rms, torch_rms, ref_rms = (float(t.square().mean().sqrt()) for t in (error, torch_error, ref64))
    assert rms <= 2 * torch_rms + floor * (scale or ref_rms), (
        f"{name}: RMS of the error {rms:.3e}, plain torch {torch_rms:.3e}, RMS of the reference {ref_rms:.3e}"
    )
    if gradient and ref_rms > 0:
        cosine, torch_cosine = (
            torch.nn.functional.cosine_similarity(t.double().flatten(), ref64.flatten(), dim=0, eps=0.0)
            for t in (actual, torch_same_dtype)
        )
        assert 1 - cosine <= 2 * (1 - torch_cosine) + floor, (
            f"{name}: cosine {cosine:.9f}, plain torch {torch_cosine:.9f}"
        )
