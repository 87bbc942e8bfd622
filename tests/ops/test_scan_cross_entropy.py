"""Recurrence, readout and cross-entropy in one call: modal, in chunks of states, and as the scan followed by the
readout, against one another and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_modal_basis import factored, randn
from torch import Tensor, nn

from orthokern import functional
from orthokern.errors import BackendUnavailable, InputError
from orthokern.nn import RNN, FactorizedRNN, LinearCrossEntropy
from orthokern.ops.modal import loss as scan_loss
from orthokern.ops.modal import op

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
    required = [
        *matrix,
        *(arguments[name] for name in ("readout", "readout_bias", "h0", "weight", "bias", "x")),
    ]
    required = [tensor.requires_grad_() for tensor in required if tensor is not None and tensor.is_floating_point()]
    return required, arguments


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


def compare(required: list[Tensor], arguments: dict[str, Any], tolerance: float, **options: Any) -> None:
    loss, hits = plain(arguments)
    expected = torch.autograd.grad(1.7 * loss, required)
    result = functional.scan_cross_entropy(**arguments, **options)
    assert (result.loss - loss).abs() <= tolerance * loss.abs()
    assert torch.equal(result.hits, hits)
    for tensor, a, b in zip(required, torch.autograd.grad(1.7 * result.loss, required), expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm(), list(tensor.shape)


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("kind", [IDS, FEATURES, TERMS])
@pytest.mark.parametrize("form", ["dense", "factored", "thin"])
def test_modal(form: str, kind: str, lengths: bool) -> None:
    required, arguments = problem(kind, 12, 5 if form == "thin" else 12, 17, 4, dense=form == "dense", lengths=lengths)
    compare(required, arguments, 1e-10, algorithm="modal")


@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("kind", [IDS, FEATURES, TERMS])
def test_chunks(kind: str, lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More states than are kept: the chunks' sums are those of all steps."""
    required, arguments = problem(kind, 12, 12, 17, 4, lengths=lengths)
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    monkeypatch.setattr(scan_loss, "CHUNK", 5 * 4 * 12 * 8)
    compare(required, arguments, 1e-12, algorithm="sequential")
    with torch.no_grad():
        loss, hits, _, _ = functional.scan_cross_entropy(**arguments, algorithm="sequential")
    expected = plain(arguments)
    assert (loss - expected[0]).abs() < 1e-13 and torch.equal(hits, expected[1])


@pytest.mark.parametrize("length", [0, -5, 18])
def test_lengths_are_checked_in_chunks(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, arguments = problem(FEATURES, 12, 12, 17, 4, lengths=True)
    arguments["lengths"][1] = length
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    with pytest.raises(InputError, match=rf"lengths holds {length}: lengths must be in \[1, T\] = \[1, 17\]"):
        functional.scan_cross_entropy(**arguments, algorithm="sequential")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("nonlinearity", "algorithm"), [("tanh", "sequential"), ("identity", "modal")])
