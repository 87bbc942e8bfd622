"""The CUDA kernels without a GPU: their sources as plain C++, run by the host harness (docs/cuda-host-harness.md).

First the harness itself: it must compute what CUDA would, and it must catch planted bugs. Then the kernels against the
reference, in several orders of their threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import check_cayley
from cuda_host import build
from helpers import SHORT, bases, strided
from torch import Tensor

from orthokern import functional
from orthokern.cuda import _call, cayley
from orthokern.errors import InputError

DTYPES = (torch.float32, torch.float64)
NAN = float("nan")


@pytest.fixture(autouse=True)
def schedule(module: Any) -> Iterator[None]:
    """One thread at a time, and after a test the harness as it was."""
    torch.set_num_threads(1)
    yield
    module.set_schedule(*build.ORDERS["forward"])
    module.set_chip()


@pytest.fixture
def workspaces() -> list[Tensor]:
    """The workspaces that a test's calls of kernels were given, oldest first."""
    return []


@pytest.fixture
def cuda(module: Any, monkeypatch: pytest.MonkeyPatch, workspaces: list[Tensor]) -> Iterator[Any]:
    """The backend "cuda", on CPU tensors. Its workspaces begin as NaN, and nothing may be written behind their end."""
    build.use(module, monkeypatch)
    true_workspace, guarded = _call.workspace, []

    def workspace(*args: Any) -> Tensor:
        size = true_workspace(*args).numel()
        memory = torch.full((size + 4096,), 0xFF, dtype=torch.uint8)
        guarded.append(memory[size:])
        workspaces.append(memory[:size])
        return memory[:size]

    monkeypatch.setattr(_call, "workspace", workspace)
    yield module
    assert all(bool((behind == 0xFF).all()) for behind in guarded), "a write behind the end of a workspace"


orders = pytest.mark.parametrize("order", build.ORDERS)

# ---------------------------------------------------------------------------------------------------------- the harness

# as selftest.cu has them
_, NO_BARRIER, OUTSIDE, DIVERGE, OTHER_BARRIER, EXIT, NO_WAIT, TOO_EARLY, MISALIGNED = range(9)


def selftest(
    module: Any, name: str, x: Tensor, shape: tuple[int, ...], order: str = "forward", variant: int = 0
) -> Tensor:
    """What a kernel of selftest.cu makes of x, float32."""
    module.set_schedule(*build.ORDERS[order])
    out = torch.full(shape, NAN)
    module.selftest(name, x.data_ptr(), out.data_ptr(), x.numel(), variant)
    return out


# name -> (shape, what the kernel computes, the bugs that every order shows)
KERNELS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "reverse": ((100,), lambda x: x.flip(0), (NO_BARRIER,)),
    "prefix": ((100,), lambda x: x.cumsum(0), ()),
    "warp": ((32,), lambda x: x.view(2, 16).sum(1).repeat_interleave(16), ()),
    "pipeline": ((320,), lambda x: 2 * x, (NO_WAIT,)),
    "ring": ((2, 4, 32), lambda x: x.roll(1, dims=1), (EXIT, NO_WAIT, TOO_EARLY)),
}


@orders
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_share_memory(module: Any, order: str, name: str) -> None:
    shape, function, _ = KERNELS[name]
    x = torch.randn(shape)
    torch.testing.assert_close(selftest(module, name, x, shape, order), function(x), atol=1e-4, rtol=0)


@orders
@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name, (_, _, bugs) in KERNELS.items() for bug in bugs])
def test_planted_bugs_are_caught(module: Any, order: str, name: str, bug: int) -> None:
    """By a report or by a wrong result."""
    shape, function, _ = KERNELS[name]
    x = torch.randn(shape)
    try:
        result = selftest(module, name, x, shape, order, bug)
    except RuntimeError as error:
        assert "host harness" in str(error)
    else:
        assert not torch.allclose(result, function(x), atol=1e-4)


def test_a_barrier_that_is_missing_behind_a_first_write_is_caught(module: Any) -> None:
    """A single order may happen to be the right one."""
    x = torch.randn(100)
    one, other = (selftest(module, "prefix", x, (100,), order, NO_BARRIER) for order in ("forward", "reverse"))
    assert not torch.equal(one, other)


