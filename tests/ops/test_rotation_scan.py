"""rotation_scan: values against an independent loop, derivatives of every kind, and the op's registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_matches_reference
from helpers import assert_same_bits, each, on_threads
from torch import Tensor

from orthokern.errors import InputError
from orthokern.functional import rotation_scan

NAMESPACE = torch.ops.orthokern
# T, B, M: single elements, modes that fill no vector, more than a chunk of 64 steps, more sequences than threads
SIZES = [(1, 1, 1), (2, 3, 5), (64, 2, 8), (65, 5, 17), (130, 3, 33), (200, 7, 64)]
CUTS = (None, "state", "zero")  # no resets; resets to a state; resets to zeros, from which h0 starts too


def tensors(
    T: int, B: int, M: int, cuts: str | None, D: int | None = None, bias: bool = True
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The floating arguments in double precision, with features if there is a D, and resets."""
    shapes = {"x": (T, B, 2 * M if D is None else D)}
    if cuts != "zero":
        shapes["h0"] = (B, 2 * M)
    if cuts == "state":
        shapes["reset_state"] = (B, 2 * M)
    if D is not None:
        shapes |= {"weight": (2 * M, D)} | ({"bias": (2 * M,)} if bias else {})
    args = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    radius, angle = (torch.rand(M, dtype=torch.float64) for _ in range(2))
    args["eigenvalues"] = torch.polar(0.9 + 0.12 * radius, 3 * angle)
    if cuts is None:
        return args, None
    resets = torch.rand(T, B) < 0.2
    resets[0, 0] = resets[-1, -1] = True
    return args, resets


