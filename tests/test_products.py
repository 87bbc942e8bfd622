"""Products by oneDNN, where torch's own are slower: values, gradients of every kind, and when they are taken."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from float_products import FloatProducts
from torch import Tensor

from orthokern import _products
from orthokern._products import add_product, ieee_products, product
from orthokern.nn import PeepholeLSTM
from orthokern.ops._linear import linear

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every CPU, and for the smallest products."""
    monkeypatch.setattr(_products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(_products, "_SMALL", 0)


def close(actual: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(actual.double(), exact.double(), rtol=2e-5, atol=2e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(("R", "K", "C"), [(1, 1, 1), (7, 63, 10), (130, 65, 257), (33, 200, 1), (1000, 20, 9)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_product(R: int, K: int, C: int, layout: str) -> None:
    def drawn(*shape: int) -> Tensor:
        if layout == "transposed":
            return torch.randn(*shape[::-1]).mT
        return torch.randn(shape[0], 2 * shape[1])[:, ::2] if layout == "strided" else torch.randn(*shape)

    left, right, bias, total = drawn(R, K), drawn(K, C), drawn(1, C)[0], drawn(K, C)
    close(product(left, right), left.double() @ right.double())
    close(product(left, right, bias), left.double() @ right.double() + bias.double())
    rows = drawn(R, C)
    expected = total.double() + left.double().mT @ rows.double()
    add_product(total, left, rows)
    close(total, expected)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_of_linear(with_bias: bool) -> None:
    shapes = [(6, 3, 17), (11, 17), *([(11,)] if with_bias else [])]
    inputs = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = torch.randn(6, 3, 11)

    def second(given: list[Tensor], function: Any) -> list[Tensor]:
        out = function(*given)
        first = torch.autograd.grad(out, given, grad.to(out.dtype), create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in first), given[:2])
        plain = torch.autograd.grad(function(*given), given, grad.to(out.dtype))
        return [out, *first, *again, *plain]

    for actual, want in zip(second(inputs, linear), second(exact, torch.nn.functional.linear), strict=True):
        close(actual.detach(), want.detach())


def test_batched_gradients_of_linear() -> None:
    x, weight = torch.randn(3, 17), torch.randn(5, 17, requires_grad=True)
    y, cotangents = linear(x, weight), torch.randn(4, 3, 5)
    (gradients,) = torch.autograd.grad(y, weight, cotangents, is_grads_batched=True)
    close(gradients, cotangents.mT.double() @ x.double())
    close(linear(x[0], weight).detach(), y[0].detach())


def test_products_are_ieee() -> None:
    """oneDNN rounds factors to bfloat16 on some CPUs if the process allows it."""
    x, w = torch.randn(300, 300, requires_grad=True), torch.randn(50, 300, requires_grad=True)
    with FloatProducts() as seen:
        out = linear(x, w)
        torch.autograd.grad(out.sum(), [x, w])
        states, _ = PeepholeLSTM(300, 7)(x.unsqueeze(1))
        states.sum().backward()
    assert {"_linear_pointwise", "addmm_"} <= seen.seen
    close(out.detach(), x.detach().double() @ w.detach().double().mT)


def settings() -> list[Any]:
    """The precision of products of float32, also where it is inherited."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        return [torch.get_float32_matmul_precision()]
    return [kind.fp32_precision for kind in (backends, backends.mkldnn, backends.cuda.matmul, backends.mkldnn.matmul)]


def test_threads_share_one_setting() -> None:
    """The contexts of two threads overlap: products are IEEE until the last one ends, and the setting is restored."""
    before, entered, leave = torch.get_float32_matmul_precision(), threading.Event(), threading.Event()

    def other() -> None:
        with ieee_products():
            entered.set()
            leave.wait(10)

    torch.set_float32_matmul_precision("medium")
    try:
        outside, thread = settings(), threading.Thread(target=other)
        with ieee_products():
            inside = settings()
            assert inside != outside
            thread.start()
            assert entered.wait(10)
        assert settings() == inside
        leave.set()
        thread.join()
        assert settings() == outside
        with ieee_products():  # and the setting may change while another thread is inside
            torch.set_float32_matmul_precision("medium")
            with ieee_products():
                assert settings() == inside
    finally:
        torch.set_float32_matmul_precision(before)