@orders
@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("reverse", OUTSIDE, "a write behind the end of the block's dynamic shared memory"),
        ("prefix", OUTSIDE, "a write behind the end of the block's static shared memory"),
        ("reverse", DIVERGE, "99 of 100 threads wait forever.*__syncthreads at selftest.cu:"),
        ("reverse", EXIT, "99 of 100 threads wait forever.*__syncthreads at selftest.cu:"),
        ("reverse", OTHER_BARRIER, "threads of a block wait at different barriers: __syncthreads at selftest.cu:"),
        ("reverse", MISALIGNED, r"a misaligned address: 0x[0-9a-f]+ at selftest.cu:[0-9]+ \(thread \(3, 0, 0\)"),
        ("warp", DIVERGE, "16 of 32 threads wait forever.*__syncwarp at selftest.cu:"),
    ],
)
def test_faults_are_reported(module: Any, order: str, name: str, variant: int, message: str) -> None:
    shape, function, _ = KERNELS[name]
    x = torch.randn(shape)
    with pytest.raises(RuntimeError, match=message):
        selftest(module, name, x, shape, order, variant)
    # and the harness is usable afterwards
    torch.testing.assert_close(selftest(module, name, x, shape, order), function(x), atol=1e-4, rtol=0)


def test_tensor_cores_cut_their_sums(module: Any) -> None:
    """Terms lose what lies below the largest one, and a sum is not rounded to nearest."""
    b = torch.full((16, 8), 0.75)
    b[0] = 2.0**24
    x = torch.cat([torch.ones(256), b.flatten()])
    tf32, bf16 = selftest(module, "mma", x, (2, 16, 8))
    # seven terms of 0.75 beside 2^24 in the first step of tf32, eight beside the same sum in the second one
    assert bool((tf32 == 2.0**24).all()) and bool((bf16 == 2.0**24).all())
    b[0] = 2.0**22  # a quarter is the last bit kept, and the sum of 2^22 + 5.25 then has a float
    tf32 = selftest(module, "mma", torch.cat([torch.ones(256), b.flatten()]), (2, 16, 8))[0]
    assert bool((tf32 == 2.0**22 + 11).all())  # 5.25 cut to 5, then 5 + 6


@orders
def test_tensor_cores(module: Any, order: str) -> None:
    a, b = torch.randn(16, 16), torch.randn(16, 8)
    tf32, bf16 = selftest(module, "mma", torch.cat([a.flatten(), b.flatten()]), (2, 16, 8), order)
    torch.testing.assert_close(bf16, a.bfloat16().float() @ b.bfloat16().float())

    def rounded(t: Tensor) -> Tensor:  # to 10 bits behind the point, ties away from zero
        return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    torch.testing.assert_close(tf32, rounded(a) @ rounded(b))
    assert not torch.allclose(tf32, a @ b, atol=1e-5)


def test_another_gpu_can_be_pretended(module: Any) -> None:
    x = torch.randn(2, 4, 32)
    module.set_chip(major=8, minor=0)
    with pytest.raises(RuntimeError, match="clusters need compute capability 9.0"):
        selftest(module, "ring", x, (2, 4, 32))
    module.set_chip(shared_per_block=128)
    with pytest.raises(RuntimeError, match="400 bytes of shared memory, the device has 128"):
        selftest(module, "reverse", torch.randn(100), (100,))


def test_a_limit_on_shared_memory_is_never_lowered(module: Any) -> None:
    """A launch between the call that raises its limit and its start must not lose it to another thread."""
    failed, limits_set = module.race_for_shared_memory(8, 2000)
    assert failed == 0
    assert 4 <= limits_set <= 4 * 50  # two kernels on two devices, at most once for each of the sizes 1 to 50


# --------------------------------------------------------------------------------------------------------------- cayley

# one block for each matrix, then by tiles, but that (65, 64) fits a block in float32 only
SHAPES = [(1, 1), (2, 2), (5, 3), (7, 7), (17, 1), (31, 31), (33, 33), (50, 7), (64, 64), (130, 7), (3, 9, 9)]
SHAPES += [(2, 3, 12, 5), (65, 64), (65, 65), (66, 65), (120, 63)]


