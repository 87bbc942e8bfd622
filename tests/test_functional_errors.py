"""Bad input to the public functions: one line that names the argument, the value given and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import refused

from orthokern import cpu, dispatch
from orthokern import functional as f
from orthokern._scan_contract import ScanArgs
from orthokern.errors import BackendUnavailable, CheckpointError, InputError, nearest, unknown_name

T, B, N, K, D, C = 4, 3, 6, 5, 7, 8


def scan_arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments of factored_scan with features, with some replaced."""
    arguments: dict[str, Any] = {
        "x": torch.zeros(T, B, D),
        "u": torch.zeros(N, K),
        "s": torch.zeros(K),
        "v": torch.zeros(N, K),
        "h0": torch.zeros(B, N),
        "weight": torch.zeros(N, D),
        "bias": torch.zeros(N),
    }
    return {**arguments, **changes}


SHARED: list[tuple[dict[str, Any], str]] = [
    # x
    ({"x": [1.0]}, "x must be a torch.Tensor, got list"),
    ({"x": torch.zeros(T, B)}, "x has shape [4, 3]: accepted is [T, B, D] with D = 7, or integer token ids [T, B]"),
    ({"x": torch.zeros(T, B, D, device="meta")}, "x is on meta: accepted is the device of {m}, cpu"),
    (
        {"x": torch.zeros(T, B).bool()},
        "x has dtype bool: accepted is float32 (the dtype of {m}), or int64 or int32 for token ids",
    ),
    ({"x": torch.zeros(0, B, D)}, "x has shape [0, 3, 7]: every size of [T, B, D] must be at least 1"),
    # token ids
    (
        {"x": torch.zeros(T, B).long(), "weight": None},
        "weight is None: token ids (x of dtype int64) need the table [N, D]",
    ),
    ({"x": torch.full((T, B), D)}, "the input holds 7: token ids must be in [0, 7)"),
    # weight, bias, h0
    ({"weight": torch.zeros(D, N)}, "weight has shape [7, 6]: accepted is [N, D] with N = 6, D at least 1"),
    (
        {"x": torch.zeros(T, B, N), "weight": None},
        "bias is given without weight: accepted with weight only (add it to x)",
    ),
    ({"h0": torch.zeros(N)}, "h0 has shape [6]: accepted is [B, N] = [3, 6]"),
    # activation
    ({"activation": "tahn"}, "unknown activation 'tahn': did you mean 'tanh'? accepted: identity, tanh, relu, "),
    ({"activation": "prelu"}, "act_param is None: activation 'prelu' needs its slope, a tensor [1] or [N] = [6]"),
    (
        {"activation": "modrelu", "act_param": torch.zeros(2)},
        "act_param has shape [2]: accepted is the bias of 'modrelu', [1] or [N] = [6]",
    ),
    (
        {"activation": "tanh", "act_param": torch.zeros(1)},
        "act_param is float32 [1]: activation 'tanh' takes none (accepted with leaky_relu, prelu, modrelu)",
    ),
    # checkpoints
    ({"checkpoint_every": -1}, "checkpoint_every is -1: accepted is 0 (keep all states) or more"),
    # lengths and clip
    ({"lengths": [4, 2, 1]}, "lengths must be a torch.Tensor, got list"),
    ({"lengths": torch.tensor([4, 5, 1])}, "lengths holds 5: lengths must be in [1, T] = [1, 4]"),
    ({"message_clip": -1.0}, "message_clip is -1.0: accepted is a finite number, 0 (no clipping) or more"),
    (
        {"message_clip": 0.5, "algorithm": "chunked", "activation": "identity"},
        "algorithm is 'chunked' with message_clip: chunks of time can only be joined without",
    ),
    # precision and algorithm
    ({"precision": "tf23"}, "unknown precision 'tf23': did you mean 'tf32'? accepted: ieee, 3xtf32, tf32, bf16"),
    ({"algorithm": "chunk"}, "unknown algorithm 'chunk': did you mean 'chunked'? accepted: auto, sequential, chunked"),
    (
        {"algorithm": "chunked"},
        "algorithm is 'chunked' with activation 'tanh': chunks of time can only be joined for 'identity'",
    ),
]


