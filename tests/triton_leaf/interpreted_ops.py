"""The Triton kernels of activations, readout and Cayley step against the reference, under Triton's interpreter."""

from __future__ import annotations

import interpreter  # first: it decides that kernels are interpreted

# isort: split
import pytest
import torch
import triton.language as tl
from checks import check_activation, check_cayley, check_special_values, check_tanh
from comparison import assert_matches_reference
from helpers import SHORT, bases
from interpreted import DTYPES, leaf
from torch import Tensor

from orthokern._scan_contract import Readout
from orthokern.errors import InputError
from orthokern.ops.activations import NAMES

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # the interpreter's NumPy


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_activation_parity(activation: str, dtype: torch.dtype) -> None:
    ours = leaf("activations", "triton")

    def run(grad_y: Tensor, x: Tensor, param: Tensor | None) -> tuple[Tensor, ...]:
        gradients = ours.activation_bwd(grad_y, x, param, activation=activation)
        return ours.activation_fwd(x, param, activation=activation), *gradients

    check_activation(activation, dtype, run, [(2,), (1, 2), (7, 64), (3, 5, 34), (0, 4), (3, 300), (300, 6)])


def test_tensors_of_another_size_are_an_error() -> None:
    activations, readout = leaf("activations", "triton"), leaf("linear_cross_entropy", "triton")
    x = torch.randn(3, 4)
    with pytest.raises(InputError, match="^activation: act_param must have 4 elements, got 3"):
        activations.activation_fwd(x, torch.ones(3), activation="prelu")
    with pytest.raises(InputError, match="^activation: grad_y must have 12 elements, got 8"):
        activations.activation_bwd(x[:2], x, None, activation="tanh")
    with pytest.raises(InputError, match="^linear_cross_entropy_fwd: target must have 3 elements, got 2"):
        readout.linear_cross_entropy_fwd(x, Readout(torch.randn(5, 4), None, torch.zeros(2, dtype=torch.int64), "sum"))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("R", "N", "C"), [(1, 1, 1), (70, 33, 10), (33, 40, 17), (5, 34, 128), (4, 7, 129), (3, 5, 300)]
)
def test_linear_cross_entropy_parity(R: int, N: int, C: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, reference = leaf("linear_cross_entropy", "triton"), leaf("linear_cross_entropy", "reference")
    monkeypatch.setattr(ours, "CHUNK_ELEMENTS", 64 * C)  # two chunks of 70 rows
    monkeypatch.setattr(ours, "ROW_BLOCK_C", 64)
    for bias in (None, torch.randn(C)):
        inputs = (5 * torch.randn(R, N), torch.randn(C, N), bias, torch.randint(0, C, (R,)))
        exact = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
        results = [
            f.linear_cross_entropy_fwd(args[0], Readout(*args[1:], reduction))
            for f, args in ((ours, inputs), (reference, exact), (reference, inputs))
        ]
        for name, *three in zip(("loss", "grad_hidden", "grad_weight", "grad_bias"), *results, strict=True):
            if bias is None and name == "grad_bias":
                assert three == [None] * 3
                continue
            assert_matches_reference(*three, name=name, gradient=name != "loss")
        readout = Readout(*inputs[1:], reduction)
        loss, *others = ours.linear_cross_entropy_fwd(inputs[0], readout, need_grad=False)
        assert torch.equal(loss, results[0][0]) and others == [None] * 3


@pytest.mark.parametrize("C", [9, 200])
def test_targets_out_of_range_and_large_logits(C: int) -> None:
    """Nobody looks at targets on the host: such a row is NaN, and no other one is. Logits of 1e4 do not overflow."""
    ours = leaf("linear_cross_entropy", "triton")
    hidden, weight, target = 1e3 * torch.randn(6, 10), 10 * torch.randn(C, 10), torch.randint(0, C, (6,))
    loss, grad_hidden, *_ = ours.linear_cross_entropy_fwd(hidden, Readout(weight, None, target))
    exact = leaf("linear_cross_entropy", "reference").linear_cross_entropy_fwd(
        hidden.double(), Readout(weight.double(), None, target)
    )
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-5, atol=0)
    target[1], target[4] = C, -1
    loss, wrong, *_ = ours.linear_cross_entropy_fwd(hidden, Readout(weight, None, target))
    good = torch.tensor([0, 2, 3, 5])
    assert bool(loss.isnan()) and bool(wrong[[1, 4]].isnan().all()) and torch.equal(wrong[good], grad_hidden[good])


def test_many_rows_for_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that loop over several tiles of rows."""
    ours, reference = leaf("activations", "triton"), leaf("activations", "reference")
    monkeypatch.setattr(ours, "MAX_PARTIALS", 3)
    monkeypatch.setattr(ours, "TILE", 16)
    x, grad_y, param = torch.randn(61, 4).double(), torch.randn(61, 4).double(), torch.randn(4).double()
    for one, other in zip(
        ours.activation_bwd(grad_y, x, param, activation="prelu"),
        reference.activation_bwd(grad_y, x, param, activation="prelu"),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_special_values(activation: str, dtype: torch.dtype) -> None:
    forward = leaf("activations", "triton").activation_fwd
    check_special_values(activation, dtype, lambda x, param: forward(x, param, activation=activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_tanh_is_accurate_everywhere(dtype: torch.dtype) -> None:
    check_tanh(dtype, lambda x: leaf("activations", "triton").activation_fwd(x, None, activation="tanh"), 4)


SHAPES = [(1, 1), (2, 2), (5, 3), (33, 33), (12, 11), (40, 7), (17, 1), (3, 9, 9), (2, 3, 12, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_cayley_parity(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        m, g = bases(shape, dtype)
        for lr in (torch.tensor(-1.0), torch.rand(shape[:-2], dtype=dtype)):
            check_cayley(m, g, lr, leaf("cayley", "triton").cayley)


@pytest.mark.parametrize("words", [64, None])
def test_cayley_in_panels(words: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if words is not None:
        monkeypatch.setattr(leaf("cayley", "triton"), "PANEL_WORDS", words)
    n = 21 if words else 70
    m, g = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0].contiguous(), torch.randn(n, n).double()
    actual, expected = (leaf("cayley", b).cayley(m, g, 0.1) for b in ("triton", "reference"))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("N", "K"), [(17, 17), (30, 7)])
def test_cayley_of_a_nan_takes_no_row_beyond_the_matrix(
    N: int, K: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pivot: a panel has 32 rows for 17 and 16 for 14, and a compiled search may return one of those."""
    monkeypatch.setattr(tl, "argmax", interpreter.argmax_as_compiled)
    m = torch.linalg.qr(torch.randn(2, N, K, dtype=torch.float64))[0].contiguous()
    g = torch.randn(2, N, K, dtype=torch.float64)
    good, expected = (leaf("cayley", backend).cayley(m, g, 0.1) for backend in ("triton", "reference"))
    torch.testing.assert_close(good, expected)
    for tensor in (m, g):
        finite = tensor[1, 2, 3].clone()
        tensor[1, 2, 3] = bad
        actual = leaf("cayley", "triton").cayley(m, g, 0.1)
        assert torch.equal(actual[0], good[0]) and actual[1].isnan().any()
        tensor[1, 2, 3] = finite
