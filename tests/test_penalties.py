"""Weight decay on the composite matrix, the orthogonality penalty, and the prior on singular values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization

from orthokern import InputError
from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, NonNormalRNN
from orthokern.parametrize import FactorizedSpectrum
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


def distance(w: torch.Tensor) -> torch.Tensor:
    """||W^T W - I||_F^2 as written."""
    return (w.mT @ w - torch.eye(w.shape[1], dtype=w.dtype)).square().sum()


def model(**kwargs: object) -> FactorizedRNN:
    rnn = FactorizedRNN(3, 6, 2, bidirectional=True, dtype=torch.float64, **kwargs)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in rnn.named_parameters():
            if name.startswith("spectrum"):
                p.normal_()
    return rnn


@pytest.mark.parametrize("kwargs", [{"margin": 0.3}, {"margin": None}, {"margin": 2.0, "rank": 4}])
def test_value_and_gradient_are_those_of_the_dense_matrix(kwargs: dict[str, object]) -> None:
    rnn = model(**kwargs)
    value = composite_weight_decay(rnn)
    dense = sum(w.square().sum() for w in composed(rnn))
    torch.testing.assert_close(value, dense)
    spectra = [p for name, p in rnn.named_parameters() if name.startswith("spectrum")]
    for ours, theirs in zip(torch.autograd.grad(value, spectra), torch.autograd.grad(dense, spectra), strict=True):
        torch.testing.assert_close(ours, theirs)
    composite_weight_decay(rnn).backward()
    assert {name.split("_l")[0] for name, p in rnn.named_parameters() if p.grad is not None} == {"spectrum"}


SPECTRA = [{"margin": 0.3}, {"margin": 0.3, "spectrum_map": "tanh"}, {"margin": None}, {"margin": 2.0, "rank": 4}]


@pytest.mark.parametrize("kwargs", SPECTRA)
def test_orthogonal_penalty_is_that_of_the_composed_matrix(kwargs: dict[str, object]) -> None:
    rnn = model(**kwargs)
    value, dense = orthogonal_penalty(rnn), torch.stack([distance(w) for w in composed(rnn)]).sum()
    torch.testing.assert_close(value, dense)
    spectra = [p for name, p in rnn.named_parameters() if name.startswith("spectrum")]
    for ours, theirs in zip(torch.autograd.grad(value, spectra), torch.autograd.grad(dense, spectra), strict=True):
        torch.testing.assert_close(ours, theirs)
    orthogonal_penalty(rnn).backward()
    assert {name.split("_l")[0] for name, p in rnn.named_parameters() if p.grad is not None} == {"spectrum"}


def test_penalties_of_plain_and_mixed_models() -> None:
    plain = RNN(3, 4, 2, bidirectional=True, dtype=torch.float64)
    weights = [plain.weight_hh_l0, plain.weight_hh_l0_reverse, plain.weight_hh_l1, plain.weight_hh_l1_reverse]
    assert all(a is b for a, b in zip(plain.recurrent_matrices(), weights, strict=True))
    torch.testing.assert_close(orthogonal_penalty(plain), torch.stack([distance(w) for w in weights]).sum())
    singular = torch.stack([torch.linalg.svd(w)[1] for w in weights])
    torch.testing.assert_close(spectrum_prior(plain), (singular - 1).square().sum())
    factorized = model(margin=0.4)
    both = torch.nn.ModuleDict({"a": plain, "b": torch.nn.Sequential(factorized), "c": torch.nn.Linear(2, 2)})
    for penalty in (orthogonal_penalty, spectrum_prior):
        torch.testing.assert_close(penalty(both), penalty(plain) + penalty(factorized))
        with pytest.raises(InputError, match="^module must be one with a recurrence, as an RNN or .*, got Linear"):
            penalty(both["c"])
    with pytest.raises(InputError, match=r"W must be .*, got shape \[3\] and torch.float32"):
        orthogonal_penalty(torch.zeros(3))


@pytest.mark.parametrize("kwargs", SPECTRA)
def test_spectrum_prior(kwargs: dict[str, object]) -> None:
    rnn = model(**kwargs)
    value = spectrum_prior(rnn)
    torch.testing.assert_close(value, (torch.cat(rnn.spectra()) - 1).square().sum())
    if kwargs == SPECTRA[0]:  # s is positive: the prior is on the singular values themselves
        dense = sum((torch.linalg.svdvals(w) - 1).square().sum() for w in composed(rnn))
        torch.testing.assert_close(value, dense)
    value.backward()
    assert {name.split("_l")[0] for name, p in rnn.named_parameters() if p.grad is not None} == {"spectrum"}


# ---- OrthogonalPenalty ---------------------------------------------------------------------------


def literal(w: torch.Tensor, squared: bool) -> torch.Tensor:
    """||W W^T - I||_F of a wide matrix, ||W^T W - I||_F of a tall one, squared or not."""
    wide = w if w.shape[0] <= w.shape[1] else w.mT
    norm = torch.linalg.matrix_norm(wide @ wide.mT - torch.eye(len(wide), dtype=w.dtype))
    return norm.square() if squared else norm


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7)])
def test_penalty_and_gradient_of_a_matrix(shape: tuple[int, int], squared: bool) -> None:
    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    penalty = OrthogonalPenalty(0.3, squared=squared)
    torch.testing.assert_close(penalty(w), 0.3 * literal(w, squared))
    (expected,) = torch.autograd.grad(0.3 * literal(w, squared), w)
    torch.testing.assert_close(torch.autograd.grad(penalty(w), w)[0], expected)
    torch.testing.assert_close(penalty.gradient(w), expected)
    if squared:  # eq. 31 with its factors in the order of a gradient; as printed it is something else
        eye = torch.eye(shape[0], dtype=torch.float64)
        torch.testing.assert_close(expected, 4 * 0.3 * (w @ w.mT - eye) @ w.detach())
        if shape[0] == shape[1]:
            assert ((w @ (w @ w.mT - eye) - (w @ w.mT - eye) @ w).abs().max() > 0.1).item()
    before = w.detach().clone()
    penalty.descend_(w, lr=0.01)
    torch.testing.assert_close(w.detach(), before - 0.01 * expected)


@pytest.mark.parametrize("squared", [True, False])
def test_the_changed_update_is_that_of_the_loss_term(squared: bool) -> None:
    """Plain SGD on E + penalty, and on E with the gradients added: eq. 30 and eq. 31."""
    torch.manual_seed(0)
    first = torch.nn.ModuleDict({"a": RNN(3, 4, 2, dtype=torch.float64), "b": model(margin=0.3)})
    second = torch.nn.ModuleDict({"a": RNN(3, 4, 2, dtype=torch.float64), "b": model(margin=0.3)})
    second.load_state_dict(first.state_dict())
    penalty = OrthogonalPenalty(0.2, squared=squared, on=("recurrent", "input"))
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    for both, as_term in ((first, True), (second, False)):
        optimizer = torch.optim.SGD(both.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = both["a"](x)[0].square().sum() + both["b"](x)[0].square().sum()
            if as_term:
                (loss + penalty(both)).backward()
            else:
                loss.backward()
                penalty.add_gradients_(both)
            optimizer.step()
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    penalty.add_gradients_(RNN(3, 4))  # also where there is no gradient yet


@pytest.mark.parametrize("squared", [True, False])
def test_which_layers_are_meant(squared: bool) -> None:
    rnn, factorized = RNN(3, 4, dtype=torch.float64), model(margin=0.3)
    head = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2)).double()
    words = torch.nn.Embedding(5, 3, dtype=torch.float64)
    everything = torch.nn.ModuleList([words, rnn, factorized, head])
    recurrent = [rnn.weight_hh_l0, *composed(factorized)]
    inputs = [rnn.weight_ih_l0, *(p for name, p in factorized.named_parameters() if name.startswith("weight_ih"))]
    feedforward = [head[0].weight, head[2].weight]
    for on, matrices in (
        ("recurrent", recurrent),
        ("input", inputs),
        (("feedforward",), feedforward),
        (("recurrent", "input", "feedforward"), recurrent + inputs + feedforward),
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
        assert not torch.autograd.grad(penalty(w), w)[0].any() and not penalty.gradient(w).any()


def constrained() -> torch.nn.Linear:
    linear = torch.nn.Linear(4, 4, dtype=torch.float64)
    register_parametrization(linear, "weight", FactorizedSpectrum(linear.weight, margin=None))
    return linear


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: NonNormalRNN(3, 4, dtype=torch.float64),
        lambda: ExpRNN(3, 4, dtype=torch.float64),
        constrained,
        lambda: model(margin=0.3),
    ],
)
def test_what_is_computed_is_not_descended_in_place(make: Callable[[], torch.nn.Module], frozen: bool) -> None:
    """A change of what is made anew in every forward would be lost silently."""
    part, plain = make().requires_grad_(not frozen), RNN(3, 4)
    before = plain.weight_hh_l0.detach().clone()
    with pytest.raises(InputError, match=f"a matrix of {type(part).__name__} is computed from parameters"):
        OrthogonalPenalty().descend_(plain, part, lr=0.1)
    assert torch.equal(plain.weight_hh_l0, before)  # all are looked at before one moves
    w = torch.randn(3, 3, requires_grad=True)
    with pytest.raises(InputError, match="a matrix of Tensor is computed from parameters"):
        OrthogonalPenalty().descend_(2 * w, lr=0.1)


def test_frozen_matrices_get_no_gradients() -> None:
    penalty, open_ = OrthogonalPenalty(0.3), RNN(3, 4)
    frozen = [module.requires_grad_(False) for module in (RNN(3, 4), FactorizedRNN(3, 4), ExpRNN(3, 4), GRU(3, 4))]
    penalty.add_gradients_(*frozen, torch.randn(3, 3), open_)
    assert all(parameter.grad is None for module in frozen for parameter in module.parameters())
    assert open_.weight_hh_l0.grad is not None
    frozen[0].weight_hh_l0.grad = torch.zeros(4, 4)  # from before it was frozen
    penalty.add_gradients_(frozen[0])
    assert not frozen[0].weight_hh_l0.grad.any()


def test_a_part_of_a_parameter_is_descended_in_place() -> None:
    """W_hn of a GRU is a slice of what is stored; so are views that are given."""
    gru, penalty = GRU(3, 4, dtype=torch.float64), OrthogonalPenalty(on="recurrent")
    with torch.no_grad():
        gru.weight_hh_l0.normal_()
    before = gru.weight_hh_l0.detach().clone()
    penalty.descend_(gru, lr=0.01)
    assert torch.equal(gru.weight_hh_l0[:8], before[:8])
    torch.testing.assert_close(gru.weight_hh_l0[8:].detach(), before[8:] - 0.01 * penalty.gradient(before[8:]))
    penalty.descend_(gru.weight_hh_l0[:4], lr=0.01)
    torch.testing.assert_close(gru.weight_hh_l0[:4].detach(), before[:4] - 0.01 * penalty.gradient(before[:4]))


def test_refusals_of_the_penalty() -> None:
    for call, message in (
        (lambda: OrthogonalPenalty(-1), "strength must be a finite number of at least 0, got -1"),
        (lambda: OrthogonalPenalty(on=None), "on must be one or several of recurrent, input, feedforward, got None"),
        (lambda: OrthogonalPenalty()(), "parts must be modules and matrices [n, m], got nothing"),
        (lambda: OrthogonalPenalty()([1.0]), "W must be a module or a floating point matrix [n, m], got list"),
        (lambda: OrthogonalPenalty().descend_(torch.eye(2), lr="a"), "lr must be a finite number, got 'a'"),
        (lambda: orthogonal_penalty(3), "module must be a torch.nn.Module with recurrences, got int"),
        (lambda: OrthogonalPenalty(on="recurent"), "unknown layer 'recurent': did you mean 'recurrent'"),
        (lambda: OrthogonalPenalty(on=()), "got ()"),
        (lambda: OrthogonalPenalty()(torch.eye(3).to_sparse()), "W is a sparse_coo tensor; accepted: a strided"),
        (lambda: orthogonal_penalty(torch.eye(3).to_sparse()), "W is a sparse_coo tensor; accepted: a strided"),
        (lambda: OrthogonalPenalty()(torch.zeros(3, 3).long()), "torch.int64"),
        (lambda: OrthogonalPenalty().gradient(torch.zeros(2, 3, 3)), "got shape [2, 3, 3]"),
        (lambda: OrthogonalPenalty(on="input")(torch.nn.Linear(2, 2)), "modules with matrices (input), got Linear"),
        (lambda: OrthogonalPenalty().descend_(model(margin=0.3), lr=0.1), "of FactorizedRNN is computed from"),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert message in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_what_a_module_must_be() -> None:
    for call in (modulus_penalty, triangular_decay, spectrum_prior, composite_weight_decay):
        with pytest.raises(InputError, match="^module must be a torch.nn.Module with recurrences, got Tensor$"):
            call(torch.eye(3))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Schur form that has a triangle, as .* triangular=True"):
        triangular_decay(NonNormalRNN(3, 4, triangular=False))
