"""Checks of a call against the reference, for the tests of all backends, on the host harness and on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from comparison import assert_matches_reference
from helpers import GruProblem, ScanProblem, assert_same_bits, run_scan, scan_needs
from torch import Tensor

from orthokern._scan_contract import ScanGradients
from orthokern.ops.activations import PARAMETER


def assert_each_result_alone(problem: ScanProblem, backend: str) -> None:
    """A backward for one result, or for all but one, returns only these, bit-identical."""
    namespace = torch.ops.orthokern
    fwd, bwd = getattr(namespace, f"{problem.op}_fwd"), getattr(namespace, f"{problem.op}_bwd")
    args = problem.args(backend=backend)
    hs, _, pre = fwd(*args)
    everything = bwd(problem.grad_hs, hs, pre, *scan_needs(), *args)
    for alone, name in itertools.product((True, False), ("", *ScanGradients._fields)):
        needs = [(field == name) == alone for field in ScanGradients._fields]
        for need, one, full in zip(needs, bwd(problem.grad_hs, hs, pre, *needs, *args), everything, strict=True):
            assert torch.equal(one, full) if need else not one.numel(), name


def assert_unchanged(problem: Any, before: Any) -> None:
    """Every tensor of a problem equals that of its clone."""
    for field in dataclasses.fields(problem):
        one, other = (getattr(each, field.name) for each in (problem, before))
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs), field.name


def check_scan(problem: ScanProblem, dtype: torch.dtype, backend: str, **options: Any) -> None:
    """The parity of all results of one problem, each in its own memory; the inputs are not changed."""
    torch.set_num_threads(2 if problem.h0.shape[0] > 3 else 1)
    inexact = problem.to(dtype)
    before, actual = inexact.clone(), run_scan(inexact, backend, **options)
    assert_scan_parity(inexact, actual, functools.partial(run_scan, backend="reference"), options)
    assert_unchanged(inexact, before)
    addresses = [t.untyped_storage().data_ptr() for t in actual.values() if t.numel()]
    given = {t.untyped_storage().data_ptr() for t in inexact.inputs() if t is not None}
    assert len({*addresses, *given}) == len(addresses) + len(given), "an output shares memory"


def check_gru(
    problem: GruProblem, dtype: torch.dtype, run: Callable[..., dict[str, Tensor]], lengths: Tensor | None = None
) -> dict[str, Tensor]:
    """The parity of all results of one problem, by a function of a problem and lengths; returns them."""
    inexact = problem.to(dtype)
    before, actual = inexact.clone(), run(inexact, lengths=lengths)
    expected, plain = (p.run("reference", lengths=lengths) for p in (inexact.map(Tensor.double), inexact))
    for name, tensor in actual.items():
        assert_matches_reference(tensor, expected[name], plain[name], name=name, gradient="grad" in name)
    assert_unchanged(inexact, before)
    return actual


def assert_scan_parity(
    inexact: ScanProblem,
    actual: dict[str, Tensor],
    reference: Callable[..., dict[str, Tensor]],
    options: dict[str, Any],
) -> None:
    """``actual`` agrees with the reference, a function of a problem and options."""
    exact = inexact.to(torch.float64)  # of the very numbers that the kernel sees
    same = {key: value for key, value in options.items() if key in ("lengths", "message_clip")}
    expected = reference(exact, **same)
    plain = expected if inexact.h0.dtype == torch.float64 else reference(inexact, **same)
    scales = {}
    for field in ("act_param", "leak"):
        parameter = getattr(exact, field)
        if parameter is not None and parameter.numel() == 1:
            # one number, a sum of N terms, one for each unit: its error is relative to these terms
            each_unit = dataclasses.replace(exact, **{field: parameter.expand(exact.h0.shape[1])})
            scales[f"grad_{field}"] = float(reference(each_unit, **same)[f"grad_{field}"].norm())
    for name in actual:
        if name == "ckpt" or (name == "pre" and options.get("checkpoint_every")):
            continue
        gradient = name.startswith("grad_")
        assert_matches_reference(
            actual[name], expected[name], plain[name], name=name, gradient=gradient, scale=scales.get(name)
        )


def check_padding(
    problem: ScanProblem,
    lengths: Tensor | None,
    run: Callable[..., dict[str, Tensor]],
    everys: Sequence[int],
    **more: Any,
) -> dict[str, Tensor]:
    """Zeros on padding, and bit-identical results for any padding and with checkpoints; returns the results.

    Args:
        lengths: None for no padding.
        run: the results of a problem and options.
        everys: values of checkpoint_every.
    """
    options = {"lengths": lengths, **more}
    first, poisoned = run(problem, **options), problem
    if lengths is not None:
        padding = torch.arange(len(problem.x)).unsqueeze(1) >= lengths
        for name in ("hs", "pre", "grad_x"):
            assert not first[name].numel() or not first[name][padding].any(), name
        poisoned = problem.with_poisoned_padding(lengths)
        assert_same_bits(first, run(poisoned, **options))
    before = torch.cat([problem.h0.unsqueeze(0), first["hs"]])[:-1]
    for every in everys:
        again = run(poisoned, checkpoint_every=every, **options)
        assert_same_bits(first, again, skip=("ckpt", "pre"))
        assert torch.equal(again["ckpt"], before[::every])
    return first


def activation_by(activation: str, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    """The ops as one function of (grad_y, x, act_param): y and the gradients of x and act_param."""

    def run(grad_y: Tensor, x: Tensor, param: Tensor | None) -> tuple[Tensor, ...]:
        ops = torch.ops.orthokern
        gradients = ops.activation_bwd(grad_y, x, param, activation, backend)
        return ops.activation_fwd(x, param, activation, backend), *gradients

    return run


def check_activation(
    activation: str, dtype: torch.dtype, run: Callable[..., Sequence[Tensor]], shapes: Sequence[tuple[int, ...]]
) -> None:
    """The parity of a function like those of `activation_by`, with every size of the parameter."""
    reference = activation_by(activation, "reference")
    for shape in shapes:
        for size in (1, shape[-1]) if activation in PARAMETER else (0,):
            x, grad_y = (3 * torch.randn(shape, dtype=dtype) for _ in range(2))
            if x.numel() > 2:
                x.view(-1)[0] = 0.0  # a kink, hit exactly
            given = grad_y, x, 0.3 * torch.randn(size, dtype=dtype) if size else None
            exact = [None if t is None else t.double() for t in given]
            results = run(*given), reference(*exact), reference(*given)
            for name, *three in zip(("y", "grad_x", "grad_act_param"), *results, strict=True):
                assert_matches_reference(*three, name=f"{name} of {shape}", gradient=name != "y")


def check_special_values(activation: str, dtype: torch.dtype, run: Callable[..., Tensor]) -> None:
    """For infinities, NaN, tiny and large arguments, a function of x and act_param agrees with plain torch."""
    inf, nan, tiny = float("inf"), float("nan"), torch.finfo(dtype).tiny
    x = torch.tensor([0.0, -0.0, tiny, -tiny, 1e4, -1e4, inf, -inf, 88, -88, 1e-6, -1e-6, nan, 1], dtype=dtype)
    param = torch.tensor([0.25], dtype=dtype) if activation in PARAMETER else None
    expected = torch.ops.orthokern.activation_fwd(x, param, activation, "reference")
    torch.testing.assert_close(run(x, param), expected, equal_nan=True)


def check_tanh(dtype: torch.dtype, run: Callable[[Tensor], Tensor], bound: float) -> None:
    """The relative error everywhere, in units of rounding: small arguments matter in a long scan."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-30, 1, 2001), -torch.logspace(-30, 1, 2001)])
    exact = torch.tanh(x.to(dtype).double())
    error = ((run(x.to(dtype)).double() - exact) / exact.abs().clamp(min=1e-300)).abs()[exact != 0]
    assert error.max() <= bound * torch.finfo(dtype).eps, f"{dtype}: relative error {error.max():.3e}"


def gram_error(w: Tensor) -> Tensor:
    """||W W^T - I||_F^2 of the smaller Gram matrix, [...] of w [..., n, m], in float64."""
    w = w.detach().double()
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).square().sum((-2, -1))


def check_cayley(m: Tensor, g: Tensor, lr: Tensor, step: Callable[..., Tensor]) -> Tensor:
    """The parity of a step, a function of (m, g, lr), whose columns are orthonormal to rounding; returns it."""
    reference = torch.ops.orthokern.cayley
    actual, plain = step(m, g, lr), reference(m, g, lr, "reference")
    assert_matches_reference(actual, reference(m.double(), g.double(), lr, "reference"), plain, name=f"lr={lr}")
    gram = actual.double().mT @ actual.double() - torch.eye(m.shape[-1], dtype=torch.float64)
    assert gram.abs().max() < 64 * torch.finfo(m.dtype).eps * max(1.0, m.shape[-2] ** 0.5)
    return actual
