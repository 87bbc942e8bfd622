"""The scans for R models at once: one call against a loop, torch.func's transforms, wrong shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SCANS, call_functional, compiled, scan_problem, served, some_lengths
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from orthokern import functional
from orthokern.diagnostics import tap
from orthokern.errors import InputError
from orthokern.ops import _vmap

R, B, T = 5, 3, 7


def problems(op: str, inputs: str, activation: str = "tanh", count: int = R) -> list[Any]:
    return [
        scan_problem(
            op,
            B=B,
            T=T,
            N=12 if activation == "oplu" else 11,
            K=7,
            D=4,
            activation=activation,
            inputs=inputs,
            seed=seed,
            gap=1e-4,
        )
        for seed in range(count)
    ]


def stacked(of_all: list[Any]) -> list[Tensor | None]:
    """The arguments of the forward with R in front."""
    columns = zip(*(problem.inputs() for problem in of_all), strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


def states(problem: Any, **options: Any) -> Any:
    """A function of the tensors of one model, those that are not None."""
    present = [tensor is not None for tensor in problem.inputs()]

    def run(*tensors: Tensor) -> Tensor:
        left = iter(tensors)
        return call_functional(problem, [next(left) if there else None for there in present], **options)

    return run


CASES = [
    ("tanh", "dense", 0, False, 0.0),
    ("prelu", "features", 0, True, 0.0),
    ("modrelu", "tokens", 3, True, 0.0),
    ("oplu", "features", 2, False, 0.3),
    ("softsign", "tokens", 0, False, 0.0),
    ("identity", "dense", 3, True, 0.1),
]


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("backend", served("factored_scan"))
@pytest.mark.parametrize(("activation", "inputs", "every", "lengths", "clip"), CASES)
def test_replicas_are_a_loop(
    op: str, backend: str, activation: str, inputs: str, every: int, lengths: bool, clip: float
) -> None:
    """Forward to the bit, gradients to rounding, by autograd of vmap and by vmap of torch.func.grad."""
    of_all = problems(op, inputs, activation)
    run = states(
        of_all[0], backend=backend, checkpoint_every=every, message_clip=clip,
        lengths=some_lengths(B, T, "any") if lengths else None,
    )  # fmt: skip
    tensors = [tensor for tensor in stacked(of_all) if tensor is not None]
    cotangent = torch.stack([problem.grad_hs for problem in of_all])
    floats = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]

    def loss(*given: Tensor) -> Tensor:
        *arguments, g = given
        return (run(*arguments) * g).sum()

    alone = [[tensor[r].clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors] for r in range(R)]
    expected = [run(*arguments) for arguments in alone]
    each = [
        torch.autograd.grad(hs, [arguments[i] for i in floats], g)
        for hs, arguments, g in zip(expected, alone, cotangent, strict=True)
    ]
    expected_grads = [torch.stack(column) for column in zip(*each, strict=True)]

    leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    hs = vmap(run)(*leaves)
    if backend == "reference":  # plain torch code under vmap: other products
        torch.testing.assert_close(hs, torch.stack(expected))
    else:
        assert torch.equal(hs, torch.stack(expected))
    for found, wanted in zip(
        torch.autograd.grad(hs, [leaves[i] for i in floats], cotangent), expected_grads, strict=True
    ):
        torch.testing.assert_close(found, wanted)
    found = vmap(grad(loss, argnums=tuple(floats)))(*tensors, cotangent)
    for one, wanted in zip(found, expected_grads, strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("inputs", ["dense", "features", "tokens"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_kernels_take_shared_tensors_and_any_number_of_threads(op: str, inputs: str, threads: int) -> None:
    """x, the initial states and the input weights are those of all models; 5 replicas do not share out evenly."""
    of_all = problems(op, inputs)
    tensors = stacked(of_all)
    first = of_all[0].inputs()
    shared = {0, len(tensors) - 4, len(tensors) - 3}  # x, h0, weight
    mixed = [first[i] if i in shared else tensor for i, tensor in enumerate(tensors)]
    mixed = [t.clone().requires_grad_() if t is not None and t.is_floating_point() else t for t in mixed]
    leaves = [t for t in mixed if t is not None and t.requires_grad]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        hs = getattr(torch.ops.orthokern, f"{op}_fwd")(*mixed, "tanh", 0, "cpu")[0]
        weights = torch.randn(hs.shape, dtype=hs.dtype, generator=torch.Generator().manual_seed(1))
        found = torch.autograd.grad(hs, leaves, weights)
    finally:
        torch.set_num_threads(before)
    assert hs.shape == (T, R, B, 11)
    alone = [
        call_functional(
            of_all[0], [t if t is None or i in shared else t[r] for i, t in enumerate(mixed)], backend="reference"
        )
        for r in range(R)
    ]
    torch.testing.assert_close(hs, torch.stack(alone, 1))
    for one, wanted in zip(found, torch.autograd.grad(torch.stack(alone, 1), leaves, weights), strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("backend", served("factored_scan"))
def test_every_backend_and_every_pair_of_them(backend: str) -> None:
    """The backward of one backend on the states of another."""
    of_all = problems("dense_scan", "features", "softsign")
    x, w, h0, weight, bias, act_param = stacked(of_all)
    assert x is not None
    x = x.movedim(0, 1)
    fwd, bwd = torch.ops.orthokern.dense_scan_fwd, torch.ops.orthokern.dense_scan_bwd
    rest = (w, h0, weight, bias, act_param, "softsign")
    hs, _, pre = fwd(x, *rest, 0, backend)
    again, _, pre_again = fwd(x, *rest, 0, "reference")
    torch.testing.assert_close(hs, again)
    cotangent = torch.randn(hs.shape, dtype=hs.dtype, generator=torch.Generator().manual_seed(1))
    found = bwd(cotangent, again, pre_again, x, *rest, 0, True, True, backend)
    for one, wanted in zip(found, bwd(cotangent, hs, pre, x, *rest, 0, True, True, "reference"), strict=True):
        torch.testing.assert_close(one, wanted)
    assert found[-1].shape == (R, T)


def strides_with_models_in_front(tensor: Tensor) -> bool:
    return tensor.transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("activation", "every"), [("softsign", 0), ("prelu", 0), ("tanh", 2)])
def test_results_have_the_models_in_front_in_memory(op: str, backend: str, activation: str, every: int) -> None:
    """So nothing is copied under vmap. What is given in another order is copied, and changes no bit."""
    x, *others = stacked(problems(op, "features", activation))
    assert x is not None
    fwd, bwd = (getattr(torch.ops.orthokern, f"{op}_{direction}") for direction in ("fwd", "bwd"))
    rest = (*others, activation, every)
    cotangent = torch.randn(R, T, B, 11, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    found = []
    for order in (lambda tensor: tensor, Tensor.contiguous):
        given = order(x.transpose(0, 1))
        hs, ckpt, pre = fwd(given, *rest, backend)
        kept = ckpt if every else hs
        grads = bwd(order(cotangent.transpose(0, 1)), order(kept), order(pre), given, *rest, True, True, backend)
        large = [tensor for tensor in (hs, ckpt, pre, grads[0]) if tensor.ndim == 4]
        assert len(large) == (2 if activation == "softsign" else 3)
        assert all(map(strides_with_models_in_front, large))
        found.append((hs, ckpt, pre, *grads))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("inputs", ["dense", "features", "tokens"])
def test_a_few_steps_of_each_model_are_a_loop(op: str, inputs: str) -> None:
    """Calls of a few rows read the weights in place, see csrc/cpu/scan_direct.h."""
    of_all = [scan_problem(op, B=2, T=2, N=11, K=7, D=4, inputs=inputs, seed=seed) for seed in range(R)]
    run = states(of_all[0])
    tensors = [tensor for tensor in stacked(of_all) if tensor is not None]
    leaves = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    floats = [tensor for tensor in leaves if tensor.requires_grad]
    hs = vmap(run)(*leaves)
    alone = torch.stack([run(*(tensor[r] for tensor in leaves)) for r in range(R)])
    assert torch.equal(hs, alone)
    cotangent = torch.stack([problem.grad_hs for problem in of_all])
    wanted = torch.autograd.grad(alone, floats, cotangent)
    torch.testing.assert_close(torch.autograd.grad(hs, floats, cotangent), wanted)


def test_vmap_by_the_dispatcher_and_without_it() -> None:
    """An op of this package takes the short way under one vmap, torch.ops never does, and a mode sees the call."""
    x, w, h0, weight, bias, _ = stacked(problems("dense_scan", "features"))
    assert x is not None and w is not None
    w.requires_grad_()

    def short(x: Tensor, w: Tensor) -> Tensor:
        assert _vmap.only_level() is not None
        return scan(x, w)

    def scan(x: Tensor, w: Tensor) -> Tensor:
        return functional.dense_scan(x, w, h0[0], weight=weight[0], bias=bias[0])  # type: ignore[index]

    def by_dispatcher(x: Tensor, w: Tensor) -> Tensor:
        arguments = (x, w, h0[0], weight[0], bias[0], None, "tanh", 0)  # type: ignore[index]
        hs: Tensor = torch.ops.orthokern.dense_scan_fwd(*arguments)[0]
        return hs

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **kwargs or {})

    seen: list[str] = []
    found = vmap(short)(x, w)
    wanted = vmap(by_dispatcher)(x, w)
    assert torch.equal(found, wanted)
    cotangent = torch.randn_like(found)
    assert torch.equal(*(torch.autograd.grad(hs, w, cotangent)[0] for hs in (found, wanted)))
    with Names():
        assert torch.equal(vmap(scan)(x, w), wanted)
    assert "orthokern::dense_scan_fwd" in seen
    one = vmap(lambda scale: scale * scan(x[0], w[0]))(torch.ones(R, dtype=x.dtype))  # nothing of the call is mapped
    assert torch.equal(one, wanted[:1].expand(R, -1, -1, -1))


@pytest.mark.parametrize("op", SCANS)
def test_opcheck_of_replicas(op: str) -> None:
    for inputs, activation, every in (("features", "tanh", 0), ("tokens", "softsign", 2)):
        x, *others = stacked(problems(op, inputs, activation, count=2))
        assert x is not None
        x = x.movedim(0, 1)
        others = [t.requires_grad_() if t is not None else None for t in others]
        fwd = getattr(torch.ops.orthokern, f"{op}_fwd").default
        torch.library.opcheck(fwd, (x, *others, activation, every, "cpu"))


def test_grad_of_vmap_with_what_models_share() -> None:
    of_all = problems("dense_scan", "features")
    x, w, h0, weight, bias, _ = stacked(of_all)
    assert x is not None and h0 is not None and weight is not None

    def loss(x: Tensor, w: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def one(w: Tensor, bias: Tensor) -> Tensor:
            return functional.dense_scan(x, w, h0[0], weight=weight, bias=bias).square().mean()

        return vmap(one)(w, bias).sum()

    def looped(x: Tensor, w: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        pairs = zip(w, bias, strict=True)
        scans = [functional.dense_scan(x, one, h0[0], weight=weight, bias=b, backend="reference") for one, b in pairs]
        return torch.stack([hs.square().mean() for hs in scans]).sum()

    given = (x[0], w, weight[0], bias)
    for found, wanted in zip(grad(loss, (0, 1, 2, 3))(*given), grad(looped, (0, 1, 2, 3))(*given), strict=True):
        torch.testing.assert_close(found, wanted)


def test_vmap_of_inputs_alone_in_vmap_and_with_lengths_of_their_own() -> None:
    w, x = torch.randn(2, 4, 4) / 2, torch.randn(3, 5, 6, 4)
    lengths = torch.tensor([[5, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5]])

    def run(x: Tensor, w: Tensor, lengths: Tensor) -> Tensor:
        return functional.dense_scan(x, w, lengths=lengths)

    alone = [[run(x[i], one, lengths[i]) for i in range(3)] for one in w]
    assert torch.equal(vmap(run, (0, None, 0))(x, w[0], lengths), torch.stack(alone[0]))
    both = vmap(vmap(run, (0, None, 0)), (None, 0, None))(x, w, lengths)
    assert torch.equal(both, torch.stack([torch.stack(row) for row in alone]))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_values_are_checked_under_vmap(backend: str | None) -> None:
    w, weight, ids = torch.eye(4).expand(2, 4, 4), torch.randn(2, 4, 3), torch.tensor([[[0], [1]], [[2], [3]]])

    def run(w: Tensor, weight: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return functional.dense_scan(ids, w, weight=weight, lengths=lengths, backend=backend)

    with pytest.raises(InputError, match=r"x holds 3: token ids must be in \[0, 3\)"):
        vmap(run)(w, weight, ids, torch.tensor([[2], [2]]))
    vmap(run)(w, weight, ids, torch.tensor([[2], [1]]))  # the wrong one is padding
    with pytest.raises(InputError, match=r"lengths holds 3"):
        vmap(run)(w, weight, ids, torch.tensor([[2], [3]]))


def test_replicas_of_unequal_shapes() -> None:
    fwd = torch.ops.orthokern.dense_scan_fwd
    x, w, h0 = torch.randn(3, 2, 2, 4), torch.randn(2, 4, 4), torch.randn(2, 2, 4)
    rest = (None, None, None, "tanh")
    for wrong, text in (
        ((x, w, h0[:1], *rest), r"dense_scan: h0 has shape \[1, 2, 4\] in a call for R = 2 replicas: accepted is R in"),
        ((torch.randn(3, 3, 2, 4), w, h0, *rest), r"x has shape \[3, 3, 2, 4\] for R = 2 replicas: accepted is \[T, R"),
        ((x, w, h0[:, :1], *rest), r"x has shape .*, h0 \[2, 1, 4\]: accepted is the same B"),
        ((x, w, h0[..., :3], *rest), r"h0 has shape \[2, 2, 3\] for N = 4: accepted is \[R, B, N\]"),
    ):
        with pytest.raises(InputError, match=text) as caught:
            fwd(*wrong)
        assert "\n" not in str(caught.value)


def test_taps_get_the_norms_of_each_model() -> None:
    x, w = torch.randn(5, 3, 4), (torch.randn(2, 4, 4) / 2).requires_grad_()
    with tap() as together:
        vmap(lambda w: functional.dense_scan(x, w))(w).sum().backward()
    with tap() as alone:
        for one in w:
            functional.dense_scan(x, one).sum().backward()
    for name in ("state_norms", "grad_norms"):
        for found, wanted in zip(getattr(together, name), getattr(alone, name), strict=True):
            torch.testing.assert_close(found, wanted)


def test_compiled_as_one_graph() -> None:
    x, w = torch.randn(5, 3, 4), (torch.randn(2, 4, 4) / 2).requires_grad_()

    def run(w: Tensor) -> Tensor:
        return vmap(lambda w: functional.dense_scan(x, w))(w)

    expected = run(w)
    hs = compiled(run)(w)
    assert torch.equal(hs, expected)
    (wanted,) = torch.autograd.grad(expected.square().sum(), w)
    torch.testing.assert_close(torch.autograd.grad(hs.square().sum(), w)[0], wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_resets_of_each_model_or_of_all(shared: bool) -> None:
    of_all = problems("factored_scan", "features")
    x, u, s, v, h0, weight, bias, _ = stacked(of_all)
    generator = torch.Generator().manual_seed(0)
    resets = torch.rand(*(() if shared else (R,)), T, B, generator=generator) < 0.4
    lengths = some_lengths(B, T, "any")
    state = torch.randn(*h0.shape[1 if shared else 0 :], dtype=h0.dtype, generator=generator)  # type: ignore[union-attr]

    def loss(x: Tensor, u: Tensor, h0: Tensor, state: Tensor, resets: Tensor, *others: Tensor) -> Tensor:
        s, v, weight, bias = others
        hs = functional.factored_scan(
            x,
            u,
            s,
            v,
            h0,
            weight=weight,
            bias=bias,
            resets=resets,
            reset_state=state,
            lengths=lengths,
        )
        return (hs.square() * torch.arange(1, T + 1).view(-1, 1, 1)).sum()

    given = (x, u, h0, state, resets, s, v, weight, bias)
    places = (0, 0, 0, None if shared else 0, None if shared else 0, 0, 0, 0, 0)
    alone = [
        grad(loss, (0, 1, 2, 3))(*(t if p is None else t[r] for t, p in zip(given, places, strict=True)))  # type: ignore[index]
        for r in range(R)
    ]
    found = vmap(grad(loss, (0, 1, 2, 3)), places)(*given)
    for one, wanted in zip(found, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(wanted))

    def total(*inputs: Tensor) -> Tensor:
        return vmap(loss, places)(*inputs).sum()

    for index, one in enumerate(grad(total, (0, 1, 2, 3))(*given)):
        wanted = torch.stack([gradients[index] for gradients in alone])
        torch.testing.assert_close(one, wanted.sum(0) if places[index] is None else wanted)


@pytest.mark.parametrize("activation", ["tanh", "softsign"])
def test_second_derivatives_of_replicas(activation: str) -> None:
    """create_graph through vmap, and torch.func.grad of torch.func.grad of it, against one model at a time."""
    of_all = problems("factored_scan", "features", activation, count=2)
    x, u, s, v, h0, weight, bias, _ = stacked(of_all)
    assert x is not None and u is not None and s is not None and v is not None and weight is not None
    u = u.clone().requires_grad_()
    weight = weight[0].clone().requires_grad_()  # shared

    def loss(u: Tensor, s: Tensor, v: Tensor, h0: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        hs = functional.factored_scan(x[0], u, s, v, h0, weight=weight, bias=bias, activation=activation)
        return hs.square().sum()

    places, others = (0, 0, 0, 0, 0, None), (s, v, h0, bias)
    total = vmap(loss, places)(u, *others, weight).sum()
    first = torch.autograd.grad(total, (u, weight), create_graph=True)
    found = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (u, weight))
    looped = torch.stack([loss(u[r], s[r], v[r], h0[r], bias[r], weight) for r in range(2)]).sum()  # type: ignore[index]
    first_looped = torch.autograd.grad(looped, (u, weight), create_graph=True)
    wanted = torch.autograd.grad(first_looped[0].square().sum() + first_looped[1].square().sum(), (u, weight))
    for one, other in zip((*first, *found), (*first_looped, *wanted), strict=True):
        torch.testing.assert_close(one, other)

    def norm(u: Tensor, *given: Tensor) -> Tensor:
        return grad(loss)(u, *given).square().sum()

    constants = [t.detach() for t in (u, *others, weight)]  # type: ignore[union-attr]
    twice = vmap(grad(norm), places)(*constants)
    through = vmap(norm, places)(u, *constants[1:]).sum()  # autograd outside of torch.func
    (outside,) = torch.autograd.grad(through, u)
    torch.testing.assert_close(twice, outside)
    alone = [grad(norm)(*(t if p is None else t[r] for t, p in zip(constants, places, strict=True))) for r in range(2)]
    torch.testing.assert_close(twice, torch.stack(alone))


def test_checkpoints_further_apart_than_any_sequence() -> None:
    """The largest distance that is accepted means one checkpoint for each model."""
    of_all = problems("dense_scan", "features", count=2)
    found = []
    for every in (2**63 - 1, 1000):
        run = states(of_all[0], checkpoint_every=every)
        tensors = [t.clone().requires_grad_() for t in stacked(of_all) if t is not None]
        hs = vmap(run)(*tensors)
        found.append(torch.autograd.grad(hs.square().sum(), tensors))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
