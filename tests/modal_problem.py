"""Random inputs of the recurrence in modal coordinates, for the tests of every backend."""

from __future__ import annotations

from typing import Any

import torch
from comparison import assert_matches_reference
from torch import Tensor

from orthokern._scan_contract import Readout
from orthokern.ops.modal.reference import Inputs


class Problem:
    """Random inputs, float64, eigenvalues of magnitude within 1 +- margin; the last mode is real."""

    def __init__(
        self,
        M: int,
        T: int,
        B: int,
        C: int = 3,
        D: int = 5,
        *,
        tokens: bool = True,
        bias: bool = True,
        P: int = 3,
        margin: float = 0.01,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        angle = 3.14 * torch.rand(M, dtype=torch.float64, generator=generator)
        radius = 1 + margin * (2 * torch.rand(M, dtype=torch.float64, generator=generator) - 1)
        self.re, self.im = radius * angle.cos(), radius * angle.sin()
        self.im[-1] = 0
        self.table = normal(D, 2 * M) if tokens else None
        self.x = torch.randint(0, D, (T, B), generator=generator) if tokens else normal(T, B, 2 * M)
        self.z0, self.readout = normal(B, 2 * M), normal(C, 2 * M) / (2 * M) ** 0.5
        self.bias = normal(C) if bias else None
        self.target = torch.randint(0, C, (T, B), generator=generator)
        self.pairs = torch.randint(0, M, (P, 2), generator=generator) if P else None
        self.entering = normal(T, B, 2 * M)  # the inputs of `scan`

    def map(self, change: Any) -> Problem:
        """A copy with every tensor but re, im and pairs changed by a function of a tensor."""
        copy = object.__new__(Problem)
        for name, value in vars(self).items():
            keep = value is None or name in ("re", "im", "pairs")
            setattr(copy, name, value if keep else change(value))
        return copy

    def to(self, dtype: torch.dtype) -> Problem:
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def poisoned(self, lengths: Tensor) -> Problem:
        """A copy whose padding holds values that must not be read."""
        copy = self.map(torch.clone)
        padding = torch.arange(self.target.shape[0]).unsqueeze(1) >= lengths
        copy.x[padding] = float("nan") if self.table is None else 10**9
        copy.target[padding] = -(10**9)
        return copy

    def loss(
        self, backend: Any, *, reduction: str = "mean", need_grad: bool = True, lengths: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The results of a backend's loss that are not None, by name."""
        inputs = Inputs(self.x, self.re, self.im, self.z0, self.table, lengths, self.pairs)
        readout = Readout(self.readout, self.bias, self.target, reduction)
        steps = sorted({0, len(self.x) // 2, len(self.x) - 1})
        loss, hits, grads, states, adjoints = backend.loss(inputs, readout, need_grad, steps)
        assert (grads is not None) == need_grad and states.shape == (len(steps), *self.z0.shape)
        result = {} if grads is None else {f"grad_{name}": t for name, t in grads._asdict().items() if t is not None}
        return {"loss": loss, "hits": hits, "states": states, **result, **({"adjoints": adjoints} if need_grad else {})}

    def scan(self, backend: Any) -> dict[str, Tensor]:
        """The states of a backend in both directions."""
        arguments = self.entering, self.re, self.im, self.z0
        return {name: backend.scan(*arguments, reverse=name == "reverse") for name in ("forward", "reverse")}


def compare(actual: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor] | None = None) -> None:
    """The results of a backend, by name, against the float64 reference and the reference in the backend's dtype, which
    is the same for a call in float64."""
    plain = plain or exact
    dtype = next(iter(actual.values())).dtype  # of the call; some sums are float64
    assert actual.keys() == exact.keys()
    for name, tensor in actual.items():
        if name == "hits":  # where two logits are equal to rounding, either may be the larger one
            assert (tensor - exact[name]).abs().sum() <= exact[name].numel() // 100
            continue
        assert tensor.dtype == plain[name].dtype, name
        rounded = tensor.to(dtype), exact[name], plain[name].to(dtype)
        assert_matches_reference(*rounded, name=name, gradient="grad" in name)
