"""Random inputs of modal_scan and modal_cross_entropy, for the tests of every backend."""

from __future__ import annotations

from typing import Any

import torch
from helpers import assert_matches_reference
from torch import Tensor

from orthokern._scan_contract import ModalInputs, Readout

LOSS_NAMES = (
    "loss",
    "hits",
    "grad_x",
    "grad_re",
    "grad_im",
    "grad_z0",
    "grad_table",
    "grad_readout",
    "grad_bias",
    "grad_pairs",
)
SCAN_NAMES = ("grad_x", "grad_re", "grad_im", "grad_z0", "grad_table", "grad_pairs")


class Problem:
    """Random inputs of both ops, float64, eigenvalues of magnitude within 1 +- margin; the last mode is real."""

    def __init__(
        self, M: int, T: int, B: int, C: int = 3, D: int = 5, *, tokens: bool = True, bias: bool = True, P: int = 3,
        margin: float = 0.01, seed: int = 0,
    ) -> None:  # fmt: skip
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
        self.grad_z = normal(T, B, 2 * M)

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
        """A copy whose padding holds what must not be looked at."""
        copy = self.map(torch.clone)
        padding = torch.arange(self.target.shape[0]).unsqueeze(1) >= lengths
        copy.x[padding] = float("nan") if self.table is None else 10**9
        copy.target[padding] = -(10**9)
        copy.grad_z[padding] = float("nan")
        return copy

    def leaf_inputs(self, lengths: Tensor | None = None) -> ModalInputs:
        """What a leaf takes."""
        return ModalInputs(self.x, self.re, self.im, self.z0, self.table, lengths, self.pairs)

    def leaf_scan(self, leaf: Any, *, need_x: bool = True, lengths: Tensor | None = None) -> dict[str, Tensor]:
        """States and gradients of a leaf's module, those that are not None, by name."""
        inputs = self.leaf_inputs(lengths)
        z = leaf.modal_scan_fwd(inputs)
        grads = leaf.modal_scan_bwd(inputs, self.grad_z, z, need_x=need_x)
        return {"z": z, **{f"grad_{name}": t for name, t in grads._asdict().items() if t is not None}}

    def leaf_loss(
        self, leaf: Any, *, reduction: str = "mean", need_grad: bool = True, lengths: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What modal_cross_entropy_fwd of a leaf's module returns and is not None, by name."""
        readout = Readout(self.readout, self.bias, self.target, reduction)
        loss, hits, grads, *of_readout = leaf.modal_cross_entropy_fwd(
            self.leaf_inputs(lengths), readout, need_grad=need_grad
        )
        found = {"loss": loss, "hits": hits, **dict(zip(("grad_readout", "grad_bias"), of_readout, strict=True))}
        found |= {} if grads is None else {f"grad_{name}": t for name, t in grads._asdict().items()}
        return {name: t for name, t in found.items() if t is not None}

    def loss(
        self, backend: str, *, reduction: str = "mean", need_grad: bool = True, lengths: Tensor | None = None
    ) -> Any:
        """Everything that modal_cross_entropy_fwd returns, by name."""
        found = torch.ops.orthokern.modal_cross_entropy_fwd(
            self.x, self.re, self.im, self.z0, self.table, self.readout, self.bias, self.target, self.pairs,
            reduction, need_grad, backend, lengths,
        )  # fmt: skip
        return dict(zip(LOSS_NAMES, found, strict=True))

    def scan(self, backend: str, *, lengths: Tensor | None = None) -> dict[str, Tensor]:
        """States and gradients of modal_scan, by name."""
        z = torch.ops.orthokern.modal_scan_fwd(self.x, self.re, self.im, self.z0, self.table, backend, lengths)
        x = None if self.table is None else self.x
        grads = torch.ops.orthokern.modal_scan_bwd(
            self.grad_z, z, x, self.re, self.im, self.z0, self.table, self.pairs, True, backend, lengths
        )
        return {"z": z, **dict(zip(SCAN_NAMES, grads, strict=True))}


def compare(actual: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """What a leaf returned, by name, against the float64 reference and the reference in the leaf's dtype."""
    dtype = actual["grad_z0"].dtype  # of the call; sums over what has it come in float64
    for name, tensor in actual.items():
        if name == "hits":
            assert torch.equal(tensor, exact[name])
            continue
        assert tensor.dtype == plain[name].dtype, name
        rounded = tensor.to(dtype), exact[name], plain[name].to(dtype)
        assert_matches_reference(*rounded, name=name, gradient="grad" in name)
