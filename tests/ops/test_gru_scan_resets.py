"""Resets of gru_scan and GRU: a step that starts from reset_state in place of the state before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import GruProblem, assert_same_bits, compiled, gru_needs, some_lengths
from torch import Tensor

from orthokern import functional
from orthokern.ops.gru_scan import VARIANTS

LEAVES = ("x", "w", "h0", "bias", "reset_state")


def leaves_of(p: GruProblem) -> dict[str, Tensor]:
    """The tensors that have gradients, as leaves of a graph."""
    return {name: getattr(p, name).clone().requires_grad_() for name in LEAVES if getattr(p, name) is not None}


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resets_and_lengths_are_cuts(variant: str, state: bool) -> None:
    """Of the reference, with which kernels are compared: its states are those of single steps."""
    p, lengths = GruProblem.random(variant, 7, 5, 9, bias=state).with_resets(state=state), some_lengths(5, 7, "any")
    start, expected = p.reset_state if state else torch.zeros_like(p.h0), torch.zeros_like(p.grad_hs)
    options: dict[str, Any] = {"bias": p.bias, "variant": variant, "backend": "reference"}
    for b, length in enumerate(lengths.tolist()):
        h = p.h0[b : b + 1]
        for t in range(length):
            h = start[b : b + 1] if p.resets[t, b] else h
            h = functional.gru_scan(p.x[t : t + 1, b : b + 1], p.w, h, **options)[0]
            expected[t, b] = h[0]
    actual = p.run("reference", lengths=lengths)
    torch.testing.assert_close(actual["hs"], expected, rtol=1e-12, atol=1e-13)
    assert_same_bits(actual, p.with_poisoned_padding(lengths).run("reference", lengths=lengths))


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
