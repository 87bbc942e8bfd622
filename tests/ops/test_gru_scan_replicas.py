"""gru_scan for R models at once: one call against a loop, torch.func's transforms, wrong shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import GruProblem, models_of, served, some_lengths
from torch import Tensor
from torch.func import grad, vmap

from orthokern import functional
from orthokern.diagnostics import tap
from orthokern.errors import InputError
from orthokern.ops.gru_scan import VARIANTS

R, T, B, N = 3, 4, 2, 5
AT_ONE = ("hs", "gates", "pre", "grad_x")  # R stands behind T


def problems(variant: str, count: int = R) -> list[GruProblem]:
    return [GruProblem.random(variant, T, B, N, seed=seed).with_resets(seed=seed) for seed in range(count)]


@pytest.mark.parametrize("backend", served("gru_scan"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_op_of_replicas_is_a_loop(variant: str, backend: str) -> None:
    of_all = problems(variant)
    lengths = [some_lengths(B, T, "any", seed) for seed in range(R)]
    found = models_of(of_all).run(backend, lengths=torch.stack(lengths))
    for r, (problem, own) in enumerate(zip(of_all, lengths, strict=True)):
        for name, tensor in problem.run(backend, lengths=own).items():
            if tensor.numel():
                assert torch.equal(found[name].select(int(name in AT_ONE), r), tensor), name
            else:
                assert not found[name].numel(), name


@pytest.mark.parametrize("backend", served("gru_scan"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_vmap_with_what_models_share(variant: str, backend: str) -> None:
    """By autograd of vmap, by vmap of grad and by grad of vmap; x, bias, resets and lengths are those of all models."""
    of_all = problems(variant)
    x, bias, resets, state = of_all[0].x, of_all[0].bias, of_all[0].resets, of_all[0].reset_state
    lengths = some_lengths(B, T, "any")
    w, h0 = (torch.stack([getattr(problem, name) for problem in of_all]) for name in ("w", "h0"))

    def loss(x: Tensor, w: Tensor, h0: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        cuts: dict[str, Any] = {"lengths": lengths, "resets": resets, "reset_state": state}
        return functional.gru_scan(x, w, h0, bias=bias, variant=variant, backend=backend, **cuts).square().sum()

    places = (None, 0, 0, None, None)
    given = [t.clone().requires_grad_() for t in (x, w, h0, bias, state) if t is not None]

    def looped(*given: Tensor) -> Tensor:
        alone = [[t if place is None else t[r] for t, place in zip(given, places, strict=True)] for r in range(R)]
        return torch.stack([loss(*one) for one in alone])

    def every(*given: Tensor) -> Tensor:
        return vmap(loss, places)(*given)

    wanted = torch.autograd.grad(looped(*given).sum(), given)
    constants = [t.detach() for t in given]
    torch.testing.assert_close(every(*constants), looped(*constants))
    for found in (
        torch.autograd.grad(every(*given).sum(), given),
        grad(lambda *given: every(*given).sum(), (0, 1, 2, 3, 4))(*constants),
        [
            t if place == 0 else t.sum(0)
            for t, place in zip(vmap(grad(loss, (0, 1, 2, 3, 4)), places)(*constants), places, strict=True)
        ],
    ):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)

    def twice(total: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(total, given, create_graph=True)
        return torch.autograd.grad(sum((one.square().sum() for one in first), torch.zeros(())), given)

    for one, other in zip(twice(every(*given).sum()), twice(looped(*given).sum()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_replicas(variant: str) -> None:
    p = models_of(problems(variant, 2))
    tensors = [t.requires_grad_() for t in (p.x, p.w, p.h0)]
    shared = torch.randn(3 * N, dtype=torch.float64, requires_grad=True)
    cuts = (None, p.resets, p.reset_state)
    torch.library.opcheck(torch.ops.orthokern.gru_scan_fwd.default, (*tensors, shared, variant, "cpu", *cuts))


def test_vmap_in_vmap() -> None:
    p = GruProblem.random("torch", T, 3, N)
    w = torch.stack([p.w, p.w / 2])

    def run(x: Tensor, w: Tensor) -> Tensor:
        return functional.gru_scan(x, w, variant="torch")

    x = torch.stack([p.x, p.x.flip(0), -p.x])
    alone = torch.stack([torch.stack([run(one, of_w) for one in x]) for of_w in w])
    assert torch.equal(vmap(vmap(run, (0, None)), (None, 0))(x, w), alone)


def test_taps_get_the_norms_of_each_model() -> None:
    p = models_of(problems("kanai"))
    w = p.w.requires_grad_()
    with tap() as together:
        vmap(lambda x, w: functional.gru_scan(x, w, variant="kanai"), (1, 0))(p.x, w).sum().backward()
    with tap() as alone:
        for r in range(R):
            functional.gru_scan(p.x[:, r], w[r], variant="kanai").sum().backward()
    for name in ("state_norms", "grad_norms"):
        for found, wanted in zip(getattr(together, name), getattr(alone, name), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"h0": (2, B, N)},
            r"gru_scan: h0 has shape \[2, 2, 5\] in a call for R = 3 replicas: accepted is R in front of",
        ),
        ({"x": (T, 2, B, 3 * N)}, r"gru_scan: x has shape .* for R = 3 replicas: accepted is \[T, R, B, 3N\]"),
        ({"x": (T, R, 1, 3 * N)}, r"gru_scan: x has shape .* for R = 3 replicas: accepted is \[T, R, B, 3N\]"),
        ({"w": (R, N, N)}, r"gru_scan: w has shape \[3, 5, 5\] for N = 5: accepted is \[R, 3N, N\]"),
    ],
)
def test_replicas_of_unequal_shapes(changes: dict[str, tuple[int, ...]], text: str) -> None:
    shapes = {"x": (T, R, B, 3 * N), "w": (R, 3 * N, N), "h0": (R, B, N), **changes}
    with pytest.raises(InputError, match=text) as caught:
        torch.ops.orthokern.gru_scan_fwd(*(torch.randn(shape) for shape in shapes.values()), None, "kanai")
    assert "\n" not in str(caught.value)
