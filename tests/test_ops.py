"""The ops as torch sees them: registration (opcheck), torch.compile, autograd, what is saved, what refuses."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from helpers import GruProblem, ScanProblem, scan_problem, some_lengths, with_poisoned_padding
from torch import Tensor

from orthokern import InputError, dispatch, functional, ops
from orthokern.ops._taps import SINKS, tap

OPS = ("factored_scan", "dense_scan")
NAMESPACE = torch.ops.orthokern


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that wait for each other over tiny tensors cost more than they bring."""
    torch.set_num_threads(1)


def served(op: str) -> list[Any]:
    """The reference, and the cpu backend where it is built."""
    why = dispatch.absence(op, "cpu")
    return ["reference", pytest.param("cpu", marks=pytest.mark.skipif(why is not None, reason=str(why)))]


def leaf_tensors(problem: ScanProblem) -> list[Tensor | None]:
    return [None if t is None else t.clone().requires_grad_() if t.is_floating_point() else t for t in problem.inputs()]


def call_functional(problem: ScanProblem, inputs: list[Tensor | None], **options: Any) -> Tensor:
    """The public function on the tensors of ``ScanProblem.inputs``."""
    x, *matrices, h0, weight, bias, act_param = inputs
    function = getattr(functional, problem.op)
    result: Tensor = function(
        x, *matrices, h0, weight=weight, bias=bias, activation=problem.activation, act_param=act_param, **options
    )
    return result


def gradients(problem: ScanProblem, run: Callable[..., Tensor], **options: Any) -> list[Tensor]:
    inputs = leaf_tensors(problem)
    hs = run(problem, inputs, **options)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return [hs.detach(), *torch.autograd.grad(hs, wanted, problem.grad_hs)]


# -------------------------------------------------------------------------------------------------------------- opcheck

SCAN_CHECKS = [("tanh", "dense", 0), ("prelu", "tokens", 2), ("oplu", "features", 0), ("modrelu", "dense", 3)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", served("factored_scan"))
@pytest.mark.parametrize(("activation", "inputs", "checkpoint_every"), SCAN_CHECKS)
def test_opcheck_scans(op: str, backend: str, activation: str, inputs: str, checkpoint_every: int) -> None:
    if backend == "reference" and dispatch.absence(op, "cpu") is None and activation != "prelu":
        pytest.skip("the registration is the same for every backend: one case will do")
    problem = scan_problem(op, B=3, T=5, N=4, D=6, activation=activation, inputs=inputs, gap=1e-4)
    fwd, bwd = getattr(NAMESPACE, f"{op}_fwd").default, getattr(NAMESPACE, f"{op}_bwd").default
    torch.library.opcheck(fwd, (*leaf_tensors(problem), activation, checkpoint_every, backend))
    hs, ckpt, pre = fwd(*problem.inputs(), activation, checkpoint_every, backend)
    x, *others = problem.inputs()
    x_needed = problem.weight is not None or checkpoint_every > 0
    states = ckpt if checkpoint_every else hs
    for need_x, need_params in ((True, True), (False, True), (True, False)):
        arguments = (problem.grad_hs, states, pre, x if x_needed else None, *others)
        options = (activation, checkpoint_every, need_x, need_params, backend)
        torch.library.opcheck(bwd, (*arguments, *options), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(bwd, (*arguments, *options))


@pytest.mark.parametrize("op", OPS)
def test_opcheck_scans_with_lengths_and_clip(op: str) -> None:
    for inputs, every in (("features", 0), ("tokens", 2)):
        problem = scan_problem(op, B=3, T=5, N=4, D=6, activation="prelu", inputs=inputs)
        fwd, bwd = getattr(NAMESPACE, f"{op}_fwd").default, getattr(NAMESPACE, f"{op}_bwd").default
        more = {"lengths": some_lengths(3, 5, "any"), "message_clip": 0.5}
        torch.library.opcheck(fwd, (*leaf_tensors(problem), "prelu", every), more)
        hs, ckpt, pre = fwd(*problem.inputs(), "prelu", every, **more)
        torch.library.opcheck(
            bwd, (problem.grad_hs, ckpt if every else hs, pre, *problem.inputs(), "prelu", every), more
        )


@pytest.mark.parametrize("backend", served("activations"))
@pytest.mark.parametrize("activation", ["identity", "tanh", "prelu", "modrelu", "oplu"])
def test_opcheck_activations(backend: str, activation: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    param = torch.tensor([0.25], dtype=torch.float64) if activation in ops.activations.PARAMETER else None
    leaf_param = param if param is None else param.clone().requires_grad_()
    fwd, bwd = NAMESPACE.activation_fwd.default, NAMESPACE.activation_bwd.default
    torch.library.opcheck(fwd, (x.clone().requires_grad_(), leaf_param, activation, backend))
    torch.library.opcheck(bwd, (torch.randn_like(x), x, param, activation, backend))


@pytest.mark.parametrize("backend", served("linear_cross_entropy"))
@pytest.mark.parametrize("with_bias", [True, False])
def test_opcheck_linear_cross_entropy(backend: str, with_bias: bool) -> None:
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 4), (5, 4)))
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(0, 5, (7,))
    fwd, bwd = NAMESPACE.linear_cross_entropy_fwd.default, NAMESPACE.linear_cross_entropy_bwd.default
    torch.library.opcheck(fwd, (hidden, weight, bias, target, "mean", True, backend))
    plain = [None if t is None else t.detach() for t in (hidden, weight, bias)]
    torch.library.opcheck(fwd, (*plain, target, "sum", False, backend))
    _, *grads = fwd(*plain, target, "sum", True, backend)
    torch.library.opcheck(bwd, (torch.tensor(2.0).double(), *grads, *plain))


