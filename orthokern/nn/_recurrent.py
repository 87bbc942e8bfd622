"""The base class of the modules that replace torch.nn.RNN: layers, directions, layouts, initial states, the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from orthokern import _autocast, dispatch, functional
from orthokern._autocast import widened
from orthokern._scan_contract import ScanArgs
from orthokern.errors import InputError
from orthokern.nn import _loss
from orthokern.nn._base import Layers
from orthokern.nn._checks import (
    check_packed,
)
from orthokern.nn._layouts import Dense, Layout, Packed, Resets
from orthokern.ops._scan import scan

Factors = tuple[tuple[Tensor, ...], Tensor | None]  # of the matrix, and the bias

# torch 2.6 has no is_exporting: there, compiled programs keep all states, as exported ones do
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


class Recurrent(Layers):
    """Layers, directions, layouts and initial states. A subclass defines the recurrent matrix."""

    def frozen(self) -> Recurrent:
        """A copy for inference, in which everything that depends on parameters only is computed once.

        W is composed (the exponential of an ExpRNN or NonNormalRNN, the spectrum of a FactorizedRNN), biases are
        summed, and gains are multiplied in. Later changes of this module's parameters have no effect on the copy.

        Returns:
            An ``orthokern.nn.frozen.FrozenRNN`` (``FrozenGRU`` for a GRU): ``forward`` with the same arguments and
            results, and ``step(x, h)`` for one time step of a stream. Its tensors are buffers, without gradients, on
            the same device; dropout is off.

        Raises:
            orthokern.errors.OutOfRange, an InputError: the parameters are not finite, or too large for an exponential.

        Example::

            >>> rnn = orthokern.nn.ExpRNN(3, 8).frozen()
            >>> output, h = rnn.step(torch.randn(1, 3))  # [1, 8], [1, 1, 8]
        """
        from orthokern.nn.frozen import frozen

        return frozen(self)

    def _scan(
        self, suffix: str, factors: Factors, cuts: Resets | None, x: Tensor, h0: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        """The states [T,B,N] of one recurrence; factors: the result of `_factors`."""
        return scan(self._args(suffix, factors, cuts, x, h0, lengths))

    def _args(
        self, suffix: str, factors: Factors, cuts: Resets | None, x: Tensor, h0: Tensor | None, lengths: Tensor | None
    ) -> Any:
        """The arguments of the scan of one recurrence."""
        matrix, bias = factors
        u, s, v = matrix if len(matrix) == 3 else (matrix[0], None, None)
        if not x.is_floating_point():
            x = x.to(torch.int64)
        options = self._scan_options(suffix, lengths, cuts)
        if cuts is not None and cuts.reset_state is None:
            options["reset_state"] = h0
        h0 = u.new_zeros(x.shape[1], u.shape[0]) if h0 is None else h0
        return ScanArgs(x, v, s, u, h0, bias=bias, **options)

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        """The recurrent matrix with the gain: (w,), or (u, s, v)."""
        raise NotImplementedError

    def _bias(self, suffix: str) -> Tensor | None:
        """The sum of the biases, with the gain."""
        return self._gained(self._tensor(f"bias_{suffix}")) if self.bias else None

    def _factors(self, suffix: str) -> Factors:
        """The matrix and the bias."""
        return self._matrix(suffix), self._bias(suffix)

    def _op(self) -> tuple[str, dict[str, Any]]:
        """The op that `_scan` runs, and the sizes that a backend may limit."""
        return "dense_scan", {"N": self.hidden_size}

    def _serves_lengths(self) -> bool:
        """Whether the backend of this module's scans accepts lengths. The choice of "auto" does not depend on lengths:
        a GPU kernel that also computes padding is faster than the reference."""
        op, sizes = self._op()
        weight = self._tensor("weight_ih_l0")
        features = ("message_clip",) if self.message_clip > 0 else ()
        call = dispatch.Call(weight.device, weight.dtype, sizes, features=features)
        chosen = dispatch.choose(op, self.backend, call)
        return dispatch.has_feature(op, chosen, "lengths")

    def _scan_options(self, suffix: str, lengths: Tensor | None, cuts: Resets | None = None) -> dict[str, Any]:
        """The arguments of a scan besides x, h0, the matrices and the bias, by name."""
        return {
            "weight": self._gained(self._tensor(f"weight_ih_{suffix}")),
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
        }

    @overload
    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run all layers over a batch of sequences.

        Args:
            input: float [T,B,D] ([B,T,D] if batch_first), float [T,D] for one sequence without a batch, or token
                ids, int64 or int32, in [0, input_size): [T,B] ([B,T] if batch_first) or [T]. Ids select columns of
                the input weight, like a one-hot input, which is not materialised. Or a PackedSequence of any of these.
                Floats have the dtype of the parameters; under autocast, 16-bit floats are converted to it, so that a
                recurrence over thousands of steps keeps its states in float32.
            hx: [num_layers * directions, B, N] initial states in torch's order (layer, then direction), without B
                for one sequence; batch_first does not apply. None: the learned states if the module has them, else
                zeros. Learned states are not used if hx is given.
            resets: bool [T,B] ([B,T] if batch_first; [T] for one sequence), or None. Where it is true, every layer
                starts the step from its reset state instead of its previous state, as at the beginning of a new episode
                or document. No gradient flows from there to earlier steps. For a PackedSequence, resets has the shape
                of the padded batch, in the order in which the sequences were packed. Not for a bidirectional module.
            reset_state: the states that a reset sets, of the shape of hx; None: the initial states, which are hx,
                learned states or zeros. Pass zeros if hx is carried over from an earlier part of the sequences.

        Returns:
            (output, h_n): output [T,B,N * directions] ([B,T,..] if batch_first; no B for one sequence; packed for
            packed input), the states of the last layer; h_n [num_layers * directions, B, N], the last state of every
            recurrence (for the reverse direction the one at t = 0).

        Raises:
            InputError: wrong dimensions, sizes, dtype or device; ids out of range; T of zero.

        Example::

            >>> x, resets = torch.randn(100, 4, 3), torch.rand(100, 4) < 0.01  # True where a new episode begins
            >>> states, last = orthokern.nn.RNN(3, 8)(x, resets=resets)
        """
        weight = self._tensor("weight_ih_l0")
        device = weight.device.type
        if _autocast.is_on(device):
            input, hx, reset_state = (widened(value, weight.dtype) for value in (input, hx, reset_state))
            with torch.autocast(device, enabled=False):
                return self.forward(input, hx, resets=resets, reset_state=reset_state)
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, resets, reset_state)
        tokens = self._check_input(input)
        batched = input.dim() == (2 if tokens else 3)
        data = self._time_first(input, batched)
        if data.shape[0] < 1:
            raise InputError(f"input has T={data.shape[0]} and B={data.shape[1]}; accepted: at least 1 time step")
        hx = self._checked_hx(hx, data, batched)
        cuts = self._cuts(resets, reset_state, data.shape[:2], data.device, batched)
        if data.shape[1] == 0:
            output, h_n = self._run_empty(data, hx)
        else:
            output, h_n = self._run(data, hx, Dense(data.shape[1]), cuts)
        if not batched:
            return output.squeeze(1), h_n.squeeze(1)
        return (output.transpose(0, 1) if self.batch_first else output), h_n

    def _forward_packed(
        self, input: PackedSequence, hx: Tensor | None, resets: Tensor | None, reset_state: Tensor | None
    ) -> tuple[PackedSequence, Tensor]:
        self._check_input(input.data, packed=True)
        check_packed(input)
        layout = Packed(input.batch_sizes, input.data.device, self._serves_lengths())
        if hx is not None:
            self._check_hx(hx, layout.batch, input.data.device)
            if input.sorted_indices is not None:  # the caller's order -> order by decreasing length
                hx = hx.index_select(1, input.sorted_indices)
        cuts = self._cuts(resets, reset_state, (layout.steps, layout.batch), input.data.device, True)
        if cuts is not None and layout.overflow:
            raise InputError(
                f"resets of a PackedSequence need a backend with lengths; accepted for {self.backend!r}: a Tensor"
            )
        if cuts is not None and input.sorted_indices is not None:
            cuts = cuts.rows(input.sorted_indices)
        output, h_n = self._run(input.data, hx, layout, cuts)
        if input.unsorted_indices is not None:
            h_n = h_n.index_select(1, input.unsorted_indices)
        return PackedSequence(output, input.batch_sizes, input.sorted_indices, input.unsorted_indices), h_n

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

        computes ``readout.loss(rnn(tokens)[0], targets)`` with less memory, and by the backend of this module. With
        nonlinearity "identity" it is also much faster: the recurrence then runs in the eigenbasis of its matrix, at
        O(N) a step, with the full gradient of every parameter (``orthokern.functional.scan_cross_entropy``;
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
            algorithm: of the last layer: "auto", "modal", "sequential" or "chunked".
            resets, reset_state: as in forward; with resets the last layer uses the sequential scan.

        Returns:
            (loss, hits): the loss, 0-dim, in nats; int64 [T], the number of sequences whose largest logit at the step
            is that of the target.

        Raises:
            InputError: as forward; no sequences; a bidirectional module; "modal" where it is not possible.
        """
        weight = self._tensor("weight_ih_l0")
        device = weight.device.type
        if _autocast.is_on(device):
            input, hx, reset_state = (widened(value, weight.dtype) for value in (input, hx, reset_state))
            options: dict[str, Any] = {"reduction": reduction, "algorithm": algorithm, "resets": resets}
            with torch.autocast(device, enabled=False):
                return self.loss(input, readout, target, hx, lengths=lengths, reset_state=reset_state, **options)
        if self.bidirectional:
            raise InputError(
                "loss is for one direction; accepted for a bidirectional module: forward, then LinearCrossEntropy.loss"
            )
        if isinstance(input, PackedSequence):
            raise InputError("input of loss is a PackedSequence; accepted: a Tensor, with lengths=")
        tokens = self._check_input(input, small_ids=True)
        batched = input.dim() == (2 if tokens else 3)
        if not isinstance(target, Tensor) or target.shape != input.shape[: input.dim() - (not tokens)]:
            got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise InputError(f"target is {got}; accepted: a tensor of the shape of input without features")
        data, target = self._time_first(input, batched), self._time_first(target, batched)
        hx = self._checked_hx(hx, data, batched)
        cuts = self._cuts(resets, reset_state, data.shape[:2], data.device, batched)
        layout = Dense(data.shape[1], lengths)
        self._begin()
        if self.num_layers > 1:
            if tokens and data.dtype not in (torch.int64, torch.int32):
                data = data.to(torch.int64)
            data = self._layers(data, hx, layout, self.num_layers - 1, cuts)[0]
        suffix = self._suffix(-1, False)
        h0 = self._initial_state(suffix, hx, self.num_layers - 1, layout)
        matrix, arguments = self._loss_arguments(lengths, None if cuts is None else cuts.of(self.num_layers - 1))
        result = _loss.loss(readout, target, data, matrix, h0, reduction=reduction, algorithm=algorithm, **arguments)
        if self.training and torch.is_grad_enabled() and result.basis is not None:
            setattr(self, _loss.KEY + suffix, result.basis)
        return result.loss, result.hits

    def _loss_arguments(
        self, lengths: Tensor | None = None, cuts: Resets | None = None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The matrix of the last layer, and the other arguments of ``scan_cross_entropy`` that the module has."""
        suffix = self._suffix(-1, False)
        matrix, bias = self._factors(suffix)
        options = self._scan_options(suffix, lengths, cuts)
        del options["checkpoint_every"]
        return matrix, {"bias": bias, "basis": getattr(self, _loss.KEY + suffix, None), **options}

    def _last_step_norms(self, data: Tensor, readout: nn.Module, target: Tensor, algorithm: str) -> Tensor | None:
        """See ``_loss.last_step_norms``, for data [T, B] or [T, B, D] and target [T, B]; None for several layers."""
        if self.num_layers > 1:
            return None
        matrix, arguments = self._loss_arguments()
        h0 = self._initial_state(self._suffix(-1, False), None, 0, Dense(data.shape[1], None))
        return _loss.last_step_norms(readout, target, data, matrix, h0, algorithm=algorithm, **arguments)

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
            ("modal", the condition of the eigenvectors) or ("sequential", why not modal), each as a phrase; "chunked"
            as the first item for algorithm="chunked".

        Raises:
            InputError: a size below 1, an unknown algorithm, or one that is not possible for the call.
        """
        with torch.no_grad():
            matrix, arguments = self._loss_arguments()
        options = {name: arguments[name] for name in ("activation", "message_clip", "backend", "basis")}
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

    def _begin(self) -> None:
        """Called before the layers run."""

    def _initial_state(self, suffix: str, hx: Tensor | None, index: int, layout: Layout) -> Tensor | None:
        """h0 [B,N] of one recurrence, the index-th of hx."""
        if hx is not None:
            return hx[index]
        return self._tensor(f"h0_{suffix}").expand(layout.batch, self.hidden_size) if self.learned_h0 else None

    def _run(
        self, data: Tensor, hx: Tensor | None, layout: Layout, cuts: Resets | None = None
    ) -> tuple[Tensor, Tensor]:
        self._begin()
        data, last = self._layers(data, hx, layout, self.num_layers, cuts)
        return data, torch.stack(last)

    def _run_empty(self, data: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_run` of no sequences: empty results, whose gradients are zeros, as torch's are."""
        N, ways = self.hidden_size, 2 if self.bidirectional else 1
        read = [t for t in (data, hx, *self.parameters()) if t is not None and t.is_floating_point()]
        nothing = torch.stack([t.flatten()[:0].sum() for t in read]).sum()  # 0, with a gradient of zeros for all
        return nothing.expand(len(data), 0, ways * N), nothing.expand(self.num_layers * ways, 0, N)

    def _layers(
        self, data: Tensor, hx: Tensor | None, layout: Layout, count: int, cuts: Resets | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the first `count` layers. Returns the input of the next one, and the last states."""
        last: list[Tensor] = []
        ways = (False, True) if self.bidirectional else (False,)
        for layer in range(count):
            outputs: list[Tensor] = []
            for reverse in ways:
                suffix = self._suffix(layer, reverse)
                h0 = self._initial_state(suffix, hx, len(last), layout)
                own = None if cuts is None else cuts.of(len(last))
                scan = functools.partial(self._scan, suffix, self._factors(suffix), own)
                output, end = layout.run(scan, data, h0, reverse)
                outputs.append(output)
                last.append(end)
            data = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout > 0.0 and self.training and layer + 1 < self.num_layers:
                data = nn.functional.dropout(data, self.dropout, training=True)
        return data, last

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _loss.save(self, self._suffixes(), destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        *_, unexpected, errors = args
        _loss.load(self, self._suffixes(), self.hidden_size, state_dict, prefix, unexpected, errors)
