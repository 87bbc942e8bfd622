"""`ExpRNN`: a recurrence whose matrix is the exponential of a skew one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from orthokern.nn._exponential import INITS, OPTIMIZER_STATES, _Exponential
from orthokern.nn._recurrent import RecurrentOptions

__all__ = ["INITS", "OPTIMIZER_STATES", "ExpRNN"]


class ExpRNN(_Exponential):
    """An RNN whose recurrent matrix is the orthogonal W = B exp(A): h_t = phi(gain (W h_{t-1} + W_ih x_t + b)).

    A is skew, from the strictly lower triangle of a parameter, so any optimizer keeps W orthogonal with determinant 1
    (expRNN: Lezcano-Casado and Martinez-Rubio 2019, "Cheap orthogonal constraints in neural networks"). With
    `rebase_every`, exp(A) is merged into the base B at intervals (dynamic trivialisation: Lezcano-Casado 2019); see
    Note [Dynamic trivialisation] in ``orthokern/nn/_exponential.py``. The interface is that of
    orthokern.nn.FactorizedRNN.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device, dtype: as
            in orthokern.nn.FactorizedRNN. The literature uses nonlinearity="modrelu".
        init: of A, and so of W: "henaff", "cayley" or "torus", see orthokern.init.skew_generator_; "orthogonal": W
            uniform on the rotations; "identity": A = 0.
        max_angle: for init "henaff", "cayley" and "torus", the largest angle in radians by which W rotates per step, at
            most pi; None: the published one, pi, 1 and pi.
        rebase_every: K at least 1: move the base after every K-th step of the optimizer that trains A (any torch
            optimizer). None: never, W = exp(A) (for init "orthogonal", W = B exp(A) with the random B). Of modules that
            share skew_l0, base_l0 must be shared too, and again after a conversion that copies buffers.
        project_every: M at least 1: project the base to the orthogonal matrices every M moves.
        optimizer_state: the effect of a move on the state of the optimizers that train A: "transport" transforms first
            moments to gradients at the new base (Note [Optimizer state at a move] in the same file) and keeps second
            moments; "reset" deletes the state; "keep" keeps it, as the released code does.
        negative_slope, learned_h0, checkpoint_every, backend, precision, message_clip, gain: as in orthokern.nn.RNN.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N], skew_l0 [N,N], of which the
    strictly lower triangle is used; and slope_l0 [1], modrelu_bias_l0 [N], h0_l0 [N] as in orthokern.nn.RNN. Buffers:
    base_l0 [N,N]. The state_dict also has the counters of steps and moves.

    Raises InputError for a bad argument; in forward on a CPU for an A that is not finite or too large; and, with
    `rebase_every`, in a step of the optimizer for a skew parameter that is shared without its base.

    Example::

        >>> states, last = ExpRNN(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]))
    """

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
        self._set_up_exponential(init, rebase_every, project_every, optimizer_state, max_angle)
        self._build()

    def _composed(self, suffix: str) -> Tensor:
        return self._orthogonal(suffix)
