"""Recurrence, readout and cross-entropy in one call: modal, in chunks of states, and as the scan followed by the
readout, against one another and against float64."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from test_modal_basis import MARGINS, factored, randn
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from orthokern import _memory, functional, init
from orthokern.diagnostics import profile_steps, tap
from orthokern.errors import InputError
from orthokern.nn import RNN, ExpRNN, FactorizedRNN, LinearCrossEntropy, NonNormalRNN
from orthokern.ops.modal import choice, cpu, norms, op
from orthokern.ops.modal import loss as scan_loss

IDS, FEATURES, TERMS = "ids", "features", "terms"


def problem(
    kind: str, N: int, K: int, T: int, B: int, *, margin: float | None = 0.1, dense: bool = False, lengths: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors that want gradients, the matrix first, and all arguments of scan_cross_entropy."""
    generator = torch.Generator().manual_seed(N + T)
    D, C = 4, 5
    u, s, v = factored(N, K, margin)
    matrix = ((u * s) @ v.mT,) if dense else (u, s, v)
    weight, bias = (None, None) if kind == TERMS else (randn(N, D, seed=21), randn(N, seed=22))
    x = {IDS: None, FEATURES: randn(T, B, D, seed=23), TERMS: randn(T, B, N, seed=24)}[kind]
    if x is None:
        x = torch.randint(D, (T, B), generator=generator, dtype=torch.uint8)
    arguments: dict[str, Any] = {
        "x": x,
        "matrix": matrix,
        "readout": 0.3 * randn(C, N, seed=25),
        "readout_bias": randn(C, seed=26),
        "target": torch.randint(C, (T, B), generator=generator, dtype=torch.uint8),
        "h0": randn(B, N, seed=27),
        "weight": weight,
        "bias": bias,
        "activation": "identity",
    }
    if lengths:
        arguments["lengths"] = torch.randint(1, T + 1, (B,), generator=generator)
    wanted = [*matrix, *(arguments[name] for name in ("readout", "readout_bias", "h0", "weight", "bias", "x"))]
    wanted = [tensor.requires_grad_() for tensor in wanted if tensor is not None and tensor.is_floating_point()]
    return wanted, arguments


