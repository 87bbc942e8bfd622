"""Inside torch.autocast, and if a process allows lower precision in products: ops, their backward, and optimizers and
constraints give the same results as outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from float_products import FloatProducts, products_are_ieee
from helpers import GruProblem, run_scan, scan_problem
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

from orthokern import cpu, functional, parametrize
from orthokern._scan_contract import Readout
from orthokern.cpu import gru_scan, linear_cross_entropy
from orthokern.errors import InputError
from orthokern.init import learned_orthogonal_
from orthokern.nn import GRU, LSTM, ExpRNN, FactorizedRNN, LinearCrossEntropy, ModReLU, NonNormalRNN, RotationRNN
from orthokern.optim import GeodesicSGD, SpectralNormProjection
from orthokern.penalties import OrthogonalPenalty
from orthokern.reference import skew_exp as reference

T, B, N, D, C = 7, 3, 12, 5, 4


def _leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).requires_grad_()


def test_optimizers_and_penalties_keep_float32() -> None:
    def trained(inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        rnn, gru = FactorizedRNN(D, N), GRU(D, 100)
        with torch.no_grad():
            gru.weight_hh_l0.mul_(4.0)  # beyond the bound
        bases = [p for p in rnn.parameters() if p.shape == (N, N)]
        step = GeodesicSGD(bases, lr=0.1, correct_every=1, drift_tolerance=1e-9)
        projection = SpectralNormProjection(gru)
        penalty = OrthogonalPenalty(on="feedforward")
        layer = torch.nn.Linear(N, N)
        for p in bases:
            p.grad = torch.randn(N, N)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            step.step()
            projection.step()
            value = penalty(layer)
            orthogonal = learned_orthogonal_(torch.randn(N, N))
            deviation = torch.tensor(float(rnn.orthogonality_error()))
        (gradient,) = torch.autograd.grad(value, layer.weight)
        return [
            *(p.detach() for p in bases),
            *(p.detach() for p in gru.parameters()),
            value.detach(),
            gradient,
            orthogonal.error,
            deviation,
        ]

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


def test_products_are_ieee_whatever_the_process_allows() -> None:
    """A drift cannot be measured in TF32."""
    basis = torch.nn.Parameter(torch.linalg.qr(torch.randn(N, N))[0])
    basis.grad = torch.randn(N, N)
    bounded = torch.linspace(1.79, 0, 130).diag()
    projection = SpectralNormProjection([bounded])
    for _ in range(2):  # the first projection begins the block of directions
        projection.step()
        bounded += torch.randn(130, 130) / 100
    with FloatProducts() as products:
        GeodesicSGD([basis], 0.1, correct_every=1, backend="reference").step()
        assert products.seen
        products.seen.clear()
        projection.step()
        assert projection.counts["projections"] == 2 and products.seen
        products.seen.clear()
        learned_orthogonal_(torch.randn(N, N) / N**0.5)
        assert products.seen


@pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)
def test_products_beside_the_kernels_are_ieee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "_LARGE_READOUT", 0)
    with FloatProducts() as products:
        problem = scan_problem("factored_scan", B=B, T=T, N=N, inputs="features").to(torch.float32)
        run_scan(problem, "cpu")
        for variant in ("kanai", "torch"):
            GruProblem.random(variant, T, B, N).map(Tensor.float).run_leaves(gru_scan)
        target = torch.randint(0, C, (T,))
        readout = Readout(torch.randn(C, N), torch.randn(C), target)
        linear_cross_entropy.linear_cross_entropy_fwd(torch.randn(T, N), readout)
    assert products.seen >= {"mm", "addmm", "addmm_"}


MODULES = {
    "composed": partial(FactorizedRNN, 3, N, apply="composed"),
    "exponential": partial(ExpRNN, 3, N),
    "nonnormal": partial(NonNormalRNN, 3, N),
    "gru": partial(GRU, 3, N),
    "lstm": partial(LSTM, 3, N),
    "rotation": partial(RotationRNN, 3, N),
}


@pytest.mark.parametrize("name", MODULES)
def test_products_of_modules_are_ieee(name: str) -> None:
    module, x = MODULES[name](), torch.randn(T, B, 3)
    state = torch.randn(1, B, N)
    # resets to a state that is not zero take the input product out of the kernel of a RotationRNN
    more: dict[str, Any] = {"resets": torch.rand(T, B) < 0.3} if name == "rotation" else {}
    with FloatProducts() as products:
        module(x, (state, state) if name == "lstm" else state, **more)[0].square().sum().backward()
    assert products.seen


@pytest.mark.parametrize("algorithm", ["modal", "sequential"])
def test_products_of_a_sequence_loss_are_ieee(algorithm: str) -> None:
    rnn, readout = FactorizedRNN(3, N, nonlinearity="identity"), LinearCrossEntropy(N, C)
    x, target = torch.randn(T, B, 3), torch.randint(0, C, (T, B))
    with FloatProducts() as products:
        rnn.loss(x, readout, target, algorithm=algorithm)[0].backward()
        rnn.latent(x.new_ones(B, N))
        w = rnn.recurrent_matrix().detach().requires_grad_()
        functional.dense_scan(torch.randn(T, B, N), w, activation="identity", algorithm=algorithm).sum().backward()
    assert products.seen


@pytest.mark.parametrize("kind", ["Exponential", "SchurForm"])
def test_products_of_parametrizations_are_ieee(kind: str) -> None:
    weight = torch.linalg.qr(torch.randn(N, N))[0]
    layer = torch.nn.Linear(N, N)
    layer.weight.data = weight
    register_parametrization(layer, "weight", getattr(parametrize, kind)(layer.weight))
    with FloatProducts() as products:
        OrthogonalPenalty()(layer.weight).backward()
    assert products.seen


def test_an_exponential_is_orthogonal_whatever_the_process_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (exact.append(products_are_ieee()), function(*args))[1]

    for name in ("skew_exp_fwd", "skew_exp_bwd"):
        monkeypatch.setattr(reference, name, noted(getattr(reference, name)))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        functional.skew_exp(_leaf(N, N)).sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)
    assert exact == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_activation_and_readout_in_float32(dtype: torch.dtype) -> None:
    """A layer of torch before them returns 16 bits."""
    x, target = torch.randn(5, 6).to(dtype).requires_grad_(), torch.randint(4, (5,))
    activation, readout = ModReLU(6), LinearCrossEntropy(6, 4)
    parameters = [*activation.parameters(), *readout.parameters()]
    outside = readout.loss(activation(x.float()), target), readout.loss(x.float(), target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = readout.loss(activation(x), target), readout.loss(x, target)
    assert activation(x.float()).dtype == torch.float32 and inside == outside
    for one, other in zip(inside, outside, strict=True):
        gradients = (torch.autograd.grad(loss, [x, *parameters], allow_unused=True) for loss in (one, other))
        torch.testing.assert_close(*gradients)
    for call in (lambda: activation(x), lambda: readout.loss(x, target)):
        with pytest.raises(InputError, match="dtype"):
            call()


def test_a_backward_of_the_modal_form_inside_autocast() -> None:
    """Its products keep float32, whatever the mode of the backward."""
    x, w = _leaf(T, B, N), torch.linalg.qr(torch.randn(N, N))[0].requires_grad_()
    results = []
    for inside in (False, True):
        states = functional.dense_scan(x, w, activation="identity", algorithm="modal")
        with torch.autocast("cpu", enabled=inside):
            results.append(torch.autograd.grad(states.square().sum(), [x, w]))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