def loop(
    x: Tensor,
    eigenvalues: Tensor,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The equation, in complex numbers."""
    if weight is not None:
        x = torch.nn.functional.linear(x, weight, bias)
    zeros = x.new_zeros(x.shape[1], 2 * len(eigenvalues))
    h, start = (torch.complex(*(zeros if state is None else state).chunk(2, -1)) for state in (h0, reset_state))
    steps = []
    for t, x_t in enumerate(x):
        if resets is not None:
            h = torch.where(resets[t].unsqueeze(1), start, h)
        h = eigenvalues * h + torch.complex(*x_t.chunk(2, -1))
        steps.append(torch.cat([h.real, h.imag], -1))
    return torch.stack(steps)


def run(function: Any, args: dict[str, Tensor], resets: Tensor | None, **options: Any) -> dict[str, Tensor]:
    """States, and the gradients of all arguments, as real numbers."""
    leaves = {name: value.detach().requires_grad_() for name, value in args.items()}
    hs = function(**leaves, resets=resets, **options)
    cotangent = torch.randn(hs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(hs.dtype)
    grads = torch.autograd.grad(hs, leaves.values(), cotangent)
    results = {"hs": hs.detach(), **dict(zip(leaves, grads, strict=True))}
    return {name: torch.view_as_real(v) if v.is_complex() else v for name, v in results.items()}


def cast(args: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments in another precision."""
    return {name: value.to(dtype.to_complex() if value.is_complex() else dtype) for name, value in args.items()}


def check(args: dict[str, Tensor], resets: Tensor | None, **options: Any) -> None:
    """The parity of states and gradients with the loop."""
    actual, plain = run(rotation_scan, args, resets, **options), run(loop, args, resets)
    exact = run(loop, cast(args, torch.float64), resets)
    for name, value in actual.items():
        assert_matches_reference(value, exact[name], plain[name], name=name, gradient=name != "hs")


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("sizes", "features"),
    [(sizes, None) for sizes in SIZES] + [(sizes, D) for sizes, D in zip(SIZES, (1, 3, 16, 7, 40, 1), strict=True)],
)
@pytest.mark.parametrize("threads", [1, 16])  # a batch of at least as many sequences, and one of fewer
@each("rotation_scan")
def test_values_and_gradients(
    op: str,
    backend: str,
    sizes: tuple[int, int, int],
    features: int | None,
    dtype: torch.dtype,
    cuts: str | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orthokern.cpu.rotation_scan.torch.get_num_threads", lambda: threads)
    args, resets = tensors(*sizes, cuts, features)
    check(cast(args, dtype), resets, backend=backend)


def test_many_rows_of_features() -> None:
    """The kernel adds up its sums of 4096 rows in float64."""
    check(cast(tensors(900, 5, 3, None, 2)[0], torch.float32), None)


@pytest.mark.parametrize("name", ["weight", "bias", "reset_state"])
def test_a_derivative_of_torch_func_inside_of_one_of_autograd(name: str) -> None:
    args, resets = tensors(4, 2, 3, "state", 2)
    radius, tracked = args.pop("eigenvalues").abs(), args.pop(name).requires_grad_()

    def loss(radius: Tensor, **options: Any) -> Tensor:
        eigenvalues = torch.complex(radius, 0.3 * radius)
        states = rotation_scan(eigenvalues=eigenvalues, resets=resets, **args, **{name: tracked}, **options)
        return states.square().sum()

    results = []
    for options in ({}, {"backend": "reference"}):
        gradient = torch.func.grad(lambda r, options=options: loss(r, **options))(radius)
        results.append(torch.autograd.grad(gradient.sum(), tracked)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("bias", [False, True])
def test_features_without_a_gradient(bias: bool) -> None:
    """The kernel then leaves out a product."""
    args, _ = tensors(70, 3, 5, None, 4, bias)
    expected = run(rotation_scan, args, None, backend="reference")
    x = args.pop("x")
    actual = run(lambda **rest: rotation_scan(x, **rest), args, None, backend="cpu")
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("features", [None, 2])
@pytest.mark.parametrize("cuts", ["state", "zero"])
@each("rotation_scan")
def test_derivatives(op: str, backend: str, cuts: str, features: int | None) -> None:
    """Against differences: first, second, and forward mode."""
    args, resets = tensors(5, 2, 3, cuts, features)
    leaves = [tensor.requires_grad_() for tensor in args.values()]

    def function(*values: Tensor) -> Tensor:
        return rotation_scan(**dict(zip(args, values, strict=True)), resets=resets, backend=backend)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("features", [None, 4])
@each("rotation_scan")
def test_the_same_bits_on_any_number_of_threads(op: str, backend: str, features: int | None) -> None:
    """The sums over sequences may have another order."""
    args, cuts = tensors(70, 5, 9, "zero", features)
    results = on_threads((1, 2, 2), lambda: run(rotation_scan, cast(args, torch.float32), cuts, backend=backend))
    assert_same_bits(results[0], results[1], skip=("eigenvalues", "weight", "bias"))
    assert_same_bits(results[1], results[2])


@each("rotation_scan")
def test_a_reset_stops_nan(op: str, backend: str) -> None:
    args, _ = tensors(6, 3, 5, None)
    args["x"][1, 1, 2] = torch.nan
    cuts = torch.zeros(6, 3, dtype=torch.bool)
    cuts[4] = True
    hs = rotation_scan(**args, resets=cuts, backend=backend)
    expected = torch.zeros(6, 3, dtype=torch.bool)
    expected[1:4, 1] = True
    assert torch.equal(hs.isnan().any(2), expected)


@pytest.mark.parametrize("features", [None, 2])
def test_vmap_and_compile(features: int | None) -> None:
    args, cuts = tensors(4, 2, 3, "zero", features)
    models = torch.stack([args["eigenvalues"], args["eigenvalues"].conj()])
    of_all = torch.func.vmap(lambda e: rotation_scan(**{**args, "eigenvalues": e}, resets=cuts))(models)
    expected = torch.stack([rotation_scan(**{**args, "eigenvalues": e}, resets=cuts) for e in models])
    torch.testing.assert_close(of_all, expected)
    compiled = torch.compile(rotation_scan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**args, resets=cuts), expected[0])


@pytest.mark.parametrize(("features", "kind"), [(None, "zero"), (2, None)])
def test_registration(features: int | None, kind: str | None) -> None:
    args, resets = tensors(4, 2, 3, kind, features)
    re, im = args["eigenvalues"].real.clone(), args["eigenvalues"].imag.clone()
    inputs = [args["x"], re, im, torch.ones(2, 6, dtype=torch.float64), args.get("weight"), args.get("bias")]
    inputs = [None if tensor is None else tensor.requires_grad_() for tensor in inputs]
    torch.library.opcheck(NAMESPACE.rotation_scan_fwd.default, (*inputs, resets))
    with torch.no_grad():
        hs = NAMESPACE.rotation_scan_fwd(*inputs, resets)
        x, *rest = (None if tensor is None else tensor.detach() for tensor in inputs)
        arguments = (torch.ones_like(hs), hs, True, None if features is None else x, *rest, resets)
        torch.library.opcheck(NAMESPACE.rotation_scan_bwd.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 2, 5)}, r"x has shape \[3, 2, 5\]: accepted is \[T, B, N\] with N = 6, twice the"),
        ({"x": torch.zeros(3, 0, 6)}, r"x has shape \[3, 0, 6\]: .*nothing empty"),
        (
            {"eigenvalues": torch.zeros(0, dtype=torch.complex64), "weight": torch.zeros(0, 6)},
            r"eigenvalues is .*not empty",
        ),
        ({"eigenvalues": torch.zeros(3)}, r"eigenvalues is float32 \[3\]: accepted is complex \[N / 2\]"),
        ({"weight": torch.zeros(6, 5)}, r"weight has shape \[6, 5\]: .*\[N, D\]"),
        ({"weight": torch.zeros(6, 6), "bias": torch.zeros(3)}, r"bias has shape \[3\]: .*\[N\]"),
        ({"bias": torch.zeros(6)}, "bias needs a weight"),
        ({"h0": torch.zeros(2, 5)}, r"h0 has shape \[2, 5\]: .*\[B, N\]"),
        ({"resets": torch.zeros(3, 2)}, "resets has dtype float32: accepted is bool"),
    ],
)
def test_errors(change: dict[str, Tensor], message: str) -> None:
    args = {"x": torch.zeros(3, 2, 6), "eigenvalues": torch.zeros(3, dtype=torch.complex64), **change}
    with pytest.raises(InputError, match=message):
        rotation_scan(**args)