@pytest.mark.parametrize(("op", "backend"), [("factored_scan", None), ("dense_scan", "reference")])
@pytest.mark.parametrize(("changes", "message"), SHARED)
def test_scans(op: str, backend: str | None, changes: dict[str, Any], message: str) -> None:
    arguments = scan_arguments(**changes)
    if op == "dense_scan":
        for name in "usv":
            del arguments[name]
        arguments["w"] = torch.zeros(N, N)
    text = refused(lambda: getattr(f, op)(**arguments, backend=backend))
    assert text.startswith(message.format(m="u" if op == "factored_scan" else "w"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"u": torch.zeros(5, 6)}, "u has shape [5, 6]: the rank K = 6 is above N = 5, accepted is K up to N"),
        ({"u": torch.zeros(N, K).long()}, "u has dtype int64: accepted are floating dtypes"),
        ({"v": torch.zeros(N, N)}, "v has shape [6, 6]: accepted is [N, K], the shape of u, = [6, 5]"),
        ({"s": torch.zeros(N)}, "s has shape [6]: accepted is [K] = [5]"),
    ],
)
def test_factored_matrices(changes: dict[str, Any], message: str) -> None:
    assert refused(lambda: f.factored_scan(**scan_arguments(**changes))).startswith(message)


def test_dense_matrix_and_pairs_of_units() -> None:
    x = torch.zeros(T, B, N)
    assert refused(lambda: f.dense_scan(x, torch.zeros(N, K))) == "w has shape [6, 5]: accepted is [N, N], N at least 1"
    message = "N is 5: activation 'oplu' works on pairs and needs an even N"
    assert refused(lambda: f.dense_scan(torch.zeros(T, B, 5), torch.zeros(5, 5), activation="oplu")) == message
    assert refused(lambda: f.oplu(torch.zeros(2, 5))) == message


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("m", "g", "lr", "message"),
    [
        (
            torch.zeros(5),
            torch.zeros(5),
            0.1,
            "m has shape [5]: accepted is [..., N, K] with 1 <= K <= N, nothing empty",
        ),
        (torch.eye(3).half(), torch.eye(3).half(), 0.1, "m has dtype float16: accepted are float32 and float64"),
        (torch.eye(3), torch.eye(4), 0.1, "g has shape [4, 4]: accepted is [..., N, K], the shape of m, = [3, 3]"),
        (torch.eye(3), torch.tensor([[NAN, 0, 0]] * 3), 0.1, "g holds 3 NaN or infinite values of 9: the Cayley step"),
        (torch.eye(3), torch.eye(3), NAN, "lr must be a finite number, or a tensor with one per matrix, got nan"),
        (torch.eye(3), torch.eye(3), "fast", "lr must be a finite number, or a tensor with one per matrix, got 'fast'"),
        (torch.eye(3), torch.eye(3), torch.ones(2), "lr has shape [2]: accepted is a number, or one per matrix"),
    ],
)
def test_cayley(m: Any, g: Any, lr: Any, message: str, backend: str | None) -> None:
    assert refused(lambda: f.cayley(m, g, lr, backend=backend)).startswith(message)


