"""precision="bf16" of factored_scan and dense_scan on the CPU.

Each step of the kernels is compared with float64 operations of torch whose products round both factors to bfloat16,
from the states and adjoints that the kernels found. A product of two such factors is exact in float32, so the two
differ by the rounding of float32 sums: CLOSE. In the factored map a sum is a factor of the next product. Where it lies
within its rounding error of the middle between two bfloat16 numbers, which is one sum of some 2^14, the two round it to
different ones, 2^-8 apart: BETWEEN. Both are relative and of the RMS. bfloat16 factors make a difference of about 2e-3,
here at least ROUNDED.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import (
    SCANS,
    ScanProblem,
    assert_same_bits,
    on_threads,
    run_scan,
    scan_needs,
    scan_problem,
    some_lengths,
    with_resets,
)
from torch import Tensor

from orthokern import cpu, functional, nn
from orthokern._map_gradients import without_m
from orthokern._scan_contract import ScanArgs
from orthokern.cpu import _call, _scan
from orthokern.cpu._call import has_amx, has_bf16
from orthokern.ops.activations import NAMES
from orthokern.reference import _scan as reference
from orthokern.reference.activations import activation_fwd, chain

needs_bf16 = pytest.mark.skipif(not has_bf16(), reason="no AVX512_BF16 on this CPU, or in the kernels in use")
CLOSE, BETWEEN, ROUNDED = 1e-6, 2e-4, 5e-4

# odd N, K, T and B; less than a vector of units; one sequence; several panels, row tiles and rings of rows
SIZES = [
    {"B": 3, "T": 7, "N": 63, "K": 7},
    {"B": 1, "T": 19, "N": 5, "K": 3},
    {"B": 7, "T": 5, "N": 16, "K": 15},
    {"B": 5, "T": 7, "N": 17, "K": 17},
    {"B": 26, "T": 9, "N": 98, "K": 81},
]
DEEP = [{"B": 3, "T": 7, "N": 530, "K": 526}, {"B": 30, "T": 7, "N": 297, "K": 293}]  # chunks of depth, four panels


@pytest.fixture(params=["vectors", "tiles"], autouse=True)
def registers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the products of AVX512_BF16, and with those of AMX."""
    if request.param == "vectors":
        monkeypatch.setattr(_scan, "has_amx", lambda: False)
    elif not has_amx():
        pytest.skip("no AMX on this CPU")


def rounded(t: Tensor) -> Tensor:
    return t.float().bfloat16().double()


def of_map(args: ScanArgs, delta: Tensor, before: Tensor) -> dict[str, Tensor]:
    """The gradients of W or of its factors, from rows of delta_t and h_{t-1}. Of the sums only that of M has rounded
    factors."""
    m = rounded(delta).mT @ rounded(before)
    if args.first is None or args.scale is None:
        return {"grad_second": m}
    u, s, v = args.second, args.scale, args.first
    m_v, mt_u = m @ v.double(), m.mT @ (u.double() * s)
    if without_m(len(delta), *u.shape):
        m_v, mt_u = delta.mT @ (before @ v.double()), before.mT @ (rounded(delta) @ rounded(u * s))
    return {"grad_first": mt_u, "grad_scale": (u * m_v).sum(0), "grad_second": m_v * s}