@pytest.mark.parametrize("backend", served("cayley"))
def test_opcheck_cayley(backend: str) -> None:
    for shape, lr in (((5, 5), torch.tensor(0.1)), ((2, 6, 3), torch.rand(2, dtype=torch.float64))):
        m = torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0]
        torch.library.opcheck(NAMESPACE.cayley.default, (m, torch.randn_like(m), lr, backend))


# -------------------------------------------------------------------------------------------------------- torch.compile


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=options.pop("backend", "aot_eager"), **options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("activation", "inputs"), [("tanh", "dense"), ("prelu", "tokens"), ("modrelu", "features")])
def test_compiled_scans(op: str, activation: str, inputs: str) -> None:
    problem = scan_problem(op, B=3, T=5, N=4, activation=activation, inputs=inputs)
    some = {"lengths": some_lengths(3, 5, "any"), "message_clip": 0.5}
    for options in ({"checkpoint_every": 0}, {"checkpoint_every": 2}, some, {"checkpoint_every": 2, **some}):
        expected = gradients(problem, call_functional, **options)
        actual = gradients(problem, compiled(call_functional), **options)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_a_compiler_meets_the_reference_as_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by the call or by the process; plain torch code of T steps would be unrolled, and needs an import."""
    problem = scan_problem("factored_scan", B=3, T=5, N=4, inputs="tokens")
    m, g = torch.linalg.qr(torch.randn(4, 4))[0], torch.randn(4, 4)
    expected = gradients(problem, call_functional, backend="reference")
    for default, options in (("auto", {"backend": "reference"}), ("reference", {})):
        monkeypatch.setattr(dispatch, "_process_default", default)
        for a, e in zip(gradients(problem, compiled(call_functional), **options), expected, strict=True):
            torch.testing.assert_close(a, e)
        stepped = compiled(lambda m, g, o=options: functional.cayley(m, g, 0.1, **o))(m, g)
        torch.testing.assert_close(stepped, functional.cayley(m, g, 0.1))
        activated = compiled(lambda x, o=options: functional.activation(x, "tanh", **o))(g)
        torch.testing.assert_close(activated, g.tanh())


def test_compiled_with_any_length() -> None:
    """One graph for all lengths and batches."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = compiled(call_functional, backend=counter, dynamic=True)
    for B, T in ((3, 5), (4, 7), (6, 9)):  # equal sizes would count as one symbol: none is N or D
        problem = scan_problem("factored_scan", B=B, T=T, N=8, D=11, activation="prelu", inputs="tokens")
        expected, actual = gradients(problem, call_functional), gradients(problem, run)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


