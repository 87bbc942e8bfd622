"""The bases of a FactorizedRNN outside of training: averages, state_dicts, and parameters that are sharded."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from orthokern.errors import InputError
from orthokern.nn import ExpRNN, FactorizedRNN
from orthokern.optim import GeodesicRMSprop, GeodesicSGD, SpectralNormProjection, optimizer_for


def saved(module: nn.Module) -> Any:
    """The state_dict from a file."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("rank", [7, 3])
def test_average_is_made_orthonormal(rank: int) -> None:
    """The mean of bases is not one: it is noticed where it is loaded, and replaced by the nearest one."""
    rnn = FactorizedRNN(3, 7, num_layers=2, rank=rank, bidirectional=True)
    average, optimizer = AveragedModel(rnn), optimizer_for(rnn, lr=0.1, geodesic_lr=0.3)
    for _ in range(20):
        optimizer.zero_grad()
        rnn(torch.randn(6, 2, 3))[0].sum().backward()
        optimizer.step()
        average.update_parameters(rnn)
    averaged = average.module
    assert averaged.orthogonality_error() > 1e-3
    with pytest.warns(UserWarning, match=r"[uv]_l\d(_reverse)? is not orthonormal: .* orthonormalize\(\)"):
        FactorizedRNN(3, 7, num_layers=2, rank=rank, bidirectional=True).load_state_dict(saved(averaged))
    mean = averaged.u_l1_reverse.detach().clone()
    averaged.orthonormalize()
    assert averaged.orthogonality_error() < 1e-6
    left, _, right = torch.linalg.svd(mean, full_matrices=False)
    torch.testing.assert_close(averaged.u_l1_reverse.detach(), left @ right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rnn.load_state_dict(saved(averaged))
    with torch.no_grad():
        averaged.v_l0[0, 0] = torch.nan
    before = averaged.u_l0.detach().clone()
    with pytest.raises(InputError, match="v_l0 has NaN or infinite entries"):
        averaged.orthonormalize()
    assert torch.equal(averaged.u_l0, before)


MARGINS: list[dict[str, Any]] = [{"margin": m} for m in (0.0, 0.1, None)] + [{"margin": 0.1, "spectrum_map": "tanh"}]


@pytest.mark.parametrize("options", MARGINS, ids=str)
def test_spectrum_of_another_margin_is_refused(options: dict[str, Any]) -> None:
    """The same numbers would be other singular values: without a margin, p = 0 would be W = 0."""
    state = saved(nn.Sequential(FactorizedRNN(3, 5, **options)))
    for others in MARGINS:
        model = nn.Sequential(FactorizedRNN(3, 5, **others))
        if others != options:
            line = rf"0\.spectrum_l0 belongs to margin={options['margin']}.*; accepted: a module of the same margin"
            with pytest.raises(RuntimeError, match=line):
                model.load_state_dict(state)
        model.load_state_dict(dict(state) if others != options else state)
        assert torch.equal(model[0].spectrum_l0, state["0.spectrum_l0"])


@pytest.fixture
def one_process() -> Iterator[Any]:
    """A mesh of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_sharded_parameters_are_refused(one_process: Any) -> None:
    """Whoever needs a whole matrix says so, in place of torch's message about mixed tensors; so does what moves
    the state of an optimizer."""
    basis = nn.Parameter(distribute_tensor(torch.eye(4), one_process, [Shard(0)]))
    line = "is a DTensor, of which this process has a part; accepted: a whole tensor"
    for kind in (GeodesicSGD, GeodesicRMSprop):
        with pytest.raises(InputError, match=f"parameter 0 {line}"):
            kind([basis], lr=0.1)
    with pytest.raises(InputError, match=rf"constrained\[0\] {line}"):
        SpectralNormProjection([basis])
    rnn = ExpRNN(3, 4, rebase_every=1)
    optimizer = ZeroRedundancyOptimizer(rnn.parameters(), torch.optim.Adam, lr=0.1)
    rnn(torch.randn(5, 2, 3))[0].sum().backward()
    with pytest.raises(InputError, match="the optimizer is a ZeroRedundancyOptimizer; accepted: one without shards"):
        optimizer.step()
    rnn.skew_l0 = basis
    with pytest.raises(InputError, match=f"skew_l0 {line}"):
        rnn.rebase()


def test_training_in_several_processes_and_with_scaled_gradients(one_process: Any) -> None:
    """The parameters are those of a plain loop: a mean over one process and a power of two change no bit."""
    results = []
    for scaled in (False, True):
        torch.manual_seed(0)
        rnn = FactorizedRNN(3, 6)
        model = nn.parallel.DistributedDataParallel(rnn) if scaled else rnn
        optimizer = optimizer_for(model, lr=1e-2, geodesic_lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 2, 3))[0].square().mean()
            scaler.scale(torch.inf * loss if scaled and step == 3 else loss).backward()
            if scaled or step < 3:  # the scaler leaves out the last one
                scaler.step(optimizer)
            scaler.update()
        assert rnn.orthogonality_error() < 1e-5 and scaler.get_scale() == (2.0**9 if scaled else 1.0)
        results.append([parameter.detach() for parameter in rnn.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("apply", ["factored", "composed"])
def test_training_with_a_plain_optimizer_warns_once(apply: str) -> None:
    rnn = FactorizedRNN(3, 8, apply=apply)

    def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            rnn(torch.randn(100, 1, 3))[0].square().sum().backward()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer_for(rnn, lr=1e-3, geodesic_lr=1e-2), 40)
        rnn.eval()
        train(torch.optim.Adam(rnn.parameters(), lr=1e-2), 3)  # not training
        rnn.orthonormalize()
        copy.deepcopy(rnn)
    rnn.train()
    with pytest.warns(UserWarning, match=r"u_l0 is no longer orthonormal: .* optimizer_for\(model") as caught:
        train(torch.optim.Adam(rnn.parameters(), lr=1e-2), 70)
    assert len(caught) == 1
