"""Parametrizations of torch layers: constraints, round trips, gradients, thin shapes."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from checks import gram_error
from helpers import refused
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from orthokern import InputError
from orthokern.errors import OutOfRange
from orthokern.init import haar_orthogonal_, haar_rotation_
from orthokern.parametrize import Cayley, Exponential, FactorizedSpectrum, Householder, SchurForm

F64 = torch.float64
ORTHOGONAL = [Exponential, Cayley, Householder]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def layer(rows: int, columns: int, build: Callable[[Tensor], nn.Module]) -> nn.Linear:
    """A constrained Linear whose parameters were then moved."""
    linear = nn.Linear(columns, rows, dtype=F64)
    register_parametrization(linear, "weight", build(linear.weight))
    with torch.no_grad():
        for index, p in enumerate(linear.parametrizations.parameters()):
            p.add_(0.3 * normal(*p.shape, seed=index))
    return linear


@pytest.mark.parametrize("shape", [(6, 6), (6, 3), (3, 6)])
def test_reflection_vectors_of_any_length(shape: tuple[int, int]) -> None:
    x = normal(*shape).float()
    lengths = torch.tensor([1e-30, 1e-20, 1.0, 1e20, 1e30, 1e37])[: min(shape)]
    scaled = (x * lengths if shape[0] >= shape[1] else (x.mT * lengths).mT).requires_grad_()
    householder = Householder(x)
    w = householder(scaled)
    torch.testing.assert_close(w, householder(x), rtol=0, atol=1e-5)
    (w * normal(*shape, seed=1).float()).sum().backward()
    assert scaled.grad is not None and bool(scaled.grad.isfinite().all())
    zero = x.clone()
    zero[1:, 1] = 0.0
    if shape[0] < shape[1]:
        zero[1, 1:] = 0.0
    with pytest.raises(InputError, match="(row|column) 1 of the parameter must not be zero from its diagonal on"):
        householder(zero)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*itertools.product(ORTHOGONAL, [(1, 1), (7, 7)]), *itertools.product([Householder], [(7, 3), (3, 7), (5, 1)])],
)
def test_orthogonal_round_trip_and_both_determinants(
    kind: Callable[[Tensor], nn.Module], shape: tuple[int, int]
) -> None:
    linear = layer(*shape, kind)
    assert gram_error(linear.weight) < 1e-26
    for seed in range(4):
        w = haar_orthogonal_(torch.empty(shape, dtype=F64), torch.Generator().manual_seed(seed))
        linear.weight = w
        assert torch.allclose(linear.weight, w, rtol=0, atol=1e-13)
    w = normal(*shape)
    linear.weight = w  # not orthogonal: the nearest that is
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    assert torch.allclose(linear.weight, u @ vh, rtol=0, atol=1e-12)


def test_householder_is_the_product_of_its_reflections() -> None:
    x = normal(6, 4)
    product = torch.eye(6, dtype=F64)
    for j in range(4):
        v = x[:, j].clone()
        v[:j] = 0
        product = product @ (torch.eye(6, dtype=F64) - 2 * torch.outer(v, v) / (v @ v))
    assert torch.allclose(Householder(x)(x), product[:, :4], rtol=0, atol=1e-13)


@pytest.mark.parametrize("spectrum_map", ["sigmoid", "tanh"])
@pytest.mark.parametrize("shape", [(6, 6), (7, 3), (3, 5)])
def test_spectrum_within_its_margin(shape: tuple[int, int], spectrum_map: str) -> None:
    linear = layer(*shape, lambda w: FactorizedSpectrum(w, 0.2, spectrum_map))
    with torch.no_grad():  # not at the ends of the margin
        linear.parametrizations.weight.original1.copy_(normal(min(shape)))
    s = torch.linalg.svdvals(linear.weight)
    assert 0.8 < s.min().item() < s.max().item() < 1.2
    inside = linear.weight.detach().clone()
    linear.weight = inside
    assert torch.allclose(linear.weight, inside, rtol=0, atol=1e-12)
    w = normal(*shape)
    linear.weight = w  # outside: singular values go to the margin, the vectors stay
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    assert torch.allclose(linear.weight, (u * s.clamp(0.8, 1.2)) @ vh, rtol=0, atol=3e-4)


def test_spectrum_free_fixed_and_of_low_rank() -> None:
    w = normal(6, 5)
    free = FactorizedSpectrum(w, None)
    assert torch.allclose(free(*free.right_inverse(w)), w, rtol=0, atol=1e-12)
    fixed = FactorizedSpectrum(w, 0.0)
    assert gram_error(fixed(*fixed.right_inverse(w))) < 1e-26
    low = FactorizedSpectrum(w, None, rank=2)
    u, s, vh = torch.linalg.svd(w)
    assert torch.allclose(low(*low.right_inverse(w)), (u[:, :2] * s[:2]) @ vh[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_schur_form(n: int) -> None:
    linear = layer(n, n, SchurForm)
    gamma = linear.parametrizations.weight.original1.detach().abs()
    moduli = torch.cat([gamma[: n // 2].repeat_interleave(2), gamma[n // 2 :]]).sort().values
    assert torch.allclose(torch.linalg.eigvals(linear.weight).abs().sort().values, moduli, atol=1e-8)
    made = linear.weight.detach().clone()
    linear.weight = made
    assert torch.allclose(linear.weight, made, rtol=0, atol=1e-9)
    rotation = haar_rotation_(torch.empty(n, n, dtype=F64), torch.Generator().manual_seed(2))
    linear.weight = rotation
    assert torch.allclose(linear.weight, rotation, rtol=0, atol=1e-9)


@pytest.mark.parametrize("values", [[-1.0, 1.0, 1.0], [0.5, 1.0, 1.0], [0.5, 0.5, 1.0], [-1.0, -1.0, 0.3, 1.0, 1.0]])
def test_schur_form_pairs_equal_real_eigenvalues(values: list[float]) -> None:
    n = len(values)
    q = haar_rotation_(torch.empty(n, n, dtype=F64), torch.Generator().manual_seed(2))
    weight = q * torch.tensor(values, dtype=F64) @ q.mT
    linear = layer(n, n, SchurForm)
    linear.weight = weight
    assert torch.allclose(linear.weight, weight, rtol=0, atol=1e-9)


def test_schur_form_warns_of_a_singular_weight() -> None:
    weight = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=F64))
    with pytest.warns(UserWarning, match="two real eigenvalues of opposite sign .* makes the weight singular"):
        SchurForm(weight).right_inverse(weight)


@pytest.mark.parametrize("kind", [*ORTHOGONAL, FactorizedSpectrum, SchurForm])
def test_gradcheck(kind: Callable[[Tensor], nn.Module]) -> None:
    linear = layer(4, 4, kind)
    parametrization = linear.parametrizations.weight[0]
    inputs = tuple(p.detach().clone().requires_grad_() for p in linear.parametrizations.weight.parameters())
    assert torch.autograd.gradcheck(parametrization, inputs)
    state = copy.deepcopy(linear.state_dict())
    other = layer(4, 4, kind)
    other.load_state_dict(state)
    assert torch.equal(other.weight, linear.weight)
    value = linear.weight.detach().clone()
    remove_parametrizations(linear, "weight")
    assert torch.equal(linear.weight, value)


@pytest.mark.parametrize(
    ("kind", "entry", "value", "message"),
    [
        (Exponential, "0.base", 1.5, "base is not orthogonal: |B^T B - I| is 1.25; accepted: up to 0.001"),
        (Cayley, "0.base", 1.1, "base is not orthogonal: |B^T B - I| is 0.21"),
        (Householder, "0.signs", 0.5, "signs must be numbers 1 and -1"),
        (FactorizedSpectrum, "0.left.signs", math.nan, "signs must be numbers 1 and -1"),
    ],
)
def test_states_that_would_break_the_constraint(
    kind: Callable[[Tensor], nn.Module], entry: str, value: float, message: str
) -> None:
    linear = layer(4, 4, kind)
    before, name = linear.weight.detach().clone(), f"parametrizations.weight.{entry}"
    state = {**linear.state_dict(), name: value * linear.state_dict()[name]}
    assert refused(lambda: linear.load_state_dict(state), message).startswith(name.rpartition(".")[0])
    assert torch.equal(linear.weight, before)


@pytest.mark.parametrize("kind", [Exponential, SchurForm])
def test_an_exponential_out_of_range(kind: Callable[[Tensor], nn.Module]) -> None:
    x = layer(4, 4, kind)
    parameter = next(p for p in x.parametrizations.parameters() if p.shape == (4, 4))
    for value, message in (
        (math.nan, "holds 1 NaN or infinite values of 16"),
        (1e4, "with |A|_2 = 1e+04; accepted: up to 279 in torch.float64"),
    ):
        with torch.no_grad():
            parameter.zero_()[1, 0] = value
        with pytest.raises(OutOfRange) as caught:
            x(torch.ones(1, 4, dtype=F64))
        assert str(caught.value).startswith(f"{kind.__name__}: the parameter") and message in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Exponential(torch.ones(2, 3)), ["Exponential", "[2, 3]", "[N,N]"]),
        (lambda: Cayley(torch.ones(2, 2, dtype=torch.bfloat16)), ["Cayley", "bfloat16"]),
        (lambda: Householder(torch.ones(3)), ["Householder", "[3]"]),
        (lambda: SchurForm(torch.ones(2, 2, device="meta")), ["a tensor with values", "got one on the meta device"]),
        (lambda: Householder(None), ["Householder: weight must be a float32 or float64 tensor, got NoneType"]),
        (lambda: SchurForm(torch.eye(4)).right_inverse("text"), ["SchurForm: weight", "got str"]),
        (lambda: Householder(torch.ones(3, 2)).right_inverse(torch.ones(2, 2)), ["[2, 2]", "[3, 2]"]),
        (lambda: Exponential(torch.ones(2, 2)).right_inverse(torch.full((2, 2), float("nan"))), ["NaN"]),
        (lambda: FactorizedSpectrum(torch.ones(3, 2), rank=3), ["rank", "at most 2", "3"]),
        (lambda: FactorizedSpectrum(torch.ones(3, 2), spectrum_map="sig"), ["unknown spectrum_map 'sig'"]),
    ],
)
def test_refusals(call: Callable[[], object], words: list[str]) -> None:
    refused(call, *words)


@pytest.mark.parametrize("kind", [Cayley, Exponential, FactorizedSpectrum, Householder, SchurForm])
def test_a_weight_of_another_dtype_is_converted(kind: type[nn.Module]) -> None:
    layer = nn.Linear(6, 6)
    haar_rotation_(layer.weight)
    register_parametrization(layer, "weight", kind(layer.weight))
    weight = haar_rotation_(torch.empty(6, 6, dtype=torch.float64))
    layer.weight = weight
    assert layer.weight.dtype == torch.float32
    torch.testing.assert_close(layer.weight.detach().double(), weight, rtol=0, atol=1e-5)