def test_a_large_finite_gradient_is_no_overflow_of_the_check() -> None:
    """The quick check sums; a sum that overflows must not be taken for an infinity in the data."""
    g = torch.full((2, 2), 3e38)
    assert torch.equal(f.cayley(torch.eye(2), g, 0.0), torch.eye(2))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (f.activation, (torch.zeros(2), "rleu"), "unknown activation 'rleu': did you mean 'relu'? accepted: identity"),
        (f.activation, (torch.zeros(()), "relu"), "x has shape []: accepted is [..., N]"),
        (
            f.activation,
            (torch.zeros(2), "relu", torch.zeros(1)),
            "act_param is float32 [1]: activation 'relu' takes none",
        ),
        (f.modrelu, (torch.zeros(4), torch.zeros(3)), "bias has shape [3]: accepted is the bias of 'modrelu'"),
        (f.prelu, (torch.zeros(4), 0.25), "weight must be a torch.Tensor, got 0.25"),
        (f.spectrum, (torch.zeros(3), -0.1), "margin must be a finite number, 0 or more, or None, got -0.1"),
        (
            f.spectrum,
            (torch.zeros(3), 0.1, "tahn"),
            "unknown kind 'tahn': did you mean 'tanh'? accepted: sigmoid, tanh",
        ),
    ],
)
def test_activations_and_spectrum(function: Callable[..., Any], arguments: tuple[Any, ...], message: str) -> None:
    assert refused(lambda: function(*arguments)).startswith(message)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(())}, "input has shape []: accepted is [..., N]"),
        (
            {"linear_weight": torch.zeros(N, C)},
            "linear_weight has shape [6, 8]: accepted is [C, N] with N = 6, C at le",
        ),
        ({"linear_bias": torch.zeros(N)}, "linear_bias has shape [6]: accepted is [C] = [8]"),
        ({"target": torch.zeros(T, B)}, "target has dtype float32: accepted is int64 or int32"),
        (
            {"target": torch.zeros(B, T).long()},
            "target has shape [3, 4]: accepted is the shape of input without N, = [4, 3]",
        ),
        ({"target": torch.full((T, B), C)}, "target holds 8: class ids must be in [0, 8)"),
        ({"reduction": "means"}, "unknown reduction 'means': did you mean 'mean'? accepted: mean, sum"),
    ],
)
def test_linear_cross_entropy(changes: dict[str, Any], message: str, backend: str | None) -> None:
    arguments: dict[str, Any] = {
        "input": torch.zeros(T, B, N),
        "linear_weight": torch.zeros(C, N),
        "linear_bias": torch.zeros(C),
        "target": torch.zeros(T, B).long(),
    }
    assert refused(lambda: f.linear_cross_entropy(**{**arguments, **changes}, backend=backend)).startswith(message)


def test_matrices_of_a_loss() -> None:
    tokens = torch.zeros(T, B).long()
    for factors in ((), (torch.eye(N), torch.ones(N))):
        with pytest.raises(InputError, match=rf"matrix has {len(factors)} factors: accepted is w \[N, N\], or"):
            f.scan_cross_entropy(tokens, factors, torch.zeros(9, N), tokens)


def test_kinds_of_errors() -> None:
    assert issubclass(InputError, ValueError) and issubclass(CheckpointError, InputError)
    assert issubclass(BackendUnavailable, RuntimeError) and not issubclass(BackendUnavailable, InputError)


def test_nearest_names() -> None:
    names = ["identity", "tanh", "ReLU"]
    assert nearest("tahn", names) == "tanh"
    assert nearest("relu", names) == "ReLU"
    assert nearest("xyz", names) is None and nearest(None, names) is None and nearest(3, names) is None
    assert str(unknown_name("nonlinearity", 7, names)) == "unknown nonlinearity 7: accepted: identity, tanh, ReLU"


@pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)
def test_more_columns_than_units_of_a_raw_op() -> None:
    x, h0, wide = torch.zeros(2, 1, 3), torch.zeros(1, 3), torch.zeros(3, 4)
    args = ScanArgs(x, wide, torch.ones(4), wide, h0, None, None, None, "tanh")
    with pytest.raises(InputError, match="first and second have 4 columns: accepted are at most 3"):
        dispatch.leaf("factored_scan", "cpu").factored_scan_fwd(args)
