"""activations: the table compared with the files that have the formulas, the reference with autograd, the kernels with
the reference, and the registration of the op."""

from __future__ import annotations

import math

import pytest
import torch
from checks import activation_by, check_activation, check_special_values, check_tanh
from helpers import DTYPES, SHORT, each, served, strided
from torch import Tensor

from orthokern import functional
from orthokern._activations import ACTIVATIONS
from orthokern.cpu import _call
from orthokern.nn import RNN
from orthokern.ops.activations import NAMES, PARAMETER
from orthokern.reference import activations as reference


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_padding_stays_zero(name: str) -> None:
    """phi(0) is 0 whatever the parameter: kernels rely on it for the units and rows that fill a tile."""
    for value in (-0.5, 0.0, 0.5):
        param = None if ACTIVATIONS[name].parameter is None else torch.tensor([value])
        assert not reference.activation_fwd(torch.zeros(2), param, activation=name).any()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_module_has_the_parameter_of_the_table(name: str) -> None:
    learned = ACTIVATIONS[name].learned
    module = RNN(3, 4, nonlinearity=name)
    own = {key: value for key, value in module.named_parameters() if not key.startswith(("weight", "bias"))}
    if learned is None:
        assert not own
        return
    assert {key: value.shape for key, value in own.items()} == {f"{learned.stem}_l0": (4 if learned.per_unit else 1,)}
    low, high = learned.start if isinstance(learned.start, tuple) else (learned.start, learned.start)
    (value,) = own.values()
    assert ((value >= low) & (value <= high)).all()


@pytest.mark.skipif(not _call.AVAILABLE, reason=_call.REASON)
def test_the_kernels_have_the_rows_of_the_table() -> None:
    rows = {row.number: (row.reads, row.parameter is not None, row.pairs) for row in ACTIVATIONS.values()}
    assert _call._C.activations() == rows


# ------------------------------------------------------------------------------------------------------------ reference


def test_activations_at_their_kinks() -> None:
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    slope, bias = torch.tensor([0.25], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)

    def derivative(name: str, x: Tensor, param: Tensor | None = None) -> list[float]:
        return reference.activation_bwd(torch.tensor([1.0, 2.0]).double(), x, param, activation=name)[0].tolist()

    assert derivative("relu", zero) == [0, 0]
    assert derivative("prelu", zero, slope) == [0.25, 0.5]
    assert derivative("modrelu", zero, bias) == [0, 0]
    assert reference.activation_fwd(zero, bias, activation="modrelu").tolist() == [0, 0]
    assert derivative("modrelu", bias.expand(2), -bias) == [0, 0]  # |x| + b = 0 does not pass
    assert derivative("oplu", one) == [1, 2]  # a tie is not swapped
    infinite, silent = torch.full((2,), math.inf).double(), -one
    for name, x, param in (("modrelu", zero, -bias), ("prelu", one, slope), ("relu", silent, None)):
        grad_x, grad_param = reference.activation_bwd(infinite, x, param, activation=name)
        passed = grad_param if name == "prelu" else grad_x
        assert (passed == 0).all()  # no gradient passes, however large it is
    x = torch.tensor([1.0, 3.0, 3.0, 1.0])
    assert reference.activation_fwd(x, None, activation="oplu").tolist() == [3, 1, 3, 1]


# -------------------------------------------------------------------------------------------------------------- kernels


@each("activations")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_activation_parity(op: str, backend: str, dtype: torch.dtype, activation: str) -> None:
    by_op = activation_by(activation, backend)

    def run(grad_y: Tensor, x: Tensor, param: Tensor | None) -> tuple[Tensor, ...]:
        results = by_op(grad_y, x, param)
        assert all(map(torch.equal, results, by_op(strided(grad_y), strided(x), param)))
        return results

    check_activation(activation, dtype, run, [(2,), (1, 2), (7, 64), (3, 5, 34), (1001, 6), (0, 4)])


@each("activations")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_special_values(op: str, backend: str, dtype: torch.dtype, activation: str) -> None:
    forward = torch.ops.orthokern.activation_fwd
    check_special_values(activation, dtype, lambda x, param: forward(x, param, activation, backend))


@each("activations")
@pytest.mark.parametrize("activation", NAMES)
def test_a_nan_reaches_every_gradient(op: str, backend: str, activation: str) -> None:
    """As in torch: a loss that is NaN must not have finite gradients."""
    x = torch.randn(4, 6)
    x[2, :2] = torch.nan
    param = torch.rand(1) if activation in PARAMETER else None
    y, grad_x, grad_param = activation_by(activation, backend)(2 * x, x, param)
    assert bool(y[2, :2].isnan().all()) and bool(grad_x[2, :2].isnan().all())
    assert bool(grad_x[:2].isfinite().all()) and bool(grad_param.isnan().all())


@each("activations")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_tanh_is_accurate_everywhere(op: str, backend: str, dtype: torch.dtype) -> None:
    check_tanh(dtype, lambda x: torch.ops.orthokern.activation_fwd(x, None, "tanh", backend), 8)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 5, 3), (2, 5, 3, 4)])
def test_prelu_has_the_weights_of_torch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for size in {1, 5} if len(shape) > 1 else {1}:
        weight = torch.rand(size, dtype=torch.float64, requires_grad=True)
        results = functional.prelu(x, weight), torch.nn.functional.prelu(x, weight)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), (x, weight)) for y in results))


# --------------------------------------------------------------------------------------------------------- registration


@pytest.mark.parametrize("backend", served("activations"))
@pytest.mark.parametrize("activation", ["tanh", "prelu"])
def test_opcheck_activations(backend: str, activation: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    param = torch.tensor([0.25], dtype=torch.float64) if activation in PARAMETER else None
    leaf_param = param if param is None else param.clone().requires_grad_()
    fwd, bwd = torch.ops.orthokern.activation_fwd.default, torch.ops.orthokern.activation_bwd.default
    torch.library.opcheck(fwd, (x.clone().requires_grad_(), leaf_param, activation, backend))
    torch.library.opcheck(bwd, (torch.randn_like(x), x, param, activation, backend))
