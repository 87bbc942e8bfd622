"""The reference of factored_scan and dense_scan against autograd, gradcheck and torch.nn.RNN."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import (
    SCANS,
    ScanProblem,
    leaf_tensors,
    named_gradients,
    scan_args,
    scan_needs,
    scan_problem,
    some_lengths,
    with_poisoned_padding,
)
from torch import Tensor

from orthokern import functional
from orthokern.ops.activations import NAMES
from orthokern.reference.activations import activation_fwd


def forward_of(op: str) -> Any:
    """The forward as plain torch code, from the arguments of the op; an empty tensor for what does not apply."""
    module = importlib.import_module(f"orthokern.reference.{op}")

    def forward(*inputs: Any, activation: str, **options: Any) -> tuple[Tensor, ...]:
        result = getattr(module, f"{op}_fwd")(scan_args(op, inputs, activation, **options))
        return tuple(result.hs.new_empty(0) if tensor is None else tensor for tensor in result)

    return forward


def backward_of(problem: ScanProblem) -> Any:
    """The backward op of the reference: from (grad_hs, states, pre, *inputs) the gradients by name."""
    op = getattr(torch.ops.orthokern, f"{problem.op}_bwd")

    def backward(grad_hs: Tensor, states: Tensor, pre: Tensor, *inputs: Any, activation: str, **options: Any) -> Any:
        needs = scan_needs(options.pop("need_x", True), options.pop("need_params", True))
        args = scan_args(problem.op, inputs, activation, backend="reference", **options)
        return tuple(named_gradients(problem, op(grad_hs, states, pre, *needs, *args)).values())

    return backward


def by_hand(
    problem: ScanProblem,
    checkpoint_every: int,
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    **needs: bool,
) -> tuple[Tensor, ...]:
    cut = {"lengths": lengths, "resets": resets, "reset_state": reset_state}
    hs, ckpt, pre = forward_of(problem.op)(
        *problem.inputs(), activation=problem.activation, checkpoint_every=checkpoint_every, **cut
    )
    return backward_of(problem)(
        problem.grad_hs,
        ckpt if checkpoint_every else hs,
        pre,
        *problem.inputs(),
        activation=problem.activation,
        checkpoint_every=checkpoint_every,
        message_clip=message_clip,
        **cut,
        **needs,
    )


def one_by_one(
    problem: ScanProblem, inputs: list[Tensor | None], lengths: Tensor, message_clip: float
) -> tuple[Tensor, list[list[Tensor]]]:
    """The scan in plain torch: every sequence on its own, for the steps it has, and an identity that clips at every
    pre-activation. hs [T, B, N], and the states [1, N] of each sequence."""
    x, *matrices, h0, weight, bias, act_param = inputs
    assert x is not None and h0 is not None
    w = matrices[0] if problem.op == "dense_scan" else matrices[0] @ torch.diag(matrices[1]) @ matrices[2].mT
    T, N = x.shape[0], h0.shape[1]
    sequences = []
    for b, length in enumerate(lengths.tolist()):
        h, states = h0[b : b + 1], []
        for t in range(length):
            e = x[t, b] if weight is None else weight @ x[t, b] if x.is_floating_point() else weight[:, x[t, b]]
            a = h @ w.mT + (e if bias is None else e + bias)
            if message_clip:
                a.register_hook(lambda g: g.clamp(-message_clip, message_clip))
            h = activation_fwd(a.clone(), act_param, activation=problem.activation)  # the identity returns its argument
            h.retain_grad()
            states.append(h)
        sequences.append(states)
    rows = [torch.cat([*states, h0.new_zeros(T - len(states), N)]) for states in sequences]
    return torch.stack(rows, 1), sequences


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("message_clip", [0.0, 0.3])
def test_lengths_and_clip_are_those_of_single_sequences(op: str, activation: str, message_clip: float) -> None:
    T, B = 6, 4
    for kind, order in (("dense", "any"), ("features", "falling"), ("tokens", "rising")):
        problem = scan_problem(op, B=B, T=T, N=6, D=4, activation=activation, inputs=kind, gap=1e-3)
        lengths = some_lengths(B, T, order)
        padding = torch.arange(T).unsqueeze(1) >= lengths
        assert padding.any()
        inputs = leaf_tensors(problem)
        hs, sequences = one_by_one(problem, inputs, lengths, message_clip)
        hs.backward(problem.grad_hs)
        expected = [t.grad if t is not None and t.requires_grad else None for t in inputs]
        norms = torch.zeros(T, dtype=torch.float64)
        for states in sequences:
            norms[: len(states)] += torch.stack([h.grad.square().sum() for h in states])  # type: ignore[union-attr]

        poisoned = with_poisoned_padding(problem, lengths)
        names = problem.grad_names()
        unclipped = by_hand(problem, 0, lengths)
        for every in (0, 1, 4, 9):
            ours, _, pre = forward_of(op)(
                *poisoned.inputs(), activation=activation, checkpoint_every=every, lengths=lengths
            )
            torch.testing.assert_close(ours, hs.detach(), rtol=1e-12, atol=1e-13)
            assert not ours[padding].any() and (not pre.numel() or not pre[padding].any())
            grads = by_hand(poisoned, every, lengths, message_clip)
            for name, grad, want in zip(names, grads, [*expected, None, None, norms.sqrt()], strict=True):
                if want is None:
                    assert grad.numel() == 0, name
                else:
                    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            if grads[0].numel():
                assert not grads[0][padding].any()
        if message_clip:
            assert any(not torch.allclose(a, b) for a, b in zip(grads, unclipped, strict=True)), "nothing was clipped"

        # the forward as plain torch code, which an explicit backend="reference" differentiates
        again = leaf_tensors(poisoned)
        plain = forward_of(op)(*again, activation=activation, lengths=lengths, message_clip=message_clip)[0]
        plain.backward(poisoned.grad_hs)
        for name, tensor, want in zip(names, again, expected, strict=False):
            if want is not None:
                torch.testing.assert_close(tensor.grad, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("dtype", "message_clip"), [(torch.float16, 1e5), (torch.bfloat16, 1e39), (torch.float32, 1e39)]
)
def test_a_message_clip_beyond_the_range_of_the_dtype_has_no_effect(dtype: torch.dtype, message_clip: float) -> None:
    w = torch.linspace(-0.5, 0.5, 16).view(4, 4).to(dtype)
    found = []
    for options in ({}, {"message_clip": message_clip}):
        x = torch.linspace(-1, 1, 24).view(3, 2, 4).to(dtype).requires_grad_()
        loss = functional.dense_scan(x, w, backend="reference", **options).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append((grad, *torch.autograd.grad(grad.square().sum(), x)))
    for plain, clipped in zip(*found, strict=True):
        assert torch.equal(plain, clipped)


def test_factored_is_dense_of_the_composed_matrix() -> None:
    problem = scan_problem("factored_scan", B=3, T=6, N=7, K=3, activation="modrelu")
    u, s, v = problem.matrices
    hs = forward_of("factored_scan")(*problem.inputs(), activation="modrelu")[0]
    w = u @ torch.diag(s) @ v.mT
    dense = forward_of("dense_scan")(problem.x, w, *problem.inputs()[4:], activation="modrelu")[0]
    torch.testing.assert_close(hs, dense)


def test_dense_is_torch_rnn() -> None:
    rnn = torch.nn.RNN(5, 7, dtype=torch.float64)
    x, h0 = torch.randn(6, 3, 5, dtype=torch.float64), torch.randn(1, 3, 7, dtype=torch.float64)
    hs = forward_of("dense_scan")(
        x, rnn.weight_hh_l0, h0[0], rnn.weight_ih_l0, rnn.bias_ih_l0 + rnn.bias_hh_l0, None, activation="tanh"
    )[0]
    torch.testing.assert_close(hs, rnn(x, h0)[0])