def plain(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(loss, hits) from the states of all steps, in torch alone."""
    a = arguments
    matrix = a["matrix"]
    w = matrix[0] if len(matrix) == 1 else (matrix[0] * matrix[1]) @ matrix[2].mT
    x = a["x"]
    if a["weight"] is not None:
        x = (x @ a["weight"].mT if x.is_floating_point() else a["weight"].mT[x.long()]) + a["bias"]
    h, states = a["h0"], []
    for e in x:
        h = h @ w.mT + e
        states.append(h)
    logits = torch.stack(states) @ a["readout"].mT + a["readout_bias"]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), a["target"].flatten().long(), reduction="none")
    right = logits.argmax(-1) == a["target"]
    lengths = a.get("lengths")
    if lengths is None:
        return losses.mean(), right.sum(1)
    alive = torch.arange(len(x))[:, None] < lengths
    return losses[alive.flatten()].mean(), (right & alive).sum(1)


def compare(wanted: list[Tensor], arguments: dict[str, Any], tolerance: float, **options: Any) -> None:
    loss, hits = plain(arguments)
    expected = torch.autograd.grad(1.7 * loss, wanted)
    found = functional.scan_cross_entropy(**arguments, **options)
    assert (found.loss - loss).abs() <= tolerance * loss.abs()
    assert torch.equal(found.hits, hits)
    for tensor, a, b in zip(wanted, torch.autograd.grad(1.7 * found.loss, wanted), expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm(), list(tensor.shape)


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("kind", [IDS, FEATURES, TERMS])
@pytest.mark.parametrize("form", ["dense", "factored", "thin"])
def test_modal(form: str, kind: str, lengths: bool) -> None:
    wanted, arguments = problem(kind, 12, 5 if form == "thin" else 12, 17, 4, dense=form == "dense", lengths=lengths)
    compare(wanted, arguments, 1e-10, algorithm="modal")


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("kind", [IDS, FEATURES, TERMS])
def test_chunks(kind: str, lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More states than are kept: the chunks' sums are those of all steps."""
    wanted, arguments = problem(kind, 12, 12, 17, 4, lengths=lengths)
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    monkeypatch.setattr(scan_loss, "CHUNK", 5 * 4 * 12 * 8)
    compare(wanted, arguments, 1e-12, algorithm="sequential")
    with torch.no_grad():
        loss, hits, _, _ = functional.scan_cross_entropy(**arguments, algorithm="sequential")
    expected = plain(arguments)
    assert (loss - expected[0]).abs() < 1e-13 and torch.equal(hits, expected[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_chunks_without_gradients_are_a_forward(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trainable parameters too."""
    rnn, readout = FactorizedRNN(10, 8), LinearCrossEntropy(8, 9)
    ids, target = torch.randint(10, (40, 3)), torch.randint(9, (40, 3))
    expected = rnn.loss(ids, readout, target)
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    monkeypatch.setattr(scan_loss, "CHUNK", 7 * 3 * 8 * 4)
    with mode(), tap() as taken:
        loss, hits = rnn.loss(ids, readout, target)
    torch.testing.assert_close(loss, expected[0].detach())
    assert torch.equal(hits, expected[1]) and taken.state_norms[0].shape == (40,)


@pytest.mark.parametrize("activation", ["tanh", "modrelu", "prelu"])
@pytest.mark.parametrize("message_clip", [0.0, 0.01])
def test_chunks_of_a_nonlinear_scan(activation: str, message_clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the scan followed by the readout: kept whole it has their bits, in chunks their value."""
    wanted, arguments = problem(FEATURES, 8, 8, 19, 3)
    arguments["activation"] = activation
    parameter = None if activation == "tanh" else torch.full((1,), 0.1, dtype=torch.float64, requires_grad=True)
    wanted += [] if parameter is None else [parameter]
    u, s, v = arguments["matrix"]
    options = {"activation": activation, "act_param": parameter, "message_clip": message_clip}
    hs = functional.factored_scan(
        arguments["x"], u, s, v, arguments["h0"], weight=arguments["weight"], bias=arguments["bias"], **options
    )
    loss = functional.linear_cross_entropy(
        hs, arguments["readout"], arguments["readout_bias"], arguments["target"].long()
    )
    factor = -2.5  # with a message clip, gradients are not proportional to that of the loss
    expected = torch.autograd.grad(factor * loss, wanted)
    call = {**arguments, **options}
    found = functional.scan_cross_entropy(**call)
    assert torch.equal(found.loss, loss) and found.basis is None and activation in found.refused
    for a, b in zip(torch.autograd.grad(factor * found.loss, wanted), expected, strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    monkeypatch.setattr(scan_loss, "CHUNK", 4 * 3 * 8 * 8)
    chunked = functional.scan_cross_entropy(**call)
    assert torch.equal(chunked.hits, found.hits) and (chunked.loss - loss).abs() < 1e-14
    for a, b in zip(torch.autograd.grad(factor * chunked.loss, wanted), expected, strict=True):
        assert (a - b).norm() <= 1e-13 * b.norm()


def test_chunks_with_a_message_clip_notice_changed_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backward reads the inputs again."""
    wanted, arguments = problem(FEATURES, 8, 8, 19, 3, lengths=True)
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    for name in ("target", "lengths"):
        loss = functional.scan_cross_entropy(**arguments, message_clip=0.1).loss
        arguments[name].copy_(arguments[name].clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_one_id_of_any_strides(dtype: torch.dtype) -> None:
    wanted, arguments = problem(IDS, 8, 8, 1, 1)
    for name in ("x", "target"):
        arguments[name] = arguments[name].to(dtype).repeat(1, 2)[:, ::2]
        assert arguments[name].stride() == (2, 2)
    compare(wanted, arguments, 1e-10, algorithm="modal")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modal_without_gradients_is_a_forward(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trainable parameters too, and with a bias, which is the one that enters the call as it is."""
    wanted, arguments = problem(IDS, 12, 12, 17, 4)
    run, needed = cpu.loss, []

    def watched(inputs: Any, readout: Any, need_grad: bool) -> Any:
        needed.append(need_grad)
        return run(inputs, readout, need_grad)

    monkeypatch.setattr(cpu, "loss", watched)
    expected = functional.scan_cross_entropy(**arguments, algorithm="modal").loss
    with mode():
        found = functional.scan_cross_entropy(**arguments, algorithm="modal").loss
    assert needed == [True, False]
    torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize(("N", "T"), list(itertools.product([1, 2, 3, 17, 33], [1, 30])))
def test_margins(N: int, T: int, margin: float | None) -> None:
    wanted, arguments = problem(IDS, N, N, T, 3, margin=margin)
    compare(wanted, arguments, 1e-8, algorithm="modal")


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("N", [128, 250])
def test_large(N: int, margin: float | None) -> None:
    wanted, arguments = problem(IDS, N, N, 20, 2, margin=margin)
    compare(wanted, arguments, 1e-9 if margin in (0.0, 0.001, 0.1, 0.3) else 1e-7, algorithm="modal")


@pytest.mark.parametrize(("N", "K"), [(2, 1), (3, 2), (17, 1), (33, 32), (128, 16)])
@pytest.mark.parametrize("margin", [0.0, 0.3, None])
def test_thin_ranks(N: int, K: int, margin: float | None) -> None:
    wanted, arguments = problem(IDS, N, K, 20, 2, margin=margin)
    compare(wanted, arguments, 1e-8, algorithm="modal")


@pytest.mark.parametrize("name", ["orthogonal", "henaff", "cayley", "identity", "glorot", "glorot-uniform", "learned"])
def test_starts(name: str) -> None:
    wanted, arguments = problem(IDS, 16, 16, 25, 3, dense=True)
    w = torch.empty(16, 16)
    init.initialize_(w, name, torch.Generator().manual_seed(1))
    arguments["matrix"] = (w.double().requires_grad_(),)
    wanted[0] = arguments["matrix"][0]
    compare(wanted, arguments, 1e-8, algorithm="modal")


@pytest.mark.parametrize("T", [300, 3000])
@pytest.mark.parametrize("margin", [0.0, 0.001, 0.1])
def test_float32_is_nearer_than_the_sequential_scan(T: int, margin: float) -> None:
    """To the float64 of the same float32 numbers; and near enough by itself."""
    wanted, arguments = problem(IDS, 48, 48, T, 4, margin=min(margin, 30 / T))
    narrow: dict[str, Any] = {
        name: tuple(part.detach().float().requires_grad_() for part in value)
        if name == "matrix"
        else value.detach().float().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    names = [name for name in ("readout", "readout_bias", "h0", "weight", "bias") if name in narrow]
    leaves = [*narrow["matrix"], *(narrow[name] for name in names)]
    wide = {
        name: tuple(part.detach().double().requires_grad_() for part in value)
        if name == "matrix"
        else value.detach().double().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in narrow.items()
    }
    exact_leaves = [*wide["matrix"], *(wide[name] for name in names)]
    exact = functional.scan_cross_entropy(**wide, algorithm="sequential")
    expected = torch.autograd.grad(exact.loss, exact_leaves)
    errors = {}
    for algorithm in ("modal", "sequential"):
        found = functional.scan_cross_entropy(**narrow, algorithm=algorithm)
        grads = torch.autograd.grad(found.loss, leaves)
        errors[algorithm] = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(grads, expected, strict=True))
    assert errors["modal"] < 1e-6 and errors["modal"] < errors["sequential"], errors


def test_the_answer_depends_on_the_arguments_alone() -> None:
    """A basis that is given changes bits at most; the same one gives the same bits, and one's own is a fixed point."""
    _, arguments = problem(IDS, 20, 20, 30, 3)
    fresh = functional.scan_cross_entropy(**arguments, algorithm="modal")
    moved = {**arguments, "matrix": tuple(part.detach() + 1e-7 * torch.ones_like(part) for part in arguments["matrix"])}
    a = functional.scan_cross_entropy(**moved, algorithm="modal", basis=fresh.basis)
    functional.scan_cross_entropy(**arguments, algorithm="modal")
    b = functional.scan_cross_entropy(**moved, algorithm="modal", basis=fresh.basis)
    again = functional.scan_cross_entropy(**moved, algorithm="modal", basis=a.basis)
    assert torch.equal(a.loss, b.loss) and torch.equal(a.loss, again.loss) and torch.equal(a.basis, again.basis)


# ---- the choice --------------------------------------------------------------------------------------------------


def big(margin: float | None = 0.01) -> dict[str, Any]:
    u, s, v = (part.float() for part in factored(64, 64, margin))
    return {"matrix": (u, s, v), "T": 4000, "B": 20, "classes": 9}


def test_auto_is_modal_where_that_pays() -> None:
    name, why = functional.explain_scan_cross_entropy(**big())
    assert name == "modal" and "condition" in why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"activation": "tanh"}, "the activation is 'tanh'"),
        ({"message_clip": 1.0}, "message_clip is 1"),
        ({"T": 2, "B": 1}, "times as much"),
        ({"backend": "reference"}, "step by step"),
        ({"algorithm": "sequential"}, "'sequential'"),
        ({"matrix": (torch.eye(64) + torch.diag(torch.ones(63), 1),)}, "eigenvectors"),
        ({"matrix": (torch.eye(64),)}, "pairs of its eigenvalues"),
        ({"matrix": (torch.full((64, 64), torch.nan),)}, "not finite"),
    ],
)
def test_why_not(change: dict[str, Any], why: str) -> None:
    name, said = functional.explain_scan_cross_entropy(**{**big(), **change})
    assert name == "sequential" and why in said, said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"T": 0}, "T is 0: accepted is an integer, 1 or more"),
        ({"T": -4}, "T is -4: accepted"),
        ({"B": 0}, "B is 0: accepted"),
        ({"classes": 2.5}, "classes is 2.5: accepted"),
        ({"algorithm": "model"}, "unknown algorithm 'model'.*did you mean 'modal'"),
        ({"algorithm": "chunked", "resets": True}, "algorithm is 'chunked' with resets"),
    ],
)
def test_why_not_of_what_is_no_call(change: dict[str, Any], message: str) -> None:
    module = RNN(10, 6, nonlinearity="identity")
    sizes = {"T": 10, "B": 3, "classes": 5}
    for told in (functional.explain_scan_cross_entropy, module.explain_loss):
        matrix = {"matrix": torch.eye(6)} if told != module.explain_loss else {}
        with pytest.raises(InputError, match=message) as error:
            told(**{**matrix, **sizes, **change})
        assert "\n" not in str(error.value)


