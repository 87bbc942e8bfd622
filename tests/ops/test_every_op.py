"""What holds for several ops at once: torch.compile, half precision.

The opcheck of an op is in the file of the op.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from helpers import DTYPES, SHORT, GruProblem, call_functional, compiled, gradients, on_threads, scan_problem
from peephole_problem import PeepholeProblem
from torch import Tensor

from orthokern import InputError, dispatch, functional
from orthokern.nn import GRU, RNN, FactorizedRNN
from orthokern.ops import _taps
from orthokern.ops._taps import tap
from orthokern.optim import GeodesicSGD


def test_a_compiler_meets_the_reference_as_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by the call or by the process; plain torch code of T steps would be unrolled, and needs an import."""
    problem = scan_problem("factored_scan", B=3, T=5, N=4, inputs="tokens")
    m, g = torch.linalg.qr(torch.randn(4, 4))[0], torch.randn(4, 4)
    expected = gradients(problem, call_functional, backend="reference")
    for default, options in (("auto", {"backend": "reference"}), ("reference", {})):
        monkeypatch.setattr(dispatch, "_process_default", default)
        torch.testing.assert_close(gradients(problem, compiled(call_functional), **options), expected)
        stepped = compiled(lambda m, g, o=options: functional.cayley(m, g, 0.1, **o))(m, g)
        torch.testing.assert_close(stepped, functional.cayley(m, g, 0.1))
        activated = compiled(lambda x, o=options: functional.activation(x, "tanh", **o))(g)
        torch.testing.assert_close(activated, g.tanh())


@pytest.mark.parametrize("N", [9, 300])  # 300: where a factored scan forms no M for few rows
@pytest.mark.parametrize("rows", [(1, 1), (1, 30), (3, 2), (40, 3)], ids="T{0[0]}-B{0[1]}".format)
@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("name", ["factored_scan", "dense_scan", "leak", "kanai", "torch"])
def test_other_gradients_without_that_of_h0(name: str, resets: bool, rows: tuple[int, int], N: int) -> None:
    """The last product of a backward is left out where h0 needs no gradient. No other gradient changes."""
    (T, B), gru = rows, name in ("kanai", "torch")
    width = 3 * N if gru else N
    h0, w = torch.randn(B, N), (torch.randn(width, N) / N**0.5).requires_grad_()
    x, s = torch.randn(T, B, width, requires_grad=True), torch.rand(N, requires_grad=True)
    options: dict[str, Any] = {"variant": name} if gru else {"activation": "tanh"}
    if resets:
        options |= {"resets": torch.rand(T, B) < 0.5, "reset_state": torch.randn(B, N, requires_grad=True)}
    if name == "leak":
        options["leak"] = torch.rand(N).clamp(0.1).requires_grad_()
    leaves = [t for t in (x, w, s, *options.values()) if isinstance(t, Tensor) and t.requires_grad]

    def grads(h0: Tensor) -> tuple[Tensor | None, ...]:
        if gru:
            hs = functional.gru_scan(x, w, h0, **options)
        elif name == "dense_scan":
            hs = functional.dense_scan(x, w, h0, **options)
        else:
            hs = functional.factored_scan(x, w, s, w, h0, **options)
        return torch.autograd.grad(hs.sin().sum(), leaves, allow_unused=True)

    for a, b in zip(grads(h0), grads(h0.clone().requires_grad_()), strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("op", ["kanai", "torch", "peephole_scan"])
def test_threads_that_share_the_columns_change_no_bit(isa: str, op: str, dtype: torch.dtype) -> None:
    """Few sequences with weights of more than 256 KiB: states, and gates and pre-activations that the backward reads;
    and more threads than there are processors."""
    for steps, batch in ((9, 1), (5, 2)):
        if op == "peephole_scan":
            problem = PeepholeProblem.random(steps, batch, 263).to(dtype)
            forward = functools.partial(torch.ops.orthokern.peephole_scan_fwd, *problem.inputs(), "cpu")
        else:
            args = GruProblem.random(op, steps, batch, 263).to(dtype).args(backend="cpu")
            forward = functools.partial(torch.ops.orthokern.gru_scan_fwd, *args)
        first, *others = on_threads((1, 3, 7), forward)
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_compiled_training_step() -> None:
    """Everything in one graph: scan, readout with its loss, activation, and their gradients."""

    def loss_of(u: Tensor, s: Tensor, w: Tensor, b: Tensor, x: Tensor, target: Tensor) -> Tensor:
        hs = functional.factored_scan(x, u, functional.spectrum(s, 0.1), u, activation="tanh")
        return 3.0 * functional.linear_cross_entropy(functional.modrelu(hs, b), w, target)

    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((6, 6), (6,), (5, 6), (6,))]
    x, target = torch.randn(4, 3, 6), torch.randint(0, 5, (4, 3))
    expected, actual = (function(*leaves, x, target) for function in (loss_of, compiled(loss_of)))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves))


