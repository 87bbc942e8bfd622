"""Weight decay on the composite matrix, the orthogonality penalty, and the prior on singular values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import refused

from orthokern.nn import RNN, FactorizedRNN, NonNormalRNN
from orthokern.penalties import (
    OrthogonalPenalty,
    composite_weight_decay,
    modulus_penalty,
    orthogonal_penalty,
    spectrum_prior,
    triangular_decay,
)


def composed(rnn: FactorizedRNN) -> list[torch.Tensor]:
    return [rnn.recurrent_matrix(layer, reverse) for layer in (0, 1) for reverse in (False, True)]


def literal(w: torch.Tensor, squared: bool = True) -> torch.Tensor:
    """||W W^T - I||_F of a wide matrix, ||W^T W - I||_F of a tall one, squared or not."""
    wide = w if w.shape[0] <= w.shape[1] else w.mT
    norm = torch.linalg.matrix_norm(wide @ wide.mT - torch.eye(len(wide), dtype=w.dtype))
    return norm.square() if squared else norm


def model(**kwargs: object) -> FactorizedRNN:
    rnn = FactorizedRNN(3, 6, 2, bidirectional=True, dtype=torch.float64, **kwargs)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in rnn.named_parameters():
            if name.startswith("spectrum"):
                p.normal_()
    return rnn


SPECTRA = [{"margin": 0.3}, {"margin": 0.3, "spectrum_map": "tanh"}, {"margin": None}, {"margin": 2.0, "rank": 4}]


@pytest.mark.parametrize("kwargs", SPECTRA)
@pytest.mark.parametrize(
    ("penalty", "of_matrix"),
    [
        (composite_weight_decay, lambda w: w.square().sum()),
        (orthogonal_penalty, literal),
        (spectrum_prior, lambda w: (torch.linalg.svdvals(w) - 1).square().sum()),
    ],
)
def test_value_and_gradient_are_those_of_the_dense_matrix(
    penalty: Callable[..., torch.Tensor], of_matrix: Callable[..., torch.Tensor], kwargs: dict[str, object]
) -> None:
    rnn = model(**kwargs)
    value = penalty(rnn)
    if penalty is spectrum_prior and kwargs["margin"] != 0.3:  # s may be negative, and is drawn to 1
        dense = (torch.cat(rnn.spectra()) - 1).square().sum()
    else:
        dense = torch.stack([of_matrix(w) for w in composed(rnn)]).sum()
    torch.testing.assert_close(value, dense)
    spectra = [p for name, p in rnn.named_parameters() if name.startswith("spectrum")]
    torch.testing.assert_close(torch.autograd.grad(value, spectra), torch.autograd.grad(dense, spectra))
    penalty(rnn).backward()
    assert {name.split("_l")[0] for name, p in rnn.named_parameters() if p.grad is not None} == {"spectrum"}


def test_penalties_of_plain_and_mixed_models() -> None:
    plain = RNN(3, 4, 2, bidirectional=True, dtype=torch.float64)
    weights = [plain.weight_hh_l0, plain.weight_hh_l0_reverse, plain.weight_hh_l1, plain.weight_hh_l1_reverse]
    assert all(a is b for a, b in zip(plain.recurrent_matrices(), weights, strict=True))
    torch.testing.assert_close(orthogonal_penalty(plain), torch.stack([literal(w) for w in weights]).sum())
    singular = torch.stack([torch.linalg.svd(w)[1] for w in weights])
    torch.testing.assert_close(spectrum_prior(plain), (singular - 1).square().sum())
    factorized = model(margin=0.4)
    both = torch.nn.ModuleDict({"a": plain, "b": torch.nn.Sequential(factorized), "c": torch.nn.Linear(2, 2)})
    for penalty in (orthogonal_penalty, spectrum_prior):
        torch.testing.assert_close(penalty(both), penalty(plain) + penalty(factorized))


# ---- OrthogonalPenalty ---------------------------------------------------------------------------


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7)])
def test_penalty_and_gradient_of_a_matrix(shape: tuple[int, int], squared: bool) -> None:
    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    penalty = OrthogonalPenalty(0.3, squared=squared)
    torch.testing.assert_close(penalty(w), 0.3 * literal(w, squared))
    (expected,) = torch.autograd.grad(0.3 * literal(w, squared), w)
    torch.testing.assert_close(torch.autograd.grad(penalty(w), w)[0], expected)
    if squared:  # eq. 31 with its factors in the order of a gradient
        eye = torch.eye(shape[0], dtype=torch.float64)
        torch.testing.assert_close(expected, 4 * 0.3 * (w @ w.mT - eye) @ w.detach())


@pytest.mark.parametrize("squared", [True, False])
def test_which_layers_are_meant(squared: bool) -> None:
    rnn, factorized = RNN(3, 4, dtype=torch.float64), model(margin=0.3)
    head = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm((1, 6)), torch.nn.Linear(6, 2)).double()
    words = torch.nn.Embedding(5, 3, dtype=torch.float64)
    everything = torch.nn.ModuleList([words, rnn, factorized, head])
    recurrent = [rnn.weight_hh_l0, *composed(factorized)]
    feedforward = [head[0].weight, head[2].weight]
    for on, matrices in (
        ("recurrent", recurrent),
        (("feedforward",), feedforward),
        (("recurrent", "feedforward"), recurrent + feedforward),
    ):
        expected = torch.stack([literal(w, squared) for w in matrices]).sum()
        torch.testing.assert_close(OrthogonalPenalty(1, squared=squared, on=on)(everything), expected)
    torch.testing.assert_close(
        OrthogonalPenalty(2, squared=squared)(rnn, head[0].weight),
        2 * literal(rnn.weight_hh_l0, squared) + 2 * literal(head[0].weight, squared),
    )


def test_an_orthogonal_matrix_feels_nothing() -> None:
    """Neither through the loss nor directly: the unsquared norm has no gradient there, and none must not be NaN."""
    w = torch.eye(4, 6, requires_grad=True)
    for squared in (True, False):
        penalty = OrthogonalPenalty(squared=squared)
        assert penalty(w).item() == 0
        assert not torch.autograd.grad(penalty(w), w)[0].any()
        assert penalty(torch.full((3, 3), torch.nan)).isnan()


def test_refusals() -> None:
    sparse, linear = torch.eye(3).to_sparse(), torch.nn.Linear(2, 2)
    flat = NonNormalRNN(3, 4, triangular=False)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: OrthogonalPenalty(-1), "strength must be a finite number of at least 0, got -1"),
        (lambda: OrthogonalPenalty(on=None), "on must be one or both of recurrent, feedforward, got None"),
        (lambda: OrthogonalPenalty()(), "parts must be modules and matrices [n, m], got nothing"),
        (lambda: OrthogonalPenalty(on="recurent"), "unknown layer 'recurent': did you mean 'recurrent'"),
        (lambda: OrthogonalPenalty()(sparse), "W is a sparse_coo tensor; accepted: a strided"),
        (lambda: OrthogonalPenalty(on="recurrent")(linear), "modules with matrices (recurrent), got Linear"),
        (lambda: orthogonal_penalty(3), "module must be a torch.nn.Module with recurrences, got int"),
        (lambda: orthogonal_penalty(torch.zeros(3)), "got shape [3] and torch.float32"),
        (lambda: spectrum_prior(linear), "module must be one with a recurrence, as orthokern.nn.RNN or FactorizedRNN"),
        (lambda: composite_weight_decay(torch.eye(3)), "module must be a torch.nn.Module with recurrences, got Tensor"),
        (lambda: modulus_penalty(linear), "module must be one with a Schur form"),
        (lambda: modulus_penalty(flat, "l3"), "unknown norm 'l3'"),
        (lambda: triangular_decay(flat), "Schur form that has a triangle, as a NonNormalRNN with triangular=True"),
    ]
    for call, message in calls:
        refused(call, message)
