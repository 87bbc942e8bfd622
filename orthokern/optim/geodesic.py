"""Gradient descent along the Stiefel manifold: the Cayley step as torch optimizers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orthokern import _autocast
from orthokern._decompositions import polar
from orthokern._products import ieee_products
from orthokern.dispatch import requested
from orthokern.errors import InputError, integer, number, require
from orthokern.ops import cayley
from orthokern.ops._checks import strided, whole
from orthokern.ops._dispatcher import capturing
from orthokern.optim._checks import check_range, check_rate, parameter_label

# A matrix with a larger error was not orthonormal initially.
_NOT_A_BASIS = 1e-2
_MOST_CORRECTIONS = 6
# The error is measured after a step with a larger lr ||G||_F.
_LARGE_STEP = 0.1


class GeodesicSGD(Optimizer):
    """SGD for matrices with orthonormal columns that keeps the columns orthonormal (Cayley step, no momentum).

        A = G M^T - M G^T,   M <- (I + lr/2 A)^-1 (I - lr/2 A) M,   G = dL/dM

    from Wisdom, Powers, Hershey, Le Roux and Atlas 2016, and Vorontsov et al. 2017, eq. 9 (where "M +" is a misprint
    for a product). A is skew, so M is multiplied by a rotation and M^T M does not change; to first order in lr the
    loss decreases by lr/2 ||A||_F^2. See orthokern.functional.cayley for the form that is evaluated.

    All bases of a group with the same shape, dtype and device are processed by one batched call; on the CUDA backend,
    bases of different shapes too.

    Note [Drift]
        Rounding M to float32 moves M^T M away from I, at N = 128 by about 2.5e-8 sqrt(steps). Every
        `correct_every` steps the error max|M^T M - I| of each basis is measured (one batched product). A basis above
        `drift_tolerance` gets up to six Newton-Schulz steps, M <- M (3/2 I - 1/2 M^T M), which reduces an error e to
        3/4 e^2 and moves M by e/2, orthogonally to the manifold, so that the descent along it is not affected.
        docs/orthogonality-drift.md shows the curves.

        A large step has a larger rounding error: with a = lr ||G||_F, it is at most about (6 a + 2 a^2) eps. So the
        error is also measured after every step with a above 0.1, and corrected until it is below the tolerance. Usual
        rates have an a of 1e-3. On a GPU, where a is not read, only the steps are counted.

    Note [No wait for the GPU]
        For bases on a GPU (the same one for all of a group) a step does not synchronise: the norm and the clipping are
        computed on the device, and a step can be captured in a CUDA graph. Only a step that measures the drift waits,
        and only this step checks that gradients are finite; until then, such a gradient makes a basis NaN, as with
        torch's optimizers. A captured step does not measure the drift, and a replay is not counted in `steps`. Run an
        ordinary step instead of a replay at intervals.

    Args:
        params: parameters [..., N, K] with K <= N and orthonormal columns, float32 or float64; or (name, parameter)
            pairs; or group dicts, each of which may override every option below.
        lr: learning rate, >= 0.
        max_grad_norm: the largest joint gradient norm of a group, sqrt(sum over all bases of the group of ||G||_F^2);
            larger gradients are scaled down to it. None: no clipping. Since the step depends on lr * G only, clipping
            reduces the rate.
        maximize: maximise the loss instead of minimising it.
        correct_every: the largest number of steps between two measurements of the drift (Note [Drift]); 0: never.
        drift_tolerance: max|M^T M - I| above which a basis is corrected. The default is for float32; 1e-14 is suitable
            for float64.
        backend: of the Cayley step: None or "auto", "reference", "cpu", "triton", "cuda".

    Each group also has `steps` (the number of steps so far), `last_grad_norm` (the joint norm before clipping, 0
    without gradients, nan before the first step; on a GPU a float64 tensor [], whose conversion by float()
    synchronises) and `last_drift` (at the last measurement, before correction; nan before the first). They are in the
    state_dict, as numbers, so that a resumed run measures at the same steps. There is no state per parameter:
    `set_state_dict` of torch.distributed.checkpoint needs `StateDictOptions(strict=False)`.

    Raises:
        InputError: for other dtypes, for a parameter that is not [..., N, K] with K <= N or not orthonormal, and for
            options out of range; from `step`, before any parameter has changed, for a gradient with NaN or inf (on a
            GPU in the steps that measure the drift); from a step that measures the drift, before a basis of its group
            has changed, if a basis would be NaN or inf.

    Example::

        >>> u = torch.nn.Parameter(torch.eye(8))
        >>> optimizer = GeodesicSGD([u], lr=1e-2)
        >>> (u @ torch.randn(8)).square().sum().backward()
        >>> optimizer.step()
        >>> bool(((u.mT @ u - torch.eye(8)).abs() < 1e-5).all())
        True
    """

    _own_options: dict[str, Any] = {}  # those of a subclass

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        correct_every: int = 100,
        drift_tolerance: float = 2e-6,
        backend: str | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
            "correct_every": correct_every,
            "drift_tolerance": drift_tolerance,
            "backend": backend,
            **self._own_options,
        }
        counters = {"steps": 0, "last_grad_norm": math.nan, "last_drift": math.nan}
        super().__init__(params, options | counters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of bases, with the checks of the constructor. An invalid group is not added."""
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            _check_bases(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def last_grad_norm(self) -> float:
        """Joint gradient norm over all groups at the last step, before clipping. On a GPU, reading it waits."""
        return math.hypot(*(float(group["last_grad_norm"]) for group in self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict, with every number of a group on the host."""
        return counters_on_host(super().state_dict())

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults  # in `state` if it is that of a pickle
        for index, group in enumerate(state["param_groups"]):
            lacking = sorted(defaults.keys() - group.keys() - {"differentiable"})  # which torch adds to defaults
            accepted = f"that of a {type(self).__name__}"
            require(not lacking, f"group {index} of the state_dict", accepted, f"one without {', '.join(lacking)}")
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every basis that has a gradient.

        Args:
            closure: recomputes the loss and the gradients, called once; None to use the existing gradients.

        Returns:
            The closure's value.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            check_rate(index, group)
        with _autocast.off(), ieee_products():
            work = [_Work(group) for group in self.param_groups]  # raises before the first parameter changes
            for group, todo in zip(self.param_groups, work, strict=True):
                group["last_grad_norm"] = todo.norm  # 0 for a group without gradients
                if todo.batches:
                    self._step_group(group, todo)
                    group["steps"] += 1
        return loss

    def _step_group(self, group: dict[str, Any], todo: _Work) -> None:
        rate = group["lr"]  # one below 0 by rounding is 0, see check_rate
        in_place = isinstance(rate, Tensor) and isinstance(todo.norm, Tensor)  # Note [No wait for the GPU]
        rate = rate.detach().reshape(()).clamp(min=0.0) if in_place else max(float(rate), 0.0)
        rate = -rate if group["maximize"] else rate
        shrink, measure = todo.shrink(group), todo.measure
        steps, averages = [], []
        for bases, g in todo.batches:
            g, factor, average = self._direction(group, bases, g, shrink)
            averages.append(average)
            steps.append((_stack(bases), g, rate * factor))
            if group["correct_every"] > 0 and not isinstance(todo.norm, Tensor):
                measure = measure or abs(float(rate * factor)) * float(torch.linalg.vector_norm(g)) > _LARGE_STEP
        moved = cayley.steps(steps, group["backend"])
        if measure:
            corrected = [_correct(m, group["drift_tolerance"]) for m in moved]  # raises before a basis changes
            moved = [m for m, _ in corrected]
            group["last_drift"] = max(drift for _, drift in corrected)
        for (bases, _), m, average in zip(todo.batches, moved, averages, strict=True):
            _unstack(m, bases)
            if average is not None:
                _unstack(average, [self.state[p]["square_avg"] for p in bases])

    def _direction(
        self, group: dict[str, Any], bases: list[Tensor], g: Tensor, shrink: float | Tensor
    ) -> tuple[Tensor, float | Tensor, Tensor | None]:
        """The direction of the step, [P,N,K], a factor of the rate, and the new "square_avg" of the bases, or None.

        Args: bases: parameters; g: their gradients [P,N,K]; shrink: the factor of clipping, a number or a tensor [].
        """
        return g, shrink, None


class GeodesicRMSprop(GeodesicSGD):
    """RMSprop for matrices with orthonormal columns: GeodesicSGD with every gradient entry divided by its running size.

        v <- alpha v + (1 - alpha) G^2,   G~ = G / (sqrt(v) + eps),   A = G~ M^T - M G~^T,   M <- Cayley step along A

    as in the training of the full-capacity unitary RNN by Wisdom, Powers, Hershey, Le Roux and Atlas 2016. A is skew
    for any G~, so M stays orthonormal. As in RMSprop, the step is not that of steepest descent, and its size does not
    depend on the size of the gradient: every entry of G~ is about 1, and for gradients without structure a step rotates
    M by about 2.8 lr sqrt(N) (lr times the spectral norm of A); in the first steps, in which v is small, by up to 1 /
    sqrt(1 - alpha) times as much. docs/choosing.md has suitable rates.

    Args:
        params, lr: as in GeodesicSGD.
        alpha: decay of v per step, in [0, 1).
        eps: added to sqrt(v), above 0.
        max_grad_norm (clips G before v is updated), maximize, correct_every, drift_tolerance, backend: as in
        GeodesicSGD.

    State per parameter: "square_avg", v, of the parameter's shape.

    Raises:
        InputError: as GeodesicSGD, and for alpha or eps out of range. A gradient whose squares overflow (entries above
            1.8e19 in float32) makes v infinite in such entries, which then do not move the basis, as in
            torch.optim.RMSprop; max_grad_norm prevents it.

    Example::

        >>> u = torch.nn.Parameter(torch.eye(8))
        >>> optimizer = GeodesicRMSprop([u], lr=1e-2)
        >>> (u @ torch.randn(8)).square().sum().backward()
        >>> optimizer.step()
        >>> bool(((u.mT @ u - torch.eye(8)).abs() < 1e-5).all())
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        alpha: float = 0.9,
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        self._own_options = {"alpha": alpha, "eps": eps}
        super().__init__(params, lr, **options)

    def _direction(
        self, group: dict[str, Any], bases: list[Tensor], g: Tensor, shrink: float | Tensor
    ) -> tuple[Tensor, float | Tensor, Tensor]:
        if isinstance(shrink, Tensor) or shrink != 1.0:
            g = g * shrink
        for p in bases:
            if "square_avg" not in self.state[p]:
                self.state[p]["square_avg"] = torch.zeros_like(p)
        averages = [self.state[p]["square_avg"] for p in bases]
        v = _stack(averages).mul(group["alpha"]).addcmul_(g, g, value=1.0 - group["alpha"])
        return g / (v.sqrt() + group["eps"]), 1.0, v


class _Work:
    """The data of one group for a step: its bases that have gradients, those of equal shape together.

    batches: (parameters, their gradients [P,N,K]) for each shape, dtype and device; measure: whether this step measures
    the drift; norm: sqrt(sum of all ||G||_F^2), a float64 tensor [] if a number would make the host wait.
    Raises InputError for a gradient that is not finite, see Note [No wait for the GPU].
    """

    def __init__(self, group: dict[str, Any]) -> None:
        alike: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                require(p.grad.layout is torch.strided, "a gradient", "dense", "a sparse one")
                alike[(p.shape[-2:], p.dtype, p.device)].append(p)
        self.batches = [(bases, _stack([p.grad for p in bases if p.grad is not None])) for bases in alike.values()]
        self.measure = group["correct_every"] > 0 and (group["steps"] + 1) % group["correct_every"] == 0
        # squares of float32 gradients do not overflow float64; those of float64 gradients may, from 1e154 on
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for _, g in self.batches]
        devices = {g.device for _, g in self.batches}
        self.norm: float | Tensor
        if len(devices) == 1 and cayley.read_waits(next(iter(devices))):
            self.norm, self.measure = torch.stack(norms).norm(), self.measure and not capturing()
            check = self.measure
        else:
            self.norm, check = math.hypot(*map(float, norms)), True
        if check and not math.isfinite(float(self.norm)):
            _refuse(group)

    def shrink(self, group: dict[str, Any]) -> float | Tensor:
        """The factor of clipping to max_grad_norm: a number, or a tensor [] if the norm is one. Gradients whose
        products may overflow are clipped here, and the factor is 1."""
        if group["max_grad_norm"] is None:
            return 1.0
        if isinstance(self.norm, Tensor):
            return (group["max_grad_norm"] / self.norm).clamp(max=1.0)
        factor: float = group["max_grad_norm"] / self.norm if self.norm > group["max_grad_norm"] else 1.0
        if factor > 2.0**-64:
            return factor
        root = factor**0.5  # the factor itself may be denormal in float32
        self.batches = [(bases, g * root * root) for bases, g in self.batches]
        return 1.0


def counters_on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Converts the norms on a GPU in the groups of a state_dict to numbers."""
    for group in state["param_groups"]:
        if isinstance(group.get("last_grad_norm"), Tensor):
            group["last_grad_norm"] = float(group["last_grad_norm"])
    return state


def _refuse(group: dict[str, Any]) -> None:
    """Raise InputError for the first gradient that is not finite, or for the overflow of the norm of finite ones."""
    for index, p in enumerate(group["params"]):
        if p.grad is not None and not bool(p.grad.isfinite().all()):
            label = parameter_label(group, index)
            raise InputError(f"gradient of {label} has NaN or infinite entries; no parameter was changed")
    raise InputError(
        "the norm of all gradients overflows float64; accepted: smaller gradients; no parameter was changed"
    )


def _stack(matrices: list[Tensor]) -> Tensor:
    """[..., N, K] each -> [P, N, K], contiguous; a single contiguous matrix is not copied."""
    flat = [m.reshape(-1, *m.shape[-2:]) if m.dim() != 3 else m for m in matrices]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


def _unstack(stacked: Tensor, matrices: list[Tensor]) -> None:
    """[P, N, K] -> [..., N, K] each, in place: the inverse of `_stack`."""
    counts = [m.numel() // stacked[0].numel() for m in matrices]
    for m, part in zip(matrices, stacked.split(counts), strict=True):
        m.copy_(part.view_as(m))


def _correct(m: Tensor, tolerance: float) -> tuple[Tensor, float]:
    """Note [Drift]: bases [P,N,K] -> (the bases, corrected if the error is above tolerance; the largest error before
    the correction). InputError for a basis that is not finite."""
    first = math.nan
    for _ in range(_MOST_CORRECTIONS):
        excess = m.mT @ m
        excess.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        error = excess.abs().amax((-2, -1))
        drift = float(error.max())
        if not math.isfinite(drift):
            raise InputError(
                f"a basis of shape {list(m.shape[-2:])} has NaN or infinite entries after the step; "
                "accepted: finite bases, and rates and gradients whose product does not overflow"
            )
        first = drift if math.isnan(first) else first
        if not drift > tolerance:
            return m, first
        if drift * m.shape[-1] > 0.5:  # too far for the series
            corrected = polar(m.double()).to(m.dtype)
        else:
            # M (3/2 I - 1/2 M^T M), rounded against the small correction instead of against M
            corrected = m - 0.5 * (m @ excess)
        m = torch.where((error > tolerance)[:, None, None], corrected, m)
        if drift * drift < max(tolerance, torch.finfo(m.dtype).eps):
            return m, first  # below the tolerance, or at the limit of rounding
    return m, first


def _check_options(group: dict[str, Any]) -> None:
    requested(group["backend"])  # raises for an unknown name
    require(isinstance(group["maximize"], bool), "maximize", "True or False", repr(group["maximize"]))
    check_range("lr", group["lr"])
    check_range("drift_tolerance", group["drift_tolerance"])
    if group["max_grad_norm"] is not None:
        check_range("max_grad_norm", group["max_grad_norm"], above=True)
    integer("correct_every", group["correct_every"], 0)
    if "alpha" in group:
        number("alpha", group["alpha"], "a number in [0, 1)", lambda value: 0.0 <= value < 1.0)
        check_range("eps", group["eps"], above=True)


@_autocast.keeps_dtype
@ieee_products()
def _check_bases(group: dict[str, Any]) -> None:
    for index, p in enumerate(group["params"]):
        label = parameter_label(group, index)
        strided(label, p)
        whole(label, p)
        require(p.dtype in (torch.float32, torch.float64), label, "float32 or float64", p.dtype)
        fits = p.dim() >= 2 and 1 <= p.shape[-1] <= p.shape[-2] and p.numel() > 0
        require(fits, label, "[..., N, K] with 1 <= K <= N", f"shape {list(p.shape)}")
        if p.is_meta:
            continue
        m = p.detach()
        error = float((m.mT @ m - torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)).abs().max())
        accepted = f"an orthonormal basis, with max|M^T M - I| of at most {_NOT_A_BASIS:g}"
        require(error <= _NOT_A_BASIS, label, accepted, f"{error:.3g} (FactorizedRNN.orthonormalize corrects it)")