def test_losses_without_gradients(
    mode: Any, nonlinearity: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, and modal; of trainable parameters too."""
    rnn, readout = FactorizedRNN(10, 8, nonlinearity=nonlinearity), LinearCrossEntropy(8, 9)
    ids, target = torch.randint(10, (40, 3)), torch.randint(9, (40, 3))
    expected = rnn.loss(ids, readout, target, algorithm=algorithm)
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    monkeypatch.setattr(scan_loss, "CHUNK", 7 * 3 * 8 * 4)
    with mode():
        loss, hits = rnn.loss(ids, readout, target, algorithm=algorithm)
    torch.testing.assert_close(loss, expected[0].detach())
    assert torch.equal(hits, expected[1])


@pytest.mark.parametrize("activation", ["tanh", "modrelu", "prelu"])
@pytest.mark.parametrize("message_clip", [0.0, 0.01])
def test_chunks_of_a_nonlinear_scan(activation: str, message_clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the scan followed by the readout: kept whole it has their bits, in chunks their value."""
    required, arguments = problem(FEATURES, 8, 8, 19, 3)
    arguments["activation"] = activation
    parameter = None if activation == "tanh" else torch.full((1,), 0.1, dtype=torch.float64, requires_grad=True)
    required += [] if parameter is None else [parameter]
    u, s, v = arguments["matrix"]
    options = {"activation": activation, "act_param": parameter, "message_clip": message_clip}
    hs = functional.factored_scan(
        arguments["x"], u, s, v, arguments["h0"], weight=arguments["weight"], bias=arguments["bias"], **options
    )
    loss = functional.linear_cross_entropy(
        hs, arguments["readout"], arguments["target"].long(), linear_bias=arguments["readout_bias"]
    )
    factor = -2.5  # with a message clip, gradients are not proportional to that of the loss
    expected = torch.autograd.grad(factor * loss, required)
    call = {**arguments, **options}
    result = functional.scan_cross_entropy(**call)
    assert torch.equal(result.loss, loss) and result.basis is None and activation in result.refused
    torch.testing.assert_close(torch.autograd.grad(factor * result.loss, required), expected, rtol=0, atol=0)
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    monkeypatch.setattr(scan_loss, "CHUNK", 4 * 3 * 8 * 8)
    chunked = functional.scan_cross_entropy(**call)
    assert torch.equal(chunked.hits, result.hits) and (chunked.loss - loss).abs() < 1e-14
    for a, b in zip(torch.autograd.grad(factor * chunked.loss, required), expected, strict=True):
        assert (a - b).norm() <= 1e-13 * b.norm()


def test_vmap() -> None:
    """Over recurrent matrices and over readouts, with padding."""
    x, w, readouts = randn(6, 3, 4, seed=1), randn(2, 4, 4, seed=2) / 4, randn(2, 5, 4, seed=3)
    target = torch.arange(18).view(6, 3) % 5

    for lengths in (None, torch.tensor([6, 2, 4])):

        def loss(w: Tensor, readout: Tensor, lengths: Tensor | None = lengths) -> tuple[Tensor, Tensor]:
            result = functional.scan_cross_entropy(x, w, readout, target, lengths=lengths)
            return result.loss, result.hits

        for dims, tensors in (((0, None), (w, readouts[0])), ((None, 0), (w[0], readouts)), ((0, 0), (w, readouts))):
            actual = torch.vmap(loss, in_dims=dims)(*tensors)
            each = [tuple(t[i] if d == 0 else t for t, d in zip(tensors, dims, strict=True)) for i in range(2)]
            expected = tuple(map(torch.stack, zip(*(loss(*one) for one in each), strict=True)))
            torch.testing.assert_close(actual, expected)


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
        ({"message_clip": 1.0}, "with message_clip"),
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
        ({"T": 0}, "T must be an integer of at least 1, got 0"),
        ({"classes": 2.5}, "classes must be an integer of at least 1, got 2.5"),
        ({"algorithm": "model"}, "unknown algorithm 'model'.*did you mean 'modal'"),
        ({"algorithm": "chunked", "resets": True}, "algorithm is 'chunked' with resets"),
        ({"lengths": torch.ones(3)}, "lengths must be True or False, got a Tensor"),
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
    for activation in ("tanh", "identity"):
        with pytest.raises(BackendUnavailable, match="triton"):
            functional.explain_scan_cross_entropy(torch.eye(6), **sizes, activation=activation, backend="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "tanh", "algorithm": "modal"}, "algorithm is 'modal': the activation is 'tanh'.*'sequential'"),
        ({"message_clip": 0.5, "algorithm": "modal"}, "algorithm is 'modal': with message_clip the.*'sequential'"),
        ({"leak": torch.full((6,), 0.5), "algorithm": "modal"}, "algorithm is 'modal': with leak the.*'sequential'"),
        ({"matrix": torch.ones(3, 4)}, "matrix"),
        ({"readout": torch.ones(2, 5)}, "readout has shape"),
        ({"target": torch.zeros(3, 2)}, "target has dtype float32"),
        ({"target": torch.zeros(3, 9, dtype=torch.int64)}, "target has shape"),
        ({"reduction": "none"}, "reduction"),
        ({"basis": torch.ones(3, 3)}, "basis has shape"),
        ({"basis": torch.ones(6, 6)}, "basis is float32 on cpu: accepted is that of an earlier call, float64 on cpu"),
        ({"x": torch.zeros(6, 2, dtype=torch.int8), "weight": torch.ones(6, 4)}, "uint8, int16, int32 or int64"),
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
    """Padding holds NaN for the modal form, in x and in the cotangent."""
    monkeypatch.setattr(op, "SPAN_STEPS", steps)
    monkeypatch.setattr(op, "SPAN_ROWS", 4 * steps)
    required, a = problem(kind, 12, 5 if form == "thin" else 12, 17, 4, dense=form == "dense", lengths=lengths)
    scan = functional.dense_scan if form == "dense" else functional.factored_scan
    x = a["x"] if a["x"].is_floating_point() else a["x"].long()
    options = {name: a.get(name) for name in ("weight", "bias", "lengths", "activation")}
    required = [tensor for tensor in required if tensor is not a["readout"] and tensor is not a["readout_bias"]]
    cotangent = randn(17, 4, 12, seed=30)
    results = []
    for algorithm in ("sequential", "modal"):
        hs = scan(x, *a["matrix"], a["h0"], algorithm=algorithm, **options)
        results.append((hs, torch.autograd.grad(hs, required, cotangent)))
        padding = torch.arange(17)[:, None] >= a.get("lengths", torch.full((4,), 17))
        cotangent[padding] = torch.nan
        with torch.no_grad():
            x[padding] = torch.nan if x.is_floating_point() else 10**9
    (hs, expected), (result, grads) = results
    assert (result - hs).abs().max() < 1e-12
    for one, other in zip(grads, expected, strict=True):
        assert (one - other).norm() <= 1e-11 * other.norm()


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
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
