"""Calls with wrong arguments, for every module and op: an error of one line that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from orthokern import parametrize
from orthokern.errors import InputError
from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, LinearCrossEntropy, NonNormalRNN, PeepholeLSTM

KINDS: list[Callable[..., nn.Module]] = [RNN, FactorizedRNN, GRU, ExpRNN, NonNormalRNN, PeepholeLSTM]


@pytest.mark.parametrize("kind", [*KINDS, LinearCrossEntropy])
@pytest.mark.parametrize("sizes", [(10**9, 10**9), (2**62, 4), (3, 2**40)])
def test_sizes_beyond_the_memory(kind: Callable[..., nn.Module], sizes: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="cannot hold .* of shape .*; accepted: .* has the memory"):
        kind(*sizes)


def test_zero_dimensional_and_foreign_tensors_given_to_ops() -> None:
    """Every tensor argument of every op of the package, which the schema lists."""
    seen = 0
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, name = qualified.split("::")
        if namespace != "orthokern":
            continue
        op = getattr(torch.ops.orthokern, name.split(".")[0]).default
        for index, argument in enumerate(op._schema.arguments):
            if "Tensor" not in str(argument.type) or argument.name in ("lr", "grad_loss", "squarings"):
                continue
            for bad in (torch.zeros(()), torch.zeros(2, 2).to_sparse()):
                given: list[Any] = []
                for other in op._schema.arguments:
                    kind = str(other.type)
                    value = {"str": "tanh", "int": 0, "bool": True, "float": 0.0}.get(kind)
                    given.append(torch.zeros(2, 2) if "Tensor" in kind else value)
                given[index] = bad
                with torch.no_grad(), pytest.raises(InputError, match=rf"{name}: {argument.name} is a "):
                    op(*given)
                seen += 1
    assert seen > 100


@pytest.mark.parametrize("made", [getattr(parametrize, name) for name in parametrize.__all__])
def test_weights_of_other_layouts(made: Any) -> None:
    for other in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_mkldnn()):
        with pytest.raises(InputError, match="weight is a .* tensor; accepted: a strided"):
            made(other)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_defective_matrices_have_no_schur_form(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for block in range(2, size + 1):
        jordan = torch.diag(torch.arange(1.0, size + 1)).double()
        jordan[:block, :block] = 2 * torch.eye(block) + torch.diag(torch.ones(block - 1), 1)
        q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
        for w in (jordan, q @ jordan @ q.T):
            with pytest.raises(InputError, match="dependent eigenvectors"):
                parametrize.SchurForm(w).right_inverse(w)