def test_compiled_training_step() -> None:
    """Everything in one graph: scan, readout with its loss, activation, and their gradients."""

    def loss_of(u: Tensor, s: Tensor, w: Tensor, b: Tensor, x: Tensor, target: Tensor) -> Tensor:
        hs = functional.factored_scan(x, u, functional.spectrum(s, 0.1), u, activation="tanh")
        return 3.0 * functional.linear_cross_entropy(functional.modrelu(hs, b), w, None, target)

    torch.manual_seed(0)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((6, 6), (6,), (5, 6), (6,))]
    x, target = torch.randn(4, 3, 6), torch.randint(0, 5, (4, 3))
    expected, actual = (function(*leaves, x, target) for function in (loss_of, compiled(loss_of)))
    torch.testing.assert_close(actual, expected)
    for a, e in zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, e)


def test_compiled_cayley() -> None:
    m = torch.linalg.qr(torch.randn(2, 6, 4))[0]
    g = torch.randn_like(m)
    for lr in (0.1, torch.rand(2)):
        torch.testing.assert_close(compiled(functional.cayley)(m, g, lr), functional.cayley(m, g, lr))
    torch.testing.assert_close(compiled(ops.cayley.step)(m, g, 0.1), functional.cayley(m, g, 0.1))


def test_compiled_code_checks_values_too() -> None:
    """Token ids are known only when the graph runs; nothing may index with them unchecked."""
    problem = scan_problem("dense_scan", B=2, T=3, N=4, D=5, inputs="tokens")
    run = compiled(call_functional)
    problem.x[1, 1] = 5
    with pytest.raises(InputError, match=r"x holds 5: token ids must be in \[0, 5\)"):
        run(problem, list(problem.inputs()))
    problem.x[1, 1] = 4
    with pytest.raises(InputError, match=r"lengths holds 9: lengths must be in \[1, T\] = \[1, 3\]"):
        run(problem, list(problem.inputs()), lengths=torch.tensor([3, 9]))
    with pytest.raises(InputError, match="m holds 16 NaN or infinite values of 16"):
        compiled(functional.cayley)(torch.full((4, 4), torch.nan), torch.zeros(4, 4), 0.1)


@pytest.mark.slow
def test_compiled_with_inductor() -> None:
    problem = scan_problem("factored_scan", B=3, T=5, N=4, activation="prelu", inputs="features")
    expected, actual = (
        gradients(problem, run) for run in (call_functional, compiled(call_functional, backend="inductor"))
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


# ------------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inputs", ["dense", "features", "tokens"])
def test_public_function_differentiates_as_the_reference(op: str, inputs: str) -> None:
    problem = scan_problem(
        op, B=3, T=6, N=4, K=3 if op == "factored_scan" else None, activation="modrelu", inputs=inputs
    )
    lengths = some_lengths(3, 6, "any")
    for options in ({}, {"lengths": lengths}, {"message_clip": 0.2}, {"lengths": lengths, "message_clip": 0.2}):
        given = with_poisoned_padding(problem, lengths) if "lengths" in options else problem
        expected = gradients(given, call_functional, backend="reference", **options)
        for every in (0, 4):
            actual = gradients(given, call_functional, checkpoint_every=every, **options)
            for a, e in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, e)


@pytest.mark.parametrize("op", OPS)
def test_each_input_on_its_own(op: str) -> None:
    """Only what requires a gradient gets one, whichever it is."""
    problem = scan_problem(op, B=3, T=4, N=4, activation="prelu", inputs="features")
    expected = gradients(problem, call_functional)[1:]
    for index, gradient in enumerate(expected):
        inputs = list(problem.inputs())
        leaf = inputs[index] = inputs[index].clone().requires_grad_()  # type: ignore[union-attr]
        call_functional(problem, inputs).backward(problem.grad_hs)
        torch.testing.assert_close(leaf.grad, gradient)


def test_no_state_is_given_when_none_is_asked_for() -> None:
    problem = scan_problem("factored_scan", B=2, T=3, N=4, inputs="features")
    with torch.no_grad():
        assert not call_functional(problem, leaf_tensors(problem)).requires_grad
    zero = call_functional(problem, [*problem.inputs()[:4], torch.zeros(2, 4).double(), *problem.inputs()[5:]])
    torch.testing.assert_close(call_functional(problem, [*problem.inputs()[:4], None, *problem.inputs()[5:]]), zero)


