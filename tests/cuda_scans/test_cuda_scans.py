"""The CUDA scans on the host harness: every path against the reference, at sizes that reach every branch.

The harness runs the kernel sources themselves on the CPU (tests/cuda_host). Planner overrides, which only tests set,
choose the path where the size would choose another one.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from checks import assert_each_result_alone, check_padding, check_special_values
from comparison import assert_matches_reference
from cuda_cases import CLUSTER, GRU_PATHS, KINDS, OP_PATHS, OPS, PATHS, RESIDENT, check, check_gru, in_every_order, run
from cuda_host import build
from helpers import GruProblem, assert_same_bits, run_scan, scan_needs, scan_problem, some_lengths, with_resets
from torch import Tensor

from orthokern import _gpu_scans, cpu, dispatch
from orthokern._scan_contract import ScanArgs
from orthokern.cuda import _scan
from orthokern.ops.activations import NAMES
from orthokern.ops.gru_scan import VARIANTS


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize(("op", "path"), OP_PATHS)
def test_parity_of_every_path(op: str, activation: str, path: str, override: Any) -> None:
    """Alone, and without a leak and with one: with a clip and lengths, and with resets, which have the same bits with
    checkpoints. Every width of the resident kernels."""
    override(path)
    index = NAMES.index(activation) + list(PATHS).index(path)
    n, inputs = (33, 9, 100, 140)[index % 4] if path.startswith("resident") else 33, KINDS[index % 3]
    n += n % 2 if activation == "oplu" else 0
    # more steps than inputs are fetched ahead, than squares are summed, and than flags are read at a time
    B, T = 5, 70 if path == "low-rank" else (4, 19)[index % 2]
    lengths = some_lengths(B, T, ("any", "rising", "falling")[index % 3], seed=index)
    lengths -= (lengths == T).long() * (index % 4 == 0)  # nobody has the last step
    options: dict[str, Any] = {"activation": activation, "inputs": inputs, "param_size": "N1"[index % 2]}
    for leak in (0, (1, n)[index % 2]):
        problem = scan_problem(op, B=B, T=T, N=n, K=(n, 7)[index % 2], leak=leak, gap=1e-6, **options)
        if not leak:
            check(problem)
        check(problem, lengths=lengths if index % 3 or not leak else None, message_clip=(0.0, 0.3)[index % 2])
        problem = with_resets(problem, state=index % 4 > 0)
        some = lengths if leak or index % 3 else None
        first = check(problem, lengths=some)
        again = run(problem.to(torch.float32), lengths=some, checkpoint_every=33 if path == "low-rank" else 3)
        # features are multiplied by W_in in a product of torch over the steps of a segment
        rounded = tuple(name for name in first if name.startswith("grad_")) if inputs == "features" else ()
        assert_same_bits(first, again, skip=("ckpt", "pre"), rounded=rounded)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_forward_of_one_backward_of_the_other(op: str, activation: str) -> None:
    """What a forward saves is the same whoever ran it, with checkpoints and without."""
    problem = scan_problem(op, B=4, T=7, N=18, activation=activation, inputs="features")
    expected, plain = run_scan(problem, "reference"), run_scan(problem.to(torch.float32), "reference")
    others = ("reference", "cpu") if cpu.AVAILABLE else ("reference",)
    for other, every in itertools.product(others, (0, 3)):
        for fwd, bwd in (("cuda", other), (other, "cuda")):
            actual = run_scan(problem.to(torch.float32), fwd, bwd_backend=bwd, checkpoint_every=every)
            for name in problem.grad_names():
                assert_matches_reference(
                    actual[name],
                    expected[name],
                    plain[name],
                    name=f"{fwd}, {bwd}: {name}",
                    gradient=name != "grad_norm",
                )


@pytest.mark.parametrize(("index", "N"), list(enumerate((1, 2, 16, 65, 128, 130))))
@pytest.mark.parametrize("op", OPS)
def test_parity_of_the_path_that_is_chosen(op: str, index: int, N: int) -> None:
    for turn, steps in enumerate((1, 20)):  # more than inputs are fetched ahead, and than squares are summed at a time
        check(scan_problem(op, B=3, T=steps, N=N, inputs=KINDS[(index + turn) % 3]))


@pytest.mark.parametrize(
    ("N", "K", "overrides"),
    [
        (300, 290, {"cluster": 8, "group": 8, "shared_chunks": 0}),
        (300, 300, {"cluster": 8, "group": 4, "shared_chunks": 2}),
        (513, 513, {"cluster": 16, "group": 8, "shared_chunks": 1}),
        (600, 130, {"cluster": 16, "group": 1}),
        (250, 250, {}),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_parity_of_large_clusters(op: str, N: int, K: int, overrides: dict[str, int], override: Any) -> None:
    override({"path": CLUSTER, **overrides})
    check(scan_problem(op, B=7, T=3, N=N, K=K))


@pytest.mark.parametrize(("K", "size", "group"), [(1, 4, 2), (3, 8, 1), (13, 8, 4)])
def test_ranks_too_small_for_every_block_of_a_cluster(
    K: int, size: int, group: int, override: Any, harness: Any
) -> None:
    """Stores to other blocks keep no order: one that is late must not be taken for one of the next step."""
    override({"path": CLUSTER, "cluster": size, "group": group})
    problem = scan_problem("factored_scan", B=group, T=12, N=41, K=K)
    for seed in range(3):
        harness.set_schedule(2, seed)
        check(problem)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("path", ["resident", "resident-4", "cluster-1", "cluster-4", "streamed", "library"])
@pytest.mark.parametrize("op", OPS)
def test_no_schedule_changes_a_bit(op: str, path: str, ragged: bool, override: Any, harness: Any) -> None:
    """A result that depends on the order in which threads run is a race."""
    override(path)
    N = 150 if path == "streamed" else 34
    problem = scan_problem(op, B=9, T=5, N=N, activation="prelu", inputs="tokens").to(torch.float32)
    lengths = torch.tensor([1, 2, 3, 4, 4, 3, 2, 1, 1])
    in_every_order(harness, lambda: run(problem, **({"lengths": lengths, "message_clip": 0.3} if ragged else {})))


@pytest.mark.parametrize("op", OPS)
def test_group_and_cluster_change_no_bit_of_a_sequence(op: str, override: Any) -> None:
    problem = scan_problem(op, B=5, T=6, N=40).to(torch.float32)
    for paths in (("resident", "resident-pairs", "resident-4"), ("cluster-1", "cluster-2", "cluster-8", "streamed")):
        states = []
        for path in paths:
            override(path)
            states.append(run(problem)["hs"])
        assert all(torch.equal(states[0], other) for other in states[1:])


@pytest.mark.parametrize("activation", NAMES)
def test_parity_of_factored_maps_above_128_units(activation: str, override: Any) -> None:
    """Tiles of 5 rows, whose sums leave some lanes with nothing of their own, and one sequence at a time."""
    index = NAMES.index(activation)
    sizes = [(160, 160), (129, 127), (144, 144), (153, 9), (159, 158), (137, 137), (150, 149)]
    N, K = sizes[index % len(sizes)]
    group = 1 + index % 3
    override({"path": RESIDENT, "group": group})
    T, inputs = (4, 19)[index % 2], KINDS[index % 3]
    problem = scan_problem("factored_scan", B=3, T=T, N=N, K=K, activation=activation, inputs=inputs, gap=1e-6)
    check(problem)
    check(problem, lengths=torch.tensor([1, T, T - 2]), message_clip=0.3)


def test_bits_of_factored_maps_above_128_units(override: Any, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bit depends on how many sequences a block has, on the order of its threads, or on checkpoints."""
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 4 * 140 * 3)  # windows of 3 steps
    problem = scan_problem("factored_scan", B=4, T=7, N=140, activation="prelu", inputs="tokens").to(torch.float32)
    results = []
    for (order, schedule), group, every in zip(build.ORDERS.items(), (1, 3, 3), (0, 0, 2), strict=True):
        override({"path": RESIDENT, "group": group})
        harness.set_schedule(*schedule)
        results.append(run(problem, checkpoint_every=every))
        for name in ("hs", "grad_x") if order == "reverse" else ():
            assert torch.equal(results[0][name], results[1][name]), name
    assert_same_bits(results[1], results[2], skip=("ckpt", "pre"))
    linear = scan_problem("factored_scan", B=2, T=10, N=140, activation="identity")
    check(linear, algorithm="chunked")


