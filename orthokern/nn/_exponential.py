"""The base class of recurrences with an orthogonal matrix P = B exp(A): the parameter, the base, and its moves.

Note [Dynamic trivialisation]
    A is skew, from the strictly lower triangle of a parameter; B is an orthogonal base and not a parameter. For a fixed
    B, any optimizer trains A as a plain parameter (Lezcano-Casado and Martinez-Rubio 2019, "Cheap orthogonal
    constraints", with B = I). Far from A = 0 the exponential distorts: directions of A are stretched unequally, and
    with |A| near pi there are directions in which P does not change. So after every K steps the chart, the coordinates
    A around a base B, is centred at the current point (Lezcano-Casado 2019, "Trivializations for gradient-based
    optimization on manifolds"): B <- B exp(A), A <- 0, which does not change P. K = 1 is Riemannian gradient descent.
    After every M such moves, B is projected back to the orthogonal matrices.

    The base moves directly after a step of an optimizer of A, by a hook that torch runs after the steps of all
    optimizers. Where an optimizer with these parameters runs another in its step, as a ZeroRedundancyOptimizer does to
    step the parameters of its rank before it sends them to the other ranks, the step of the outer one counts. A forward
    changes nothing, so it may run any number of times: for accumulated gradients, again in a backward
    (torch.utils.checkpoint), compiled, exported or under vmap. In data-parallel training the bases of all replicas move
    after the same steps. Steps that are not taken by a torch.optim.Optimizer (captured in a CUDA graph, or in a loop
    that changes parameters itself) do not move the base: call `rebase` between such steps. A backward through a forward
    before the move raises torch's error about a tensor modified in place, as after any step.

Note [Optimizer state at a move]
    Momentum is a sum of gradients, and gradients change with the chart. With dP = P Omega and K the gradient with
    respect to Omega, the gradient with respect to A is

        Gamma = int_0^1 exp(sA) K exp(-sA) ds,

    and at A = 0 it is K: the same cotangent in the new chart. In the basis of eigenvectors of A, with eigenvalues
    i a_j, the integral multiplies element jk by f(a_j - a_k), f(d) = (exp(id) - 1) / (id) = exp(id/2) sinc(d/2), so
    that K is Gamma divided by f. Where |sinc| is below FLATTEST (P hardly changes in that direction, and Gamma has
    little information about K), FLATTEST is used. Second moments are scales, not vectors: they are kept. Of a
    centered RMSprop, which divides by the root of square_avg - grad_avg^2, this difference is kept, a variance.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from orthokern import _autocast, dispatch, functional
from orthokern import init as init_
from orthokern._decompositions import robust_eigh
from orthokern.errors import InputError, unknown_name
from orthokern.nn._checks import check_exponential, check_loaded_orthogonal, largest_deviation, positive_int
from orthokern.nn._recurrent import Recurrent
from orthokern.ops._checks import whole
from orthokern.ops._register import untraced

INITS = ("henaff", "cayley", "torus", "orthogonal", "identity")
OPTIMIZER_STATES = ("transport", "reset", "keep")
FIRST_MOMENTS = ("momentum_buffer", "exp_avg", "grad_avg")  # names in torch.optim
FLATTEST = 0.1

# Complete modules by id, and module -> its optimizers; not attributes, so that a module can be copied and pickled.
# The first is not a WeakSet, which must not be iterated over while another thread makes a module.
_modules: weakref.WeakValueDictionary[int, _Exponential] = weakref.WeakValueDictionary()
_optimizers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Optimizer]] = weakref.WeakKeyDictionary()


def skew_from(parameter: Tensor) -> Tensor:
    """A = L - L^T [N,N] from the strict lower triangle L of a parameter [N,N]."""
    lower = parameter.tril(-1)
    return lower - lower.mT


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


class _Exponential(Recurrent):
    """A recurrence with an orthogonal P = B exp(A) per direction and layer. A subclass computes its matrix from P."""

    _half_ok = False
    _inits: tuple[str, ...] = INITS

    def _set_up_exponential(
        self,
        init: str,
        rebase_every: int | None,
        project_every: int,
        optimizer_state: str,
        max_angle: float | None = None,
    ) -> None:
        if init not in self._inits:
            raise unknown_name("init", init, self._inits)
        if max_angle is not None:
            init_.check_rotations(init, max_angle, init_.SKEW_ANGLES)
        self.init, self.max_angle = init, max_angle
        self.rebase_every = None if rebase_every is None else positive_int("rebase_every", rebase_every)
        self.project_every = positive_int("project_every", project_every)
        if optimizer_state not in OPTIMIZER_STATES:
            raise unknown_name("optimizer_state", optimizer_state, OPTIMIZER_STATES)
        self.optimizer_state = optimizer_state
        self._uses = 0  # steps of an optimizer since the last move of the base
        self._rebases = 0

    def _register_exponential(self, suffix: str, device: Any, dtype: torch.dtype) -> None:
        n = self.hidden_size
        self._register(f"skew_{suffix}", (n, n), device, dtype)
        self.register_buffer(f"base_{suffix}", torch.empty(n, n, device=device, dtype=dtype))

    @torch.no_grad()
    def _reset_exponential(self, suffix: str, generator: torch.Generator | None) -> None:
        parameter, base = self._tensor(f"skew_{suffix}"), self._tensor(f"base_{suffix}")
        if self.init == "orthogonal":
            nn.init.zeros_(parameter)
            init_.haar_rotation_(base, generator)
            return
        init_.identity_(base)
        name = "identity" if self.init == "legacy" else self.init
        init_.skew_generator_(parameter, name, generator, max_angle=self.max_angle)
        if self.rebase_every is not None and not parameter.is_meta:
            base.copy_(functional.skew_exp(skew_from(parameter.double()), backend=dispatch.auxiliary_backend(None)))
            nn.init.zeros_(parameter)

    @_autocast.keeps_dtype
    def _orthogonal(self, suffix: str) -> Tensor:
        """P [N,N] of one recurrence, differentiable."""
        parameter = self._tensor(f"skew_{suffix}")
        p = functional.skew_exp(
            # the op uses the skew part of its argument: that of 2 L is L - L^T
            2 * parameter.tril(-1),
            backend=dispatch.auxiliary_backend(self.backend),
        )
        check_exponential(f"skew_{suffix}", parameter, p)
        return self._tensor(f"base_{suffix}") @ p

    def _composed(self, suffix: str) -> Tensor:
        """The recurrent matrix [N,N] of one recurrence, without the gain, differentiable."""
        raise NotImplementedError

    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """The matrix [N,N] of one recurrence, without the gain, differentiable: W = B exp(A) of an ExpRNN,
        V = P Theta P^T of a NonNormalRNN."""
        return self._composed(self._suffix(layer, reverse))

    def recurrent_matrices(self) -> list[Tensor]:
        """`recurrent_matrix` of every recurrence, in the order l0, l0_reverse, l1, ..."""
        return [self._composed(suffix) for suffix in self._suffixes()]

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        return (self._gained(self._composed(suffix)),)

    @torch.no_grad()
    def orthogonality_error(self) -> float:
        """The largest |P^T P - I| over the entries of the orthogonal matrices P of all recurrences, NaN included."""
        return largest_deviation(self._orthogonal(suffix) for suffix in self._suffixes())

    # -- moves of the base

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow_steps()

    def _follow_steps(self) -> None:
        """Called when the module is complete: from then on, its base moves after steps of its optimizers."""
        _modules[id(self)] = self

    def track_optimizer(self, optimizer: Optimizer) -> None:
        """Apply `optimizer_state` to this optimizer at moves of the base that come before its first step.

        The module finds an optimizer by itself when the optimizer takes a step.

        Raises InputError if the optimizer does not train this module's skew parameters.
        """
        if not self._held_by(optimizer):
            raise InputError(
                "the optimizer holds none of this module's skew parameters; accepted: one that trains them"
            )
        for part in _parts(optimizer):
            if self._held_by(part):
                _optimizers.setdefault(self, weakref.WeakSet()).add(part)

    def _held_by(self, optimizer: Optimizer) -> bool:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(parameter) in held for parameter, _ in self._raw_skews() if parameter is not None)

    def _rests_in(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's learning rate of this module's skew parameters is 0. A rate on a GPU is not read."""
        own = {id(parameter) for parameter, _ in self._raw_skews()}
        rates = [g.get("lr") for g in optimizer.param_groups if any(id(p) in own for p in g["params"])]
        return all(rate is not None and not (isinstance(rate, Tensor) and rate.is_cuda) and rate == 0 for rate in rates)

    def _stepped(self, optimizer: Optimizer) -> None:
        """Called after a step of an optimizer that holds this module's skew parameters: moves the base after every
        `rebase_every` steps. A step at a learning rate of 0 changes nothing and does not count."""
        assert self.rebase_every is not None
        if self._rests_in(optimizer):
            return
        _optimizers.setdefault(self, weakref.WeakSet()).add(optimizer)
        if any(self._held_by(outer) for outer in _around(optimizer)):
            return
        if getattr(optimizer, "_overlap_with_ddp", False):  # what it steps in the backward may still be under way
            raise InputError("rebase_every is set, and the optimizer has overlap_with_ddp=True; accepted: False")
        self._uses += 1
        if self._uses >= self.rebase_every:
            self.rebase()

    def _raw_skews(self) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """(parameter, base) of every recurrence without checks, for modules that the step at hand may not concern; None
        for one that is replaced by another attribute."""
        for suffix in self._suffixes():
            yield self._parameters.get(f"skew_{suffix}"), self._buffers.get(f"base_{suffix}")

    def _check_ties(self) -> None:
        """Rejects a skew parameter of this module that is also that of a recurrence with another base: a move would set
        it to 0 and change one of the bases."""
        suffix = self._tied_without_base()
        if suffix is not None:
            raise InputError(
                f"skew_{suffix} is shared by two recurrences with different bases, and rebase_every is "
                f"{self.rebase_every}; accepted: tie base_{suffix} too, rebase_every=None, or delete one of the modules"
            )

    def _tied_without_base(self) -> str | None:
        """The recurrence of any module that shares a skew parameter of this one and has another base, or None."""
        own = {id(parameter): base for parameter, base in self._raw_skews() if parameter is not None}
        for module in _alive():
            for suffix, (parameter, base) in zip(module._suffixes(), module._raw_skews(), strict=True):
                if parameter is not None and id(parameter) in own and base is not own[id(parameter)]:
                    return suffix
        return None

    def _skews(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, base) of every recurrence."""
        for suffix in self._suffixes():
            yield self._tensor(f"skew_{suffix}"), self._tensor(f"base_{suffix}")

    @torch.no_grad()
    @_autocast.off()
    def rebase(self) -> None:
        """Move the base of every recurrence to the current P: B <- B exp(A), A <- 0. P does not change.

        Every `project_every`-th time the bases are projected to the nearest orthogonal matrices. The state of the
        optimizers of A is changed according to `optimizer_state`. Runs automatically after every `rebase_every`-th step
        of an optimizer of A. Call it between a step and the next forward: gradients of A belong to the base with which
        they were computed.
        """
        for suffix in self._suffixes():
            whole(f"skew_{suffix}", self._tensor(f"skew_{suffix}"))
        self._rebases += 1
        self._uses = 0
        for parameter, base in self._skews():
            moved = base.double() @ functional.skew_exp(
                skew_from(parameter.double()), backend=dispatch.auxiliary_backend(None)
            )
            if self._rebases % self.project_every == 0:
                moved = _nearest_orthogonal(moved)
            for optimizer in _optimizers.get(self, ()):
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
                    moved = transported(state[name], parameter)
                    square = state.get("square_avg")
                    if name == "grad_avg" and isinstance(square, Tensor):
                        square.add_(moved.square() - state[name].square()).clamp_min_(moved.square())
                    state[name].copy_(moved)

    # -- state

    def get_extra_state(self) -> dict[str, int]:
        """Steps since the last move of the base ("uses"), and moves so far."""
        return {"uses": self._uses, "rebases": self._rebases}

    def set_extra_state(self, state: Any) -> None:
        if not isinstance(state, dict) or set(state) != {"uses", "rebases"}:
            raise InputError(f"extra state is {state!r}; accepted: the counters 'uses' and 'rebases'")
        self._uses = positive_int("uses", state["uses"], minimum=0)
        self._rebases = positive_int("rebases", state["rebases"], minimum=0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for suffix in self._suffixes():
            name = f"base_{suffix}"
            check_loaded_orthogonal(prefix + name, state_dict.get(prefix + name), self._tensor(name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _repr_exponential(self) -> str:
        text = self._repr_common() + self._repr_init(False, self.init, self.max_angle)
        if self.rebase_every is not None:
            text += f", rebase_every={self.rebase_every}, project_every={self.project_every}"
        return text


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer itself, or the parts of a CombinedOptimizer."""
    if "param_groups" in vars(optimizer):
        return [optimizer]
    parts: dict[str, Optimizer] = vars(optimizer).get("parts", {})
    return list(parts.values())


