"""The Triton kernels against the reference, under Triton's interpreter, on a CPU.

``tests/test_triton_kernels.py`` runs this file in a process of its own; what is marked slow belongs to its slow tests.
The functions of the leaf are called directly: the dispatcher has no CUDA device to serve here. Sizes are tiny, because
the interpreter needs a millisecond for what a GPU does in a microsecond; sizes that the compiled code cares about are
in ``tests/test_triton_kernels.py``.
"""

from __future__ import annotations

import interpreter  # noqa: F401  (first: it decides that kernels are interpreted)

# isort: split
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_scan_parity, check_gru, check_padding
from float_products import FloatProducts
from helpers import GruProblem, ScanProblem, gru_needs, scan_needs, scan_problem, some_lengths, with_resets
from torch import Tensor

from orthokern import _gpu_scans
from orthokern._scan_contract import ScanGradients
from orthokern.errors import InputError
from orthokern.ops.activations import NAMES
from orthokern.ops.gru_scan import VARIANTS
from orthokern.triton_kernels import _matrix, gru_scan

DTYPES = F32, F64 = (torch.float32, torch.float64)
OPS = ("dense_scan", "factored_scan")
INPUTS = ("dense", "features", "tokens")
GRADS = tuple(f"grad_{name}" for name in ScanGradients._fields)  # what a leaf returns, by the names of ``run``

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # the interpreter's NumPy


def leaf(op: str, backend: str) -> types.ModuleType:
    package = "triton_kernels" if backend == "triton" else "reference"
    return importlib.import_module(f"orthokern.{package}.{op}")


def contiguous(problem: ScanProblem) -> ScanProblem:
    """What the ops hand to a leaf."""
    return problem.map(lambda t: t.contiguous())


def run(
    problem: ScanProblem,
    fwd: str = "triton",
    bwd: str = "triton",
    *,
    checkpoint_every: int = 0,
    need_x: bool = True,
    need_params: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Forward and backward of the leaves: hs, ckpt, pre and every gradient, by name."""
    forward, backward = (getattr(leaf(problem.op, b), f"{problem.op}_{d}") for b, d in ((fwd, "fwd"), (bwd, "bwd")))
    args = problem.args(checkpoint_every=checkpoint_every, **options)
    states = forward(args)
    x_needed = problem.weight is not None or checkpoint_every > 0
    grads = backward(
        args if x_needed else args._replace(x=None),
        problem.grad_hs,
        states.ckpt if checkpoint_every else states.hs,
        states.pre,
        scan_needs(need_x, need_params),
    )
    results = {**states._asdict(), **dict(zip(GRADS, grads, strict=True))}
    return {name: problem.h0.new_empty(0) if result is None else result for name, result in results.items()}


def check(problem: ScanProblem, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Parity of everything that comes out of one problem; returns it."""
    inexact = contiguous(problem.to(dtype))
    actual = run(inexact, **options)
    assert_scan_parity(inexact, actual, lambda p, **o: run(p, "reference", "reference", **o), options)
    return actual


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor], skip: tuple[str, ...] = ("ckpt", "pre")) -> None:
    for name, tensor in one.items():
        if name not in skip:
            assert torch.equal(tensor, other[name]), name


# ---------------------------------------------------------------------------------------------------------------- scans


