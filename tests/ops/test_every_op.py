"""What holds for several ops at once: that they are built, torch.compile, half precision.

The opcheck of an op is in the file of the op.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from helpers import SCANS, GruProblem, call_functional, compiled, gradients, leaf_tensors, scan_problem
from torch import Tensor

from orthokern import InputError, cpu, dispatch, functional, ops
from orthokern.ops._taps import tap


def test_the_scans_and_the_cayley_step_have_cpu_kernels() -> None:
    built = [op for op in ops.NAMES if getattr(ops, op).SUPPORT["cpu"].missing is None]
    assert set(built) >= {*SCANS, "cayley"}
    for op in built if cpu.AVAILABLE else ():
        assert dispatch.absence(op, "cpu") is None, op


def test_a_compiler_meets_the_reference_as_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by the call or by the process; plain torch code of T steps would be unrolled, and needs an import."""
    problem = scan_problem("factored_scan", B=3, T=5, N=4, inputs="tokens")
    m, g = torch.linalg.qr(torch.randn(4, 4))[0], torch.randn(4, 4)
    expected = gradients(problem, call_functional, backend="reference")
    for default, options in (("auto", {"backend": "reference"}), ("reference", {})):
        monkeypatch.setattr(dispatch, "_process_default", default)
        for a, e in zip(gradients(problem, compiled(call_functional), **options), expected, strict=True):
            torch.testing.assert_close(a, e)
        stepped = compiled(lambda m, g, o=options: functional.cayley(m, g, 0.1, **o))(m, g)
        torch.testing.assert_close(stepped, functional.cayley(m, g, 0.1))
        activated = compiled(lambda x, o=options: functional.activation(x, "tanh", **o))(g)
        torch.testing.assert_close(activated, g.tanh())


def test_compiled_training_step() -> None:
    """Everything in one graph: scan, readout with its loss, activation, and their gradients."""

    def loss_of(u: Tensor, s: Tensor, w: Tensor, b: Tensor, x: Tensor, target: Tensor) -> Tensor:
        hs = functional.factored_scan(x, u, functional.spectrum(s, 0.1), u, activation="tanh")
        return 3.0 * functional.linear_cross_entropy(functional.modrelu(hs, b), w, None, target)

    torch.manual_seed(0)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((6, 6), (6,), (5, 6), (6,))]
    x, target = torch.randn(4, 3, 6), torch.randint(0, 5, (4, 3))
    expected, actual = (function(*leaves, x, target) for function in (loss_of, compiled(loss_of)))
    torch.testing.assert_close(actual, expected)
    for a, e in zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, e)


def test_compiled_code_checks_values_too() -> None:
    """Token ids are known only when the graph runs; nothing may index with them unchecked."""
    problem = scan_problem("dense_scan", B=2, T=3, N=4, D=5, inputs="tokens")
    run = compiled(call_functional)
    problem.x[1, 1] = 5
    with pytest.raises(InputError, match=r"x holds 5: token ids must be in \[0, 5\)"):
        run(problem, list(problem.inputs()))
    problem.x[1, 1] = 4
    with pytest.raises(InputError, match=r"lengths holds 9: lengths must be in \[1, T\] = \[1, 3\]"):
        run(problem, list(problem.inputs()), lengths=torch.tensor([3, 9]))
    with pytest.raises(InputError, match="m holds 16 NaN or infinite values of 16"):
        compiled(functional.cayley)(torch.full((4, 4), torch.nan), torch.zeros(4, 4), 0.1)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_activation_checkpointing(backend: str | None) -> None:
    """Its backward runs the forward again while it hands out what was saved: that has to be recorded."""
    scan, gru = scan_problem("factored_scan", B=2, T=5, N=4, inputs="features"), GruProblem.random("kanai", 5, 2, 4)
    target = torch.tensor([0, 2, 1])
    cases: list[tuple[list[Tensor | None], Callable[..., Tensor]]] = [
        (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), backend=backend)),
        (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), checkpoint_every=2, backend=backend)),
        ([gru.x, gru.w], lambda x, w: functional.gru_scan(x, w, backend=backend)),
        ([torch.randn(3, 4)], lambda x: functional.activation(x, "relu", backend=backend)),
        ([torch.randn(4, 4)], lambda x: functional.skew_exp(x, backend=backend)),
        ([torch.randn(3, 4)], lambda x: functional.linear_cross_entropy(x, x, None, target, backend=backend)),
    ]
    for given, function in cases:
        wanted = [t.detach().requires_grad_() for t in given if t is not None]
        given = [None if t is None else wanted.pop(0) for t in given]
        wanted = [t for t in given if t is not None]
        expected = torch.autograd.grad(function(*given).square().sum(), wanted)
        again = torch.utils.checkpoint.checkpoint(function, *given, use_reentrant=False)
        for a, e in zip(torch.autograd.grad(again.square().sum(), wanted), expected, strict=True):
            assert torch.equal(a, e)


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
    functional.linear_cross_entropy(hidden, weight, None, torch.randint(0, 3, (9,))).backward()
    assert hidden.grad is not None and hidden.grad.dtype == dtype
