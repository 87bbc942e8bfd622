"""The kernels of factored_scan and dense_scan against the float64 reference: forward, every gradient, determinism,
threads, strides, checkpoints, lengths, clipping.

Comparisons are those of ``comparison.assert_matches_reference``: no error that plain torch in the same dtype would not
make too. Outputs are poisoned with NaN before the kernels write them (tests/conftest.py). test_harness.py tests the
harness itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from checks import assert_each_result_alone, assert_scan_parity, check_padding, check_scan
from comparison import assert_matches_reference
from helpers import (
    DTYPES,
    SCANS,
    SHORT,
    assert_same_bits,
    backends,
    each,
    on_threads,
    run_scan,
    scan_problem,
    some_lengths,
    strided,
    with_resets,
)

from orthokern import cpu, dispatch, functional
from orthokern.ops._scan import scan
from orthokern.ops._taps import tap
from orthokern.ops.activations import NAMES

KINDS = ("dense", "features", "tokens")
# odd sizes, sizes of one, and sizes that fill several register tiles and column panels
SIZES = [
    {"B": 3, "T": 7, "N": 63, "K": 63},
    {"B": 3, "T": 7, "N": 63, "K": 7},
    {"B": 2, "T": 5, "N": 1, "K": 1},
    {"B": 3, "T": 1, "N": 8, "K": 8},
    {"B": 1, "T": 7, "N": 16, "K": 5},
    {"B": 2, "T": 2, "N": 17, "K": 5},  # few enough rows for weights that are read in place
    {"B": 4, "T": 5, "N": 17, "K": 17},
    {"B": 4, "T": 5, "N": 33, "K": 3},
    {"B": 26, "T": 3, "N": 65, "K": 33},
]
LARGE = [
    {"B": 50, "T": 5, "N": 128, "K": 128},
    {"B": 5, "T": 4, "N": 130, "K": 130},
    {"B": 14, "T": 3, "N": 250, "K": 64},
    {"B": 3, "T": 3, "N": 250, "K": 250},
    {"B": 100, "T": 5, "N": 34, "K": 9},  # one large group of rows on the CPU
    {"B": 230, "T": 4, "N": 20, "K": 20},  # several
]


def scan_params(sizes: list[dict[str, int]], one_kind: bool = False) -> list[Any]:
    """(op, case, dtype, backend) for every op, backend, dtype, size, activation and kind of input.

    case: keyword arguments of ``scan_problem``.
    one_kind: to save time, only one kind of input for each size and activation, in turn.
    """
    params = []
    for op in SCANS:
        own = sizes if op == "factored_scan" else [s for i, s in enumerate(sizes) if s["K"] == s["N"] or i % 2]
        for index, (size, activation, kind) in enumerate(itertools.product(own, NAMES, KINDS)):
            if one_kind and index % 3 != (index // 3) % 3:
                continue
            name = f"{''.join(f'{letter}{number}' for letter, number in size.items())}-{activation}-{kind}"
            param_size = "1" if (NAMES.index(activation) + size["T"]) % 2 else "N"
            case = {**size, "activation": activation, "inputs": kind, "param_size": param_size}
            for backend, dtype in itertools.product(backends(op), DTYPES):
                label = f"{op}-{backend.id}-{SHORT[dtype]}-{name}"
                params.append(pytest.param(op, case, dtype, *backend.values, id=label, marks=backend.marks))
    return params


PARITY = [*scan_params(SIZES[:2]), *scan_params([*SIZES[2:], *LARGE], one_kind=True)]


@pytest.mark.parametrize(("op", "case", "dtype", "backend"), PARITY)
def test_scan_parity(op: str, case: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    check_scan(scan_problem(op, D=11, gap=1e-6 if dtype == torch.float32 else 1e-12, **case), dtype, backend)


@each(*SCANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_a_large_table_of_tokens(op: str, backend: str, dtype: torch.dtype) -> None:
    """With more ids than tokens and one group of rows, the sums have one part; otherwise several."""
    for B, T in ((3, 5), (2, 1), (220, 2), (40, 35)):
        check_scan(scan_problem(op, B=B, T=T, N=97, D=1301, inputs="tokens"), dtype, backend)


@each(*SCANS)
@pytest.mark.parametrize("inputs", KINDS)
def test_any_strides(op: str, backend: str, inputs: str) -> None:
    problem = scan_problem(op, B=3, T=5, N=17, activation="prelu", inputs=inputs).to(torch.float32)
    other = problem.map(strided)
    other.x = strided(problem.x)
    assert not other.grad_hs.is_contiguous()
    assert_same_bits(run_scan(problem, backend), run_scan(other, backend))
    # an expanded cotangent, as the backward of a sum makes one
    problem.grad_hs = torch.full_like(problem.grad_hs, 0.5)
    other.grad_hs = torch.tensor(0.5).expand(problem.grad_hs.shape)
    assert_same_bits(run_scan(problem, backend), run_scan(other, backend))


@each(*SCANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_one_thread_and_two_agree(op: str, backend: str, dtype: torch.dtype) -> None:
    for B in (1, 2, 5, 50):
        problem = scan_problem(op, B=B, T=6, N=33, activation="prelu", inputs="features", gap=1e-6).to(dtype)
        results = on_threads((1, 2), functools.partial(run_scan, problem, backend))
        for result in results:
            assert_scan_parity(problem, result, functools.partial(run_scan, backend="reference"), {})
        # a row's own recurrence cannot depend on who computes it
        assert torch.equal(results[0]["hs"], results[1]["hs"])


@each(*SCANS)
@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e-40), (torch.float64, 1e-310)], ids=["f32", "f64"])
def test_subnormal_states_are_flushed_to_zero(op: str, backend: str, dtype: torch.dtype, value: float) -> None:
    problem = scan_problem(op, B=2, T=3, N=17, activation="identity").to(dtype)
    problem.x, problem.h0 = torch.full_like(problem.x, value), torch.zeros_like(problem.h0)
    problem.matrices = tuple(map(torch.zeros_like, problem.matrices))
    assert torch.equal(run_scan(problem, "reference")["hs"], problem.x) and problem.x.all()
    assert not run_scan(problem, backend)["hs"].any()


@each(*SCANS)
def test_what_is_not_needed_is_empty(op: str, backend: str) -> None:
    for inputs in KINDS:
        problem = scan_problem(op, B=3, T=5, N=9, activation="modrelu", inputs=inputs)
        assert_each_result_alone(with_resets(problem), backend)
    if op == "factored_scan":
        assert_each_result_alone(with_resets(scan_problem(op, B=3, T=5, N=72, K=9, inputs="features")), backend)


@each(*SCANS)
def test_a_backward_asks_for_what_autograd_needs(op: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, leaf = scan_problem(op, B=3, T=5, N=4, activation="prelu", inputs="features"), dispatch.leaf(op, backend)
    true_bwd, asked = getattr(leaf, f"{op}_bwd"), []
    monkeypatch.setattr(leaf, f"{op}_bwd", lambda *given: (asked.append(given[-1]), true_bwd(*given))[1])
    for field in ("x", "second", "h0", "weight", "bias", "act_param"):
        args = problem.args(backend=backend)
        tensor = getattr(args, field).clone().requires_grad_()
        for recorder in (contextlib.nullcontext(), tap()):
            with recorder:
                scan(args._replace(**{field: tensor})).sum().backward()
            needed = {name for name, need in asked.pop()._asdict().items() if need}
            assert needed == ({field} if isinstance(recorder, contextlib.nullcontext) else {field, "norm"})


@each(*SCANS)
def test_a_long_scan_stays_exact(op: str, backend: str) -> None:
    """Near-orthogonal and linear: the gradient of a thousand steps is neither exploded nor gone."""
    problem = scan_problem(op, B=3, T=1000, N=16, activation="identity", inputs="tokens")
    if op == "dense_scan":
        problem.matrices = (torch.linalg.qr(problem.matrices[0])[0],)
    else:
        problem.matrices = (problem.matrices[0], torch.ones(16).double(), problem.matrices[2])
    check_scan(problem, torch.float32, backend)
    check_scan(problem, torch.float64, backend, checkpoint_every=37)


# ------------------------------------------------------------------------------------------------- lengths and clipping

ORDERS = ("falling", "any", "rising", "full")
RAGGED = [
    {"B": 3, "T": 7, "N": 63, "K": 7},
    {"B": 1, "T": 5, "N": 17, "K": 17},
    {"B": 26, "T": 9, "N": 34, "K": 34},
    {"B": 230, "T": 5, "N": 20, "K": 9},  # several groups of rows
]


@pytest.mark.parametrize(("op", "case", "dtype", "backend"), scan_params(RAGGED, one_kind=True))
def test_lengths_and_clip(op: str, case: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    problem = scan_problem(op, D=11, gap=1e-6 if dtype == torch.float32 else 1e-12, **case)
    for index, order in enumerate(ORDERS):
        lengths = some_lengths(case["B"], case["T"], order)
        check_scan(
            problem, dtype, backend, lengths=lengths, message_clip=(0.0, 0.3)[index % 2], checkpoint_every=index % 3
        )
    check_scan(problem, dtype, backend, message_clip=0.5)


@each(*SCANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_padding_plays_no_part(op: str, backend: str, dtype: torch.dtype, activation: str) -> None:
    """Not its contents, not the other lengths, not the checkpoints: the same bits, and zeros on padding. Every order
    has each kind of input with some activation."""
    B, T, b, run = 9, 9, 4, functools.partial(run_scan, backend=backend)
    for index, order in enumerate(ORDERS):
        inputs = KINDS[(index + NAMES.index(activation)) % 3]
        problem = scan_problem(op, B=B, T=T, N=34, activation=activation, inputs=inputs, D=11, gap=-1.0).to(dtype)
        lengths, full = some_lengths(B, T, order), order == "full"
        clip = 0.0 if full else 0.5
        first = check_padding(problem, None if full else lengths, run, (1, 3, 4, 20), message_clip=clip)
        if full:
            assert_same_bits(first, run(problem, lengths=lengths))
        alone = dataclasses.replace(
            problem, x=problem.x[:, b : b + 1], h0=problem.h0[b : b + 1], grad_hs=problem.grad_hs[:, b : b + 1]
        )
        assert torch.equal(run(alone, lengths=lengths[b : b + 1])["hs"][:, 0], first["hs"][:, b])


@each(*SCANS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("checkpoint_every", [0, 3])
def test_forward_of_one_backward_of_the_other(op: str, backend: str, activation: str, checkpoint_every: int) -> None:
    problem = scan_problem(op, B=4, T=7, N=18, activation=activation, inputs="features")
    for options in ({}, {"lengths": some_lengths(4, 7, "any"), "message_clip": 0.3}):
        expected = run_scan(problem, "reference", **options)
        for fwd, bwd in ((backend, "reference"), ("reference", backend)):
            actual = run_scan(problem, fwd, checkpoint_every=checkpoint_every, bwd_backend=bwd, **options)
            for name in problem.grad_names():
                assert_matches_reference(actual[name], expected[name], expected[name], name=f"{fwd} + {bwd}: {name}")


def test_half_a_million_sequences_on_one_thread() -> None:
    """Products of two numbers of rows exceed 32 bits."""
    B = 500_000
    x, h0, w = torch.randn(1, B, 2), torch.randn(B, 2), torch.randn(2, 2)
    hs = functional.dense_scan(x, w, h0, activation="identity", backend="cpu")
    torch.testing.assert_close(hs[0], x[0] + h0 @ w.mT, rtol=1e-5, atol=1e-5)


LOW_RANKS = [(2, 40, 258, 1), (2, 40, 264, 33), (31, 5, 258, 3), (5, 130, 72, 9), (2, 2, 264, 33)]


@pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)
@pytest.mark.parametrize("activation", ["tanh", "prelu", "modrelu", "oplu"])
@pytest.mark.parametrize(("index", "sizes"), list(enumerate([(2, 3, 258, 258), (1, 3, 258, 257), *LOW_RANKS])))
def test_gradients_of_the_factors_without_m(index: int, sizes: tuple[int, int, int, int], activation: str) -> None:
    """At most N / 4 rows, or a rank of at most N / 8: without M = dL/dW. Padding holds NaN, or ids out of range. Every
    size and every activation has each kind of input."""
    (B, T, N, K), inputs = sizes, KINDS[(index + NAMES.index(activation)) % 3]
    plain = scan_problem("factored_scan", B=B, T=T, N=N, K=K, activation=activation, inputs=inputs, gap=1e-7)
    shorter = (T - torch.arange(B) % 2).clamp_min(1)
    for problem, lengths, every in itertools.product((plain, with_resets(plain)), (None, shorter), (0, 3)):
        poisoned = problem if lengths is None else problem.with_poisoned_padding(lengths)
        options = {"lengths": lengths, "checkpoint_every": every}
        actual = run_scan(poisoned, "cpu", **options)
        assert_scan_parity(problem, actual, functools.partial(run_scan, backend="reference"), options)


@pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)
def test_gradients_of_a_low_rank_in_float32() -> None:
    """Over more rows than one part of a sum, which are added up in float64."""
    problem = scan_problem("factored_scan", B=70, T=130, N=72, K=9, inputs="features")
    expected, actual = run_scan(problem, "reference"), run_scan(problem.to(torch.float32), "cpu")
    for name in ("grad_u", "grad_s", "grad_v", "grad_weight"):
        error = (actual[name].double() - expected[name]).norm() / expected[name].norm()
        assert error < 2e-6, f"{name}: {error:.1e}"