@pytest.fixture(params=["resident", "read in every step"])
def resident(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether matrices stay in registers."""
    if request.param != "resident":
        monkeypatch.setattr(_matrix, "RESIDENT_WORDS", dict.fromkeys(DTYPES, 0))
    assert _matrix.plan(17, 17, 1, torch.float32).resident == (request.param == "resident")
    return bool(request.param == "resident")


# every size once with every activation, kinds of input, dtypes and options in turn
SIZES = [(1, 1, 1), (3, 7, 3), (1, 2, 5), (3, 2, 17), (2, 3, 33)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
def test_parity(op: str, activation: str) -> None:
    turn = NAMES.index(activation) + OPS.index(op)
    for index, (B, T, N) in enumerate(SIZES):
        problem = scan_problem(
            op,
            B=B,
            T=T,
            N=N + N % 2 if activation == "oplu" else N,
            activation=activation,
            inputs=INPUTS[(turn + index) % 3],
            param_size="1N"[index % 2],
            seed=index,
        )
        check(problem, DTYPES[(turn + index) % 2])
        if index in (1, 3):
            options = {"message_clip": 0.3, "checkpoint_every": index - 1}
            check(problem, DTYPES[turn % 2], lengths=some_lengths(B, T, "any"), **options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
def test_parity_with_resets_and_a_leak(op: str, activation: str) -> None:
    """One of them, in turn, and both, which have the same bits with checkpoints."""
    turn = NAMES.index(activation) + OPS.index(op)
    for index, (B, T, N) in enumerate(((3, 7, 3), (2, 4, 17))):
        N += N % 2 if activation == "oplu" else 0
        inputs, dtype, units = INPUTS[(turn + index) % 3], DTYPES[(turn + index) % 2], (1, N)[(turn + index) % 2]
        plain, leaky = (
            scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=inputs, leak=leak, seed=index)
            for leak in (0, units)
        )
        ragged = {"lengths": some_lengths(B, T, "any"), "message_clip": 0.3}
        if (turn // 2 + index) % 2:
            check(leaky, dtype)
        else:
            check(with_resets(plain, state=index == 0), dtype, **(ragged if index else {}))
        problem = with_resets(leaky, state=turn % 3 > 0)
        first = check(problem, dtype, **ragged)
        again = run(contiguous(problem.to(dtype)), checkpoint_every=2, **ragged)
        rounded = ("grad_weight", "grad_x") if inputs == "features" else ()
        same_bits(first, again, skip=("ckpt", "pre", *rounded))


def test_rank_below_n(resident: bool) -> None:
    for K in (1, 5):
        check(scan_problem("factored_scan", B=2, T=3, N=9, K=K, activation="tanh", inputs="tokens"), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_more_units_than_a_panel_has_columns(op: str, resident: bool) -> None:
    for activation, inputs, dtype in (("prelu", "features", F32), ("oplu", "tokens", F64), ("tanh", "dense", F32)):
        check(scan_problem(op, B=3, T=3, N=34, activation=activation, inputs=inputs), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_padding_and_checkpoints_change_no_bit(op: str, resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros on padding, whatever the inputs hold there. Windows and segments that cross."""
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 2 * 3 * 18)  # windows of 2 steps
    lengths = torch.tensor([3, 1, 4])  # nobody has the last step
    for activation, inputs in (("prelu", "dense"), ("oplu", "tokens")):
        problem = contiguous(scan_problem(op, B=3, T=5, N=18, activation=activation, inputs=inputs).to(F32))
        check(problem, F32, lengths=lengths, message_clip=0.5)
        check_padding(problem, lengths, run, (1, 2, 100), message_clip=0.5)


@pytest.mark.parametrize("op", OPS)
def test_chunks(op: str) -> None:
    cases = ((2, 10, "dense", None), (1, 3, "features", None), (2, 6, "tokens", [6, 1]), (1, 1, "dense", None))
    for index, (B, T, inputs, lengths) in enumerate(cases):
        problem = scan_problem(op, B=B, T=T, N=5, activation="identity", inputs=inputs)
        ragged = None if lengths is None else torch.tensor(lengths)
        check(problem, DTYPES[index % 2], algorithm="chunked", lengths=ragged)


