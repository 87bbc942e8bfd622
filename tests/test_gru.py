"""nn.GRU: first parameters, and which of its weights can be projected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from orthokern.errors import InputError
from orthokern.nn import GRU
from orthokern.optim import SpectralNormProjection


def test_first_parameters() -> None:
    module = GRU(300, 200, 2, variant="kanai", bias=True, init_std=0.02)
    for layer in (0, 1):
        w = module.recurrent_matrix(layer).detach()
        torch.testing.assert_close(w.mT @ w, torch.eye(200), rtol=0, atol=1e-5)
        rest = torch.cat([getattr(module, f"weight_ih_l{layer}").flatten(), module.weight_hh_l0[:400].flatten()])
        assert 0.0198 < float(rest.detach().std()) < 0.0202
        assert not getattr(module, f"bias_ih_l{layer}").any() and not getattr(module, f"bias_hh_l{layer}").any()
    again = GRU(300, 200, 2, variant="kanai", bias=True, init_std=0.02)
    for m in (module, again):
        m.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(module.weight_hh_l1, again.weight_hh_l1)
    assert repr(again) == "GRU(300, 200, num_layers=2, bias=True, variant='kanai', init_std=0.02)"
    assert repr(GRU(3, 4)) == "GRU(3, 4)" and repr(GRU(3, 4, variant="kanai")) == "GRU(3, 4, variant='kanai')"


@pytest.mark.parametrize("changed", ["pruned", "weight norm"])
@pytest.mark.parametrize("kind", [GRU, nn.GRU])
def test_weights_that_are_computed_from_others_are_not_projected(kind: Any, changed: str) -> None:
    for name, inputs, fine in (
        ("weight_hh_l0_reverse", "none", False),
        ("weight_ih_l0", "all", False),
        ("weight_ih_l0", "upper", True),
        ("weight_ih_l1", "none", True),
    ):
        module = kind(3, 4, 2, bidirectional=True)
        assert len(SpectralNormProjection(module, inputs=inputs).matrices) == {"none": 4, "upper": 6, "all": 8}[inputs]
        if changed == "pruned":
            prune.random_unstructured(module, name, amount=0.5)
        else:
            weight_norm(module, name)
        if fine:
            SpectralNormProjection(module, inputs=inputs)
            continue
        with pytest.raises(InputError, match=f"{name} of .* is computed from others; accepted: a parameter"):
            SpectralNormProjection(module, inputs=inputs)


def test_a_frozen_gru_has_nothing_to_project() -> None:
    assert GRU(3, 4, 2).frozen().spectral_constraints("all") == []  # type: ignore[operator]
