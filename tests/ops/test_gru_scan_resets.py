"""Resets of gru_scan and GRU: a step that starts from reset_state in place of the state before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import GruProblem, compiled, gru_needs, served, some_lengths
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orthokern import functional
from orthokern.errors import InputError
from orthokern.ops.gru_scan import VARIANTS

SERVED = served("gru_scan")
LEAVES = ("x", "w", "h0", "bias", "reset_state")


def leaves_of(p: GruProblem) -> dict[str, Tensor]:
    """The tensors that have gradients, as leaves of a graph."""
    return {name: getattr(p, name).clone().requires_grad_() for name in LEAVES if getattr(p, name) is not None}


def cut_by_hand(p: GruProblem, leaves: dict[str, Tensor], lengths: Tensor) -> Tensor:
    """hs [T, B, N]: every sequence on its own, cut at its resets into scans of their own, in plain torch code."""
    options: dict[str, Any] = {"bias": leaves.get("bias"), "variant": p.variant, "backend": "reference"}
    state = leaves.get("reset_state", torch.zeros_like(p.h0))
    rows = []
    for b, length in enumerate(lengths.tolist()):
        borders = [t for t in range(length) if p.resets is not None and p.resets[t, b]]
        pieces = [leaves["x"].new_zeros(len(p.x) - length, p.h0.shape[1])]
        for start, stop in zip([0, *borders], [*borders, length], strict=True):
            if start < stop:
                h = (state if start in borders else leaves["h0"])[b : b + 1]
                hs = functional.gru_scan(leaves["x"][start:stop, b : b + 1], leaves["w"], h, **options)
                pieces.insert(-1, hs.squeeze(1))
        rows.append(torch.cat(pieces))
    return torch.stack(rows, 1)


def check_against_cuts(p: GruProblem, lengths: Tensor) -> None:
    """States and gradients of the op, and of plain torch code, in float64."""
    leaves = leaves_of(p)
    hs = cut_by_hand(p, leaves, lengths)
    expected = torch.autograd.grad(hs, list(leaves.values()), p.grad_hs, allow_unused=True)
    poisoned = p.with_poisoned_padding(lengths)

    def op(backend: str, x: Tensor, w: Tensor, h0: Tensor, bias: Any = None, reset_state: Any = None) -> Tensor:
        cuts = (backend, lengths, p.resets, reset_state)
        states: Tensor = torch.ops.orthokern.gru_scan_fwd(x, w, h0, bias, p.variant, *cuts)[0]
        return states

    def plain(backend: str, **tensors: Tensor) -> Tensor:
        if p.resets is not None:
            tensors.setdefault("reset_state", torch.zeros_like(p.h0))
        options: dict[str, Any] = {"variant": p.variant, "lengths": lengths, "resets": p.resets, "backend": backend}
        return functional.gru_scan(**tensors, **options)

    cpu = [backend for backend in SERVED if not isinstance(backend, str) and not backend.marks[0].args[0]]
    for run, backend in ((op, "reference"), (plain, "reference"), *((op, "cpu") for _ in cpu)):
        ours = leaves_of(poisoned)
        found = run(backend, **ours)
        torch.testing.assert_close(found, hs, rtol=1e-12, atol=1e-13)
        grads = torch.autograd.grad(found, list(ours.values()), poisoned.grad_hs)
        for name, grad, want in zip(ours, grads, expected, strict=True):
            want = torch.zeros_like(grad) if want is None else want
            torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@settings(max_examples=40)
@given(
    T=st.integers(1, 7),
    B=st.integers(1, 5),
    N=st.integers(1, 19),
    variant=st.sampled_from(VARIANTS),
    bias=st.booleans(),
    state=st.booleans(),
    share=st.sampled_from((None, 0.0, 0.2, 0.7, 1.0)),
    order=st.sampled_from(("full", "any", "falling", "rising")),
    seed=st.integers(0, 10**6),
)
def test_resets_and_lengths_are_cuts(
    T: int, B: int, N: int, variant: str, bias: bool, state: bool, share: float | None, order: str, seed: int
) -> None:
    p = GruProblem.random(variant, T, B, N, bias=bias, seed=seed)
    if share is not None:
        p = p.with_resets(share, state=state, seed=seed)
    check_against_cuts(p, some_lengths(B, T, order, seed=seed))


def test_reset_state_defaults_to_h0_and_then_to_zeros() -> None:
    p = GruProblem.random("kanai", 6, 3, 5).with_resets()
    h0, apart, both = (p.h0.clone().requires_grad_() for _ in range(3))
    functional.gru_scan(p.x, p.w, h0, resets=p.resets).backward(p.grad_hs)
    functional.gru_scan(p.x, p.w, both, resets=p.resets, reset_state=apart).backward(p.grad_hs)
    assert h0.grad is not None and apart.grad is not None and both.grad is not None and apart.grad.abs().max() > 0
    torch.testing.assert_close(h0.grad, apart.grad + both.grad)
    zeros = torch.zeros_like(p.h0)
    wanted = functional.gru_scan(p.x, p.w, zeros, resets=p.resets, reset_state=zeros)
    assert torch.equal(functional.gru_scan(p.x, p.w, resets=p.resets), wanted)


def test_bad_resets_are_one_line() -> None:
    p = GruProblem.random("kanai", 4, 3, 5)
    good = torch.zeros(4, 3, dtype=torch.bool)
    for options, message in (
        ({"reset_state": p.h0}, "reset_state is shape .* without resets: accepted with resets only"),
        ({"resets": good, "reset_state": p.h0[:1]}, r"reset_state has shape \[1, 5\]: accepted is \[B, N\]"),
        ({"resets": good, "reset_state": p.h0.float()}, "reset_state has dtype float32: accepted is the dtype"),
    ):
        with pytest.raises(InputError, match=message):
            functional.gru_scan(p.x, p.w, p.h0, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_and_compile_with_resets(variant: str) -> None:
    p = GruProblem.random(variant, 5, 3, 4).with_resets()
    fwd, bwd = (getattr(torch.ops.orthokern, f"gru_scan_{way}").default for way in ("fwd", "bwd"))
    leaves, lengths = leaves_of(p), torch.tensor([5, 2, 4])
    state = leaves.pop("reset_state")
    torch.library.opcheck(fwd, (*leaves.values(), variant, None, lengths, p.resets, state))
    cuts = (None, lengths, p.resets, p.reset_state)
    saved = fwd(*p.inputs(), variant, *cuts)
    torch.library.opcheck(bwd, (p.grad_hs, *saved, *gru_needs(), None, p.w, p.h0, p.bias, variant, *cuts))

    def run(function: Any) -> list[Tensor]:
        tensors = leaves_of(p)
        hs = function(**tensors, variant=variant, lengths=lengths, resets=p.resets)
        return [hs.detach(), *torch.autograd.grad(hs, list(tensors.values()), p.grad_hs)]

    for one, other in zip(run(compiled(functional.gru_scan)), run(functional.gru_scan), strict=True):
        assert torch.equal(one, other)