def test_sizes_of_numpy() -> None:
    sizes = {"T": np.int64(10), "B": np.int32(3), "classes": np.uint8(5)}
    plain = {name: int(size) for name, size in sizes.items()}
    explain = functional.explain_scan_cross_entropy
    assert explain(torch.eye(6), **sizes) == explain(torch.eye(6), **plain)
    with pytest.raises(InputError, match="T is bool: accepted is an integer, 1 or more"):
        explain(torch.eye(6), **{**plain, "T": np.bool_(True)})


def test_a_defective_matrix_falls_back() -> None:
    w = torch.eye(64, dtype=torch.float64) * 0.9 + torch.diag(torch.full((63,), 0.1, dtype=torch.float64), 1)
    wanted, arguments = problem(IDS, 64, 64, 1500, 8, dense=True)
    arguments["matrix"] = (w.requires_grad_(),)
    wanted[0] = w
    compare(wanted, arguments, 1e-11)
    found = functional.scan_cross_entropy(**arguments)
    assert found.basis is None and "eigenvectors" in found.refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "tanh", "algorithm": "modal"}, "algorithm is 'modal': the activation is 'tanh'.*'sequential'"),
        ({"message_clip": 0.5, "algorithm": "modal"}, "algorithm is 'modal': message_clip is 0.5.*'sequential'"),
        ({"matrix": torch.ones(3, 4)}, "matrix"),
        ({"matrix": (torch.ones(3, 3), torch.ones(3))}, "matrix"),
        ({"readout": torch.ones(2, 5)}, "readout has shape"),
        ({"target": torch.zeros(3, 2)}, "target has dtype float32"),
        ({"target": torch.zeros(3, 9, dtype=torch.int64)}, "target has shape"),
        ({"reduction": "none"}, "reduction"),
        ({"basis": torch.ones(3, 3)}, "basis has shape"),
        ({"x": torch.zeros(6, 2, dtype=torch.int8), "weight": torch.ones(6, 4)}, "uint8, int16, int32 or int64"),
        ({"algorithm": "model"}, "did you mean 'modal'"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.randn(6, 2, 6),
        "matrix": torch.eye(6),
        "readout": torch.ones(2, 6),
        "target": torch.zeros(6, 2, dtype=torch.int64),
        "activation": "identity",
    }
    with pytest.raises(InputError, match=message) as error:
        functional.scan_cross_entropy(**{**arguments, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("algorithm", ["modal", "sequential"])
def test_ids_and_targets_out_of_range(algorithm: str) -> None:
    _, arguments = problem(IDS, 6, 6, 5, 2)
    for name in ("x", "target"):
        wrong = arguments[name].clone()
        wrong[3, 1] = 77
        with pytest.raises(InputError, match="77"):
            functional.scan_cross_entropy(**{**arguments, name: wrong}, algorithm=algorithm)


# ---- states, modal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("kind", [IDS, FEATURES, TERMS])
@pytest.mark.parametrize("form", ["dense", "factored", "thin"])
@pytest.mark.parametrize("steps", [64, 5], ids=["", "spans"])
def test_states(form: str, kind: str, lengths: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "SPAN_STEPS", steps)
    monkeypatch.setattr(op, "SPAN_ROWS", 4 * steps)
    wanted, a = problem(kind, 12, 5 if form == "thin" else 12, 17, 4, dense=form == "dense", lengths=lengths)
    scan = functional.dense_scan if form == "dense" else functional.factored_scan
    x = a["x"] if a["x"].is_floating_point() else a["x"].long()
    options = {name: a.get(name) for name in ("weight", "bias", "lengths", "activation")}
    wanted = [tensor for tensor in wanted if tensor is not a["readout"] and tensor is not a["readout_bias"]]
    cotangent = randn(17, 4, 12, seed=30)
    results = []
    for algorithm in ("sequential", "modal"):
        hs = scan(x, *a["matrix"], a["h0"], algorithm=algorithm, **options)
        results.append((hs, torch.autograd.grad((hs * cotangent).sum(), wanted)))
    (hs, expected), (found, grads) = results
    assert (found - hs).abs().max() < 1e-12
    for one, other in zip(grads, expected, strict=True):
        assert (one - other).norm() <= 1e-11 * other.norm()


@pytest.mark.parametrize("kind", [IDS, FEATURES])
def test_states_without_a_bias(kind: str) -> None:
    _, a = problem(kind, 6, 6, 9, 2, dense=True)
    x = a["x"] if kind == FEATURES else a["x"].long()
    wanted, cotangent = [*a["matrix"], a["h0"], a["weight"]], randn(9, 2, 6, seed=30)
    results = []
    for algorithm in ("sequential", "modal"):
        hs = functional.dense_scan(
            x, *a["matrix"], a["h0"], weight=a["weight"], activation="identity", algorithm=algorithm
        )
        results.append(torch.autograd.grad(hs, wanted, cotangent))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-11 * one.norm()


def test_padding_may_hold_anything() -> None:
    _, a = problem(FEATURES, 6, 6, 9, 2)
    lengths = torch.tensor([9, 4])
    weight = a["weight"].detach().requires_grad_()
    x = a["x"].detach().clone()
    x[4:, 1] = torch.nan
    for algorithm in ("modal", "sequential"):
        call = {**a, "x": x, "weight": weight, "lengths": lengths}
        loss = functional.scan_cross_entropy(**call, algorithm=algorithm).loss
        (grad,) = torch.autograd.grad(loss, weight)
        assert loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("weighted", [False, True])
def test_padding_of_states_may_hold_anything(weighted: bool) -> None:
    x, lengths, alive = randn(9, 2, 5 if weighted else 6, seed=1), torch.tensor([9, 4]), torch.ones(9, 2, 6)
    alive[4:, 1] = 0
    w, weight, bias = (randn(*size, seed=2).requires_grad_() for size in ((6, 6), (6, 5), (6,)))
    cotangent, results = randn(9, 2, 6, seed=3), []
    for garbage in (0.0, torch.nan):
        leaf, grad_hs = x.clone(), cotangent.clone()
        leaf[4:, 1], grad_hs[4:, 1] = garbage, garbage
        leaf.requires_grad_()
        hs = functional.dense_scan(
            leaf, w, weight=weight if weighted else None, bias=bias if weighted else None, lengths=lengths,
            activation="identity", algorithm="modal",
        )  # fmt: skip
        wanted = [leaf, w, *([weight, bias] if weighted else [])]
        results.append([hs, *torch.autograd.grad(hs, wanted, grad_hs)])
    assert (results[0][0] == results[0][0] * alive).all()
    for one, other in zip(*results, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("inputs", [IDS, FEATURES])
def test_states_that_grow_out_of_range_on_padding(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are those of the sequences that were cut off before it."""
    monkeypatch.setattr(op, "SPAN_ROWS", 2 * 64)
    torch.manual_seed(0)
    w = (1.12 * torch.linalg.qr(torch.randn(6, 6))[0]).requires_grad_()
    table, h0, lengths = torch.randn(6, 3, requires_grad=True), torch.randn(2, 6, requires_grad=True), [5, 7]
    x = torch.randint(3, (1000, 2)) if inputs == IDS else torch.randn(1000, 2, 3)
    results = []
    for T in (7, 1000):
        hs = functional.dense_scan(
            x[:T], w, h0, weight=table, activation="identity", algorithm="modal", lengths=torch.tensor(lengths)
        )
        results.append([hs[:7], *torch.autograd.grad(hs.square().sum(), (w, table, h0))])
        assert not hs[7:].any()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_states_bad_input() -> None:
    with pytest.raises(InputError, match="algorithm is 'modal': W is not safely diagonalisable"):
        functional.dense_scan(
            torch.randn(5, 2, 2), torch.tensor([[1.0, 1.0], [0.0, 1.0]]), activation="identity", algorithm="modal"
        )
    with pytest.raises(InputError, match="algorithm is 'modal': the activation is 'tanh'"):
        functional.dense_scan(torch.randn(5, 2, 2), torch.eye(2), algorithm="modal")


# ---- modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("Module", [RNN, FactorizedRNN, ExpRNN, NonNormalRNN])
@pytest.mark.parametrize("options", [{}, {"gain": 0.9, "learned_h0": True}], ids=["", "gain and h0"])
def test_modules(Module: Any, layers: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rnn = Module(5, 12, layers, nonlinearity="identity", dtype=torch.float64, **options)
    readout = LinearCrossEntropy(12, 4, dtype=torch.float64)
    ids, target = torch.randint(5, (20, 3)), torch.randint(4, (20, 3))
    hs = rnn(ids)[0]
    loss = readout.loss(hs, target)
    parameters = [*rnn.parameters(), *readout.parameters()]
    expected = torch.autograd.grad(loss, parameters)
    for algorithm in ("modal", "sequential"):
        found, hits = rnn.loss(ids.to(torch.uint8), readout, target.to(torch.uint8), algorithm=algorithm)
        assert (found - loss).abs() < 1e-12
        assert torch.equal(hits, (readout(hs).argmax(-1) == target).sum(1))
        for a, b in zip(torch.autograd.grad(found, parameters), expected, strict=True):
            assert (a - b).norm() <= 1e-9 * b.norm()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_a_batch_of_one_that_was_transposed(dtype: torch.dtype) -> None:
    """[T, 1] with strides (1, T) is contiguous, and yet torch does not view it as another dtype."""
    torch.manual_seed(0)
    rnn, readout = RNN(5, 4, nonlinearity="identity", batch_first=True), torch.nn.Linear(4, 3)
    ids, target = torch.randint(0, 5, (1, 12), dtype=dtype), torch.randint(0, 3, (1, 12), dtype=dtype)
    losses = [
        rnn.loss(x, readout, y, algorithm=algorithm)[0]
        for algorithm in ("modal", "sequential")
        for x, y in ((ids, target), (torch.nn.functional.one_hot(ids.long(), 5).float(), target))
    ]
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(4), rtol=1e-5, atol=0.0)


def test_layouts() -> None:
    torch.manual_seed(0)
    rnn, readout = FactorizedRNN(3, 8, nonlinearity="identity", batch_first=True), nn.Linear(8, 4)
    x, target, hx = torch.randn(2, 9, 3), torch.randint(4, (2, 9)), torch.randn(1, 2, 8)
    expected = nn.functional.cross_entropy(readout(rnn(x, hx)[0]).flatten(0, 1), target.flatten())
    loss, hits = rnn.loss(x, readout, target, hx, algorithm="modal")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and hits.shape == (9,)
    one, hits = rnn.loss(x[0], readout, target[0], hx[:, 0], reduction="sum")
    other, _ = rnn.loss(x[:1], readout, target[:1], hx[:, :1], reduction="sum")
    assert one.item() == pytest.approx(other.item()) and hits.shape == (9,)


@pytest.mark.parametrize("nonlinearity", ["identity", "tanh"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("ids", [False, True])
def test_padding_is_not_read(nonlinearity: str, layers: int, ids: bool) -> None:
    """By no layer: neither NaN nor ids out of range."""
    torch.manual_seed(0)
    rnn, readout = FactorizedRNN(3, 8, layers, nonlinearity=nonlinearity, dtype=torch.float64), nn.Linear(8, 4).double()
    lengths, padding = torch.tensor([9, 5]), torch.arange(9)[:, None] >= torch.tensor([9, 5])
    x = torch.randint(3, (9, 2)) if ids else torch.randn(9, 2, 3, dtype=torch.float64)
    target = torch.randint(4, (9, 2))
    parameters = [*rnn.parameters(), *readout.parameters()]
    expected = nn.functional.cross_entropy(readout(rnn(x)[0])[~padding], target[~padding])
    wanted = torch.autograd.grad(expected, parameters)
    x[padding] = -1 if ids else torch.nan
    loss, _ = rnn.loss(x, readout, target, lengths=lengths)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted)


def test_a_module_refuses() -> None:
    rnn, readout = FactorizedRNN(3, 8), nn.Linear(8, 4)
    x, target = torch.randn(9, 2, 3), torch.zeros(9, 2, dtype=torch.int64)
    with pytest.raises(InputError, match="target is"):
        rnn.loss(x, readout, target.mT)
    with pytest.raises(InputError, match="readout is"):
        rnn.loss(x, nn.Linear(7, 4), target)
    with pytest.raises(InputError, match="readout is Tanh"):
        rnn.loss(x, nn.Tanh(), target)
    with pytest.raises(InputError, match="one direction"):
        FactorizedRNN(3, 8, bidirectional=True).loss(x, readout, target)
    with pytest.raises(InputError, match="activation is 'tanh'"):
        rnn.loss(x, readout, target, algorithm="modal")
    with pytest.raises(InputError, match="^input of loss is a PackedSequence; accepted: a Tensor, with lengths="):
        rnn.loss(pack_sequence([x[:, 0]]), readout, target[:, :1])  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["identity", "tanh"])
def test_the_reduction_is_that_of_the_readout(activation: str) -> None:
    torch.manual_seed(0)
    rnn = RNN(5, 8, nonlinearity=activation, dtype=torch.float64)
    ids = torch.randint(5, (40, 3))
    mean, total = (LinearCrossEntropy(8, 4, dtype=torch.float64, reduction=kind) for kind in ("mean", "sum"))
    for readout in (mean, total):
        loss, _ = rnn.loss(ids, readout, ids % 4)
        torch.testing.assert_close(loss, readout.loss(rnn(ids)[0], ids % 4), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        rnn.loss(ids, total, ids % 4, reduction="mean")[0] * ids.numel(), loss, rtol=1e-9, atol=0
    )
    assert torch.equal(rnn.loss(ids, torch.compile(total, backend="eager"), ids % 4)[0], loss)
    linear = nn.Linear(8, 4, dtype=torch.float64)
    assert torch.equal(rnn.loss(ids, linear, ids % 4)[0], rnn.loss(ids, linear, ids % 4, reduction="mean")[0])


def test_the_basis_is_part_of_the_state() -> None:
    """Kept in training alone; with it a run that goes on has the bits of one that never stopped."""
    torch.manual_seed(0)
    rnn, readout = FactorizedRNN(5, 24, nonlinearity="identity"), nn.Linear(24, 4)
    optimizer = torch.optim.SGD([*rnn.parameters(), *readout.parameters()], 1e-2)

    def step(rnn: Any, readout: Any, optimizer: Any, seed: int) -> float:
        ids = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss, _ = rnn.loss(ids, readout, ids % 4, algorithm="modal")
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    assert not any("modal" in key for key in rnn.state_dict())
    for seed in range(4):
        step(rnn, readout, optimizer, seed)
    state = copy.deepcopy(rnn.state_dict())
    assert state["modal_basis_l0"].dtype == torch.float64

    other, other_readout = FactorizedRNN(5, 24, nonlinearity="identity"), nn.Linear(24, 4)
    assert not other.load_state_dict(state).unexpected_keys
    other_readout.load_state_dict(readout.state_dict())
    other_optimizer = torch.optim.SGD([*other.parameters(), *other_readout.parameters()], 1e-2)

    ids = torch.randint(5, (40, 3))
    with torch.no_grad():  # looking changes nothing
        rnn.loss(ids, readout, ids % 4, algorithm="modal")
    rnn.eval()
    rnn.loss(ids, readout, ids % 4, algorithm="modal")
    rnn.train()
    assert torch.equal(rnn.state_dict()["modal_basis_l0"], state["modal_basis_l0"])
    for seed in range(4, 8):
        assert step(rnn, readout, optimizer, seed) == step(other, other_readout, other_optimizer, seed)
    for a, b in zip(rnn.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)

    del state["modal_basis_l0"]
    other.load_state_dict(state)
    assert "modal_basis_l0" not in other.state_dict()
    for wrong in (torch.ones(3), torch.ones(24, 25), torch.ones(24, 22), torch.ones(24, 50), [1.0]):
        state["modal_basis_l0"] = wrong
        with pytest.raises(RuntimeError, match=r"modal_basis_l0 (has shape \[.*\]|is list), .* no basis of 24 units"):
            other.load_state_dict(state)


def test_the_basis_in_a_state_of_torch_distributed_checkpoint() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    def model() -> nn.ModuleDict:
        return nn.ModuleDict({"rnn": FactorizedRNN(5, 24, nonlinearity="identity"), "readout": nn.Linear(24, 4)})

    ids, trained, loaded = torch.randint(5, (40, 3)), model(), model()
    trained["rnn"].loss(ids, trained["readout"], ids % 4, algorithm="modal")
    state = copy.deepcopy(get_model_state_dict(trained))
    assert not set_model_state_dict(loaded, state).unexpected_keys
    found = get_model_state_dict(loaded)
    assert "rnn.modal_basis_l0" in found and found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("margin", [0.0, 0.01, 0.3, None])
def test_modal_training_is_training_step_by_step(margin: float | None) -> None:
    """A hundred steps of the same descent: the losses agree to rounding."""
    losses: dict[str, list[float]] = {}
    for algorithm in ("modal", "sequential"):
        torch.manual_seed(0)
        rnn = FactorizedRNN(6, 32, nonlinearity="identity", margin=margin)
        readout = LinearCrossEntropy(32, 4)
        optimizer = torch.optim.SGD([*rnn.parameters(), *readout.parameters()], 0.05)
        generator = torch.Generator().manual_seed(1)
        losses[algorithm] = []
        for _ in range(100):
            ids = torch.randint(6, (30, 5), generator=generator)
            optimizer.zero_grad()
            loss, _ = rnn.loss(ids, readout, ids % 4, algorithm=algorithm)
            loss.backward()
            optimizer.step()
            losses[algorithm].append(float(loss.detach()))
    for a, b in zip(*losses.values(), strict=True):
        assert a == pytest.approx(b, rel=2e-5)
    assert losses["modal"][-1] < 0.9 * losses["modal"][0]


def test_norms_through_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse tap gets the norms of the sequential scan at the steps that a record keeps; a full one makes it run."""
    monkeypatch.setattr(norms, "PIECE", 2 * 3 * 12 * 8)
    torch.manual_seed(0)
    rnn = FactorizedRNN(5, 12, nonlinearity="identity", dtype=torch.float64)
    readout = LinearCrossEntropy(12, 4, dtype=torch.float64)
    ids = torch.randint(5, (200, 3))
    taps = {}
    for algorithm in ("modal", "sequential"):
        with tap(sparse=True) as taps[algorithm]:
            rnn.loss(ids, readout, ids % 4, algorithm=algorithm)[0].backward()
    kept = profile_steps(200)
    for name in ("state_norms", "grad_norms"):
        (found,), (expected,) = getattr(taps["modal"], name), getattr(taps["sequential"], name)
        assert torch.allclose(found[kept], expected[kept], rtol=1e-9)
        assert int(found.isnan().sum()) == 200 - len(kept)
    with tap(), torch.no_grad():
        assert functional.explain_scan_cross_entropy(**big())[0] == "sequential"
    with tap(sparse=True), torch.no_grad():
        assert functional.explain_scan_cross_entropy(**big())[0] == "modal"


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("kind", [IDS, FEATURES, TERMS])
@pytest.mark.parametrize("need_w", [False, True])
def test_norms_of_modal_states(kind: str, lengths: bool, need_w: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every step, in spans too, and in each of two backwards of one graph."""
    monkeypatch.setattr(op, "SPAN_STEPS", 5)
    monkeypatch.setattr(op, "SPAN_ROWS", 4 * 5)
    _, a = problem(kind, 8, 8, 17, 4, dense=True, lengths=lengths)
    x = a["x"] if a["x"].is_floating_point() else a["x"].long()
    options = {name: a.get(name) for name in ("weight", "bias", "lengths", "activation")}
    w, cotangent, taps = a["matrix"][0].detach().requires_grad_(need_w), randn(17, 4, 8, seed=30), {}
    for algorithm in ("modal", "sequential"):
        with tap() as taps[algorithm]:
            hs = functional.dense_scan(x, w, a["h0"], algorithm=algorithm, **options)
            for factor in (1.0, -3.0):
                torch.autograd.grad(hs, a["h0"], factor * cotangent, retain_graph=True)
    for names in ("state_norms", "grad_norms"):
        found, expected = getattr(taps["modal"], names), getattr(taps["sequential"], names)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert taps["modal"].ops == 2 * taps["modal"].state_ops == ["modal_scan"] * 2


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize(("activation", "message_clip"), [("identity", 0.0), ("tanh", 0.0), ("tanh", 1e-3)])
def test_norms_of_a_scan_in_chunks(
    activation: str, message_clip: float, lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tap hears one scan of all steps, not one of each chunk."""
    wanted, arguments = problem(IDS, 8, 8, 19, 3, lengths=lengths)
    arguments |= {"activation": activation, "message_clip": message_clip}
    taken = {}
    for name, kept in (("whole", 10**9), ("chunks", 0)):
        monkeypatch.setattr(scan_loss, "kept_states", lambda device, kept=kept: kept)
        monkeypatch.setattr(scan_loss, "CHUNK", 4 * 3 * 8 * 8)
        with tap() as taken[name]:
            loss = functional.scan_cross_entropy(**arguments, algorithm="sequential").loss
            torch.autograd.grad(-3.0 * loss, wanted)
    for names in ("state_norms", "grad_norms"):
        (expected,), (found,) = getattr(taken["whole"], names), getattr(taken["chunks"], names)
        assert (found - expected).norm() <= 1e-13 * expected.norm()
    assert taken["chunks"].ops == taken["chunks"].state_ops == ["factored_scan"]
    with tap() as looked, torch.no_grad():
        functional.scan_cross_entropy(**arguments, algorithm="sequential")
    assert torch.equal(looked.state_norms[0], taken["chunks"].state_norms[0]) and not looked.grad_norms


@pytest.mark.parametrize("inputs", ["ids", "features"])
def test_norms_of_the_last_step(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the states of all steps as with them."""
    monkeypatch.setattr(norms, "PIECE", 2 * 3 * 12 * 8)
    torch.manual_seed(0)
    rnn = FactorizedRNN(5, 12, nonlinearity="identity", dtype=torch.float64, learned_h0=True)
    readout = nn.Linear(12, 4, dtype=torch.float64)
    x = torch.randint(5, (150, 3)) if inputs == "ids" else torch.randn(150, 3, 5, dtype=torch.float64)
    target = torch.randint(4, (150, 3))
    with tap() as taken:
        nn.functional.cross_entropy(readout(rnn(x)[0][-1]), target[-1]).backward()
    found = rnn._last_step_norms(x, readout, target, "modal")
    assert found is not None
    kept = profile_steps(150)
    assert torch.allclose(found[kept], taken.grad_norms[0][kept], rtol=1e-9)
    assert rnn._last_step_norms(x, readout, target, "sequential") is None


# ---- memory ------------------------------------------------------------------------------------------------------


def test_features_that_would_fill_the_memory_stay_out_of_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert functional.explain_scan_cross_entropy(**big(), ids=False)[0] == "modal"
    monkeypatch.setattr(choice, "kept_states", lambda device: 4000 * 20 * 64 * 4 - 1)
    name, why = functional.explain_scan_cross_entropy(**big(), ids=False)
    assert name == "sequential" and why == "the inputs in modal coordinates would take 0.0191 GiB"
    assert functional.explain_scan_cross_entropy(**big())[0] == "modal"


def test_the_share_of_the_memory() -> None:
    total = _memory.machine_memory("cpu", swap=False)
    assert total is not None and total <= (_memory.machine_memory("cpu") or 0)
    assert _memory.kept_states(torch.device("cpu")) == total // 16