def test_int32_tokens() -> None:
    problem = scan_problem("dense_scan", B=2, T=3, N=4, inputs="tokens")
    expected = call_functional(problem, list(problem.inputs()))
    problem.x = problem.x.to(torch.int32)
    assert torch.equal(call_functional(problem, list(problem.inputs())), expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("every", [0, 4])
def test_what_is_saved(op: str, every: int) -> None:
    """The docstring's Saved part, by shape: a training run's memory is made of it."""
    saved: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(tuple(t.shape))
        return t

    T, B, N, D = 10, 5, 4, 7
    for activation, inputs in (("tanh", "dense"), ("prelu", "dense"), ("modrelu", "features"), ("tanh", "tokens")):
        problem = scan_problem(op, B=B, T=T, N=N, D=D, activation=activation, inputs=inputs)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call_functional(problem, leaf_tensors(problem), checkpoint_every=every)
        large = sorted(shape for shape in saved if shape and shape[0] in (T, -(-T // 4)) and len(shape) > 1)
        states = [(-(-T // 4), B, N)] if every else [(T, B, N)] * (2 if activation == "prelu" else 1)
        x = {"features": [(T, B, D)], "tokens": [(T, B)], "dense": [(T, B, N)] if every else []}[inputs]
        assert large == sorted(states + x)


@pytest.mark.parametrize("op", [*OPS, "activations", "linear_cross_entropy"])
def test_second_derivative_names_the_way_out(op: str) -> None:
    def first_gradient(backend: str | None) -> Tensor:
        if op == "activations":
            leaf = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
            out = functional.activation(leaf, "tanh", backend=backend).square().sum()
        elif op == "linear_cross_entropy":
            leaf = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
            weight = torch.randn(5, 4, dtype=torch.float64)
            out = functional.linear_cross_entropy(leaf, weight, None, torch.tensor([0, 1, 4]), backend=backend) ** 2
        else:
            problem = scan_problem(op, B=2, T=3, N=4)
            inputs = list(problem.inputs())
            leaf = inputs[1] = inputs[1].requires_grad_()  # type: ignore[union-attr]
            out = call_functional(problem, inputs, backend=backend).square().sum()
        (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
        return grad.square().sum()

    with pytest.raises(RuntimeError, match="no second derivative through its kernels: pass backend='reference'"):
        first_gradient(None).backward()
    first_gradient("reference").backward()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_activation_checkpointing(backend: str | None) -> None:
    """Its backward runs the forward again while it hands out what was saved: that has to be recorded."""
    scan, gru = scan_problem("factored_scan", B=2, T=5, N=4, inputs="features"), GruProblem.random("kanai", 5, 2, 4)
    target = torch.tensor([0, 2, 1])
    cases: list[tuple[list[Tensor | None], Callable[..., Tensor]]] = [
        (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), backend=backend)),
        (leaf_tensors(scan), lambda *given: call_functional(scan, list(given), checkpoint_every=2, backend=backend)),
        ([gru.x, gru.w], lambda x, w: functional.gru_scan(x, w, backend=backend)),
        ([torch.randn(3, 4)], lambda x: functional.activation(x, "relu", backend=backend)),
        ([torch.randn(4, 4)], lambda x: functional.skew_exp(x, backend=backend)),
        ([torch.randn(3, 4)], lambda x: functional.linear_cross_entropy(x, x, None, target, backend=backend)),
    ]
    for given, function in cases:
        wanted = [t.detach().requires_grad_() for t in given if t is not None]
        given = [None if t is None else wanted.pop(0) for t in given]
        wanted = [t for t in given if t is not None]
        expected = torch.autograd.grad(function(*given).square().sum(), wanted)
        again = torch.utils.checkpoint.checkpoint(function, *given, use_reentrant=False)
        for a, e in zip(torch.autograd.grad(again.square().sum(), wanted), expected, strict=True):
            assert torch.equal(a, e)


def test_cayley_has_no_derivative_but_the_reference_does() -> None:
    m = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0].requires_grad_()
    g = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="pass backend='reference'"):
        functional.cayley(m, g, 0.1).sum().backward()
    functional.cayley(m, g, 0.1, backend="reference").sum().backward()
    assert m.grad is not None


def test_optimizer_path_of_cayley_is_the_op() -> None:
    m, g = torch.linalg.qr(torch.randn(3, 8, 5))[0], torch.randn(3, 8, 5)
    for lr in (1e-3, torch.rand(3)):
        torch.testing.assert_close(ops.cayley.step(m, g, lr), functional.cayley(m, g, lr), rtol=0, atol=0)
    one = functional.cayley(m, g, torch.tensor(1e-3, dtype=torch.float64))
    torch.testing.assert_close(one, functional.cayley(m, g, 1e-3), rtol=0, atol=0)


def test_a_profiler_sees_every_op_once() -> None:
    problem = scan_problem("dense_scan", B=2, T=3, N=4)
    with torch.autograd.profiler.profile() as profile:
        gradients(problem, call_functional)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("orthokern::")}
    assert counts == {"orthokern::dense_scan_fwd": 1, "orthokern::dense_scan_bwd": 1}


def test_forward_mode_is_refused() -> None:
    """Not passed by: the tangent would be lost without a word."""
    x, w = torch.randn(3, 2, 4), torch.randn(4, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        with pytest.raises(NotImplementedError, match="jvp"):
            functional.dense_scan(x, dual)


def test_torch_func_gets_what_it_needs_or_is_told_where() -> None:
    problem = scan_problem("dense_scan", B=2, T=3, N=4)

    def loss(w: Tensor, backend: str | None) -> Tensor:
        x, _, *others = problem.inputs()
        return call_functional(problem, [x, w, *others], backend=backend).square().sum()

    w = problem.inputs()[1]
    assert w is not None
    several = torch.stack([w, 2 * w])
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(RuntimeError, match=r"dense_scan_fwd has no rule .* pass backend='reference'"):
            transform(loss)(w, None)
    with pytest.raises(RuntimeError, match=r"dense_scan_fwd has no rule"):
        torch.func.vmap(torch.func.grad(loss), (0, None))(several, None)
    gradients_of = torch.func.vmap(torch.func.grad(loss), (0, None))(several, "reference")
    leaf = several.clone().requires_grad_()
    losses = torch.func.vmap(loss, (0, None))(leaf, None)  # a loop over the op
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), leaf)[0], gradients_of)


# ----------------------------------------------------------------------------------------------- linear cross-entropy


def readout(rows: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, 4, requires_grad=True)
    return (
        hidden,
        torch.randn(5, 4, requires_grad=True),
        torch.randn(5, requires_grad=True),
        torch.randint(0, 5, (rows,)),
    )


def test_incoming_gradient_scales_the_saved_ones() -> None:
    hidden, weight, bias, target = readout()
    inputs = (hidden, weight, bias)
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden @ weight.mT + bias, target), inputs)
    for factor in (1.0, -2.5, 0.0):
        loss = functional.linear_cross_entropy(hidden, weight, bias, target)
        for a, e in zip(torch.autograd.grad(factor * loss, inputs), expected, strict=True):
            torch.testing.assert_close(a, factor * e)


