"""gru_scan: the reference by single steps, kernels against the reference, the op's registration."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from checks import check_gru
from helpers import GruProblem, assert_same_bits, compiled, gru_needs, on_threads, refused, some_lengths, strided
from torch import Tensor

from orthokern import dispatch, functional
from orthokern.ops.gru_scan import VARIANTS
from orthokern.reference import gru_scan as reference

NAMESPACE = torch.ops.orthokern
WHY_NO_CPU = dispatch.absence("gru_scan", "cpu")
needs_cpu = pytest.mark.skipif(WHY_NO_CPU is not None, reason=f"cpu: {WHY_NO_CPU}")


# ------------------------------------------------------------------------------------------------------------ reference


def test_kanai_by_the_paper() -> None:
    """Equations 1 to 4, one sequence, one step at a time, written down from the paper."""
    p = GruProblem.random("kanai", 6, 1, 5, bias=False)
    w_r, w_z, w_h = p.w.split(5)
    h = p.h0[0]
    for x_t, h_t in zip(p.x, reference.gru_scan_fwd(p.args()).hs, strict=True):
        x_r, x_z, x_h = x_t[0].split(5)
        z = 1 / (1 + torch.exp(-(x_z + w_z @ h)))
        r = 1 / (1 + torch.exp(-(x_r + w_r @ h)))
        candidate = torch.tanh(x_h + w_h @ (r * h))
        h = z * h + (1 - z) * candidate
        torch.testing.assert_close(h_t[0], h)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resets_and_lengths_are_cuts(variant: str, state: bool) -> None:
    """Of the reference, with which kernels are compared: its states are those of single steps."""
    p, lengths = GruProblem.random(variant, 7, 5, 9, bias=state).with_resets(state=state), some_lengths(5, 7, "any")
    start, expected = p.reset_state if state else torch.zeros_like(p.h0), torch.zeros_like(p.grad_hs)
    options: dict[str, Any] = {"bias": p.bias, "variant": variant, "backend": "reference"}
    for b, length in enumerate(lengths.tolist()):
        h = p.h0[b : b + 1]
        for t in range(length):
            h = start[b : b + 1] if p.resets[t, b] else h
            h = functional.gru_scan(p.x[t : t + 1, b : b + 1], p.w, h, **options)[0]
            expected[t, b] = h[0]
    actual = p.run("reference", lengths=lengths)
    torch.testing.assert_close(actual["hs"], expected, rtol=1e-12, atol=1e-13)
    assert_same_bits(actual, p.with_poisoned_padding(lengths).run("reference", lengths=lengths))


# -------------------------------------------------------------------------------------------------------------- kernels

SIZES = [(7, 3, 63), (5, 2, 1), (1, 3, 8), (4, 1, 16), (5, 4, 17), (3, 26, 33), (4, 20, 130), (3, 5, 200), (2, 230, 20)]


@needs_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["whole", "ragged", "resets"])
def test_cpu_matches_the_reference(kind: str, variant: str, dtype: torch.dtype) -> None:
    for index, (T, B, N) in enumerate(SIZES):
        torch.set_num_threads(1 + index % 2)
        options: dict[str, Any] = {}
        if kind == "ragged" or (kind == "resets" and index % 3):
            lengths = some_lengths(B, T, ("any", "rising", "falling")[index % 3], seed=index)
            lengths -= (lengths == T).long() * (index % 2)  # no sequence has the last step
            options["lengths"] = lengths.clamp(min=1)
        inexact = GruProblem.random(variant, T, B, N, bias=index % 3 != 0, seed=index).to(dtype)
        if kind == "resets":
            inexact = inexact.with_resets((0.1, 0.6)[index % 2], state=index != 2, seed=index)
        actual = check_gru(inexact, dtype, functools.partial(GruProblem.run, backend="cpu"), **options)
        if options:
            assert_same_bits(actual, inexact.with_poisoned_padding(options["lengths"]).run("cpu", **options))
        else:  # dL/dh_t of the states as they are: that of the last one is its own cotangent
            torch.testing.assert_close(actual["grad_norm"][-1], inexact.grad_hs[-1].norm())
    assert_same_bits(inexact.run("cpu"), inexact.run("cpu", lengths=torch.full((B,), T)))


@needs_cpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_inputs_saturate_and_nans_stay(variant: str) -> None:
    """Gates far out are 0 and 1, with zero gradients and no overflow; a NaN reaches its own sequence only."""
    p = GruProblem.random(variant, 4, 3, 20).map(Tensor.float)
    p.x *= 1e4
    expected = p.map(Tensor.double).run("reference")
    for name, tensor in p.run("cpu").items():
        torch.testing.assert_close(
            tensor.double(), expected[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    p.x[1, 1, 5] = float("nan")
    hs = p.run("cpu")["hs"]
    assert hs[1:, 1].isnan().any(-1).all() and hs[:, [0, 2]].isfinite().all()


@needs_cpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_whatever_the_threads_strides_and_repetition(variant: str) -> None:
    p = GruProblem.random(variant, 6, 31, 37).map(Tensor.float)
    alone, again, first = on_threads((1, 2, 2), lambda: p.run("cpu"))
    for other in (again, p.map(strided).run("cpu")):
        assert_same_bits(first, other)
    for name in ("hs", "gates", "pre", "grad_x", "grad_h0"):  # sequences do not depend on each other
        assert torch.equal(alone[name], first[name]), name


@needs_cpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_backends_can_be_mixed(variant: str) -> None:
    p = GruProblem.random(variant, 5, 3, 18)
    expected = p.run("reference")
    for one, other in (("cpu", "reference"), ("reference", "cpu")):
        for name, tensor in p.run(one, other).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-11)


# ------------------------------------------------------------------------------------------------------------------- op


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("optional", [False, True], ids=["", "bias, lengths and resets"])
def test_opcheck_and_compile(optional: bool, variant: str) -> None:
    p = GruProblem.random(variant, 3, 2, 4, bias=optional)
    p, lengths = (p.with_resets(0.6), torch.tensor([3, 2])) if optional else (p, None)
    args, fwd, bwd = p.args(lengths=lengths), NAMESPACE.gru_scan_fwd.default, NAMESPACE.gru_scan_bwd.default
    leaves = p.map(lambda t: t.clone().requires_grad_(t.is_floating_point()))
    quick = ("test_schema", "test_faketensor", "test_autograd_registration")
    utils = (*quick, "test_aot_dispatch_dynamic") if optional else quick
    torch.library.opcheck(fwd, tuple(leaves.args(lengths=lengths)), test_utils=utils)
    saved = fwd(*args)
    for need_params in (False, True):
        given = (p.grad_hs, *saved, *gru_needs(need_params), *args._replace(x=None))
        torch.library.opcheck(bwd, given, test_utils=utils if need_params else quick)

    def run(function: Any) -> list[Tensor]:
        tensors = {name: getattr(leaves, name) for name in ("x", "w", "h0", "bias", "reset_state")}
        hs = function(**tensors, variant=variant, lengths=lengths, resets=p.resets)
        return [hs.detach(), *torch.autograd.grad(hs, [t for t in tensors.values() if t is not None], p.grad_hs)]

    torch.testing.assert_close(run(compiled(functional.gru_scan)), run(functional.gru_scan), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": torch.zeros(3, 3)}, "w has shape [3, 3]: accepted is [3N, N]"),
        ({"w": [1.0]}, "w must be a torch.Tensor"),
        ({"w": torch.zeros(6, 2, dtype=torch.int64)}, "w has dtype int64"),
        ({"x": torch.zeros(4, 1, 2)}, "x has shape [4, 1, 2]: accepted is [T, B, 3N] with 3N = 6"),
        ({"x": torch.zeros(4, 1, 6).double()}, "x has dtype float64"),
        ({"x": torch.zeros(0, 1, 6)}, "x has shape [0, 1, 6]: every size"),
        ({"h0": torch.zeros(2, 2)}, "h0 has shape [2, 2]: accepted is [B, N] = [1, 2]"),
        ({"bias": torch.zeros(2)}, "bias has shape [2]: accepted is [3N] = [6]"),
        ({"variant": "tourch"}, "unknown variant 'tourch': did you mean 'torch'?"),
        ({"backend": "gpu"}, "unknown backend 'gpu'"),
        ({"lengths": torch.ones(2, dtype=torch.int64)}, "lengths has shape [2]: accepted is [B] = [1]"),
        ({"lengths": torch.tensor([5])}, "lengths holds 5: lengths must be in [1, T] = [1, 4]"),
        ({"lengths": torch.ones(1)}, "lengths has dtype float32: accepted is int64"),
        ({"reset_state": torch.zeros(1, 2)}, "reset_state is float32 [1, 2] without resets: accepted with resets only"),
    ],
)
def test_wrong_inputs(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(4, 1, 6), "w": torch.zeros(6, 2)}
    functional.gru_scan(**arguments)
    assert refused(lambda: functional.gru_scan(**{**arguments, **changes})).startswith(message)
