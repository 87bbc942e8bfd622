"""The short way of calls of a few steps has the results of the full path, in every bit, and its errors.

Gradients of a few rows are sums in another order: close."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from orthokern import cpu, functional
from orthokern._scan_contract import LastGrad
from orthokern.errors import InputError
from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, NonNormalRNN, _layouts, _quick, _repeated
from orthokern.ops import _alone, _register

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)

D, N = 3, 6
KINDS: dict[str, Callable[..., nn.Module]] = {
    "rnn": RNN,
    "factorized": FactorizedRNN,
    "composed": lambda *args, **options: FactorizedRNN(*args, apply="composed", **options),
    "low rank": lambda *args, **options: FactorizedRNN(*args, rank=2, **options),
    "exponential": ExpRNN,
    "non-normal": NonNormalRNN,
    "gru": lambda *args, **options: GRU(*args, bias=True, **options),
}


def made(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = KINDS[kind](D, N, **options)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def results(module: nn.Module, *inputs: Any) -> list[Tensor]:
    """Output and h_n without gradients, with gradients, and the gradients."""
    with torch.no_grad():
        found = [*module(*inputs)]
    output, h_n = module(*inputs)
    loss = output.square().sum() + h_n.sin().sum()
    wanted = [t for t in (*module.parameters(), *inputs) if t is not None and t.requires_grad]
    return [*found, output.detach(), h_n.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def the_full_path(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_quick, "forward", lambda *_: None)
    patch.setattr(_alone, "_KNOWN", False)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "batch_first": True}, {"learned_h0": True, "dtype": torch.float64}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_the_full_path(
    kind: str, options: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, dtype = made(kind, **options), options.get("dtype", torch.float32)
    layers = options.get("num_layers", 1)
    calls = []
    for steps in (1, 5):
        shape = (batch, steps) if options.get("batch_first") else (steps, batch)
        x = torch.randn(*shape, D, dtype=dtype, requires_grad=True)
        h = torch.randn(layers, batch, N, dtype=dtype, requires_grad=True)
        calls += [(x, h), (x, None), (torch.randint(D, shape), h)]
    taken = []
    quick = _quick.forward
    monkeypatch.setattr(_quick, "forward", lambda *a: taken.append(quick(*a)) or taken[-1])
    found = [results(module, *call) for call in calls]
    assert len(taken) == 2 * len(calls) and all(result is not None for result in taken)
    the_full_path(monkeypatch)
    few = 3e-5 if dtype == torch.float32 else 1e-13  # measured: 2e-5, most of it the full path's, and 4e-15
    for call, some in zip(calls, found, strict=True):
        for place, (one, other) in enumerate(zip(some, results(module, *call), strict=True)):
            if one is None or other is None:
                assert one is other
            else:
                # of more rows, the full path adds up what its threads have found
                same = kind == "rnn" and (call[0].shape.numel() <= 4 * D or batch == 1)
                bound = 0 if place < 4 or same else few
                torch.testing.assert_close(one, other, rtol=bound, atol=bound)
                assert one.stride() == other.stride()


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
@pytest.mark.parametrize("options", [{}, {"learned_h0": True, "nonlinearity": "modrelu", "batch_first": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_a_few_steps(kind: str, options: dict[str, Any], shape: tuple[int, int]) -> None:
    """Of one node, against finite differences; twice, by the full path."""
    if kind == "gru":
        options = {name: value for name, value in options.items() if name != "nonlinearity"}
    module = made(kind, dtype=torch.float64, **options)
    values = {name: value.detach().requires_grad_() for name, value in module.named_parameters()}
    x = torch.randn(*shape, D, dtype=torch.float64, requires_grad=True)
    hx = None if options else torch.randn(1, shape[1], N, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(values, rest, strict=False))
        found: tuple[Tensor, Tensor] = torch.func.functional_call(
            module, given, (x, rest[-1] if hx is not None else None)
        )
        return found

    arguments = (x, *values.values()) if hx is None else (x, *values.values(), hx)
    node = call(*arguments)[0].grad_fn
    while node is not None and "Steps" not in type(node).__name__:
        node = node.next_functions[0][0]
    assert node is not None
    assert torch.autograd.gradcheck(call, arguments)
    assert torch.autograd.gradgradcheck(lambda *a: call(*a)[0].sin() * call(*a)[1].sum(), arguments, fast_mode=True)


def test_second_derivatives_of_a_clipped_message() -> None:
    """Those of the reference: the messages of the states' gradients are summed before they are clipped."""
    found = []
    for backend in (None, "reference"):
        module = made("rnn", dtype=torch.float64, message_clip=0.3, backend=backend)
        x = torch.linspace(-1, 1, 3 * D, dtype=torch.float64).view(3, 1, D).requires_grad_()
        for _ in range(3):  # the later ones are repeated calls
            slope = torch.autograd.grad(module(x)[0].square().sum(), x, create_graph=True)[0]
            second = torch.autograd.grad(slope.square().sum() + module(x)[0].sum(), [x, *module.parameters()])
        found.append([slope.detach(), *second])
    torch.testing.assert_close(*found)