def cayley_by_cuda(m: Tensor, g: Tensor, lr: Tensor) -> Tensor:
    return torch.ops.orthokern.cayley(m, g, lr, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_cayley_parity(cuda: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    m, g = bases(shape, dtype)
    rates = [*map(torch.tensor, (1e-6, 1e-2, 1.0, -0.1)), torch.rand(shape[:-2], dtype=dtype)]
    for lr, order in zip(rates, [*build.ORDERS, "reverse", "random"], strict=True):
        cuda.set_schedule(*build.ORDERS[order])
        actual = check_cayley(m, g, lr, cayley_by_cuda)
        cuda.set_schedule(*build.ORDERS["forward"])
        assert torch.equal(actual, torch.ops.orthokern.cayley(strided(m), strided(g), lr, "cuda"))


@pytest.mark.parametrize(
    ("n", "k", "dtype", "launches"),
    [
        (64, 64, torch.float32, 1),
        (64, 64, torch.float64, 1),
        (65, 65, torch.float32, 7),
        (113, 63, torch.float32, 1),
        (114, 63, torch.float32, 7),
        (96, 40, torch.float64, 1),
        (97, 40, torch.float64, 7),
        (3000, 2, torch.float64, 7),
        # less than 48 KB of dynamic shared memory, but more than that with the static part
        (500, 10, torch.float32, 1),
        (64, 50, torch.float32, 1),
        (128, 16, torch.float64, 1),
        (50, 32, torch.float64, 1),
    ],
    ids=str,
)
def test_cayley_in_one_launch_where_a_block_holds_the_matrix(
    cuda: Any, workspaces: list[Tensor], n: int, k: int, dtype: torch.dtype, launches: int
) -> None:
    """Square up to 64, thin as far as 94 KB of shared memory go; no workspace then."""
    cuda.set_chip(major=8, minor=9, shared_per_block=99 << 10)
    m, g = bases((n, k), dtype)
    cuda.kernels_run()
    torch.ops.orthokern.cayley(m, g, torch.tensor(0.01), "cuda")
    assert cuda.kernels_run() == launches
    assert bool(workspaces[-1].numel()) == (launches > 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_cayley_by_series_and_by_elimination(cuda: Any, workspaces: list[Tensor], dtype: torch.dtype) -> None:
    """From N = 129 on small steps end with the series, moderate ones with elimination, large ones with its other form.

    One batch holds one of each, so that no matrix may depend on what another one does.
    """
    small = [1e-5, 1e-4, 3e-4] if dtype == torch.float32 else [1e-9, 1e-6, 1e-5]
    rates = torch.tensor([small[0], 0.0, *small[1:], 1e-3, 0.05, 3.0], dtype=dtype)
    m, g = bases((len(rates), 130, 130), dtype)
    cuda.set_schedule(*build.ORDERS["random"])
    together = check_cayley(m, g, rates, cayley_by_cuda)
    # Elimination would hide a series that goes wrong. The workspace begins with sums of 5 stages and 3 x 3 tiles, then
    # come the decisions after each stage: 0 go on, 1 converged, 2 eliminate, 3 eliminate, and the step is large.
    begin = -(-len(rates) * 5 * 9 * 8 // 256) * 256
    status = workspaces[-1][begin : begin + len(rates) * 5 * 4].view(torch.int32).view(-1, 5).tolist()
    series = [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert status == [*series, [0, 2, 2, 2, 2], [0, 2, 2, 2, 2], [3, 3, 3, 3, 3]]
    cuda.set_schedule(*build.ORDERS["reverse"])
    for i, rate in enumerate(rates.tolist()):
        alone = functional.cayley(m[i], g[i], rates[i], backend="cuda")
        assert torch.equal(together[i], alone), rate
    assert torch.equal(together[1], m[1])


def test_cayley_checks_the_size_of_the_gradient(cuda: Any) -> None:
    with pytest.raises(InputError, match="^cayley: g must have 1600 elements, got 4"):
        cayley.cayley(torch.eye(40), torch.ones(2, 2), 0.1)


def test_cayley_of_a_large_gradient(cuda: Any) -> None:
    """In one block also of low rank, as gradients may be: with pivots of 1 x 1, |X| = 1e6 would leave three digits."""
    for shape in ((2, 40, 40), (2, 41, 41), (2, 40, 30), (2, 70, 70), (2, 130, 65)):
        m, g = bases(shape, torch.float64)
        low_rank = torch.randn(2, shape[-2], 2, dtype=torch.float64) @ torch.randn(2, 2, shape[-1], dtype=torch.float64)
        eye = torch.eye(shape[-1], dtype=torch.float64)
        for scale in (1e2, 1e4, 1e6):
            for gradient in (g, low_rank) if shape[-2] == shape[-1] <= 64 else (g,):
                new = torch.ops.orthokern.cayley(m, scale * gradient, torch.tensor(1.0), "cuda")
                assert (new.mT @ new - eye).abs().max() < 1e-9 * scale**0.5


@pytest.mark.parametrize("shape", [(33, 33), (40, 6), (66, 66)], ids=str)
def test_cayley_drifts_as_little_as_the_reference(cuda: Any, shape: tuple[int, int]) -> None:
    """Small steps that go on in one direction: what a step adds to M^T M - I must not add up. Thin: a gradient with a
    large part along M, from a basis that is not orthonormal, whose deviation must not grow."""
    m, g = bases(shape, torch.float32)
    if shape[0] > shape[1]:
        m = m + 1e-5 * torch.randn(shape)
        g = 3 * m @ torch.diag(torch.linspace(-1, 1, shape[1])) + 0.1 * g
    ours, plain, eye = m, m, torch.eye(shape[1], dtype=torch.float64)
    for _ in range(60):
        ours = torch.ops.orthokern.cayley(ours, g, torch.tensor(3e-3), "cuda")
        plain = torch.ops.orthokern.cayley(plain, g, torch.tensor(3e-3), "reference")
    drift, allowed = (float((x.double().mT @ x.double() - eye).norm()) for x in (ours, plain))
    assert drift < 1.5 * allowed


@orders
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_cayley_of_several_sizes(cuda: Any, dtype: torch.dtype, order: str) -> None:
    """Square and thin, in a block and by tiles, some by a series, with rates of any kind: the bits of single calls."""
    shapes = [
        (33, 33),
        (130, 130),
        (70, 66),
        (1, 1),
        (3, 9, 9),
        (130, 7),
        (2, 129, 129),
        (17, 1),
        (0, 5, 5),
        (2, 70, 70),
    ]
    cuda.set_schedule(*build.ORDERS[order])
    steps: list[Any] = []
    for index, shape in enumerate(shapes):
        rate = (1e-5, 3.0, torch.rand(shape[:-2]), torch.tensor(0.01))[index % 4]
        steps.append((*bases(shape, dtype), rate))
    cuda.kernels_run()
    alone, launches = [], {}
    for shape, step in zip(shapes, steps, strict=True):
        alone.append(cayley.cayley(*step))
        launches[shape] = cuda.kernels_run()
    assert {shape for shape in shapes if launches[shape] == 1} == {(33, 33), (1, 1), (3, 9, 9), (130, 7), (17, 1)}
    together = cayley.cayley_of_many(steps)
    # one for all that fit a block, and as many as the largest square and the largest thin size take
    assert cuda.kernels_run() == 1 + launches[130, 130] + launches[70, 66]
    for shape, one, other in zip(shapes, together, alone, strict=True):
        assert torch.equal(one, other), shape
    if order == "forward":
        with pytest.raises(ValueError, match="g is torch.float"):
            cayley.cayley_of_many([steps[0], (steps[1][0], steps[1][1].to(torch.float16), 0.1)])


def test_cayley_of_more_sizes_than_one_launch_holds(cuda: Any) -> None:
    steps = [(*bases((1 + index % 3, n, k), torch.float32), 0.1) for index, (n, k) in enumerate(MANY)]
    cuda.kernels_run()
    together = cayley.cayley_of_many(steps)
    assert cuda.kernels_run() == 3
    for one, step in zip(together, steps, strict=True):
        assert torch.equal(one, cayley.cayley(*step))


MANY = [(n, k) for n in range(1, 20) for k in {n, (n + 1) // 2}]  # 19 square sizes, 18 thin ones; 16 to a launch


def test_cayley_of_nan_is_nan(cuda: Any) -> None:
    """A non-finite gradient must not look like a series that has converged."""
    for shape in ((2, 130, 130), (2, 70, 66), (2, 20, 20), (2, 21, 21), (2, 20, 4)):
        for bad in (NAN, float("inf")):
            m, g = bases(shape, torch.float32)
            g[0, 3, 2] = bad
            stepped = cayley.cayley(m, g, 1e-5)
            assert stepped[0].isnan().any() and not stepped[1].isnan().any(), shape
