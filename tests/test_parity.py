"""Every backend against the float64 reference: forward, every gradient, determinism, threads, strides, checkpoints.

Comparisons are those of ``helpers.assert_matches_reference``: no error that plain torch in the same dtype would not
make too. Outputs are poisoned with NaN before the kernels write them (conftest.py). The harness itself is tested at the
end: it must accept the reference in the place of a kernel, and reject one that is slightly wrong.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    SHORT,
    ScanProblem,
    assert_matches_reference,
    assert_same_bits,
    run_scan,
    scan_cases,
    scan_problem,
    some_lengths,
    strided,
    with_poisoned_padding,
)

from orthokern import dispatch
from orthokern._scan_contract import ScanGradients
from orthokern.cpu import linear_cross_entropy
from orthokern.ops.activations import NAMES, PARAMETER

OPS = ("factored_scan", "dense_scan")
DTYPES = (torch.float32, torch.float64)

# odd sizes, sizes of one, and sizes that fill several register tiles and column panels
SIZES = [
    {"B": 3, "T": 7, "N": 63, "K": 63},
    {"B": 3, "T": 7, "N": 63, "K": 7},
    {"B": 2, "T": 5, "N": 1, "K": 1},
    {"B": 3, "T": 1, "N": 8, "K": 8},
    {"B": 1, "T": 7, "N": 16, "K": 5},
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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that wait for each other over tiny tensors cost more than they bring: a test that needs two asks."""
    torch.set_num_threads(1)


def absent(op: str, backend: str) -> str | None:
    return dispatch.absence(op, backend)


def backends(op: str) -> list[Any]:
    """The native CPU backend; skipped with its reason where it is not built. Those of a GPU: tests/gpu."""
    why = absent(op, "cpu")
    return [pytest.param("cpu", marks=pytest.mark.skipif(why is not None, reason=f"cpu: {why}"), id="cpu")]


def test_continuous_integration_runs_the_cpu_backend() -> None:
    """A suite that skips every kernel is green and says nothing."""
    if not os.environ.get("CI"):
        pytest.skip("CI is not set")
    for op in (*OPS, "gru_scan", "cayley", "activations", "linear_cross_entropy"):
        assert absent(op, "cpu") is None, f"{op}: {absent(op, 'cpu')}"


# ---------------------------------------------------------------------------------------------------------------- scans


def check_scan(problem: ScanProblem, dtype: torch.dtype, backend: str, **options: Any) -> None:
    """The parity of one problem, everything that comes out of it."""
    torch.set_num_threads(2 if problem.h0.shape[0] > 3 else 1)
    inexact = problem.to(dtype)
    exact = inexact.to(torch.float64)  # of the very numbers that the kernel sees
    same = {key: value for key, value in options.items() if key in ("lengths", "message_clip")}
    expected = run_scan(exact, "reference", **same)
    plain = run_scan(inexact, "reference", **same)
    actual = run_scan(inexact, backend, **options)
    scales = {}
    if exact.act_param is not None and exact.act_param.numel() == 1:
        # one number, the sum of what N units would get each: these are what its error is relative to
        each_unit = dataclasses.replace(exact, act_param=exact.act_param.expand(exact.h0.shape[1]))
        scales["grad_act_param"] = float(run_scan(each_unit, "reference", **same)["grad_act_param"].norm())
    for name in actual:
        if name == "ckpt" or (name == "pre" and options.get("checkpoint_every")):
            continue
        gradient = name.startswith("grad_")
        assert_matches_reference(
            actual[name], expected[name], plain[name], name=name, gradient=gradient, scale=scales.get(name)
        )


