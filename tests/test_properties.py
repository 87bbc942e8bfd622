"""Properties over random shapes and strides (hypothesis): the backend selected by "auto" agrees with the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import scan_problem, strided
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
