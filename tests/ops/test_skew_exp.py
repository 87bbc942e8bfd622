"""The exponential of skew matrices: coefficients, values against an eigendecomposition, gradients, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comparison import assert_matches_reference
from helpers import DTYPES, strided
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orthokern import InputError, functional
from orthokern.reference import skew_exp as reference


def skew(n: int, norm: float, batch: tuple[int, ...] = ()) -> Tensor:
    """Skew [..., n, n] float64 of a 2-norm."""
    x = torch.randn(*batch, n, n, dtype=torch.float64)
    a = x - x.mT
    return a * (norm / torch.linalg.matrix_norm(a, 2)[..., None, None])


def by_eigenvectors(a: Tensor) -> Tensor:
    """exp of skew float64 [..., n, n] along another road: i A is Hermitian."""
    angles, q = torch.linalg.eigh(1j * a)
    return ((q * torch.exp(-1j * angles).unsqueeze(-2)) @ q.mH).real


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [1e-30, 1e-3, 1.0, 3.2, 30.0, 200.0])
def test_values_and_orthogonality(dtype: torch.dtype, norm: float) -> None:
    eps = torch.finfo(dtype).eps
    for n in (2, 7, 64):
        a = skew(n, norm, (2,)).to(dtype)
        p = functional.skew_exp(a)
        assert p.dtype == dtype
        # RMS over |P|_F = sqrt(n); the eigenvectors themselves are good to 2e-15
        error = (p - by_eigenvectors(a.double())).square().mean().sqrt() * n**0.5
        assert error < 2 * eps * (2 + norm) + 4e-15
        assert (p.mT.double() @ p.double() - torch.eye(n, dtype=torch.float64)).abs().max() < 6 * eps


def test_the_symmetric_part_plays_no_role() -> None:
    x = torch.randn(3, 5, 5, dtype=torch.float64)
    assert torch.equal(functional.skew_exp(x), functional.skew_exp((x - x.mT) / 2))
    assert torch.equal(functional.skew_exp(x + torch.eye(5)), functional.skew_exp(x))
    assert torch.equal(functional.skew_exp(torch.zeros(4, 4)), torch.eye(4))
    assert torch.equal(functional.skew_exp(torch.full((1, 1), 3.0)), torch.ones(1, 1))


def test_where_the_count_of_squarings_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's road: always MAX_SQUARINGS rounds, a matrix that is ready keeps its value."""
    a = torch.stack([skew(6, 0.3), skew(6, 20.0)])
    g = torch.randn(2, 6, 6, dtype=torch.float64)
    p, *saved = reference.skew_exp_fwd(a)
    grad = reference.skew_exp_bwd(g, *saved)
    monkeypatch.setattr(reference, "_rounds", lambda squarings: reference.MAX_SQUARINGS)
    q, *saved = reference.skew_exp_fwd(a)
    assert torch.equal(p, q)
    assert torch.equal(grad, reference.skew_exp_bwd(g, *saved))


def test_a_device_is_never_waited_for() -> None:
    """Tensors without data: reading a number of them on the host would be an error, as it is a wait on a GPU.

    Nor is anything copied there after the first call, which a CUDA graph could not hold.
    """
    copies = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.ops.aten.lift_fresh.default, torch.ops.aten._to_copy.default):
                if any(isinstance(a, Tensor) and a.device.type == "cpu" for a in args):
                    copies.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.empty(3, 20, 20, device="meta")
    for _ in range(2):
        copies.clear()
        with Watching():
            p, *saved = reference.skew_exp_fwd(x)
            assert reference.skew_exp_bwd(torch.empty_like(p), *saved).shape == x.shape
    assert not copies


def test_too_large_or_not_finite_is_nan_in_that_matrix_alone() -> None:
    a = skew(4, 1.0, (4,))
    a[1] *= 1000
    a[2, 0, 1] = math.nan
    a[3, 0, 1] = math.inf
    p = functional.skew_exp(a.requires_grad_())
    (gradient,) = torch.autograd.grad(p.sum(), a)
    for result in (p, gradient):
        assert bool(result[0].isfinite().all())
        assert all(bool(one.isnan().any()) for one in result[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [0.3, 3.0, 25.0])
def test_gradient_against_torch(dtype: torch.dtype, norm: float) -> None:
    a, g = skew(33, norm), torch.randn(33, 33, dtype=torch.float64)

    def gradient(function: Any, kind: torch.dtype) -> Tensor:
        x = a.to(kind, copy=True).requires_grad_()
        return torch.autograd.grad(function((x - x.mT) / 2), x, g.to(kind))[0]

    ours = gradient(functional.skew_exp, dtype)
    assert torch.equal(ours, -ours.mT)
    exact = gradient(torch.matrix_exp, torch.float64)
    assert_matches_reference(ours, exact, gradient(torch.matrix_exp, dtype), name="grad_x", gradient=True)


def test_opcheck_and_repeatable_bits() -> None:
    x = torch.randn(2, 4, 4, dtype=torch.float64).requires_grad_()
    namespace = torch.ops.orthokern
    torch.library.opcheck(namespace.skew_exp_fwd.default, (x,))
    outputs = namespace.skew_exp_fwd(x.detach())
    arguments = (torch.randn(2, 4, 4, dtype=torch.float64), x.detach(), *outputs[1:])
    torch.library.opcheck(namespace.skew_exp_bwd.default, arguments)
    assert all(torch.equal(a, b) for a, b in zip(outputs, namespace.skew_exp_fwd(x.detach()), strict=True))
    assert torch.equal(functional.skew_exp(strided(x.detach())), functional.skew_exp(x.detach()))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 3), r"has shape \[2, 3\]: accepted is \[..., N, N\]"),
        (torch.ones(0, 3, 3), r"has shape \[0, 3, 3\]: .*nothing empty"),
        (torch.ones(3, 3, dtype=torch.bfloat16), "bfloat16: accepted are float32 and float64"),
    ],
)
def test_bad_input_is_one_line(x: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=f"^x .*{message}.*$"):
        functional.skew_exp(x)


@pytest.mark.parametrize("transform", [torch.func.hessian, lambda f: torch.func.grad(torch.func.grad(f))])
def test_transforms_leave_nothing_behind(transform: Any) -> None:
    """The first call under a transform, and later calls with and without one, have the same values."""
    generators = torch.randn(2, 2, dtype=torch.float64)

    def value(t: Tensor) -> Tensor:
        return functional.skew_exp(generators * t).sin().sum()

    reference._kept_coefficients.cache_clear()
    t = torch.tensor(0.7, dtype=torch.float64)
    first = transform(value)(t)
    assert torch.equal(transform(value)(t), first) and value(t).isfinite()
    step = 1e-4
    expected = (value(t + step) - 2 * value(t) + value(t - step)) / step**2
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
