"""The scans: their rate as a share of the rate of torch's matrix product, and the same loop in eager and compiled
torch.

tanh, K = N, inputs and cotangents at every step (so that adjoints do not become denormal numbers, which would slow down
the other implementation). W is near an orthogonal matrix, with s within 5 % of 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import (
    BATCH,
    Bench,
    Size,
    check,
    checked_sequences,
    factors,
    gflop,
    interleave,
    median,
    only,
    ratio,
    spread_ms,
)
from torch import Tensor

from orthokern import functional
from orthokern.cpu import _scan
from orthokern.cpu._call import has_amx, has_bf16

SIZES = [{"N": 128, "T": 1000}, {"N": 128, "T": 10020}, {"N": 500, "T": 120}, {"N": 1000, "T": 120}]
QUICK = [{"N": 33, "T": 20}]
OPS = ("factored_scan", "dense_scan")

# Relative RMS of float32 results against float64; measured: at most 3e-6. See bench_accuracy.py for what it is by T.
TOLERANCE = 2e-5
BF16_TOLERANCE = 3e-2  # of gradients with bfloat16 factors against exact ones; measured: at most 1.5e-2

# Share of SGEMM: bar and goal by op and N. Time of the eager loop over ours: bar by N, for the factored loop.
SHARES = {"factored_scan": {128: (0.8, 0.9), 500: (0.8, 0.9), 1000: (0.8, 0.9)}}
SHARES["dense_scan"] = {128: (0.65, 0.8), 500: (0.8, 0.9), 1000: (0.8, 0.95)}
EAGER = {128: 4.5, 500: 2.0, 1000: 1.6}


class Problem:
    """Inputs of one scan: x [T, B, N], matrices (u, s, v) or (w,), h0 [B, N], cotangent [T, B, N], all float32."""

    def __init__(self, op: str, N: int, T: int) -> None:
        generator = torch.Generator().manual_seed(N + T)
        u, s, v = factors(N, generator)
        self.op = op
        self.size = {"N": N, "T": T, "B": BATCH}
        self.matrices = (u, s, v) if op == "factored_scan" else ((u * s) @ v.mT,)
        self.x = 0.1 * torch.randn(T, BATCH, N, generator=generator)
        self.h0 = torch.randn(BATCH, N, generator=generator)
        self.cotangent = torch.randn(T, BATCH, N, generator=generator)
        self.inputs = [self.x, *self.matrices]
        for tensor in self.inputs:
            tensor.requires_grad_()

    def forward(self) -> Tensor:
        """Ours, through the public function."""
        return self.loop(self.x, *self.matrices, self.h0)

    def loop(self, *inputs: Tensor, precision: str = "ieee") -> Tensor:
        """The same of (x, *matrices, h0)."""
        scan: Callable[..., Tensor] = getattr(functional, self.op)
        return scan(*inputs, activation="tanh", precision=precision)

    def step(self, loop: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """Forward and backward of a function (x, *matrices, h0) -> states: the gradients of x and the matrices."""
        return torch.autograd.grad(loop(self.x, *self.matrices, self.h0), self.inputs, self.cotangent)

    @functools.cached_property
    def error(self) -> float:
        """The largest error of states and gradients against float64; WrongResult if it is above the tolerance."""
        some = checked_sequences(self.size)
        hs = self.forward()
        grads = torch.autograd.grad(hs, self.inputs, only(self.cotangent, some))
        double = [m.detach().double() for m in self.matrices]
        x, h0, cotangent = (t.detach().double() for t in (self.x[:, some], self.h0[some], self.cotangent[:, some]))
        forward, backward = (getattr(torch.ops.orthokern, f"{self.op}_{pass_}") for pass_ in ("fwd", "bwd"))
        others = (*double, h0, None, None, None, "tanh")
        hs64, _, pre = forward(x, *others, backend="reference")
        grads64 = backward(cotangent, hs64, pre, None, *others, backend="reference")
        ours = [hs[:, some], grads[0][:, some], *grads[1:]]
        return check(self.op, ours, [hs64, *grads64[: len(self.inputs)]], TOLERANCE)


def eager_factored(x: Tensor, u: Tensor, s: Tensor, v: Tensor, h0: Tensor) -> Tensor:
    """The straightforward loop. It uses unbind instead of x[t], because indexing makes the backward quadratic in T."""
    h, states = h0, []
    for e in x.unbind(0):
        h = torch.tanh(((h @ v) * s) @ u.mT + e)
        states.append(h)
    return torch.stack(states)


def eager_factored_folded(x: Tensor, u: Tensor, s: Tensor, v: Tensor, h0: Tensor) -> Tensor:
    """The same with s folded into U before the loop, and the addition into the product: the fewest calls."""
    h, states, us = h0, [], (u * s).mT
    for e in x.unbind(0):
        h = torch.tanh(torch.addmm(e, h @ v, us))
        states.append(h)
    return torch.stack(states)


def eager_dense(x: Tensor, w: Tensor, h0: Tensor) -> Tensor:
    """h_t = tanh(W h_{t-1} + e_t), the addition within the product."""
    h, states, wt = h0, [], w.mT
    for e in x.unbind(0):
        h = torch.tanh(torch.addmm(e, h, wt))
        states.append(h)
    return torch.stack(states)


def _factored_step(h: Tensor, e: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(((h @ v) * s) @ u.mT + e)


@functools.cache
def problem(op: str, N: int, T: int) -> Problem:
    return Problem(op, N, T)


@pytest.fixture(autouse=True)
def _one_problem_at_a_time(request: pytest.FixtureRequest) -> Any:
    """Free the inputs after the case: those of T = 10020 take a gigabyte."""
    yield
    problem.cache_clear()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_share_of_sgemm(benchmark: Any, bench: Bench, size: Size, op: str) -> None:
    """Times forward and backward separately, with the buffers of the previous round cached, alternating with torch's
    product."""
    p = problem(op, **size)
    error = p.error
    N, T = p.size["N"], p.size["T"]
    sgemm, states = bench.sgemm, []

    def forward() -> None:
        states.append(p.forward())

    def backward() -> tuple[Tensor, ...]:
        # pop frees the states before the next round allocates memory of this size
        return torch.autograd.grad(states.pop(), p.inputs, p.cotangent)

    def product() -> None:
        sgemm()

    benchmark.group = f"{op}, backward"
    calls: dict[str, Callable[[], Any]] = {"before 1": product, "before 2": product, "forward": forward}
    calls |= {"between 1": product, "between 2": product, "backward": backward}
    after = {"after 1": product, "after 2": product}
    seconds = interleave(benchmark, calls, rounds=bench.rounds(15 if T < 5000 else 9), after=after)
    around = {"forward": ("before", "between"), "backward": ("between", "after")}
    for direction, sides in around.items():
        work = gflop(op, direction, p.size)
        # their median, not their minimum: the scan runs once per round, with whatever load other processes cause
        beside = [
            median(times) for times in zip(*(seconds[f"{side} {i}"] for side in sides for i in (1, 2)), strict=True)
        ]
        rates = [work / t for t in seconds[direction]]
        shares = [rate * t / sgemm.gflop for rate, t in zip(rates, beside, strict=True)]
        bar, goal = SHARES[op].get(N, (None, None))
        bench.record(
            "scan",
            f"{op} {direction}",
            p.size,
            "share of SGEMM",
            median(shares),
            bar=bar,
            goal=goal,
            details={
                "us_per_step": round(1e6 * median(seconds[direction]) / T, 3),
                "gflops": round(median(rates), 1),
                "sgemm_gflops": round(sgemm.gflop / median(beside), 1),
                "share_min": round(min(shares), 3),
                "share_max": round(max(shares), 3),
                "ms": spread_ms(seconds[direction]),
                "error": error,
                "tolerance": TOLERANCE,
            },
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_eager_loop(benchmark: Any, bench: Bench, size: Size, op: str) -> None:
    """Forward and backward of the loop in eager torch over ours."""
    p = problem(op, **size)
    error = p.error
    loops: dict[str, Callable[..., Tensor]]
    if op == "factored_scan":
        loops = {"eager loop": eager_factored, "eager loop, s folded into U": eager_factored_folded}
    else:
        loops = {"eager loop": eager_dense}
    _compare(
        benchmark, bench, p, loops, error, {"eager loop": EAGER.get(p.size["N"]) if op == "factored_scan" else None}
    )


@pytest.mark.sizes([{"N": N, "T": 120} for N in (128, 500, 1000)], quick=[])
def test_compiled_step(benchmark: Any, bench: Bench, size: Size) -> None:
    """torch.compile of one step, called in a Python loop: a compiled loop of a hundred steps takes minutes to compile.

    It is left out of a quick run, because it needs a C++ compiler and half a minute.
    """
    p = problem("factored_scan", **size)
    error = p.error
    torch._dynamo.reset()
    step = torch.compile(_factored_step, fullgraph=True, dynamic=False)

    def compiled_loop(x: Tensor, u: Tensor, s: Tensor, v: Tensor, h0: Tensor) -> Tensor:
        h, states = h0, []
        for e in x.unbind(0):
            h = step(h, e, u, s, v)
            states.append(h)
        return torch.stack(states)

    try:
        p.step(compiled_loop)
    except Exception as failure:  # any error of the compiler
        pytest.skip(f"torch.compile does not work here: {type(failure).__name__}")
    _compare(benchmark, bench, p, {"torch.compile of a step": compiled_loop}, error, {})


def _in_vectors(call: Callable[[], Any]) -> Any:
    """The call, with products of bfloat16 factors in vector registers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_scan, "has_amx", lambda: False)
        return call()


