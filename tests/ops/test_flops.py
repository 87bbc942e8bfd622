"""The formulas of torch.utils.flop_counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from orthokern import functional, nn

T, B, D, N, K = 7, 3, 5, 12, 4


def count(module: torch.nn.Module, backward: bool) -> int:
    counter: Any = FlopCounterMode(display=False)
    x = torch.randn(T, B, D)
    with counter:
        output = module(x)[0]
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("module", "gates"), [(nn.RNN, 1), (nn.GRU, 3)])
def test_a_forward(module: type[torch.nn.Module], gates: int) -> None:
    assert count(module(D, N), backward=False) == 2 * T * B * gates * N * (D + N)


def test_a_backward_of_a_factored_scan() -> None:
    forward = T * B * (4 * N * K + 2 * N * D)
    of_factors = 4 * N * N * K  # from M = dL/dW
    backward = T * B * (4 * N * K + 2 * N * D + 2 * N * N) + of_factors
    assert count(nn.FactorizedRNN(D, N, rank=K), backward=True) == forward + backward


def test_a_backward_of_a_low_rank() -> None:
    projections, size = 4 * T * B * 64 * D, T * B * 64 * 8
    assert count(nn.FactorizedRNN(D, 64, rank=8), backward=True) == projections + (4 + 4 + 6) * size


@pytest.mark.parametrize("need_x", [False, True])
def test_rotations(need_x: bool) -> None:
    module, counter = nn.RotationRNN(D, N), FlopCounterMode(display=False)
    with counter:
        module(torch.randn(T, B, D, requires_grad=need_x))[0].sum().backward()
    assert counter.get_total_flops() == 2 * T * B * N * D * (2 + need_x)


def test_every_op_has_a_formula() -> None:
    from torch.utils.flop_counter import flop_registry

    elementwise = {"activation_fwd", "activation_bwd"}
    ops = {name for name in dir(torch.ops.orthokern) if name.endswith(("_fwd", "_bwd")) or name == "cayley"}
    assert len(ops) > 10
    assert {name for name in ops if getattr(torch.ops.orthokern, name) not in flop_registry} == elementwise


def test_other_ops_count() -> None:
    counter: Any = FlopCounterMode(display=False)
    with counter:
        functional.linear_cross_entropy(torch.randn(6, N), torch.randn(4, N), torch.zeros(6, dtype=torch.int64))
        functional.cayley(torch.eye(N), torch.randn(N, N), 0.1)
    assert counter.get_total_flops() == 2 * 6 * N * 4 + 20 * N**3 // 3
