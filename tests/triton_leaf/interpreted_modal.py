"""The Triton kernels of the modal ops against the reference, under Triton's interpreter; see ``interpreted.py``.

Chunks are made so short that tiny problems have several.
"""

from __future__ import annotations

import interpreter  # noqa: F401  (first: it decides that kernels are interpreted)

# isort: split
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SHORT, FloatProducts, some_lengths
from modal_problem import Problem, compare
from torch import Tensor

from orthokern import _modal_chunks
from orthokern.ops.modal_scan import ID_DTYPES
from orthokern.triton_kernels import modal_cross_entropy

DTYPES = (torch.float32, torch.float64)
LEAVES = ("triton_kernels", "reference")
SCANS = {name: importlib.import_module(f"orthokern.{name}.modal_scan") for name in LEAVES}
LOSSES = {name: importlib.import_module(f"orthokern.{name}.modal_cross_entropy") for name in LEAVES}

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # the interpreter's NumPy


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes: 4)


def scan(p: Problem, leaf: str = "triton_kernels", *, need_x: bool = True, lengths: Tensor | None = None) -> Any:
    """States and gradients of the leaf's functions, by name."""
    return p.leaf_scan(SCANS[leaf], need_x=need_x, lengths=lengths)


def loss(p: Problem, leaf: str = "triton_kernels", **options: Any) -> dict[str, Tensor]:
    """Everything that modal_cross_entropy_fwd of a leaf returns, by name."""
    return p.leaf_loss(LOSSES[leaf], **options)


def check_scan(problem: Problem, dtype: torch.dtype, lengths: Tensor | None = None) -> dict[str, Tensor]:
    inexact = problem.to(dtype)
    given = inexact if lengths is None else inexact.poisoned(lengths)
    actual = scan(given, lengths=lengths)
    expected, plain = (scan(p, "reference", lengths=lengths) for p in (inexact.to(torch.float64), inexact))
    compare(actual, expected, plain)
    return actual


def check_loss(problem: Problem, dtype: torch.dtype, lengths: Tensor | None = None, **options: Any) -> None:
    inexact = problem.to(dtype)
    given = inexact if lengths is None else inexact.poisoned(lengths)
    actual = loss(given, lengths=lengths, **options)
    expected, plain = (loss(p, "reference", lengths=lengths, **options) for p in (inexact.to(torch.float64), inexact))
    compare(actual, expected, plain)