@pytest.mark.skipif(not has_bf16(), reason="no products of bfloat16 on this CPU")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.sizes([SIZES[0], *SIZES[2:]], quick=QUICK)
def test_bfloat16_factors(benchmark: Any, bench: Bench, size: Size, op: str) -> None:
    """Forward and backward with exact products over those with bfloat16 factors. Where these run in tile registers, the
    details also have the time of those in vectors."""
    p = problem(op, **size)
    exact, rounded = (functools.partial(p.step, functools.partial(p.loop, precision=each)) for each in ("ieee", "bf16"))
    error = check(f"{op} with bfloat16 factors", rounded(), exact(), BF16_TOLERANCE)
    benchmark.group = f"{op} with bfloat16 factors, forward and backward"
    calls = {"ieee": exact, "vectors": functools.partial(_in_vectors, rounded), "bf16": rounded}
    if not has_amx():
        del calls["vectors"]
    seconds = interleave(benchmark, calls, rounds=bench.rounds(15))
    bench.record(
        "precision",
        op,
        p.size,
        "time of exact products over that of bfloat16 factors",
        ratio(seconds["ieee"], seconds["bf16"]),
        bar=1.4,
        details={
            "ms": spread_ms(seconds["bf16"]),
            "peer_ms": spread_ms(seconds["ieee"]),
            **({"vectors_ms": spread_ms(seconds["vectors"])} if has_amx() else {}),
            "error": error,
            "tolerance": BF16_TOLERANCE,
        },
    )


