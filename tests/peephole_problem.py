"""Random inputs of peephole_scan, and their comparison with the reference, for the tests of every backend."""

from __future__ import annotations

import dataclasses

import torch
from checks import assert_unchanged
from comparison import assert_matches_reference
from helpers import Problem
from torch import Tensor

from orthokern import nn

NAMES = ("hs", "cs", "gates", "grad_x", "grad_w", "grad_peephole", "grad_h0", "grad_c0")


@dataclasses.dataclass
class PeepholeProblem(Problem):
    """Inputs of peephole_scan, as in its docstring, and cotangents of both results [T, B, N], or None."""

    x: Tensor
    w: Tensor
    peephole: Tensor
    h0: Tensor
    c0: Tensor
    grad_hs: Tensor | None  # type: ignore[assignment]
    grad_cs: Tensor | None

    @classmethod
    def random(cls, T: int, B: int, N: int, *, seed: int = 0) -> PeepholeProblem:
        """Float64."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(shape, dtype=torch.float64, generator=generator)

        maps = normal(4 * N, N, scale=N**-0.5), normal(3, N, scale=0.5)
        return cls(normal(T, B, 4 * N), *maps, normal(B, N), normal(B, N), normal(T, B, N), normal(T, B, N))

    def inputs(self) -> tuple[Tensor, ...]:
        """The positional arguments of the forward."""
        return self.x, self.w, self.peephole, self.h0, self.c0

    def run(self, backend: str, bwd_backend: str | None = None) -> dict[str, Tensor]:
        """Forward and backward op, everything that comes out, by the names of NAMES."""
        ops = torch.ops.orthokern
        states = ops.peephole_scan_fwd(*self.inputs(), backend)
        tensors = (self.grad_hs, self.grad_cs, *states, *self.inputs()[1:])
        grads = ops.peephole_scan_bwd(*tensors, bwd_backend or backend)
        return dict(zip(NAMES, (*states, *grads), strict=True))


def check_peephole(problem: PeepholeProblem, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """Parity of everything that comes out of one problem, with the reference on the CPU."""
    inexact = problem.to(dtype)
    there = inexact.map(lambda t: t.to(device))
    untouched = there.clone()
    exact, plain = inexact.map(Tensor.double).run("reference"), inexact.run("reference")
    for name, tensor in there.run(backend).items():
        gradient = name.startswith("grad")
        assert_matches_reference(tensor.cpu(), exact[name], plain[name], name=name, gradient=gradient)
    assert_unchanged(there, untouched)


def check_lstm(device: str, N: int, lengths: tuple[int, ...]) -> None:
    """Values and gradients of torch.nn.LSTM in float64, of padded sequences in two layers and directions."""
    theirs = torch.nn.LSTM(3, N, 2, bidirectional=True)
    ours = nn.LSTM(3, N, 2, bidirectional=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.nn.utils.rnn.pack_sequence([torch.randn(length, 3) for length in lengths])
    state = torch.randn(2, 4, len(lengths), N)
    results = []
    for module, to in ((ours, {"device": device}), (theirs, {"dtype": torch.float64})):
        hx = state.to(**to).requires_grad_()
        packed, (h, c) = module.to(**to)(x.to(**to), hx.unbind())
        loss = packed.data.sin().sum() + h.cos().sum() + c.square().sum()
        results.append([packed.data, h, c, *torch.autograd.grad(loss, [hx, *module.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max()))
