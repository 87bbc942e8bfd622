"""Weight decay on the composite matrix."""

from __future__ import annotations

import pytest
import torch

from orthokern import InputError
from orthokern.functional import cayley
from orthokern.nn import RNN, FactorizedRNN
from orthokern.penalties import composite_weight_decay


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
    matrices = [rnn.recurrent_matrix(layer, reverse) for layer in (0, 1) for reverse in (False, True)]
    dense = sum(w.square().sum() for w in matrices)
    torch.testing.assert_close(value, dense)
    spectra = [p for name, p in rnn.named_parameters() if name.startswith("spectrum")]
    for ours, theirs in zip(torch.autograd.grad(value, spectra), torch.autograd.grad(dense, spectra), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_the_spectrum_has_a_gradient() -> None:
    rnn = model(margin=0.5)
    composite_weight_decay(rnn).backward()
    assert {name.split("_l")[0] for name, p in rnn.named_parameters() if p.grad is not None} == {"spectrum"}


@pytest.mark.parametrize("rank", [6, 4])
def test_the_bases_feel_nothing_along_the_manifold(rank: int) -> None:
    # the note's claim: dL/dU = 2 U S^2 is not zero, but its Cayley direction is, so a step leaves U where it is
    rnn = model(margin=None, rank=rank)
    rnn.recurrent_matrix().square().sum().backward()
    for basis in (rnn.u_l0, rnn.v_l0):
        m, g = basis.detach(), basis.grad
        torch.testing.assert_close(g, 2 * m * rnn.spectrum_l0.detach().square())
        assert float(g.abs().max()) > 0.1
        assert float((g @ m.T - m @ g.T).abs().max()) < 1e-13
        torch.testing.assert_close(cayley(m, g, 0.5), m, rtol=0, atol=1e-13)


def test_inside_a_model() -> None:
    first, second = model(margin=0.1), model(margin=None)
    both = torch.nn.ModuleDict({"a": first, "b": torch.nn.Sequential(second), "c": RNN(3, 4)})
    torch.testing.assert_close(
        composite_weight_decay(both), composite_weight_decay(first) + composite_weight_decay(second)
    )
    with pytest.raises(InputError, match="type RNN"):
        composite_weight_decay(RNN(3, 4))