def test_compiled_code_checks_values_too() -> None:
    """Token ids are known only when the graph runs; nothing may index with them unchecked."""
    problem = scan_problem("dense_scan", B=2, T=3, N=4, D=5, inputs="tokens")
    run = compiled(call_functional)
    problem.x[1, 1] = 5
    with pytest.raises(InputError, match=r"the input holds 5: token ids must be in \[0, 5\)"):
        run(problem, list(problem.inputs()))
    problem.x[1, 1] = 4
    with pytest.raises(InputError, match=r"lengths holds 9: lengths must be in \[1, T\] = \[1, 3\]"):
        run(problem, list(problem.inputs()), lengths=torch.tensor([3, 9]))
    readout, target = torch.ones(4, 5), torch.tensor([3, 4])
    with pytest.raises(InputError, match=r"target holds 4: class ids must be in \[0, 4\)"):
        compiled(functional.linear_cross_entropy)(torch.ones(2, 5), readout, target)
    with pytest.raises(InputError, match="m holds 16 NaN or infinite values of 16"):
        compiled(functional.cayley)(torch.full((4, 4), torch.nan), torch.zeros(4, 4), 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_on_the_reference(dtype: torch.dtype) -> None:
    problem = scan_problem("factored_scan", B=3, T=4, N=4, inputs="features").to(dtype)
    with tap() as taken:
        hs, *grads = gradients(problem, call_functional)
    assert hs.dtype == dtype and {grad.dtype for grad in grads} == {dtype}
    assert taken.grad_norms[0].dtype == torch.float32
    exact = gradients(problem.to(torch.float64), call_functional)
    for a, e in zip((hs, *grads), exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0.1, atol=0.1)
    hidden, weight = torch.randn(9, 4).to(dtype).requires_grad_(), torch.randn(3, 4).to(dtype).requires_grad_()
    functional.linear_cross_entropy(hidden, weight, torch.randint(0, 3, (9,))).backward()
    assert hidden.grad is not None and hidden.grad.dtype == dtype


@pytest.mark.parametrize("steps", [10, 600])  # 600: results of more than a mebibyte, in memory that is kept
def test_results_can_be_changed_in_place(steps: int) -> None:
    rnn, factor = RNN(8, 64), torch.ones(64, requires_grad=True)
    x = torch.randn(steps, 16, 8)
    with torch.no_grad():
        out, _ = rnn(x)
    out.mul_(factor)
    rnn(x)[0].detach_()
    hidden = functional.activation(torch.randn(steps, 16, 64, requires_grad=True), "tanh")
    torch.nn.functional.dropout(hidden + 0.0, 0.5, True, inplace=True).sum().backward()
    torch.nn.functional.relu_(functional.activation(hidden.detach().requires_grad_(), "relu"))
    states, _ = rnn(x)
    with torch.no_grad():
        states.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


def test_tensors_with_the_negative_bit() -> None:
    """Imaginary parts of conjugates, of which torch stores the negative."""

    def negative(x: Tensor) -> Tensor:
        return torch._neg_view(-x)

    x, h, bias = torch.randn(3, 4), torch.randn(1, 3, 8), torch.randn(5)
    for module in (RNN(4, 8), GRU(4, 8), FactorizedRNN(4, 8)):
        frozen = module.frozen()
        assert torch.equal(frozen.step(negative(x), negative(h))[0], frozen.step(x, h)[0])
    u, v = (torch.linalg.qr(torch.randn(8, 8))[0] for _ in range(2))
    arguments = (torch.randn(9, 3, 8), (u, torch.ones(8), v), torch.randn(5, 8), torch.randint(0, 5, (9, 3)))
    options = {"activation": "identity", "algorithm": "modal"}
    losses = [functional.scan_cross_entropy(*arguments, readout_bias=b, **options).loss for b in (bias, negative(bias))]
    assert torch.equal(*losses)
    gradient, moved = torch.randn(8, 8), []
    for grad in (gradient, negative(gradient)):
        p = torch.nn.Parameter(u.clone())
        p.grad = grad
        GeodesicSGD([p], 0.1).step()
        moved.append(p.detach())
    assert torch.equal(*moved)


def test_taps_of_two_threads() -> None:
    """One closes its tap, and opens another, while the other computes with all taps set aside."""
    aside, changed = threading.Event(), threading.Event()

    def other() -> None:
        with _taps.set_aside():
            aside.set()
            changed.wait(10)

    thread = threading.Thread(target=other)
    with tap():
        thread.start()
        aside.wait(10)
    with tap() as opened:
        changed.set()
        thread.join()
        assert _taps.SINKS == [opened]
    assert _taps.SINKS == []


def test_gradients_of_no_rows_are_zeros() -> None:
    """Of the ops that the public functions, which refuse empty batches, call."""
    ops = torch.ops.orthokern
    ids, weight, modes = torch.empty(0, dtype=torch.int64), torch.ones(3, 4), torch.ones(2, dtype=torch.float64)
    loss, _, *results = ops.linear_cross_entropy_fwd(torch.empty(0, 4), weight, weight[:, 0], ids, "sum", True, "cpu")
    states = torch.empty(3, 0, 4)
    x, re, im, *_ = ops.rotation_scan_bwd(states, states, True, states, modes, modes, states[0], backend="cpu")
    assert x.shape == states.shape
    for result in (loss, *results, re, im):
        assert torch.equal(result, torch.zeros_like(result))
