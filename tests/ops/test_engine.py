"""What torch's autograd engine may hand to a backward: orthokern/ops/_dispatcher.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from helpers import GruProblem, call_functional, leaf_tensors, scan_problem
from torch import Tensor
from torch.autograd.functional import jacobian

from orthokern import dispatch, functional

T, B, N = 5, 2, 7
LENGTHS, RESETS = torch.tensor([5, 3]), torch.arange(T * B).view(T, B) % 3 == 1


def cases() -> dict[str, tuple[list[Tensor | None], Callable[..., Tensor]]]:
    """Functions of tensors, all of them of one dtype but for lengths, resets and token ids."""
    scan, ids = (scan_problem("dense_scan", B=B, T=T, N=N, inputs=kind) for kind in ("features", "tokens"))
    gru, target = GruProblem.random("kanai", T, B, N), torch.tensor([0, 2, 1])
    return {
        "scan": (leaf_tensors(scan), lambda *given: call_functional(scan, list(given))),
        "lengths": (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), lengths=LENGTHS)),
        "resets": (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), resets=RESETS)),
        "clip": (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), message_clip=0.1)),
        "checkpoints": (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), checkpoint_every=2)),
        "ids": (leaf_tensors(ids), lambda *given: call_functional(ids, list(given))),
        "gru": ([gru.x, gru.w], lambda x, w: functional.gru_scan(x, w, lengths=LENGTHS)),
        "activation": ([torch.randn(3, 4)], lambda x: functional.activation(x, "softsign")),
        "exponential": ([torch.randn(4, 4)], functional.skew_exp),
        "loss": ([torch.randn(3, 4)], lambda x: functional.linear_cross_entropy(x, x, target)[None]),
    }


CASES = list(cases())


@pytest.mark.parametrize("name", CASES)
def test_vectorized_jacobian_that_is_differentiated(name: str) -> None:
    given, function = cases()[name]
    tensors = [t if t is None or not t.is_floating_point() else t.detach().double().requires_grad_() for t in given]
    wanted = [t for t in tensors if t is not None and t.requires_grad]

    def sums(*some: Tensor) -> Tensor:
        left = iter(some)
        out = function(*(next(left) if t is not None and t.requires_grad else t for t in tensors))
        return torch.stack([out.sin().sum(), out.square().sum(), out.flatten()[0]])

    rows = [jacobian(sums, tuple(wanted), create_graph=True, vectorize=v) for v in (False, True)]
    torch.testing.assert_close(rows[1], rows[0])
    directions = [torch.randn_like(row) for row in rows[0]]
    seconds = [torch.autograd.grad(row, wanted, directions, allow_unused=True) for row in rows]
    torch.testing.assert_close(seconds[1], seconds[0])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_activation_checkpointing(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward runs the forward again while it hands out what was saved: that has to be recorded."""
    monkeypatch.setattr(dispatch, "_process_default", backend)
    given, function = cases()[name]
    tensors = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in given]
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    expected = torch.autograd.grad(function(*tensors).square().sum(), wanted)
    again = torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), wanted), expected, rtol=0, atol=0)