def test_a_hook_sees_each_gradient_once() -> None:
    module, x = made("exponential"), torch.randn(1, 1, D)
    seen: list[Tensor] = []
    module.weight_ih_l0.register_hook(seen.append)
    grads = torch.autograd.grad(module(x)[0].sin().sum(), list(module.parameters()), create_graph=True)
    assert len(seen) == 1
    sum(grad.square().sum() for grad in grads).backward()
    assert len(seen) == 2


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_run_again_in_a_backward(kind: str, start: bool) -> None:
    """torch's checkpoint requires that they save tensors of the same number and shapes, also in a repeated call."""
    module = made(kind)
    for count in range(6):
        x, h = torch.randn(2, 1, D), torch.randn(1, 1, N, requires_grad=True) if start else None
        if count == 4:
            module.weight_ih_l0.data += 0.25
        wanted = [*module.parameters(), *([h] if h is not None else [])]
        output, last = checkpoint(module, x, h, use_reentrant=False)
        found = torch.autograd.grad(output.square().sum() + last.sum(), wanted)
        output, last = module._full_forward(x, h, None, None)
        expected = torch.autograd.grad(output.square().sum() + last.sum(), wanted)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), ("rnn", {"nonlinearity": "modrelu"}), ("factorized", {"margin": None})],
)
def test_saved_tensors_that_hooks_copy(kind: str, options: dict[str, Any]) -> None:
    """In another layout; the parameters change before the backward, which has the copies."""
    module, h = made(kind, **options), torch.randn(1, 2, N, requires_grad=True)
    parameters = list(module.parameters())
    for _ in range(4):
        x = torch.randn(2, 2, D, requires_grad=True)
        wanted = [x, h, *parameters]
        expected = torch.autograd.grad(module._full_forward(x, h, None, None)[0].sin().sum(), wanted)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.clone() if t.ndim > 1 else t.clone(), unturned):
            loss = module(x, h)[0].sin().sum()
        values = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.5)
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected, rtol=3e-5, atol=3e-5)
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)


@pytest.mark.parametrize("kind", ["exponential", "non-normal"])
def test_a_backward_has_the_base_of_its_forward(kind: str) -> None:
    """That of functional_call, and none that has changed since."""
    module, x = made(kind, dtype=torch.float64), torch.randn(2, 2, D, dtype=torch.float64)
    other = made(kind, dtype=torch.float64, rebase_every=1)
    other.rebase()
    assert not torch.allclose(module.base_l0, other.base_l0)
    expected = torch.autograd.grad(other._full_forward(x, None, None, None)[0].sin().sum(), list(other.parameters()))
    given = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    for _ in range(4):
        loss = torch.func.functional_call(module, given, (x,))[0].sin().sum()
        found = torch.autograd.grad(loss, list(other.parameters()), create_graph=True)
        torch.testing.assert_close(found, expected)
        with torch.autograd.graph.save_on_cpu():
            loss = torch.func.functional_call(module, given, (x,))[0].sin().sum()
        torch.testing.assert_close(torch.autograd.grad(loss, list(other.parameters())), expected)
        loss = other(x)[0].sum()
        with torch.no_grad():
            other.base_l0.mul_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_buffer_of_the_user_may_change() -> None:
    module = RNN(D, 4)
    module.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def count(rnn: Any, *_: Any) -> None:
        rnn.calls.add_(1)

    module.register_forward_hook(count)
    module(torch.randn(2, 2, D))[0].sum().backward()
    assert module.calls == 1 and module.weight_hh_l0.grad is not None


