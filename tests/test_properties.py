"""Properties over random shapes and strides (hypothesis): the backend selected by "auto" agrees with the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import act_param_for, scan_problem, strided
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orthokern import functional
from orthokern.ops.activations import NAMES

sizes = st.integers(1, 20)
few = settings(max_examples=40)


def layout(kind: str, t: Tensor) -> Tensor:
    """The same values: as they are, with strides, transposed in memory, or within a larger tensor."""
    if kind == "strided":
        return strided(t)
    if kind == "transposed" and t.ndim > 1:
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "within":
        wide = torch.cat([t.flatten(), t.flatten()])
        return wide[t.numel() :].view(t.shape)  # starts at an odd address
    return t


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that wait for each other over tiny tensors cost more than they bring."""
    torch.set_num_threads(1)


layouts = st.sampled_from(["plain", "strided", "transposed", "within"])


@few
@given(
    op=st.sampled_from(["factored_scan", "dense_scan"]),
    B=sizes,
    T=sizes,
    half_N=sizes,
    rank=st.floats(0.01, 1),
    D=sizes,
    activation=st.sampled_from(NAMES),
    inputs=st.sampled_from(["dense", "features", "tokens"]),
    kind=layouts,
    every=st.integers(0, 25),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_scans(
    op: str,
    B: int,
    T: int,
    half_N: int,
    rank: float,
    D: int,
    activation: str,
    inputs: str,
    kind: str,
    every: int,
    bias: bool,
    seed: int,
) -> None:
    N = 2 * half_N if activation == "oplu" else half_N
    K = math.ceil(rank * N) if op == "factored_scan" else None
    problem = scan_problem(
        op, B=B, T=T, N=N, K=K, D=D, activation=activation, inputs=inputs, bias=bias, gap=1e-9, seed=seed
    )

    def run(change: Any, backend: str | None, checkpoint_every: int) -> tuple[Tensor, ...]:
        leaves = [t if t is None or not t.is_floating_point() else t.clone().requires_grad_() for t in problem.inputs()]
        x, *matrices, h0, weight, bias_, param = (t if t is None else change(t) for t in leaves)
        hs = getattr(functional, op)(
            x,
            *matrices,
            h0,
            weight=weight,
            bias=bias_,
            act_param=param,
            activation=activation,
            checkpoint_every=checkpoint_every,
            backend=backend,
        )
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        return (hs.detach(), *torch.autograd.grad(hs, wanted, change(problem.grad_hs)))

    for a, e in zip(run(lambda t: layout(kind, t), None, every), run(lambda t: t, "reference", 0), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)


@few
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    half_N=sizes,
    name=st.sampled_from(NAMES),
    one=st.booleans(),
    kind=layouts,
    seed=st.integers(0, 1000),
)
def test_activations(shape: list[int], half_N: int, name: str, one: bool, kind: str, seed: int) -> None:
    N = 2 * half_N
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, N, dtype=torch.float64, generator=generator).requires_grad_()
    grad_y = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    param = act_param_for(name, 1 if one else N, generator)
    leaves = [x] if param is None else [x, param.requires_grad_()]
    y = functional.activation(layout(kind, x), name, param)
    reference = functional.activation(x, name, param, backend="reference")
    torch.testing.assert_close(y, reference)
    for a, e in zip(
        torch.autograd.grad(y, leaves, layout(kind, grad_y)),
        torch.autograd.grad(reference, leaves, grad_y),
        strict=True,
    ):
        torch.testing.assert_close(a, e)
    if name == "oplu":
        torch.testing.assert_close(y.square().sum(), x.square().sum())
    if name == "modrelu":
        assert bool((y * x >= 0).all())


@few
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    N=sizes,
    rank=st.floats(0.01, 1),
    lr=st.floats(-10, 10),
    scale=st.floats(1e-3, 1e3),
    kind=layouts,
    seed=st.integers(0, 1000),
)
def test_cayley(batch: list[int], N: int, rank: float, lr: float, scale: float, kind: str, seed: int) -> None:
    """Orthogonal whatever the gradient and the rate; undone by the opposite rate; the reference."""
    K = math.ceil(rank * N)
    generator = torch.Generator().manual_seed(seed)
    m = torch.linalg.qr(torch.randn(*batch, N, K, dtype=torch.float64, generator=generator))[0]
    g = scale * torch.randn(m.shape, dtype=torch.float64, generator=generator)
    new = functional.cayley(layout(kind, m), layout(kind, g), lr)
    # the thin form multiplies a 2K x 2K inverse by P of size |G|: its rounding grows with the step
    tolerance = 1e-10 * (1 + abs(lr) * scale * N)
    torch.testing.assert_close(new, functional.cayley(m, g, lr, backend="reference"), rtol=0, atol=tolerance)
    torch.testing.assert_close(new.mT @ new, torch.eye(K).double().expand(*batch, K, K), rtol=0, atol=tolerance)
    if not batch:
        one = functional.cayley(m[None], g[None], torch.tensor([lr], dtype=torch.float64))[0]
        torch.testing.assert_close(one, new, rtol=0, atol=tolerance)


@few
@given(
    R=st.integers(1, 70),
    N=sizes,
    C=sizes,
    bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    factor=st.sampled_from([1.0, -0.5]),
    kind=layouts,
    seed=st.integers(0, 1000),
)
def test_linear_cross_entropy(
    R: int, N: int, C: int, bias: bool, reduction: str, factor: float, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((R, N), (C, N), (C,))[: 2 + bias]
    ]
    target = torch.randint(0, C, (R,), generator=generator)
    changed = [layout(kind, t) for t in leaves]
    loss = functional.linear_cross_entropy(
        *changed[:2], changed[2] if bias else None, layout(kind, target), reduction=reduction
    )
    expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), target, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    for a, e in zip(
        torch.autograd.grad(factor * loss, leaves), torch.autograd.grad(factor * expected, leaves), strict=True
    ):
        torch.testing.assert_close(a, e)


@few
@given(margin=st.floats(0, 100), values=st.lists(st.floats(-50, 50), min_size=1, max_size=5))
def test_spectrum(margin: float, values: list[float]) -> None:
    p = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    s = functional.spectrum(p, margin)
    torch.testing.assert_close(s, 2 * margin * (torch.sigmoid(p) - 0.5) + 1)
    assert bool(((s >= 1 - margin) & (s <= 1 + margin)).all())
    (gradient,) = torch.autograd.grad(s.sum(), p)
    sigmoid = torch.sigmoid(p)
    torch.testing.assert_close(gradient, 2 * margin * sigmoid * (1 - sigmoid), rtol=1e-6, atol=1e-12)
    assert functional.spectrum(p, None) is p
