"""nn.GRU: the interface and results of torch.nn.GRU, the cell of the paper, and the theory of its fixed point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import batch_in
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from orthokern.errors import InputError
from orthokern.nn import GRU
from orthokern.optim import SpectralNormProjection

F64 = torch.float64


def results(module: nn.Module, x: Any, hx: Tensor | None, inputs: list[Tensor]) -> list[Tensor]:
    """Output, last states, and the gradients of inputs and parameters."""
    output, h = module(x, hx)
    outputs = [output.data if isinstance(output, PackedSequence) else output, h]
    generator = torch.Generator().manual_seed(1)
    loss = sum((t * torch.randn(t.shape, dtype=t.dtype, generator=generator)).sum() for t in outputs)
    assert isinstance(loss, Tensor)
    return [*outputs, *torch.autograd.grad(loss, [*inputs, *module.parameters()])]


@pytest.mark.parametrize("layout", ["time first", "batch first", "one sequence", "packed", "packed, not sorted"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_torch_variant_is_torchs(layout: str, options: dict[str, Any]) -> None:
    """Outputs, last states and every gradient, weights loaded, from given initial states."""
    options = {"bias": True, **options, "batch_first": layout == "batch first"}
    ours, theirs = GRU(3, 5, dtype=F64, variant="torch", **options), nn.GRU(3, 5, dtype=F64, **options)
    ours.load_state_dict(theirs.state_dict())
    x, inputs = batch_in(layout)
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    hx = torch.randn((rows, 5) if layout == "one sequence" else (rows, 4, 5), dtype=F64, requires_grad=True)
    inputs = [*inputs, hx]
    x_of_theirs = pack_sequence(inputs[:-1], enforce_sorted=layout == "packed") if layout.startswith("packed") else x
    for a, b in zip(results(ours, x, hx, inputs), results(theirs, x_of_theirs, hx, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_first_parameters() -> None:
    module = GRU(300, 200, 2, bias=True, init_std=0.02)
    for layer in (0, 1):
        w = module.recurrent_matrix(layer).detach()
        torch.testing.assert_close(w.mT @ w, torch.eye(200), rtol=0, atol=1e-5)
        rest = torch.cat([getattr(module, f"weight_ih_l{layer}").flatten(), module.weight_hh_l0[:400].flatten()])
        assert 0.0198 < float(rest.detach().std()) < 0.0202
        assert not getattr(module, f"bias_ih_l{layer}").any() and not getattr(module, f"bias_hh_l{layer}").any()
    again = GRU(300, 200, 2, bias=True, init_std=0.02)
    for m in (module, again):
        m.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(module.weight_hh_l1, again.weight_hh_l1)
    assert repr(again) == "GRU(300, 200, num_layers=2, bias=True, init_std=0.02)"
    assert repr(GRU(3, 4, variant="torch")) == "GRU(3, 4, variant='torch')"


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


# --------------------------------------------------------------------------------------------------------------- theory