def test_a_retained_graph_gives_the_same_again() -> None:
    """Backward hands its saved gradient on without a copy; accumulating into that must not change the next backward."""
    hidden, weight, bias, target = readout()
    loss = functional.linear_cross_entropy(hidden, weight, bias, target)
    loss.backward(retain_graph=True)
    first = [t.grad.clone() for t in (hidden, weight, bias)]  # type: ignore[union-attr]
    loss.backward(retain_graph=True)  # accumulates into .grad
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        tensor.grad.fill_(7.0)
        tensor.grad = None
    loss.backward()
    for tensor, gradient in zip((hidden, weight, bias), first, strict=True):
        assert torch.equal(tensor.grad, gradient)  # type: ignore[arg-type]


def test_the_large_gradient_is_not_copied() -> None:
    """hidden of a long sequence is the largest tensor of a training step: its gradient exists once."""
    hidden, weight, bias, target = readout()
    seen: list[int] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(grad.data_ptr())
            return grad

    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.data_ptr())
        return t

    watched = Watch.apply(hidden)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = functional.linear_cross_entropy(watched, weight, bias, target)
    loss.backward()
    assert seen[0] in saved


def test_loss_alone_keeps_nothing() -> None:
    hidden, weight, bias, target = readout()
    with torch.no_grad():
        loss = functional.linear_cross_entropy(hidden, weight, bias, target)
    assert not loss.requires_grad
    *_, grad_hidden, _, _ = NAMESPACE.linear_cross_entropy_fwd(hidden.detach(), weight, bias, target, "mean", False)
    assert grad_hidden.numel() == 0
    states = 2 * hidden
    reference = weakref.ref(states)
    loss = functional.linear_cross_entropy(states, weight, bias, target)
    loss.backward()
    del states
    gc.collect()
    assert reference() is None, "a finished backward still holds its inputs"