def _compare(
    benchmark: Any,
    bench: Bench,
    p: Problem,
    loops: dict[str, Callable[..., Tensor]],
    error: float,
    bars: dict[str, float | None],
) -> None:
    """Check that the loops agree with ours, time them in turns with ours, forward and backward, and record the
    ratios."""
    ours = p.step(lambda *_: p.forward())
    for name, loop in loops.items():
        check(name, p.step(loop), ours, 2 * TOLERANCE)
    del ours
    T = p.size["T"]
    calls: dict[str, Callable[[], Any]] = {name: functools.partial(p.step, loop) for name, loop in loops.items()}
    calls["ours"] = lambda: p.step(lambda *_: p.forward())
    benchmark.group = f"{p.op}, forward and backward"
    seconds = interleave(benchmark, calls, rounds=bench.rounds(9 if T < 5000 else 3))
    for name in loops:
        bench.record(
            "loops",
            f"{name} over {p.op}",
            p.size,
            "times as long",
            ratio(seconds[name], seconds["ours"]),
            bar=bars.get(name),
            details={
                "us_per_step": round(1e6 * median(seconds["ours"]) / T, 3),
                "peer_us_per_step": round(1e6 * median(seconds[name]) / T, 3),
                "ms": spread_ms(seconds["ours"]),
                "peer_ms": spread_ms(seconds[name]),
                "error": error,
                "tolerance": TOLERANCE,
            },
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sizes([{"N": 512, "T": 75}], quick=QUICK)
def test_lengths(benchmark: Any, bench: Bench, size: Size, op: str) -> None:
    """The sentences of up to 75 characters of a text: lengths 10 ... 75, sorted, over the whole rectangle."""
    p = problem(op, **size)
    T = p.size["T"]
    lengths = torch.randint(min(10, T), T + 1, (BATCH,), generator=torch.Generator().manual_seed(0))
    lengths = lengths.sort(descending=True).values
    scan: Callable[..., Tensor] = getattr(functional, op)
    cotangent = p.cotangent * (torch.arange(T).unsqueeze(1) < lengths).unsqueeze(2)

    def step(given: Tensor | None) -> tuple[Tensor, ...]:
        hs = scan(p.x, *p.matrices, p.h0, activation="tanh", lengths=given)
        return torch.autograd.grad(hs, p.inputs, cotangent)

    # states after a sequence's end have zero cotangents, so that the rectangle has the same gradients
    error = check(f"{op} with lengths", step(lengths), step(None), TOLERANCE)
    benchmark.group = f"{op} with lengths, forward and backward"
    calls: dict[str, Callable[[], Any]] = {"rectangle": lambda: step(None), "lengths": lambda: step(lengths)}
    seconds = interleave(benchmark, calls, rounds=bench.rounds(15))
    bench.record(
        "lengths",
        op,
        p.size,
        "time of the rectangle over that with lengths",
        ratio(seconds["rectangle"], seconds["lengths"]),
        details={
            "padded_share": round(1 - float(lengths.sum()) / (T * BATCH), 3),
            "ms": spread_ms(seconds["lengths"]),
            "peer_ms": spread_ms(seconds["rectangle"]),
            "error": error,
            "tolerance": TOLERANCE,
        },
    )


MODAL_SIZES = [{"N": 128, "T": T, "B": B} for T, B in ((1000, 50), (10020, 50), (10020, 1))]
MODAL_QUICK = [{"N": 33, "T": 40, "B": 3}]
# Time of the sequential scan over that of the modal one, states, T = 10 020, B = 50: bar and goal.
STATES = (1.6, 2.0)


@pytest.mark.parametrize("what", ("states", "loss"))
@pytest.mark.sizes(MODAL_SIZES, quick=MODAL_QUICK)
def test_modal(benchmark: Any, bench: Bench, size: Size, what: str) -> None:
    """A linear scan of token ids, modal and step by step, forward and backward, the eigenbasis found in every call:
    its states; or the cross-entropy of a readout with nine classes, whose states are not made."""
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(T)
    u, _, v = factors(N, generator)
    s = 1 + 0.001 * (2 * torch.rand(N, generator=generator) - 1)
    table, readout = torch.randn(N, 10, generator=generator), 0.01 * torch.randn(9, N, generator=generator)
    ids = torch.randint(0, 10, (T, B), generator=generator)
    target = torch.randint(0, 9, (T, B), generator=generator)
    cotangent = torch.randn(T, B, N, generator=generator) if what == "states" else None
    inputs = [u, s, v, table, *([readout] if what == "loss" else [])]
    for tensor in inputs:
        tensor.requires_grad_()

    def step(algorithm: str) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"weight": table, "activation": "identity", "algorithm": algorithm}
        if what == "states":
            hs = functional.factored_scan(ids, u, s, v, **options)
            return torch.autograd.grad(hs, inputs, cotangent)
        loss = functional.scan_cross_entropy(ids, (u, s, v), readout, target, **options).loss
        return torch.autograd.grad(loss, inputs)

    # the sequential scan is the less exact of the two, see bench_accuracy.py
    error = check(f"modal {what}", step("modal"), step("sequential"), 10 * TOLERANCE)
    benchmark.group = f"linear scan, {what}, forward and backward"
    calls = {name: functools.partial(step, name) for name in ("sequential", "modal")}  # the last is ours
    seconds = interleave(benchmark, calls, rounds=bench.rounds(9 if T < 5000 else 5))
    bar, goal = STATES if what == "states" and T > 5000 and B > 1 else (None, None)
    bench.record(
        "modal",
        f"sequential over modal, {what}",
        size,
        "times as long",
        ratio(seconds["sequential"], seconds["modal"]),
        bar=bar,
        goal=goal,
        details={
            "us_per_step": round(1e6 * median(seconds["modal"]) / T, 3),
            "peer_us_per_step": round(1e6 * median(seconds["sequential"]) / T, 3),
            "ms": spread_ms(seconds["modal"]),
            "peer_ms": spread_ms(seconds["sequential"]),
            "error": error,
            "tolerance": 10 * TOLERANCE,
        },
    )