def _alive() -> Iterator[_Exponential]:
    """All modules that are complete."""
    for reference in _modules.valuerefs():
        module = reference()
        if module is not None:
            yield module


def _moved_by(optimizer: Optimizer) -> list[_Exponential]:
    """The modules whose bases move after steps of this optimizer."""
    return [module for module in _alive() if module.rebase_every is not None and module._held_by(optimizer)]


def _place(code: CodeType) -> tuple[str, int, str]:
    """Where a function is defined. Dynamo runs copies of code objects, which keep this."""
    return code.co_filename, code.co_firstlineno, code.co_name


# of the frame in which torch runs a step of an optimizer, with its hooks
_STEP = _place(Optimizer.profile_hook_step(lambda optimizer: None).__code__)


def _around(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of which a step in this thread runs this optimizer's step, without combined ones.

    Read from the stack: a count by hooks before and after a step would be wrong after a step that raises.
    """
    result: list[Optimizer] = []
    frame = sys._getframe().f_back
    while frame is not None:
        if _place(frame.f_code) == _STEP:
            result.append(frame.f_locals["args"][0])
        frame = frame.f_back
    return [outer for outer in result if outer is not optimizer and _parts(outer) == [outer]]


@untraced
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Runs after every step of every torch optimizer, see Note [Dynamic trivialisation]."""
    # the hook also runs for each part of a combined optimizer
    if not _modules or _parts(optimizer) != [optimizer] or _capturing():
        return
    moved = _moved_by(optimizer)
    if any(module._tied_without_base() is not None for module in moved):
        del moved
        gc.collect()  # the other module may be a discarded one in a reference cycle
        moved = _moved_by(optimizer)
        for module in moved:
            module._check_ties()
    for module in moved:
        module._stepped(optimizer)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


register_optimizer_step_post_hook(_after_step)


def _nearest_orthogonal(m: Tensor) -> Tensor:
    """The orthogonal polar factor of m [N,N], which is nearly orthogonal, by Newton-Schulz steps, each of which squares
    the error."""
    eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
    for _ in range(4):
        m = m + m @ (eye - m.mT @ m) / 2
    return m