@pytest.mark.parametrize("op", OPS)
def test_a_length_out_of_range_counts_as_the_nearest_one(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody checks the lengths of a GPU's tensors: what is wrong must not be read or written with."""
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 16)  # windows of one step: launches that begin behind step 0
    problem = contiguous(scan_problem(op, B=4, T=2, N=4, activation="identity", inputs="tokens").to(F32))
    wrong, right = torch.tensor([-(2**63), 2**40 + 1, 2**63 - 1, -1]), torch.tensor([0, 2, 2, 0])
    for options in ({}, {"checkpoint_every": 1}, {"algorithm": "chunked"}):
        results = [run(problem, lengths=lengths, **options) for lengths in (wrong, right)]
        same_bits(*results, skip=())


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_token_makes_its_sequence_nan(op: str) -> None:
    problem = contiguous(scan_problem(op, B=3, T=3, N=4, activation="identity", inputs="tokens", D=5))
    good = run(problem)
    problem.x = problem.x.clone()
    problem.x[1, 0], problem.x[1, 2] = 5, -1
    hs = run(problem)["hs"]
    assert torch.equal(hs[:, 1], good["hs"][:, 1])
    assert torch.equal(hs[0], good["hs"][0])
    assert hs[1:, [0, 2]].isnan().all()


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_needed_is_empty_and_nothing_is_written_to(op: str) -> None:
    for inputs in INPUTS:
        problem = contiguous(scan_problem(op, B=2, T=2, N=4, activation="modrelu", inputs=inputs))
        copy = problem.map(torch.clone)
        full, no_x, no_params = run(problem), run(problem, need_x=False), run(problem, need_params=False)
        for name in GRADS:
            kept = name in ("grad_x", "grad_h0", "grad_norm")
            assert no_x[name].numel() == 0 if name == "grad_x" else torch.equal(no_x[name], full[name])
            assert torch.equal(no_params[name], full[name]) if kept else no_params[name].numel() == 0
        for before, after in zip((*copy.inputs(), copy.grad_hs), (*problem.inputs(), problem.grad_hs), strict=True):
            assert before is None or torch.equal(before, after)


@pytest.mark.parametrize("op", OPS)
def test_tensors_of_another_size_are_an_error(op: str) -> None:
    """The kernels would read and write past their ends."""
    problem = with_resets(contiguous(scan_problem(op, B=3, T=4, N=6, K=5, inputs="features", activation="prelu")))
    args = problem.args(lengths=torch.tensor([4, 2, 3]))
    scan = leaf(op, "triton")
    states = getattr(scan, f"{op}_fwd")(args)
    saved = {"grad_hs": problem.grad_hs, "states": states.hs, "pre": states.pre}
    tensors = {name: tensor for name, tensor in {**args._asdict(), **saved}.items() if isinstance(tensor, Tensor)}
    for name in tensors.keys() - {"h0", "second"}:  # which define the sizes
        tensor = tensors[name]
        shorter = {name: tensor[:-1] if name == "weight" else tensor[..., :-1].contiguous()}
        changed, own = (args._replace(**shorter), saved) if name in args._fields else (args, {**saved, **shorter})
        with pytest.raises(InputError, match=f"^{op}_bwd: {name} must have {tensor.numel()} elements, got "):
            getattr(scan, f"{op}_bwd")(changed, *own.values(), scan_needs())
    if op == "factored_scan":
        with pytest.raises(InputError, match=r"first and second have shapes \[5, 6\] and \[6, 5\]"):
            scan.factored_scan_fwd(args._replace(first=args.first.mT.contiguous()))
    with pytest.raises(InputError, match="x must be torch.float64, got torch.int64"):
        getattr(scan, f"{op}_fwd")(args._replace(x=torch.zeros(4, 3, dtype=torch.int64), weight=None))


@pytest.mark.parametrize("op", OPS)
def test_a_message_clip_beyond_the_range_of_the_dtype_has_no_effect(op: str) -> None:
    problem = contiguous(scan_problem(op, B=2, T=2, N=4).to(torch.float32))
    plain, clipped = run(problem), run(problem, message_clip=1e39)
    assert all(torch.equal(plain[name], clipped[name]) for name in GRADS)


# ------------------------------------------------------------------------------------------------------------------ GRU


def run_gru(p: GruProblem, **options: Any) -> dict[str, Tensor]:
    """Forward and backward of the leaf, everything that comes out."""
    result: dict[str, Tensor] = p.run_leaves(leaf("gru_scan", "triton"), **options)
    return result


@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_parity(variant: str, resident: bool) -> None:
    turn = VARIANTS.index(variant)
    for index, (B, T, N) in enumerate([(1, 1, 1), (3, 3, 3), (2, 2, 34)]):
        problem = GruProblem.random(variant, T, B, N, bias=(index + turn) % 3 != 0, seed=index)
        check_gru(problem, DTYPES[(turn + index) % 2], run_gru)
        lengths = some_lengths(B, T, "any", seed=index)
        lengths -= (lengths > 1).long() * (index % 2)  # nobody has the last step
        check_gru(problem, DTYPES[(turn + index + 1) % 2], run_gru, lengths)
        cut = problem.with_resets(state=index != 1, seed=index + turn)
        check_gru(cut, DTYPES[(turn + index) % 2], run_gru, lengths if index % 2 else None)