# torch.nn.RNN's time over that of a modal loss, forward, T = 10 000: bar and goal.
ONE = (8.0, 15.0)


@pytest.mark.parametrize("what", ("loss", "states"))
@pytest.mark.sizes([{"N": 128, "T": 10_000, "B": 1}], quick=[{"N": 33, "T": 40, "B": 1}])
def test_modal_forward_of_one_sequence(benchmark: Any, bench: Bench, size: Size, what: str) -> None:
    """torch.nn.RNN (tanh, ten features) over a linear recurrence of the same sizes. The loss has its readout and its
    cross-entropy in it, which torch's side has not, and the eigenbasis of an earlier call, as in training; the states
    have neither."""
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(T)
    u, s, v = factors(N, generator)
    w = (u * (1 + (s - 1) / 50)) @ v.mT
    weight, readout = torch.randn(N, 10, generator=generator), 0.01 * torch.randn(9, N, generator=generator)
    x, target = torch.randn(T, B, 10, generator=generator), torch.randint(0, 9, (T, B), generator=generator)
    theirs = torch.nn.RNN(10, N)
    basis = functional.scan_cross_entropy(
        x, w, readout, target, weight=weight, activation="identity", algorithm="modal"
    ).basis

    def ours(algorithm: str, basis: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {"weight": weight, "activation": "identity", "algorithm": algorithm}
        if what == "states":
            return functional.dense_scan(x, w, **options)
        return functional.scan_cross_entropy(x, w, readout, target, basis=basis, **options).loss

    with torch.no_grad():
        error = check(f"modal {what}", [ours("modal", basis)], [ours("sequential")], 10 * TOLERANCE)
        benchmark.group = "linear recurrence of one sequence, forward"
        calls = {"torch.nn.RNN": lambda: theirs(x), "modal": lambda: ours("modal", basis)}
        seconds = interleave(benchmark, calls, rounds=bench.rounds(9))
    bar, goal = ONE if what == "loss" else (None, None)
    bench.record(
        "modal_forward",
        "loss, with the basis of an earlier call" if what == "loss" else "states",
        size,
        "times as long",
        ratio(seconds["torch.nn.RNN"], seconds["modal"]),
        bar=bar,
        goal=goal,
        details={
            "us_per_step": round(1e6 * median(seconds["modal"]) / T, 3),
            "peer_us_per_step": round(1e6 * median(seconds["torch.nn.RNN"]) / T, 3),
            "ms": spread_ms(seconds["modal"]),
            "peer_ms": spread_ms(seconds["torch.nn.RNN"]),
            "error": error,
            "tolerance": 10 * TOLERANCE,
        },
    )