def scan_params(sizes: list[dict[str, int]], one_kind: bool = False) -> list[Any]:
    """(op, case, dtype, backend) for every op, backend, dtype, size, activation and kind of input.

    one_kind: to save time, only one kind of input for each size and activation, in turn.
    """
    params = []
    for op in OPS:
        own = sizes if op == "factored_scan" else [s for i, s in enumerate(sizes) if s["K"] == s["N"] or i % 2]
        for index, (name, case) in enumerate(scan_cases(own)):
            if one_kind and index % 3 != (index // 3) % 3:
                continue
            if op == "dense_scan":
                case.pop("K")
            for backend in backends(op):
                for dtype in DTYPES:
                    label = f"{op}-{backend.id}-{SHORT[dtype]}-{name}"
                    params.append(pytest.param(op, case, dtype, *backend.values, id=label, marks=backend.marks))
    return params


@pytest.mark.parametrize(
    ("op", "case", "dtype", "backend"), [*scan_params(SIZES[:2]), *scan_params(SIZES[2:], one_kind=True)]
)
def test_scan_parity(op: str, case: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    check_scan(scan_problem(op, D=11, gap=1e-5 if dtype == torch.float32 else 1e-12, **case), dtype, backend)


@pytest.mark.parametrize(("op", "case", "dtype", "backend"), scan_params(LARGE, one_kind=True))
def test_scan_parity_large(op: str, case: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    check_scan(scan_problem(op, D=11, gap=1e-6 if dtype == torch.float32 else 1e-12, **case), dtype, backend)


def each(*ops: str) -> Callable[[Any], Any]:
    """Parametrise a test over (op, backend)."""
    params = [
        pytest.param(op, *backend.values, id=f"{op}-{backend.id}", marks=backend.marks)
        for op in ops
        for backend in backends(op)
    ]
    return pytest.mark.parametrize(("op", "backend"), params)


@each(*OPS)
@pytest.mark.parametrize("activation", NAMES)
def test_units_on_a_threshold(op: str, backend: str, activation: str) -> None:
    """No care taken to keep units off the kinks: float32 flips some of them against float64, in torch as in a kernel.

    One flip changes a gradient by a whole term, so the largest error says nothing. The RMS of the error is then that of
    few flipped terms among all, and the direction is nearly the reference's.
    """
    problem = scan_problem(op, B=50, T=20, N=64, activation=activation, gap=-1.0, seed=1).to(torch.float32)
    expected, actual = run_scan(problem.to(torch.float64), "reference"), run_scan(problem, backend)
    plain = run_scan(problem, "reference")
    for name in ("hs", *problem.grad_names()):
        ref = expected[name]
        if not ref.numel():
            continue
        rms, torch_rms = ((t[name].double() - ref).norm() / ref.norm() for t in (actual, plain))
        # 1e-3: a handful of flips among 64 000 units, each changing O(1) of them; none gives 1e-6
        assert rms <= 2 * torch_rms + 1e-3, f"{name}: relative RMS error {rms:.3e}, plain torch {torch_rms:.3e}"
        cosine = torch.nn.functional.cosine_similarity(actual[name].double().flatten(), ref.flatten(), dim=0)
        assert cosine >= 1 - 1e-6, f"{name}: cosine {cosine:.9f}"


@each(*OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_checkpoints_give_the_same_bits(op: str, backend: str, dtype: torch.dtype, activation: str) -> None:
    for inputs in ("dense", "features", "tokens"):
        problem = scan_problem(op, B=5, T=9, N=34, activation=activation, inputs=inputs, D=11).to(dtype)
        plain = run_scan(problem, backend)
        for every in (1, 2, 4, 9, 100):
            recomputed = run_scan(problem, backend, checkpoint_every=every)
            assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))
            assert len(recomputed["ckpt"]) == -(-9 // every)
            before = torch.cat([problem.h0.unsqueeze(0), plain["hs"]])[0:9:every]
            assert torch.equal(recomputed["ckpt"], before)


@each(*OPS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("checkpoint_every", [0, 3])
def test_forward_of_one_backward_of_the_other(op: str, backend: str, activation: str, checkpoint_every: int) -> None:
    problem = scan_problem(op, B=4, T=7, N=18, activation=activation, inputs="features")
    expected = run_scan(problem, "reference")
    for fwd, bwd in ((backend, "reference"), ("reference", backend)):
        actual = run_scan(problem, fwd, checkpoint_every=checkpoint_every, bwd_backend=bwd)
        for name in problem.grad_names():
            assert_matches_reference(actual[name], expected[name], expected[name], name=f"{fwd} + {bwd}: {name}")


@each(*OPS)
@pytest.mark.parametrize("inputs", ["dense", "features", "tokens"])
def test_any_strides(op: str, backend: str, inputs: str) -> None:
    problem = scan_problem(op, B=3, T=5, N=17, activation="prelu", inputs=inputs).to(torch.float32)
    other = problem.strided()
    assert not other.grad_hs.is_contiguous()
    assert_same_bits(run_scan(problem, backend), run_scan(other, backend))
    # an expanded cotangent, as the backward of a sum makes one
    problem.grad_hs = torch.full_like(problem.grad_hs, 0.5)
    other.grad_hs = torch.tensor(0.5).expand(problem.grad_hs.shape)
    assert_same_bits(run_scan(problem, backend), run_scan(other, backend))


@each(*OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_the_same_bits_twice(op: str, backend: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    for activation in ("tanh", "prelu", "modrelu"):
        problem = scan_problem(op, B=50, T=11, N=66, activation=activation, inputs="tokens", D=7, gap=-1.0).to(dtype)
        first = run_scan(problem, backend)
        for _ in range(3):
            assert_same_bits(first, run_scan(problem, backend))


@each(*OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_one_thread_and_two_agree(op: str, backend: str, dtype: torch.dtype, same_bits: bool = True) -> None:
    for B in (1, 2, 5, 50):
        problem = scan_problem(op, B=B, T=6, N=33, activation="prelu", inputs="features", gap=1e-6).to(dtype)
        expected, plain = run_scan(problem.to(torch.float64), "reference"), run_scan(problem, "reference")
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run_scan(problem, backend))
        for name in ("hs", *problem.grad_names()):
            for result in results:
                assert_matches_reference(result[name], expected[name], plain[name], name=name)
        # a row's own recurrence cannot depend on who computes it
        assert not same_bits or torch.equal(results[0]["hs"], results[1]["hs"])


@each(*OPS)
def test_what_is_not_needed_is_empty(op: str, backend: str) -> None:
    for inputs in ("dense", "features", "tokens"):
        problem = scan_problem(op, B=3, T=5, N=9, activation="modrelu", inputs=inputs)
        full = run_scan(problem, backend)
        without_x = run_scan(problem, backend, need_x=False)
        without_params = run_scan(problem, backend, need_params=False)
        for name in problem.grad_names():
            if name == "grad_x":
                assert without_x[name].numel() == 0
            else:
                assert torch.equal(without_x[name], full[name]), name
            if name in ("grad_x", "grad_h0", "grad_norm"):
                assert torch.equal(without_params[name], full[name]), name
            else:
                assert without_params[name].numel() == 0, name


@each(*OPS)
def test_nothing_writes_to_inputs(op: str, backend: str) -> None:
    for inputs in ("dense", "features", "tokens"):
        for every in (0, 2):
            problem = scan_problem(op, B=3, T=5, N=10, activation="oplu", inputs=inputs)
            copy = problem.map(torch.clone)
            out = run_scan(problem, backend, checkpoint_every=every)
            for name, before, after in zip(problem.input_names(), copy.inputs(), problem.inputs(), strict=True):
                assert before is None or torch.equal(before, after), name
            assert torch.equal(copy.grad_hs, problem.grad_hs)
            storages = [t.untyped_storage().data_ptr() for t in out.values() if t.numel()]
            given = [t.untyped_storage().data_ptr() for t in problem.inputs() if t is not None]
            assert len({*storages, *given}) == len(storages) + len({*given}), "an output shares memory"


@each(*OPS)
def test_gradcheck_of_the_kernels(op: str, backend: str) -> None:
    """Finite differences of the kernel itself, through its registered autograd."""
    fwd = getattr(torch.ops.orthokern, f"{op}_fwd")
    for activation in NAMES:
        for inputs in ("features", "tokens"):
            problem = scan_problem(op, B=2, T=3, N=4, D=3, activation=activation, inputs=inputs, gap=1e-3)
            leaves = [t if t is None or not t.is_floating_point() else t.requires_grad_() for t in problem.inputs()]
            run = lambda *args, a=activation: fwd(*args, a, 0, backend)[0]  # noqa: E731
            assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@each(*OPS)
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


@each(*OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_padding_plays_no_part(op: str, backend: str, dtype: torch.dtype, activation: str) -> None:
    """Not its contents, not the other lengths, not the checkpoints: the same bits, and zeros on padding."""
    B, T = 9, 8
    for inputs in ("dense", "features", "tokens"):
        problem = scan_problem(op, B=B, T=T, N=34, activation=activation, inputs=inputs, D=11, gap=-1.0).to(dtype)
        for order in ORDERS:
            lengths = some_lengths(B, T, order)
            padding = torch.arange(T).unsqueeze(1) >= lengths
            options: dict[str, Any] = {"lengths": lengths, "message_clip": 0.5}
            first = run_scan(problem, backend, **options)
            for name in ("hs", "pre", "grad_x"):
                assert not first[name].numel() or not first[name][padding].any(), name
            poisoned = with_poisoned_padding(problem, lengths)
            assert_same_bits(first, run_scan(poisoned, backend, **options))
            for every in (1, 3, 20):
                again = run_scan(poisoned, backend, checkpoint_every=every, **options)
                assert_same_bits(first, again, skip=("ckpt", "pre"))
                before = torch.cat([problem.h0.unsqueeze(0), first["hs"]])[0:T:every]
                assert torch.equal(again["ckpt"], before)
            if order == "full":
                assert_same_bits(first, run_scan(problem, backend, message_clip=0.5))
            b = B // 2
            alone = dataclasses.replace(
                problem, x=problem.x[:, b : b + 1], h0=problem.h0[b : b + 1], grad_hs=problem.grad_hs[:, b : b + 1]
            )
            alone_hs = run_scan(alone, backend, lengths=lengths[b : b + 1])["hs"]
            assert torch.equal(alone_hs[:, 0], first["hs"][:, b])


@each(*OPS)
def test_lengths_in_two_threads(op: str, backend: str) -> None:
    for B in (2, 3, 50):
        problem = scan_problem(op, B=B, T=12, N=33, activation="prelu", inputs="tokens", gap=1e-6).to(torch.float32)
        for order in ORDERS:
            lengths = some_lengths(B, 12, order)
            results = []
            for threads in (1, 2, 2):
                torch.set_num_threads(threads)
                results.append(run_scan(problem, backend, lengths=lengths))
            assert torch.equal(results[0]["hs"], results[1]["hs"])
            assert_same_bits(results[1], results[2])
            check_scan(problem, torch.float32, backend, lengths=lengths)


@each(*OPS)
@pytest.mark.parametrize("inputs", ["dense", "features"])
def test_lengths_of_results_past_the_caches(op: str, backend: str, inputs: str) -> None:
    """More than 8 MiB of states: other stores than those of small results. Checked against halves of the batch."""
    torch.set_num_threads(2)
    B, half = 600, 300
    problem = scan_problem(op, B=B, T=60, N=64, inputs=inputs).to(torch.float32)
    for order in ("falling", "any"):
        lengths = some_lengths(B, 60, order)
        whole = run_scan(problem, backend, lengths=lengths, message_clip=0.5)
        parts = []
        for rows in (slice(0, half), slice(half, B)):
            part = dataclasses.replace(
                problem, x=problem.x[:, rows], h0=problem.h0[rows], grad_hs=problem.grad_hs[:, rows]
            )
            parts.append(run_scan(part, backend, lengths=lengths[rows], message_clip=0.5))
        assert torch.equal(whole["hs"], torch.cat([part["hs"] for part in parts], 1))
        assert torch.equal(whole["grad_x"], torch.cat([part["grad_x"] for part in parts], 1))
        for name in ("grad_w", "grad_u", "grad_v", "grad_s"):
            if name in whole:
                torch.testing.assert_close(whole[name], parts[0][name] + parts[1][name], rtol=1e-4, atol=1e-2)


@each(*OPS)
@pytest.mark.parametrize("checkpoint_every", [0, 3])
def test_lengths_of_one_backend_in_the_other(op: str, backend: str, checkpoint_every: int) -> None:
    for activation in ("tanh", "prelu", "oplu"):
        problem = scan_problem(op, B=4, T=7, N=18, activation=activation, inputs="features")
        options: dict[str, Any] = {"lengths": some_lengths(4, 7, "any"), "message_clip": 0.3}
        expected = run_scan(problem, "reference", **options)
        for fwd, bwd in ((backend, "reference"), ("reference", backend)):
            actual = run_scan(problem, fwd, checkpoint_every=checkpoint_every, bwd_backend=bwd, **options)
            for name in problem.grad_names():
                assert_matches_reference(actual[name], expected[name], expected[name], name=f"{fwd} + {bwd}: {name}")


# --------------------------------------------------------------------------------------------------------------- cayley

SHAPES = [
    (1, 1),
    (2, 2),
    (5, 3),
    (33, 33),
    (64, 64),
    (65, 64),
    (130, 7),
    (17, 1),
    (3, 9, 9),
    (2, 3, 12, 5),
    (2, 130, 130),
]


@each("cayley")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_cayley_parity(op: str, backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    step = torch.ops.orthokern.cayley
    m = torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(dtype)
    g = torch.randn(*shape, dtype=dtype)
    rates = [1e-6, 1e-2, 1.0, -0.1]
    for lr in [*map(torch.tensor, rates), torch.rand(shape[:-2], dtype=dtype)]:
        expected = step(m.double(), g.double(), lr, "reference")
        actual, plain = step(m, g, lr, backend), step(m, g, lr, "reference")
        assert_matches_reference(actual, expected, plain, name=f"lr={lr}")
        assert torch.equal(actual, step(strided(m), strided(g), lr, backend))
        # the columns are orthonormal to rounding, whatever the step
        eps = torch.finfo(dtype).eps
        gram = actual.double().mT @ actual.double() - torch.eye(shape[-1], dtype=torch.float64)
        assert gram.abs().max() < 64 * eps * max(1.0, shape[-2] ** 0.5)


@each("cayley")
def test_cayley_of_a_large_gradient(op: str, backend: str) -> None:
    """LU without pivoting is safe because the matrix has symmetric part I, however large the skew part."""
    m = torch.linalg.qr(torch.randn(3, 40, 40, dtype=torch.float64))[0]
    for scale in (1e2, 1e4, 1e6):
        g = scale * torch.randn(3, 40, 40, dtype=torch.float64)
        new = torch.ops.orthokern.cayley(m, g, torch.tensor(1.0), backend)
        assert (new.mT @ new - torch.eye(40, dtype=torch.float64)).abs().max() < 1e-9 * scale**0.5


# ---------------------------------------------------------------------------------------------------------- activations


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
        x = torch.tensor(
            [0.0, -0.0, tiny, -tiny, 1e4, -1e4, inf, -inf, 88.0, -88.0, 1e-6, -1e-6, nan, 1.0], dtype=dtype
        )
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


# ------------------------------------------------------------------------------------------------- linear cross-entropy


@each("linear_cross_entropy")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize(
    ("R", "N", "C"), [(1, 1, 1), (1, 7, 3), (33, 128, 9), (7, 63, 10), (500, 16, 65), (9001, 5, 2), (20, 250, 130)]
)
def test_linear_cross_entropy_parity(op: str, backend: str, dtype: torch.dtype, R: int, N: int, C: int) -> None:
    run = torch.ops.orthokern.linear_cross_entropy_fwd
    hidden, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((R, N), (C, N), (C,)))
    target = torch.randint(0, C, (R,))
    for b in (bias, None):
        exact = [None if t is None else t.double() for t in (hidden, weight, b)]
        for reduction in ("mean", "sum"):
            for need_grad in (True, False):
                options = (target, reduction, need_grad)
                actual = run(hidden, weight, b, *options, backend)
                expected, plain = run(*exact, *options, "reference"), run(hidden, weight, b, *options, "reference")
                names = ("loss", "grad_hidden", "grad_weight", "grad_bias")
                for name, *three in zip(names, actual, expected, plain, strict=True):
                    assert_matches_reference(*three, name=name, gradient=name != "loss")
            again = run(strided(hidden), strided(weight), b if b is None else strided(b), strided(target), reduction,
                        True, backend)  # fmt: skip
            first = run(hidden, weight, b, target, reduction, True, backend)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    threads = []
    for count in (1, 2):
        torch.set_num_threads(count)
        threads.append(run(hidden, weight, bias, target, "mean", True, backend))
    for name, one, two in zip(names, *threads, strict=True):
        torch.testing.assert_close(one, two, msg=lambda m, n=name: f"{n}: {m}")


@each("linear_cross_entropy")
def test_extreme_logits(op: str, backend: str) -> None:
    """logsumexp must not overflow, and a certain prediction has loss 0 and no gradient."""
    run = torch.ops.orthokern.linear_cross_entropy_fwd
    hidden, weight = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1000.0], [-1000.0], [0.0]])
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    loss, *grads = run(hidden, weight, None, right, "sum", True, backend)
    assert float(loss) == 0
    assert all(not bool(grad.any()) for grad in grads)
    assert float(run(hidden, weight, None, wrong, "sum", True, backend)[0]) == pytest.approx(4000.0)


@pytest.mark.skipif(absent("linear_cross_entropy", "cpu") is not None, reason="the native module is not built")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_readouts_that_no_cache_holds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through torch's products, here in chunks of 50 rows."""
    monkeypatch.setattr(linear_cross_entropy, "_LARGE_READOUT", 0)
    monkeypatch.setattr(linear_cross_entropy, "_LOGITS", 1)
    for R, N, C in ((150, 33, 130), (1, 1, 1), (65, 7, 10)):
        test_linear_cross_entropy_parity("linear_cross_entropy", "cpu", dtype, R, N, C)
    test_extreme_logits("linear_cross_entropy", "cpu")


# ---------------------------------------------------------------------------------------------------------- the harness


def fake_leaf(monkeypatch: pytest.MonkeyPatch, **changes: Callable[..., Any]) -> None:
    """Let the reference stand in for the cpu leaf, with some of its functions replaced."""
    true_leaf = dispatch.leaf

    def leaf(op: str, backend: str) -> Any:
        functions = vars(true_leaf(op, "reference"))
        return types.SimpleNamespace(**{**functions, **changes}) if backend == "cpu" else true_leaf(op, backend)

    monkeypatch.setattr(dispatch, "leaf", leaf)
    monkeypatch.setattr(dispatch, "absence", lambda op, backend: None)
    monkeypatch.setattr(dispatch, "_chosen", {})


@pytest.mark.parametrize("op", OPS)
def test_harness_accepts_the_reference_as_a_leaf(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_leaf(monkeypatch)
    for _, case in scan_cases([{"B": 3, "T": 5, "N": 9}]):
        for dtype in DTYPES:
            check_scan(scan_problem(op, **case), dtype, "cpu")
    test_forward_of_one_backward_of_the_other(op, "cpu", "prelu", 3)
    test_any_strides(op, "cpu", "tokens")
    test_the_same_bits_twice(op, "cpu", torch.float32)
    test_what_is_not_needed_is_empty(op, "cpu")
    test_nothing_writes_to_inputs(op, "cpu")
    test_units_on_a_threshold(op, "cpu", "modrelu")
    test_one_thread_and_two_agree(op, "cpu", torch.float32, same_bits=False)  # torch's products promise no bits
    test_gradcheck_of_the_kernels(op, "cpu")
    test_a_long_scan_stays_exact(op, "cpu")


def test_harness_accepts_the_reference_of_the_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_leaf(monkeypatch)
    for shape in SHAPES[:6]:
        test_cayley_parity("cayley", "cpu", torch.float32, shape)
    test_cayley_of_a_large_gradient("cayley", "cpu")
    for activation in NAMES:
        test_activation_parity("activations", "cpu", torch.float32, activation)
        test_special_values("activations", "cpu", activation)
    test_tanh_is_accurate_everywhere("activations", "cpu")
    test_linear_cross_entropy_parity("linear_cross_entropy", "cpu", torch.float32, 9, 7, 5)
    test_extreme_logits("linear_cross_entropy", "cpu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("field", ScanGradients._fields)
def test_harness_rejects_a_wrong_gradient(op: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one gradient, wrong by a hundredth of a percent of the largest."""
    problem = scan_problem(op, B=3, T=5, N=9, activation="prelu", inputs="features")
    true_bwd = getattr(dispatch.leaf(op, "reference"), f"{op}_bwd")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        grads = true_bwd(*args, **kwargs)
        grad = getattr(grads, field)
        grad.view(-1)[0] += 1e-4 * grad.abs().max()
        return grads

    fake_leaf(monkeypatch, **{f"{op}_bwd": wrong})
    with pytest.raises(AssertionError, match=problem.grad_names()[1] if field == "m" else f"grad_{field}"):
        check_scan(problem, torch.float32, "cpu")


@pytest.mark.parametrize("op", OPS)
def test_harness_rejects_unwritten_memory(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_fwd = getattr(dispatch.leaf(op, "reference"), f"{op}_fwd")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        states = true_fwd(*args, **kwargs)
        states.hs[-1, -1, -1] = float("nan")
        return states

    fake_leaf(monkeypatch, **{f"{op}_fwd": wrong})
    with pytest.raises(AssertionError, match="hs: 1 of 135 elements are NaN or infinite"):
        check_scan(scan_problem(op, B=3, T=5, N=9), torch.float64, "cpu")
