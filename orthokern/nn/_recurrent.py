"""The base class of the recurrences with one matrix: the arguments of their scan, and the loss with a linear readout.

Note [The basis that a module keeps]
    In a modal call the eigenvectors of W are refined from those of an earlier call, and rounding depends on that start.
    So the basis is part of a module's state. It changes only in a forward in training mode with gradients. It is in the
    state_dict as modal_basis_l0 once it exists, and loading a state_dict restores or removes it. It is an attribute of
    this name in the module, since torch.distributed.checkpoint resolves the keys of a state_dict. It is not a buffer,
    since load_state_dict would report a missing one. The same parameters, basis and inputs give bit-identical results,
    also after a resume and after any number of evaluations in between. A replica of torch.nn.DataParallel does not
    return its basis; DistributedDataParallel keeps it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from orthokern import _autocast, functional
from orthokern._activations import ACTIVATIONS
from orthokern._autocast import widened
from orthokern._scan_contract import ScanArgs, running, without_padding
from orthokern.errors import InputError, integer, number, one_of, require
from orthokern.nn._base import LayerOptions, Layers
from orthokern.nn._checks import above_zero, at_least_zero, check_backend, compute_weights, flag, share
from orthokern.nn._layouts import Dense, Resets
from orthokern.nn.activations import draw_start
from orthokern.ops._checks import describe
from orthokern.ops._scan import scan

NONLINEARITIES = tuple(ACTIVATIONS)
BASIS = "modal_basis_"
Factors = tuple[tuple[Tensor, ...], Tensor | None]  # of the matrix, and the bias

# torch 2.6 has no is_exporting: there, compiled programs keep all states, as exported ones do
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


class RecurrentOptions(LayerOptions, total=False):
    """The options that all modules with a scan of one matrix share; see orthokern.nn.RNN. Those that are annotated have
    a default and a check, (name, value) -> value."""

    nonlinearity: str
    learned_h0: Annotated[bool, False, flag]
    checkpoint_every: Annotated[int, 0, functools.partial(integer, minimum=0)]
    backend: Annotated[str | None, None, check_backend]
    precision: Annotated[str, "ieee", functools.partial(one_of, choices=functional.PRECISIONS)]
    message_clip: Annotated[float, 0.0, at_least_zero]
    gain: Annotated[float, 1.0, above_zero]
    negative_slope: Annotated[float, 0.01, number]
    leak: Annotated[float, 1.0, share]
    learned_leak: Annotated[bool, False, flag]
    noise: Annotated[float, 0.0, at_least_zero]
    noise_in_eval: Annotated[bool, False, flag]


_HINTS = get_type_hints(RecurrentOptions, include_extras=True)
OPTIONS = {name: hint.__metadata__ for name, hint in _HINTS.items() if get_origin(hint) is Annotated}
NOT_FROZEN = ("message_clip", "checkpoint_every", "noise", "noise_in_eval")  # a FrozenRNN has their defaults


class Recurrent(Layers):
    """Recurrences h_t = (1 - leak) h_{t-1} + leak phi(gain W h_{t-1} + W_ih x_t + b + noise). A subclass defines the
    recurrent matrix."""

    checkpoint_every: int
    precision: str
    message_clip: float
    gain: float
    negative_slope: float
    leak: float
    learned_leak: bool
    noise: float
    noise_in_eval: bool
    noise_generator: torch.Generator | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *args: Any,
        **options: Any,
    ) -> None:
        own = {name: options.pop(name, default) for name, (default, _) in OPTIONS.items()}
        super().__init__(input_size, hidden_size, num_layers, *args, **options)
        self.nonlinearity = one_of("nonlinearity", nonlinearity, NONLINEARITIES)
        if ACTIVATIONS[nonlinearity].pairs and self.hidden_size % 2:
            raise InputError(
                f"hidden_size must be even for nonlinearity {nonlinearity!r} (it works on pairs of units), "
                f"got {hidden_size}"
            )
        for name, (_, check) in OPTIONS.items():
            setattr(self, name, check(name, own[name]))
        if self.learned_leak and self.leak == 1.0:
            raise InputError(
                "leak is 1.0 with learned_leak; accepted: a start below 1, since leak is a logistic function"
            )

    # -- parameters

    def _shapes_of(self, suffix: str) -> dict[str, tuple[int, ...]]:
        N = self.hidden_size
        bias = {"bias": (N,)} if self.bias else {}
        return {"weight_ih": (N, self._inputs(suffix)), **bias, **self._matrix_shapes(), **self._common_shapes()}

    def _matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters of the matrix of one recurrence, by name without the suffix."""
        raise NotImplementedError

    def _common_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the activation, of the leak and of the initial state."""
        N, learned = self.hidden_size, ACTIVATIONS[self.nonlinearity].learned
        shapes: dict[str, tuple[int, ...]] = {}
        if learned is not None:
            shapes[str(learned.stem)] = (N if learned.per_unit else 1,)
        if self.learned_leak:
            shapes["leak_logit"] = (N,)
        return {**shapes, "h0": (N,)} if self.learned_h0 else shapes

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Reinitialize the parameters, as the class documentation says; `generator` as in RNN.reset_parameters."""
        for suffix in self._suffixes():
            self._draw_uniform(generator, f"weight_ih_{suffix}")
            if self.bias:
                nn.init.zeros_(self._tensor(f"bias_{suffix}"))
            self._reset_matrix(suffix, generator)
            self._reset_common(suffix, generator)

    def _reset_matrix(self, suffix: str, generator: torch.Generator | None) -> None:
        raise NotImplementedError

    def _reset_common(self, suffix: str, generator: torch.Generator | None) -> None:
        learned = ACTIVATIONS[self.nonlinearity].learned
        if learned is not None:
            draw_start(self._tensor(f"{learned.stem}_{suffix}"), learned, generator)
        if self.learned_leak:
            nn.init.constant_(self._tensor(f"leak_logit_{suffix}"), math.log(self.leak / (1.0 - self.leak)))
        if self.learned_h0:
            nn.init.zeros_(self._tensor(f"h0_{suffix}"))

    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """The matrix W [N,N] of one recurrence, without the gain, differentiable: a parameter of an RNN, U diag(s) V^T
        of a FactorizedRNN, B exp(A) of an ExpRNN, P Theta P^T of a NonNormalRNN."""
        return self._composed(self._suffix(layer, reverse))

    def recurrent_matrices(self) -> list[Tensor]:
        """`recurrent_matrix` of every recurrence, in the order l0, l0_reverse, l1, ..."""
        return [self._composed(suffix) for suffix in self._suffixes()]

    def _composed(self, suffix: str) -> Tensor:
        """The recurrent matrix [N,N] of one recurrence, without the gain, differentiable."""
        raise NotImplementedError

    def _text(self, **usual: Any) -> str:
        return super()._text(**{name: default for name, (default, _) in OPTIONS.items()}, **usual)

    # -- one recurrence

    def _gained(self, tensor: Tensor) -> Tensor:
        """A factor of the recurrent matrix, times the gain."""
        return tensor if self.gain == 1.0 else tensor * self.gain

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        """The recurrent matrix with the gain: (w,), or (u, s, v)."""
        return (self._gained(self._composed(suffix)),)

    def _bias(self, suffix: str) -> Tensor | None:
        """The sum of the biases."""
        return self._tensor(f"bias_{suffix}") if self.bias else None

    def _factors(self, suffix: str) -> Factors:
        """The matrix and the bias."""
        return self._matrix(suffix), self._bias(suffix)

    def _scan(self, suffix: str, *args: Any) -> Tensor:
        return scan(self._args(suffix, *args))

    def _args(
        self, suffix: str, factors: Factors, cuts: Resets | None, x: Tensor, h0: Tensor | None, lengths: Tensor | None
    ) -> Any:
        """The arguments of the scan of one recurrence."""
        matrix, bias = factors
        u, s, v = matrix if len(matrix) == 3 else (matrix[0], None, None)
        if not x.is_floating_point():
            x = x.to(torch.int64)
        options = {"bias": bias, **self._scan_options(suffix, lengths, cuts)}
        if cuts is not None and cuts.reset_state is None:
            options["reset_state"] = h0
        h0 = u.new_zeros(x.shape[1], u.shape[0]) if h0 is None else h0
        return ScanArgs(self._noisy(x, options), v, s, u, h0, **options)

    def _noisy(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        """x, or with noise the input term of x plus the noise [T,B,N]; options then have no weight and bias."""
        if self.noise == 0.0 or not (self.training or self.noise_in_eval):
            return x
        x = without_padding(x, running(x.shape[0], options["lengths"]))
        weight, bias = options["weight"], options["bias"]
        options["weight"] = options["bias"] = None
        term = self._weighted(x if x.is_floating_point() else x.to(torch.int64), weight, bias)
        return term + self.noise * torch.empty_like(term).normal_(generator=self.noise_generator)

    def _leak(self, suffix: str) -> Tensor | None:
        """The leak [1] or [N] of a scan."""
        if self.learned_leak:
            leak = torch.sigmoid(self._tensor(f"leak_logit_{suffix}"))
            return leak.clamp_min(torch.finfo(leak.dtype).tiny)
        return None if self.leak == 1.0 else self._tensor("weight_ih_l0").new_full((1,), self.leak)

    def _scan_options(self, suffix: str, lengths: Tensor | None, cuts: Resets | None) -> dict[str, Any]:
        """The arguments of a scan besides x, h0, the matrices and the bias, by name."""
        return {
            "weight": self._tensor(f"weight_ih_{suffix}"),
            "lengths": lengths,
            "message_clip": self.message_clip,
            "activation": self.nonlinearity,
            "act_param": self._act_param(suffix),
            # the number of checkpoints, ceil(T / k), would restrict an exported program to T > k
            "checkpoint_every": 0 if self.checkpoint_every and _is_exporting() else self.checkpoint_every,
            "backend": self.backend,
            "precision": self.precision,
            "resets": None if cuts is None else cuts.resets,
            "reset_state": None if cuts is None else cuts.reset_state,
            "leak": self._leak(suffix),
        }

    def _act_param(self, suffix: str) -> Tensor | None:
        parameter = ACTIVATIONS[self.nonlinearity].parameter
        if parameter is None:
            return None
        if parameter.stem is None:
            # not a buffer: state_dicts of torch have no such key, and a non-persistent one is lost by Module.to_empty
            return self._tensor("weight_ih_l0").new_full((1,), self.negative_slope)
        return self._tensor(f"{parameter.stem}_{suffix}")

    # -- the loss

    def loss(
        self,
        input: Tensor,
        readout: nn.Module,
        target: Tensor,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        reduction: str | None = None,
        algorithm: str = "auto",
        resets: Tensor | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of a linear readout of the last layer's states, which are not stored for all steps::

            loss, hits = rnn.loss(tokens, readout, targets)

        The loss is ``readout.loss(rnn(tokens)[0], targets)``, computed with less memory by the backend of this module.
        With nonlinearity "identity" it is also much faster: the recurrence then runs in the eigenbasis of its matrix,
        at O(N) a step, with the full gradient of every parameter (``orthokern.functional.scan_cross_entropy``;
        docs/modal.md). The eigenvectors are kept for the next call, and are part of the state_dict.

        Args:
            input: as in forward, but no PackedSequence; token ids may also be uint8 or int16.
            readout: a torch.nn.Linear or orthokern.nn.LinearCrossEntropy, N inputs, C classes.
            target: uint8, int16, int32 or int64, the shape of input without features, class ids in [0, C).
            hx: as in forward.
            lengths: int64 [B] in [1, T], the number of steps of each sequence; None: T for all. Later steps are
                ignored.
            reduction: "mean" over the steps that are not ignored, or "sum"; None: that of the readout, "mean"
                for a torch.nn.Linear.
            algorithm: of the last layer: "auto", "modal", "sequential" or "chunked" (on a GPU).
            resets, reset_state: as in forward; with resets the last layer uses the sequential scan.

        Returns:
            (loss, hits): the loss, 0-dim, in nats; int64 [T], the number of sequences whose largest logit at the step
            is that of the target.

        Raises:
            InputError: as forward; no sequences; a bidirectional module; "modal" if it is not possible.
            BackendUnavailable: no backend supports the call.
        """
        weight = self._tensor("weight_ih_l0")
        device = weight.device.type
        if _autocast.is_on(device):
            input, hx, reset_state = (widened(value, weight.dtype) for value in (input, hx, reset_state))
            options: dict[str, Any] = {"reduction": reduction, "algorithm": algorithm, "resets": resets}
            with torch.autocast(device, enabled=False):
                return self.loss(input, readout, target, hx, lengths=lengths, reset_state=reset_state, **options)
        for module in (self, readout):
            compute_weights(module)
        if self.bidirectional:
            raise InputError(
                "loss is for one direction; accepted for a bidirectional module: forward, then LinearCrossEntropy.loss"
            )
        if isinstance(input, PackedSequence):
            raise InputError("input of loss is a PackedSequence; accepted: a Tensor, with lengths=")
        data, batched = self._time_first(input, small_ids=True)
        ids = not data.is_floating_point()
        shape = input.shape if ids else input.shape[:-1]
        if not isinstance(target, Tensor) or target.shape != shape:
            raise InputError(f"target is {describe(target)}; accepted: a tensor of the shape {list(shape)}")
        target = self._transposed(target, batched)
        hx, cuts = self._checked_states(data, batched, hx, resets, reset_state)
        layout = Dense(data.shape[1], self._checked_lengths(lengths, data, batched))
        if self.num_layers > 1:
            if ids and data.dtype not in (torch.int64, torch.int32):
                data = data.to(torch.int64)
            data = self._layers(data, hx, layout, self.num_layers - 1, cuts)[0]
        suffix = self._suffix(-1, False)
        h0 = self._initial_state(suffix, hx, self.num_layers - 1, layout)
        matrix, arguments = self._loss_arguments(lengths, None if cuts is None else cuts.of(self.num_layers - 1))
        layer, bias = _weights_of(readout, self.hidden_size, weight.dtype)
        if reduction is None:
            reduction = getattr(readout, "reduction", "mean")
        arguments |= {"readout_bias": bias, "reduction": reduction, "algorithm": algorithm}
        result = functional.scan_cross_entropy(self._noisy(data, arguments), matrix, layer, target, h0, **arguments)
        if self.training and torch.is_grad_enabled() and result.basis is not None:
            setattr(self, BASIS + suffix, result.basis)
        return result.loss, result.hits

    def _loss_arguments(
        self, lengths: Tensor | None = None, cuts: Resets | None = None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The matrix of the last layer, and the other arguments of ``scan_cross_entropy`` that the module has."""
        suffix = self._suffix(-1, False)
        matrix, bias = self._factors(suffix)
        options = self._scan_options(suffix, lengths, cuts)
        del options["checkpoint_every"]
        basis: Tensor | None = getattr(self, BASIS + suffix, None)
        if basis is not None:  # no buffer, which would stay with the module
            basis = basis.to(self._tensor(f"weight_ih_{suffix}").device)
        return matrix, {"bias": bias, "basis": basis, **options}

    def explain_loss(
        self,
        T: int,
        B: int,
        classes: int,
        *,
        ids: bool = True,
        lengths: bool = False,
        resets: bool = False,
        algorithm: str = "auto",
    ) -> tuple[str, str]:
        """Which algorithm `loss` would use with the current parameters, and why.

        Args:
            T, B: time steps and sequences; classes: of the readout; each at least 1.
            ids: whether the input is token ids.
            lengths, resets: whether the call has these arguments.
            algorithm: the argument of the call.

        Returns:
            ("modal", a text with the condition of the eigenvectors) or ("sequential", a text with the reason);
            "chunked" as the first item for algorithm="chunked".

        Raises:
            InputError: a size below 1, an unknown algorithm, or one that is not possible for the call.
            BackendUnavailable: no backend supports the call.
        """
        with torch.no_grad():
            matrix, arguments = self._loss_arguments()
        options = {name: arguments[name] for name in ("activation", "message_clip", "backend", "basis")}
        options |= {"leak": arguments["leak"] is not None}
        return functional.explain_scan_cross_entropy(
            matrix,
            T,
            B,
            classes,
            ids=ids and self.num_layers == 1,
            lengths=lengths,
            resets=resets,
            algorithm=algorithm,
            **options,
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in (BASIS + suffix for suffix in self._suffixes()):
            if getattr(self, name, None) is not None:
                destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        (*_, unexpected, errors), N = args, self.hidden_size
        device = self._tensor("weight_ih_l0").device
        for name in (BASIS + suffix for suffix in self._suffixes()):
            vars(self).pop(name, None)
            basis = state_dict.get(prefix + name)
            if basis is None:
                continue
            if prefix + name in unexpected:
                unexpected.remove(prefix + name)
            shape = list(basis.shape) if isinstance(basis, Tensor) else []
            if len(shape) == 2 and shape[0] == N and shape[1] % 2 == 0 and N <= shape[1] <= 2 * N:
                if device.type != "meta":
                    setattr(self, name, basis.detach().to(device, torch.float64, copy=True))
            else:
                errors.append(
                    f"{prefix}{name} of shape {shape} is no basis of {N} units; "
                    f"accepted: [{N}, 2 M] with {N} <= 2 M <= {2 * N}"
                )


def _weights_of(readout: Any, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """weight [C, N] and bias [C] or None of a linear layer; checks what the functional does not check."""
    weight, bias = getattr(readout, "weight", None), getattr(readout, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != hidden:
        got = type(readout).__name__ if not isinstance(weight, Tensor) else f"a weight of shape {list(weight.shape)}"
        raise InputError(
            f"readout is {got}; accepted: a torch.nn.Linear or orthokern.nn.LinearCrossEntropy of {hidden} inputs"
        )
    require(weight.dtype == dtype, "readout", f"{dtype}, as the parameters of the recurrence", weight.dtype)
    return weight, bias
