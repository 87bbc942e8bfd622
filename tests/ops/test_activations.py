"""activations: the table compared with the files that have the formulas, the reference with autograd, the kernels with
the reference, and the registration of the op."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, SHORT, assert_matches_reference, each, served, strided
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


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("size", [1, 6])
def test_activation_backward(activation: str, size: int) -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    param = 0.3 * torch.randn(size, dtype=torch.float64) if activation in PARAMETER else None
    inputs = [t.clone().requires_grad_() for t in (x, param) if t is not None]

    def forward(x: Tensor, param: Tensor | None = None) -> Tensor:
        return reference.activation_fwd(x, param, activation=activation).clone()

    assert torch.autograd.gradcheck(forward, inputs)
    grad_y = torch.randn_like(x)
    actual = reference.activation_bwd(grad_y, x, param, activation=activation)
    for a, e in zip(actual, torch.autograd.grad(forward(*inputs), inputs, grad_y), strict=False):
        torch.testing.assert_close(a, e)


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
    x = torch.tensor([1.0, 3.0, 3.0, 1.0])
    assert reference.activation_fwd(x, None, activation="oplu").tolist() == [3, 1, 3, 1]


# -------------------------------------------------------------------------------------------------------------- kernels


@each("activations")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_activation_parity(op: str, backend: str, dtype: torch.dtype, activation: str) -> None:
    fwd, bwd = torch.ops.orthokern.activation_fwd, torch.ops.orthokern.activation_bwd
    for shape in ((2,), (1, 2), (7, 64), (3, 5, 34), (1001, 6), (0, 4)):
        for size in (1, shape[-1]) if activation in PARAMETER else (0,):
            x, grad_y = (3 * torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(2))
            if x.numel() > 2:
                x.view(-1)[0] = 0.0  # a kink, hit exactly
            param = 0.3 * torch.randn(size, dtype=dtype) if size else None
            exact = [None if t is None else t.double() for t in (grad_y, x, param)]
            y, y64, y_torch = fwd(x, param, activation, backend), fwd(*exact[1:], activation), fwd(x, param, activation)
            assert_matches_reference(y, y64, y_torch, name=f"y of {shape}")
            actual = bwd(grad_y, x, param, activation, backend)
            expected, plain = bwd(*exact, activation, "reference"), bwd(grad_y, x, param, activation, "reference")
            for name, *three in zip(("grad_x", "grad_act_param"), actual, expected, plain, strict=True):
                assert_matches_reference(*three, name=f"{name} of {shape}", gradient=True)
            again = bwd(strided(grad_y), strided(x), param, activation, backend)
            assert torch.equal(y, fwd(strided(x), param, activation, backend))
            assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@each("activations")
@pytest.mark.parametrize("activation", NAMES)
def test_special_values(op: str, backend: str, activation: str) -> None:
    """Infinities, NaN, denormals and large arguments come out as plain torch gives them."""
    inf, nan = float("inf"), float("nan")
    fwd = torch.ops.orthokern.activation_fwd
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).tiny
        x = torch.tensor([0.0, -0.0, tiny, -tiny, 1e4, -1e4, inf, -inf, 88, -88, 1e-6, -1e-6, nan, 1], dtype=dtype)
        param = torch.tensor([0.25], dtype=dtype) if activation in PARAMETER else None
        expected = fwd(x, param, activation, "reference")
        torch.testing.assert_close(fwd(x, param, activation, backend), expected, equal_nan=True)


@each("activations")
def test_tanh_is_accurate_everywhere(op: str, backend: str) -> None:
    """Relative error, which the comparison with a floor does not look at: small arguments matter in a long scan."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-30, 1, 2001), -torch.logspace(-30, 1, 2001)])
    for dtype in DTYPES:
        y = torch.ops.orthokern.activation_fwd(x.to(dtype), None, "tanh", backend).double()
        exact = torch.tanh(x.to(dtype).double())
        error = ((y - exact) / exact.abs().clamp(min=1e-300)).abs()[exact != 0]
        assert error.max() <= 8 * torch.finfo(dtype).eps, f"{dtype}: relative error {error.max():.3e}"


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 5, 3), (2, 5, 3, 4)])
def test_prelu_has_the_weights_of_torch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for size in {1, 5} if len(shape) > 1 else {1}:
        weight = torch.rand(size, dtype=torch.float64, requires_grad=True)
        results = functional.prelu(x, weight), torch.nn.functional.prelu(x, weight)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), (x, weight)) for y in results))


def test_no_rows() -> None:
    for name in NAMES:
        param = torch.full((6,), 0.25, requires_grad=True) if name in PARAMETER else None
        x = torch.zeros(0, 6, requires_grad=True)
        y = functional.activation(x, name, param)
        y.sum().backward()
        assert y.shape == (0, 6) and x.grad is not None
        assert param is None or torch.equal(param.grad, torch.zeros(6))


# --------------------------------------------------------------------------------------------------------- registration


@pytest.mark.parametrize("backend", served("activations"))
@pytest.mark.parametrize("activation", ["identity", "tanh", "prelu", "modrelu", "oplu"])
def test_opcheck_activations(backend: str, activation: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    param = torch.tensor([0.25], dtype=torch.float64) if activation in PARAMETER else None
    leaf_param = param if param is None else param.clone().requires_grad_()
    fwd, bwd = torch.ops.orthokern.activation_fwd.default, torch.ops.orthokern.activation_bwd.default
    torch.library.opcheck(fwd, (x.clone().requires_grad_(), leaf_param, activation, backend))
    torch.library.opcheck(bwd, (torch.randn_like(x), x, param, activation, backend))
