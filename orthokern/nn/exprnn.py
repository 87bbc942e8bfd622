"""`ExpRNN`, and the base class of recurrences with an orthogonal P = B exp(A): the parameter, the base, and its moves.

Note [Dynamic trivialisation]
    A is skew, from the strictly lower triangle of a parameter; B is an orthogonal base and not a parameter. For a fixed
    B, any optimizer trains A as a plain parameter (Lezcano-Casado and Martinez-Rubio 2019, "Cheap orthogonal
    constraints", with B = I). Far from A = 0 the exponential distorts: directions of A are stretched unequally, and
    with |A| near pi there are directions in which P does not change. So after every K steps the chart, the coordinates
    A around a base B, is centred at the current point (Lezcano-Casado 2019, "Trivializations for gradient-based
    optimization on manifolds"): B <- B exp(A), A <- 0, which does not change P. K = 1 is Riemannian gradient descent.
    After every M such moves, B is projected back to the orthogonal matrices.

    The base moves directly after a step of an optimizer of A, by a hook that torch runs after the steps of all
    optimizers. A forward changes nothing, so it may run any number of times: for accumulated gradients, again in a
    backward (torch.utils.checkpoint), compiled, exported or under vmap. In data-parallel training the bases of all
    replicas move after the same steps. Steps without gradients or at a learning rate of 0 do not count. Steps that are
    not taken by a torch.optim.Optimizer (captured in a CUDA graph, or in a loop that changes parameters itself) do not
    move the base: call `rebase` between such steps. A backward through a forward before the move raises torch's error
    about a tensor modified in place, as after any step.

Note [Optimizer state at a move]
    Momentum is a sum of gradients, and gradients change with the chart. With dP = P Omega and K the gradient with
    respect to Omega, the gradient with respect to A is

        Gamma = int_0^1 exp(sA) K exp(-sA) ds,

    and at A = 0 it is K: the same cotangent in the new chart. In the basis of eigenvectors of A, with eigenvalues
    i a_j, the integral multiplies element jk by f(a_j - a_k), f(d) = (exp(id) - 1) / (id) = exp(id/2) sinc(d/2), so
    that K is Gamma divided by f. Where |sinc| is below FLATTEST (P hardly changes in that direction, and Gamma has
    little information about K), FLATTEST is used. Second moments are scales, not vectors: they are kept. So is the mean
    of a centered RMSprop, grad_avg, since it divides by the root of the variance square_avg - grad_avg^2.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import Self, Unpack

from orthokern import _autocast, dispatch, functional
from orthokern import init as init_
from orthokern._decompositions import robust_eigh
from orthokern.errors import InputError, integer, one_of
from orthokern.nn._checks import check_exponential, check_loaded_orthogonal, largest_deviation, new_parameter
from orthokern.nn._recurrent import Recurrent, RecurrentOptions
from orthokern.ops._checks import own_parameter, whole
from orthokern.ops._dispatcher import capturing
from orthokern.ops._linear import linear
from orthokern.ops._register import untraced

__all__ = ["INITS", "ExpRNN"]

INITS = ("henaff", "cayley", "torus", "orthogonal", "identity")
OPTIMIZER_STATES = ("transport", "reset", "keep")
FIRST_MOMENTS = ("momentum_buffer", "exp_avg", "prev")  # names in torch.optim; prev is a gradient, of Rprop
FLATTEST = 0.1

# Modules -> the optimizers that step their A. A torch optimizer knows parameters but not modules, and
# optimizers in an attribute of a module would be copied and pickled with it.
_followed: weakref.WeakKeyDictionary[_Exponential, weakref.WeakSet[Optimizer]] = weakref.WeakKeyDictionary()


def skew_from(parameter: Tensor) -> Tensor:
    """A = L - L^T [N,N] from the strict lower triangle L of a parameter [N,N]."""
    lower = parameter.tril(-1)
    return lower - lower.mT


def exponential(parameter: Tensor, backend: str | None = None) -> Tensor:
    """exp(L - L^T) [N,N] of the strict lower triangle L of a parameter [N,N], differentiable."""
    # not every backend of a recurrence has this op
    backend = "reference" if dispatch.requested(backend) == "reference" else "auto"
    # the op uses the skew part of its argument: that of 2 L is L - L^T
    return functional.skew_exp(2 * parameter.tril(-1), backend=backend)


def transported(momentum: Tensor, parameter: Tensor) -> Tensor:
    """Transforms a sum of gradients of A to the chart around exp(A); Note [Optimizer state at a move].

    Args:
        momentum: [N,N], a sum of gradients with respect to `parameter`, strictly lower triangular, as the result.
        parameter: [N,N], the last point in the old chart.
    """
    # the gradient with respect to L is twice the lower triangle of the skew gradient with respect to A
    gamma = skew_from(momentum).to(torch.complex128) / 2
    angles, q = robust_eigh(-1j * skew_from(parameter).to(torch.complex128))
    difference = angles.unsqueeze(-1) - angles.unsqueeze(-2)
    sinc = torch.sinc(difference / (2 * torch.pi))  # torch's sinc(x) is sin(pi x) / (pi x)
    sinc = torch.where(sinc.abs() < FLATTEST, torch.where(sinc < 0, -FLATTEST, FLATTEST), sinc)
    k = q @ ((q.mH @ gamma @ q) / (sinc * torch.exp(0.5j * difference))) @ q.mH
    return (2 * k.real).tril(-1).to(momentum.dtype)


class ExpOptions(RecurrentOptions, total=False):
    """The options of the two modules with an exponential, see ExpRNN."""

    init: str
    max_angle: float | None
    rebase_every: int | None
    project_every: int
    optimizer_state: str


class _Exponential(Recurrent):
    """A recurrence with an orthogonal P = B exp(A) per direction and layer. A subclass computes its matrix from P."""

    _inits: tuple[str, ...] = INITS
    _roles: ClassVar = {"skew": "skew"}

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Registers the module, also a copy of any kind."""
        module = super().__new__(cls)
        _followed[module] = weakref.WeakSet()
        return module

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        init: str = "henaff",
        max_angle: float | None = None,
        rebase_every: int | None = None,
        project_every: int = 100,
        optimizer_state: str = "transport",
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        one_of("init", init, self._inits)
        if max_angle is not None:
            init_.check_rotations(init, max_angle, init_.SKEW_ANGLES)
        self.init, self.max_angle = init, max_angle
        self.rebase_every = None if rebase_every is None else integer("rebase_every", rebase_every)
        self.project_every = integer("project_every", project_every)
        self.optimizer_state = one_of("optimizer_state", optimizer_state, OPTIMIZER_STATES)
        self._uses = 0  # steps of an optimizer since the last move of the base
        self._rebases = 0
        self._build()

    def _build(self) -> None:
        for name in (f"base_{suffix}" for suffix in self._suffixes()):
            shape = (self.hidden_size, self.hidden_size)
            self.register_buffer(name, new_parameter(name, shape, **self._placement).detach())
        super()._build()

    def _matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"skew": (self.hidden_size, self.hidden_size)}

    @torch.no_grad()
    def _reset_matrix(self, suffix: str, generator: torch.Generator | None) -> None:
        parameter, base = self._tensor(f"skew_{suffix}"), self._tensor(f"base_{suffix}")
        if self.init == "orthogonal":
            nn.init.zeros_(parameter)
            init_.haar_rotation_(base, generator)
            return
        init_.identity_(base)
        name = "identity" if self.init == "legacy" else self.init
        init_.skew_generator_(parameter, name, generator, max_angle=self.max_angle)
        if self.rebase_every is not None and not parameter.is_meta:
            base.copy_(exponential(parameter.double()))
            nn.init.zeros_(parameter)

    @_autocast.keeps_dtype
    def _orthogonal(self, suffix: str) -> Tensor:
        """P [N,N] of one recurrence, differentiable."""
        parameter = self._tensor(f"skew_{suffix}")
        p = exponential(parameter, self.backend)
        check_exponential(f"skew_{suffix}", parameter, p)
        return linear(self._tensor(f"base_{suffix}"), p.mT)

    @torch.no_grad()
    def orthogonality_error(self) -> float:
        """The largest |P^T P - I| over the entries of the orthogonal matrices P of all recurrences, NaN included."""
        return largest_deviation(self._orthogonal(suffix) for suffix in self._suffixes())

    # -- moves of the base

    def track_optimizer(self, optimizer: Optimizer) -> None:
        """Apply `optimizer_state` to this optimizer at moves of the base that come before its first step.

        With `rebase_every`, the module finds an optimizer by itself when the optimizer takes a step. Before `rebase` is
        called by hand, the optimizer must be known to the module by this method, or come from ``optimizer_for``.

        Raises InputError if the optimizer does not train this module's skew parameters.
        """
        holders = [part for part in _parts(optimizer) if self._groups(part)]
        if not holders:
            for suffix in self._suffixes():
                own_parameter(self, f"skew_{suffix}")
            raise InputError(
                "the optimizer holds none of this module's skew parameters; accepted: one that trains them"
            )
        _followed[self].update(holders)

    def _groups(self, optimizer: Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
        """The skew parameters that an optimizer holds, with their groups of options."""
        own = {id(self._parameters.get(f"skew_{suffix}")) for suffix in self._suffixes()}
        return [(group, p) for group in optimizer.param_groups for p in group["params"] if id(p) in own]

    def _stepped(self, optimizer: Optimizer) -> None:
        """Called after a step of any optimizer: moves the base after every `rebase_every` steps of those that hold a
        skew parameter. A step without gradients or at a learning rate of 0 changes nothing and does not count."""
        if all(p.grad is None or _rests(group.get("lr")) for group, p in self._groups(optimizer)):
            return
        _followed[self].add(optimizer)
        if hasattr(optimizer, "_overlap_with_ddp"):  # its step also sets the parameters of other ranks
            raise InputError(
                "rebase_every is set, and the optimizer is a ZeroRedundancyOptimizer; accepted: one without shards"
            )
        self._uses += 1
        if self.rebase_every is not None and self._uses >= self.rebase_every:
            self.rebase()

    @torch.no_grad()
    @_autocast.off()
    def rebase(self) -> None:
        """Move the base of every recurrence to the current P: B <- B exp(A), A <- 0. P does not change.

        Every `project_every`-th time the bases are projected to the nearest orthogonal matrices. The state of the
        optimizers of A is changed according to `optimizer_state`. Runs automatically after every `rebase_every`-th step
        of an optimizer of A. Call it between a step and the next forward: gradients of A belong to the base with which
        they were computed.
        """
        skews = [(own_parameter(self, f"skew_{suffix}"), self._tensor(f"base_{suffix}")) for suffix in self._suffixes()]
        for suffix, (parameter, _) in zip(self._suffixes(), skews, strict=True):
            whole(f"skew_{suffix}", parameter)
        self._rebases += 1
        self._uses = 0
        for parameter, base in skews:
            moved = base.double() @ exponential(parameter.double())
            if self._rebases % self.project_every == 0:
                moved = _nearest_orthogonal(moved)
            for optimizer in _followed[self]:
                self._move_state(optimizer, parameter)
            base.copy_(moved)
            parameter.zero_()

    def _move_state(self, optimizer: Optimizer, parameter: Tensor) -> None:
        if self.optimizer_state == "reset":
            optimizer.state.pop(parameter, None)
        elif self.optimizer_state == "transport":
            state = optimizer.state.get(parameter, {})
            for name in FIRST_MOMENTS:
                if isinstance(state.get(name), Tensor):
                    state[name].copy_(transported(state[name], parameter))

    # -- state

    def get_extra_state(self) -> Tensor:
        """int64 [2]: steps since the last move of the base, and moves so far."""
        return torch.tensor([self._uses, self._rebases], device="cpu")

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, Tensor) and state.is_meta:
            return
        if not isinstance(state, Tensor) or state.shape != (2,) or bool((state < 0).any()):
            raise InputError(f"extra state is {state!r}; accepted: a tensor of the counts of steps and of moves")
        self._uses, self._rebases = (int(count) for count in state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for suffix in self._suffixes():
            name = f"base_{suffix}"
            check_loaded_orthogonal(prefix + name, state_dict.get(prefix + name), self._tensor(name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _text(self, **usual: Any) -> str:
        names = {"rebase_every": None, "project_every": 100, "optimizer_state": "transport"}
        return super()._text(init="henaff", max_angle=None, **names, **usual)


class ExpRNN(_Exponential):
    """An RNN whose recurrent matrix is the orthogonal W = B exp(A): h_t = phi(gain W h_{t-1} + W_ih x_t + b).

    A is skew, from the strictly lower triangle of a parameter, so any optimizer keeps W orthogonal with determinant 1
    (expRNN: Lezcano-Casado and Martinez-Rubio 2019, "Cheap orthogonal constraints in neural networks"). With
    `rebase_every`, exp(A) is merged into the base B at intervals (dynamic trivialisation: Lezcano-Casado 2019); see
    Note [Dynamic trivialisation] in this file. The interface is that of orthokern.nn.RNN.

    Args:
        input_size, hidden_size, *args, **options: as in orthokern.nn.RNN; dtype is float32 or float64. The literature
            uses nonlinearity="modrelu".
        init: initialisation of A, and therefore of W: "henaff", "cayley" or "torus", see
            orthokern.init.skew_generator_; "orthogonal": W uniform on the rotations; "identity": A = 0.
        max_angle: for init "henaff", "cayley" and "torus", the largest angle in radians by which W rotates per step, at
            most pi; None: the published values, pi, 1 and pi.
        rebase_every: K at least 1: set B to B exp(A) and A to 0 after every K-th step of the optimizer that trains A
            (any torch optimizer). None: never, W = exp(A) (for init "orthogonal", W = B exp(A) with the random B).
            Modules that share skew_l0 must also share base_l0; share it again after a conversion that copies buffers.
        project_every: M at least 1: project the base to the orthogonal matrices every M moves.
        optimizer_state: the effect of a move on the state of the optimizers that train A: "transport" transforms first
            moments to gradients at the new base (Note [Optimizer state at a move] in the same file) and keeps second
            moments; "reset" deletes the state; "keep" keeps it, as the released code does.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N], skew_l0 [N,N], of which the
    strictly lower triangle is used; and slope_l0 [1], modrelu_bias_l0 [N], leak_logit_l0 [N], h0_l0 [N] as in
    orthokern.nn.RNN. Buffers: base_l0 [N,N]. The state_dict also has the counters of steps and moves.

    Raises InputError for a bad argument, and in forward on a CPU for an A that is not finite or too large.

    Example::

        >>> states, last = ExpRNN(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]))
    """

    def _composed(self, suffix: str) -> Tensor:
        return self._orthogonal(suffix)


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer itself, or the parts of a CombinedOptimizer."""
    if "param_groups" in vars(optimizer):
        return [optimizer]
    parts: dict[str, Optimizer] = vars(optimizer).get("parts", {})
    return list(parts.values())


def _rests(rate: Any) -> bool:
    """Whether a learning rate is 0. A rate on a GPU is not read."""
    return rate is not None and not (isinstance(rate, Tensor) and rate.is_cuda) and bool(rate == 0)


@untraced
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Runs after every step of every torch optimizer, see Note [Dynamic trivialisation]."""
    # the hook also runs for each part of a combined optimizer
    if not _followed or _parts(optimizer) != [optimizer] or capturing():
        return
    for module in [reference() for reference in _followed.keyrefs()]:
        # without the attribute: a module whose constructor failed
        if module is not None and getattr(module, "rebase_every", None) is not None:
            module._stepped(optimizer)


register_optimizer_step_post_hook(_after_step)


def _nearest_orthogonal(m: Tensor) -> Tensor:
    """The orthogonal polar factor of m [N,N], which is nearly orthogonal, by Newton-Schulz steps, each of which squares
    the error."""
    eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
    for _ in range(4):
        m = m + m @ (eye - m.mT @ m) / 2
    return m