def test_a_gru_with_tensors_of_another_size_is_an_error() -> None:
    problem, gru = GruProblem.random("torch", 3, 2, 4), leaf("gru_scan", "triton")
    args = problem.args()
    states = gru.gru_scan_fwd(args)
    with pytest.raises(InputError, match="^gru_scan_bwd: grad_hs must have 12 elements, got 24"):
        gru.gru_scan_bwd(args._replace(h0=args.h0[:1], x=None), problem.grad_hs, states, gru_needs())
    with pytest.raises(InputError, match="^gru_scan_fwd: x must be torch.float64, got torch.int64"):
        gru.gru_scan_fwd(args._replace(x=torch.zeros(3, 2, 12, dtype=torch.int64)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_padding_plays_no_part(variant: str) -> None:
    """Not its contents, and a length out of range, which nobody checks on a GPU, counts as the nearest one."""
    B, T = 4, 3
    problem = GruProblem.random(variant, T, B, 5).map(Tensor.float)
    lengths = torch.tensor([2, 1, 0, 2])
    first = run_gru(problem, lengths=lengths)
    padding = torch.arange(T).unsqueeze(1) >= lengths
    for name in {"hs", "gates", "pre", "grad_x"} & set(first):
        assert not first[name][padding].any(), name
    same_bits(first, run_gru(problem.with_poisoned_padding(lengths), lengths=lengths))
    same_bits(run_gru(problem), run_gru(problem, lengths=torch.tensor([T, 2**40, 2**63 - 1, T])))
    wrong = torch.tensor([2, 1, -(2**63), 2])
    same_bits(first, run_gru(problem, lengths=wrong))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_without_parameters(variant: str) -> None:
    problem = GruProblem.random(variant, 3, 2, 6)
    everything, some = run_gru(problem), run_gru(problem, need_params=False)
    assert set(everything) - set(some) == {"grad_w", "grad_bias"}
    same_bits(some, {name: everything[name] for name in some})


# ------------------------------------------------------------------------------------------------------------ the host


def test_products_are_ieee_whatever_the_process_allows() -> None:
    """float32 is IEEE float32: TF32 that a user allows for other work must not reach torch's products of this leaf."""
    with FloatProducts() as products:
        for op, inputs in zip(OPS, ("features", "tokens"), strict=True):
            run(contiguous(scan_problem(op, B=2, T=2, N=4, inputs=inputs).to(torch.float32)))
        GruProblem.random("torch", 2, 2, 4).map(Tensor.float).run_leaves(gru_scan)
        for K in (2, 5):
            basis, g = torch.linalg.qr(torch.randn(1, 5, K))[0], torch.randn(1, 5, K)
            leaf("cayley", "triton").cayley(basis, g, 0.1)
    assert products.seen >= {"mm", "addmm", "addmm_", "bmm", "linalg_solve_triangular"}


OURS = ("orthokern.triton_kernels", "orthokern._gpu_scans")
WAITS = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of the leaf asks a tensor for its values."""
    problems = [contiguous(scan_problem(op, B=1, T=2, N=4, activation="prelu", inputs="tokens")) for op in OPS]
    linear = contiguous(scan_problem("factored_scan", B=1, T=2, N=4, activation="identity", inputs="features"))

    def refusal(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            assert not caller.startswith(OURS), f"{caller} calls Tensor.{name}"
            return original(self, *args, **kwargs)

        return refuse

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, refusal(name))
    lengths = torch.tensor([1])
    for problem in problems:
        run(problem, checkpoint_every=1)
        run(problem, lengths=lengths, message_clip=0.1)
    run(linear, algorithm="chunked", lengths=lengths)
    leaf("cayley", "triton").cayley(torch.eye(4), torch.randn(4, 4), torch.tensor(0.1))
    leaf("activations", "triton").activation_bwd(
        torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0.1]), activation="modrelu"
    )