def test_shapes_with_time_and_batch() -> None:
    hidden, weight, bias, target = readout(6)
    flat = functional.linear_cross_entropy(hidden, weight, bias, target)
    shaped = functional.linear_cross_entropy(hidden.view(3, 2, 4), weight, bias, target.view(3, 2).to(torch.int32))
    torch.testing.assert_close(shaped, flat, rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------------------------- taps


def two_layers(x: Tensor, u: Tensor) -> Tensor:
    return functional.dense_scan(functional.factored_scan(x, u, torch.ones(4), u), u).sum()


def test_tap_collects_the_norms_of_every_scan() -> None:
    x, u = torch.randn(5, 3, 4), torch.linalg.qr(torch.randn(4, 4))[0].requires_grad_()
    with tap() as taken, tap() as also:
        two_layers(x, u).backward()
    assert taken.ops == ["dense_scan", "factored_scan"]  # the last layer's backward runs first
    assert [norm.shape for norm in taken.grad_norms] == [(5,), (5,)]
    assert taken.grad_norms[0][-1] == pytest.approx(12**0.5)  # ones over [3, 4]
    assert all(torch.equal(a, b) for a, b in zip(taken.grad_norms, also.grad_norms, strict=True))
    two_layers(x, u).backward()
    assert len(taken.grad_norms) == 2 and not SINKS

    with tap() as from_compiled:
        compiled(two_layers)(x, u).backward()
    for a, b in zip(from_compiled.grad_norms, taken.grad_norms, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", OPS)
def test_tap_ignores_padding(op: str) -> None:
    """The norm at t is that of the sequences that have a step t, each on its own."""
    problem = scan_problem(op, B=4, T=6, N=4, inputs="features")
    lengths = some_lengths(4, 6, "any")
    with tap() as taken:
        gradients(with_poisoned_padding(problem, lengths), call_functional, lengths=lengths)
    squares = torch.zeros(6, dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        alone = dataclasses.replace(
            problem, x=problem.x[:length, b : b + 1], h0=problem.h0[b : b + 1],
            grad_hs=problem.grad_hs[:length, b : b + 1],
        )  # fmt: skip
        with tap() as one:
            gradients(alone, call_functional)
        squares[:length] += one.grad_norms[0].square()
    torch.testing.assert_close(taken.grad_norms[0], squares.sqrt())


def test_tap_closes_after_an_error() -> None:
    with pytest.raises(KeyError), tap():
        raise KeyError
    assert not SINKS


# --------------------------------------------------------------------------------------------------------- other dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_on_the_reference(dtype: torch.dtype) -> None:
    problem = scan_problem("factored_scan", B=3, T=4, N=4, inputs="features").to(dtype)
    with tap() as taken:
        hs, *grads = gradients(problem, call_functional)
    assert hs.dtype == dtype and {grad.dtype for grad in grads} == {dtype}
    assert taken.grad_norms[0].dtype == torch.float32
    exact = gradients(problem.to(torch.float64), call_functional)
    for a, e in zip((hs, *grads), exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0.1, atol=0.1)
    hidden, weight = torch.randn(9, 4).to(dtype).requires_grad_(), torch.randn(3, 4).to(dtype).requires_grad_()
    functional.linear_cross_entropy(hidden, weight, None, torch.randint(0, 3, (9,))).backward()
    assert hidden.grad is not None and hidden.grad.dtype == dtype