def unturned(tensor: Tensor) -> Tensor:
    return tensor.mT if tensor.ndim > 1 else tensor


@pytest.mark.parametrize("result", [0, 1], ids=["output", "h_n"])
@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_many_cotangents_at_once(kind: str, steps: int, result: int) -> None:
    """By torch.autograd, whose vmap is not that of torch.func."""
    module, x = made(kind, dtype=torch.float64), torch.randn(steps, 1, D, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    for _ in range(3):
        output = module(x)[result]
        cotangents = torch.randn(3, *output.shape, dtype=output.dtype)
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(output, wanted, cotangents, is_grads_batched=True, **options)
        single = [torch.autograd.grad(output, wanted, cotangent, **options) for cotangent in cotangents]
        for one, others in zip(found, zip(*single, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(others))


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_in_threads(kind: str) -> None:
    """They leave the module alone, which other threads use."""
    module, x, switch = made(kind), torch.randn(1, 1, D), sys.getswitchinterval()
    parameters = list(module.parameters())

    def derivatives() -> list[Tensor]:
        grads = torch.autograd.grad(module(x)[0].sin().sum(), parameters, create_graph=True)
        return list(torch.autograd.grad(torch.cat([g.flatten() for g in grads]).square().sum(), parameters))

    expected = derivatives()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = [future.result() for future in [pool.submit(derivatives) for _ in range(40)]]
    finally:
        sys.setswitchinterval(switch)
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    for one in found:
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_last_states_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of the full path in every bit, with its derivative."""
    module, x = made(kind, num_layers=2, dtype=torch.float64), torch.randn(5, 4, D, dtype=torch.float64)
    wanted, cotangent = [x.requires_grad_(), *module.parameters()], torch.randn(2, 4, N, dtype=torch.float64)
    taken: list[Any] = []
    joined = _register._with_last_step

    def seen(*given: Any) -> tuple[Any, ...]:
        found = joined(*given)
        taken.append(type(found[0]))
        return found

    monkeypatch.setattr(_register, "_with_last_step", seen)

    def derivatives() -> list[Tensor]:
        _, h_n = module(x)
        first = torch.autograd.grad(h_n, wanted, cotangent)
        slope = torch.autograd.grad(module(x)[1].square().sum(), x, create_graph=True)[0]
        return [*first, *torch.autograd.grad(slope.square().sum(), wanted)]

    found = derivatives()
    assert taken[:2] == [LastGrad, Tensor] and LastGrad not in taken[2:]  # the second layer, the first; create_graph
    taken.clear()
    the_full_path(monkeypatch)
    expected = derivatives()
    assert not taken and all(bool((one != 0).any()) for one in found)
    torch.testing.assert_close(found[: len(wanted)], expected[: len(wanted)], rtol=0, atol=0)
    torch.testing.assert_close(found, expected)


BAD: list[tuple[Any, ...]] = [
    (torch.zeros(1, 1, D + 1), None),
    (torch.zeros(1, 1, D, dtype=torch.float64), None),
    (torch.zeros(1, 1, D, dtype=torch.bfloat16), None),
    (torch.zeros(0, 1, D), None),
    (torch.zeros(1, D, 1, 1), None),
    (torch.zeros(1, 1, D, device="meta"), None),
    (torch.zeros(1, 1, D).to_sparse(), None),
    (torch.full((1, 1), D), None),
    (torch.full((1, 1), -1), None),
    (torch.zeros(1, 1, D), torch.zeros(1, 1, N + 1)),
    (torch.zeros(1, 1, D), torch.zeros(1, N)),
    (torch.zeros(1, 1, D), torch.zeros(1, 1, N, dtype=torch.float64)),
    (torch.zeros(1, 1, D), torch.zeros(1, 1, N).to_sparse()),
    (torch.zeros(1, 1, D), "zeros"),
    ([0.0], None),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["rnn", "low rank", "non-normal", "gru"])
def test_the_errors_of_the_full_path(kind: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(kind)

    def messages() -> list[str]:
        found = []
        for call in BAD:
            with torch.set_grad_enabled(grad), pytest.raises(InputError) as caught:
                module(*call)
            found.append(str(caught.value))
        return found

    found = messages()
    the_full_path(monkeypatch)
    assert found == messages()


def test_bad_parameters_and_settings_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, D)
    messages: list[list[str]] = []
    for full in (False, True):
        if full:
            the_full_path(monkeypatch)
        messages.append([])
        for name, value in (("weight_hh_l0", torch.zeros(N, N + 1)), ("weight_hh_l0", torch.zeros(N, N).double())):
            module = made("rnn")
            module.get_parameter(name).data = value
            with torch.no_grad(), pytest.raises(InputError) as caught:
                module(x)
            messages[-1].append(str(caught.value))
        module = made("rnn", backend="triton")
        with torch.no_grad(), pytest.raises(Exception, match="triton") as unavailable:
            module(x)
        messages[-1].append(str(unavailable.value))
    assert messages[0] == messages[1]


class Names(TorchDispatchMode):
    """Keeps the names of the ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_whoever_listens_sees_the_op(grad: bool) -> None:
    """Modes, the profiler and fake tensors."""
    module, x = made("low rank"), torch.randn(1, 1, D)
    with torch.set_grad_enabled(grad):
        expected = module(x)[0]
        with Names() as seen:
            torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=0)
        assert "orthokern.factored_scan_fwd.default" in seen.names
        with torch.profiler.profile() as profiler:
            module(x)
        assert any("orthokern::factored_scan_fwd" in event.key for event in profiler.key_averages())
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            assert type(module(torch.randn(1, 1, D))[0]) is torch._subclasses.FakeTensor


@pytest.mark.parametrize("kind", ["exponential", "non-normal"])
def test_a_remembered_matrix_follows_every_change(kind: str) -> None:
    """Also one that no version counter shows."""
    module, x = made(kind), torch.randn(2, 1, D)
    other = made(kind)

    def holds() -> None:
        other.load_state_dict(module.state_dict())
        expected = other._full_forward(x, None, None, None)[0].detach()  # with gradients nothing is kept there
        for _ in range(4):
            with torch.no_grad():
                torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=0)

    holds()
    for name in [name for name, _ in module.named_parameters()] + ["base_l0"]:
        tensor = getattr(module, name)
        tensor.data[-1] += 0.125 if name != "base_l0" else 0
        if name == "base_l0":
            tensor.data.copy_(tensor.data.flip(0))
        holds()
    module.double()
    with torch.no_grad():
        assert module(x.double())[0].dtype == torch.float64


