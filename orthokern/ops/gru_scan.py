"""gru_scan: a gated recurrent unit over a sequence, in two variants of the reset gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import GRU_FEATURES, GRU_VARIANTS, GruArgs, GruGradients, GruStates, split_tensors
from orthokern.dispatch import Support
from orthokern.errors import InputError
from orthokern.ops._checks import gru_args
from orthokern.ops._recurrence import Recurrence

VARIANTS = GRU_VARIANTS

_GPU: dict[str, Any] = {"devices": ("cuda",), "features": GRU_FEATURES, "capability": (8, 0)}
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=GRU_FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=GRU_FEATURES),
    "triton": Support(dtypes=(torch.float64, torch.float32), limits={"N": 128}, **_GPU),
    "cuda": Support(dtypes=(torch.float32,), **_GPU),
}


def gru_scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    variant: str = "kanai",
    backend: str | None = None,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> Tensor:
    """A gated recurrent unit over a sequence; z = 1 keeps the state: h_t = z_t h_{t-1} + (1 - z_t) n_t.

    Equation:
        With (x_r, x_z, x_n) the three blocks of x_t, W_r, W_z, W_n and b_r, b_z, b_n those of w and bias, s the
        logistic function and * elementwise:
        r_t = s(x_r + W_r h_{t-1} + b_r),    z_t = s(x_z + W_z h_{t-1} + b_z)
        n_t = tanh(x_n + W_n (r_t * h_{t-1}) + b_n)        variant "kanai": Kanai et al. 2017, eq. 4
            = tanh(x_n + r_t * (W_n h_{t-1} + b_n))        variant "torch": torch.nn.GRU, cuDNN
        h_t = z_t * h_{t-1} + (1 - z_t) * n_t.
        z = 1 keeps the state in both variants, as in Kanai et al., eq. 3, in torch and in Cho et al. 2014 (others
        exchange z and 1 - z). With lengths, h_t = 0 for t > lengths[b].
        With resets, h_{t-1} is reset_state where resets_t is true.
        Backward: Note [GRU scan backward] in ``orthokern/reference/gru_scan.py``.

    Args:
        x: [T, B, 3N], the input terms of the reset gate, the update gate and the candidate, in this order.
        w: [3N, N], their recurrent weights, as torch's weight_hh. All floating tensors have its dtype.
        h0: [B, N], zeros if None.
        bias: [3N], recurrent biases, or None.
        variant: "kanai" (the default here, not in orthokern.nn.GRU): the reset gate multiplies the state before W_n
            (Kanai et al. 2017, eq. 4); "torch": it multiplies W_n h + b_n, as in torch.nn.GRU and cuDNN.
        backend: see ``orthokern.functional``.
        lengths: int64 [B] or None, the number of steps of each sequence, as in ``factored_scan``.
        resets, reset_state: bool [T, B] and [B, N], or None, as in ``factored_scan``.

    Returns:
        hs [T, B, N], the states h_1 ... h_T; zeros after lengths[b] steps. Differentiable in x, w, h0, bias and
        reset_state.

    Raises:
        InputError: wrong shapes, dtypes, devices, variant, lengths or resets.
        BackendUnavailable: the requested backend does not support the call.

    Saved:
        hs [T, B, N], gates [T, B, 3N] (r, z, n), pre [T, B, N] (W_n h_{t-1} + b_n; variant "torch" only), all zero on
        padding, w, h0, bias, lengths, resets and reset_state.
        While a tap is open, the backward op computes the norms over [B, N] of dL/dh_t, see ``_taps``.

    Cost:
        Forward 6 T B N^2 flops, backward scan the same, gradient of w the same. Forward reads 3 T B N elements and
        writes 4 T B N (5 in variant "torch"); backward reads 5 T B N (6) and writes 3 T B N, and T B N more for the
        gradient of W_n. With lengths, the cpu backend's scans skip padding in a batch sorted by decreasing length; in
        another order products include all rows up to the last sequence that has not ended.

    Numerics:
        Accumulation in the dtype of w, fixed order of sums in the scans: bit-identical results for the same inputs,
        machine and thread count. The gradients of w and bias are torch's products and sums over all steps. The logistic
        function is computed as 1 / (1 + exp(-a)); its relative error is small unless the result underflows.

    Example::

        >>> gru_scan(torch.randn(100, 4, 24), torch.randn(24, 8) / 8).shape
        torch.Size([100, 4, 8])
    """
    args = GruArgs(x, w, h0, bias, variant, backend, lengths, resets, reset_state)  # type: ignore[arg-type]
    return scan(gru_args(args))


class _GruOp(Recurrence):
    arguments, gradients, others = GruArgs, GruGradients, ("gates", "pre")
    saved = "Tensor hs", "Tensor gates", "Tensor? pre"

    def _forward_fake(self, *fields: Any) -> tuple[Tensor, ...]:
        args: Any = GruArgs(*fields)
        T, (B, N), new = args.x.shape[0], args.h0.shape, args.w.new_empty
        return new(T, B, N), new(T, B, 3 * N), new(0) if args.kanai else new(T, B, N)

    def _of_backend(self, args: GruArgs, saved: tuple[Any, ...]) -> tuple[Any, ...]:
        hs, gates, pre = saved
        if pre is None and not args.kanai:
            raise InputError('gru_scan_bwd: pre is None: it is needed in variant "torch"')
        return (GruStates(hs, gates, None if args.kanai else pre),)

    def _shape_of_x(self, args: GruArgs, grad_hs: Tensor) -> Any:
        T, B, N = grad_hs.shape
        return T, B, 3 * N

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        args, pre = GruArgs(*inputs), output[2]
        if args.kanai and pre is not None:
            ctx.mark_non_differentiable(pre)  # gates, and pre in variant "torch", have gradients in a second derivative
        ctx.set_materialize_grads(False)
        ctx.options, tensors = split_tensors(args._replace(x=None))
        ctx.save_for_backward(*output, *tensors)


scan = _GruOp("gru_scan", SUPPORT)