def emulated(problem: ScanProblem, result: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """What each step gives with rounded factors, in float64, from the states and adjoints that the kernels found."""
    args = problem.args(**options)
    (u, s, v), activation = ((args.second, args.scale, args.first), problem.activation)
    wide = problem.to(torch.float64)
    hs, delta, bias, x, weight = result["hs"].double(), result["delta"].double(), wide.bias, wide.x, wide.weight
    T, features = hs.shape[0], weight is not None and x.is_floating_point()
    alive = reference.running(T, args.lengths)
    if s is None or v is None:
        w = rounded(u)
        forward, backward = (lambda rows: rounded(rows) @ w.mT), (lambda rows: rounded(rows) @ w)
    else:  # the kernels multiply one of the two maps by s, in float32
        forward = lambda rows: rounded(rounded(rows) @ rounded(v * s)) @ rounded(u).mT  # noqa: E731
        backward = lambda rows: rounded(rounded(rows) @ rounded(u * s)) @ rounded(v).mT  # noqa: E731
    x = reference.without_padding(x, alive)
    if features:
        assert weight is not None
        e = rounded(x) @ rounded(weight).mT + (0 if bias is None else rounded(bias))
    else:
        e = reference.input_term(x, weight, bias)
    before = reference.started(torch.cat([wide.h0.unsqueeze(0), hs[:-1]]), problem.resets, wide.reset_state)
    before = reference.without_padding(before, alive)
    a = reference.without_padding(forward(before) + e, alive)

    message = backward(delta)
    kept = reference.started(message, problem.resets, None)
    ghat = reference.without_padding(wide.grad_hs, alive) + torch.cat([kept[1:], torch.zeros_like(kept[:1])])
    pre = result["pre"].double() if result["pre"].numel() else None
    deltas, to_param = chain(ghat, hs, pre, wide.act_param, activation=activation)
    if args.message_clip:
        deltas = deltas.clamp(-args.message_clip, args.message_clip)
    factor = rounded(delta) if features else delta
    results = {
        "hs": activation_fwd(a, wide.act_param, activation=activation),
        "delta": deltas,
        **of_map(args, delta.flatten(0, 1), before.flatten(0, 1)),
        "grad_h0": kept[0],
        "grad_norm": reference.norm_over_batch(ghat),
    }
    if to_param is not None:
        assert wide.act_param is not None
        results["grad_act_param"] = to_param.sum_to_size(wide.act_param.shape)
    if weight is not None:
        results["grad_weight"] = reference.weight_gradient(factor, rounded(x) if features else x, weight)
    if bias is not None:
        results["grad_bias"] = factor.sum((0, 1))
    if features:
        assert weight is not None
        results["grad_x"] = rounded(delta) @ rounded(weight)
    if weight is None:
        results["grad_x"] = deltas
    if problem.resets is not None and problem.reset_state is not None:
        results["grad_reset_state"] = (message - kept).sum(0)
    return results


def leaf_results(problem: ScanProblem, precision: str = "bf16", **options: Any) -> dict[str, Tensor]:
    """States, pre-activations, their gradients and the others by the CPU kernels."""
    args = problem.args(precision=precision, **options)
    hs, ckpt, pre = _scan.scan_fwd(args)
    grads = _scan.scan_bwd(args, problem.grad_hs, hs if ckpt is None else ckpt, pre, scan_needs())
    # delta is the gradient of x without a weight; a backward that has all states reads no x
    whole = args._replace(checkpoint_every=0)
    states = _scan.scan_fwd(whole)
    dense = whole._replace(x=states.hs, weight=None, bias=None)
    delta = _scan.scan_bwd(dense, problem.grad_hs, states.hs, states.pre, scan_needs()).x
    assert delta is not None
    kept = {f"grad_{name}": t for name, t in grads._asdict().items() if t is not None}
    return {"hs": hs, "delta": delta, "pre": hs.new_empty(0) if pre is None else pre, **kept}


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm()) if expected.any() else float(actual.any())


def check(problem: ScanProblem, **options: Any) -> None:
    """Every result is that of the emulation; those of states, adjoints and W or U differ from exact factors'."""
    actual, exact = leaf_results(problem, **options), leaf_results(problem, "ieee", **options)
    expected = emulated(problem, actual, **options)
    assert expected.keys() == actual.keys() - {"pre"}
    for name, t in expected.items():
        bound = BETWEEN if problem.op == "factored_scan" else CLOSE
        assert actual[name].isfinite().all(), name
        assert error(actual[name], t) < bound, f"{name}: {error(actual[name], t):.1e}"
        if name in ("hs", "delta", "grad_second"):
            assert error(exact[name], t) > ROUNDED, name


def problem_of(op: str, sizes: dict[str, int], activation: str, inputs: str) -> ScanProblem:
    return scan_problem(op, D=11, activation=activation, inputs=inputs, gap=1e-5, **sizes).to(torch.float32)


@needs_bf16
@pytest.mark.parametrize("inputs", ["dense", "features", "tokens"])
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "B{B}T{T}N{N}K{K}".format(**size))
@pytest.mark.parametrize("op", SCANS)
def test_factors_are_rounded_and_nothing_else(op: str, size: dict[str, int], activation: str, inputs: str) -> None:
    check(problem_of(op, size, activation, inputs))