# M, T, B, D: lanes over one block of 64, T of whole chunks, not whole, below one
SIZES = [(1, 1, 1, 1), (3, 7, 2, 2), (2, 8, 3, 5), (17, 13, 4, 2), (33, 3, 2, 3), (5, 21, 1, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("tokens", [True, False])
def test_scan_parity(tokens: bool, dtype: torch.dtype) -> None:
    for index, (M, T, B, D) in enumerate(SIZES):
        problem = Problem(M, T, B, D=D, tokens=tokens, P=index % 3, seed=index)
        check_scan(problem, dtype, some_lengths(B, T, "any", seed=index) if (index + tokens) % 2 else None)


@pytest.mark.parametrize("tokens", [True, False])
def test_long_chunks_of_the_scan(tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many joined chunks as the loop has loads under way, and more; one chunk of a length that is no power of 2."""
    for chunk, T in ((2, 11), (8, 17), (1, 5), (9, 9)):
        monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes, chunk=chunk: chunk)
        for dtype in DTYPES:
            check_scan(Problem(3, T, 2, D=1, tokens=tokens), dtype)
    monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes: 4)
    check_scan(Problem(3, 6, 2, tokens=tokens), torch.float32, torch.tensor([3, 5]))  # nobody has the last step


def test_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ids than half a chunk's steps: delta is stored, here for a chunk at a time, and summed by sorted ids."""
    for D, M, span in ((5, 3, 1), (3, 2, 10**6)):
        monkeypatch.setattr(_modal_chunks, "DELTA_BYTES", span)
        for dtype in DTYPES:
            problem = Problem(M, 14, 2, D=D)
            check_scan(problem, dtype)
            check_scan(problem, dtype, torch.tensor([14, 6]))


def test_runs_of_one_id() -> None:
    problem = Problem(3, 16, 2, D=2)
    problem.x[3:14] = 1
    problem.x[6, 1] = 0
    check_scan(problem, torch.float64)
    check_scan(problem, torch.float64, torch.tensor([5, 12]))


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_dtype_of_ids(dtype: torch.dtype) -> None:
    for D in (2, 5):
        problem = Problem(2, 5, 2, D=D)
        narrow = problem.map(lambda t: t if t.is_floating_point() else t.to(dtype))
        expected, actual = scan(problem), scan(narrow)
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name


def test_long_products_keep_their_digits() -> None:
    """Powers and chunks against a float64 loop: float32 tensors, whose results are rounded once."""
    problem = Problem(2, 90, 1, D=1, margin=1e-3, P=2).to(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_modal_chunks, "chunk_length", lambda T, lanes: 16)
        actual = scan(problem)
    expected = scan(problem.to(torch.float64), "reference")
    for name, tensor in actual.items():
        error = (tensor.double() - expected[name]).norm() / (expected[name].norm() + 1e-30)
        assert error < 1e-7, f"{name}: {error:.2e}"


# ---- with readout and loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("tokens", [True, False])
def test_loss_parity(tokens: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of one step (a chunk then has one), of one chunk, of two chunks, and one for all."""
    cases = [(1, 1, 1, 1, 1, 64), (3, 7, 2, 2, 2, 1), (2, 9, 3, 5, 9, 4), (33, 5, 2, 3, 17, 8), (5, 19, 1, 1, 3, 8)]
    for index, (M, T, B, D, C, steps) in enumerate(cases):
        monkeypatch.setattr(_modal_chunks, "span_steps", lambda *sizes, steps=steps: steps)
        problem = Problem(M, T, B, C, D=D, tokens=tokens, P=index % 3, bias=index != 2, seed=index)
        lengths = some_lengths(B, T, "any", seed=index) if (index + tokens) % 2 else None
        check_loss(problem, dtype, lengths, reduction="sum" if index % 2 else "mean")


def test_classes_in_tiles_and_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modal_cross_entropy, "MAX_BLOCK_C", 4)
    monkeypatch.setattr(modal_cross_entropy, "TILE", 8)
    monkeypatch.setattr(_modal_chunks, "SUM_ROWS", 4)
    problem = Problem(2, 5, 2, 11, D=2)
    problem.readout[[3, 9]] = problem.readout[[7, 2]]  # equal logits: the first counts
    problem.bias = None
    check_loss(problem, torch.float64)
    check_loss(problem, torch.float32, torch.tensor([4, 5]))


def test_extreme_logits() -> None:
    """Losses near 0 keep their digits, and large ones do not overflow."""
    problem = Problem(2, 4, 2, 4, D=2, bias=False)
    for size in (1e-3, 40.0):
        problem.readout = size * problem.readout / problem.readout.abs().max()
        check_loss(problem, torch.float64)
        check_loss(problem, torch.float32)
    problem.readout, problem.bias = 0 * problem.readout, torch.tensor([30.0, 0.0, -1.0, 2.0]).double()
    problem.target[:] = 0
    check_loss(problem, torch.float32)


def test_a_loss_without_gradients() -> None:
    problem, lengths = Problem(2, 6, 2, D=2), torch.tensor([2, 6])
    for options in ({}, {"lengths": lengths}, {"reduction": "sum"}):
        full, only = loss(problem, **options), loss(problem, need_grad=False, **options)
        for name, tensor in only.items():
            assert torch.equal(tensor, full[name])
        assert set(only) == {"loss", "hits"}


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_dtype_of_targets(dtype: torch.dtype) -> None:
    problem = Problem(2, 3, 2, D=2)
    narrow = problem.map(lambda t: t if t.is_floating_point() else t.to(dtype))
    expected, actual = loss(problem), loss(narrow)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_a_wrong_target_is_nan() -> None:
    for wrong in (-1, 3, 2**40):
        problem = Problem(2, 5, 2, 3, D=2)
        problem.target[3, 1] = wrong
        found = loss(problem)
        assert found["loss"].isnan() and found["grad_readout"].isnan().all() and found["grad_table"].isnan().any()
    lengths = torch.tensor([5, 3])
    padded, poisoned = loss(problem, lengths=lengths), loss(problem.poisoned(lengths), lengths=lengths)
    for name, tensor in padded.items():
        assert torch.equal(tensor, poisoned[name]), name


def test_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _modal_chunks.span_steps(50, 64, 9, 4)
    assert steps & (steps - 1) == 0 and 50 * (4 * 64 + 9) * 4 * steps <= _modal_chunks.SPAN_BYTES
    assert _modal_chunks.span_steps(10**6, 64, 9, 4) == 1
    monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes: T)  # as of many lanes
    monkeypatch.setattr(_modal_chunks, "span_steps", lambda *sizes: 4)  # then chunks are cut to spans
    check_loss(Problem(2, 11, 2, D=2), torch.float64)


def test_products_are_ieee_whatever_the_process_allows() -> None:
    problem = Problem(2, 5, 2, D=2).to(torch.float32)
    with FloatProducts() as products:
        loss(problem)
    assert products.seen


# ---- the host --------------------------------------------------------------------------------------------------------


def test_a_wrong_id_or_length_touches_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody checks what lies on a GPU."""
    problem = Problem(3, 9, 3, D=2)
    good = scan(problem)
    problem.x[5, 0], problem.x[2, 2] = 2, -1
    for given in (problem, problem.map(lambda t: t if t.is_floating_point() else t.to(torch.int16))):
        found = scan(given)
        assert torch.equal(found["z"][:, 1], good["z"][:, 1]) and torch.equal(found["z"][:5, 0], good["z"][:5, 0])
        assert found["z"][5:, 0].isnan().all() and found["z"][2:, 2].isnan().all()
        assert torch.equal(found["grad_z0"], good["grad_z0"]) and found["grad_table"].isfinite().all()
    problem = Problem(3, 5, 3, D=2)
    wrong, right = torch.tensor([-(2**63), 2**40, 3]), torch.tensor([0, 5, 3])
    monkeypatch.setattr(_modal_chunks, "span_steps", lambda *sizes: 2)  # launches of the loss that begin behind step 0
    for call in (scan, loss):
        expected = call(problem, lengths=right)
        for name, tensor in call(problem, lengths=wrong).items():
            assert torch.equal(tensor, expected[name]), name
    problem.pairs = torch.tensor([[0, 3], [1, -1], [2, 1]])
    assert scan(problem)["grad_pairs"].isnan().flatten(1).any(1).tolist() == [True, True, False]


def test_what_is_not_needed_is_empty_and_nothing_is_written_to() -> None:
    problem = Problem(3, 6, 2, tokens=False)
    copy = problem.map(torch.clone)
    full, some = scan(problem), scan(problem, need_x=False)
    for name, tensor in some.items():
        assert torch.equal(tensor, full[name])
    assert set(full) - set(some) == {"grad_x"}
    for name, value in vars(copy).items():
        assert value is None or torch.equal(value, getattr(problem, name)), name


def test_chunk_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lengths = [_modal_chunks.chunk_length(T, 3200) for T in (1, 100, 1000, 10_000, 1_000_000)]
    assert lengths == [16, 16, 16, 64, 512]
    assert _modal_chunks.chunk_length(1000, _modal_chunks.ENOUGH_LANES) == 1000


WAITS = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of the leaf asks a tensor for its values."""

    def refusal(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            assert not caller.startswith(("orthokern.triton_kernels", "orthokern._modal")), (
                f"{caller} calls Tensor.{name}"
            )
            return original(self, *args, **kwargs)

        return refuse

    problems = [Problem(2, 6, 2, D=D) for D in (2, 5)] + [Problem(2, 6, 2, tokens=False)]
    lengths = torch.tensor([6, 3])
    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, refusal(name))
    for problem in problems:
        scan(problem)
        scan(problem, lengths=lengths)
        loss(problem, lengths=lengths)