@pytest.mark.parametrize(("op", "path"), OP_PATHS)
def test_a_token_out_of_range_is_nan_in_its_sequence_alone(op: str, path: str, override: Any) -> None:
    override(path)
    problem = scan_problem(op, B=5, T=12, N=20, inputs="tokens", D=6).to(torch.float32)
    # the op checks the ids of CPU tensors, and nobody those of CUDA tensors
    forward = getattr(dispatch.leaf(op, "cuda"), f"{op}_fwd")
    expected = forward(problem.args()).hs
    problem.x[3, 1], problem.x[10, 4] = 6, -1
    actual = forward(problem.args()).hs
    good = torch.ones(12, 5, dtype=torch.bool)
    good[3:, 1] = good[10:, 4] = False
    assert torch.equal(actual[good], expected[good])
    assert bool(actual[~good].isnan().all())
    backward = getattr(dispatch.leaf(op, "cuda"), f"{op}_bwd")
    backward(problem.args(), problem.grad_hs, actual, None, scan_needs())  # reads and writes nothing out of bounds


@pytest.mark.parametrize(("op", "path"), OP_PATHS)
def test_padding_plays_no_part(op: str, path: str, override: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its contents, not the checkpoints: the same bits, and zeros there."""
    override(path)
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 5 * 18 * 6)  # windows of 6 steps
    B, T, inputs = 5, 11, KINDS[(list(PATHS).index(path) + OPS.index(op)) % 3]
    activation = {"dense": "tanh", "features": "prelu", "tokens": "oplu"}[inputs]
    problem = scan_problem(op, B=B, T=T, N=18, activation=activation, inputs=inputs, D=70, gap=-1.0).to(torch.float32)
    check_padding(problem, torch.tensor([4, 1, 10, 3, 10]), run, (4,), message_clip=0.5)
    full = run(problem, lengths=torch.full((B,), T), message_clip=0.5)
    assert_same_bits(full, run(problem, message_clip=0.5))


@pytest.mark.parametrize(("op", "path"), OP_PATHS)
def test_a_length_out_of_range_counts_as_the_nearest_one(op: str, path: str, override: Any) -> None:
    """Nobody checks the lengths of a GPU's tensors: what is wrong must not be read or written with."""
    override(path)
    rank = {"K": 8} if path == "low-rank" else {}  # of which no map is composed
    problem = scan_problem(op, B=5, T=4, N=17, activation="identity", inputs="tokens", **rank).to(torch.float32)
    wrong = torch.tensor([-(2**63), 2**40 + 1, 2**63 - 1, -1, 2])
    leaf = dispatch.leaf(op, "cuda")  # the ops check the CPU's
    fwd, bwd = (getattr(leaf, f"{op}_{direction}") for direction in ("fwd", "bwd"))
    for options in ({}, {"checkpoint_every": 3}, {"algorithm": "chunked"}):
        results = []
        for lengths in (wrong, wrong.clamp(0, 4)):
            args = problem.args(lengths=lengths, **options)
            hs, ckpt, pre = fwd(args)
            results.append([hs, ckpt, *bwd(args, problem.grad_hs, hs if ckpt is None else ckpt, pre, scan_needs())])
        for one, other in zip(*results, strict=True):
            assert one is other is None or torch.equal(one, other)


def test_a_clip_leaves_a_nan() -> None:
    """As torch.clamp does: a NaN in the gradient has to be seen."""
    problem = scan_problem("dense_scan", B=3, T=4, N=9).to(torch.float32)
    problem.grad_hs[2, 1, 5] = float("nan")
    grad = run(problem, message_clip=0.1)["grad_x"]
    assert grad[:3, 1].isnan().any(-1).all() and not grad[:, [0, 2]].isnan().any()


ONE_OF_A_KERNEL = ("resident", "resident-4", "cluster-4", "library", "low-rank")


@pytest.mark.parametrize(("op", "path"), [each for each in OP_PATHS if each[1] in ONE_OF_A_KERNEL])
def test_only_what_is_needed(op: str, path: str, override: Any) -> None:
    override(path)
    kind = KINDS[(list(PATHS).index(path) + OPS.index(op)) % 3]
    problem = scan_problem(op, B=3, T=5, N=17, activation="prelu", inputs=kind, leak=17)
    assert_each_result_alone(with_resets(problem).to(torch.float32), "cuda")


def test_many_sequences(harness: Any, override: Any) -> None:
    """A grid holds 65535 blocks along y and z, and any number along x: here 2, and 4 tiles of sequences.

    In earnest that is 2 097 120 sequences, which chunks of time reach.
    """
    harness.set_chip(largest_grid_yz=2)
    for path in ("resident-4", "cluster-8", "library"):
        override(path)
        for op in OPS:
            check(scan_problem(op, B=100, T=2, N=40 if path == "library" else 9))
    override("library")
    check(scan_problem("factored_scan", B=5, T=40, N=9, activation="identity"), algorithm="chunked")
    for variant in VARIANTS:
        override(GRU_PATHS["library"])
        check_gru(GruProblem.random(variant, 2, 100, 40))


@pytest.mark.parametrize("activation", NAMES)
def test_special_values_of_activations(activation: str) -> None:
    def run(x: Tensor, param: Tensor | None) -> Tensor:
        states = x.view(1, 1, -1), None, None, torch.zeros(len(x), len(x)), torch.zeros(1, len(x))
        return _scan.scan_fwd(ScanArgs(*states, None, None, param, activation)).hs.flatten()

    check_special_values(activation, torch.float32, run)


def test_memory_that_is_not_aligned() -> None:
    """A view that begins in the middle of a vector is contiguous, but must not be read in vectors."""
    problem = scan_problem("dense_scan", B=3, T=4, N=9, activation="prelu").to(torch.float32)
    views = problem.map(lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape))
    assert views.x.data_ptr() % 16 and views.x.is_contiguous()
    assert_same_bits(run(problem), run(views))