def test_a_remembered_matrix_is_no_part_of_the_module() -> None:
    module = made("exponential")
    keys = set(module.__dict__)
    with torch.no_grad():
        module(torch.randn(1, 1, D))
    assert set(module.__dict__) == keys and not any("remember" in key for key in module.state_dict())


def changes_of(kind: str) -> list[Callable[[Any], None]]:
    """What may change between two calls of a module."""

    def replace(module: Any) -> None:
        module.weight_ih_l0 = nn.Parameter(torch.randn(N, D) if kind != "gru" else torch.randn(3 * N, D))

    def move(module: Any) -> None:
        module.weight_ih_l0.data = module.weight_ih_l0.data + 0.25

    def turn(module: Any) -> None:  # the same memory in another order, which is no call to keep
        first = {"rnn": "weight_hh_l0", "gru": "weight_hh_l0", "exponential": "skew_l0", "non-normal": "skew_l0"}
        parameter = module.get_parameter(first.get(kind, "u_l0"))
        parameter.data = parameter.data.view(parameter.shape[::-1]).T

    def turn_back(module: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous() * 1.25

    def setting(name: str, value: Any) -> Callable[[Any], None]:
        return lambda module: setattr(module, name, value)

    changes = [replace, move, turn, turn_back, setting("batch_first", True)]
    if kind == "gru":
        return [*changes, setting("variant", "torch")]
    changes += [setting("nonlinearity", "relu"), setting("gain", 1.25)]
    changes += [setting("nonlinearity", "leaky_relu"), setting("negative_slope", 0.5)]
    if kind in ("factorized", "composed"):
        changes += [setting("spectrum_map", "tanh"), setting("margin", 0.5)]
    return changes


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call_follows_every_change(kind: str, start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the full path in every call, while nothing changes and after each change of module and input."""
    module = made(kind, **({} if kind in ("rnn", "gru", "exponential", "non-normal") else {"margin": 0.25}))
    ran: list[bool] = []
    call = _repeated.Known.call
    monkeypatch.setattr(_repeated.Known, "call", lambda *a: [found := call(*a), ran.append(found is not None)][0])

    def same(shape: tuple[int, int] = (1, 1)) -> None:
        for count in range(12):
            recorded = count % 2 == 1
            x, h = torch.randn(*shape, D), torch.randn(1, shape[int(not module.batch_first)], N) if start else None
            ran.clear()
            with torch.set_grad_enabled(recorded):
                found, wanted = module(x, h), module._full_forward(x, h, None, None)
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            assert [one.stride() for one in found] == [one.stride() for one in wanted]
            assert found[0].data_ptr() != found[1].data_ptr()
            if recorded:
                parameters = list(module.parameters())
                sums = [output.square().sum() + last.sum() for output, last in (found, wanted)]
                grads = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in sums]
                torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
        ready = all(parameter.is_contiguous() for parameter in module.parameters())
        alone = module.gain != 1.0  # calls with gradients are not kept
        assert ran == [ready] if ready and not alone else not ran

    same()
    for parameter in module.parameters():
        parameter.data.view(-1)[-2 if parameter.ndim == 2 else -1] += 0.125  # below a diagonal
        same()
    for change in changes_of(kind):
        change(module)
        same()
    same((2, 1))
    same((2, 2) if not module.batch_first else (1, 3))
    module.eval()
    same()
    with torch.no_grad(), pytest.raises(InputError, match="4 features"):
        module(torch.randn(1, 1, D + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call_keeps_no_module_alive(kind: str) -> None:
    module = made(kind)
    module.weight_ih_l0.owner = module
    x, h = torch.randn(1, 1, D), torch.randn(1, 1, N)
    with torch.no_grad():
        for _ in range(3):
            module(x, h)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_a_repeated_call_can_be_exchanged(kind: str, grad: bool) -> None:
    """As Module.to and load_state_dict do after torch.__future__.set_swap_module_params_on_conversion(True)."""
    module, other, x = made(kind), made(kind), torch.randn(1, 1, D)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            module(x)
    for name, parameter in other.named_parameters():
        parameter.data += 0.125
        torch.utils.swap_tensors(module.get_parameter(name), nn.Parameter(parameter.detach().clone()))
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            torch.testing.assert_close(module(x), other(x), rtol=0, atol=0)
    module.weight_ih_l0 = nn.Parameter(module.weight_ih_l0.data.to_sparse())
    with torch.set_grad_enabled(grad), pytest.raises(InputError, match="weight_ih_l0 is a sparse"):
        module(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 5, 16, 34, 70])
def test_weights_read_in_place_give_the_bits_of_packed_ones(isa: str, n: int, dtype: torch.dtype) -> None:
    """A call of up to four steps reads them in place, a call of more packs them."""
    torch.manual_seed(n)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    steps, batch, features = 3, 6, 5
    k = (n + 1) // 2
    u, s, v = random(n, k), random(k), random(n, k)
    h0, weight, bias = random(batch, n), random(n, features), random(n)
    inputs = [
        (random(steps, batch, features), weight, bias),
        (random(steps, batch, features), weight, None),
        (torch.randint(features, (steps, batch)), weight, bias),
        (random(steps, batch, n), None, None),
    ]
    for activation in ("tanh", "modrelu", "prelu", "relu" if n % 2 else "oplu"):
        act_param = {"modrelu": random(n), "prelu": random(1)}.get(activation)
        for x, w_in, b in inputs:
            for scan in (
                lambda *a, **o: functional.dense_scan(a[0], u @ (v * s).mT / n, *a[1:], **o),
                lambda *a, **o: functional.factored_scan(a[0], u / n, s, v, *a[1:], **o),
            ):
                options = {
                    "weight": w_in,
                    "bias": b,
                    "activation": activation,
                    "act_param": act_param,
                    "backend": "cpu",
                }
                whole = scan(x, h0, **options)
                for row in range(batch):
                    alone = scan(x[:, row : row + 1], h0[row : row + 1], **options)
                    torch.testing.assert_close(alone[:, 0], whole[:, row], rtol=0, atol=0)
    for variant in ("kanai", "torch"):
        for b in (None, random(3 * n)):
            x, w = random(steps, batch, 3 * n), random(3 * n, n) / n
            whole = functional.gru_scan(x, w, h0, bias=b, variant=variant, backend="cpu")
            for row in range(batch):
                alone = functional.gru_scan(
                    x[:, row : row + 1], w, h0[row : row + 1], bias=b, variant=variant, backend="cpu"
                )
                torch.testing.assert_close(alone[:, 0], whole[:, row], rtol=0, atol=0)


@pytest.mark.parametrize("rank", [None, 200])
@pytest.mark.parametrize("ids", [False, True])
def test_threads_that_share_a_product_change_no_bit(isa: str, rank: int | None, ids: bool) -> None:
    """One sequence with weights of more than 256 KiB; and more threads than there are processors."""
    n, features = 330, 7
    torch.manual_seed(0)
    h0, weight, bias, slope = torch.randn(2, n), torch.randn(n, features), torch.randn(n), torch.randn(n)
    maps = (
        [torch.randn(n, n) / n] if rank is None else [torch.randn(n, rank), torch.rand(rank), torch.randn(n, rank) / n]
    )
    scan = functional.dense_scan if rank is None else functional.factored_scan
    threads = torch.get_num_threads()
    try:
        for batch, steps in ((1, 9), (2, 5), (1, 1)):
            x = torch.randint(features, (steps, batch)) if ids else torch.randn(steps, batch, features)
            found = []
            for count in (1, 2, 3, 5):
                torch.set_num_threads(count)
                found.append(
                    scan(
                        x, *maps, h0[:batch], weight=weight, bias=bias, activation="modrelu", act_param=slope,
                        backend="cpu",
                    )
                )  # fmt: skip
            for other in found[1:]:
                torch.testing.assert_close(other, found[0], rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 3, 1], [2, 5, 3]])
def test_packed_rows_and_their_derivatives(lengths: list[int], bidirectional: bool) -> None:
    """Against each sequence alone; batches of one length are not copied; the copy of rows has both derivatives."""
    module = made("rnn", dtype=torch.float64, bidirectional=bidirectional)
    sequences = [torch.randn(n, D, dtype=torch.float64) for n in lengths]
    packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    parameters = list(module.parameters())
    output, h_n = module(packed)
    found = torch.autograd.grad(output.data.square().sum() + h_n.sum(), parameters)
    alone = [module(one) for one in sequences]
    loss = sum(y.square().sum() + h.sum() for y, h in alone)
    torch.testing.assert_close(found, torch.autograd.grad(loss, parameters))
    rows, place = torch.randn(6, 2, dtype=torch.float64, requires_grad=True), torch.tensor([4, 0, 3])
    assert torch.autograd.gradcheck(lambda rows: _layouts._rows(rows, place), rows)
    assert torch.autograd.gradgradcheck(lambda rows: _layouts._rows(rows, place).square(), rows)
