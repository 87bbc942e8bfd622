"""NonNormalRNN: eigenvalues, the structure of Theta, gradients, masks, penalties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orthokern import InputError, penalties
from orthokern.nn import NonNormalRNN
from orthokern.nn.nonnormal import triangular_mask
from orthokern.optim import split_parameters

F64 = torch.float64


def make(n: int = 6, **options: object) -> NonNormalRNN:
    """With T, gamma and A away from their initial values."""
    rnn = NonNormalRNN(3, n, dtype=F64, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in rnn.named_parameters():
            if name.startswith(("triangle", "gamma", "skew")):
                p.add_(0.3 * torch.randn_like(p))
    return rnn


def theta_by_hand(rnn: NonNormalRNN) -> Tensor:
    n, c, s = rnn.hidden_size, rnn.theta_l0.cos(), rnn.theta_l0.sin()
    blocks = rnn.gamma_l0[: n // 2] * torch.stack([c, -s, s, c])
    theta = torch.block_diag(*blocks.mT.unflatten(1, (2, 2)), *rnn.gamma_l0[n // 2 :])
    below = torch.tensor([[j // 2 < i // 2 for j in range(n)] for i in range(n)])
    return theta + rnn.triangle_l0 * below


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_the_matrix_is_its_schur_form(n: int) -> None:
    rnn = make(n)
    v, p = rnn.recurrent_matrix().detach(), rnn._orthogonal("l0").detach()
    assert torch.allclose(v, p @ theta_by_hand(rnn).detach() @ p.mT, rtol=0, atol=1e-13)
    assert rnn.orthogonality_error() < 1e-14


def test_orthogonal_at_first() -> None:
    v = NonNormalRNN(2, 7, dtype=F64).recurrent_matrix()
    assert torch.allclose(v.mT @ v, torch.eye(7, dtype=F64), atol=1e-13)


def test_roles_and_penalties() -> None:
    rnn = make()
    split = split_parameters(rnn)
    assert [id(p) for p in split["skew"]] == [id(rnn.skew_l0)]
    assert {id(p) for p in split["rotation"]} == {id(rnn.gamma_l0), id(rnn.theta_l0)}
    (gradient,), gamma = torch.autograd.grad(penalties.modulus_penalty(rnn), [rnn.gamma_l0]), rnn.gamma_l0.detach()
    torch.testing.assert_close(gradient, 2 * (gamma - 1))
    assert penalties.modulus_penalty(rnn).item() == pytest.approx(float((gamma - 1).square().sum()))
    assert penalties.modulus_penalty(nn.Sequential(rnn), "l1").item() == pytest.approx(float((gamma - 1).abs().sum()))
    acting = rnn.triangle_l0.detach()[triangular_mask(6)]
    assert penalties.triangular_decay(rnn).item() == pytest.approx(float(acting.square().sum()))


def test_without_a_triangle() -> None:
    normal = make(triangular=False)
    v = normal.recurrent_matrix()
    assert torch.allclose(v @ v.mT, v.mT @ v, atol=1e-13) and not hasattr(normal, "triangle_l0")


def test_moduli_that_are_not_finite() -> None:
    rnn = make()
    rnn.gamma_l0.data[0] = float("nan")
    for call in (rnn.frozen, lambda: rnn(torch.zeros(2, 1, 3, dtype=F64))):
        with pytest.raises(InputError, match="gamma_l0 holds 1 NaN or infinite"):
            call()