@needs_bf16
@pytest.mark.parametrize("inputs", ["dense", "features", "tokens"])
@pytest.mark.parametrize("op", SCANS)
def test_lengths_resets_and_clip(op: str, inputs: str) -> None:
    for size in (*SIZES, *DEEP):
        problem = problem_of(op, size, "tanh", inputs)
        for order in ("falling", "any") if size["B"] > 1 else ():
            check(problem, lengths=some_lengths(size["B"], size["T"], order))
        check(with_resets(problem))
        check(problem, message_clip=0.5)


@needs_bf16
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", SCANS)
def test_checkpoints_give_the_same_bits(op: str, activation: str) -> None:
    for inputs in ("dense", "features", "tokens"):
        problem = problem_of(op, SIZES[0], activation, inputs)
        whole, parts = (run_scan(problem, "cpu", precision="bf16", checkpoint_every=every) for every in (0, 3))
        assert_same_bits(whole, parts, skip=("ckpt", "pre"))


@needs_bf16
@pytest.mark.parametrize("op", SCANS)
def test_threads(op: str) -> None:
    """States and adjoints have the same bits on any number of threads, also where these share one sequence. The other
    gradients are sums whose order depends on it, as those of exact factors."""
    for B, T, N in ((1, 19, 297), (7, 9, 33), (3, 9, 297)):
        problem = problem_of(op, {"B": B, "T": T, "N": N, "K": N - 2}, "tanh", "dense")
        results = on_threads((1, 2, 5), functools.partial(leaf_results, problem))
        for other in results[1:]:
            assert_same_bits(
                results[0], other, rounded=("grad_first", "grad_scale", "grad_second", "grad_norm", "delta")
            )


@needs_bf16
def test_modules() -> None:
    for module in (nn.RNN, nn.FactorizedRNN, nn.ExpRNN, nn.NonNormalRNN):
        results = []
        for precision in ("ieee", "bf16"):
            torch.manual_seed(0)
            states, _ = module(3, 32, precision=precision)(torch.linspace(-1, 1, 7 * 5 * 3).view(7, 5, 3))
            results.append(states)
        assert 0 < error(results[1], results[0].double()) < 5e-2, module.__name__


@pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)
@pytest.mark.parametrize("op", SCANS)
def test_what_stays_exact(op: str) -> None:
    """float64, every other precision, 16 rows, and kernels of other instruction sets."""
    problem = problem_of(op, SIZES[0], "tanh", "features")
    few = problem_of(op, {"B": 4, "T": 4, "N": 33, "K": 33}, "tanh", "dense")
    for precision in ("3xtf32", "tf32"):
        assert_same_bits(leaf_results(problem, precision), leaf_results(problem, "ieee"))
    wide = problem.to(torch.float64)
    assert_same_bits(leaf_results(wide), leaf_results(wide, "ieee"))
    assert_same_bits(leaf_results(few), leaf_results(few, "ieee"))
    native: Any = _call._C
    isa = native.isa()
    try:
        for other in set(native.isas()) - {"avx512"}:
            assert native.select_isa(other) and not has_bf16()
            assert_same_bits(leaf_results(problem), leaf_results(problem, "ieee"))
    finally:
        assert native.select_isa(isa)


@needs_bf16
def test_not_a_number_stays_one() -> None:
    """In a state, in the map and in an adjoint; odd N, where a lane beside the last unit has no weights."""
    x, w, h0 = torch.randn(7, 3, 17), torch.randn(17, 17), torch.zeros(3, 17)
    for tensor, at in ((x, (1, 2, 16)), (w, (16, 3))):
        changed = tensor.clone()
        changed[at] = float("nan")
        of_x, of_w = (changed, w) if tensor is x else (x, changed)
        hs = functional.dense_scan(of_x, of_w, h0=h0, precision="bf16")
        assert hs[2, 2].isnan().all() if tensor is x else hs[1, :, 16].isnan().all()
        assert tensor is w or not hs[:, :2].isnan().any()
    x[1, 2, 16] = float("inf")  # tanh of it is 1
    assert functional.dense_scan(x, w, h0=h0, precision="bf16").isfinite().all()
